"""Ranks as threads of one process: a control plane in memory and a library that really moves the data."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from commbench.cases import DTYPES
from commbench.collectives import COLLECTIVES
from commbench.measure.data import Pattern
from commbench.measure.operation import Operation

PATIENCE_S = 20.0


class Meeting:
    """Where the threads of a world, or of one group, meet and exchange."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self.slots: list[Any] = [None] * size
        self.said: Any = None

    def exchange(self, place: int, value: Any) -> list[Any]:
        self.slots[place] = value
        self.barrier.wait()
        everyone = list(self.slots)
        self.barrier.wait()
        return everyone


@dataclass(kw_only=True)
class ThreadControl:
    """``measure.control.Control`` over shared memory; values go through JSON as they do over the wire."""

    rank: int
    world: int
    meeting: Meeting
    expected: list[tuple[float, str]] = field(default_factory=list)
    where: tuple[str, int] = ("", 0)

    def gather(self, value: Any, blob: bytes = b"") -> list[tuple[Any, bytes]] | None:
        everyone = self.meeting.exchange(self.rank, (json.loads(json.dumps(value)), blob))
        return everyone if self.rank == 0 else None

    def share(self, value: Any = None) -> Any:
        return json.loads(self.meeting.exchange(self.rank, json.dumps(value))[0])

    def agree(self, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        gathered = self.gather(value)
        return self.share(decide([item for item, _ in gathered]) if gathered is not None else None)

    def expect(self, seconds: float, doing: str) -> None:
        self.expected.append((seconds, doing))

    beat_address = 0

    def beat(self, phase: str, iteration: int = 0, case: int | None = None) -> None:
        self.where = (phase, iteration)


class Library:
    """Collectives of int32 among the threads of one group. ``before`` and ``after`` are called around each operation
    with the rank's place in the group, the index of its buffers and, after, the output."""

    def __init__(
        self, name: str, members: tuple[int, ...], elements: int, *, in_place: bool = False,
        before: Callable[[int, int], None] = lambda place, index: None,
        after: Callable[[int, int, np.ndarray], None] = lambda place, index, out: None,
        does: bool = True,
    ) -> None:  # fmt: skip
        self.members = members
        self.meeting = Meeting(len(members))
        self.spec = COLLECTIVES[name]
        self.block = self.spec.block_elements(elements, len(members))
        self.in_place = in_place
        self.before, self.after, self.does = before, after, does

    def pattern(self, rank: int, kind: type[Pattern] = Pattern) -> Pattern:
        return kind(
            collective=self.spec, dtype=DTYPES["int32"], op="sum" if self.spec.reduces else None,
            ranks=len(self.members), rank=self.members.index(rank), root=0, block_elements=self.block, seed=5,
        )  # fmt: skip

    def operation(self, rank: int, pattern: Pattern, index: int) -> Operation:
        place = self.members.index(rank)
        output = np.zeros(pattern.output_elements, dtype=np.int32)
        given = output if self.in_place else np.zeros(pattern.input_elements, dtype=np.int32)

        def run() -> None:
            self.before(place, index)
            if self.does:
                inputs = self.meeting.exchange(place, given.copy())
                if self.spec.reduces:
                    output[:] = np.sum(inputs, axis=0, dtype=np.int32)
                else:
                    output[:] = np.concatenate(inputs)
            self.after(place, index, output)

        return Operation(
            run=run, enqueue=run, input=given.view(np.uint8), output=output.view(np.uint8),
            repeatable=not self.in_place,
        )  # fmt: skip


def run_as_ranks(world: int, act: Callable[[ThreadControl], Any]) -> list[Any]:
    """What ``act`` returns on every rank; an error on any of them is raised."""
    meeting = Meeting(world)
    results: list[Any] = [None] * world
    errors: list[Exception] = []

    def one(rank: int) -> None:
        try:
            results[rank] = act(ThreadControl(rank=rank, world=world, meeting=meeting))
        except Exception as error:  # noqa: BLE001  raised again in the test's own thread
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    root = next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), None)
    if errors:
        raise root or errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.fixture
def as_ranks() -> Callable[..., list[Any]]:
    return run_as_ranks


@pytest.fixture
def library() -> type[Library]:
    return Library
