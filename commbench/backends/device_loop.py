"""Times operations by the clock of the device that performs them: events in the queue, read when the round is over.

What a library must bring is ``Device``; which library it is does not matter here. Device clocks are not common, so only
durations come from them: the operations of an isolated round start together behind a barrier in the device's own queue.

The host must stay ahead of the device. Where it does not, the device waits for it inside the timed window, and the
round says for how many operations (``Round.starved``). Before an isolated round, and before a batch of graphs, the
device is put to idle until the host has queued everything; a streamed eager batch is not helped in this way, because
there the host's pace is a part of what is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from commbench.measure.clock import now_ns
from commbench.measure.operation import Operation
from commbench.measure.timed import Round, Start

Call = Callable[[], Any]

GRAPH_OPERATIONS = 64  # in one graph: its launch is then a small part of what it does
HOST_CALLS = 32  # the first of a batch: later ones may wait until the device's queue has room
FIRST_HOST_S = 150e-6  # of an isolated iteration, before it is known
MOST_IDLE_S = 20e-3
# A host that needs as long as the device for each operation is what the batch waits for; it can never need more.
PACE_SHARE = 0.9


class Device(Protocol):
    """One stream of one device, on which the operations of a case are enqueued too. Only ``synchronize`` makes the host
    wait; everything else that does something is enqueued in order."""

    def event(self) -> Any:
        """A mark that holds a time once the device has passed it."""

    def record(self, event: Any) -> None:
        """Enqueue the mark. It may be recorded again."""

    def passed(self, event: Any) -> bool:
        """Whether the device has passed the mark since it was last recorded, without waiting."""

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """Between two marks that have been passed."""

    def synchronize(self) -> None:
        """Wait until everything that was enqueued is complete."""

    def flush(self) -> None:
        """Enqueue something that leaves nothing of the buffers in the device's cache; nothing where it shall be warm."""

    def barrier(self) -> None:
        """Enqueue a wait for the devices of all ranks of the world, each of which must call it."""

    def idle(self, seconds: float) -> None:
        """Enqueue a pause of about this length, or nothing where there is no such thing."""

    def capture(self, call: Call) -> Call:
        """What ``call`` enqueues, as a graph: returned is what launches it. ``call`` must have run before, and is not
        performed. RuntimeError with the library's reason where it cannot be captured."""


class DeviceLoop:
    """``execution``: "eager" calls the library for every operation, "graph" launches what was captured of it."""

    on_device = True

    def __init__(self, device: Device, execution: str) -> None:
        self._device = device
        self._graphs = execution == "graph"
        self._events: list[Any] = []
        self._captured: dict[tuple[int, ...], Call] = {}  # by the numbers of the operations that a graph holds
        self._host_s = FIRST_HOST_S

    def overhead_s(self) -> float:
        """What two marks next to one another are apart: a time contains it once."""
        begin, end = self._marks(2)
        found = []
        for _ in range(20):
            self._device.idle(50e-6)
            self._device.record(begin)
            self._device.record(end)
            self._device.synchronize()
            found.append(self._device.elapsed_ms(begin, end))
        return float(np.median(found)) * 1e-3

    def isolated(self, operations: list[Operation], count: int, first: int, start: Start) -> Round:
        device = self._device
        calls = self._singly(operations[:count])
        marks = self._marks(2 * count)
        host_ns, called_ns, late = [0] * len(calls), [0] * len(calls), 0
        device.synchronize()
        device.idle(min(MOST_IDLE_S, 1.5 * count * self._host_s))
        for index in range(count):
            began = now_ns()
            device.flush()
            device.barrier()
            if not calls:
                continue
            start.beat("inside", first + index)
            call, begin, end = calls[index], marks[2 * index], marks[2 * index + 1]
            device.record(begin)
            before = now_ns()
            call()
            after = now_ns()
            device.record(end)
            # The mark before it was passed when the operation was not yet in the queue: the device had to wait.
            late += device.passed(begin)
            called_ns[index], host_ns[index] = after - before, now_ns() - began
        device.synchronize()
        if not calls:
            return Round(np.zeros((count, 2), dtype=np.int64))
        self._host_s = float(np.median(host_ns)) * 1e-9
        return Round(
            np.array([self._stamp(marks, 2 * index) for index in range(count)], dtype=np.int64),
            float(np.median(called_ns)) * 1e-9,
            late / count,
        )

    def streamed(self, operations: list[Operation], count: int, first: int, start: Start) -> Round:
        device = self._device
        calls = self._batch(operations, count)
        begin, end = self._marks(2)
        start.beat("inside", first)
        device.synchronize()
        if self._graphs:
            device.idle(min(MOST_IDLE_S, FIRST_HOST_S + 1.5 * len(calls) * self._host_s))
        device.barrier()
        if not calls:
            device.synchronize()
            return Round(np.zeros((1, 2), dtype=np.int64))
        device.record(begin)
        timed = calls[:HOST_CALLS]
        before = now_ns()
        for call in timed:
            call()
        after = now_ns()
        for call in calls[HOST_CALLS:]:
            call()
        device.record(end)
        late = device.passed(begin)
        device.synchronize()
        a_call_s = (after - before) * 1e-9 / len(timed)
        if self._graphs:
            self._host_s = a_call_s
        stamp = self._stamp([begin, end], 0)
        host_s = a_call_s * len(calls) / count
        paced = host_s > PACE_SHARE * (stamp[1] - stamp[0]) * 1e-9 / count
        return Round(np.array([stamp], dtype=np.int64), host_s, float(late and paced))

    # -- what is made before the first mark ------------------------------------------------------------

    def _marks(self, count: int) -> list[Any]:
        """Marks that have been recorded once: a library may make them no sooner than that."""
        while len(self._events) < count:
            event = self._device.event()
            self._device.record(event)
            self._events.append(event)
        return self._events[:count]

    def _stamp(self, marks: list[Any], index: int) -> tuple[int, int]:
        """(start, end) in ns since the first mark. The library's times are single precision: the end comes from the
        duration, not from a difference of long ones."""
        begin = round(1e6 * self._device.elapsed_ms(marks[0], marks[index])) if index else 0
        return begin, begin + round(1e6 * self._device.elapsed_ms(marks[index], marks[index + 1]))

    def _singly(self, operations: list[Operation]) -> list[Call]:
        """What starts each of them."""
        if not self._graphs:
            return [operation.enqueue for operation in operations]
        return [self._graph(operations, (index,)) for index in range(len(operations))]

    def _batch(self, operations: list[Operation], count: int) -> list[Call]:
        """What starts ``count`` of them in rotation."""
        if not operations:
            return []
        order = [index % len(operations) for index in range(count)]
        if not self._graphs:
            return [operations[index].enqueue for index in order]
        # As many whole rotations as make a long enough graph, so that one graph serves again and again.
        size = len(operations) * max(1, -(-GRAPH_OPERATIONS // len(operations)))
        return [self._graph(operations, tuple(order[at : at + size])) for at in range(0, count, size)]

    def _graph(self, operations: list[Operation], members: tuple[int, ...]) -> Call:
        if members not in self._captured:
            calls = [operations[index].enqueue for index in members]

            def several() -> None:
                for call in calls:
                    call()

            launch = self._device.capture(several)
            # The first launch also brings the graph to the device. Its operations' data are put back.
            launch()
            self._device.synchronize()
            for index in dict.fromkeys(members):
                operations[index].upload()
            self._captured[members] = launch
        return self._captured[members]
