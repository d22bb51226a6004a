"""The time a schedule takes over given links: one event simulation, the same for every algorithm and topology.

A message begins when both its steps have begun. While it occupies them (its overhead, and its bytes at the streaming
rate) it holds its sender's send side and its receiver's receive side and, if it crosses hosts, the send and receive
side of their NICs; the rest of what it takes alone, its latency, occupies nothing (as in LogGP: Alexandrov et al.,
J. Parallel Distrib. Comput. 44, 1997). While both sides of a rank or NIC are busy, both take longer, by what was
measured of that pattern (:class:`commbench.models.links.Link`). A message inside a host also takes its part of what
that host's cores and memory can do. Each of these serves one message after another, first come, first served; so a
change that alters the order can, now and then, make the whole a few percent faster although each message got slower.
A receive that reduces adds the addition on the receiver before its step ends. Arrival ends the sender's step too: what
a library may buffer is not assumed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple

from commbench.models.links import Links, interpolate
from commbench.schedules.matching import match
from commbench.schedules.schedule import Schedule, ScheduleError


def price(schedule: Schedule, message_bytes: float, hosts: tuple[int, ...], links: Links, repeats: int = 1) -> float:
    """Seconds from the common start until the last rank is done, ``repeats`` operations one after the other.

    ``hosts[rank]`` is the host of a rank of the group. A rank begins its next operation when its own part of the one
    before is done. Raises ScheduleError for a schedule that does not match up or has another number of ranks, and
    ValueError for a link that is needed but not calibrated.
    """
    return _Run(_plan(schedule, hosts), message_bytes * float(schedule.share), links, repeats).finish()


def price_exchange(sizes: Sequence[Sequence[int]], hosts: tuple[int, ...], links: Links) -> float:
    """Seconds of one exchange in which rank r sends ``sizes[r][s]`` bytes to each rank s, all messages posted at once.

    What a rank has for itself, and what has no bytes, is no message. Each rank's first message goes to the rank after it,
    the next to the one after that. Raises ValueError as ``price`` does.
    """
    n = len(hosts)
    number = {host: index for index, host in enumerate(dict.fromkeys(hosts))}
    ranks_on = Counter(hosts)
    routes: list[_Route] = []
    kinds: dict[tuple[int, int, int], int] = {}
    steps: list[list[int]] = [[] for _ in range(n)]
    for ahead in range(1, n):
        for source in range(n):
            target = (source + ahead) % n
            size = int(sizes[source][target])
            if size <= 0:
                continue
            here, there = hosts[source], hosts[target]
            across = here != there
            kind = kinds.setdefault((here, there, size) if across else (-1, -1, size), len(kinds))
            for rank in (source, target):
                steps[rank].append(len(routes))
            routes.append(
                _Route(
                    source, target, source, target, _sides(source, target, hosts, number, ranks_on),
                    -1 if across else number[here], -1, kind,
                )
            )  # fmt: skip
    plan = _Plan(
        routes=tuple(routes), kinds=tuple(kinds), starts=tuple((rank,) for rank in range(n)),
        last={rank: rank for rank in range(n)}, step_messages=tuple(map(tuple, steps)), sides=2 * (n + len(number)),
        hosts=len(number),
    )  # fmt: skip
    return _Run(plan, 1.0, links, 1).finish()


def _sides(
    source: int, target: int, hosts: tuple[int, ...], number: dict[int, int], ranks_on: Counter[int]
) -> tuple[int, ...]:
    """The sides that a message holds: those of its ranks, and of NICs that several ranks share. The NIC of a rank that
    is alone on its host carries just what the rank's own sides do."""
    here, there, n = hosts[source], hosts[target], len(hosts)
    sides = [2 * source, 2 * target + 1]
    if here != there:
        sides += [2 * (n + number[here])] if ranks_on[here] > 1 else []
        sides += [2 * (n + number[there]) + 1] if ranks_on[there] > 1 else []
    return tuple(sides)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Plan:
    """What does not depend on sizes and links. Sides are numbered so that a pair's two directions differ in bit 0.

    ``routes[i]``: message i's route. ``kinds``: (host it leaves, host it reaches, blocks), hosts -1 where it stays
    inside one. ``starts[rank]``: first step of each channel; ``last``: step -> its rank, if it is the last of its
    channel.
    """

    routes: tuple[_Route, ...]
    kinds: tuple[tuple[int, int, int], ...]
    starts: tuple[tuple[int, ...], ...]
    last: dict[int, int]
    step_messages: tuple[tuple[int, ...], ...]
    sides: int
    hosts: int


class _Route(NamedTuple):
    """``sides``: of the two ranks and, where their NICs carry other ranks too, of these; ``host``: whose memory it is
    carried by, or -1; ``adder``: its receiver if it reduces, or -1."""

    send_step: int
    recv_step: int
    source: int
    target: int
    sides: tuple[int, ...]
    host: int
    adder: int
    kind: int


@lru_cache(maxsize=64)
def _plan(schedule: Schedule, hosts: tuple[int, ...]) -> _Plan:
    n = schedule.ranks
    if len(hosts) != n:
        raise ScheduleError(f"a schedule for {n} ranks cannot run on {len(hosts)}")
    number = {host: index for index, host in enumerate(dict.fromkeys(hosts))}
    ranks_on = Counter(hosts)
    kinds: dict[tuple[int, int, int], int] = {}
    matching = match(schedule)
    routes = []
    for m in matching.messages:
        here, there = hosts[m.source], hosts[m.target]
        kind = kinds.setdefault((-1, -1, len(m.blocks)) if here == there else (here, there, len(m.blocks)), len(kinds))
        routes.append(
            _Route(
                m.send_step, m.recv_step, m.source, m.target, _sides(m.source, m.target, hosts, number, ranks_on),
                number[here] if here == there else -1, m.target if m.reduce else -1, kind,
            )
        )  # fmt: skip
    return _Plan(
        routes=tuple(routes),
        kinds=tuple(kinds),
        starts=tuple(tuple(steps.start for steps in program if steps) for program in matching.programs),
        last={steps[-1]: rank for rank, program in enumerate(matching.programs) for steps in program if steps},
        step_messages=matching.step_messages,
        sides=2 * (n + len(number)),
        hosts=len(number),
    )


class MessageCost(NamedTuple):
    """Seconds of one message. ``occupied``: how long it holds the sides of its ranks, ``queued`` the receive side if it
    had to wait for another rank's, ``nic_out`` and ``nic_in`` the sides of NICs; ``exchange``, ``shift`` and ``nic``:
    what is added while the same side is busy in the other direction, with the same rank, with another, of a NIC."""

    occupied: float
    latency: float
    queued: float
    exchange: float
    shift: float
    nic_out: float
    nic_in: float
    nic: float
    host_busy: float
    adding: float


def message_cost(links: Links, here: int, there: int, size: float) -> MessageCost:
    crossing = here != there
    link = links.of(crossing=crossing)
    whole, occupied = link.message_s(size), link.occupied_s(size)
    queued, exchange, shift = (
        link.queued_s(size), link.both_ways_s(size, one_pair=True), link.both_ways_s(size, one_pair=False)
    )  # fmt: skip
    nic_out = nic_in = nic = 0.0
    if crossing:
        # What was measured between two hosts of usual rates, on the slower of these two.
        slowest = max(links.rate(here, out=True), links.rate(there, out=False))
        longer = size * (slowest - link.seconds_per_byte)
        scale = slowest / link.seconds_per_byte if link.seconds_per_byte else 1.0
        occupied, queued = occupied + longer, queued + longer
        whole = max(whole + longer, occupied)
        exchange, shift = exchange * scale, shift * scale
        nic_out, nic_in = size * links.nic_rate(here, out=True), size * links.nic_rate(there, out=False)
        if links.nic:
            usual = size * (links.nic_seconds_per_byte or link.seconds_per_byte)
            nic = max(0.0, interpolate(links.nic, size, link.seconds_per_byte) - usual) * scale
        else:
            nic = exchange
    return MessageCost(
        occupied=occupied, latency=whole - occupied, queued=queued, exchange=exchange, shift=shift,
        nic_out=nic_out, nic_in=nic_in, nic=nic,
        host_busy=links.host_seconds_per_message + size * links.host_seconds_per_byte,
        adding=size * links.reduce_seconds_per_byte,
    )  # fmt: skip


class _Run:
    """One simulation. Step s and message i of repetition k are numbered k * steps + s and k * messages + i."""

    def __init__(self, plan: _Plan, block_bytes: float, links: Links, repeats: int) -> None:
        self.plan, self.repeats = plan, repeats
        self.steps, self.messages = len(plan.step_messages), len(plan.routes)
        self.costs = [message_cost(links, here, there, blocks * block_bytes) for here, there, blocks in plan.kinds]
        self.begin = [-1.0] * (self.steps * repeats)
        self.end = [0.0] * (self.steps * repeats)
        self.left = [len(messages) for messages in plan.step_messages] * repeats
        self.rank_end = [0.0] * len(plan.starts)
        self.channels_left = [len(starts) for starts in plan.starts] * repeats
        self.arrival = [0.0] * (self.messages * repeats)
        self.free = [0.0] * plan.sides
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
        heap, arrival = self.heap, self.arrival
        host_free, adder_free = [0.0] * self.plan.hosts, [0.0] * len(self.plan.starts)
        while heap:
            time, number = heappop(heap)
            if number >= 0:
                route = self.plan.routes[number % self.messages]
                cost = self.costs[route.kind]
                done = self._occupy(number, time, route, cost) + cost.latency
                if route.host >= 0 and cost.host_busy:
                    free = host_free[route.host]
                    host_free[route.host] = (free if free > time else time) + cost.host_busy
                    if host_free[route.host] > done:
                        done = host_free[route.host]
                arrival[number] = done
                heappush(heap, (done, ~number))
            elif arrival[~number] > time:
                heappush(heap, (arrival[~number], number))
            else:
                route = self.plan.routes[~number % self.messages]
                offset = ~number // self.messages * self.steps
                self._done(route.send_step + offset, time)
                if route.adder >= 0:
                    time = max(time, adder_free[route.adder]) + self.costs[route.kind].adding
                    adder_free[route.adder] = time
                self._done(route.recv_step + offset, time)

    def _occupy(self, number: int, time: float, route: _Route, cost: MessageCost) -> float:
        """Let a message that starts at ``time`` hold its sides; when it lets go of the last."""
        free, tail, routes, messages = self.free, self.tail, self.plan.routes, self.messages
        ranks = 2 * len(self.plan.starts)  # the first side of a NIC
        done = time
        for side in route.sides:
            start, occupied = time, cost.occupied
            if side >= ranks:
                occupied = cost.nic_in if side & 1 else cost.nic_out
            if free[side] > time:
                start = free[side]
                if side == 2 * route.target + 1 and routes[tail[side] % messages].source != route.source:
                    occupied = cost.queued
            finished = start + occupied
            both = free[side ^ 1] - start
            if both > 0.0:
                other = routes[tail[side ^ 1] % messages]
                if side >= ranks:
                    longer = cost.nic
                else:
                    longer = (
                        cost.exchange if other.source == route.target and other.target == route.source else cost.shift
                    )
                if longer:
                    delay = longer * (both / occupied if both < occupied else 1.0)
                    finished += delay
                    free[side ^ 1] += delay
                    self._delay(tail[side ^ 1], free[side ^ 1])
            free[side] = finished
            tail[side] = number
            if finished > done:
                done = finished
        return done

    def _delay(self, number: int, finished: float) -> None:
        """The last message of a side ends later than announced, because one in the other direction has joined it."""
        latency = self.costs[self.plan.routes[number % self.messages].kind].latency
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
            route = self.plan.routes[index]
            posted = self.begin[(route.recv_step if route.send_step == local else route.send_step) + offset]
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
