"""Whether one set of launches is faster than another: a ratio with an interval, and a verdict.

The test re-labels launches, which is exact for any distribution; the interval holds every ratio that the test does not
reject. A rank-sum test with its Hodges-Lehmann interval finds a true 5 % at 2 % noise with 7 and 7 launches in 84 % of
cases at this level, re-labelling in 90 %.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from commbench.stats.summary import FloatArray, Times

CONFIDENCE = 0.99  # so that at most one comparison in a hundred where nothing changed says otherwise
MIN_EFFECT = 0.02
LEAST_PAIRS = 8  # that give an interval at 99 %
_LABELLINGS = 6_500  # all are gone through up to so many (7 and 8 launches), else so many are drawn
_CLIP = 1.5  # robust standard deviations from the median beyond which a launch counts no more: as of Huber
_STEPS = 26  # of bisection: to 1e-8 of the range of the logs
_MOST_NEEDED = 1000


class Verdict(str, Enum):
    SAME = "SAME"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    UNCLEAR = "UNCLEAR"
    NODATA = "NODATA"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Times of b over times of a: ``ratio`` with its interval at ``level``, which is exact where it is not None.

    ``launches``: how many of a and of b. ``needed``: about how many of each an UNCLEAR one takes, None where nobody can
    say. Where too few launches leave no interval at the wanted level, ``lo``, ``hi`` and ``level`` are None.
    """

    verdict: Verdict
    reason: str
    launches: tuple[int, int]
    ratio: float | None = None
    lo: float | None = None
    hi: float | None = None
    level: float | None = None
    needed: int | None = None


def compare(
    a: Times, b: Times, *, paired: bool = False, confidence: float = CONFIDENCE, min_effect: float = MIN_EFFECT
) -> Comparison:
    """Compare launches' medians of ``b`` with those of ``a``, positive times.

    FASTER or SLOWER: the interval excludes 1 and the ratio is beyond ``min_effect``. SAME: the interval lies within
    1 / (1 + min_effect) to 1 + min_effect. Else UNCLEAR. ``paired``: the k-th of b was launched beside the k-th of a, so
    that what drifted is common to both; it takes as many of each, and ``LEAST_PAIRS`` for 99 %. Without drift it finds less.

    ``ratio`` is that under which the test sees no difference at all: about the ratio of medians where b is a times a
    factor. Raises ValueError for times that are not positive, or pairs that do not match.
    """
    first, second = (_logs(values) for values in (a, b))
    counts = (len(first), len(second))
    if not all(counts):
        return Comparison(verdict=Verdict.NODATA, reason="no launches on one side", launches=counts)
    if paired and counts[0] != counts[1]:
        raise ValueError(f"{counts[0]} and {counts[1]} launches do not make pairs")
    excess = _pair_test(second - first) if paired else _label_test(first, second)
    labels = _signs(counts[0]) if paired else _subsets(sum(counts), counts[1])
    allowed = math.floor((1 - confidence) / 2 * len(labels) + 1e-9)
    span = float(max(first.max(), second.max()) - min(first.min(), second.min())) + 1e-6
    shift = _where(lambda shift: excess(shift)[0], span)
    if not allowed:
        return _too_few(first, second, shift, paired, confidence, min_effect)
    # Shifts between which neither tail holds `allowed` labellings or fewer; beyond, the test rejects.
    lo = _where(lambda shift: float(excess(shift)[1] > allowed) - 0.5, span, rising=True)
    hi = _where(lambda shift: float(excess(shift)[2] > allowed) - 0.5, span)
    return _judge(first, second, (lo, min(max(shift, lo), hi), hi), 1 - 2 * allowed / len(labels), paired, min_effect)


def _logs(values: Times) -> FloatArray:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or not np.isfinite(sample).all() or (sample <= 0).any():
        raise ValueError("times to compare must be a list of positive numbers")
    return np.log(sample)


# -- the test: for a shift of b's logs, the statistic and how many labellings have one as great or as small -----------

_Test = Callable[[float], tuple[float, int, int]]


def _label_test(first: FloatArray, second: FloatArray) -> _Test:
    labels = _subsets(len(first) + len(second), len(second))

    def excess(shift: float) -> tuple[float, int, int]:
        pooled = np.concatenate([second - shift, first])
        middle = float(np.median(pooled))
        # A function of all launches together, so that re-labelling stays exact.
        pooled = _clip(pooled - middle)
        return _tails(labels @ (pooled - pooled.mean()))

    return excess


def _pair_test(differences: FloatArray) -> _Test:
    signs = _signs(len(differences))

    def excess(shift: float) -> tuple[float, int, int]:
        return _tails(signs @ _clip(differences - shift))

    return excess


def _clip(values: FloatArray) -> FloatArray:
    """Deviations with strays moved in, unless most of them are 0."""
    limit = _CLIP * 1.4826 * float(np.median(np.abs(values)))
    return np.clip(values, -limit, limit) if limit > 0 else values


def _tails(statistics: FloatArray) -> tuple[float, int, int]:
    observed = float(statistics[0])
    slack = 1e-9 * max(float(np.abs(statistics).max()), 1e-300)
    return observed, int((statistics >= observed - slack).sum()), int((statistics <= observed + slack).sum())


@lru_cache(maxsize=32)
def _subsets(count: int, chosen: int) -> FloatArray:
    """Ways to choose, one a row, 1 for chosen; the first is that of the first ones. All ways, or many of them."""
    if math.comb(count, chosen) <= _LABELLINGS:
        index = np.array(list(itertools.combinations(range(count), chosen)))
    else:
        drawn = np.random.default_rng(count).random((_LABELLINGS - 1, count)).argsort(axis=1)[:, :chosen]
        index = np.vstack([np.arange(chosen), drawn])
    found = np.zeros((len(index), count))
    np.put_along_axis(found, index, 1.0, axis=1)
    return found


@lru_cache(maxsize=32)
def _signs(count: int) -> FloatArray:
    if 2**count <= _LABELLINGS:
        return np.array(list(itertools.product((1.0, -1.0), repeat=count)))
    drawn = np.random.default_rng(count).choice((1.0, -1.0), size=(_LABELLINGS - 1, count))
    return np.vstack([np.ones(count), drawn])


def _where(function: Callable[[float], float], span: float, *, rising: bool = False) -> float:
    """The shift within ``span`` of 0 at which ``function``, falling unless ``rising``, changes its sign."""
    lo, hi = -span, span
    for _ in range(_STEPS):
        middle = (lo + hi) / 2
        if (function(middle) > 0) != rising:
            lo = middle
        else:
            hi = middle
    return (lo + hi) / 2


# -- the verdict ---------------------------------------------------------------------------------------


def _judge(
    first: FloatArray, second: FloatArray, shifts: tuple[float, float, float], level: float, paired: bool,
    min_effect: float,
) -> Comparison:  # fmt: skip
    lo, ratio, hi = (math.exp(shift) for shift in shifts)
    least = math.log1p(min_effect)
    needed = None
    if lo > 1 and shifts[1] > least:
        verdict, reason = Verdict.SLOWER, f"slower by {ratio - 1:.1%}, and by {lo - 1:.1%} at least"
    elif hi < 1 and shifts[1] < -least:
        verdict, reason = Verdict.FASTER, f"takes {1 - ratio:.1%} less, and {1 - hi:.1%} at least"
    elif -least <= shifts[0] and shifts[2] <= least:
        verdict, reason = Verdict.SAME, f"no difference beyond {min_effect:.0%}"
    else:
        verdict = Verdict.UNCLEAR
        needed = _needed(first, second, shifts[1], paired, level, least)
        reason = "undecided" + _so_many(needed)
    return Comparison(
        verdict=verdict, reason=reason, launches=(len(first), len(second)), ratio=ratio, lo=lo, hi=hi, level=level,
        needed=needed,
    )  # fmt: skip


def _too_few(
    first: FloatArray, second: FloatArray, shift: float, paired: bool, confidence: float, min_effect: float
) -> Comparison:
    needed = _needed(first, second, shift, paired, confidence, math.log1p(min_effect))
    reason = f"too few launches for an interval at {confidence:.0%}" + _so_many(needed)
    return Comparison(
        verdict=Verdict.UNCLEAR, reason=reason, launches=(len(first), len(second)), ratio=math.exp(shift), needed=needed
    )


def _so_many(needed: int | None) -> str:
    return "" if needed is None else f": about {needed} launches of each are needed"


def _needed(
    first: FloatArray, second: FloatArray, shift: float, paired: bool, level: float, least: float
) -> int | None:
    """Launches of each at which the interval would be narrow enough for a verdict, if ``shift`` is the truth.

    Its half width is z s sqrt(2 / n). It must stay clear of 0 for a shift beyond ``least``, and of ``least`` for one
    within it.
    """
    fewest = _fewest(level, paired)
    if min(len(first), len(second)) < 2:
        return fewest
    room = abs(shift) if abs(shift) > least else least - abs(shift)
    variance = (second - first).var(ddof=1) if paired else first.var(ddof=1) + second.var(ddof=1)
    width = NormalDist().inv_cdf((1 + level) / 2) * math.sqrt(variance)
    # A small sample's t is wider than the normal's z: by about (z^2 + 1) / 4 launches' worth, and two for good measure.
    count = math.ceil((width / room) ** 2 + 2) if room > width / math.sqrt(_MOST_NEEDED) else _MOST_NEEDED + 1
    return max(count, fewest, min(len(first), len(second)) + 1) if count <= _MOST_NEEDED else None


def _fewest(level: float, paired: bool) -> int:
    """Launches of each at which an interval at ``level`` exists at all."""
    count = 1
    while 2 / (2**count if paired else math.comb(2 * count, count)) > 1 - level + 1e-12:
        count += 1
    return count
