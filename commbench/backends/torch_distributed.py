"""gloo and nccl through torch.distributed: the calls that training makes."""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import socket
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from commbench.backends.base import BackendError, Context
from commbench.backends.forcing import nccl_environment, nccl_function, nccl_name
from commbench.cases import Case
from commbench.measure.data import Pattern
from commbench.measure.operation import Operation, Post
from commbench.measure.timed import Loop
from commbench.models.nccl import NcclInputs, nccl_estimate
from commbench.provenance.env import collect_env
from commbench.provenance.nccl_choices import NcclLogFile
from commbench.provenance.nccl_tuner import VARIABLE, GraphDump, nccl_variable, processor, tuner_inputs

# The control plane has its own deadlines, which name ranks; torch's must not strike first.
TIMEOUT = datetime.timedelta(hours=1)
_OPS = {
    "sum": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG, "band": dist.ReduceOp.BAND, "bor": dist.ReduceOp.BOR, "bxor": dist.ReduceOp.BXOR,
}  # fmt: skip
# What a messenger adds itself.
_LOCAL_OPS: dict[str, Callable[..., Any]] = {
    "sum": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}  # fmt: skip
# torch 2.13 renamed both; the old names warn there and the new ones are missing before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# In torch these calls have one tensor that is both input and output.
_ONE_BUFFER = ("all_reduce", "broadcast", "reduce")
# Of a sweep's types those that torch maps to no type of NCCL's (torch 2.13, NCCLUtils.hpp, ncclDataType).
_NOT_IN_NCCL = ("uint32", "uint64")
# NCCL's own words: "FP8 reduction support begins with sm90 capable devices".
_FP8_REDUCTIONS = (9, 0)
_LISTS_PER_FUNCTION = 22400  # NCCL 2.24 takes NCCL_ALGO for one function


class _TorchDistributed:
    """What gloo and nccl share. Tensors live on ``self.device``."""

    name = ""
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], Any] = {}
        self._joined: set[tuple[tuple[int, ...], ...]] = set()

    def start(self, context: Context) -> None:
        self._prepare(context)
        store = _store(context)
        self._compare(context, store)
        dist.init_process_group(
            self.name, store=store, rank=context.rank, world_size=context.world, timeout=TIMEOUT, **self._init_options()
        )
        everyone = tuple(range(context.world))
        self._groups[everyone] = dist.group.WORLD
        self._joined.add((everyone,))

    def _prepare(self, context: Context) -> None:
        raise NotImplementedError

    def _compare(self, context: Context, store: Any) -> None:
        """What the ranks must tell one another before they make a process group."""

    def _init_options(self) -> dict[str, Any]:
        return {}

    def version(self) -> str:
        return f"torch {torch.__version__}"

    def settings(self) -> dict[str, str]:
        raise NotImplementedError

    def why_not(self, case: Case) -> str | None:
        if not hasattr(torch, case.dtype):
            return f"torch has no type {case.dtype}"
        return None

    def note(self, case: Case) -> str | None:
        if case.collective in _ONE_BUFFER and case.placement == "out":
            return f"torch.distributed.{case.collective} has one tensor: it is always in place"
        return None

    def why_not_forced(self, collective: str) -> str | None:
        return None

    def chosen(self, case: Case) -> list[tuple[str, str]] | None:
        return None

    def estimate(self, case: Case, members: tuple[int, ...]) -> float | None:
        return None

    def join(self, groups: tuple[tuple[int, ...], ...]) -> None:
        if groups in self._joined:
            return
        self._joined.add(groups)
        for members in groups:  # every rank must make every group, also those that it is not in
            self._groups[members] = dist.new_group(list(members), timeout=TIMEOUT)

    def operation(self, case: Case, members: tuple[int, ...], pattern: Pattern) -> Operation:
        given, taken, buffers, repeatable = _tensors(case, pattern, self.device)
        mine, got = map(_byte_view, buffers)
        return self._operation(self._call(case, members, given, taken), mine, got, repeatable)

    def _operation(
        self, call: Callable[[], Any], given: torch.Tensor, taken: torch.Tensor, repeatable: bool
    ) -> Operation:
        """The operation that ``call`` performs on tensors of bytes that hold this rank's input and output."""
        raise NotImplementedError

    def loop(self, case: Case) -> Loop | None:
        return None

    def messenger(self, members: tuple[int, ...]) -> TorchMessenger:
        raise NotImplementedError

    def why_not_reduce(self, dtype: str, op: str) -> str | None:
        """torch's own answer, to one element."""
        if op not in _LOCAL_OPS or not hasattr(torch, dtype):
            return f"messages over {self.name} are reduced by torch, which has no {op!r} of two {dtype}"
        one = torch.zeros(8, dtype=torch.uint8, device=self.device).view(getattr(torch, dtype))
        try:
            _LOCAL_OPS[op](one, one, out=one)
        except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
            return f"messages over {self.name} are reduced by torch, which has no {op!r} of two {dtype}"
        return None

    def device_memory(self) -> int | None:
        return None

    def stop(self) -> None:
        dist.destroy_process_group()

    def _finish(self) -> None:
        """Wait until everything that was enqueued is complete."""

    def _call(self, case: Case, members: tuple[int, ...], given: Any, taken: Any) -> Callable[[], Any]:
        """The torch call for a case; ``given`` and ``taken`` are this rank's tensors (the same where it is one)."""
        group = self._groups[members]
        rank = dist.get_rank(group)
        size = len(members)
        at_root = rank == case.root
        op = _OPS[case.reduce_op] if case.reduce_op else None
        root = members[case.root]
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(dist.all_reduce, taken, op=op, group=group),
            "all_gather": partial(_all_gather, taken, given, group=group),
            "reduce_scatter": partial(_reduce_scatter, taken, given, op=op, group=group),
            "all_to_all": partial(dist.all_to_all_single, taken, given, group=group),
            "broadcast": partial(dist.broadcast, taken, src=root, group=group),
            "reduce": partial(dist.reduce, given, dst=root, op=op, group=group),
            "gather": partial(
                dist.gather, given, list(taken.chunk(size)) if at_root else None, dst=root, group=group
            ),
            "scatter": partial(
                dist.scatter, taken, list(given.chunk(size)) if at_root else None, src=root, group=group
            ),
            "send_recv": partial(
                _shift, given, members[(rank + 1) % size], taken, members[(rank - 1) % size], group
            ),
            "barrier": partial(dist.barrier, group=group, **self._barrier_options()),
        }  # fmt: skip
        return calls[case.collective]

    def _barrier_options(self) -> dict[str, Any]:
        return {}


class Gloo(_TorchDistributed):
    """gloo on host memory."""

    name = "gloo"

    def _prepare(self, context: Context) -> None:
        # gloo would look the host's name up, and listen wherever that leads.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", context.interface)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

    def settings(self) -> dict[str, str]:
        return {"threads": str(torch.get_num_threads()), "interface": os.environ["GLOO_SOCKET_IFNAME"]}

    def why_not(self, case: Case) -> str | None:
        if case.reduce_op == "avg":
            return "gloo has no reduce operation 'avg'"
        return super().why_not(case)

    def note(self, case: Case) -> str | None:
        if case.collective == "reduce_scatter":
            return "torch's gloo performs reduce_scatter by an all_reduce: it moves twice the bytes"
        return super().note(case)

    def _operation(
        self, call: Callable[[], Any], given: torch.Tensor, taken: torch.Tensor, repeatable: bool
    ) -> Operation:
        return Operation(run=call, enqueue=call, input=given.numpy(), output=taken.numpy(), repeatable=repeatable)

    def messenger(self, members: tuple[int, ...]) -> TorchMessenger:
        return TorchMessenger(self, members)


class Nccl(_TorchDistributed):
    """NCCL on one CUDA device a rank, timed by the host's clock: a time holds the launch and the wait for the device.

    Calls are made without ``async_op``: torch enqueues them on the current stream, or on one of its own that the
    current stream waits for, and the host goes on. Only a barrier makes the host wait.
    """

    name = "nccl"

    def __init__(self) -> None:
        super().__init__()
        self._capability = (0, 0)  # the least of all ranks' devices
        self._log: NcclLogFile | None = None
        self._dump: GraphDump | None = None  # at rank 0
        self._inputs_of: Callable[..., NcclInputs] | None = None
        self._tuner: NcclInputs | str | None = None  # None until it is asked for

    def _prepare(self, context: Context) -> None:
        if not (torch.cuda.is_available() and dist.is_nccl_available()):
            raise BackendError(
                f"torch {torch.__version__} sees no GPU, or has no NCCL: install a CUDA build of torch and check "
                "CUDA_VISIBLE_DEVICES"
            )
        count = torch.cuda.device_count()
        # A launcher that binds GPUs shows each rank its own one only, as number 0.
        index = context.local_rank if count > 1 else 0
        if index >= count:
            raise BackendError(
                f"rank {context.rank} is local rank {index}, but its host has {count} GPUs: start at most one rank a GPU"
            )
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        if context.forced:
            lists = _nccl_version_code() >= _LISTS_PER_FUNCTION
            os.environ.update(nccl_environment(context.forced, per_function=lists))
            self._log = NcclLogFile(os.environ)
        # Calibration sends one message at a time on purpose.
        warnings.filterwarnings("ignore", message=".*unbatched P2P op")

    def _compare(self, context: Context, store: Any) -> None:
        """One device a rank: NCCL says of a shared one no more than "invalid usage"."""
        mine = torch.cuda.get_device_properties(self.device)
        store.set(f"device/{context.rank}", json.dumps([str(mine.uuid), mine.major, mine.minor, processor()]))
        if context.rank == 0:
            found = [json.loads(store.get(f"device/{rank}")) for rank in range(context.world)]
            shared = _shared_device([(context.hosts[rank], device[0]) for rank, device in enumerate(found)])
            store.set("devices", json.dumps([shared, *min(device[1:3] for device in found)]))
            self._inputs_of = partial(
                tuner_inputs, hosts=context.hosts,
                capabilities=[10 * major + minor for _, major, minor, _ in found],
                processors=[(architecture, vendor) for *_, (architecture, vendor) in found],
            )  # fmt: skip
        error, major, minor = json.loads(store.get("devices"))
        if error:
            raise BackendError(error)
        self._capability = (major, minor)
        # Not before: a start that fails above leaves no file behind.
        if context.rank == 0 and torch.version.hip is None:  # RCCL's tuner is another one
            self._dump = GraphDump(os.environ)

    def _init_options(self) -> dict[str, Any]:
        return {"device_id": self.device}

    def version(self) -> str:
        return f"NCCL {_nccl_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}"

    def settings(self) -> dict[str, str]:
        chosen = {k: v for k, v in collect_env(os.environ).items() if k.startswith(("NCCL_", "TORCH_NCCL_"))}
        if self._log is not None:
            chosen.pop("NCCL_DEBUG_FILE")
        if self._dump is not None:
            tuner = self._tuner_inputs(self._dump)
            if self._dump.private:
                chosen.pop(VARIABLE)
            if isinstance(tuner, str):
                chosen["nccl graphs"] = tuner
        return {"device": torch.cuda.get_device_name(self.device), **chosen}

    def _tuner_inputs(self, dump: GraphDump) -> NcclInputs | str:
        """Those of the communicator of all ranks, or why there are none.

        The first call, for ``settings``, reads the graphs: it must come before ``join``, since those of the next
        communicator take their place.
        """
        if self._tuner is None:
            assert self._inputs_of is not None
            try:
                self._tuner = self._inputs_of(dump.graphs())
            except ValueError as error:
                self._tuner = str(error)
            if nccl_variable("NCCL_COLLNET_ENABLE") not in (None, "", "0"):
                self._tuner = "do not tell whether NCCL_COLLNET_ENABLE is in effect"
        return self._tuner

    def estimate(self, case: Case, members: tuple[int, ...]) -> float | None:
        tuner = None if self._dump is None else self._tuner_inputs(self._dump)
        if not isinstance(tuner, NcclInputs) or members != tuple(range(tuner.ranks)):
            return None
        try:
            return nccl_estimate(
                case.collective, case.bytes, tuner, version=_nccl_version(), algo=nccl_variable("NCCL_ALGO"),
                proto=nccl_variable("NCCL_PROTO"), dtype=case.dtype, reduce_op=case.reduce_op,
            ).seconds  # fmt: skip
        except ValueError:  # a version that is not modelled, or a list that NCCL refuses
            return None

    def why_not(self, case: Case) -> str | None:
        if case.reduce_op in ("band", "bor", "bxor"):
            return f"NCCL has no reduce operation {case.reduce_op!r}"
        if case.dtype in _NOT_IN_NCCL:
            return f"torch's NCCL has no type {case.dtype}"
        if case.reduce_op and case.dtype.startswith("float8") and self._capability < _FP8_REDUCTIONS:
            least = ".".join(map(str, self._capability))
            return f"NCCL reduces {case.dtype} from compute capability 9.0 on, and a GPU of this job has {least}"
        return super().why_not(case)

    def note(self, case: Case) -> str | None:
        timed = {
            "isolated": "timed by the host's clock: launch and wait for the device are included",
            "streamed": "timed by the host's clock: all launches and one wait for the device are included",
        }[case.timing]
        if case.collective == "barrier":
            timed = "timed by the host's clock: torch's barrier makes the host wait for the device every time"
        return "; ".join(filter(None, (timed, super().note(case))))

    def chosen(self, case: Case) -> list[tuple[str, str]] | None:
        if self._log is None:
            return None
        return sorted(
            {
                (nccl_name(choice.algorithm), nccl_name(choice.protocol))
                for choice in self._log.choices()
                if choice.function in (None, nccl_function(case.collective))
                and choice.message_bytes(case.ranks) == case.bytes
            }
        )

    def stop(self) -> None:
        super().stop()
        if self._log is not None:
            self._log.close()
        if self._dump is not None:
            self._dump.close()

    def _operation(
        self, call: Callable[[], Any], given: torch.Tensor, taken: torch.Tensor, repeatable: bool
    ) -> Operation:
        device = (given, taken)
        host = [torch.empty(view.numel(), dtype=torch.uint8, pin_memory=True) for view in device]

        def upload() -> None:
            # The poisoned output goes first: in place, the input is a part of it.
            device[1].copy_(host[1])
            device[0].copy_(host[0])

        def run() -> None:
            call()
            torch.cuda.synchronize(self.device)

        return Operation(
            run=run, enqueue=call, finish=self._finish, input=host[0].numpy(), output=host[1].numpy(), upload=upload,
            download=partial(host[1].copy_, device[1]), repeatable=repeatable,
        )  # fmt: skip

    def messenger(self, members: tuple[int, ...]) -> TorchMessenger:
        return NcclMessenger(self, members)

    def device_memory(self) -> int | None:
        # What torch keeps of earlier cases it gives back before it fails.
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + kept

    def _finish(self) -> None:
        torch.cuda.synchronize(self.device)

    def _barrier_options(self) -> dict[str, Any]:
        return {"device_ids": [self.device.index]}


class TorchMessenger:
    """Messages of bytes over one process group."""

    def __init__(self, backend: _TorchDistributed, members: tuple[int, ...]) -> None:
        self._backend = backend
        self._members = members
        self._group = backend._groups[members]

    def buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self._backend.device)

    def step(self, sends: Sequence[Post], receives: Sequence[Post]) -> Callable[[], Any]:
        # What dist.isend and irecv do, without their checks.
        post = [partial(self._group.recv, [one.memory], one.peer, one.tag) for one in receives]
        post += [partial(self._group.send, [one.memory], one.peer, one.tag) for one in sends]

        def exchange() -> None:
            for work in [begin() for begin in post]:
                work.wait()

        return exchange

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], Any]:
        return partial(target.copy_, source)

    def reduce(
        self, target: torch.Tensor, left: torch.Tensor, right: torch.Tensor, dtype: str, op: str
    ) -> Callable[[], Any]:
        kind: torch.dtype = getattr(torch, dtype)
        return partial(_LOCAL_OPS[op], left.view(kind), right.view(kind), out=target.view(kind))

    def finish(self) -> None:
        self._backend._finish()

    def operation(
        self, call: Callable[[], Any], given: torch.Tensor, taken: torch.Tensor, repeatable: bool
    ) -> Operation:
        return self._backend._operation(call, given, taken, repeatable)


class NcclMessenger(TorchMessenger):
    """A step is one NCCL group call on the device's stream; the host only enqueues it."""

    def step(self, sends: Sequence[Post], receives: Sequence[Post]) -> Callable[[], Any]:
        # Nobody promises that NCCL carries an empty message: a byte stands in for it. It has no tags: order decides.
        posts = [
            dist.P2POp(act, one.memory if one.memory.numel() else self.buffer(1), self._members[one.peer], self._group)
            for act, ones in ((dist.irecv, receives), (dist.isend, sends))
            for one in ones
        ]
        if not posts:
            return lambda: None

        def exchange() -> None:
            for work in dist.batch_isend_irecv(posts):
                work.wait()

        return exchange


def _shift(given: torch.Tensor, to: int, taken: torch.Tensor, source: int, group: Any) -> None:
    both = [dist.P2POp(dist.isend, given, to, group), dist.P2POp(dist.irecv, taken, source, group)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def _tensors(
    case: Case, pattern: Pattern, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor], bool]:
    """Given and taken tensors for the call, those that hold this rank's input and output, and whether it may repeat."""
    dtype: torch.dtype = getattr(torch, case.dtype)

    def zeros(elements: int) -> torch.Tensor:
        return torch.zeros(elements * case.itemsize, dtype=torch.uint8, device=device).view(dtype)

    if case.placement == "in" or case.collective in _ONE_BUFFER:
        elements, source, target = pattern.in_place_slices()
        buffer = zeros(elements)
        given, taken = buffer[source], buffer[target]
        if case.collective in _ONE_BUFFER:
            return buffer, buffer, (given, taken), not case.spec.reduces
        return given, taken, (given, taken), not case.spec.reduces
    given, taken = zeros(pattern.input_elements), zeros(pattern.output_elements)
    return given, taken, (given, taken), True


def _shared_device(devices: list[tuple[str, str]]) -> str | None:
    """What is wrong where two ranks have one device; ``devices[rank]`` is (host, the device's UUID)."""
    first: dict[tuple[str, str], int] = {}
    for rank, device in enumerate(devices):
        if first.setdefault(device, rank) != rank:
            return f"ranks {first[device]} and {rank} on {device[0]} have the same GPU: start at most one rank a GPU"
    return None


def _nccl_version() -> str:
    major, rest = divmod(_nccl_version_code(), 10000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _nccl_version_code() -> int:
    """NCCL_VERSION (nccl.h, from 2.9 on) of the NCCL that is loaded, or, where it is linked into torch, that torch was
    built with. They can differ, since NCCL comes in a package of its own; torch.cuda.nccl.version() is the latter.
    """
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
        return int(major * 10000 + minor * 100 + patch)
    return number.value


def _byte_view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8, device=tensor.device)


def _store(context: Context) -> Any:
    """torch's rendezvous on the job's own interface: left alone it would listen on every one."""
    listener = None
    if context.rank == 0:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((context.address, 0))
        listener.listen(max(16, context.world))
    port = context.share([context.address, listener.getsockname()[1]] if listener else None)
    options: dict[str, Any] = {"world_size": context.world, "timeout": datetime.timedelta(seconds=60)}
    if listener is not None:
        options["master_listen_fd"] = listener.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dist.TCPStore(port[0], port[1], is_master=context.rank == 0, **options)  # type: ignore[attr-defined]
