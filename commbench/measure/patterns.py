"""Traffic in the patterns that schedules are made of, timed: what calibration is built from.

A pattern says of every rank what it sends and receives in each step of one call. Calls follow one another without
anything between them, as the steps of an algorithm do, so what ranks, NICs and connections cost one another is in the
time. A window is a number of calls; its time is that of the slowest rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from commbench.measure.buffers import buffer_sets
from commbench.measure.control import Control
from commbench.measure.operation import Messenger, Post

Steps = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Of one rank, for each step of a call: whom it sends to and whom it receives from."""
Pattern = Callable[[int], Steps]
"""The steps of a world rank; none for one that takes no part."""

LEAST_CALLS = 3  # in a window: steps of an algorithm follow one another, and one late rank delays the next
# Windows of longer calls begin together, as operations do: what a rank is late by, the next step has not made up for yet.
# Shorter calls are preceded by one that is not timed, in which ranks wait for one another.
LONG_S = 0.002
EACH_WINDOWS, EACH_CALLS = 2, 2  # for rates of hosts, which tell a slow one from the others and no more
MOST_CALLS = 2000
REST: Steps = ()


def one_way(first: int, second: int) -> Pattern:
    """A message there and one back: two of them one after the other."""
    there: Steps = (((second,), ()), ((), (second,)))
    back: Steps = (((), (first,)), ((first,), ()))
    return lambda rank: there if rank == first else back if rank == second else REST


def stream(pairs: Sequence[tuple[int, int]]) -> Pattern:
    """A message from the first to the second of every pair, all pairs at once; each goes on by itself."""
    sends: dict[int, Steps] = {first: (((second,), ()),) for first, second in pairs}
    receives: dict[int, Steps] = {second: (((), (first,)),) for first, second in pairs}
    return lambda rank: sends.get(rank) or receives.get(rank, REST)


def shift(rings: Sequence[Sequence[int]]) -> Pattern:
    """In each ring, every rank sends to the next and receives from the one before, all at once; two ranks exchange."""
    steps: dict[int, Steps] = {
        rank: (((ring[(at + 1) % len(ring)],), (ring[at - 1],)),) for ring in rings for at, rank in enumerate(ring)
    }
    return lambda rank: steps.get(rank, REST)


def fan_in(senders: Sequence[int], to: int) -> Pattern:
    """Every sender's message to one rank, all at once."""
    into: Steps = (((), tuple(senders)),)
    out: Steps = (((to,), ()),)
    return lambda rank: into if rank == to else out if rank in senders else REST


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """``windows`` of about ``window_s`` each; a pattern stops growing after the first size that takes ``slow_s`` a call:
    on a link that slow, time has long become proportional to size."""

    windows: int
    window_s: float
    slow_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Times patterns on a messenger of the world; every rank calls every method in step."""

    control: Control
    messenger: Messenger
    effort: Effort
    cache: str
    deadline_s: float
    clock: Callable[[], float] = time.perf_counter

    def sweep(self, doing: str, pattern: Pattern, sizes: Sequence[int]) -> dict[int, list[float]]:
        """Per size the windows' seconds a call, the same on every rank."""
        found: dict[int, list[float]] = {}
        for size in sizes:
            found[size] = self.time(doing, pattern, size)
            if min(found[size]) > self.effort.slow_s:
                break
        return found

    def time(self, doing: str, pattern: Pattern, size: int) -> list[float]:
        """The windows' seconds a call for messages of ``size`` bytes, the same on every rank."""
        control, effort = self.control, self.effort
        control.expect(self.deadline_s, f"calibrating: {doing}, {size} B")
        call = self._prepare(pattern(control.rank), size)
        self._together()  # whoever is early must not wait inside its first window
        # The first call makes connections and registers buffers: the second tells how many fit, unless it is long.
        once: float = control.agree(self._run(call, 1), max)
        if once < effort.window_s:
            once = control.agree(self._run(call, 1), max)
        long = once > LONG_S
        calls = max(LEAST_CALLS, min(MOST_CALLS, int(effort.window_s / max(once, 1e-7))))
        control.expect(self.deadline_s + 10 * effort.windows * (calls + 1) * once, f"calibrating: {doing}, {size} B")
        mine = []
        for _ in range(effort.windows):
            if long:
                self._together()
            else:
                self._run(call, 1)
            mine.append(self._run(call, calls) / calls)
        slowest: list[float] = control.agree(mine, lambda all_: [max(ranks) for ranks in zip(*all_, strict=True)])
        return slowest

    def each(self, doing: str, pattern: Pattern, size: int) -> list[float]:
        """Per rank the seconds of its own call, the least of some windows; the same on every rank."""
        self.control.expect(self.deadline_s, f"calibrating: {doing}")
        call = self._prepare(pattern(self.control.rank), size)
        best = float("inf")
        for _ in range(EACH_WINDOWS):
            self._together()
            self._run(call, 1)  # makes connections, and lets both ends wait for one another
            best = min(best, self._run(call, EACH_CALLS) / EACH_CALLS)
        everyone: list[float] = self.control.agree(best, list)
        return everyone

    def _together(self) -> None:
        self.control.agree(None, lambda all_: None)

    def _prepare(self, steps: Steps, size: int) -> Callable[[int], Any]:
        """Calls of this rank, so many, on the next set of buffers each time."""
        messenger = self.messenger
        sets = buffer_sets(2 * size, self.cache) if steps else 1
        calls = [
            [
                messenger.step(
                    [Post(messenger.buffer(size), peer) for peer in to],
                    [Post(messenger.buffer(size), peer) for peer in source],
                )
                for to, source in steps
            ]
            for _ in range(sets)
        ]
        return messenger.repeat(calls)

    def _run(self, repeat: Callable[[int], Any], times: int) -> float:
        start = self.clock()
        repeat(times)
        self.messenger.finish()
        return self.clock() - start
