"""The time a schedule takes over given links: one event simulation, the same for every algorithm and topology.

A message begins when both its steps have begun, in the order of time. It occupies its sender's send side and its
receiver's receive side, and, if it crosses hosts, the send and receive side of the hosts' NICs, else the host itself,
for its bytes at the streaming rate; each of these takes one message after another. The rest of what it takes alone,
its latency, occupies nothing (as in LogGP: Alexandrov et al., J. Parallel Distrib. Comput. 44, 1997). While both sides
of a rank or NIC are busy, both go slower by the link's exchange factor. A receive that reduces adds the addition on
the receiver before its step ends. Arrival ends the sender's step too: what a library may buffer is not assumed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

from commbench.models.links import Links
from commbench.schedules.matching import match
from commbench.schedules.schedule import Schedule, ScheduleError


def price(
    schedule: Schedule, message_bytes: float, hosts: tuple[int, ...], links: Links, repeats: int = 1
) -> float:
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


@lru_cache(maxsize=128)
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


class _Run:
    """One simulation. Step s and message i of repetition k are numbered k * steps + s and k * messages + i."""

    def __init__(self, plan: _Plan, block_bytes: float, links: Links, repeats: int) -> None:
        self.plan, self.repeats = plan, repeats
        self.steps, self.messages = len(plan.step_messages), len(plan.routes)
        self.costs = []
        for crossing, blocks in plan.kinds:
            link = links.of(crossing=crossing)
            size = blocks * block_bytes
            occupied = size * link.seconds_per_byte
            self.costs.append(
                (
                    occupied,
                    link.message_s(size) - occupied,
                    max(link.exchange_factor - 1.0, 0.0),
                    links.host_seconds_per_message + size * links.host_seconds_per_byte,
                    size * links.reduce_seconds_per_byte,
                )
            )
        self.begin = [-1.0] * (self.steps * repeats)
        self.end = [0.0] * (self.steps * repeats)
        self.left = [len(messages) for messages in plan.step_messages] * repeats
        self.rank_end = [0.0] * len(plan.starts)
        self.channels_left = [len(starts) for starts in plan.starts] * repeats
        self.heap: list[tuple[float, int]] = []

    def finish(self) -> float:
        for starts in self.plan.starts:
            for step in starts:
                self._begin(step, 0.0)
        self._carry_messages()
        return max(self.rank_end)

    def _carry_messages(self) -> None:
        routes, costs, heap, messages, steps = self.plan.routes, self.costs, self.heap, self.messages, self.steps
        end, left = self.end, self.left
        free = [0.0] * self.plan.sides
        host_free = [0.0] * self.plan.hosts
        adder_free = [0.0] * len(self.plan.starts)
        while heap:
            time, index = heappop(heap)
            repeat, index = divmod(index, messages)
            send_step, recv_step, sides, host, adder, kind = routes[index]
            occupied, latency, slower, host_busy, adding = costs[kind]
            done = time + occupied
            for side in sides:
                start = free[side]
                if start < time:
                    start = time
                finished = start + occupied
                if slower:
                    opposite = side ^ 1
                    both = free[opposite] - start
                    if both > 0.0:
                        delay = slower * (both if both < occupied else occupied)
                        finished += delay
                        free[opposite] += delay
                free[side] = finished
                if finished > done:
                    done = finished
            if host >= 0 and host_busy:
                start = host_free[host]
                host_free[host] = finished = (start if start > time else time) + host_busy
                if finished > done:
                    done = finished
            done += latency
            sender, receiver = send_step + repeat * steps, recv_step + repeat * steps
            if done > end[sender]:
                end[sender] = done
            if adder >= 0 and adding:
                start = adder_free[adder]
                adder_free[adder] = done = (start if start > done else done) + adding
            if done > end[receiver]:
                end[receiver] = done
            for step in (sender, receiver):
                left[step] -= 1
                if not left[step]:
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
