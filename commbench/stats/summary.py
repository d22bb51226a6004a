"""How long an operation takes, and how sure that is: order statistics of a sample of times.

Nothing here assumes a distribution. Every rank loads this module, so numpy is all it needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

LEVEL = 0.95
BLOCKS = 10
EXACT_UP_TO = 1000  # samples up to which coverage is counted in whole numbers
OF_ITERATIONS = "iterations"
OF_LAUNCHES = "launches"
OF_PASSES = "passes"  # of a soak, within one launch

Times = Sequence[float] | npt.NDArray[np.float64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A confidence interval in the unit of its values; ``level`` is the exact probability that it covers."""

    lo: float
    hi: float
    level: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MedianRanks:
    """Which order statistics bound the median of ``count`` values: the ``lo``-th and ``hi``-th smallest, from 1."""

    lo: int
    hi: int
    level: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A distribution of times, all in the unit of the sample.

    ``lo`` and ``hi`` bound the median at ``level``, from what ``interval_of`` names. ``p05`` to ``p99`` are
    percentiles that interpolate linearly between order statistics (definition 7 of Hyndman and Fan, The American
    Statistician 50(4), 1996: the p-th lies at position 1 + (count - 1) p of the sorted sample, counted from 1).
    """

    count: int
    median: float
    lo: float
    hi: float
    level: float
    interval_of: str
    min: float
    p05: float
    p25: float
    p75: float
    p95: float
    p99: float
    max: float
    mean: float


@lru_cache(maxsize=4096)
def median_ranks(count: int, level: float = LEVEL) -> MedianRanks:
    """The narrowest symmetric pair of order statistics that covers a median with probability ``level`` or more.

    The number of values below the median of a continuous distribution is binomial(count, 1/2), whatever the
    distribution, so the k-th smallest and the k-th largest of n enclose it with probability
    1 - 2 P(B <= k - 1) (David and Nagaraja, Order Statistics, 3rd ed., section 7.1). Where even the full range falls
    short of ``level`` (fewer than six values at 95 %) it is the answer, with its own level. Counted exactly up to
    ``EXACT_UP_TO`` values; beyond that by the normal approximation with continuity correction, whose error in the
    level is below 1e-4 there. Raises ValueError for a count below one or a level outside (0, 1).
    """
    if count < 1:
        raise ValueError("an interval of the median needs at least one value")
    if not 0 < level < 1:
        raise ValueError(f"confidence level {level} must lie between 0 and 1")
    k, reached = (_exact_rank if count <= EXACT_UP_TO else _normal_rank)(count, level)
    return MedianRanks(lo=k, hi=count + 1 - k, level=reached)


def _exact_rank(count: int, level: float) -> tuple[int, float]:
    outcomes = 2**count
    allowed = (1 - Fraction(level)) * outcomes
    term = below = 1  # binomial coefficient of k - 1, and the sum of those from 0 to k - 1
    k = 1
    while k < (count + 1) // 2:
        term = term * (count - k + 1) // k
        if 2 * (below + term) > allowed:
            break
        below += term
        k += 1
    return k, float(1 - Fraction(2 * below, outcomes))


def _normal_rank(count: int, level: float) -> tuple[int, float]:
    normal = NormalDist(count / 2, math.sqrt(count) / 2)
    k = math.floor(normal.inv_cdf((1 - level) / 2) + 0.5)  # P(B <= k - 1) is close to the normal below k - 1/2
    return k, 1 - 2 * normal.cdf(k - 0.5)


def median_interval(values: Times, level: float = LEVEL) -> Interval:
    """The confidence interval of the median of independent ``values``, free of any distribution.

    Correlated values make it too narrow: give it the medians of blocks instead. Raises ValueError for no values,
    for one that is not finite, and for a level outside (0, 1).
    """
    ordered = np.sort(_sample(values))
    ranks = median_ranks(len(ordered), level)
    return Interval(lo=float(ordered[ranks.lo - 1]), hi=float(ordered[ranks.hi - 1]), level=ranks.level)


def block_medians(values: Times, blocks: int = BLOCKS) -> FloatArray:
    """The medians of ``blocks`` consecutive stretches of ``values`` whose lengths differ by one at most.

    In stretches of even length the lower and the upper of the two middle values are taken in turn: the mean of the
    two would pull the medians of short stretches towards the mean of a skewed distribution, whereas this way they
    lie below its median as often as above. Raises ValueError for fewer values than blocks, and for values that are
    not finite.
    """
    sample = _sample(values)
    if not 1 <= blocks <= len(sample):
        raise ValueError(f"{len(sample)} values cannot be cut into {blocks} blocks")
    medians = np.empty(blocks)
    upper = False
    for index, block in enumerate(np.array_split(sample, blocks)):
        middle = (len(block) - 1) // 2
        if len(block) % 2 == 0:
            middle += upper
            upper = not upper
        medians[index] = np.partition(block, middle)[middle]
    return medians


def summarise_times(times: Times, *, blocks: int = BLOCKS, level: float = LEVEL) -> Summary:
    """The distribution of the times of one launch's iterations, in the order in which they were taken.

    Consecutive iterations are correlated, so the interval is that of the medians of ``blocks`` consecutive blocks,
    or of the times themselves where there are fewer than that; it is widened to hold the median where needed.
    Raises ValueError for no times and for one that is negative or not finite.
    """
    sample = _sample(times)
    if sample.min() < 0:
        raise ValueError("a time is negative")
    independent = block_medians(sample, blocks) if len(sample) >= blocks else sample
    interval = median_interval(independent, level)
    p05, p25, median, p75, p95, p99 = (float(p) for p in np.percentile(sample, (5, 25, 50, 75, 95, 99)))
    return Summary(
        count=len(sample),
        median=median,
        lo=min(interval.lo, median),
        hi=max(interval.hi, median),
        level=interval.level,
        interval_of=OF_ITERATIONS,
        min=float(sample.min()),
        p05=p05,
        p25=p25,
        p75=p75,
        p95=p95,
        p99=p99,
        max=float(sample.max()),
        mean=float(sample.mean()),
    )


def relative_half_width(summary: Summary, *, level: float = LEVEL) -> float:
    """The wider side of the median's interval as a share of the median: what a stopping rule holds against its aim.

    Infinite where too few samples leave the interval short of ``level``, and for a median of zero: neither may stop
    a measurement.
    """
    if summary.level < level or summary.median == 0:
        return math.inf
    return max(summary.hi - summary.median, summary.median - summary.lo) / summary.median


def _sample(values: Times) -> FloatArray:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or sample.size == 0:
        raise ValueError(f"a sample must be a non-empty list of numbers, not an array of shape {sample.shape}")
    if not np.isfinite(sample).all():
        raise ValueError("a sample holds a value that is not a finite number")
    return sample
