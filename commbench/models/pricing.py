"""The time a schedule takes over given links: one event simulation, the same for every algorithm and topology.

A message begins when both its steps have begun. For its bytes at the streaming rate it occupies its sender's send
side and its receiver's receive side, and, if it crosses hosts, the send and receive side of their NICs; the rest of
what it takes alone, its latency, occupies nothing (as in LogGP: Alexandrov et al., J. Parallel Distrib. Comput. 44,
1997). While both sides of a rank or NIC are busy, both go slower by the link's exchange factor. A message inside a host
also takes its part of what that host's cores and memory can do. Each of these serves one message after another, first
come, first served; so a change that alters the order can, now and then, make the whole a few percent faster although
each message got slower. A receive that reduces adds the addition on the receiver before its step ends. Arrival ends the
sender's step too: what a library may buffer is not assumed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple

from commbench.models.links import Links
from commbench.schedules.matching import match
from commbench.schedules.schedule import Schedule, ScheduleError


def price(schedule: Schedule, message_bytes: float, hosts: tuple[int, ...], links: Links, repeats: int = 1) -> float:
    """Seconds from the common start until the last rank is done, ``repeats`` operations one after the other.

    ``hosts[rank]`` is the host of a rank of the group. A rank begins its next operation when its own part of the one
    before is done. Raises ScheduleError for a schedule that does not match up or has another number of ranks, and
    ValueError for a link that is needed but not calibrated.
    """
    return _Run(_plan(schedule, hosts), message_bytes * float(schedule.share), links, repeats).finish()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Plan:
    """What does not depend on sizes and links. Sides are numbered so that a pair's two directions differ in bit 0.

    ``routes[i]``: message i's (send step, receive step, sides, host or -1, receiver if it reduces or -1, kind).
    ``kinds``: (crosses hosts, blocks). ``starts[rank]``: first step of each channel; ``last``: step -> its rank, if it
    is the last of its channel.
    """

    routes: tuple[tuple[int, int, tuple[int, ...], int, int, int], ...]
    kinds: tuple[tuple[bool, int], ...]
    starts: tuple[tuple[int, ...], ...]
    last: dict[int, int]
    step_messages: tuple[tuple[int, ...], ...]
    sides: int
    hosts: int


@lru_cache(maxsize=64)
def _plan(schedule: Schedule, hosts: tuple[int, ...]) -> _Plan:
    n = schedule.ranks
    if len(hosts) != n:
        raise ScheduleError(f"a schedule for {n} ranks cannot run on {len(hosts)}")
    number = {host: index for index, host in enumerate(dict.fromkeys(hosts))}
    ranks_on = Counter(hosts)
    kinds: dict[tuple[bool, int], int] = {}
    matching = match(schedule)
    routes = []
    for m in matching.messages:
        here, there = hosts[m.source], hosts[m.target]
        crossing = here != there
        sides = [2 * m.source, 2 * m.target + 1]
        if crossing:  # the NIC of a rank that is alone on its host carries just what the rank's own sides do
            sides += [2 * (n + number[here])] if ranks_on[here] > 1 else []
            sides += [2 * (n + number[there]) + 1] if ranks_on[there] > 1 else []
        kind = kinds.setdefault((crossing, len(m.blocks)), len(kinds))
        host = -1 if crossing else number[here]
        routes.append((m.send_step, m.recv_step, tuple(sides), host, m.target if m.reduce else -1, kind))
    return _Plan(
        routes=tuple(routes),
        kinds=tuple(kinds),
        starts=tuple(tuple(steps.start for steps in program if steps) for program in matching.programs),
        last={steps[-1]: rank for rank, program in enumerate(matching.programs) for steps in program if steps},
        step_messages=matching.step_messages,
        sides=2 * (n + len(number)),
        hosts=len(number),
    )


class _Cost(NamedTuple):
    """Seconds of one message; ``slower``: what each second in which both directions move adds to either."""

    occupied: float
    latency: float
    slower: float
    host_busy: float
    adding: float


def _cost(links: Links, crossing: bool, size: float) -> _Cost:
    link = links.of(crossing=crossing)
    occupied = size * link.seconds_per_byte
    return _Cost(
        occupied=occupied,
        latency=link.message_s(size) - occupied,
        slower=max(link.exchange_factor - 1.0, 0.0),
        host_busy=links.host_seconds_per_message + size * links.host_seconds_per_byte,
        adding=size * links.reduce_seconds_per_byte,
    )


class _Run:
    """One simulation. Step s and message i of repetition k are numbered k * steps + s and k * messages + i."""

    def __init__(self, plan: _Plan, block_bytes: float, links: Links, repeats: int) -> None:
        self.plan, self.repeats = plan, repeats
        self.steps, self.messages = len(plan.step_messages), len(plan.routes)
        self.costs = [_cost(links, crossing, blocks * block_bytes) for crossing, blocks in plan.kinds]
        self.begin = [-1.0] * (self.steps * repeats)
        self.end = [0.0] * (self.steps * repeats)
        self.left = [len(messages) for messages in plan.step_messages] * repeats
        self.rank_end = [0.0] * len(plan.starts)
        self.channels_left = [len(starts) for starts in plan.starts] * repeats
        self.arrival = [0.0] * (self.messages * repeats)
        self.tail = [-1] * plan.sides  # the last message to occupy each side
        self.heap: list[tuple[float, int]] = []

    def finish(self) -> float:
        for starts in self.plan.starts:
            for step in starts:
                self._begin(step, 0.0)
        self._carry_messages()
        return max(self.rank_end)

    def _carry_messages(self) -> None:
        """Take events in order of time; an arrival (numbered ~message) comes before a start at the same time."""
        heap, arrival, tail, free = self.heap, self.arrival, self.tail, [0.0] * self.plan.sides
        host_free, adder_free = [0.0] * self.plan.hosts, [0.0] * len(self.plan.starts)
        while heap:
            time, number = heappop(heap)
            if number >= 0:
                _, _, sides, host, _, kind = self.plan.routes[number % self.messages]
                occupied, latency, slower, host_busy, _ = self.costs[kind]
                done = time + occupied
                for side in sides:
                    start = free[side] if free[side] > time else time
                    finished = start + occupied
                    both = free[side ^ 1] - start
                    if slower and both > 0.0:
                        delay = slower * (both if both < occupied else occupied)
                        finished += delay
                        free[side ^ 1] += delay
                        self._delay(tail[side ^ 1], free[side ^ 1])
                    free[side] = finished
                    tail[side] = number
                    if finished > done:
                        done = finished
                done += latency
                if host >= 0 and host_busy:
                    host_free[host] = (host_free[host] if host_free[host] > time else time) + host_busy
                    if host_free[host] > done:
                        done = host_free[host]
                arrival[number] = done
                heappush(heap, (done, ~number))
            elif arrival[~number] > time:
                heappush(heap, (arrival[~number], number))
            else:
                send_step, recv_step, _, _, adder, kind = self.plan.routes[~number % self.messages]
                offset = ~number // self.messages * self.steps
                self._done(send_step + offset, time)
                if adder >= 0:
                    adder_free[adder] = time = max(time, adder_free[adder]) + self.costs[kind].adding
                self._done(recv_step + offset, time)

    def _delay(self, number: int, finished: float) -> None:
        """The last message of a side ends later than announced, because one in the other direction has joined it."""
        latency = self.costs[self.plan.routes[number % self.messages][-1]].latency
        self.arrival[number] = max(self.arrival[number], finished + latency)

    def _done(self, step: int, time: float) -> None:
        """One message of a step is done at ``time``."""
        self.left[step] -= 1
        if time > self.end[step]:
            self.end[step] = time
        if not self.left[step]:
            self._after(step)

    def _begin(self, step: int, time: float) -> None:
        """Begin a step: post its messages, of which those whose other side is posted can start."""
        repeat, local = divmod(step, self.steps)
        self.begin[step] = time
        offset = repeat * self.steps
        for index in self.plan.step_messages[local]:
            send_step, recv_step = self.plan.routes[index][:2]
            posted = self.begin[(recv_step if send_step == local else send_step) + offset]
            if posted >= 0.0:
                heappush(self.heap, (posted if posted > time else time, index + repeat * self.messages))
        if not self.left[step]:
            self.end[step] = time
            self._after(step)

    def _after(self, step: int) -> None:
        """Go on after a step: the channel's next one, or, after a rank's last channel, the next operation's first."""
        repeat, local = divmod(step, self.steps)
        rank = self.plan.last.get(local)
        if rank is None:
            self._begin(step + 1, self.end[step])
            return
        self.rank_end[rank] = max(self.rank_end[rank], self.end[step])
        at = repeat * len(self.plan.starts) + rank
        self.channels_left[at] -= 1
        if not self.channels_left[at] and repeat + 1 < self.repeats:
            for first in self.plan.starts[rank]:
                self._begin(first + (repeat + 1) * self.steps, self.rank_end[rank])
