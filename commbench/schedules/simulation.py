"""Carry a schedule out on numpy integers and compare what every rank ends with to what the collective says.

Every rank contributes random 64-bit integers, different for each block, so that a contribution that is missing,
doubled or misplaced shows (a chance agreement has probability 2**-64 a block).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from commbench.collectives import COLLECTIVES
from commbench.schedules.matching import Matching, Pair, match
from commbench.schedules.placement import final_blocks, initial_blocks
from commbench.schedules.schedule import Block, Program, Schedule, ScheduleError

_Values = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether a schedule computes its collective; ``reason`` is one line that says why not, empty if it does."""

    correct: bool
    reason: str = ""


def simulate(schedule: Schedule, seed: int = 0) -> Verdict:
    """The verdict on one schedule; it does not depend on timing.

    Incorrect are: a message without a partner, sides that name different blocks, a deadlock, a block sent or added to
    before it is held, two transfers of a step or two channels of a rank that race for a block, and a wrong result.
    """
    try:
        matching = match(schedule)
        _check_races(schedule)
        if COLLECTIVES[schedule.collective].sized:
            _Buffers(schedule, matching, seed).run()
        else:
            _check_barrier(schedule, matching)
    except ScheduleError as error:
        return Verdict(correct=False, reason=str(error))
    return Verdict(correct=True)


class _Buffers:
    """One row a rank, one column a block: its value, and whether the rank holds it."""

    def __init__(self, schedule: Schedule, matching: Matching, seed: int) -> None:
        self.schedule, self.matching = schedule, matching
        self.initial = [initial_blocks(schedule, rank) for rank in range(schedule.ranks)]
        self.final = [final_blocks(schedule, rank) for rank in range(schedule.ranks)]
        names = dict.fromkeys(b for held in self.initial for b in held)
        names.update(dict.fromkeys(b for needed in self.final for b in needed))
        names.update(dict.fromkeys(b for m in matching.messages for b in m.blocks))
        self.column = {block: index for index, block in enumerate(names)}
        shape = (schedule.ranks, len(self.column))
        limits = np.iinfo(np.int64)
        random = np.random.default_rng(seed)
        self.start: _Values = random.integers(limits.min, limits.max, size=shape, dtype=np.int64, endpoint=True)
        self.held = np.zeros(shape, dtype=bool)
        for rank, blocks in enumerate(self.initial):
            self.held[rank, self.columns(blocks)] = True
        self.values: _Values = np.where(self.held, self.start, 0)

    def columns(self, blocks: Iterable[Block]) -> list[int]:
        return [self.column[block] for block in blocks]

    def run(self) -> None:
        carried: dict[int, _Values] = {}
        for reads, index in _in_order(self.matching):
            pair = self.matching.messages[index]
            if reads:
                carried[index] = self._read(pair)
            else:
                self._write(pair, carried.pop(index))
        self._check_result()

    def _read(self, pair: Pair) -> _Values:
        columns = self.columns(pair.blocks)
        if not self.held[pair.source, columns].all():
            raise ScheduleError(f"rank {pair.source} sends rank {pair.target} a block that it does not hold yet")
        return self.values[pair.source, columns]

    def _write(self, pair: Pair, values: _Values) -> None:
        columns = self.columns(pair.blocks)
        if not pair.reduce:
            self.values[pair.target, columns] = values
            self.held[pair.target, columns] = True
        elif self.held[pair.target, columns].all():
            self.values[pair.target, columns] += values
        else:
            raise ScheduleError(
                f"rank {pair.target} adds what rank {pair.source} sends to a block that it does not hold"
            )

    def _check_result(self) -> None:
        names = [{place: block for block, place in held.items()} for held in self.initial]
        for rank, blocks in enumerate(self.final):
            for block, (place, part) in blocks.items():
                wanted = [
                    self.start[source, self.column[name]]
                    for source in part.sources
                    for name in (names[source][place._replace(buffer="input", block=part.block)],)
                ]
                column = self.column[block]
                if not self.held[rank, column] or self.values[rank, column] != np.sum(wanted, dtype=np.int64):
                    raise ScheduleError(f"rank {rank} ends with a wrong or missing {block}")


def _in_order(matching: Matching) -> Iterator[tuple[bool, int]]:
    """Every message twice, (True, index) when it is read and (False, index) when it is applied.

    Steps read what they send when they begin and apply what they receive when they end, in the order of the rounds.
    """
    ends = [(time, False, step) for step, time in enumerate(matching.end)]
    begins = [(time, True, step) for step, time in enumerate(matching.begin)]
    for _, reads, step in sorted(ends + begins):
        for index in matching.step_messages[step]:
            pair = matching.messages[index]
            if step == (pair.send_step if reads else pair.recv_step):
                yield reads, index


def _check_races(schedule: Schedule) -> None:
    """No block may be written while another transfer of the same step, or another channel, uses it.

    The exceptions are additions: they commute, and what a step sends was read before anything is added.
    """
    for rank, program in enumerate(schedule.programs):
        for step in (step for steps in program for step in steps):
            replaced = [b for t in step if not t.outgoing and not t.reduce for b in t.blocks]
            others = {b for t in step if t.outgoing or t.reduce for b in t.blocks}
            if len(set(replaced)) < len(replaced) or not others.isdisjoint(replaced):
                raise ScheduleError(f"rank {rank} uses a block in the step that overwrites it")
        for one, other in combinations(program, 2):
            if not _written(one).isdisjoint(_used(other)) or not _written(other).isdisjoint(_used(one)):
                raise ScheduleError(f"rank {rank} writes a block in one channel and uses it in another")


def _used(program: Program) -> set[Block]:
    return {b for step in program for t in step for b in t.blocks}


def _written(program: Program) -> set[Block]:
    return {b for step in program for t in step if not t.outgoing for b in t.blocks}


def _check_barrier(schedule: Schedule, matching: Matching) -> None:
    """Every rank must have heard, directly or not, that every other one has begun."""
    heard = [1 << rank for rank in range(schedule.ranks)]
    carried: dict[int, int] = {}
    for reads, index in _in_order(matching):
        pair = matching.messages[index]
        if reads:
            carried[index] = heard[pair.source]
        else:
            heard[pair.target] |= carried.pop(index)
    for rank, who in enumerate(heard):
        if who != (1 << schedule.ranks) - 1:
            raise ScheduleError(f"rank {rank} leaves the barrier before every rank has entered it")
