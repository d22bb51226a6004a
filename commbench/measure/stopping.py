"""When a case has been measured enough."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from commbench.stats.summary import relative_half_width, summarise_times

# Fewer rounds than this are one stretch of machine noise, however many iterations they hold.
MIN_ROUNDS = 10
MAX_SAMPLES = 200_000
# A slow case gets this many samples before its limit counts, unless they take several times the limit: the range of
# one or two says nothing.
MIN_SAMPLES = 5
OVERTIME = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StoppingRule:
    """Stop when the median's 95 % interval is within ``precision`` of it, or at the limit.

    ``limit_s`` is this case's time and ``limit_name`` says where it comes from (``max_time`` or ``budget``).
    ``iterations`` fixes the number of samples instead.
    """

    precision: float
    limit_s: float
    limit_name: str
    iterations: int | None = None

    def decide(self, times: NDArray[np.float64], made: int, rounds: int, elapsed_s: float) -> str | None:
        """Why to stop now, or None to go on. ``times``, at least one, are the samples that count so far, of ``made``
        iterations in ``rounds`` rounds."""
        if self.iterations is not None:
            return "iterations" if made >= self.iterations else None
        settled = rounds >= MIN_ROUNDS and relative_half_width(summarise_times(times)) <= self.precision
        if settled:
            return "precision"
        patience = 1.0 if len(times) >= MIN_SAMPLES else OVERTIME
        if elapsed_s >= self.limit_s * patience:
            return self.limit_name
        return "samples" if made >= MAX_SAMPLES else None
