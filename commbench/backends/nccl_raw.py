"""NCCL without torch: calls on addresses, through nccl4py or cupy, on memory and a stream of cupy's.

Not yet seen on hardware: written against nccl4py 0.6.0, cupy 14.2 and NCCL 2.32's headers.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import cupy
import numpy as np

from commbench.backends.base import BackendError, Context
from commbench.backends.cupy_device import CupyDevice, TimedDevice
from commbench.backends.device_loop import DeviceLoop
from commbench.backends.forcing import GROUPED, Chosen
from commbench.backends.nccl_account import Gpu, NcclAccount, device_number, version_text
from commbench.backends.nccl_calls import Caller
from commbench.backends.nccl_libraries import FLOAT8, TYPES, WHOLE, Communicator, Library, first_line, load
from commbench.backends.nccl_memory import Buffers, Memory
from commbench.cases import Case
from commbench.measure.data import Pattern
from commbench.measure.operation import Operation, Post, in_order, rotate
from commbench.measure.timed import Loop, Round, Start

Call = Callable[[], Any]
Groups = tuple[tuple[int, ...], ...]

# What a messenger adds itself, by cupy's kernels; cupy has the types that numpy has.
_LOCAL_OPS = {
    "sum": "add", "prod": "multiply", "min": "minimum", "max": "maximum", "band": "bitwise_and", "bor": "bitwise_or",
    "bxor": "bitwise_xor",
}  # fmt: skip


class NcclRaw:
    """NCCL on one CUDA device a rank, timed on the device."""

    name = "nccl_raw"
    _library: Library
    _device: CupyDevice
    _account: NcclAccount
    _barrier: Call

    def __init__(self) -> None:
        self._made: list[Communicator] = []  # the first is that of all ranks
        self._comms: dict[tuple[int, ...], Communicator] = {}
        self._joined: set[Groups] = set()
        self._memories: weakref.WeakSet[Memory] = weakref.WeakSet()
        self._rank = 0
        self._grouped = False
        self._connected = False
        self._failed = False

    # -- from start to stop ----------------------------------------------------------------------------

    def start(self, context: Context) -> None:
        self._library = library = _same_everywhere(load(), context)
        self._rank = context.rank
        try:
            self._device = CupyDevice(device_number(context, cupy.cuda.runtime.getDeviceCount()))
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise BackendError(f"CUDA: {first_line(error)}: check the driver and CUDA_VISIBLE_DEVICES") from None
        # One algorithm is forced for all: something that NCCL is told, or the way in which it is called.
        self._grouped = GROUPED in context.forced.values()
        self._account = NcclAccount(library.version, {} if self._grouped else context.forced)
        facts = self._device.properties
        self._account.compare(context, Gpu(bytes(facts["uuid"]).hex(), int(facts["major"]), int(facts["minor"])))
        with self._errors():
            unique_id = context.share(library.unique_id().hex() if context.rank == 0 else None)
            world = library.communicator(context.world, context.rank, bytes.fromhex(unique_id))
        everyone = tuple(range(context.world))
        self._made.append(world)
        self._comms[everyone] = world
        self._joined.add((everyone,))
        # Of a rank that fails, cupy would destroy what is left at its end, and wait for peers that are gone.
        self._at_exit = weakref.finalize(self, _abort, self._made, library)
        self._word = Memory.plain(4, self._device.stream)
        self._barrier = self._caller(everyone).barrier(self._word.address)

    def stop(self) -> None:
        self._at_exit.detach()
        if self._failed:
            _abort(self._made, self._library)
        else:
            with self._errors():
                self._device.synchronize()
                gc.collect()  # NCCL waits for the end of every graph that its communicator is in
                for memory in list(self._memories):
                    memory.release()
                for comm in reversed(self._made):
                    comm.destroy()
        self._account.close()

    def join(self, groups: Groups) -> None:
        if groups in self._joined:
            return
        self._joined.add(groups)
        mine = next(((index, group) for index, group in enumerate(groups) if self._rank in group), None)
        color, key = (mine[0], mine[1].index(self._rank)) if mine else (None, 0)
        with self._errors():
            self._device.synchronize()  # nothing may be under way when NCCL splits
            made = self._made[0].split(color, key)
        if mine and made is not None:
            self._made.append(made)
            self._comms[mine[1]] = made

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """What NCCL or CUDA says, in one line."""
        try:
            yield
        except (*self._library.errors, cupy.cuda.runtime.CUDARuntimeError) as error:
            self._failed = True
            whose = "CUDA" if isinstance(error, cupy.cuda.runtime.CUDARuntimeError) else "NCCL"
            raise BackendError(f"{whose}: {first_line(error)}") from None

    def _check(self) -> None:
        for comm in self._made:
            comm.check()

    # -- what it says of itself ------------------------------------------------------------------------

    def version(self) -> str:
        runtime = cupy.cuda.runtime.runtimeGetVersion()
        return (
            f"NCCL {version_text(self._library.version)}, {self._library.name}, cupy {cupy.__version__}, "
            f"CUDA {runtime // 1000}.{runtime // 10 % 100}"
        )

    def settings(self) -> dict[str, str]:
        whole = [name for name in WHOLE if name in self._library.calls and not self._grouped]
        found = {"device": self._device.properties["name"].decode(), "library": self._library.name}
        found |= {name: "one call" if name in whole else "grouped sends and receives" for name in WHOLE}
        if self._device.no_pause is not None:
            found["no pauses"] = self._device.no_pause
        return {**found, **self._account.settings()}

    def why_not(self, case: Case) -> str | None:
        has = f"NCCL {version_text(self._library.version)}"
        if case.dtype.startswith("float8") and self._library.version < FLOAT8:
            return f"{has} has no type {case.dtype}"
        if case.buffers not in self._library.buffers:
            return f"{self._library.name} with {has} has no {case.buffers} buffers"
        return self._account.why_not(case)

    def note(self, case: Case) -> str | None:
        if case.execution == "graph" and case.buffers == "plain":
            return "NCCL registers the buffers of a captured graph by itself (NCCL_GRAPH_REGISTER)"
        return None

    def why_not_forced(self, collective: str) -> str | None:
        return self._account.why_not_forced()

    def chosen(self, case: Case, operation: Operation | None) -> list[Chosen] | None:
        # Of sends and receives NCCL chooses nothing that its log tells of.
        return None if case.algorithm == GROUPED else self._account.chosen(case, operation)

    def tainted(self) -> str | None:
        return self._account.tainted()

    def gpu(self) -> str | None:
        return self._account.gpu

    def estimate(self, case: Case, members: tuple[int, ...]) -> float | None:
        return self._account.estimate(case, members)

    def all_to_all_v(self, members: tuple[int, ...]) -> None:
        return None

    def expert_library(self, members: tuple[int, ...]) -> None:
        return None

    def why_not_reduce(self, dtype: str, op: str) -> str | None:
        bits_of_floats = op in ("band", "bor", "bxor") and dtype.startswith("float")
        if op not in _LOCAL_OPS or not hasattr(np, dtype) or bits_of_floats:
            return f"messages over {self.name} are reduced by cupy, which has no {op!r} of two {dtype}"
        return None

    def device_memory(self) -> int | None:
        return self._device.free_bytes()

    # -- operations ------------------------------------------------------------------------------------

    def operation(self, case: Case, members: tuple[int, ...], pattern: Pattern) -> Operation:
        caller = self._caller(members)
        if not case.spec.sized:
            nothing = Buffers((0, 0), (0, 0), self._device.stream, [])
            return self._operation(caller.barrier(self._word.address), nothing, True)
        with self._errors():
            buffers = Buffers.of(case, pattern, self._library, caller.comm, self._device.stream)
        self._memories.update(buffers.memories)
        call = caller.collective(case, *buffers.addresses)
        return self._operation(call, buffers, not (case.placement == "in" and case.spec.reduces))

    def _caller(self, members: tuple[int, ...]) -> Caller:
        return Caller(
            library=self._library, comm=self._comms[members], rank=members.index(self._rank), ranks=len(members),
            stream=self._device.stream.ptr, grouped=self._grouped,
        )  # fmt: skip

    def _operation(self, call: Call, buffers: Buffers, repeatable: bool) -> Operation:
        def run() -> None:
            with self._errors():
                call()
                self._device.synchronize()
                self._check()

        def capture() -> Call:
            with self._errors():
                return self._device.capture(call)

        return Operation(
            run=run, enqueue=call, finish=self._finish, input=buffers.input, output=buffers.output,
            upload=buffers.upload, download=buffers.download, repeatable=repeatable, capture=capture,
        )  # fmt: skip

    def _finish(self) -> None:
        with self._errors():
            self._device.synchronize()

    def loop(self, case: Case) -> Loop | None:
        cold = case.timing == "isolated" and case.cache != "warm"
        with self._errors():
            if not self._connected:
                self._barrier()  # the first call connects the ranks
                self._device.synchronize()
                self._connected = True
            return _CheckedLoop(self, TimedDevice(self._device, self._barrier, cold), case.execution)

    def messenger(self, members: tuple[int, ...]) -> NcclRawMessenger:
        return NcclRawMessenger(self, self._caller(members))


class _CheckedLoop(DeviceLoop):
    """Asks NCCL after each round whether something went wrong meanwhile: an error of the network reaches no call."""

    def __init__(self, backend: NcclRaw, device: TimedDevice, execution: str) -> None:
        super().__init__(device, execution)
        self._backend = backend

    def isolated(self, operations: list[Operation], count: int, first: int, start: Start) -> Round:
        with self._backend._errors():
            found = super().isolated(operations, count, first, start)
            self._backend._check()
        return found

    def streamed(self, operations: list[Operation], count: int, first: int, start: Start) -> Round:
        with self._backend._errors():
            found = super().streamed(operations, count, first, start)
            self._backend._check()
        return found


class NcclRawMessenger:
    """A step is one group call on the device's stream; the host only enqueues it. Memory is arrays of cupy's."""

    def __init__(self, backend: NcclRaw, caller: Caller) -> None:
        self._backend = backend
        self._caller = caller

    def buffer(self, size: int) -> Any:
        return cupy.zeros(size, dtype=np.uint8)

    def step(self, sends: Sequence[Post], receives: Sequence[Post]) -> Call:
        if not (sends or receives):
            return _nothing
        byte, caller = TYPES["uint8"], self._caller
        # Nobody promises that NCCL carries an empty message: a byte stands in for it. It has no tags: order decides.
        posts = [
            (act, one.memory if one.memory.size else self.buffer(1), one.peer)
            for act, ones in ((caller.recv, receives), (caller.send, sends))
            for one in ones
        ]
        calls = [act(memory.data.ptr, memory.size, byte, peer) for act, memory, peer in posts]
        return _holding(partial(caller.group(calls)), [memory for _, memory, _ in posts])

    def copy(self, target: Any, source: Any) -> Call:
        if not target.size:
            return _nothing
        runtime = cupy.cuda.runtime
        copy = partial(
            runtime.memcpyAsync, target.data.ptr, source.data.ptr, target.size, runtime.memcpyDeviceToDevice,
            self._caller.stream,
        )  # fmt: skip
        return _holding(copy, [target, source])

    def reduce(self, target: Any, left: Any, right: Any, dtype: str, op: str) -> Call:
        return partial(getattr(cupy, _LOCAL_OPS[op]), left.view(dtype), right.view(dtype), target.view(dtype))

    def finish(self) -> None:
        self._backend._finish()
        with self._backend._errors():
            self._backend._check()

    def operation(self, calls: Sequence[Call], given: Any, taken: Any, repeatable: bool) -> Operation:
        spans = [(memory.data.ptr, memory.size) for memory in (given, taken)]
        buffers = Buffers(spans[0], spans[1], self._backend._device.stream, [given, taken])
        return self._backend._operation(in_order(calls), buffers, repeatable)

    def repeat(self, sets: Sequence[Sequence[Call]]) -> Callable[[int], Any]:
        return rotate(sets)


def _same_everywhere(library: Library, context: Context) -> Library:
    """Ranks with different ones would be timed by different means. Raises BackendError."""
    names = context.agree(f"{library.name} with NCCL {version_text(library.version)}", list)
    other = next((rank for rank, name in enumerate(names) if name != names[0]), None)
    if other is not None:
        raise BackendError(f"rank 0 has {names[0]}, rank {other} has {names[other]}: install the same everywhere")
    return library


def _abort(comms: list[Communicator], library: Library) -> None:
    for comm in reversed(comms):
        with suppress(*library.errors):
            comm.abort()


def _holding(call: partial[Any], memories: list[Any]) -> Call:
    """The same call; it knows addresses only, and keeps what lies there alive."""
    vars(call)["memories"] = memories
    return call


def _nothing() -> None:
    return None
