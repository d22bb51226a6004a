"""Which send meets which receive, and in which round: what counting, simulating and pricing a schedule share."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from commbench.schedules.schedule import Block, Schedule, ScheduleError, Transfer


class Pair(NamedTuple):
    """A message with the steps that its two sides belong to. ``round`` counts from 0 (see :class:`Matching`)."""

    source: int
    target: int
    channel: int
    blocks: tuple[Block, ...]
    reduce: bool
    send_step: int
    recv_step: int
    round: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Matching:
    """A schedule's messages, by round, then sender, and its steps, numbered by rank, then channel, then order.

    If every message took one round and a step ended with its last message, step s would begin at ``begin[s]`` and end
    at ``end[s]``, and a message would take place in its ``round``. ``programs[rank]`` gives the range of step numbers
    of each channel.
    """

    messages: tuple[Pair, ...]
    programs: tuple[tuple[range, ...], ...]
    step_messages: tuple[tuple[int, ...], ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]


@lru_cache(maxsize=64)
def match(schedule: Schedule) -> Matching:
    """Pair sends with receives in order per (source, target, channel), and find the round of each.

    Raises ScheduleError for a message with one side only, for sides that name different blocks, for peers outside
    the group, and for a deadlock: steps that wait for one another when nothing is buffered.
    """
    programs, sides = _sides(schedule)
    pairs: list[Pair] = []
    for (source, target, channel), (sends, receives) in sides.items():
        if len(sends) != len(receives):
            raise ScheduleError(
                f"rank {source} sends {len(sends)} messages to rank {target} on channel {channel}, "
                f"which receives {len(receives)}"
            )
        for (send_step, sent), (recv_step, received) in zip(sends, receives, strict=True):
            if sent.blocks != received.blocks:
                raise ScheduleError(
                    f"rank {source} sends {sent.blocks} to rank {target}, which expects {received.blocks}"
                )
            pairs.append(Pair(source, target, channel, sent.blocks, received.reduce, send_step, recv_step, 0))
    return _in_rounds(programs, pairs)


_Sides = dict[tuple[int, int, int], tuple[list[tuple[int, Transfer]], list[tuple[int, Transfer]]]]


def _sides(schedule: Schedule) -> tuple[tuple[tuple[range, ...], ...], _Sides]:
    """Number the steps, and list each (source, target, channel)'s sends and receives in program order."""
    sides: _Sides = defaultdict(lambda: ([], []))
    programs = []
    total = 0
    for rank, program in enumerate(schedule.programs):
        ranges = []
        for channel, steps in enumerate(program):
            ranges.append(range(total, total + len(steps)))
            total += len(steps)
            for number, step in zip(ranges[-1], steps, strict=True):
                for transfer in step:
                    peer = transfer.peer
                    if peer == rank or not 0 <= peer < schedule.ranks:
                        raise ScheduleError(f"rank {rank} of {schedule.ranks} has no peer {peer}")
                    if transfer.outgoing:
                        sides[rank, peer, channel][0].append((number, transfer))
                    else:
                        sides[peer, rank, channel][1].append((number, transfer))
        programs.append(tuple(ranges))
    return tuple(programs), sides


def _in_rounds(programs: tuple[tuple[range, ...], ...], pairs: list[Pair]) -> Matching:
    channels = [steps for program in programs for steps in program]
    total = channels[-1].stop if channels else 0
    follows = [True] * (total + 1)  # whether a step with this number comes after the one before it
    for steps in channels:
        follows[steps.start] = False
    follows[total] = False
    of_step: list[list[int]] = [[] for _ in range(total)]
    for index, pair in enumerate(pairs):
        of_step[pair.send_step].append(index)
        of_step[pair.recv_step].append(index)
    begin, end, left = [-1] * total, [0] * total, [len(found) for found in of_step]
    rounds = [-1] * len(pairs)
    ready = [(steps.start, 0) for steps in channels if steps]
    while ready:
        step, time = ready.pop()
        begin[step], end[step] = time, max(end[step], time)
        touched = {step}
        for index in of_step[step]:
            pair = pairs[index]
            other = pair.recv_step if pair.send_step == step else pair.send_step
            if begin[other] < 0:
                continue
            rounds[index] = max(time, begin[other])
            for side in (step, other):
                end[side] = max(end[side], rounds[index] + 1)
                left[side] -= 1
            touched.add(other)
        ready.extend((done + 1, end[done]) for done in touched if not left[done] and follows[done + 1])
    if -1 in begin or any(left):
        stuck = next(
            rank for rank, program in enumerate(programs) for s in program for i in s if left[i] or begin[i] < 0
        )
        raise ScheduleError(f"deadlock: rank {stuck} waits for a message that can never be sent")
    order = sorted(range(len(pairs)), key=lambda i: (rounds[i], pairs[i].source, pairs[i].target, i))
    place = {old: new for new, old in enumerate(order)}
    return Matching(
        messages=tuple(pairs[i]._replace(round=rounds[i]) for i in order),
        programs=programs,
        step_messages=tuple(tuple(sorted(place[i] for i in found)) for found in of_step),
        begin=tuple(begin),
        end=tuple(end),
    )
