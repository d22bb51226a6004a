"""Times MPI operations in compiled code: ``kernels/mpi_loop.c``, built with the compiler of the MPI that is in use.

An operation's program is a sequence of the calls below. They say what ``mpi_loop.c`` shall do, and keep alive what it
points to.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from commbench.backends.base import Context
from commbench.backends.build import ANSWER_S, BUILD_S, BuildError, build, find
from commbench.measure.operation import Bytes, Operation
from commbench.measure.timed import Round, Start
from commbench.provenance.mpi_variables import find_mpi_library
from commbench.provenance.sources import command

SOURCE = "mpi_loop.c"
OPTIONS = ("-O2", "-fPIC", "-shared")
SWITCH = "COMMBENCH_COMPILED"  # 0: leave it to Python
_EMPTY_CALLS = 2000

Address = ctypes.c_void_p
Int = ctypes.c_int
Long = ctypes.c_int64
Size = ctypes.c_size_t
_ARGUMENTS: dict[str, tuple[Any, list[Any]]] = {
    "version": (Int, [ctypes.c_char_p, Int]),
    "sizes": (Int, [ctypes.POINTER(Size)] * 4),
    "records": (Address, [Int]),
    "free": (None, [Address, Int]),
    "collective": (
        Int, [Address, ctypes.c_char_p, Address, Address, Int, Int, Int, Int, Address, Address, Address]
    ),
    "step": (Int, [Address, Int, ctypes.POINTER(Address)]),
    "copy": (None, [Address, Address, Address, Size]),
    "combine": (None, [Address, Address, Address, Address, Int, Size, Address, Address]),
    "streamed": (Int, [Address, Address, Int, Int, Long, Address]),
    "isolated": (Int, [Address, Address, Int, Long, Address, Int, Address, Address, Long, Address]),
}  # fmt: skip


class MpiCompiled:
    """The functions of ``mpi_loop.c`` by the second part of their names. Raises BuildError where they cannot be had."""

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"{path.name} cannot be loaded: {error}") from None
        for name, (result, arguments) in _ARGUMENTS.items():
            function = getattr(self._library, f"commbench_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self.record_bytes = int(ctypes.c_size_t.in_dll(self._library, "commbench_record_bytes").value)
        self._compare()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def _compare(self) -> None:
        """Whether it calls the same library as mpi4py, and both mean the same by a handle."""
        text = ctypes.create_string_buffer(MPI.MAX_LIBRARY_VERSION_STRING + 1)
        self.version(text, len(text))
        theirs = text.value.decode(errors="replace").strip()
        ours = MPI.Get_library_version().strip("\0 \n")
        if theirs != ours:
            raise BuildError(f"the compiler belongs to another MPI ({theirs[:60]}) than mpi4py uses ({ours[:60]})")
        found = [Size() for _ in range(4)]
        self.sizes(*map(ctypes.byref, found))
        expected = [MPI._sizeof(kind) for kind in (MPI.Comm, MPI.Datatype, MPI.Op, MPI.Request)]
        if [one.value for one in found] != expected:
            raise BuildError("MPI's handles have other sizes in the compiler's mpi.h than in mpi4py")


def load(context: Context) -> MpiCompiled:
    """The compiled loop of the MPI in use, built first where it is not there yet, by one rank of each host.

    Every rank calls this, and every rank gets it or none does: what ranks are timed by must not differ. Raises
    BuildError, for the same reason on all.
    """
    host = context.hosts[context.rank]
    path, reason = None, "COMMBENCH_COMPILED is 0" if os.environ.get(SWITCH) == "0" else None
    makers: Makers | None = None
    if reason is None and context.hosts.index(host) == context.rank:
        try:
            makers = makers_in_use()
            path = find(SOURCE, makers.compiler, of=makers.of)
        except BuildError as error:
            reason = str(error)
    if context.agree(makers is not None and reason is None and path is None, any):
        context.expect(BUILD_S + 2 * ANSWER_S, f"compiling {SOURCE}")
        if makers is not None and reason is None and path is None:
            try:
                path = build(SOURCE, makers.compiler, of=makers.of)
            except BuildError as error:
                reason = str(error)
    paths, reason = context.agree([host, path and str(path), reason], _gather_paths)
    compiled = None
    if reason is None:
        try:
            compiled = MpiCompiled(Path(paths[host]))
        except BuildError as error:
            reason = str(error)
        reason = context.agree([host, None, reason], _gather_paths)[1]
    if compiled is None or reason is not None:
        raise BuildError(reason)
    return compiled


def _gather_paths(found: list[list[str | None]]) -> tuple[dict[str | None, str], str | None]:
    """Where each host has the library, and the first reason why one has none."""
    several = len({host for host, _, _ in found}) > 1
    reasons = [f"{why} (on {host})" if several else why for host, _, why in found if why]
    return {host: path for host, path, _ in found if path}, reasons[0] if reasons else None


class Makers(NamedTuple):
    """What makes a library that calls the MPI in use, and what that is good for alone: see ``build``."""

    compiler: tuple[str, ...]
    of: tuple[str, ...]


def makers_in_use() -> Makers:
    """The mpicc whose programs are linked with the very MPI library that mpi4py has loaded. Raises BuildError."""
    library = find_mpi_library()
    if library is None:
        raise BuildError("no file named libmpi.so is loaded, so its mpicc is not known")
    for compiler in _compilers(library):
        try:
            shown = command([compiler, "-show"], timeout_s=ANSWER_S)
            belongs = _links_with(shown, library)
        except (OSError, RuntimeError, ValueError):  # ValueError: quotes that do not match
            continue
        if belongs:
            return Makers((compiler, *OPTIONS), (MPI.Get_library_version(), shown))
    raise BuildError(f"there is no mpicc of {library}")


def _compilers(library: str) -> list[str]:
    """What may be the mpicc of the loaded library, most likely first."""
    folders = [folder / "bin" for file in (Path(library), Path(library).resolve()) for folder in file.parents[1:]]
    found = [str(folder / "mpicc") for folder in folders if os.access(folder / "mpicc", os.X_OK)]
    on_path = shutil.which("mpicc")
    return list(dict.fromkeys([*found, *([on_path] if on_path else [])]))


def _links_with(shown: str, library: str) -> bool:
    """Whether the command that an mpicc shows looks for libraries where this one is."""
    folders = [Path(word[2:]) for word in shlex.split(shown) if word.startswith("-L")]
    loaded = Path(library)
    return any(file.samefile(loaded) for folder in folders for file in folder.glob("libmpi*.so*") if file.exists())


class Call(Protocol):
    """One record of a program."""

    def write(self, library: MpiCompiled, at: int) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """A collective by its commbench name, as ``mpi_loop.c`` calls it. ``count``: elements of a block where the data are
    cut into one a rank, else of the message. Memory may be None or MPI.IN_PLACE."""

    name: str
    give: Any
    take: Any
    count: int
    type: MPI.Datatype
    op: MPI.Op
    comm: MPI.Comm
    root: int = 0
    to: int = 0
    source: int = 0

    def write(self, library: MpiCompiled, at: int) -> None:
        known = library.collective(
            at, self.name.encode(), _address(self.give), _address(self.take), self.count, self.root, self.to,
            self.source, MPI._addressof(self.type), MPI._addressof(self.op), MPI._addressof(self.comm),
        )  # fmt: skip
        assert known, f"mpi_loop.c has no {self.name}"


def _address(memory: Any) -> int:
    """Where memory lies; 0 is none and 1 MPI.IN_PLACE."""
    if memory is None:
        return 0
    return 1 if memory is MPI.IN_PLACE else int(memory.ctypes.data)


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """Persistent requests, started and waited for together."""

    requests: list[MPI.Prequest]

    def __call__(self) -> None:
        MPI.Prequest.Startall(self.requests)
        MPI.Request.Waitall(self.requests)

    def write(self, library: MpiCompiled, at: int) -> None:
        handles = (Address * len(self.requests))(*map(MPI._addressof, self.requests))
        if not library.step(at, len(self.requests), handles):
            raise MemoryError("no memory for requests")


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """``target = source``."""

    target: Bytes
    source: Bytes

    def __call__(self) -> None:
        np.copyto(self.target, self.source)

    def write(self, library: MpiCompiled, at: int) -> None:
        library.copy(at, _address(self.target), _address(self.source), self.target.nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Combine:
    """``target = left op right``: by numpy's ``ufunc`` on ``dtype`` from Python, by MPI_Reduce_local in a program."""

    target: Bytes
    left: Bytes
    right: Bytes
    dtype: str
    ufunc: np.ufunc
    type: MPI.Datatype
    op: MPI.Op

    def __call__(self) -> None:
        self.ufunc(self.left.view(self.dtype), self.right.view(self.dtype), out=self.target.view(self.dtype))

    def write(self, library: MpiCompiled, at: int) -> None:
        size = self.target.nbytes
        library.combine(
            at, _address(self.target), _address(self.left), _address(self.right),
            size // np.dtype(self.dtype).itemsize, size, MPI._addressof(self.type), MPI._addressof(self.op),
        )  # fmt: skip


class Programs:
    """Programs one after another in memory that ``mpi_loop.c`` reads, and what they point to."""

    def __init__(self, library: MpiCompiled, programs: Sequence[Sequence[Call]]) -> None:
        self._library = library
        self._calls = [call for program in programs for call in program]
        self.count = len(programs)
        self._next = 0
        self.bounds = np.cumsum([0, *map(len, programs)]).astype(np.int32)
        self.records = library.records(max(1, len(self._calls)))
        if not self.records:
            raise MemoryError("no memory for programs")
        for index, call in enumerate(self._calls):
            call.write(library, self.records + index * library.record_bytes)

    def __del__(self) -> None:
        if getattr(self, "records", None):
            self._library.free(self.records, len(self._calls))

    def stream(self, count: int, first: int = 0) -> NDArray[np.int64]:
        """``count`` operations back to back, from program ``first`` on: one pair of stamps in ns."""
        stamps = np.zeros(2, dtype=np.int64)
        _check(
            self._library.streamed(
                self.records, self.bounds.ctypes.data, self.count, first, count, stamps.ctypes.data
            )
        )  # fmt: skip
        return stamps

    def isolate(
        self, count: int, first: int = 0, starts: NDArray[np.int64] | None = None, spin: bool = True,
        barrier: Programs | None = None, beat_address: int = 0,
    ) -> NDArray[np.int64]:  # fmt: skip
        """``count`` operations with a start of their own, at once where none is given: a pair of stamps each in ns.

        ``first`` is the number of the first, to be noted at ``beat_address``.
        """
        stamps = np.empty((count, 2), dtype=np.int64)
        stamps.fill(0)  # touched: a page that is new would be in somebody's way
        if starts is None:
            starts = np.zeros(count, dtype=np.int64)
        _check(
            self._library.isolated(
                self.records, self.bounds.ctypes.data, self.count, count, starts.ctypes.data, spin,
                barrier and barrier.records, beat_address or None, first, stamps.ctypes.data,
            )
        )  # fmt: skip
        return stamps

    def repeat(self, times: int) -> None:
        """So many operations, beginning with the program after the last of the call before."""
        self.stream(times, self._next)
        self._next = (self._next + times) % self.count


def _check(error: int) -> None:
    if error != MPI.SUCCESS:
        raise RuntimeError(f"MPI: {MPI.Get_error_string(error)}")


@dataclass(kw_only=True)
class CompiledLoop:
    """Loop whose iterations are ``mpi_loop.c``'s. Operations must have programs. ``streams``: whether it will stream them."""

    library: MpiCompiled
    streams: bool
    on_device: bool = False
    _operations: list[Operation] | None = None
    _programs: Programs | None = None
    _barrier: Programs | None = None

    def overhead_s(self) -> float:
        """Of a program that does nothing: when isolated it is mostly the reading of the clock."""
        empty = Programs(self.library, [[]])
        if self.streams:
            return float(np.diff(empty.stream(_EMPTY_CALLS))[0]) / _EMPTY_CALLS * 1e-9
        return float(np.median(np.diff(empty.isolate(_EMPTY_CALLS))) * 1e-9)

    def isolated(self, operations: list[Operation], count: int, first: int, start: Start) -> Round:
        programs = self._of(operations)
        barrier = None
        if start.barrier is not None:
            if self._barrier is None:
                self._barrier = Programs(self.library, [start.barrier.program])
            barrier = self._barrier
        starts = np.ascontiguousarray(start.starts_ns, dtype=np.int64)
        start.beat("inside", first)
        return Round(programs.isolate(count, first, starts, start.spin, barrier, start.beat_address))

    def streamed(self, operations: list[Operation], count: int, first: int, start: Start) -> Round:
        programs = self._of(operations)
        start.beat("inside", first)
        start.wait(0)
        if not operations:
            return Round(np.zeros((1, 2), dtype=np.int64))
        return Round(programs.stream(count).reshape(1, 2))

    def _of(self, operations: list[Operation]) -> Programs:
        """Written once for a case's operations: the list stays the same from round to round."""
        if self._programs is None or self._operations is not operations:
            self._operations = operations
            self._programs = Programs(self.library, [operation.program for operation in operations])
        return self._programs
