"""What launches tell: the median launch with its interval, how much launches vary, and how many of them it takes.

A value here is the median of one launch (one fresh set of processes), never an iteration. Every interval is by order
statistics: it needs no distribution, holds for launches that fall into modes, and takes the launches for independent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from commbench.stats.modes import find_modes
from commbench.stats.sequence import serial_correlation
from commbench.stats.summary import LEVEL, FloatArray, Times, median_interval, median_ranks

FORESEEN = 1000  # launches beyond which nobody is told how many it takes
_RESAMPLES = 2000
# The wider side of a median's interval is wider than half of it: by 24 % for 7 launches, 18 % for 40 (simulated).
_WIDER_SIDE = 1.2
_CLIP = 3.5  # robust standard deviations from the median beyond which a launch counts no more


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchInterval:
    """The median launch, and what bounds it: the exact ``level`` may fall short of ``wanted``, and then ``lo`` and
    ``hi`` are the range of the launches."""

    count: int
    median: float
    lo: float
    hi: float
    level: float
    wanted: float

    @property
    def reached(self) -> bool:
        return self.level >= self.wanted

    @property
    def statement(self) -> str:
        """What the interval is worth, in words."""
        if self.count == 1:
            return "one launch: what is said holds for this launch alone"
        if self.reached:
            return f"{self.count} launches: {self.level:.1%} interval of the median launch, if launches are independent"
        return (
            f"{self.count} launches: no {self.wanted:.0%} interval of the median launch exists below "
            f"{least_launches(self.wanted)}; their range covers it with {100 * self.level:.4g}%, if launches are independent"
        )


def median_of_launches(values: Times, level: float = LEVEL) -> LaunchInterval:
    """The median of launches' medians and its interval at ``level`` or more.

    Where the launches' distribution has a gap at its middle (two modes of equal weight), every value in the gap is a
    median, and the interval covers all of them together with its level. Raises ValueError for no values, or one that
    is not finite.
    """
    interval = median_interval(values, level)
    return LaunchInterval(
        count=len(values), median=float(np.median(values)), lo=interval.lo, hi=interval.hi, level=interval.level,
        wanted=level,
    )  # fmt: skip


def least_launches(level: float = LEVEL) -> int:
    """The fewest launches whose range covers the median launch with ``level``: 1 - 2^(1 - n) must reach it."""
    return max(2, math.ceil(1 - math.log2(1 - level) - 1e-9))


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Coefficients of variation: of one launch's value, of the mean of as many launches as there are, and of their
    median."""

    one: float
    mean: float
    median: float


def spread_of_launches(values: Times) -> Spread | None:
    """How much one launch varies, and how much the mean and the median of all would from one such run to the next.

    The standard deviation (of count - 1) over the mean; that over the root of the count; the standard deviation of
    medians of resamples, over the median. None for fewer than two values, or a mean or median of 0.
    """
    sample = np.asarray(values, dtype=np.float64)
    if len(sample) < 2 or sample.mean() == 0 or np.median(sample) == 0:
        return None
    one = float(sample.std(ddof=1) / sample.mean())
    medians = np.median(sample[_resamples(len(sample))], axis=1)
    # Resamples vary around the sample, not around what it was drawn from, and by count - 1 over count too little.
    whole = math.sqrt(len(sample) / (len(sample) - 1))
    median = float(medians.std() * whole / np.median(sample))
    return Spread(one=one, mean=one / math.sqrt(len(sample)), median=median)


@lru_cache(maxsize=16)
def _resamples(count: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    return np.random.default_rng(count).integers(count, size=(_RESAMPLES, count))


def half_width(values: Times, level: float = LEVEL) -> float:
    """The wider side of the interval as a share of the median; infinite where there is no interval at ``level``."""
    interval = median_of_launches(values, level)
    if not interval.reached or interval.median == 0:
        return math.inf
    return max(interval.hi - interval.median, interval.median - interval.lo) / interval.median


def launches_needed(values: Times, precision: float, *, level: float = LEVEL, least: int = 2) -> int | None:
    """The fewest launches, at least ``least``, whose interval will be within ``precision`` of the median, from those
    made so far.

    Half of such runs meet the precision with that many. The width follows from the spread of the launches so far, with
    strays moved in; that of two modes from the launches' own quantiles. Launches that are distinguishably correlated
    count for less (``serial_correlation``). None for fewer than three values, and beyond ``FORESEEN``.

    Simulated (scripts/launch_study --simulate): in the median within a factor of 1.25 of the truth, for normal and
    lognormal launches of 5 to 30 %. Of single estimates half to seven in ten are within 1.5 after six launches, and
    about eight in ten with half of the needed launches made: a spread is known no better from so few.
    """
    sample = np.asarray(values, dtype=np.float64)
    if len(sample) < 3 or (sample <= 0).any():
        return None
    least = max(least, least_launches(level))
    ordered = np.sort(sample)
    in_modes = find_modes(sample) is not None
    scale = _spread_within(sample)
    for count in range(least, FORESEEN + 1):
        width = _width_at(ordered, count, level) if in_modes else scale * _normal_half_width(count, level)
        if width <= precision:
            correlation = serial_correlation([sample])
            if correlation is not None and correlation.distinguishable:
                count = math.ceil(count * len(sample) / correlation.effective)
            return count if count <= FORESEEN else None
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Auto:
    """Launch until every case is known well enough: ``precision`` is the greatest half width of its interval at
    ``level``, as a share of its median; ``least`` to ``most`` launches."""

    precision: float
    level: float = LEVEL
    least: int = 6
    most: int = 40

    def needed(self, values: Times) -> int | None:
        """How many launches one case needs in all, given its medians so far; None where that cannot be foreseen. It
        may be more than ``most``."""
        return launches_needed(values, self.precision, level=self.level, least=self.least)

    def enough(self, per_case_values: Mapping[str, Times]) -> bool:
        """Whether no more launches are wanted; ``per_case_values``: case -> medians, in the order of the launches.

        A case is done when its interval is within the precision, and was before the last launch as well: to stop at
        the first narrow one takes the lucky ones, which cover 92 to 94 % instead of 95 (simulated; with this rule 94 to
        97 %).
        """
        counts = [len(values) for values in per_case_values.values()]
        return min(counts, default=0) >= self.most or all(self._done(values) for values in per_case_values.values())

    def _done(self, values: Times) -> bool:
        if len(values) < self.least:
            return False
        return max(half_width(values, self.level), half_width(values[:-1], self.level)) <= self.precision


def _spread_within(sample: FloatArray) -> float:
    """The standard deviation as a share of the median, strays moved in: of the values or of their logs, whichever is
    less: of the two the right one is, for normal and for lognormal values."""
    return min(_clipped_deviation(sample / np.median(sample)), _clipped_deviation(np.log(sample)))


def _clipped_deviation(sample: FloatArray) -> float:
    deviations = sample - np.median(sample)
    limit = _CLIP * 1.4826 * float(np.median(np.abs(deviations)))
    return float((np.clip(deviations, -limit, limit) if limit > 0 else deviations).std(ddof=1))


def _score(k: int, count: int) -> float:
    """About the expected k-th smallest of ``count`` standard normal values (Blom, 1958)."""
    return NormalDist().inv_cdf((k - 0.375) / (count + 0.25))


@lru_cache(maxsize=4096)
def _normal_half_width(count: int, level: float) -> float:
    """The wider side of the interval of the median of so many standard normal values, in the median."""
    return _WIDER_SIDE * _score(median_ranks(count, level).hi, count)


def _width_at(ordered: FloatArray, count: int, level: float) -> float:
    """The same, as a share of the median, for values that are distributed as these."""
    ranks = median_ranks(count, level)
    places = (np.arange(len(ordered)) + 0.5) / len(ordered)
    lo, median, hi = (float(np.interp(k / (count + 1), places, ordered)) for k in (ranks.lo, (count + 1) / 2, ranks.hi))
    return max(hi - median, median - lo) / median
