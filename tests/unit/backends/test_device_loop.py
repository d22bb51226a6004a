"""The loop that times operations on a device, on a host and a device whose every step takes a known time.

The host pays for each call; what it enqueues starts when the device is free and the host has enqueued it. Times are
microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.backends import device_loop
from commbench.backends.device_loop import DeviceLoop
from commbench.measure.operation import Operation
from commbench.measure.timed import Start

RECORD, FLUSH, BARRIER, LAUNCH = 1.0, 5.0, 15.0, 3.0  # of the host's time
FLUSHING, WAITING = 30.0, 8.0  # of the device's


@dataclass
class Mark:
    at: float | None = None


@dataclass
class Machine:
    """``idles``: whether there is a pause; ``depth``: how much the device's queue holds before the host must wait."""

    idles: bool = True
    depth: int = 10_000
    now: float = 0.0
    ends: list[float] = field(default_factory=list)  # of everything that was enqueued
    log: list[str] = field(default_factory=list)
    captured: list[Callable[[], None]] | None = None

    def enqueue(self, host: float, device: float) -> float:
        """When the device will have done it."""
        if len(self.ends) >= self.depth:
            self.now = max(self.now, self.ends[-self.depth])
        self.now += host
        self.ends.append(max(self.now, self.ends[-1] if self.ends else 0.0) + device)
        return self.ends[-1]

    # -- Device --

    def event(self) -> Mark:
        return Mark()

    def record(self, event: Mark) -> None:
        event.at = self.enqueue(RECORD, 0.0)

    def passed(self, event: Mark) -> bool:
        return event.at is not None and event.at <= self.now

    def elapsed_ms(self, begin: Mark, end: Mark) -> float:
        assert begin.at is not None and end.at is not None and end.at <= self.now, "not passed yet"
        return (end.at - begin.at) * 1e-3

    def synchronize(self) -> None:
        self.now = max(self.now, self.ends[-1] if self.ends else 0.0)

    def flush(self) -> None:
        self.log.append("flush")
        self.enqueue(FLUSH, FLUSHING)

    def barrier(self) -> None:
        self.log.append("barrier")
        self.enqueue(BARRIER, WAITING)

    def idle(self, seconds: float) -> None:
        if self.idles:
            self.log.append("idle")
            self.enqueue(RECORD, seconds * 1e6)

    def capture(self, call: Callable[[], Any]) -> Callable[[], Any]:
        self.captured = []
        call()
        held, self.captured = self.captured, None
        self.log.append(f"capture {len(held)}")

        def launch() -> None:
            self.now += LAUNCH
            for one in held:
                one()

        return launch

    # -- operations on it --

    def operation(self, name: str, host: float, device: float) -> Operation:
        nothing = np.empty(0, dtype=np.uint8)

        def work(host: float) -> None:
            self.log.append(name)
            self.enqueue(host, device)

        def enqueue() -> None:
            if self.captured is None:
                work(host)
            else:
                self.captured.append(lambda: work(0.0))

        return Operation(
            run=enqueue, enqueue=enqueue, input=nothing, output=nothing,
            upload=lambda: self.log.append(f"restore {name}"),
        )  # fmt: skip

    def operations(self, count: int, host: float, device: float) -> list[Operation]:
        return [self.operation(str(index), host, device) for index in range(count)]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_loop, "now_ns", lambda: round(MACHINES[-1].now * 1e3))


MACHINES: list[Machine] = []


def machine(**options: Any) -> Machine:
    MACHINES[:] = [Machine(**options)]
    return MACHINES[0]


def start() -> Start:
    return Start(beat=lambda phase, iteration: None)


def durations_us(stamps: Any) -> list[float]:
    return [float(end - begin) / 1e3 for begin, end in stamps]


# -- isolated --------------------------------------------------------------------------------------


@given(
    count=st.integers(1, 32), host=st.floats(0.5, 100), device=st.floats(0.1, 1000), first=st.integers(0, 1000),
)  # fmt: skip
def test_the_host_is_out_of_an_isolated_time_however_slow_it_is(
    count: int, host: float, device: float, first: int
) -> None:
    here = machine()
    loop = DeviceLoop(here, "eager")
    for _ in range(2):
        found = loop.isolated(here.operations(count, host, device), count, first, start())
        assert durations_us(found.stamps) == pytest.approx([device] * count, abs=2e-3)
        assert found.host_s == pytest.approx(host * 1e-6, abs=2e-9)
        assert found.starved == 0
        # A flush and a barrier are between two operations; stamps count from the first mark.
        gap = FLUSHING + WAITING + device
        assert found.stamps[:, 0].tolist() == pytest.approx([1e3 * gap * k for k in range(count)], abs=2 * count)


def test_each_operation_is_alone_between_its_marks() -> None:
    here = machine()
    DeviceLoop(here, "eager").isolated(here.operations(3, 20, 5), 3, 0, start())
    assert here.log == ["idle", "flush", "barrier", "0", "flush", "barrier", "1", "flush", "barrier", "2"]


def test_without_a_pause_a_device_that_waits_for_its_host_is_found() -> None:
    """5 us into an iteration the device begins to flush and to wait: it passes the mark at 43 us. The host has flush,
    barrier and mark enqueued at 21 us and the operation, which then takes 5 us, at 81 us."""
    here = machine(idles=False)
    found = DeviceLoop(here, "eager").isolated(here.operations(4, 60, 5), 4, 0, start())
    assert found.starved == 1
    assert durations_us(found.stamps) == pytest.approx([81 + 5 - 43] * 4)


def test_without_a_pause_a_host_that_keeps_ahead_is_not_blamed() -> None:
    """21.5 us of calls before an operation is enqueued, 38 us of flush and barrier before the device asks for it."""
    here = machine(idles=False)
    found = DeviceLoop(here, "eager").isolated(here.operations(20, 0.5, 100), 20, 0, start())
    assert found.starved == 0
    assert durations_us(found.stamps) == pytest.approx([100] * 20)


def test_the_pause_is_bounded() -> None:
    here = machine()
    loop = DeviceLoop(here, "eager")
    loop.isolated(here.operations(32, 5000, 5), 32, 0, start())
    before = here.now
    loop.isolated(here.operations(32, 5000, 5), 32, 0, start())
    assert here.now - before < 32 * 5100 + device_loop.MOST_IDLE_S * 1e6


def test_a_rank_without_operations_keeps_step() -> None:
    here = machine()
    found = DeviceLoop(here, "eager").isolated([], 3, 0, start())
    assert (found.stamps.tolist(), found.host_s, found.starved) == ([[0, 0]] * 3, None, None)
    assert here.log.count("barrier") == 3
    here = machine()
    found = DeviceLoop(here, "eager").streamed([], 3, 0, start())
    assert (found.stamps.tolist(), found.host_s, found.starved) == ([[0, 0]], None, None)
    assert here.log.count("barrier") == 1


# -- streamed --------------------------------------------------------------------------------------


def test_a_batch_takes_what_the_slower_of_device_and_host_takes() -> None:
    here = machine()
    found = DeviceLoop(here, "eager").streamed(here.operations(4, 2, 10), 100, 0, start())
    # The host is at the first mark before the barrier is over: the device waits for nothing.
    assert durations_us(found.stamps) == pytest.approx([1000])
    assert (found.host_s, found.starved) == (pytest.approx(2e-6), 0)
    here = machine()
    found = DeviceLoop(here, "eager").streamed(here.operations(4, 20, 10), 100, 0, start())
    # The barrier ends 8 us after the host enqueued it, and the mark 1 us; so the first call has 13 us to go.
    assert durations_us(found.stamps) == pytest.approx([1 + 100 * 20 - 8 + 10])
    assert (found.host_s, found.starved) == (pytest.approx(20e-6), 1)
    assert here.log[:6] == ["barrier", "0", "1", "2", "3", "0"]


def test_a_full_queue_is_not_taken_for_a_slow_host() -> None:
    """From the 65th call on the host waits for room, 10 us each time."""
    here = machine(depth=64)
    found = DeviceLoop(here, "eager").streamed(here.operations(4, 2, 10), 1000, 0, start())
    assert durations_us(found.stamps) == pytest.approx([10_000])
    assert (found.host_s, found.starved) == (pytest.approx(2e-6), 0)


# -- graphs ----------------------------------------------------------------------------------------


def test_isolated_graphs_are_captured_once_and_their_data_put_back() -> None:
    here = machine()
    loop = DeviceLoop(here, "graph")
    operations = here.operations(2, 20, 5)
    for _ in range(2):
        found = loop.isolated(operations, 2, 0, start())
        assert durations_us(found.stamps) == pytest.approx([5, 5])
        assert found.host_s == pytest.approx(LAUNCH * 1e-6)
    made = ["capture 1", "0", "restore 0", "capture 1", "1", "restore 1"]
    rounds = ["idle", "flush", "barrier", "0", "flush", "barrier", "1"]
    assert here.log == [*made, *rounds, *rounds]


@pytest.mark.parametrize(
    ("sets", "count", "graphs"),
    [(2, 150, [64, 22]), (128, 300, [128, 44]), (5, 4, [4]), (3, 66, [66]), (40, 100, [80, 20])],
)
def test_a_graph_holds_whole_rotations(sets: int, count: int, graphs: list[int]) -> None:
    here = machine()
    loop = DeviceLoop(here, "graph")
    operations = here.operations(sets, 20, 5)
    found = loop.streamed(operations, count, 0, start())
    assert [entry for entry in here.log if entry.startswith("capture")] == [f"capture {size}" for size in graphs]
    assert durations_us(found.stamps) == pytest.approx([5.0 * count])
    assert found.starved == 0
    begun = here.log.index("idle")
    assert here.log[begun + 2 :] == [str(index % sets) for index in range(count)]
    here.log.clear()
    loop.streamed(operations, count, 0, start())
    assert here.log == ["idle", "barrier", *(str(index % sets) for index in range(count))]


def test_what_is_captured_is_performed_by_launches_only() -> None:
    here = machine()
    launch = here.capture(here.operations(1, 20, 5)[0].enqueue)
    assert here.ends == []
    launch()
    assert here.ends == [LAUNCH + 5]


# -- marks -----------------------------------------------------------------------------------------


def test_marks_are_made_and_recorded_before_a_round() -> None:
    here = machine()
    loop = DeviceLoop(here, "eager")
    made: list[Mark] = []
    real = here.event
    here.event = lambda: made.append(real()) or made[-1]  # type: ignore[method-assign, func-returns-value]
    loop.isolated(here.operations(3, 20, 5), 3, 0, start())
    loop.isolated(here.operations(3, 20, 5), 3, 0, start())
    assert len(made) == 6


def test_two_marks_beside_one_another_are_nothing_apart_here() -> None:
    here = machine()
    assert DeviceLoop(here, "eager").overhead_s() == 0
