"""Blocks have places in real buffers: a schedule executed there gives the exact answer, for sizes that do not divide."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from commbench.collectives import COLLECTIVES
from commbench.schedules import (
    ALGORITHMS,
    HIERARCHICAL,
    Block,
    Place,
    Schedule,
    Transfer,
    build,
    element_range,
    final_blocks,
    initial_blocks,
    places,
)

Array = npt.NDArray[np.int64]
PAIRS = [(name, one) for name, known in ALGORITHMS.items() for one in known if (name, one) not in HIERARCHICAL]


class Rank:
    """Executes one rank's channels on buffers of its own; ``wires`` are the messages under way."""

    def __init__(self, schedule: Schedule, rank: int, data: Array, elements: int, wires: dict[object, deque[Array]]):
        self.schedule, self.rank, self.elements, self.wires = schedule, rank, elements, wires
        self.places = places(schedule, rank)
        blocks = {"input": len(data) // max(elements, 1), "output": 0, "scratch": 0}
        for place in self.places.values():
            blocks[place.buffer] = max(blocks[place.buffer], place.block + 1)
        self.buffers = {name: np.full(count * elements, -1, dtype=np.int64) for name, count in blocks.items()}
        self.buffers["input"] = data.copy()
        for block, source in initial_blocks(schedule, rank).items():
            if self.places[block].buffer != "input":
                self.view(self.places[block])[:] = self.view(source)

    def view(self, place: Place) -> Array:
        start, stop = element_range(place, self.schedule.cut, self.elements)
        return self.buffers[place.buffer][start:stop]

    def read(self, blocks: tuple[Block, ...]) -> Array:
        return np.concatenate([np.empty(0, np.int64), *(self.view(self.places[b]) for b in blocks)])

    def write(self, transfer: Transfer, values: Array) -> None:
        at = 0
        for view in (self.view(self.places[b]) for b in transfer.blocks):
            part = values[at : at + len(view)]
            view[:] = view + part if transfer.reduce else part
            at += len(view)

    def run(self, channel: int) -> Iterator[None]:
        """Yields while it must wait for a message."""
        for step in self.schedule.programs[self.rank][channel]:
            for t in step:
                if t.outgoing:
                    self.wires.setdefault((self.rank, t.peer, channel), deque()).append(self.read(t.blocks))
            arrived = []
            for t in step:
                if not t.outgoing:
                    while not self.wires.get((t.peer, self.rank, channel)):
                        yield
                    arrived.append((t, self.wires[t.peer, self.rank, channel].popleft()))
            for t, values in arrived:
                self.write(t, values)


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
@pytest.mark.parametrize(("ranks", "pieces", "elements"), [(2, 1, 7), (5, 1, 13), (8, 3, 50), (6, 2, 1)])
def test_executed_on_buffers(collective: str, algorithm: str, ranks: int, pieces: int, elements: int) -> None:
    spec = COLLECTIVES[collective]
    root = 1 if spec.rooted else 0
    schedule = build(collective, algorithm, ranks, root, pieces)
    random = np.random.default_rng(5)
    inputs = [random.integers(0, 1000, spec.input_blocks(r, ranks, root) * elements) for r in range(ranks)]
    wires: dict[object, deque[Array]] = {}
    executed = [Rank(schedule, r, inputs[r], elements, wires) for r in range(ranks)]
    waiting = deque(r.run(channel) for r in executed for channel in range(schedule.channels))
    while waiting:
        channel = waiting.popleft()
        if next(channel, channel) is None:
            waiting.append(channel)
    for r in executed:
        parts = spec.output(r.rank, ranks, root)
        wanted = [sum(inputs[s][p.block * elements : (p.block + 1) * elements] for s in p.sources) for p in parts]
        assert np.array_equal(r.buffers["output"], np.concatenate([np.empty(0, np.int64), *wanted]))
        assert np.array_equal(r.buffers["input"], inputs[r.rank]), "an input was overwritten"


def test_places_of_a_rank() -> None:
    schedule = build("reduce_scatter", "pairwise", 3)
    assert places(schedule, 1) == {
        Block(-1, 1, 0): Place("output", 0, 0),
        Block(-1, 0, 0): Place("input", 0, 0),
        Block(-1, 2, 0): Place("input", 2, 0),
    }
    assert [place for place, _ in final_blocks(schedule, 1).values()] == [Place("output", 0, 0)]


def test_what_is_added_to_and_passed_on_is_scratch() -> None:
    assert places(build("reduce", "ring", 3), 2) == {Block(-1, -1, 0): Place("scratch", 0, 0)}


def test_element_ranges_cover_a_block() -> None:
    ranges = [element_range(Place("output", 2, piece), 4, 10) for piece in range(4)]
    assert ranges == [(20, 22), (22, 25), (25, 27), (27, 30)]
