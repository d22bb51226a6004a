"""The nccl_raw backend over doubles of cupy and of NCCL's bindings, whose ranks are threads that really exchange data."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import commbench
from commbench.backends.base import BackendError, Context
from commbench.cases import DTYPES, Case, Sweep
from commbench.collectives import COLLECTIVES
from commbench.launch.runner import run_local
from commbench.measure.data import Pattern
from commbench.measure.operation import Operation, Post
from commbench.measure.timed import Start

DOUBLE = Path(__file__).parent / "cupy_double"
NCCL_TYPE = {name: number for number, name in enumerate(
    ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
)}  # fmt: skip
SUM, MAX = 0, 2  # ncclRedOp_t
MINE = ("nccl_raw", "nccl_calls", "nccl_memory", "nccl_libraries", "nccl_account", "cupy_device")


@pytest.fixture(scope="module")
def double() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cupy_double", DOUBLE / "cupy_double.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class World:
    """Ranks of one host as threads, on the doubles with or without nccl4py."""

    def __init__(self, double: ModuleType, monkeypatch: pytest.MonkeyPatch, mail: Path, nccl4py: bool) -> None:
        self.double, self.nccl4py = double, nccl4py
        monkeypatch.setenv("COMMBENCH_TEST_MAIL", str(mail))
        for name, module in double.modules(nccl4py).items():
            monkeypatch.setitem(sys.modules, name, module)
        for name in MINE:  # they hold the modules that they were first loaded with
            monkeypatch.delitem(sys.modules, f"commbench.backends.{name}", raising=False)
        self.module = importlib.import_module("commbench.backends.nccl_raw")

    def run(self, ranks: int, main: Callable[[Any], Any], forced: dict[str, str] | None = None, stop: bool = True,
            local_ranks: list[int] | None = None) -> list[Any]:  # fmt: skip
        """What ``main(backend)`` returns on each rank, started and stopped; the first error of any rank is raised."""
        found: list[Any] = [None] * ranks
        errors: list[BaseException] = []
        values: dict[tuple[int, int], Any] = {}
        meeting = threading.Barrier(ranks, timeout=20)

        def body(rank: int) -> None:
            counter = iter(range(1000))

            def agree(value: Any, decide: Callable[[list[Any]], Any]) -> Any:
                number = next(counter)
                values[number, rank] = value
                meeting.wait()
                return decide([values[number, other] for other in range(ranks)])

            context = Context(
                rank=rank, world=ranks, local_rank=local_ranks[rank] if local_ranks else rank, hosts=("a",) * ranks,
                address="127.0.0.1", interface="lo", share=lambda value: agree(value, lambda all_: all_[0]),
                agree=agree, forced=forced or {},
            )  # fmt: skip
            self.double.local.calls = []
            backend = self.module.NcclRaw()
            try:
                backend.start(context)
                backend.meet = meeting.wait
                found[rank] = main(backend)
                if stop:
                    backend.stop()
            except BaseException as error:  # noqa: BLE001  told by the thread that waits
                errors.append(error)
                meeting.abort()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        told = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        if told:
            raise told[0]
        return found

    def calls(self) -> list[tuple[Any, ...]]:
        """This rank's calls of NCCL so far, forgotten then."""
        found, self.double.local.calls = self.double.local.calls, []
        return list(found)


@pytest.fixture
def world(double: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    yield World(double, monkeypatch, tmp_path, nccl4py=True)
    double.state.async_error, double.state.symmetric = 0, True
    for name in MINE:
        sys.modules.pop(f"commbench.backends.{name}", None)


@pytest.fixture(params=["nccl4py", "cupy"])
def either(
    request: pytest.FixtureRequest, double: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[World]:
    yield World(double, monkeypatch, tmp_path, nccl4py=request.param == "nccl4py")
    for name in MINE:
        sys.modules.pop(f"commbench.backends.{name}", None)


def case(ranks: int = 3, **fields: Any) -> Case:
    spec = COLLECTIVES[fields.get("collective", "all_reduce")]
    base: dict[str, Any] = {
        "collective": spec.name, "backend": "nccl_raw", "bytes": 3072 if spec.sized else 0, "ranks": ranks, "nodes": 1,
        "reduce_op": "sum" if spec.reduces else None, "root": 1 if spec.rooted else 0, "requested_bytes": 3072,
    }  # fmt: skip
    return Case(**{**base, **fields})


def pattern_of(case: Case, rank: int) -> Pattern:
    return Pattern(
        collective=case.spec, dtype=case.itemtype, op=case.reduce_op, ranks=case.ranks, rank=rank, root=case.root,
        block_elements=case.block_elements, seed=7,
    )  # fmt: skip


def fill(operation: Operation, pattern: Pattern, iteration: int) -> None:
    pattern.poison(operation.output)
    pattern.fill(operation.input, iteration)
    operation.upload()


def wrong(operation: Operation, pattern: Pattern, iteration: int) -> int:
    operation.download()
    return pattern.wrong(operation.output, iteration)


def performed(backend: Any, case: Case, members: tuple[int, ...] | None = None) -> int:
    """Wrong elements of this rank over two iterations of a fresh operation."""
    members = members or tuple(range(case.ranks))
    pattern = pattern_of(case, members.index(backend._rank))
    operation = backend.operation(case, members, pattern)
    found = 0
    for iteration in (0, 1):
        fill(operation, pattern, iteration)
        operation.run()
        found += wrong(operation, pattern, iteration)
    return found


# -- the doubles are like what they stand in for ---------------------------------------------------


def parameters(function: Any) -> list[str]:
    """The names of the parameters of a Python or Cython function, from its signature or the line that Cython leaves."""
    try:
        found = list(inspect.signature(function).parameters)
    except (ValueError, TypeError):
        match = re.match(r"[\w.]+\((.*?)\)(?:\s*->.*)?$", (function.__doc__ or "").strip().split("\n")[0])
        assert match, f"{function!r} tells no signature"
        found = [part.split("=")[0].split()[-1] for part in match[1].split(",") if part.strip() not in ("*", "/", "")]
    return [name for name in found if name not in ("self", "args", "kwargs")]


def installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} is not installed here: {error}")


def test_the_double_has_the_signatures_of_nccl4py(double: ModuleType) -> None:
    real = installed("nccl.bindings.nccl")
    for function in double.BINDINGS:
        assert parameters(function) == parameters(getattr(real, function.__name__)), function.__name__
    assert issubclass(real.NCCLError, Exception) and not issubclass(real.NCCLError, RuntimeError)
    assert callable(real.UniqueId.from_buffer)


def test_the_double_has_the_signatures_of_cupy(double: ModuleType) -> None:
    cupy = installed("cupy")
    for name in ("begin_capture", "end_capture", "synchronize", "use"):
        assert parameters(getattr(double.Stream, name)) == parameters(getattr(cupy.cuda.Stream, name)), name
    for name in ("Stream", "Event", "Device"):
        assert parameters(getattr(double, name)) == parameters(getattr(cupy.cuda, name)), name
    assert parameters(double.Event.record) == parameters(cupy.cuda.Event.record)
    assert isinstance(inspect.getattr_static(cupy.cuda.Event, "done"), property)
    assert parameters(double.Graph.launch) == parameters(cupy.cuda.graph.Graph.launch)
    assert parameters(double.MemoryPointer.memset_async) == parameters(cupy.cuda.MemoryPointer.memset_async)
    for function in (double.alloc, double.alloc_pinned_memory, double.get_elapsed_time):
        assert parameters(function) == parameters(getattr(cupy.cuda, function.__name__)), function.__name__
    for function in double.RUNTIME:
        assert parameters(function) == parameters(getattr(cupy.cuda.runtime, function.__name__)), function.__name__
    assert issubclass(cupy.cuda.runtime.CUDARuntimeError, RuntimeError)
    assert parameters(double.RawKernel) == parameters(cupy.RawKernel)
    assert parameters(double.RawKernel.compile) == parameters(cupy.RawKernel.compile)
    assert parameters(double.zeros) == parameters(cupy.zeros)
    assert all(hasattr(cupy, name) for name in double.UFUNCS)


def test_the_double_has_the_signatures_of_cupys_nccl(double: ModuleType) -> None:
    real = installed("cupy_backends.cuda.libs.nccl")
    names = [name for name in vars(double.NcclCommunicator) if not name.startswith("_")]
    assert len(names) == 11
    for name in names:
        mine, its = getattr(double.NcclCommunicator, name), getattr(real.NcclCommunicator, name)
        assert parameters(mine) == parameters(its), name
    assert parameters(double.NcclCommunicator) == parameters(real.NcclCommunicator)
    assert isinstance(real.get_unique_id(), bytes)
    assert all(callable(getattr(real, name)) for name in ("groupStart", "groupEnd", "get_version"))


def test_numbers_are_those_of_nccl(world: World) -> None:
    libraries = sys.modules["commbench.backends.nccl_libraries"]
    assert libraries.TYPES == NCCL_TYPE and set(NCCL_TYPE) == set(DTYPES)
    assert libraries.OPS == {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}


def test_numbers_are_those_of_nccl4py(double: ModuleType) -> None:
    real = installed("nccl.bindings.nccl")
    words = {"bfloat16": "Bfloat16", "float8_e4m3fn": "Float8e4m3", "float8_e5m2": "Float8e5m2"}
    for name, number in NCCL_TYPE.items():
        assert real.DataType[words.get(name, name.capitalize())] == number
    assert [real.RedOp[name] for name in ("Sum", "Prod", "Max", "Min", "Avg")] == [0, 1, 2, 3, 4]


# -- data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["out", "in"])
def test_every_collective_is_exact(either: World, placement: str) -> None:
    names = [name for name, spec in COLLECTIVES.items() if placement == "out" or spec.in_place]
    assert len(names) == (10 if placement == "out" else 7)

    def main(backend: Any) -> dict[str, int]:
        return {name: performed(backend, case(collective=name, placement=placement)) for name in names}

    assert either.run(3, main) == [dict.fromkeys(names, 0)] * 3


def test_every_type_is_moved_and_reduced(world: World) -> None:
    """Reductions of float8 are left out: the double has none."""
    ops = ("sum", "prod", "min", "max", "avg")
    cases = [case(2, collective="all_to_all", dtype=dtype) for dtype in DTYPES]
    cases += [case(2, dtype=dtype, reduce_op=op) for dtype in DTYPES for op in ops if not dtype.startswith("float8")]
    assert len(cases) == 62
    assert world.run(2, lambda backend: [performed(backend, one) for one in cases]) == [[0] * 62] * 2


def test_grouped_messages_move_what_one_call_moves(world: World) -> None:
    names = ["all_to_all", "gather", "scatter"]
    cases = [
        case(collective=name, placement=how)
        for name in names
        for how in ("out", "in")
        if name[0] != "a" or how == "out"
    ]

    def main(backend: Any) -> tuple[list[int], set[str]]:
        world.calls()
        found = [performed(backend, one) for one in cases]
        return found, {name for name, *_ in world.calls()}

    for whole, forced in ((True, {}), (False, dict.fromkeys(names, "grouped"))):
        for found, called in world.run(3, main, forced=forced):
            assert found == [0] * 5
            assert called == (set(names) if whole else {"group_start", "send", "recv", "group_end"})


def test_groups_have_communicators_of_their_own(either: World) -> None:
    def main(backend: Any) -> int:
        groups = ((0, 2), (1, 3))
        backend.join(groups)
        backend.join(groups)  # once is enough
        members = groups[backend._rank % 2]
        found = performed(backend, case(2, collective="all_gather", group="rail"), members)
        backend.join(((0, 2), (3,)))  # a group that there is, beside others
        if backend._rank in (0, 2):
            found += performed(backend, case(2, group="pair:0-2"), (0, 2))
        backend.join(((1, 2),))  # of which ranks 0 and 3 are no part
        if backend._rank in (1, 2):
            found += performed(backend, case(2, group="pair:1-2"), (1, 2))
        return found

    assert either.run(4, main) == [0] * 4


# -- what NCCL is called with ----------------------------------------------------------------------


def called(backend: Any, world: World, case: Case) -> tuple[list[tuple[Any, ...]], tuple[int, int]]:
    """The calls that one operation makes, and the addresses of the memory that holds input and output (0: none)."""
    rank = backend._rank
    operation = backend.operation(case, tuple(range(case.ranks)), pattern_of(case, rank))
    fill(operation, pattern_of(case, rank), 0)
    world.calls()
    operation.enqueue()
    found = world.calls()
    backend.meet()
    operation.finish()
    addresses = operation.upload.__self__.addresses  # its Buffers
    return found, addresses


# 3072 B of float32 over 3 ranks are 768 elements, 256 to a rank: count, ncclRedOp_t and root of NCCL's call.
CALLS = {
    "all_reduce": (768, MAX, 0), "all_gather": (256, None, 0), "reduce_scatter": (256, MAX, 0),
    "broadcast": (768, None, 1), "reduce": (768, MAX, 1), "all_to_all": (256, None, 0), "gather": (256, None, 1),
    "scatter": (256, None, 1),
}  # fmt: skip


@pytest.mark.parametrize("placement", ["out", "in"])
def test_one_call_with_the_count_and_addresses_that_nccl_wants(world: World, placement: str) -> None:
    names = [name for name in CALLS if placement == "out" or COLLECTIVES[name].in_place]

    def main(backend: Any) -> Any:
        ops = {name: "max" if COLLECTIVES[name].reduces else None for name in names}
        cases = [case(collective=name, placement=placement, reduce_op=ops[name]) for name in names]
        return [called(backend, world, one) for one in cases]

    for rank, found in enumerate(world.run(3, main)):
        for collective, ([(name, send, recv, *rest)], addresses) in zip(names, found, strict=True):
            count, op, root = CALLS[collective]
            assert (name, rest) == (collective, [count, NCCL_TYPE["float32"], op, root])
            assert (send, recv) == addresses
            sends = collective not in ("broadcast", "scatter") or rank == 1
            takes = collective not in ("reduce", "gather") or rank == 1
            if placement == "out":
                assert (send != 0, recv != 0, send != recv) == (sends, takes, True)
            elif sends and takes:
                # nccl.h: the smaller buffer lies at this rank's block of the larger.
                own = {"all_gather": 1, "gather": 1, "reduce_scatter": -1, "scatter": -1}.get(collective, 0)
                assert send - recv == own * rank * 1024


def test_messages_of_an_all_to_all_are_one_group(either: World) -> None:
    """Three ranks, 4 bytes a block."""
    one = case(collective="all_to_all", bytes=12)
    forced = {"all_to_all": "grouped"} if either.nccl4py else {}
    for found, (send, recv) in either.run(3, lambda backend: called(backend, either, one), forced=forced):
        sends = [("send", send + 4 * peer, 1, NCCL_TYPE["float32"], peer) for peer in range(3)]
        receives = [("recv", recv + 4 * peer, 1, NCCL_TYPE["float32"], peer) for peer in range(3)]
        assert found == [("group_start",), *sends, *receives, ("group_end",)]


@pytest.mark.parametrize(("collective", "placement"), [("gather", "out"), ("gather", "in"), ("scatter", "in")])
def test_messages_of_rooted_collectives(world: World, collective: str, placement: str) -> None:
    one = case(collective=collective, placement=placement, bytes=12)
    found = world.run(3, lambda backend: called(backend, world, one), forced={collective: "grouped"})
    peers = [0, 1, 2] if placement == "out" else [0, 2]  # in place the root's own block is where it belongs
    for rank, (calls, (send, recv)) in enumerate(found):
        inner = calls[1:-1]
        if rank == 1:
            name, base = ("recv", recv) if collective == "gather" else ("send", send)
            # In place the call's other address is that of the root's own block, the base that of block 0.
            several = [(name, base + 4 * peer, 1, 7, peer) for peer in peers]
            assert [call for call in inner if call[0] == name] == several
            assert len(inner) == len(several) + (placement == "out")
        else:
            assert inner == [("send", send, 1, 7, 1) if collective == "gather" else ("recv", recv, 1, 7, 1)]


def test_send_recv_goes_round(world: World) -> None:
    one = case(collective="send_recv", dtype="bfloat16")
    for rank, (found, (send, recv)) in enumerate(world.run(3, lambda backend: called(backend, world, one))):
        there, back = ("send", send, 1536, 9, (rank + 1) % 3), ("recv", recv, 1536, 9, (rank - 1) % 3)
        assert found == [("group_start",), there, back, ("group_end",)]


def test_a_barrier_is_an_all_reduce_of_one_element(world: World) -> None:
    one = case(collective="barrier")
    for [(name, send, recv, count, kind, op, _)], addresses in world.run(
        2, lambda b: called(b, world, case(2, collective="barrier"))
    ):
        assert (name, count, kind, op, addresses) == ("all_reduce", 1, NCCL_TYPE["float32"], SUM, (0, 0))
        assert send == recv != 0
    assert one.bytes == 0


def test_a_group_that_fails_is_closed(world: World) -> None:
    def main(backend: Any) -> list[str]:
        caller = backend._caller((0, 1))

        def refuse() -> None:
            raise world.double.NCCLError(4)

        world.calls()
        with pytest.raises(BackendError, match=r"^NCCL: InvalidArgument \(4\): said by the double$"), backend._errors():
            caller.group([refuse])()
        assert world.double.local.group is None
        return [name for name, *_ in world.calls()]

    assert world.run(2, main) == [["group_start", "group_end"]] * 2


# -- buffers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "tell", "forget"),
    [
        ("registered", "comm_register", "comm_deregister"),
        ("symmetric", "comm_window_register", "comm_window_deregister"),
    ],
)
def test_nccl_is_told_of_its_own_memory(world: World, kind: str, tell: str, forget: str) -> None:
    cases = [
        case(collective=name, buffers=kind, placement=how)
        for name in ("all_reduce", "scatter")
        for how in ("out", "in")
    ]

    def main(backend: Any) -> Any:
        found = []
        for one in cases:
            world.calls()
            assert performed(backend, one) == 0
            found.append([call for call in world.calls() if call[0] not in (one.collective, "free_all_blocks")])
        return found

    for calls_of in world.run(3, main):
        for one, calls in zip(cases, calls_of, strict=True):
            assert [name for name, *_ in calls] == ["mem_alloc", tell, forget, "mem_free"]
            (_, address, size), (_, *told), (_, handle), (_, freed) = calls
            # 3072 B in whole pages, whatever a rank needs of them; out of place once for each direction.
            assert size == (4096 if one.placement == "in" else 8192)
            assert told[:2] == [address, size] and handle == freed == address
            assert told[2:] == ([1] if kind == "symmetric" else [])  # NCCL_WIN_COLL_SYMMETRIC


def test_buffers_are_given_back_before_communicators_end(world: World) -> None:
    def main(backend: Any) -> Any:
        one = case(2, buffers="symmetric")
        backend.kept = backend.operation(one, (0, 1), pattern_of(one, backend._rank))
        backend.calls = world.double.local.calls
        return backend

    for backend in world.run(2, main):
        names = [name for name, *_ in backend.calls]
        assert names[-4:] == ["comm_window_deregister", "mem_free", "comm_finalize", "comm_destroy"]


def test_a_window_that_nccl_does_not_make_is_a_refusal(world: World) -> None:
    world.double.state.symmetric = False

    def main(backend: Any) -> Any:
        one = case(2, buffers="symmetric")
        world.calls()
        with pytest.raises(BackendError, match=r"^NCCL makes no symmetric window here: its ranks cannot map"):
            backend.operation(one, (0, 1), pattern_of(one, backend._rank))
        return [name for name, *_ in world.calls()]

    assert world.run(2, main) == [["free_all_blocks", "mem_alloc", "comm_window_register", "mem_free"]] * 2


def test_cupys_nccl_has_plain_buffers_only(double: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = World(double, monkeypatch, tmp_path, nccl4py=False)
    reasons = world.run(2, lambda backend: [backend.why_not(case(2, buffers=kind)) for kind in ("plain", "registered")])
    assert reasons == [[None, "cupy.cuda.nccl 14.2.0 with NCCL 2.32.3 has no registered buffers"]] * 2


def test_outside_of_nccl_raw_buffers_are_plain() -> None:
    from commbench.backends import why_not_buffers

    assert why_not_buffers(case(buffers="symmetric")) is None
    assert why_not_buffers(case(backend="gloo")) is None
    assert why_not_buffers(case(backend="gloo", buffers="registered")) == (
        "gloo cannot be told of its buffers: there are no registered ones"
    )
    assert why_not_buffers(case(algorithm="own:ring", buffers="registered")) == (
        "the buffers of commbench's own algorithms are plain, not registered"
    )


# -- errors ----------------------------------------------------------------------------------------


def test_an_error_that_no_call_tells_of_ends_the_round_and_the_communicators(either: World) -> None:
    def main(backend: Any) -> list[str]:
        one = case(2)
        operation = backend.operation(one, (0, 1), pattern_of(one, backend._rank))
        loop = backend.loop(one)
        loop.isolated([operation], 1, 0, Start(beat=lambda phase, index: None))
        backend.meet()
        either.double.state.async_error = 6
        with pytest.raises(BackendError, match="^NCCL: ") as told:
            loop.streamed([operation], 2, 0, Start(beat=lambda phase, index: None))
        assert "\n" not in str(told.value)
        backend.meet()
        either.double.state.async_error = 0
        either.calls()
        backend.stop()
        return [name for name, *_ in either.calls()]

    abort = "comm_abort" if either.nccl4py else "abort"
    assert either.run(2, main, stop=False) == [[abort]] * 2


def test_a_rank_that_was_not_stopped_aborts_at_its_end(world: World) -> None:
    backends = world.run(1, lambda backend: backend, stop=False)
    world.double.local.calls = []
    backends[0]._at_exit()
    assert world.calls() == [("comm_abort",)]


def test_ranks_share_a_gpu_only_if_nccl_is_told_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["cupy.cuda.runtime"], "getDeviceCount", lambda: 1)
    with pytest.raises(BackendError, match=r"^ranks 0 and 1 on a have the same GPU: start at most one rank a GPU$"):
        world.run(2, lambda backend: None, local_ranks=[0, 0])
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    taints = world.run(2, lambda backend: backend.tainted(), local_ranks=[0, 0])
    assert taints == ["several ranks on one GPU: no timing"] * 2


def test_it_names_the_gpu_that_is_to_be_watched(world: World) -> None:
    assert world.run(2, lambda backend: backend.gpu()) == ["00" * 16, "01" * 16]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda found: found.pop("nccl.bindings.nccl").__dict__.pop("allto_all"), "nccl4py cannot be imported"),
        (lambda found: vars(found["nccl.bindings.nccl"]).pop("mem_alloc"), r"nccl4py \S+( \S+)* has no mem_alloc"),
        (
            lambda found: vars(found["nccl.bindings.nccl"]).update(get_version=lambda: 21703),
            r".* loads NCCL 2\.17\.3, older",
        ),
    ],
)
def test_without_any_nccl_the_reasons_are_told(
    world: World, monkeypatch: pytest.MonkeyPatch, damage: Callable[[dict[str, Any]], Any], said: str
) -> None:
    found = world.double.modules()
    damage(found)
    found["cupy.cuda.nccl"].available = False
    for name, module in {**dict.fromkeys(["nccl.bindings.nccl"]), **found}.items():
        monkeypatch.setitem(sys.modules, name, module)
    load = sys.modules["commbench.backends.nccl_libraries"].load
    with pytest.raises(BackendError, match=rf"^no NCCL \({said}.*; cupy finds no NCCL\): pip install 'commb") as told:
        load()
    assert "\n" not in str(told.value)
    found["cupy.cuda.nccl"].available = True
    assert load().name == "cupy.cuda.nccl 14.2.0"


def test_ranks_with_different_libraries_are_told_apart(world: World) -> None:
    class Mixed:
        version = 23203

        def __init__(self) -> None:
            self.name = threading.current_thread().name

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.module, "load", Mixed)
        with pytest.raises(
            BackendError, match=r"^rank 0 has \S+.* with NCCL 2\.32\.3, rank 1 has .*: install the same"
        ):
            world.run(2, lambda backend: None)


# -- timing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_rounds_are_timed_on_the_device_and_leave_right_data(either: World, execution: str) -> None:
    one = case(2, execution=execution, timing="streamed")

    def main(backend: Any) -> Any:
        pattern = pattern_of(one, backend._rank)
        operations = [backend.operation(one, (0, 1), pattern) for _ in range(3)]
        for index, operation in enumerate(operations):
            fill(operation, pattern, index)
            operation.run()
        launch = operations[0].capture()
        assert wrong(operations[0], pattern, 0) == 0
        fill(operations[0], pattern, 0)
        launch()
        operations[0].finish()
        found = wrong(operations[0], pattern, 0)
        loop = backend.loop(one)
        start = Start(beat=lambda phase, index: None)
        alone = loop.isolated(operations, 3, 0, start)
        for index, operation in enumerate(operations):
            fill(operation, pattern, index)
        streamed = loop.streamed(operations, 6, 0, start)
        found += sum(wrong(operation, pattern, index) for index, operation in enumerate(operations))
        return found, alone, streamed, loop.on_device, loop.overhead_s()

    for found, alone, streamed, on_device, overhead in either.run(2, main):
        assert found == 0 and on_device and overhead >= 0
        assert alone.stamps.shape == (3, 2) and streamed.stamps.shape == (1, 2)
        for stamps in (alone.stamps, streamed.stamps):
            assert (stamps[:, 1] > stamps[:, 0]).all()
        assert alone.host_s > 0 and alone.starved == streamed.starved == 0


def test_what_cannot_be_captured_is_told_and_leaves_the_stream_usable(world: World) -> None:
    one = case(1, collective="all_reduce")

    def main(backend: Any) -> int:
        operation = backend.operation(one, (0,), pattern_of(one, 0))
        backend._device.capture(operation.enqueue)

        def refuse() -> None:
            raise world.double.NCCLError(5)

        with pytest.raises(BackendError, match="^NCCL: InvalidUsage"), backend._errors():
            backend._device.capture(refuse)
        with pytest.raises(BackendError, match="^CUDA: cudaErrorStreamCaptureInvalidated"), backend._errors():
            backend._device.capture(lambda: None)
        return performed(backend, one)

    assert world.run(1, main) == [0]


def test_without_a_compiler_there_are_no_pauses(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMBENCH_TEST_NO_COMPILER", "1")

    def main(backend: Any) -> Any:
        backend._device.idle(1.0)
        return backend.settings()["no pauses"]

    assert world.run(1, main) == ["CuPy failed to load libnvrtc.so.13"]


# -- messages --------------------------------------------------------------------------------------


def test_a_messenger_moves_copies_and_reduces(either: World) -> None:
    def main(backend: Any) -> Any:
        rank, messenger = backend._rank, backend.messenger((0, 1))
        mine, other, target = (messenger.buffer(16) for _ in range(3))
        messenger.finish()  # they are zero from now on
        mine._view.view(np.float32)[:] = rank + 1
        peer = 1 - rank
        step = messenger.step(
            [Post(mine, peer), Post(mine[:0], peer, 1)], [Post(other, peer), Post(other[:0], peer, 1)]
        )
        add = messenger.reduce(target, mine, other, "float32", "sum")
        copy = messenger.copy(other[:8], target[8:])
        messenger.step([], [])()
        messenger.copy(mine[:0], other[:0])()
        del mine, target
        gc.collect()
        messenger.repeat([[step, add, copy]])(2)
        messenger.finish()
        return other._view.view(np.float32).tolist()

    assert either.run(2, main) == [[3.0, 3.0, 2.0, 2.0], [3.0, 3.0, 1.0, 1.0]]


def test_an_operation_of_messages(world: World) -> None:
    def main(backend: Any) -> Any:
        messenger = backend.messenger((0, 1))
        given, taken = messenger.buffer(4), messenger.buffer(4)
        step = messenger.step([Post(given, 1 - backend._rank)], [Post(taken, 1 - backend._rank)])
        operation = messenger.operation([step], given, taken, True)
        operation.input[:] = backend._rank + 5
        operation.upload()
        operation.run()
        operation.download()
        return operation.output.tolist()

    assert world.run(2, main) == [[6] * 4, [5] * 4]


@pytest.mark.parametrize(("dtype", "op", "can"), [
    ("float32", "sum", True), ("float16", "min", True), ("int32", "bxor", True), ("float32", "band", False),
    ("bfloat16", "sum", False), ("float8_e5m2", "max", False), ("int8", "avg", False),
])  # fmt: skip
def test_what_cupy_reduces(world: World, dtype: str, op: str, can: bool) -> None:
    reason = world.module.NcclRaw().why_not_reduce(dtype, op)
    assert reason == (
        None if can else f"messages over nccl_raw are reduced by cupy, which has no {op!r} of two {dtype}"
    )


# -- what it says of itself ------------------------------------------------------------------------


def test_what_it_tells(either: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)

    def main(backend: Any) -> Any:
        reasons = [backend.why_not(case(2, dtype="int32", reduce_op=op)) for op in ("avg", "bor")]
        return (
            backend.version(),
            backend.settings(),
            reasons,
            backend.chosen(case(2, algorithm="grouped"), None),
            backend.device_memory(),
        )

    library = r"nccl4py \S+( \S+)*" if either.nccl4py else r"cupy\.cuda\.nccl 14\.2\.0"
    how = "one call" if either.nccl4py else "grouped sends and receives"
    for version, settings, reasons, chosen, memory in either.run(2, main):
        assert re.fullmatch(rf"NCCL 2\.32\.3, {library}, cupy 14\.2\.0, CUDA 13\.0", version)
        assert (settings["device"], settings["all_to_all"], settings["gather"]) == ("Double 9000", how, how)
        assert re.fullmatch(library, settings["library"])
        assert reasons == [None, "NCCL has no reduce operation 'bor'"]
        assert chosen is None and memory == (80 << 30) + (1 << 20)


def test_types_come_with_versions(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.double, "VERSION", 22304)

    def main(backend: Any) -> Any:
        gathered = case(2, collective="all_gather", dtype="float8_e4m3fn")
        kinds = [backend.why_not(case(2, buffers=kind)) is None for kind in ("plain", "registered", "symmetric")]
        return backend.why_not(gathered), kinds, backend.settings()["all_to_all"]

    found = world.run(2, main)
    assert found == [("NCCL 2.23.4 has no type float8_e4m3fn", [True, True, False], "grouped sends and receives")] * 2


def test_a_graph_registers_plain_buffers(world: World) -> None:
    cases = [case(1, execution=how, buffers=kind) for how in ("eager", "graph") for kind in ("plain", "registered")]
    (notes,) = world.run(1, lambda backend: [backend.note(one) for one in cases])
    assert [note is None for note in notes] == [True, True, False, True]
    assert "NCCL_GRAPH_REGISTER" in notes[2]


def test_torch_is_never_loaded(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(DOUBLE)!r})
import cupy_double
cupy_double.install()
from commbench.backends import REGISTRY
from commbench.backends.base import Context
backend = REGISTRY.load("nccl_raw")()
backend.start(Context(rank=0, world=1, local_rank=0, hosts=("a",), address="127.0.0.1", interface="lo",
                      share=lambda value: value))
backend.settings(), backend.version(), backend.stop()
assert not [name for name in sys.modules if name.split(".")[0] == "torch"]
"""
    environment = {
        **os.environ,
        "COMMBENCH_TEST_MAIL": str(tmp_path),
        "PYTHONPATH": str(Path(commbench.__file__).parents[1]),
    }
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=environment)


# -- a run -----------------------------------------------------------------------------------------


def test_a_run_on_ranks_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mail = tmp_path / "mail"
    mail.mkdir()
    path = os.pathsep.join(filter(None, (str(DOUBLE), os.environ.get("PYTHONPATH"))))
    for name, value in {"PYTHONPATH": path, "COMMBENCH_TEST_MAIL": str(mail), "COMMBENCH_TEST_GPUS": "2"}.items():
        monkeypatch.setenv(name, value)
    sweep = Sweep(
        backends=("nccl_raw",), collectives=("all_reduce", "all_to_all"), sizes=(4096,), iterations=4, budget_s=5.0,
        executions=("eager", "graph"), buffers=("plain", "symmetric"), algorithms=("library", "own:ring"),
        timings=("isolated",), left_out=(("all_to_all", "own:ring"),),
    )  # fmt: skip
    found = run_local(sweep, ranks=2, out=tmp_path / "results", on_event=lambda event: None)
    assert found.exit_code == 0, found
    frame = commbench.load(tmp_path / "results")
    own = frame["algorithm"] == "own:ring"
    assert frame[own].groupby("buffers")["status"].unique().to_dict() == {"plain": ["ok"], "symmetric": ["skipped"]}
    library = frame[~own]
    assert len(library) == 8 and (library["status"] == "ok").all()
    assert (library["verified"] > 0).all() and (library["wrong"] == 0).all()
    assert (library["start"] == "stream").all() and (library["host_s"] > 0).all()
    assert set(library["buffers"]) == {"plain", "symmetric"} and library["case_id"].is_unique
