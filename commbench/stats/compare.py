"""Whether one set of launches is faster than another: a ratio with an interval, and a verdict that may be 'unclear'."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from commbench.stats.summary import LEVEL, FloatArray, Times

SAME, FASTER, SLOWER, UNCLEAR, NODATA = "SAME", "FASTER", "SLOWER", "UNCLEAR", "NODATA"
MIN_EFFECT = 0.02
EXACT_UP_TO = 40  # launches on either side up to which orders are counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """``ratio``: the time of the second over the first, with the interval that covers it with probability ``level``
    (None where launches are too few for any). ``needed``: launches on either side that may tell, where it is unclear."""

    verdict: str
    reason: str
    ratio: float | None = None
    lo: float | None = None
    hi: float | None = None
    level: float | None = None
    needed: int | None = None


def compare(first: Times, second: Times, *, min_effect: float = MIN_EFFECT, level: float = LEVEL) -> Comparison:
    """Two sets of independent launches' median times. Raises ValueError for a value that is not above zero.

    The ratio is Hodges' and Lehmann's estimate, the median of all pairs' ratios, and its interval the inversion of the
    exact rank-sum test on logarithms (Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, 3rd ed., section
    4.3): no distribution is assumed, but that the second is the first, scaled. SLOWER and FASTER need the interval on
    one side of 1 and a ratio further than ``min_effect`` from it; SAME needs it within ``min_effect``.
    """
    a, b = _logs(first), _logs(second)
    if not len(a) or not len(b):
        return Comparison(verdict=NODATA, reason="one side has no launches")
    differences = np.sort((b[:, None] - a[None, :]).ravel())
    ratio = math.exp(float(np.median(differences)))
    k, reached = _rank(len(a), len(b), level)
    if k < 1:
        needed = _least_equal(level)
        reason = f"{len(a)} and {len(b)} launches tell nothing at {level:.0%}: make {needed} and {needed}, or more"
        return Comparison(verdict=UNCLEAR, reason=reason, ratio=ratio, needed=needed)
    lo, hi = math.exp(float(differences[k - 1])), math.exp(float(differences[-k]))
    apart = lo > 1 or hi < 1

    def found(verdict: str, reason: str, needed: int | None = None) -> Comparison:
        return Comparison(verdict=verdict, reason=reason, ratio=ratio, lo=lo, hi=hi, level=reached, needed=needed)

    if apart and ratio > 1 + min_effect:
        return found(SLOWER, f"{ratio - 1:+.1%}")
    if apart and ratio < 1 / (1 + min_effect):
        return found(FASTER, f"{ratio - 1:+.1%}")
    if lo >= 1 / (1 + min_effect) and hi <= 1 + min_effect:
        return found(SAME, f"within {min_effect:.0%}")
    if apart:
        return found(UNCLEAR, f"there is a difference, but below {min_effect:.0%}")
    width = math.log(hi / lo) / 2
    aim = (
        max(abs(math.log(ratio)), math.log1p(min_effect))
        if abs(math.log(ratio)) > width / 2
        else math.log1p(min_effect)
    )
    needed = math.ceil(max(len(a), len(b)) * (width / aim) ** 2) + 1
    return found(UNCLEAR, f"the interval is too wide: {needed} launches a side may tell", needed)


def _logs(values: Times) -> FloatArray:
    times = np.asarray(values, dtype=np.float64)
    if times.size and (not np.isfinite(times).all() or not (times > 0).all()):
        raise ValueError("a launch's value must be above zero and finite")
    logs: FloatArray = np.log(times.ravel())
    return logs


def _least_equal(level: float) -> int:
    return next(count for count in range(2, 1000) if _rank(count, count, level)[0] >= 1)


@lru_cache(maxsize=4096)
def _rank(n: int, m: int, level: float) -> tuple[int, float]:
    """Which smallest and largest of the n*m differences bound the shift, from 1, and how surely; 0 where none do.

    The number of differences below the true shift has the null distribution of Mann and Whitney's U.
    """
    if max(n, m) > EXACT_UP_TO:
        deviation = math.sqrt(n * m * (n + m + 1) / 12)
        k = math.floor(n * m / 2 + 0.5 - NormalDist().inv_cdf((1 + level) / 2) * deviation)
        return (k, level) if k >= 1 else (0, 0.0)
    counts = _orders(n, m)
    total = sum(counts)
    below = k = 0
    reached = 0.0
    while k < len(counts) and 2 * (below + counts[k]) <= (1 - level) * total * (1 + 1e-12):
        below += counts[k]
        k += 1
        reached = 1 - 2 * below / total
    return k, reached


@lru_cache(maxsize=1024)
def _orders(n: int, m: int) -> tuple[int, ...]:
    """In how many of the orders of n and m values U is 0, 1, ..., n*m (the Gaussian binomial coefficients)."""
    counts = [1] + [0] * (n * m)
    for i in range(1, n + 1):
        # Multiply by (1 - q^(m+i)) and divide by (1 - q^i).
        for place in range(n * m, m + i - 1, -1):
            counts[place] -= counts[place - m - i]
        for place in range(i, n * m + 1):
            counts[place] += counts[place - i]
    return tuple(counts)
