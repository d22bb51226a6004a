"""Measures one case: warm-up, isolated or streamed iterations, checks, and the decision to stop.

Every rank runs this in step. Rank 0 decides between rounds; inside a round no rank sends anything but what is
measured. An isolated round is a few iterations, each with an agreed start and buffers of its own; a streamed round is
one batch of back-to-back operations.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commbench.measure.clock import CommonClock, OneClock, now_ns
from commbench.measure.control import Control
from commbench.measure.data import Data
from commbench.measure.operation import Operation
from commbench.measure.ranks import Iterations, combine, joined, well_started
from commbench.measure.stopping import StoppingRule
from commbench.measure.timed import Loop, PythonLoop, Round, Start
from commbench.stats.summary import Summary, summarise_times
from commbench.units import format_time

WARMUP_ROUNDS = 6
WARMUP_ROUND_S = 0.01
ISOLATED_ROUND_S = 0.02
# A batch must dwarf the clock's resolution (60 ns through Python) and the start's skew.
STREAMED_BATCH_S = 2e-3
# Between hosts it must also dwarf what sockets, cards and switches take in at once while nothing has passed yet: 32 kB
# are over a millisecond of a 200 Mbit/s link, in which short messages would seem to move at the speed of memory.
STREAMED_BATCH_BETWEEN_HOSTS_S = 20e-3
MAX_BATCH = 20_000
# A batch that took less than this part of that is made longer, so many times at most.
SHORT_BATCH, MOST_RESIZED = 0.8, 8
# A start is set this far ahead on one host, and for each rank, that all hear of it in time: with a core of their own, and
# without. Between hosts the control plane's connections take longer.
LEAD_S, LEAD_A_RANK_S, LEAD_A_SLEEPER_S, LEAD_BETWEEN_HOSTS_S = 3e-4, 5e-5, 3e-4, 5e-4
MOST_LEAD_S = 20e-3  # where ranks hear of starts too late
# A clock that may be off by more than this part of the time tells less than a barrier.
CLOCK_SHARE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How to measure. ``spin``: every rank has a core of its own.

    Iterations start at agreed times of ``clock``; or behind ``barrier``, in which every rank of the world takes part,
    where there is no such clock or it is not sure enough for the case. ``loop`` does the timing, the same kind on every
    rank.
    ``count_sent``: hosts count what they send, each by the ``sent_bytes`` of one of its ranks.
    """

    streamed: bool
    rule: StoppingRule
    deadline_s: float
    spin: bool
    clock: CommonClock | None = field(default_factory=OneClock)
    between_hosts: bool = False
    barrier: Operation | None = None
    loop: Loop = field(default_factory=PythonLoop)
    count_sent: bool = False
    sent_bytes: Callable[[], int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What rank 0 knows in the end. ``stamps[rank, iteration] = (start, end)`` in ns of the common clock, where there is
    one; ``clock_error_s``: how far it may have been apart on two ranks, where it had to be fitted; ``kept`` marks iterations that
    count; ``batch`` operations make one iteration (1 when isolated). ``summary`` is per operation, as are
    ``wire_bytes``, what all hosts sent, None where nobody counted, and ``host_s``, for which the slowest rank's host was
    busy beside a device that did the operation. ``starved``: the share of operations for which a device waited for its
    host. ``overhead_s``: what the loop adds to one, on the slowest rank."""

    summary: Summary
    iterations: Iterations
    kept: NDArray[np.bool_]
    stamps: NDArray[np.int64]
    batch: int
    late_starts: bool
    wrong: int
    verified: int
    stop: str
    start: str
    numbers: NDArray[np.int64]
    phases: NDArray[np.int64] | None = None
    wire_bytes: float | None = None
    host_s: float | None = None
    starved: float | None = None
    overhead_s: float | None = None
    clock_error_s: float | None = None
    note: str | None = None


@dataclass(kw_only=True)
class _Rank:
    """This rank's part: its buffer sets, and what it has filled them with."""

    operations: list[Operation]
    pattern: Data | None
    control: Control
    settings: Settings
    filled: dict[int, int] = field(default_factory=dict)
    sent: int = 0
    operations_sent: int = 0
    _sent_before: int | None = None

    def start_counting(self) -> None:
        if self.settings.sent_bytes is not None:
            self._sent_before = self.settings.sent_bytes()

    def stop_counting(self, operations: int) -> None:
        """Once every rank is known to be done: before, some of the bytes may not have left."""
        if self.settings.sent_bytes is not None and self._sent_before is not None:
            self.sent += self.settings.sent_bytes() - self._sent_before
            self.operations_sent += operations
            self._sent_before = None

    def wire_bytes(self) -> float | None:
        """What all hosts sent for an operation."""
        counted: list[list[int]] = self.control.agree([self.sent, self.operations_sent], list)
        operations = max(each for _, each in counted)
        return sum(each for each, _ in counted) / operations if operations else None

    @property
    def takes_part(self) -> bool:
        return bool(self.operations)

    def fill(self, sets: int, first: int, checked: frozenset[int]) -> None:
        """Fresh inputs and poisoned outputs where the output will be checked or the input was overwritten."""
        if self.pattern is None:
            return
        for index, operation in enumerate(self.operations[:sets]):
            if index in checked or index not in self.filled or not operation.repeatable:
                self.pattern.poison(operation.output)
                self.pattern.fill(operation.input, first + index)
                operation.upload()
                self.filled[index] = first + index

    def count_wrong(self, checked: frozenset[int]) -> int:
        wrong = 0
        if self.pattern is not None and self.takes_part:
            for index in checked:
                operation = self.operations[index]
                operation.download()
                wrong += self.pattern.wrong(operation.output, self.filled[index])
        return wrong

    def phases(self, count: int) -> list[list[int]] | None:
        """Of the last run of each of the first operations, which isolated iterations are."""
        if self.settings.streamed:
            return None
        found = [one.phases().tolist() for one in self.operations[:count] if one.phases is not None]
        return found or None

    def warm(self, count: int) -> float:
        """Seconds an operation, without a synchronised start."""
        start = now_ns()
        for index in range(count):
            if self.takes_part:
                self.operations[index % len(self.operations)].run()
        return (now_ns() - start) / count / 1e9


def measure(
    operations: list[Operation], pattern: Data | None, control: Control, settings: Settings,
    groups: tuple[tuple[int, ...], ...], doing: str,
) -> Measured | None:  # fmt: skip
    """Measure one case on every rank; the result at rank 0, None elsewhere.

    A rank outside every group passes no operations and only keeps step. ``doing`` names the case where a deadline
    passes.
    """
    rank = _Rank(operations=operations, pattern=pattern, control=control, settings=settings)
    estimate_s = _warm_up(rank, doing)
    sets = control.agree(len(operations) or None, lambda counts: min(c for c in counts if c))
    repeatable = control.agree(all(operation.repeatable for operation in operations), all)
    checkable = control.agree(pattern is not None and pattern.output_elements > 0, any)
    head = _Head(
        settings=settings, groups=groups, sets=sets, repeatable=repeatable, estimate_s=estimate_s,
        checkable=checkable,
    ) if control.rank == 0 else None  # fmt: skip
    gc.collect()
    gc.disable()
    count = 0
    try:
        while True:
            plan = control.share(head.plan() if head else None)
            rank.stop_counting(count)
            if plan["stop"]:
                break
            count = plan["count"]
            if plan["refit"] and settings.clock is not None:
                settings.clock.refit(plan["first"])
            control.expect(max(settings.deadline_s, 100 * plan["expected_s"]), f"measuring {doing}")
            values, done = _round(rank, plan)
            gathered = control.gather(values, done.stamps.tobytes())
            if head and gathered is not None:
                head.learn(plan, gathered)
    finally:
        gc.enable()
    wire_bytes = rank.wire_bytes() if settings.count_sent else None
    overhead_s: float = control.agree(settings.loop.overhead_s(), max)
    return head.result(plan["stop"], wire_bytes, overhead_s) if head else None


def _warm_up(rank: _Rank, doing: str) -> float:
    """Run until times settle, at most WARMUP_ROUNDS rounds: seconds an operation takes, as rank 0 sees it."""
    control = rank.control
    control.beat("preparing")
    control.expect(rank.settings.deadline_s, f"warming up {doing}")
    rank.fill(len(rank.operations), 0, frozenset())
    count, previous = 1, 0.0
    for number in range(WARMUP_ROUNDS):
        seconds: float = control.agree(rank.warm(count), max)
        settled = number > 0 and seconds >= 0.9 * previous
        if settled or seconds * count > 10 * WARMUP_ROUND_S:
            break
        previous = seconds
        count = max(1, min(1000, int(WARMUP_ROUND_S / max(seconds, 1e-7))))
    # What the warm-up left in overwritten buffers is not worth keeping.
    rank.filled.clear()
    return max(seconds, 1e-7)


def _round(rank: _Rank, plan: dict[str, Any]) -> tuple[dict[str, Any], Round]:
    control, settings = rank.control, rank.settings
    checked = frozenset(plan["check"])
    control.beat("preparing", plan["first"])
    began = time.perf_counter()
    rank.fill(plan["sets"], plan["first"], checked)
    filled = time.perf_counter()
    control.gather(None)
    rank.start_counting()
    clock = settings.clock or OneClock()
    base_ns = control.share(clock.now_ns() + plan["lead_ns"])
    ready = time.perf_counter()
    starts = base_ns + plan["spacing_ns"] * np.arange(1 if settings.streamed else plan["count"])
    start = Start(
        starts_ns=clock.to_mine(starts), spin=settings.spin, barrier=settings.barrier if plan["barrier"] else None,
        beat=control.beat, beat_address=control.beat_address,
    )  # fmt: skip
    run = settings.loop.streamed if settings.streamed else settings.loop.isolated
    ahead_ns = int(start.starts_ns[0]) - now_ns()
    found = run(rank.operations, plan["count"], plan["first"], start)
    done = time.perf_counter()
    control.beat("checking", plan["first"])
    wrong = rank.count_wrong(checked)
    values = {
        "wrong": wrong, "timed_s": done - ready, "check_s": time.perf_counter() - done + filled - began,
        "host_s": found.host_s, "starved": found.starved, "ahead_ns": ahead_ns if rank.takes_part else None,
        "phases": rank.phases(plan["count"]),
    }  # fmt: skip
    control.beat("deciding", plan["first"])
    if rank.takes_part and not settings.loop.on_device:
        found = found._replace(stamps=clock.to_common(found.stamps))
    return values, found


@dataclass(kw_only=True)
class _Head:
    """Rank 0's side: plans rounds, collects them, decides to stop."""

    settings: Settings
    groups: tuple[tuple[int, ...], ...]
    sets: int
    repeatable: bool
    estimate_s: float
    checkable: bool
    began: float = field(default_factory=time.monotonic)
    rounds: list[NDArray[np.int64]] = field(default_factory=list)
    found: list[Iterations] = field(default_factory=list)
    wrong: int = 0
    verified: int = 0
    first: int = 0
    timed_s: float = 0.0
    check_s: float = 0.0
    checked: int = 0
    spread: float = 1.5
    batch: int = 1
    resized: int = 0
    numbers: list[NDArray[np.int64]] = field(default_factory=list)
    phases: list[NDArray[np.int64]] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    starved: list[float] = field(default_factory=list)
    behind_barrier: bool = False
    lead_s: float = 0.0
    clock_error_s: float = 0.0
    note: str | None = None

    @property
    def common_clock(self) -> bool:
        """Whether the stamps of two ranks can be compared, and are."""
        return not (self.behind_barrier or self.settings.streamed or self.settings.loop.on_device)

    def __post_init__(self) -> None:
        self.behind_barrier = self.settings.clock is None
        self.lead_s = self._least_lead_s()
        if self.settings.streamed:
            self.batch = self._batch()

    def _batch(self) -> int:
        rule = self.settings.rule
        if rule.iterations is not None:
            batch = max(1, rule.iterations // 10)
        else:
            batch = int(self._batch_s / self.estimate_s)
        return max(2, min(batch, self._most_batch))

    @property
    def _batch_s(self) -> float:
        """How long a batch is to take."""
        long_enough = STREAMED_BATCH_BETWEEN_HOSTS_S if self.settings.between_hosts else STREAMED_BATCH_S
        return min(long_enough, self.settings.rule.limit_s / 20)

    @property
    def _most_batch(self) -> int:
        # An operation that overwrites its input may use each set once only.
        return MAX_BATCH if self.repeatable else max(2, self.sets)

    def _batch_is_short(self, found: Iterations) -> bool:
        """Whether batches have to be of more operations from now on: seen before any has counted.

        Operations that have just begun can take many times longer than those of a stream, and batches that were sized by
        them would measure beginnings.
        """
        rule = self.settings.rule
        if not self.settings.streamed or rule.iterations is not None or self.found or self.wrong:
            return False
        took_s = max(1e-7, float(np.median(found.time)))
        if took_s >= SHORT_BATCH * self._batch_s or self.batch >= self._most_batch or self.resized >= MOST_RESIZED:
            return False
        self.resized += 1
        self.estimate_s = took_s / self.batch
        self.batch = min(self._most_batch, math.ceil(self.batch * self._batch_s / took_s))
        return True

    def plan(self) -> dict[str, Any]:
        rule = self.settings.rule
        made = sum(len(found.time) for found in self.found)
        wanted = rule
        if self.settings.streamed and rule.iterations is not None:
            wanted = StoppingRule(
                precision=rule.precision, limit_s=rule.limit_s, limit_name=rule.limit_name,
                iterations=max(1, -(-rule.iterations // self.batch)),
            )  # fmt: skip
        stop = "wrong" if self.wrong else None
        if made and not stop:
            found, kept, _ = self._kept()
            stop = wanted.decide(found.time[kept], made, len(self.found), time.monotonic() - self.began)
        count = self.batch if self.settings.streamed else self._isolated_count(wanted, made)
        sets = min(count, self.sets)
        spacing_s = self.spread * self.estimate_s + 1e-5
        clock = self.settings.clock
        return {
            "stop": stop, "count": count, "sets": sets, "first": self.first,
            "spacing_ns": int(spacing_s * 1e9), "lead_ns": round(self.lead_s * 1e9), "barrier": self.behind_barrier,
            "refit": clock is not None and not self.behind_barrier and clock.due(),
            "check": self._choose(sets), "expected_s": count * spacing_s,
        }  # fmt: skip

    def _isolated_count(self, rule: StoppingRule, have: int) -> int:
        count = max(1, min(self.sets, int(ISOLATED_ROUND_S / (self.spread * self.estimate_s + 1e-5))))
        return max(1, min(count, rule.iterations - have)) if rule.iterations is not None else count

    def _least_lead_s(self) -> float:
        """How far ahead to set the start: the last rank must hear of it in time."""
        world = sum(len(group) for group in self.groups)
        lead_s = LEAD_S + world * (LEAD_A_RANK_S if self.settings.spin else LEAD_A_SLEEPER_S)
        return lead_s + LEAD_BETWEEN_HOSTS_S if self.settings.between_hosts else lead_s

    def _choose(self, sets: int) -> list[int]:
        """Which sets of the next round to check: all while checking costs no more than timing, else as many as do."""
        if not self.checkable:
            return []
        if not self.checked:
            return list(range(sets)) if not self.settings.streamed else [sets - 1]
        affordable = int(self.timed_s / len(self.found) / (self.check_s / self.checked))
        if affordable >= sets:
            return list(range(sets))
        affordable = max(1, affordable)
        # Rotate, so that no set is left out for ever.
        offset = len(self.found)
        return sorted({(offset + index * sets // affordable) % sets for index in range(affordable)})

    def learn(self, plan: dict[str, Any], gathered: list[tuple[Any, bytes]]) -> None:
        stamps = np.stack([np.frombuffer(blob, dtype=np.int64).reshape(-1, 2) for _, blob in gathered])
        values = [value for value, _ in gathered]
        found = combine(stamps, self.groups, common_clock=self.common_clock)
        self.first += max(plan["count"], plan["sets"])
        self.wrong += sum(value["wrong"] for value in values)
        self.verified += len(plan["check"])
        self._see_lateness([value["ahead_ns"] for value in values if value["ahead_ns"] is not None])
        if self._clock_is_unsure(found):
            # What this round has found tells how long the case takes, and no more.
            self.estimate_s = max(1e-7, float(np.percentile(found.first, 90)))
            return
        if self._batch_is_short(found):
            return
        self.rounds.append(stamps)
        self.found.append(found)
        self.numbers.append(plan["first"] + np.arange(stamps.shape[1], dtype=np.int64))
        if all(value.get("phases") is not None for value in values):
            self.phases.append(np.array([value["phases"] for value in values], dtype=np.int64))
        self.checked += len(plan["check"])
        self.timed_s += max(value["timed_s"] for value in values)
        self.check_s += max(value["check_s"] for value in values)
        for name, found_in in (("host_s", self.host_s), ("starved", self.starved)):
            known = [value[name] for value in values if value.get(name) is not None]
            found_in += [max(known)] if known else []
        if not self.settings.streamed:
            self.estimate_s = max(1e-7, float(np.percentile(found.first, 90)))
            late = np.mean(found.skew > np.maximum(self.clock_error_s, 0.1 * found.time))
            # Iterations that run into the next one's start need more room, up to the point where it does not help.
            self.spread = min(20.0, self.spread * 1.5) if late > 0.3 else max(1.5, self.spread / 1.1)

    def _see_lateness(self, ahead_ns: list[int]) -> None:
        """Ranks that hear of the start when it has passed need it to be set further ahead."""
        if ahead_ns and min(ahead_ns) < 0:
            self.lead_s = min(MOST_LEAD_S, 2 * self.lead_s)
        else:
            self.lead_s = max(self._least_lead_s(), self.lead_s / 1.1)

    def _clock_is_unsure(self, found: Iterations) -> bool:
        """Whether iterations have to be started by a barrier from now on: seen in the first round."""
        settings = self.settings
        if settings.clock is None or self.behind_barrier:
            return False
        error_s = max(settings.clock.error_s(group) for group in self.groups)
        self.clock_error_s = max(self.clock_error_s, error_s)
        time_s = float(np.median(found.time))
        if self.found or self.wrong or settings.barrier is None or not self.common_clock:
            return False
        if error_s <= CLOCK_SHARE * time_s:
            return False
        self.behind_barrier = True
        self.note = (
            f"started behind a barrier: clocks may be {format_time(error_s)} apart, more than a tenth of the "
            f"{format_time(time_s)} that it took before"
        )
        return True

    def _kept(self) -> tuple[Iterations, NDArray[np.bool_], bool]:
        """All iterations, which of them count, and whether starts were late."""
        found = joined(self.found)
        if self.common_clock:
            return found, *well_started(found, self.clock_error_s)
        return found, np.ones(len(found.time), dtype=bool), False

    def result(self, stop: str, wire_bytes: float | None, overhead_s: float) -> Measured:
        found, kept, late = self._kept()
        start = "barrier" if self.behind_barrier else "clock"
        if self.settings.loop.on_device:
            start = "stream"
        fitted = self.settings.clock is not None and self.settings.clock.several and start != "stream"
        return Measured(
            summary=summarise_times(found.time[kept] / self.batch), iterations=found, kept=kept,
            stamps=np.concatenate(self.rounds, axis=1), numbers=np.concatenate(self.numbers),
            phases=np.concatenate(self.phases, axis=1) if self.phases else None, batch=self.batch, late_starts=late, wrong=self.wrong,
            verified=self.verified, stop=stop, start=start, wire_bytes=wire_bytes, overhead_s=overhead_s,
            host_s=float(np.median(self.host_s)) if self.host_s else None,
            starved=float(np.median(self.starved)) if self.starved else None,
            clock_error_s=self.clock_error_s if fitted else None, note=self.note,
        )  # fmt: skip
