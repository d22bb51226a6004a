"""Device memory that NCCL works on, what NCCL is told of it, and the host's side of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import cupy
import numpy as np

from commbench.backends.nccl_libraries import Communicator, Library
from commbench.cases import Case
from commbench.measure.data import Pattern
from commbench.measure.operation import Bytes

Call = Callable[[], Any]

PAGE = 4096  # NCCL_WIN_REQUIRED_ALIGNMENT (nccl.h)


class Memory:
    """Device memory at ``address``, all zero once the stream has come so far. It ends with the object, or before by
    ``release``: no work that uses it may then be under way."""

    def __init__(self, address: int, release: Call) -> None:
        self.address = address
        self.release = weakref.finalize(self, release)
        self.release.atexit = False  # then the communicator may be gone

    @classmethod
    def plain(cls, size: int, stream: Any) -> Memory:
        """Memory of cupy's pool, which NCCL knows nothing of."""
        pointer = cupy.cuda.alloc(size)
        cupy.cuda.runtime.memsetAsync(pointer.ptr, 0, size, stream.ptr)
        return cls(pointer.ptr, _drop([pointer]))

    @classmethod
    def known(cls, kind: str, size: int, library: Library, comm: Communicator, stream: Any) -> Memory:
        """``registered`` or ``symmetric``: memory of NCCL's own, since it registers other memory for some of its
        transports only (user guide, "User Buffer Registration"). Every rank of ``comm`` must call with the same size.
        """
        cupy.get_default_memory_pool().free_all_blocks()  # what cupy keeps, NCCL cannot have
        address = library.allocate(size)
        try:
            forget = (comm.window if kind == "symmetric" else comm.register)(address, size)
        except BaseException:
            library.free(address)
            raise
        cupy.cuda.runtime.memsetAsync(address, 0, size, stream.ptr)

        def release() -> None:
            with suppress(*library.errors):  # after an error NCCL may refuse: the process ends soon
                forget()
                library.free(address)

        return cls(address, release)


def _drop(held: list[Any]) -> Call:
    return held.clear


class Buffers:
    """A rank's input and output on the device, and their copies in pinned memory of the host.

    ``addresses`` are those that a call of NCCL's takes to send from and to receive into, 0 where it has none.
    """

    def __init__(
        self, given: tuple[int, int], taken: tuple[int, int], stream: Any, memories: Sequence[Any],
        addresses: tuple[int, int] = (0, 0),
    ) -> None:  # fmt: skip
        """``given`` and ``taken`` are (address, bytes) of input and output, which lie in ``memories``."""
        self.addresses = addresses
        self.memories = memories
        self._stream = stream
        self.input, self.output = _pinned(given[1]), _pinned(taken[1])
        runtime = cupy.cuda.runtime
        # The poisoned output goes first: in place, the input is a part of it.
        self._up = [
            partial(runtime.memcpyAsync, address, host.ctypes.data, size, runtime.memcpyHostToDevice, stream.ptr)
            for (address, size), host in ((taken, self.output), (given, self.input))
            if size
        ]
        address, size = taken
        self._down = [
            partial(runtime.memcpyAsync, self.output.ctypes.data, address, size, runtime.memcpyDeviceToHost, stream.ptr)
        ] * bool(size)

    @classmethod
    def of(cls, case: Case, pattern: Pattern, library: Library, comm: Communicator, stream: Any) -> Buffers:
        """Fresh ones for a case. Memory that NCCL knows has the same size and the same layout on every rank: NCCL
        registers some of it only if offsets agree, and windows must be of equal size."""
        item = case.itemsize
        if case.placement == "in":
            elements, source, target = pattern.in_place_slices()
            starts, sizes = (source.start * item, target.start * item), [elements * item]
        else:
            starts, sizes = (0, 0), [pattern.input_elements * item, pattern.output_elements * item]
        if case.buffers == "plain":
            each = {index: Memory.plain(size, stream) for index, size in enumerate(sizes) if size}
            bases = [each[index].address if size else 0 for index, size in enumerate(sizes)]
            memories = list(each.values())
        else:
            region = -(-case.bytes // PAGE) * PAGE
            memories = [Memory.known(case.buffers, region * len(sizes), library, comm, stream)]
            bases = [memories[0].address + index * region if size else 0 for index, size in enumerate(sizes)]
        send, recv = bases[0] + starts[0], bases[-1] + starts[1]
        return cls(
            (send, pattern.input_elements * item), (recv, pattern.output_elements * item), stream,
            memories, (send, recv),
        )  # fmt: skip

    def upload(self) -> None:
        self._copy(self._up)

    def download(self) -> None:
        self._copy(self._down)

    def _copy(self, copies: Sequence[Call]) -> None:
        for copy in copies:
            copy()
        self._stream.synchronize()


def _pinned(size: int) -> Bytes:
    if not size:
        return np.empty(0, dtype=np.uint8)
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(size), dtype=np.uint8, count=size)
