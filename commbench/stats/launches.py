"""What launches tell together: an interval for the median launch, whether they depend on one another, how many it takes.

A launch is one fresh set of processes, and its value for a case is the median of its iterations. Launches are the
evidence; iterations speak for their launch alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from commbench.stats.summary import LEVEL, FloatArray, Times, median_interval, median_ranks

PERMUTATIONS = 1999
_WIDER = 1.1  # the wider side of an interval, over the mean side (by simulation of normal values, 6 to 100 of them)


def least_launches(level: float = LEVEL) -> int:
    """The fewest values whose whole range covers their median with probability ``level``: six at 95 %."""
    return next(count for count in range(1, 1000) if median_ranks(count, level).level >= level)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchInterval:
    """What ``count`` launches say of the median launch, in the unit of the values.

    ``lo`` and ``hi`` enclose it with probability ``level``, whatever the distribution, if launches are independent.
    ``sufficient``: that is as much as was asked for; else they are the launches' whole range, and with a single launch
    nothing but its value.
    """

    count: int
    median: float
    lo: float
    hi: float
    level: float
    sufficient: bool

    @property
    def half_width(self) -> float:
        """The wider side as a share of the median; infinite where the interval does not suffice."""
        if not self.sufficient or not self.median:
            return math.inf
        return max(self.hi - self.median, self.median - self.lo) / self.median


def launch_interval(values: Times, level: float = LEVEL) -> LaunchInterval:
    """The interval of the median launch from order statistics. Raises ValueError for no or not finite values.

    In a population of two equally frequent modes every value between them is a median: the interval covers one.
    """
    found = median_interval(values, level)
    return LaunchInterval(
        count=len(values), median=float(np.median(values)), lo=found.lo, hi=found.hi, level=found.level,
        sufficient=found.level >= level,
    )  # fmt: skip


# -- one launch after another ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class InSequence:
    """How launches in a row depend on one another, over all cases of ``count`` launches.

    ``correlation`` of neighbours, corrected for its bias of about -1/count, with the probability ``correlation_p`` of
    one as large in launches of no order; ``effective``: how many independent launches are worth as much.
    ``drift``: the slope's share of the median from the first launch to the last, with ``drift_p`` likewise.
    """

    count: int
    correlation: float
    correlation_p: float
    effective: float
    drift: float
    drift_p: float


def in_sequence(values: Sequence[Times], seed: int = 0) -> InSequence | None:
    """``values[case]``: its value in each launch, in the order in which they were made; None for fewer than four.

    Cases of different spread count alike: logarithms are centred and scaled by case. The probabilities come from
    permutations of the launches, all cases together, since the cases of a launch are not independent. Cases that do not
    vary are left out. Raises ValueError where cases differ in their number of launches, or a value is not above zero.
    """
    counts = {len(one) for one in values}
    if len(counts) > 1:
        raise ValueError(f"cases have different numbers of launches ({min(counts)} to {max(counts)})")
    count = next(iter(counts), 0)
    if count < 4:
        return None
    times = np.asarray(values, dtype=np.float64)
    if not (times > 0).all() or not np.isfinite(times).all():
        raise ValueError("a launch's value must be above zero and finite")
    logs = np.log(times)
    logs = logs[np.ptp(logs, axis=1) > 0]
    if not len(logs):
        return None
    centred = logs - logs.mean(axis=1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True))
    order = np.arange(count) - (count - 1) / 2

    def neighbours(rows: FloatArray) -> float:
        return float((rows[:, 1:] * rows[:, :-1]).sum(axis=1).mean() / count)

    def trend(rows: FloatArray) -> float:
        return float((rows @ order).mean())

    found, slope = neighbours(scaled), trend(scaled)
    generator = np.random.default_rng(seed)
    chance = [scaled[:, generator.permutation(count)] for _ in range(PERMUTATIONS)]
    above = sum(neighbours(rows) >= found - 1e-12 for rows in chance)
    beyond = sum(abs(trend(rows)) >= abs(slope) - 1e-12 for rows in chance)
    correlation = min(0.99, max(-0.99, found + 1 / count))
    worth = (1 - max(0.0, correlation)) / (1 + max(0.0, correlation))
    per_launch = float(np.median(centred @ order)) / float(order @ order)
    return InSequence(
        count=count, correlation=correlation, correlation_p=(above + 1) / (PERMUTATIONS + 1), effective=count * worth,
        drift=math.expm1(per_launch * (count - 1)), drift_p=(beyond + 1) / (PERMUTATIONS + 1),
    )  # fmt: skip


# -- how many ----------------------------------------------------------------------------------------------------------


def launches_needed(values: Times, precision: float, *, level: float = LEVEL, most: int = 1000) -> int | None:
    """How many launches bring the interval of the median launch within ``precision`` of it; None: more than ``most``.

    The interval's ends are order statistics; where they are expected for each number is read off the quantiles of the
    launches at hand: of the normal distribution of their logarithms and of the launches themselves, whichever is the
    wider near the middle. So two modes are not taken for one that is broad, and a few launches not for all there are.
    Raises ValueError for fewer than two values or one that is not above zero.
    """
    logs = np.log(np.sort(np.asarray(values, dtype=np.float64)))
    if len(logs) < 2 or not np.isfinite(logs).all():
        raise ValueError("it takes two launches or more, each with a value above zero")
    first = least_launches(level)
    # The sample's standard deviation is too small on average: c4 of the normal distribution.
    deviation = float(logs.std(ddof=1)) * (1 + 1 / (4 * (len(logs) - 1)))
    places = (np.arange(1, len(logs) + 1) - 0.5) / len(logs)
    middle = float(np.median(logs))
    normal = NormalDist()
    for count in range(first, most + 1):
        ranks = median_ranks(count, level)
        # The expected place of an order statistic (Blom, Statistical Estimates and Transformed Beta-Variables, 1958).
        place = (ranks.lo - 0.375) / (count + 0.25)
        width = _WIDER * math.expm1(-normal.inv_cdf(place) * deviation)
        if len(logs) >= 2 * first:
            inner = np.interp([place, 1 - place], places, logs)
            width = max(width, 0.75 * max(math.expm1(inner[1] - middle), -math.expm1(inner[0] - middle)))
        if width <= precision:
            return count
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Auto:
    """Launches until every case's interval is within ``precision`` of its median; from ``least`` to ``most`` of them."""

    precision: float
    level: float = LEVEL
    least: int = 6
    most: int = 40

    def needed(self, values: Times) -> int | None:
        """How many launches a case needs in all, from those that it has; None: more than ``most``."""
        if launch_interval(values, self.level).half_width <= self.precision:
            return len(values)
        found = launches_needed(values, self.precision, level=self.level, most=self.most)
        return None if found is None else max(found, min(self.most, len(values) + 1))

    def enough(self, medians: Mapping[str, Times]) -> bool:
        """Whether all cases, each with its launches' values, are known as well as was asked for."""
        return all(
            len(values) >= self.least and launch_interval(values, self.level).half_width <= self.precision
            for values in medians.values()
        )
