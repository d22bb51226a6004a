"""Whether the times of launches fall into two modes: a robust rule for six launches and more.

What it misses and what it takes for modes by mistake has been simulated: scripts/launch_study --simulate prints it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from commbench.stats.summary import FloatArray, Times

LEAST = 6
# A gap between modes is wider than this many spreads within them, over the number of launches. Set so that at most 2 %
# of 6 to 40 normal or lognormal launches split; 7 launches' neighbours are further apart than 30's.
_GAP = 35.0
_LEAST_GAP = 0.8
# A few launches that something else slowed down, this share of all, are not a mode: there must be more than chance
# brings in so many of the samples, and where it may still bring them they must lie close to one another.
_STRAY = 0.03
_STRAYS_TOGETHER = 0.05
_STRAYS_BEYOND = 0.005
_CLOSE = 2.0  # spreads of the larger mode


@dataclass(frozen=True, kw_only=True, slots=True)
class Modes:
    """Two modes, the faster first: the median of each and its share of the values. ``slow``: which values are in the
    second. ``gap``: the distance of the two modes' nearest values in standard deviations within modes."""

    centres: tuple[float, float]
    shares: tuple[float, float]
    slow: tuple[bool, ...]
    gap: float


def find_modes(values: Times) -> Modes | None:
    """The two modes of positive ``values``; None where there is no telling, as always with fewer than ``LEAST``.

    Sorted values are cut where the sum of squared logs within both parts is least (Otsu, IEEE Trans. SMC 9(1), 1979;
    Fisher's natural breaks for two classes), with enough members on either side. That is accepted where the gap between
    the parts exceeds 35 / n pooled standard deviations within them, both of the logs and of the values themselves, which
    rules out long tails to either side. Raises ValueError for a value that is not positive and finite.
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or not np.isfinite(sample).all() or (sample <= 0).any():
        raise ValueError("modes are looked for in a list of positive numbers")
    count = len(sample)
    if count < LEAST:
        return None
    least = fewest_members(count)
    ordered = np.sort(sample)
    logs = np.log(ordered)
    cut = _best_cut(logs, least)
    gap = min(_gap_in_spreads(logs, cut), _gap_in_spreads(ordered, cut))
    if gap <= max(_GAP / count, _LEAST_GAP) or not _together(logs, cut):
        return None
    return Modes(
        centres=(float(np.median(ordered[:cut])), float(np.median(ordered[cut:]))),
        shares=(cut / count, 1 - cut / count), slow=tuple(bool(value >= ordered[cut]) for value in sample), gap=gap,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def fewest_members(count: int) -> int:
    """How many of ``count`` values a mode must have: 2 up to 12, 3 up to 27, ..."""
    least = 2
    while _chance_of_strays(count, least) > _STRAYS_TOGETHER:
        least += 1
    return least


@lru_cache(maxsize=4096)
def _chance_of_strays(count: int, members: int) -> float:
    """That ``members`` or more of ``count`` launches are strays."""
    fewer = range(members)
    return 1 - sum(math.comb(count, k) * _STRAY**k * (1 - _STRAY) ** (count - k) for k in fewer)


def _squares(values: FloatArray) -> float:
    return float(np.sum((values - values.mean()) ** 2))


def _best_cut(ordered: FloatArray, least: int) -> int:
    """How many values the lower part has: where the squares between the parts, n S^2 / k (n - k) for k centred values
    with sum S, are most, those within them are least."""
    count = len(ordered)
    cuts = np.arange(least, count - least + 1)
    sums = np.cumsum(ordered - ordered.mean())[cuts - 1]
    return int(cuts[np.argmax(sums**2 / (cuts * (count - cuts)))])


def _gap_in_spreads(ordered: FloatArray, cut: int) -> float:
    gap = float(ordered[cut] - ordered[cut - 1])
    within = math.sqrt((_squares(ordered[:cut]) + _squares(ordered[cut:])) / (len(ordered) - 2))
    if within <= 1e-12 * abs(gap):
        return math.inf if gap > 0 else 0.0
    return gap / within


def _together(logs: FloatArray, cut: int) -> bool:
    """Whether the smaller part is no handful of strays."""
    small, large = sorted((logs[:cut], logs[cut:]), key=len)
    if _chance_of_strays(len(logs), len(small)) <= _STRAYS_BEYOND:
        return True
    return bool(np.ptp(small) <= _CLOSE * large.std(ddof=1) + 1e-12)
