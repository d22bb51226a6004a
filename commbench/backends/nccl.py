"""NCCL through torch.distributed, timed on the device."""

from __future__ import annotations

import ctypes
import gc
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from commbench.backends.base import BackendError, Context
from commbench.backends.device_loop import DeviceLoop
from commbench.backends.forcing import Chosen
from commbench.backends.nccl_account import Gpu, NcclAccount, device_number, version_text
from commbench.backends.torch_device import TorchDevice, capture
from commbench.backends.torch_distributed import TorchDistributed, TorchMessenger
from commbench.cases import Case, is_own
from commbench.measure.operation import Operation, Post
from commbench.measure.timed import Loop
from commbench.provenance.env import collect_env

# Of a sweep's types those that torch maps to no type of NCCL's (torch 2.13, NCCLUtils.hpp, ncclDataType).
_NOT_IN_NCCL = ("uint32", "uint64")
_ON_CURRENT_STREAM = (2, 8)  # torch since when


class Nccl(TorchDistributed):
    """NCCL on one CUDA device a rank.

    Calls are made without ``async_op``: they are enqueued in the order of the current stream, and the host goes on. Only
    torch's barrier makes the host wait.
    """

    name = "nccl"
    _account: NcclAccount

    def __init__(self) -> None:
        super().__init__()
        self._one: torch.Tensor | None = None  # what is added up where ranks' devices wait for one another

    def _prepare(self, context: Context) -> None:
        if not (torch.cuda.is_available() and dist.is_nccl_available()):
            raise BackendError(
                f"torch {torch.__version__} sees no GPU, or has no NCCL: install a CUDA build of torch and check "
                "CUDA_VISIBLE_DEVICES"
            )
        self.device = torch.device("cuda", device_number(context, torch.cuda.device_count()))
        torch.cuda.set_device(self.device)
        # RCCL's tuner is another one.
        self._account = NcclAccount(_nccl_version_code(), context.forced, modelled=torch.version.hip is None)
        # Calibration sends one message at a time on purpose.
        warnings.filterwarnings("ignore", message=".*unbatched P2P op")

    def _compare(self, context: Context) -> None:
        mine = torch.cuda.get_device_properties(self.device)
        self._account.compare(context, Gpu(str(mine.uuid), mine.major, mine.minor))

    def _init_options(self) -> dict[str, Any]:
        return {"device_id": self.device}

    def version(self) -> str:
        return f"NCCL {version_text(_nccl_version_code())}, torch {torch.__version__}, CUDA {torch.version.cuda}"

    def settings(self) -> dict[str, str]:
        of_torch = {k: v for k, v in collect_env(os.environ).items() if k.startswith("TORCH_NCCL_")}
        return {"device": torch.cuda.get_device_name(self.device), **of_torch, **self._account.settings()}

    def why_not(self, case: Case) -> str | None:
        if case.dtype in _NOT_IN_NCCL:
            return f"torch's NCCL has no type {case.dtype}"
        if case.collective == "barrier" and case.execution == "graph":
            return "torch's barrier makes the host wait, which a graph cannot"
        return self._account.why_not(case) or super().why_not(case)

    def note(self, case: Case) -> str | None:
        timed = None
        if case.collective == "barrier" and not is_own(case.algorithm):
            timed = "timed by the host's clock: torch's barrier makes the host wait for the device every time"
        elif tuple(map(int, torch.__version__.split(".")[:2])) < _ON_CURRENT_STREAM:
            timed = "torch before 2.8 works on a stream of its own: the way there and back is in the time"
        graph = None
        if case.execution == "graph":
            graph = "NCCL registers the buffers of a captured graph by itself (NCCL_GRAPH_REGISTER)"
        return "; ".join(filter(None, (timed, graph, super().note(case)))) or None

    def why_not_forced(self, collective: str) -> str | None:
        return self._account.why_not_forced()

    def chosen(self, case: Case, operation: Operation | None) -> list[Chosen] | None:
        return self._account.chosen(case, operation)

    def tainted(self) -> str | None:
        return self._account.tainted()

    def gpu(self) -> str | None:
        return self._account.gpu

    def estimate(self, case: Case, members: tuple[int, ...]) -> float | None:
        return self._account.estimate(case, members)

    def loop(self, case: Case) -> Loop | None:
        if case.collective == "barrier" and not is_own(case.algorithm):
            return None
        if self._one is None:
            self._one = torch.zeros(1, dtype=torch.uint8, device=self.device)
            self._wait_for_all()  # the first call connects the ranks
            self._finish()
        cold = case.timing == "isolated" and case.cache != "warm"
        return DeviceLoop(TorchDevice(self.device, self._wait_for_all, cold), case.execution)

    def _wait_for_all(self) -> None:
        dist.all_reduce(self._one)

    def stop(self) -> None:
        # NCCL waits for the end of every graph that its communicator is in.
        gc.collect()
        super().stop()
        self._account.close()

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
            download=partial(host[1].copy_, device[1]), repeatable=repeatable, capture=partial(capture, call),
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
