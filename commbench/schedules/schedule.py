"""An algorithm as data: what every rank sends and receives, in which order, and how schedules compose.

A block is a piece of one of the collective's blocks (:mod:`commbench.collectives`): each of those is cut into
``cut`` pieces of equal size. A schedule gives each rank, for each of its channels, an ordered list of steps; a step is
the transfers that are posted together and waited for together. Its sends carry what the rank held when the step began
and what it receives is in place, or added, when the step ends. Nothing relies on buffering: a transfer proceeds only
when both sides have posted it. Channels of a rank are independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from commbench.collectives import COLLECTIVES

if TYPE_CHECKING:
    from commbench.schedules.matching import Matching

NONE = -1  # a block whose origin is "the sum over all ranks", or whose destination is "everybody"
OUTGOING = ("send", "put")


class ScheduleError(ValueError):
    """A schedule that cannot be carried out: messages without a partner, blocks that differ, a deadlock."""


class Block(NamedTuple):
    """One piece of data. ``origin`` is the rank it comes from, ``destination`` the rank it is meant for.

    ``origin`` is -1 where contributions of all ranks are combined, ``destination`` -1 where it is the same for all.
    """

    origin: int
    destination: int
    piece: int


class Transfer(NamedTuple):
    """One side of a message. ``reduce``, on the side it arrives at, adds to what is held instead of replacing it.

    ``kind`` is send or put where data leaves and recv or get where it arrives. A put meets the recv that waits for its
    notification, a get the send that says the data are ready, so one matching rule covers both.
    """

    kind: str
    peer: int
    blocks: tuple[Block, ...]
    reduce: bool = False

    @property
    def outgoing(self) -> bool:
        return self.kind in OUTGOING


Step = tuple[Transfer, ...]
Program = tuple[Step, ...]


class Message(NamedTuple):
    """Both sides of a transfer: what the algorithms are written in."""

    source: int
    target: int
    blocks: tuple[Block, ...]
    reduce: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)  # compared by identity, so that caching one costs nothing
class Schedule:
    """``programs[rank][channel]`` is that rank's list of steps; ``cut`` the pieces of each of the collective's blocks."""

    collective: str
    algorithm: str
    ranks: int
    root: int
    cut: int
    programs: tuple[tuple[Program, ...], ...]

    @property
    def share(self) -> Fraction:
        """The part of the whole message that one block is."""
        return Fraction(1, self.cut * (self.ranks if COLLECTIVES[self.collective].split else 1))

    @property
    def channels(self) -> int:
        return len(self.programs[0])

    def relabel(self, *, collective: str, cut: int, block: Callable[[Block], Block]) -> Schedule:
        """The same transfers as part of another collective, whose name for each block ``block`` gives."""
        return self._rewritten(
            lambda step: tuple(t._replace(blocks=tuple(map(block, t.blocks))) for t in step),
            collective=collective,
            cut=cut,
        )

    def refine(self, parts: int) -> Schedule:
        """The same messages with every block named as ``parts`` smaller ones."""
        if parts == 1:
            return self
        return self._rewritten(
            lambda step: tuple(
                t._replace(blocks=tuple(split for b in t.blocks for split in _split(b, parts))) for t in step
            ),
            cut=self.cut * parts,
        )

    def then(self, after: Schedule) -> Schedule:
        """This schedule, then ``after``: each channel of a rank goes on as soon as it is done with the first.

        Both must name their blocks as parts of the same collective and have the same number of channels.
        Raises ScheduleError.
        """
        self._check_compatible(after)
        if self.channels != after.channels:
            raise ScheduleError(f"a schedule of {self.channels} channels cannot be followed by one of {after.channels}")
        first, second = _same_cut(self, after)
        joined = zip(first.programs, second.programs, strict=True)
        return replace(
            first, programs=tuple(tuple(a + b for a, b in zip(one, two, strict=True)) for one, two in joined)
        )

    def beside(self, other: Schedule) -> Schedule:
        """Both at the same time on channels of their own, each with its half of the message. Raises ScheduleError."""
        self._check_compatible(other)
        left, right = _same_cut(self, other)
        cut = left.cut
        moved = right.relabel(collective=self.collective, cut=2 * cut, block=lambda b: b._replace(piece=b.piece + cut))
        programs = tuple(one + two for one, two in zip(left.programs, moved.programs, strict=True))
        return replace(moved, programs=programs)

    def within(
        self,
        groups: Sequence[Sequence[int]],
        *,
        ranks: int,
        collective: str,
        cut: int,
        block: Callable[[int, Block], Block],
    ) -> Schedule:
        """The schedule carried out by several disjoint groups of ``self.ranks`` ranks at once.

        ``groups[i][r]`` is who plays rank r in group i out of ``ranks`` ranks; ``block(i, b)`` is what group i's block
        b, named for ranks of the group, is called in the whole. Ranks in no group have nothing to do.
        Raises ScheduleError for groups that overlap or have another size.
        """
        members = [rank for group in groups for rank in group]
        if any(len(group) != self.ranks for group in groups) or len(set(members)) != len(members):
            raise ScheduleError(f"groups must be disjoint and of {self.ranks} ranks each, not {groups}")
        programs: list[tuple[Program, ...]] = [((),) * self.channels] * ranks
        for index, group in enumerate(groups):
            for rank, program in zip(group, self.programs, strict=True):
                programs[rank] = tuple(
                    tuple(
                        tuple(
                            t._replace(peer=group[t.peer], blocks=tuple(block(index, b) for b in t.blocks))
                            for t in step
                        )
                        for step in steps
                    )
                    for steps in program
                )
        return replace(self, ranks=ranks, collective=collective, cut=cut, root=0, programs=tuple(programs))

    def pieces(self, count: int) -> Schedule:
        """Pipelined: the message in ``count`` pieces, each one round behind the piece before it.

        Transfers of different pieces that fall into the same round are posted together.
        """
        if count == 1:
            return self
        from commbench.schedules.matching import match  # matching is written in terms of this module

        _check_can_be_regrouped(match(self))
        channels = []
        for channel in range(self.channels):
            found = [m for m in match(self).messages if m.channel == channel]
            depth = 1 + max((m.round for m in found), default=0)
            rounds: list[list[Message]] = [[] for _ in range(depth + count - 1)]
            for piece in range(count):
                for m in found:
                    blocks = tuple(b._replace(piece=b.piece * count + piece) for b in m.blocks)
                    rounds[m.round + piece].append(Message(m.source, m.target, blocks, m.reduce))
            channels.append(programs_of(self.ranks, rounds))
        return replace(self, cut=self.cut * count, programs=tuple(zip(*channels, strict=True)))

    def merged(self) -> Schedule:
        """The same messages on one channel: those of a rank that fall into one round are one step, whatever channel
        they were on.

        Both sides of a message have it in the same round and rounds are taken in order, so nothing can wait in a
        circle. For those who cannot wait for several channels at once.
        """
        if self.channels == 1:
            return self
        from commbench.schedules.matching import match  # as in pieces

        matching = match(self)
        _check_can_be_regrouped(matching)
        rounds: list[list[Message]] = [[] for _ in range(1 + max((m.round for m in matching.messages), default=0))]
        for m in matching.messages:
            rounds[m.round].append(Message(m.source, m.target, m.blocks, m.reduce))
        return replace(self, programs=tuple((program,) for program in programs_of(self.ranks, rounds)))

    def _rewritten(self, change: Callable[[Step], Step], **fields: object) -> Schedule:
        programs = tuple(tuple(tuple(map(change, steps)) for steps in program) for program in self.programs)
        return replace(self, programs=programs, **fields)  # type: ignore[arg-type]

    def _check_compatible(self, other: Schedule) -> None:
        mine, others = ((s.collective, s.ranks, s.root) for s in (self, other))
        if mine != others:
            raise ScheduleError(f"schedules of {mine} and {others} do not compose: relabel one first")


def from_rounds(
    collective: str, algorithm: str, ranks: int, rounds: Iterable[Iterable[Message]], *, root: int = 0, cut: int = 1
) -> Schedule:
    """A schedule of one channel: a rank's messages of one round are one of its steps."""
    programs = tuple((program,) for program in programs_of(ranks, rounds))
    return Schedule(collective=collective, algorithm=algorithm, ranks=ranks, root=root, cut=cut, programs=programs)


def programs_of(ranks: int, rounds: Iterable[Iterable[Message]]) -> list[Program]:
    """Per rank the steps that rounds of messages make, rounds in which a rank has nothing to do left out."""
    programs: list[list[Step]] = [[] for _ in range(ranks)]
    for messages in rounds:
        steps: dict[int, list[Transfer]] = {}
        for m in messages:
            steps.setdefault(m.source, []).append(Transfer("send", m.target, m.blocks))
            steps.setdefault(m.target, []).append(Transfer("recv", m.source, m.blocks, m.reduce))
        for rank, transfers in steps.items():
            programs[rank].append(tuple(transfers))
    return [tuple(steps) for steps in programs]


def _check_can_be_regrouped(matching: Matching) -> None:
    """Pipelining posts a message in its round, not with its step: a step must not send what it changes earlier."""
    for step, indices in enumerate(matching.step_messages):
        messages = [matching.messages[i] for i in indices]
        first_in = {b: m.round for m in reversed(messages) if m.recv_step == step for b in m.blocks}
        late = [
            m for m in messages if m.send_step == step and any(first_in.get(b, m.round) < m.round for b in m.blocks)
        ]
        if late:
            raise ScheduleError(
                f"cannot be pipelined: rank {late[0].source} sends a block after a round that changes it"
            )


def _split(block: Block, parts: int) -> Iterable[Block]:
    return (block._replace(piece=block.piece * parts + i) for i in range(parts))


def _same_cut(first: Schedule, second: Schedule) -> tuple[Schedule, Schedule]:
    common = math.lcm(first.cut, second.cut)
    return first.refine(common // first.cut), second.refine(common // second.cut)
