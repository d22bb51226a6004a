"""The timed code: the only place where a stamp is taken around a library's operation.

Nothing here allocates, sends or decides between two stamps; what must be known is prepared before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commbench.measure.clock import now_ns, wait_until
from commbench.measure.operation import Operation

Stamps = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """How the ranks start together: at agreed times of one clock (iteration k at ``base_ns + k * spacing_ns``), or
    behind ``barrier`` where clocks differ. ``beat`` notes the iteration before each start."""

    beat: Callable[[str, int], None]
    base_ns: int = 0
    spacing_ns: int = 0
    spin: bool = True
    barrier: Operation | None = None

    def wait(self, index: int) -> None:
        if self.barrier is not None:
            self.barrier.run()
        else:
            wait_until(self.base_ns + index * self.spacing_ns, self.spin)


def run_isolated(operations: list[Operation], count: int, first: int, start: Start) -> Stamps:
    """``count`` iterations, each on buffers of its own and with a start of its own: (count, 2) stamps in ns.

    A rank that takes no part (no operations) keeps step with the barrier and returns zeros.
    """
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
    return np.array([begins, ends], dtype=np.int64).T


def run_streamed(operations: list[Operation], count: int, first: int, start: Start) -> Stamps:
    """One batch of ``count`` operations back to back, rotating through the buffers: (1, 2) stamps in ns."""
    sets = len(operations)
    calls: list[Callable[[], Any]] = [operations[index % sets].enqueue for index in range(count)] if sets else []
    start.beat("inside", first)
    start.wait(0)
    if not calls:
        return np.zeros((1, 2), dtype=np.int64)
    finish = operations[0].finish
    begin = now_ns()
    for call in calls:
        call()
    finish()
    end = now_ns()
    return np.array([[begin, end]], dtype=np.int64)
