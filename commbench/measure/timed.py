"""The timed code: the only place where a stamp is taken around a library's operation on the host.

Nothing here allocates, sends or decides between two stamps; what must be known is prepared before. Backends bring
loops of their own where an interpreter would show, or where a device keeps the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from commbench.measure.clock import now_ns, wait_until
from commbench.measure.operation import Operation

Stamps = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """How the ranks start together: iteration k at ``starts_ns[k]`` of this rank's clock, or behind ``barrier`` where
    clocks cannot be compared. ``beat`` notes the iteration before each start; ``beat_address`` is where it does so (8
    bytes; 0: nowhere), for loops that are not Python's."""

    beat: Callable[[str, int], None]
    starts_ns: Sequence[int] | NDArray[np.int64] = ()
    spin: bool = True
    barrier: Operation | None = None
    beat_address: int = 0

    def wait(self, index: int) -> None:
        if self.barrier is not None:
            self.barrier.run()
        else:
            wait_until(int(self.starts_ns[index]), self.spin)


class Round(NamedTuple):
    """What a loop found. ``stamps[k] = (start, end)`` of iteration k, ns of this rank's clock (zeros where it takes no
    part); ``host_s``: seconds that the host was busy with each operation, None where that is the operation itself;
    ``starved``: the share of the operations for which a device had to wait for its host inside the timed window."""

    stamps: Stamps
    host_s: float | None = None
    starved: float | None = None


class Loop(Protocol):
    """Runs and stamps rounds of operations.

    ``on_device``: stamps are of a clock of the rank's device, which only durations can be taken from; operations then
    start together behind something in the device's own queue, and ``Start`` is there for its ``beat``.
    ``overhead_s``: what the loop itself adds to an operation, as it measures on an empty one.
    """

    on_device: bool

    def overhead_s(self) -> float: ...

    def isolated(self, operations: list[Operation], count: int, first: int, start: Start) -> Round:
        """``count`` iterations, each on buffers of its own and with a start of its own: ``count`` stamps.

        A rank that takes no part (no operations) keeps step with the barrier.
        """

    def streamed(self, operations: list[Operation], count: int, first: int, start: Start) -> Round:
        """One batch of ``count`` operations back to back, rotating through the buffers: one stamp."""


class PythonLoop:
    """Calls operations one by one: what a Python program that uses the library sees."""

    on_device = False

    def overhead_s(self) -> float:
        return _overhead_s()

    def isolated(self, operations: list[Operation], count: int, first: int, start: Start) -> Round:
        begins, ends = [0] * count, [0] * count
        runs: list[Callable[[], Any]] = [operation.run for operation in operations[:count]]
        if not runs:
            for index in range(count if start.barrier is not None else 0):
                start.wait(index)
        for index, run in enumerate(runs):
            start.beat("inside", first + index)
            start.wait(index)
            begin = now_ns()
            run()
            end = now_ns()
            begins[index], ends[index] = begin, end
        return Round(np.array([begins, ends], dtype=np.int64).T)

    def streamed(self, operations: list[Operation], count: int, first: int, start: Start) -> Round:
        sets = len(operations)
        calls: list[Callable[[], Any]] = [operations[index % sets].enqueue for index in range(count)] if sets else []
        start.beat("inside", first)
        start.wait(0)
        if not calls:
            return Round(np.zeros((1, 2), dtype=np.int64))
        finish = operations[0].finish
        begin = now_ns()
        for call in calls:
            call()
        finish()
        end = now_ns()
        return Round(np.array([[begin, end]], dtype=np.int64))


def _overhead_s(count: int = 200) -> float:
    """The median of what stamping an operation that does nothing finds."""

    def nothing() -> None:
        return None

    found = []
    for _ in range(count):
        begin = now_ns()
        nothing()
        found.append(now_ns() - begin)
    return float(np.median(found)) * 1e-9
