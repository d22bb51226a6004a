"""What one rank does for a schedule, in terms of stretches of its buffers: copies, exchanges of messages, reductions.

A plan knows neither a library nor memory, so one plan serves every set of buffers of a case. Each transfer of the
schedule is one message. It is sent from where its blocks are and received where they are to be, if they lie side by
side there; otherwise it is packed into, or unpacked from, staging memory. What is to be added always arrives in
staging memory and is added when the step ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from commbench.collectives import COLLECTIVES
from commbench.schedules import Place, Schedule, Transfer, element_range, final_blocks, initial_blocks, places

STAGING_ALIGNMENT = 64  # elements
TAGS = 32768  # every MPI has as many


class Span(NamedTuple):
    """Elements ``start`` to ``stop`` of a buffer: ``input``, ``output``, ``scratch`` or ``staging``.

    In place there is one buffer for the first two, ``output``.
    """

    buffer: str
    start: int
    stop: int


class Copy(NamedTuple):
    target: Span
    source: Span


class Reduce(NamedTuple):
    """``target = left op right``; ``target`` may be ``left``."""

    target: Span
    left: Span
    right: Span


class Mail(NamedTuple):
    """One side of a message. ``tag`` counts the messages from one rank to the other, on both sides alike."""

    span: Span
    peer: int
    tag: int


class Exchange(NamedTuple):
    """Messages that are posted together and waited for together."""

    sends: tuple[Mail, ...]
    receives: tuple[Mail, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """``actions`` in order; ``sizes``: the elements of each buffer; ``given`` and ``taken``: the input and output."""

    actions: tuple[Copy | Reduce | Exchange, ...]
    sizes: dict[str, int]
    given: Span
    taken: Span


def make_plan(
    schedule: Schedule, rank: int, block_elements: int, in_place: tuple[int, slice, slice] | None = None
) -> Plan:
    """The plan of one rank for a schedule of one channel, whose collective has blocks of ``block_elements``.

    ``in_place``: the elements of the one buffer, and where in it the input and the output lie; then what the output
    replaces may be overwritten, else the input is left as it was.
    """
    return _Planner(schedule, rank, block_elements, in_place).plan()


class _Planner:
    """``at`` says where each block is as the plan goes on, ``home`` where it is to be once it has been written."""

    def __init__(
        self, schedule: Schedule, rank: int, block_elements: int, in_place: tuple[int, slice, slice] | None
    ) -> None:
        spec = COLLECTIVES[schedule.collective]
        self.schedule, self.rank, self.block_elements = schedule, rank, block_elements
        self.sized = spec.sized
        self.given = Span("input", 0, spec.input_blocks(rank, schedule.ranks, schedule.root) * block_elements)
        self.taken = Span("output", 0, len(spec.output(rank, schedule.ranks, schedule.root)) * block_elements)
        self.sizes = {"input": self.given.stop, "output": self.taken.stop, "scratch": 0, "staging": 0}
        if in_place is not None:
            elements, source, target = in_place
            self.given = Span("output", source.start, source.stop)
            self.taken = Span("output", target.start, target.stop)
            self.sizes |= {"input": 0, "output": elements}
        self.staged = 0
        self.tags: dict[tuple[str, int], int] = defaultdict(int)
        self.actions: list[Copy | Reduce | Exchange] = []
        self.at = {block: self.span(place) for block, place in initial_blocks(schedule, rank).items()}
        self.home = {block: self.span(place) for block, place in places(schedule, rank).items()}
        if in_place is not None and self.taken.stop > self.taken.start:
            # The input may be overwritten, so what would need scratch memory stays where it is.
            self.home |= {block: self.at[block] for block in self.at if self.home[block].buffer == "scratch"}

    def plan(self) -> Plan:
        steps = [step for steps in self.schedule.programs[self.rank] for step in steps]
        written = {block for step in steps for t in step if not t.outgoing for block in t.blocks}
        # A block that is written later is read from the input until then.
        unwritten = [block for block in final_blocks(self.schedule, self.rank) if block not in written]
        self.actions += [
            Copy(target, source) for target, source in self.runs((self.home[b], self.at[b]) for b in unwritten)
            if target != source
        ]  # fmt: skip
        self.at |= {block: self.home[block] for block in unwritten}
        for step in steps:
            self.step(step)
        for span in self.home.values():
            if span.buffer == "scratch":
                self.sizes["scratch"] = max(self.sizes["scratch"], span.stop)
        return Plan(actions=tuple(self.actions), sizes=self.sizes, given=self.given, taken=self.taken)

    def step(self, step: tuple[Transfer, ...]) -> None:
        self.staged = 0
        before: list[Copy] = []
        after: list[Copy | Reduce] = []
        # What a step sends is what was held when it began: `at` changes only with its receives, below.
        sends = [mail for t in step if t.outgoing for mail in self.send(t, before)]
        receives = [mail for t in step if not t.outgoing for mail in self.receive(t, after)]
        self.actions += before
        if sends or receives:
            self.actions.append(Exchange(tuple(sends), tuple(receives)))
        self.actions += after

    def send(self, transfer: Transfer, before: list[Copy]) -> tuple[Mail, ...]:
        spans = [span for (span,) in self.runs((self.at[block],) for block in transfer.blocks)]
        if len(spans) > 1:
            packed = self.stage(sum(span.stop - span.start for span in spans))
            before += [Copy(part, span) for part, span in zip(_parts(packed, spans), spans, strict=True)]
            spans = [packed]
        return self.mail(transfer, spans)

    def receive(self, transfer: Transfer, after: list[Copy | Reduce]) -> tuple[Mail, ...]:
        if transfer.reduce:
            pairs = self.runs((self.home[block], self.at[block]) for block in transfer.blocks)
        else:
            pairs = [(span, span) for (span,) in self.runs((self.home[block],) for block in transfer.blocks)]
        spans = [target for target, _ in pairs]
        if transfer.reduce or len(spans) > 1:
            arrived = self.stage(sum(span.stop - span.start for span in spans))
            parts = list(_parts(arrived, spans))
            if transfer.reduce:
                after += [Reduce(target, held, part) for (target, held), part in zip(pairs, parts, strict=True)]
            else:
                after += [Copy(target, part) for target, part in zip(spans, parts, strict=True)]
            spans = [arrived] if spans else []
        self.at |= {block: self.home[block] for block in transfer.blocks}
        return self.mail(transfer, spans)

    def mail(self, transfer: Transfer, spans: list[Span]) -> tuple[Mail, ...]:
        """The message, if there is one: pieces without an element are not sent, an empty message of a barrier is."""
        if not spans and self.sized:
            return ()
        way = ("out" if transfer.outgoing else "in", transfer.peer)
        self.tags[way] += 1
        return (Mail(spans[0] if spans else Span("staging", 0, 0), transfer.peer, self.tags[way] % TAGS),)

    def stage(self, elements: int) -> Span:
        """Staging memory that is this step's: the next step begins at the start again."""
        start = self.staged
        self.staged = start + -(-elements // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
        self.sizes["staging"] = max(self.sizes["staging"], self.staged)
        return Span("staging", start, start + elements)

    def span(self, place: Place) -> Span:
        start, stop = element_range(place, self.schedule.cut, self.block_elements)
        if place.buffer == "scratch":
            return Span("scratch", start, stop)
        whole = self.given if place.buffer == "input" else self.taken
        return Span(whole.buffer, whole.start + start, whole.start + stop)

    @staticmethod
    def runs(rows: Iterable[tuple[Span, ...]]) -> list[tuple[Span, ...]]:
        """Rows of spans of equal length, joined to the row before where each goes on; empty ones are left out."""
        found: list[tuple[Span, ...]] = []
        for row in rows:
            if row[0].start == row[0].stop:
                continue
            if found and all(
                span.buffer == last.buffer and span.start == last.stop
                for span, last in zip(row, found[-1], strict=True)
            ):
                found[-1] = tuple(last._replace(stop=span.stop) for span, last in zip(row, found[-1], strict=True))
            else:
                found.append(row)
        return found


def _parts(whole: Span, spans: list[Span]) -> Iterator[Span]:
    """``whole`` divided into spans as long as ``spans``."""
    at = whole.start
    for span in spans:
        yield Span(whole.buffer, at, at + span.stop - span.start)
        at += span.stop - span.start
