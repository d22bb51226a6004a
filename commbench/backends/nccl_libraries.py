"""NCCL without torch: nccl4py's bindings, or what cupy has of NCCL, behind one interface.

A call is prepared: what comes back does the work, and is the binding itself with its arguments, so that nothing of
commbench's runs between a loop and NCCL. Its arguments are NCCL's own, in NCCL's order (nccl.h), with addresses as
whole numbers and without the communicator.

Of nccl4py the bindings are used (``nccl.bindings.nccl``) and not the methods of ``nccl.core``: these ask torch about each
buffer wherever torch can be imported, and take an array's own type, of which cupy has neither bfloat16 nor float8
(nccl4py 0.6.0: core/buffer.py, core/interop/cupy.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from commbench.backends.base import BackendError
from commbench.backends.nccl_account import version_text

Call = Callable[[], Any]

# ncclDataType_t and ncclRedOp_t (nccl.h): the same numbers in every version that has the type.
TYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "float16": 6, "float32": 7, "float64": 8,
    "bfloat16": 9, "float8_e4m3fn": 10, "float8_e5m2": 11,
}  # fmt: skip
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
# Since when: ncclCommSplit, float8, ncclCommRegister, ncclCommWindowRegister, and all-to-all, gather and scatter as calls.
SPLIT, FLOAT8, REGISTER, WINDOWS, WHOLE_CALLS = 21800, 22400, 21900, 22700, 22800

_WITH_PEERS = ("send", "recv", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
# Those that are made of sends and receives where NCCL has no call for them.
WHOLE = ("all_to_all", "gather", "scatter")
_SUCCESS, _IN_PROGRESS = 0, 7  # ncclResult_t
_NO_COLOR = -1  # NCCL_SPLIT_NOCOLOR
_COLLECTIVE_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC


class Communicator(Protocol):
    """A communicator of NCCL's on the device that was current when it was made."""

    def call(self, name: str, *arguments: int) -> Call:
        """``name``: a collective by commbench's name, ``send`` or ``recv``; the last argument is the stream."""

    def split(self, color: int | None, key: int) -> Communicator | None:
        """The communicator of the ranks with this colour, by key; None without a colour. All ranks must call."""

    def register(self, address: int, size: int) -> Call:
        """Make the memory known (ncclCommRegister); what comes back takes that back."""

    def window(self, address: int, size: int) -> Call:
        """The same as a symmetric window, which all ranks must make together, of equal size."""

    def check(self) -> None:
        """Raise one of the library's errors where something went wrong since."""

    def destroy(self) -> None: ...

    def abort(self) -> None: ...


class Library(Protocol):
    """``errors`` are what its calls may raise; ``calls`` are the names that ``Communicator.call`` knows; ``version``
    is NCCL's own as a number; ``buffers`` are the kinds of memory that it can be given."""

    name: str
    version: int
    errors: tuple[type[Exception], ...]
    calls: tuple[str, ...]
    buffers: tuple[str, ...]
    group_start: Call
    group_end: Call

    def unique_id(self) -> bytes: ...

    def communicator(self, ranks: int, rank: int, unique_id: bytes) -> Communicator:
        """All ranks must call, each with the same id."""

    def allocate(self, size: int) -> int:
        """The address of new memory of NCCL's own (ncclMemAlloc), which other devices can map."""

    def free(self, address: int) -> None: ...


def load() -> Library:
    """nccl4py where it can be used, else cupy's. Raises BackendError in one line that says why neither can."""
    reasons = []
    for make in (Nccl4py, CupyNccl):
        try:
            found: Library = make()
        except ImportError as error:
            reasons.append(str(error))
            continue
        if found.version < SPLIT:
            reasons.append(f"{found.name} loads NCCL {version_text(found.version)}, older than {version_text(SPLIT)}")
            continue
        return found
    raise BackendError(f"no NCCL ({'; '.join(reasons)}): pip install 'commbench[cuda13]', or 'commbench[cuda12]'")


# -- nccl4py -------------------------------------------------------------------------------------------

# By commbench's name, nccl4py 0.6's.
_NCCL4PY = {name: name for name in (*_WITH_PEERS, *WHOLE)} | {"all_to_all": "allto_all"}
_NCCL4PY_NEEDS = (
    *_NCCL4PY.values(), "get_version", "get_unique_id", "UniqueId", "comm_init_rank", "comm_split", "comm_finalize",
    "comm_destroy", "comm_abort", "comm_get_async_error", "check_status", "comm_register", "comm_deregister",
    "comm_window_register", "comm_window_deregister", "mem_alloc", "mem_free", "group_start", "group_end", "NCCLError",
)  # fmt: skip


class Nccl4py:
    """Raises ImportError with a sentence where it is missing, too old, or finds no NCCL."""

    def __init__(self) -> None:
        bindings = _import("nccl.bindings.nccl", "nccl4py")
        self.name = f"nccl4py {_version('nccl4py')}"
        missing = next((name for name in _NCCL4PY_NEEDS if not hasattr(bindings, name)), None)
        if missing is not None:
            raise ImportError(f"{self.name} has no {missing}")
        try:
            self.version = int(bindings.get_version())
        except (RuntimeError, bindings.NCCLError) as error:
            raise ImportError(f"{self.name} finds no NCCL: {first_line(error)}") from None
        self._bindings = bindings
        self.errors: tuple[type[Exception], ...] = (bindings.NCCLError,)
        self.calls = tuple(_NCCL4PY) if self.version >= WHOLE_CALLS else _WITH_PEERS
        since = {"plain": 0, "registered": REGISTER, "symmetric": WINDOWS}
        self.buffers = tuple(kind for kind, first in since.items() if self.version >= first)
        self.group_start: Call = bindings.group_start
        self.group_end: Call = bindings.group_end

    def unique_id(self) -> bytes:
        return bytes(self._bindings.get_unique_id())

    def communicator(self, ranks: int, rank: int, unique_id: bytes) -> Communicator:
        mine = self._bindings.UniqueId.from_buffer(bytearray(unique_id))
        return Nccl4pyCommunicator(self._bindings, self._bindings.comm_init_rank(ranks, mine, rank))

    def allocate(self, size: int) -> int:
        return int(self._bindings.mem_alloc(size))

    def free(self, address: int) -> None:
        self._bindings.mem_free(address)


class Nccl4pyCommunicator:
    def __init__(self, bindings: Any, comm: Any) -> None:
        self._bindings = bindings
        self._comm = comm

    def call(self, name: str, *arguments: int) -> Call:
        return partial(getattr(self._bindings, _NCCL4PY[name]), *arguments[:-1], self._comm, arguments[-1])

    def split(self, color: int | None, key: int) -> Communicator | None:
        made = self._bindings.comm_split(self._comm, _NO_COLOR if color is None else color, key, 0)
        return None if color is None else Nccl4pyCommunicator(self._bindings, made)

    def register(self, address: int, size: int) -> Call:
        handle = self._bindings.comm_register(self._comm, address, size)
        return partial(self._bindings.comm_deregister, self._comm, handle)

    def window(self, address: int, size: int) -> Call:
        window = self._bindings.comm_window_register(self._comm, address, size, _COLLECTIVE_SYMMETRIC)
        if not window:
            raise BackendError("NCCL makes no symmetric window here: its ranks cannot map one another's memory")
        return partial(self._bindings.comm_window_deregister, self._comm, window)

    def check(self) -> None:
        status = self._bindings.comm_get_async_error(self._comm)
        if status not in (_SUCCESS, _IN_PROGRESS):
            self._bindings.check_status(status)

    def destroy(self) -> None:
        self._bindings.comm_finalize(self._comm)
        self._bindings.comm_destroy(self._comm)

    def abort(self) -> None:
        self._bindings.comm_abort(self._comm)


# -- cupy ----------------------------------------------------------------------------------------------

_CUPY = {
    "send": "send", "recv": "recv", "all_reduce": "allReduce", "all_gather": "allGather",
    "reduce_scatter": "reduceScatter", "broadcast": "broadcast", "reduce": "reduce",
}  # fmt: skip


class CupyNccl:
    """``cupy.cuda.nccl``: plain memory, and no calls for all-to-all, gather and scatter. Raises ImportError with a
    sentence where cupy finds no NCCL."""

    def __init__(self) -> None:
        nccl = _import("cupy.cuda.nccl", "cupy")
        if not nccl.available:
            raise ImportError("cupy finds no NCCL")
        self._nccl = nccl
        self.name = f"cupy.cuda.nccl {_import('cupy', 'cupy').__version__}"
        self.version = int(nccl.get_version())
        self.errors: tuple[type[Exception], ...] = (nccl.NcclError,)
        self.calls = tuple(_CUPY)
        self.buffers: tuple[str, ...] = ("plain",)
        self.group_start: Call = nccl.groupStart
        self.group_end: Call = nccl.groupEnd

    def unique_id(self) -> bytes:
        return bytes(self._nccl.get_unique_id())

    def communicator(self, ranks: int, rank: int, unique_id: bytes) -> Communicator:
        return CupyCommunicator(self._nccl.NcclCommunicator(ranks, unique_id, rank))

    def allocate(self, size: int) -> int:
        raise NotImplementedError("cupy.cuda.nccl has no ncclMemAlloc")

    def free(self, address: int) -> None:
        raise NotImplementedError("cupy.cuda.nccl has no ncclMemFree")


class CupyCommunicator:
    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def call(self, name: str, *arguments: int) -> Call:
        return partial(getattr(self._comm, _CUPY[name]), *arguments)

    def split(self, color: int | None, key: int) -> Communicator | None:
        made = self._comm.commSplit(_NO_COLOR if color is None else color, key)
        return None if color is None else CupyCommunicator(made)

    def register(self, address: int, size: int) -> Call:
        raise NotImplementedError("cupy.cuda.nccl has no ncclCommRegister")

    def window(self, address: int, size: int) -> Call:
        raise NotImplementedError("cupy.cuda.nccl has no ncclCommWindowRegister")

    def check(self) -> None:
        self._comm.check_async_error()

    def destroy(self) -> None:
        self._comm.destroy()

    def abort(self) -> None:
        self._comm.abort()


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{package} cannot be imported: {first_line(error)}") from None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
