"""Own algorithms on ranks that are threads: every algorithm gives the exact answer, element by element.

The messenger here buffers nothing: a send is over when its receiver has taken it, so a plan that relies on buffering
would wait for ever.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from commbench.algorithms.executor import Executor, note, why_not
from commbench.cases import DTYPES, Case
from commbench.collectives import COLLECTIVES
from commbench.measure.data import Pattern
from commbench.measure.operation import Operation, Post, in_order, rotate
from commbench.schedules import ALGORITHMS, HIERARCHICAL, PIPELINED, count
from commbench.schedules.own import own_schedule

Memory = NDArray[np.uint8]
PATIENCE_S = 10.0
OPS: dict[str, Any] = {
    "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
}  # fmt: skip
PAIRS = [(name, one) for name, known in ALGORITHMS.items() for one in known if (name, one) not in HIERARCHICAL]


@dataclass
class Wires:
    """Messages under way between threads, by (source, target, tag)."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    posted: dict[tuple[int, int, int], deque[tuple[Memory, threading.Event]]] = field(
        default_factory=lambda: defaultdict(deque)
    )


class Messenger:
    """A rank's messages; ``sent`` are the lengths of those that it has sent."""

    def __init__(self, wires: Wires, rank: int) -> None:
        self.wires, self.rank = wires, rank
        self.sent: list[int] = []

    def buffer(self, size: int) -> Memory:
        return np.full(size, 0x5A, dtype=np.uint8)  # nothing may rely on memory that is zero

    def step(self, sends: Sequence[Post], receives: Sequence[Post]) -> Callable[[], Any]:
        def exchange() -> None:
            taken = []
            with self.wires.changed:
                for post in sends:
                    taken.append(threading.Event())
                    self.wires.posted[self.rank, post.peer, post.tag].append((post.memory, taken[-1]))
                    self.sent.append(len(post.memory))
                self.wires.changed.notify_all()
                for post in receives:
                    wire = self.wires.posted[post.peer, self.rank, post.tag]
                    assert self.wires.changed.wait_for(lambda wire=wire: wire, PATIENCE_S), "no message comes"  # type: ignore[misc]
                    memory, done = wire.popleft()
                    assert len(memory) == len(post.memory)
                    post.memory[:] = memory
                    done.set()
            assert all(event.wait(PATIENCE_S) for event in taken), "nobody takes the message"

        return exchange

    def copy(self, target: Memory, source: Memory) -> Callable[[], Any]:
        assert len(target) == len(source)
        return partial(np.copyto, target, source)

    def reduce(self, target: Memory, left: Memory, right: Memory, dtype: str, op: str) -> Callable[[], Any]:
        return partial(OPS[op], left.view(dtype), right.view(dtype), out=target.view(dtype))

    def finish(self) -> None:
        """Nothing is left under way when a step returns."""

    def repeat(self, sets: Sequence[Sequence[Callable[[], Any]]]) -> Callable[[int], Any]:
        return rotate(sets)

    def operation(
        self, calls: Sequence[Callable[[], Any]], given: Memory, taken: Memory, repeatable: bool
    ) -> Operation:
        call = in_order(calls)
        return Operation(run=call, enqueue=call, input=given, output=taken, repeatable=repeatable)


def make_case(collective: str, algorithm: str, ranks: int, block: int, **fields: Any) -> Case:
    spec = COLLECTIVES[collective]
    dtype = fields.pop("dtype", "int32")
    size = DTYPES[dtype].itemsize * block * (ranks if spec.split else 1) * spec.sized
    return Case(**{
        "collective": collective, "backend": "mpi", "algorithm": algorithm, "bytes": size, "requested_bytes": size,
        "dtype": dtype, "reduce_op": "sum" if spec.reduces else None, "ranks": ranks, "nodes": 1, **fields,
    })  # fmt: skip


@dataclass
class Rank:
    operations: list[Operation]
    pattern: Pattern
    messenger: Messenger

    def run(self, iterations: int) -> int:
        """Wrong elements of all iterations, which take turns with the sets of buffers."""
        wrong = 0
        for iteration in range(iterations):
            operation = self.operations[iteration % len(self.operations)]
            self.pattern.poison(operation.output)
            self.pattern.fill(operation.input, iteration)
            given = operation.input.copy()
            for _ in range(2 if operation.repeatable else 1):
                operation.run()
            wrong += self.pattern.wrong(operation.output, iteration)
            if operation.repeatable:
                assert np.array_equal(given, operation.input), "the input was overwritten"
        return wrong


def make_ranks(case: Case, hosts: tuple[int, ...] | None = None, sets: int = 2) -> list[Rank]:
    wires = Wires()
    members = tuple(range(case.ranks))
    found = []
    for rank in members:
        messenger = Messenger(wires, rank)
        executor = Executor(case, members, hosts or (0,) * case.ranks, messenger)
        pattern = Pattern(
            collective=case.spec, dtype=case.itemtype, op=case.reduce_op, ranks=case.ranks, rank=rank, root=case.root,
            block_elements=case.block_elements if case.spec.sized else 0, seed=3,
        )  # fmt: skip
        found.append(Rank([executor.operation(pattern, rank) for _ in range(sets)], pattern, messenger))
    return found


def run_case(case: Case, hosts: tuple[int, ...] | None = None, iterations: int = 3) -> list[Rank]:
    """Every rank's part, run at the same time and checked."""
    ranks = make_ranks(case, hosts)
    with ThreadPoolExecutor(len(ranks)) as threads:
        wrong = list(threads.map(lambda rank: rank.run(iterations), ranks))
    assert wrong == [0] * case.ranks, (case.title, case.ranks, case.block_elements)
    return ranks


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_every_algorithm_computes_for_any_ranks_sizes_roots_and_placements(collective: str, algorithm: str) -> None:
    spec = COLLECTIVES[collective]
    for ranks in range(2, 10):
        for block in (1, 3, 50) if spec.sized else (0,):
            for placement in ("out", "in") if spec.in_place else ("out",):
                root = (block + ranks // 2) % ranks if spec.rooted else 0
                run_case(make_case(collective, f"own:{algorithm}", ranks, block, placement=placement, root=root))


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
@pytest.mark.parametrize("pieces", [3, 16])
def test_pieces_may_be_more_than_elements(collective: str, algorithm: str, pieces: int) -> None:
    spec = COLLECTIVES[collective]
    for ranks, block in ((2, 1), (4, 5), (5, 40), (7, 2)):
        for placement in ("out", "in") if spec.in_place else ("out",):
            root = ranks - 1 if spec.rooted else 0
            case = make_case(collective, f"own:{algorithm}/{pieces}", ranks, block, placement=placement, root=root)
            run_case(case)


@pytest.mark.parametrize(("collective", "algorithm"), sorted(HIERARCHICAL))
@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (1, 0, 0, 1), (0, 1, 2, 2, 1, 0, 0, 2, 1), (0, 0, 0, 1, 1, 1)])
def test_hierarchical_algorithms_compute(collective: str, algorithm: str, hosts: tuple[int, ...]) -> None:
    spec = COLLECTIVES[collective]
    for name, block in ((f"own:{algorithm}", 13), (f"own:{algorithm}", 2), (f"own:{algorithm}/3", 7)):
        for placement in ("out", "in") if spec.in_place else ("out",):
            root = len(hosts) - 2 if spec.rooted else 0
            run_case(make_case(collective, name, len(hosts), block, placement=placement, root=root), hosts)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int8", "uint8", "int64", "uint64"])
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "band", "bor", "bxor"])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "reduce"])
def test_types_and_ops(collective: str, op: str, dtype: str) -> None:
    if op in ("band", "bor", "bxor") and DTYPES[dtype].kind == "float":
        return
    for algorithm in ALGORITHMS[collective]:
        if (collective, algorithm) not in HIERARCHICAL:
            run_case(make_case(collective, f"own:{algorithm}", 4, 33, dtype=dtype, reduce_op=op))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_what_is_only_moved_may_be_of_any_type(dtype: str) -> None:
    for collective in ("all_gather", "all_to_all", "broadcast", "scatter"):
        for algorithm in ALGORITHMS[collective]:
            if (collective, algorithm) not in HIERARCHICAL:
                run_case(make_case(collective, f"own:{algorithm}", 3, 33, dtype=dtype))


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_messages_and_bytes_are_those_of_the_schedule(collective: str, algorithm: str) -> None:
    for ranks in (2, 5, 8):
        name = f"own:{algorithm}/4" if (collective, algorithm) in PIPELINED else f"own:{algorithm}"
        case = make_case(collective, name, ranks, 840 * 8)
        wanted = count(own_schedule(collective, name, case.bytes, (0,) * ranks))
        found = make_ranks(case, sets=1)
        with ThreadPoolExecutor(ranks) as threads:
            list(threads.map(lambda rank: rank.operations[0].run(), found))
        assert [sum(rank.messenger.sent) for rank in found] == [share * case.bytes for share in wanted.sent]
        assert sum(len(rank.messenger.sent) for rank in found) == wanted.messages


def test_what_has_no_element_is_not_sent_and_a_barrier_sends_empty_messages() -> None:
    ranks = run_case(make_case("all_reduce", "own:ring", 4, 1), iterations=1)
    # One element in four pieces: the one that is not empty takes 2(n-1) hops, twice as the run is repeated.
    assert Counter(size for rank in ranks for size in rank.messenger.sent) == {4: 2 * 6}
    ranks = run_case(make_case("barrier", "own:dissemination", 5, 0), iterations=1)
    assert [rank.messenger.sent for rank in ranks] == [[0] * 6] * 5


def test_no_rank_leaves_a_barrier_before_all_have_entered() -> None:
    ranks = make_ranks(make_case("barrier", "own:dissemination", 6, 0))
    entered = 0
    lock = threading.Lock()

    def enter(rank: Rank) -> int:
        nonlocal entered
        with lock:
            entered += 1
        rank.operations[0].run()
        return entered

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(enter, ranks)) == [6] * 6


@pytest.mark.parametrize(
    ("collective", "placement", "repeatable"),
    [("all_reduce", "out", True), ("all_reduce", "in", False), ("all_gather", "in", True), ("broadcast", "out", True)],
)
def test_what_overwrites_its_input_says_so(collective: str, placement: str, repeatable: bool) -> None:
    for rank in make_ranks(make_case(collective, "own:ring", 3, 9, placement=placement)):
        assert rank.operations[0].repeatable == repeatable
        if collective == "all_reduce":
            assert np.shares_memory(rank.operations[0].input, rank.operations[0].output) == (placement == "in")


def test_in_place_the_smaller_of_input_and_output_lies_at_the_ranks_own_block() -> None:
    for rank in make_ranks(make_case("reduce_scatter", "own:ring", 3, 4, placement="in")):
        begin = rank.operations[0].output.ctypes.data - rank.operations[0].input.ctypes.data
        assert begin == rank.messenger.rank * 4 * 4


class Numpy:
    """A backend that reduces with numpy."""

    def why_not_reduce(self, dtype: str, op: str) -> str | None:
        return None if hasattr(np, dtype) and op in OPS else f"no {op} of {dtype}"


def test_why_not() -> None:
    def reason(case: Case, groups: tuple[tuple[int, ...], ...], host_of: tuple[int, ...]) -> str | None:
        return why_not(case, groups, host_of, Numpy())  # type: ignore[arg-type]

    everyone = ((0, 1, 2, 3),)
    assert reason(make_case("all_reduce", "own:ring", 4, 1), everyone, (0, 0, 1, 1)) is None
    assert reason(make_case("all_reduce", "own:bruck", 4, 1), everyone, (0, 0, 1, 1)) == (
        "all_reduce has no bruck: known are own:ring, own:binomial_tree, own:double_binary_tree, "
        "own:recursive_doubling, own:halving_doubling, own:hierarchical"
    )
    layered = make_case("all_reduce", "own:hierarchical", 4, 1)
    assert reason(layered, everyone, (0, 0, 1, 1)) is None
    assert reason(layered, everyone, (0, 0, 0, 1)) == "a hierarchical algorithm needs equal hosts, not 1 to 3 ranks"
    nodes = ((0, 1), (2, 3))
    assert reason(layered, nodes, (0, 0, 1, 1)) == "a hierarchical algorithm needs two hosts or more"
    assert reason(make_case("all_reduce", "own:ring", 2, 1, reduce_op="avg"), nodes, (0, 0, 1, 1)) == "no avg of int32"
    assert reason(make_case("all_gather", "own:ring", 2, 1, dtype="bfloat16"), nodes, (0, 0, 1, 1)) is None


def test_notes() -> None:
    assert note(make_case("all_reduce", "own:ring", 4, 1 << 20)) is None
    assert note(make_case("reduce", "own:ring", 4, 1 << 20)) == "in 32 pieces"  # 4 MiB in pieces of 128 KiB
    one = "commbench's own broadcast has one buffer: it is always in place"
    assert note(make_case("broadcast", "own:binomial_tree", 4, 8)) == one
    assert note(make_case("broadcast", "own:ring/4", 4, 8)) == f"in 4 pieces; {one}"
    assert note(make_case("broadcast", "own:binomial_tree", 4, 8, placement="in")) is None
