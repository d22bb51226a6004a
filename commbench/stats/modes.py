"""Launches that fall into two modes, and which of the facts about them tells the modes apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from commbench.stats.summary import Times

# The greatest share of a variance that a cut in two explains, for one normal mode: 2/pi in the limit, and by simulation
# (40,000 samples of each size from 6 to 90) less than this in 98.5 % of samples.
_LIMIT, _MARGIN = 2 / math.pi, 0.82
LEAST_SHARE = 0.15
LEAST_COUNT = 2
FEWEST = 6
LEAST_RATIO = 1.1  # modes nearer to each other than this are not worth a word
Fact = str | float | int | bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Modes:
    """Two modes: their centres (medians, in the unit of the values), their shares, and which values are of the upper."""

    lower: float
    upper: float
    share_of_upper: float
    is_upper: tuple[bool, ...]


def find_modes(values: Times) -> Modes | None:
    """The two modes of some launches' values, or None where one mode would do.

    The logarithms are cut in two where that explains most of their variance (Otsu, IEEE Trans. SMC 9(1), 1979). It must
    explain more than it does in 98.5 of 100 samples of one normal mode, leave at least a seventh of the launches and two
    on either side, and the modes must be a tenth apart. Of one mode with 3 % outliers of eight deviations about 5 % are
    taken for two at 12 launches. Of modes a factor 1.4 apart, with 5 % noise, 29 % are found at 6 launches, 90 % at 12
    and 99 % at 20 (by simulation). Raises ValueError for a value that is not above zero.
    """
    times = np.asarray(values, dtype=np.float64)
    if not (times > 0).all() or not np.isfinite(times).all():
        raise ValueError("a launch's value must be above zero and finite")
    count = len(times)
    if count < FEWEST:
        return None
    order = np.argsort(times, kind="stable")
    logs = np.log(times[order])
    total = float(((logs - logs.mean()) ** 2).sum())
    least = max(LEAST_COUNT, math.ceil(LEAST_SHARE * count))
    if total <= 0 or least > count - least:
        return None
    below = np.cumsum(logs)[least - 1 : count - least]
    cuts = np.arange(least, count - least + 1)
    between = below**2 / cuts + (logs.sum() - below) ** 2 / (count - cuts) - logs.sum() ** 2 / count
    best = int(np.argmax(between))
    if between[best] / total <= min(0.995, _LIMIT + _MARGIN / math.sqrt(count)):
        return None
    cut = int(cuts[best])
    lower, upper = (float(np.exp(np.median(part))) for part in (logs[:cut], logs[cut:]))
    if upper < LEAST_RATIO * lower:
        return None
    is_upper = np.zeros(count, dtype=bool)
    is_upper[order[cut:]] = True
    return Modes(
        lower=lower, upper=upper, share_of_upper=(count - cut) / count, is_upper=tuple(bool(one) for one in is_upper)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Separator:
    """A fact that goes with the modes: ``what`` holds of the upper mode's launches. ``p``: how often chance does as
    well, for all facts that were tried (Holm); ``explained``: the share of launches that it puts on the right side."""

    fact: str
    what: str
    p: float
    explained: float


def separators(
    is_upper: Sequence[bool], facts: Mapping[str, Sequence[Fact | None]], level: float = 0.05
) -> list[Separator]:
    """The facts that separate two modes, the likeliest first; ``facts[name]`` has a value for each launch.

    A category is judged by Fisher's exact test of each of its values against the rest, a number by the exact test of
    all thresholds' best against permutations: both ask how often labels of these numbers dealt at random do as well.
    Facts that are the same in all launches, or unknown in one, say nothing.
    """
    labels = np.asarray(is_upper, dtype=bool)
    found = []
    for name, values in facts.items():
        if len(values) != len(labels):
            raise ValueError(f"fact {name!r} has {len(values)} values for {len(labels)} launches")
        if any(value is None for value in values) or len(set(values)) < 2:
            continue
        numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
        found.append(_by_threshold(name, labels, values) if numbers else _by_value(name, labels, values))
    found.sort(key=lambda one: (one.p, -one.explained))
    kept, worst = [], 0.0
    for place, one in enumerate(found):
        worst = max(worst, min(1.0, one.p * (len(found) - place)))
        if worst > level:
            break
        kept.append(Separator(fact=one.fact, what=one.what, p=worst, explained=one.explained))
    return kept


def _by_value(name: str, labels: np.ndarray, values: Sequence[Fact | None]) -> Separator:
    best: Separator | None = None
    distinct = list(dict.fromkeys(values))
    for value in distinct:
        has = np.array([one == value for one in values])
        p, explained, upper = _association(labels, has)
        p = min(1.0, p * (len(distinct) - 1 if len(distinct) > 2 else 1))
        if best is None or p < best.p:
            best = Separator(fact=name, what=f"is {value}" if upper else f"is not {value}", p=p, explained=explained)
    assert best is not None
    return best


def _by_threshold(name: str, labels: np.ndarray, values: Sequence[Fact | None]) -> Separator:
    numbers = np.array([float(value) for value in values if value is not None])
    steps = np.unique(numbers)
    best: Separator | None = None
    for low, high in pairwise(steps):
        p, explained, upper = _association(labels, numbers >= high)
        if best is None or p < best.p:
            what = f">= {high:.6g}" if upper else f"<= {low:.6g}"
            best = Separator(fact=name, what=what, p=p, explained=explained)
    assert best is not None
    # The best of so many thresholds; neighbours are nearly one, so this is on the safe side.
    return Separator(fact=name, what=best.what, p=min(1.0, best.p * (len(steps) - 1)), explained=best.explained)


def _association(labels: np.ndarray, has: np.ndarray) -> tuple[float, float, bool]:
    """Fisher's exact two-sided probability, the share of launches on the diagonal, and whether ``has`` goes with upper."""
    count, uppers, havers = len(labels), int(labels.sum()), int(has.sum())
    both = int((labels & has).sum())
    agree = int((labels == has).sum())
    upper = agree * 2 >= count
    ways = math.comb(count, havers)
    probability = {
        k: math.comb(uppers, k) * math.comb(count - uppers, havers - k) / ways
        for k in range(max(0, havers - (count - uppers)), min(uppers, havers) + 1)
    }
    p = sum(chance for chance in probability.values() if chance <= probability[both] * (1 + 1e-9))
    return min(1.0, p), (agree if upper else count - agree) / count, upper
