"""What gloo and nccl share: torch.distributed's calls, which are those that training makes."""

from __future__ import annotations

import datetime
import socket
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from commbench.backends.base import Context
from commbench.backends.forcing import Chosen
from commbench.cases import Case
from commbench.measure.data import Pattern
from commbench.measure.operation import Operation, Post, in_order, rotate
from commbench.measure.timed import Loop

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


class TorchDistributed:
    """What gloo and nccl share. Tensors live on ``self.device``."""

    name = ""
    process_group = ""  # what torch calls the library, where that is not the name
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], Any] = {}
        self._joined: set[tuple[tuple[int, ...], ...]] = set()

    def start(self, context: Context) -> None:
        self._prepare(context)
        store = _store(context)
        self._compare(context)
        dist.init_process_group(
            self.process_group or self.name,
            store=store,
            rank=context.rank,
            world_size=context.world,
            timeout=TIMEOUT,
            **self._init_options(),
        )
        everyone = tuple(range(context.world))
        self._groups[everyone] = dist.group.WORLD
        self._joined.add((everyone,))

    def _prepare(self, context: Context) -> None:
        raise NotImplementedError

    def _compare(self, context: Context) -> None:
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

    def chosen(self, case: Case, operation: Operation | None) -> list[Chosen] | None:
        return None

    def tainted(self) -> str | None:
        return None

    def gpu(self) -> str | None:
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

    def all_to_all_v(self, members: tuple[int, ...]) -> TorchAllToAllV:
        return TorchAllToAllV(self, members)

    def expert_library(self, members: tuple[int, ...]) -> None:
        return None

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


class TorchMessenger:
    """Messages of bytes over one process group."""

    def __init__(self, backend: TorchDistributed, members: tuple[int, ...]) -> None:
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
        self, calls: Sequence[Callable[[], Any]], given: torch.Tensor, taken: torch.Tensor, repeatable: bool
    ) -> Operation:
        return self._backend._operation(in_order(calls), given, taken, repeatable)

    def repeat(self, sets: Sequence[Sequence[Callable[[], Any]]]) -> Callable[[int], Any]:
        return rotate(sets)


class TorchAllToAllV:
    """``dist.all_to_all_single`` with a size for every pair, as training calls it; the call returns before it is done."""

    def __init__(self, backend: TorchDistributed, members: tuple[int, ...]) -> None:
        self.device = backend.device
        self._backend = backend
        self._group = backend._groups[members]

    def post(
        self, given: torch.Tensor, give: Sequence[int], taken: torch.Tensor, take: Sequence[int]
    ) -> Callable[[], Any]:
        work = dist.all_to_all_single(taken, given, list(take), list(give), group=self._group, async_op=True)
        wait: Callable[[], Any] = work.wait
        return wait

    def finish(self) -> None:
        self._backend._finish()


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
