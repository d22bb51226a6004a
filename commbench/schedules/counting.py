"""Count a schedule: rounds, messages and bytes, to set beside the closed forms and a NIC's counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from commbench.schedules.matching import match
from commbench.schedules.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """``rounds``: messages in the longest chain that must follow one another. Shares are parts of the message.

    ``sent[rank]`` is what a rank sends in all, ``reduced[rank]`` what it receives and adds.
    """

    rounds: int
    messages: int
    sent: tuple[Fraction, ...]
    reduced: tuple[Fraction, ...]


def count(schedule: Schedule) -> Counts:
    """Rounds, messages and shares of a schedule. Raises ScheduleError for one that does not match up."""
    matching = match(schedule)
    sent, reduced = [0] * schedule.ranks, [0] * schedule.ranks
    for pair in matching.messages:
        sent[pair.source] += len(pair.blocks)
        if pair.reduce:
            reduced[pair.target] += len(pair.blocks)
    return Counts(
        rounds=max(matching.end, default=0),
        messages=len(matching.messages),
        sent=tuple(schedule.share * blocks for blocks in sent),
        reduced=tuple(schedule.share * blocks for blocks in reduced),
    )


def leaving(schedule: Schedule, hosts: Sequence[int]) -> dict[int, Fraction]:
    """Per host the share of the message that its ranks send to other hosts; ``hosts[rank]`` is the rank's host."""
    blocks = dict.fromkeys(hosts, 0)
    for pair in match(schedule).messages:
        if hosts[pair.source] != hosts[pair.target]:
            blocks[hosts[pair.source]] += len(pair.blocks)
    return {host: schedule.share * number for host, number in blocks.items()}
