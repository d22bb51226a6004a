"""MPI through mpi4py: the upper-case, buffer-based calls only (the lower-case ones pickle)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import mpi4py
import numpy as np

from commbench.backends.base import BackendError, Context, aligned
from commbench.backends.forcing import OPEN_MPI, TUNED_PRIORITY, Chosen, open_mpi_settings
from commbench.cases import DTYPES, Case, is_own
from commbench.measure.data import Pattern
from commbench.measure.operation import Bytes, Operation, Post, in_order, rotate
from commbench.measure.timed import Loop
from commbench.provenance.mpi_variables import MpiVariables, find_mpi_library

# mpi4py asks for MPI_THREAD_MULTIPLE by default, which made the same loop a third slower; one thread calls MPI here.
mpi4py.rc.thread_level = "single"
mpi4py.rc.finalize = False

from mpi4py import MPI

from commbench.backends.build import BuildError
from commbench.backends.mpi_loop import Collective, Combine, CompiledLoop, Copy, MpiCompiled, Programs, Step, load

_TYPES: dict[str, MPI.Datatype] = {
    "float64": MPI.DOUBLE, "float32": MPI.FLOAT, "int8": MPI.INT8_T, "uint8": MPI.UINT8_T, "int32": MPI.INT32_T,
    "uint32": MPI.UINT32_T, "int64": MPI.INT64_T, "uint64": MPI.UINT64_T,
}  # fmt: skip
# Moving needs only the element's size; reducing needs a type that MPI can add.
_CARRIERS: dict[int, MPI.Datatype] = {1: MPI.UINT8_T, 2: MPI.UINT16_T}
_OPS: dict[str, MPI.Op] = {
    "sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX,
    "band": MPI.BAND, "bor": MPI.BOR, "bxor": MPI.BXOR,
}  # fmt: skip
# What a messenger adds itself. numpy has no bfloat16 and no float8.
_LOCAL_OPS: dict[str, np.ufunc] = {
    "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
}  # fmt: skip


class Mpi:
    """MPI collectives on host memory, on whatever MPI library mpi4py was loaded with."""

    name = "mpi"

    def __init__(self) -> None:
        self._world: MPI.Intracomm = MPI.COMM_WORLD
        self._comms: dict[tuple[int, ...], MPI.Comm] = {}
        self._joined: set[tuple[tuple[int, ...], ...]] = set()
        self._forced: Mapping[str, str] = {}
        self._read_back: dict[str, str] = {}
        self._compiled: MpiCompiled | None = None
        self._loop = "compiled"

    def start(self, context: Context) -> None:
        size, rank = self._world.Get_size(), self._world.Get_rank()
        if (size, rank) != (context.world, context.rank):
            raise BackendError(
                f"MPI says rank {rank} of {size} where the launcher says rank {context.rank} of {context.world}: "
                "start with the mpirun that belongs to mpi4py's MPI library, or with srun --mpi=pmix"
            )
        self._forced = context.forced
        if self._forced and _is_open_mpi():
            self._read_back = _force(self._forced)
            # Each communicator keeps the settings that it was made under, and MPI may have been started to meet.
            self._world = MPI.COMM_WORLD.Dup()
        everyone = tuple(range(size))
        self._comms[everyone] = self._world
        self._joined.add((everyone,))
        try:
            self._compiled = load(context)
        except BuildError as error:
            self._loop = f"python: {error}"

    def version(self) -> str:
        return MPI.Get_library_version().partition("\n")[0].partition(", package")[0].strip("\0 ")

    def settings(self) -> dict[str, str]:
        level = "single" if MPI.Query_thread() == MPI.THREAD_SINGLE else str(MPI.Query_thread())
        return {"thread_level": level, "loop": self._loop, **self._read_back}

    def why_not(self, case: Case) -> str | None:
        if case.reduce_op is not None and case.reduce_op not in _OPS:
            return f"MPI has no reduce operation {case.reduce_op!r}"
        if case.reduce_op is not None and case.dtype not in _TYPES:
            return f"MPI has no {case.dtype} to reduce"
        return None

    def note(self, case: Case) -> str | None:
        found = []
        if case.collective == "broadcast" and case.placement == "out":
            found.append("MPI_Bcast has one buffer: it is always in place")
        if self._compiled is not None and (reason := why_not_compiled(case)):
            found.append(f"timed from Python: {reason}")
        return "; ".join(found) or None

    def why_not_forced(self, collective: str) -> str | None:
        asked = self._forced[collective]
        if not _is_open_mpi():
            return f"algorithm {asked!r} is forced through Open MPI's coll_tuned; this is {self.version()}"
        return why_not_tuned(asked, OPEN_MPI[collective][0], self._read_back)

    def chosen(self, case: Case, operation: Operation | None) -> list[Chosen] | None:
        return None

    def tainted(self) -> str | None:
        return None

    def gpu(self) -> str | None:
        return None

    def estimate(self, case: Case, members: tuple[int, ...]) -> None:
        return None

    def join(self, groups: tuple[tuple[int, ...], ...]) -> None:
        if groups in self._joined:
            return
        self._joined.add(groups)
        rank = self._world.Get_rank()
        mine = next(((index, group) for index, group in enumerate(groups) if rank in group), None)
        color, key = (mine[0], mine[1].index(rank)) if mine else (MPI.UNDEFINED, 0)
        comm = self._world.Split(color, key)
        if mine:
            self._comms[mine[1]] = comm

    def operation(self, case: Case, members: tuple[int, ...], pattern: Pattern) -> Operation:
        return _build(case, self._comms[members], pattern)

    def loop(self, case: Case) -> Loop | None:
        if self._compiled is None or why_not_compiled(case):
            return None
        return CompiledLoop(library=self._compiled, streams=case.timing == "streamed")

    def messenger(self, members: tuple[int, ...]) -> MpiMessenger:
        return MpiMessenger(self._comms[members], self._compiled)

    def all_to_all_v(self, members: tuple[int, ...]) -> MpiAllToAllV:
        return MpiAllToAllV(self._comms[members])

    def expert_library(self, members: tuple[int, ...]) -> None:
        return None

    def why_not_reduce(self, dtype: str, op: str) -> str | None:
        if op not in _LOCAL_OPS:
            return f"messages over MPI are reduced by numpy, which has no {op!r} of two values"
        if not hasattr(np, dtype):
            return f"messages over MPI are reduced by numpy, which has no {dtype}"
        return None

    def device_memory(self) -> None:
        return None

    def stop(self) -> None:
        for comm in self._comms.values():
            if comm != MPI.COMM_WORLD:
                comm.Free()
        MPI.Finalize()


def why_not_compiled(case: Case) -> str | None:
    """Why a case's operations cannot be programs of the compiled loop, the same on every rank, or None."""
    if case.bytes >= 2**31:
        return "it counts in 31 bits"
    if is_own(case.algorithm) and case.reduce_op is not None and case.dtype not in _TYPES:
        return f"MPI has no {case.dtype} to reduce"
    return None


def _is_open_mpi() -> bool:
    return MPI.get_vendor()[0] == "Open MPI"


def _force(forced: Mapping[str, str]) -> dict[str, str]:
    """Tell Open MPI; what it then says of coll_tuned's settings, by their names. What it does not have is left out."""
    path = find_mpi_library()
    if path is None:
        return {}
    try:
        variables = MpiVariables(path)
    except OSError:
        return {}
    for name, value in open_mpi_settings(forced).items():
        with suppress(OSError):  # it shows when they are read
            variables.write(name, value)
    algorithms = [f"coll_tuned_{OPEN_MPI[name][0]}_algorithm" for name in forced]
    wanted = ["coll", "coll_tuned_use_dynamic_rules", *algorithms, *(f"{name}_segmentsize" for name in algorithms)]
    found = {name: variables.read(name) for name in (*wanted, *variables.names("coll_[a-z]+_priority"))}
    variables.close()
    before = {name for name in found if name.endswith("_priority") and _priority(found[name]) < TUNED_PRIORITY}
    return {name: value for name, value in found.items() if value and name not in before}


def _priority(text: str | None) -> int:
    return int(text) if text and text.lstrip("-").isdigit() else -1


def why_not_tuned(asked: str, operation: str, found: Mapping[str, str]) -> str | None:
    """Why Open MPI does not use an algorithm of coll_tuned's, by the settings that were read back from it."""
    took = found.get(f"coll_tuned_{operation}_algorithm")
    if took is None:
        only = f" (coll is {found['coll']!r})" if "coll" in found else ""
        return f"asked for {asked!r}, but this Open MPI has no coll_tuned{only}, or does not tell its settings"
    if took != asked:
        return f"asked for {asked!r}, Open MPI took {took!r} for {operation}"
    if found.get("coll_tuned_use_dynamic_rules") != "true":
        return f"asked for {asked!r}, but Open MPI's coll_tuned_use_dynamic_rules is off"
    first = [name for name in found if name.endswith("_priority") and name != "coll_tuned_priority"]
    if first or "coll_tuned_priority" not in found:
        return f"asked for {asked!r}, but others come before coll_tuned: {', '.join(first) or 'its priority is low'}"
    return None


class MpiMessenger:
    """Persistent requests on host memory: all that MPI must know of a message, it is told before."""

    def __init__(self, comm: MPI.Comm, compiled: MpiCompiled | None) -> None:
        self._comm = comm
        self._compiled = compiled

    def buffer(self, size: int) -> Bytes:
        return aligned(size)

    def step(self, sends: Sequence[Post], receives: Sequence[Post]) -> Callable[[], Any]:
        comm = self._comm
        requests = [comm.Recv_init([post.memory, MPI.BYTE], post.peer, post.tag) for post in receives]
        requests += [comm.Send_init([post.memory, MPI.BYTE], post.peer, post.tag) for post in sends]
        step = Step(requests=requests)
        # mpi4py frees no request by itself.
        weakref.finalize(step, _free, requests).atexit = False
        return step

    def copy(self, target: Bytes, source: Bytes) -> Callable[[], Any]:
        return Copy(target=target, source=source)

    def reduce(self, target: Bytes, left: Bytes, right: Bytes, dtype: str, op: str) -> Callable[[], Any]:
        if dtype not in _TYPES:
            return partial(_LOCAL_OPS[op], left.view(dtype), right.view(dtype), out=target.view(dtype))
        return Combine(
            target=target, left=left, right=right, dtype=dtype, ufunc=_LOCAL_OPS[op], type=_TYPES[dtype], op=_OPS[op]
        )

    def finish(self) -> None:
        """Nothing is left under way when a step returns."""

    def operation(self, calls: Sequence[Callable[[], Any]], given: Bytes, taken: Bytes, repeatable: bool) -> Operation:
        run = in_order(calls)
        return Operation(run=run, enqueue=run, input=given, output=taken, repeatable=repeatable, program=calls)

    def repeat(self, sets: Sequence[Sequence[Callable[[], Any]]]) -> Callable[[int], Any]:
        if self._compiled is None or not all(hasattr(call, "write") for calls in sets for call in calls):
            return rotate(sets)
        return Programs(self._compiled, sets).repeat  # type: ignore[arg-type]  # calls of this messenger


class MpiAllToAllV:
    """MPI_Ialltoallv on the memory of torch's tensors."""

    def __init__(self, comm: MPI.Comm) -> None:
        import torch  # only what hands over tensors asks for this, and it has loaded torch

        self.device = torch.device("cpu")
        self._comm = comm

    def post(self, given: Any, give: Sequence[int], taken: Any, take: Sequence[int]) -> Callable[[], Any]:
        if max(sum(give), sum(take)) >= 2**31:
            raise RuntimeError(
                f"MPI_Alltoallv counts in 31 bits, and {max(sum(give), sum(take))} B are to be exchanged"
            )
        request = self._comm.Ialltoallv([given.numpy(), list(give), MPI.BYTE], [taken.numpy(), list(take), MPI.BYTE])
        wait: Callable[[], Any] = request.Wait
        return wait

    def finish(self) -> None:
        """Nothing is left under way once it was waited for."""


def _free(requests: list[MPI.Prequest]) -> None:
    if not MPI.Is_finalized():
        for request in requests:
            request.Free()


def _build(case: Case, comm: MPI.Comm, pattern: Pattern) -> Operation:
    """The operation with its buffers; what differs between collectives is only which call gets which of them."""
    kind = _TYPES.get(case.dtype) or _CARRIERS[DTYPES[case.dtype].itemsize]
    item = case.itemsize
    rank, root = comm.Get_rank(), case.root
    # MPI_Bcast knows one buffer only, whatever placement was asked for.
    if case.placement == "in" or case.collective == "broadcast":
        elements, source, target = pattern.in_place_slices()
        if case.collective == "reduce_scatter":
            # MPI puts the result at the start of the buffer, where NCCL leaves it in the rank's own block.
            target = slice(0, case.block_elements)
        buffer = aligned(elements * item)
        given, taken = _bytes_of(buffer, source, item), _bytes_of(buffer, target, item)
        repeatable = case.collective not in ("all_reduce", "reduce_scatter") and not (
            case.collective == "reduce" and rank == root
        )
        give, take = _in_place(case, buffer, rank)
    else:
        given, taken = aligned(pattern.input_elements * item), aligned(pattern.output_elements * item)
        repeatable = True
        give, take = _out_of_place(case, given, taken, rank)
    call = Collective(
        name=case.collective, give=give, take=take, type=kind, comm=comm, root=root,
        count=case.block_elements if case.collective in _BLOCKS else case.elements,
        op=_OPS[case.reduce_op or "sum"],  # unused where nothing is reduced
        to=(rank + 1) % comm.Get_size(), source=(rank - 1) % comm.Get_size(),
    )  # fmt: skip
    run = _mpi4py_call(call)
    return Operation(run=run, enqueue=run, input=given, output=taken, repeatable=repeatable, program=(call,))


# Those that MPI counts in elements of a block, one for each rank.
_BLOCKS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


def _bytes_of(buffer: Bytes, elements: slice, item: int) -> Bytes:
    return buffer[elements.start * item : elements.stop * item]


def _out_of_place(case: Case, given: Bytes, taken: Bytes, rank: int) -> tuple[Any, Any]:
    """What the call is to be given as the buffer to send from and the one to receive into."""
    at_root = rank == case.root
    if case.collective in ("reduce", "gather"):
        return given, taken if at_root else None
    if case.collective == "scatter":
        return given if at_root else None, taken
    return given, taken


def _in_place(case: Case, buffer: Bytes, rank: int) -> tuple[Any, Any]:
    at_root = rank == case.root
    here: Any = MPI.IN_PLACE
    if case.collective in ("reduce", "gather"):
        return (here, buffer) if at_root else (buffer, None)
    if case.collective == "scatter":
        return (buffer, here) if at_root else (None, buffer)
    return here, buffer


def _mpi4py_call(call: Collective) -> Callable[[], Any]:
    comm, root, op = call.comm, call.root, call.op
    give = [call.give, call.type] if isinstance(call.give, np.ndarray) else call.give
    take = [call.take, call.type] if isinstance(call.take, np.ndarray) else call.take
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": partial(comm.Allreduce, give, take, op),
        "all_gather": partial(comm.Allgather, give, take),
        "reduce_scatter": partial(comm.Reduce_scatter_block, give, take, op),
        "all_to_all": partial(comm.Alltoall, give, take),
        "broadcast": partial(comm.Bcast, take, root),
        "reduce": partial(comm.Reduce, give, take, op, root),
        "gather": partial(comm.Gather, give, take, root),
        "scatter": partial(comm.Scatter, give, take, root),
        "send_recv": partial(comm.Sendrecv, give, call.to, 0, take, call.source, 0),
        "barrier": comm.Barrier,
    }
    return calls[call.name]
