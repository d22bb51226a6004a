"""Launches drawn from distributions whose median is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from commbench.stats.compare import Verdict, compare
from commbench.stats.launches import Auto, launches_needed, median_of_launches
from commbench.stats.modes import find_modes
from commbench.stats.summary import median_ranks
from launchstudy.figure import Figure

Array = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, tuple[int, ...]], Array]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A distribution of launches' medians whose own median is ``median``."""

    name: str
    draw: Draw
    median: float


def normal(noise: float) -> Shape:
    return Shape(
        name=f"normal {noise:.0%}", median=1.0,
        draw=lambda chance, size: np.maximum(0.02, 1 + noise * chance.standard_normal(size)),
    )  # fmt: skip


def lognormal(noise: float) -> Shape:
    return Shape(
        name=f"lognormal {noise:.0%}", median=1.0,
        draw=lambda chance, size: np.exp(noise * chance.standard_normal(size)),
    )  # fmt: skip


def bimodal(slow: float, ratio: float, noise: float) -> Shape:
    """Two lognormal modes, the share ``slow`` of launches in the slower. Where they are of equal weight and far apart,
    every value between them is a median: this one is the middle, on a log scale."""

    def draw(chance: np.random.Generator, size: tuple[int, ...]) -> Array:
        in_slow = chance.random(size) < slow
        found: Array = np.exp(noise * chance.standard_normal(size)) * np.where(in_slow, ratio, 1.0)
        return found

    low, high = -1.0, math.log(ratio) + 1.0
    below = NormalDist(0, noise).cdf
    for _ in range(60):
        middle = (low + high) / 2
        share = (1 - slow) * below(middle) + slow * below(middle - math.log(ratio))
        low, high = (middle, high) if share < 0.5 - 1e-12 else (low, middle)
    middle = math.log(ratio) / 2 if slow == 0.5 else (low + high) / 2
    name = f"two modes {1 - slow:.0%}/{slow:.0%} at {ratio:g}, {noise:.0%}"
    return Shape(name=name, draw=draw, median=math.exp(middle))


def strays(noise: float) -> Shape:
    """3 % of lognormal launches are slower by 1.3 to 4 times."""

    def draw(chance: np.random.Generator, size: tuple[int, ...]) -> Array:
        stray = chance.random(size) < 0.03
        found: Array = np.exp(noise * chance.standard_normal(size) + stray * chance.uniform(0.26, 1.39, size))
        return found

    return Shape(name=f"lognormal {noise:.0%}, 3% strays", draw=draw, median=math.nan)


def tail(mean: float) -> Shape:
    return Shape(
        name=f"exponential tail {mean:.0%}", median=1 + mean * math.log(2),
        draw=lambda chance, size: 1 + mean * chance.exponential(size=size),
    )  # fmt: skip


COVERED = (
    *(make(noise) for make in (normal, lognormal) for noise in (0.05, 0.2, 0.4)),
    *(bimodal(slow, 1.83, noise) for slow in (0.5, 0.3, 0.7, 0.1) for noise in (0.05, 0.2, 0.4)), tail(0.3),
)  # fmt: skip
COUNTS = (6, 7, 8, 9, 10, 12, 15, 20, 30)
NEEDING = (
    (normal(0.05), 0.05), (normal(0.1), 0.05), (normal(0.2), 0.1), (normal(0.3), 0.15), (lognormal(0.1), 0.05),
    (lognormal(0.3), 0.15), (strays(0.08), 0.05),
)  # fmt: skip


def simulate(scale: float) -> Iterator[Figure | str]:
    """Every figure; ``scale``: how many samples, as a share of the usual number."""
    chance = np.random.default_rng(20)
    yield from coverage(chance, round(20_000 * scale))
    yield from foretold(chance, round(400 * scale))
    yield from stopped(chance, round(400 * scale))
    yield from modes(chance, round(1000 * scale))
    yield from differences(chance, round(300 * scale))


def coverage(chance: np.random.Generator, samples: int) -> Iterator[Figure | str]:
    yield "\nhow often the interval covers the median launch, by number of launches"
    yield f"  {'exact level':<34}" + "".join(f"{n:>4}:{median_ranks(n).level:.3f}" for n in COUNTS)
    least = 1.0
    for shape in COVERED:
        shares = []
        for count in COUNTS:
            drawn = np.sort(shape.draw(chance, (samples, count)), axis=1)
            ranks = median_ranks(count)
            shares.append(np.mean((drawn[:, ranks.lo - 1] <= shape.median) & (shape.median <= drawn[:, ranks.hi - 1])))
        least = min(least, *map(float, shares))
        yield f"  {shape.name:<34}" + "".join(f"     {share:.3f}" for share in shares)
    slack = 4 * math.sqrt(0.95 * 0.05 / samples)
    yield Figure(what="coverage, the least of all shapes and numbers", found=least, least=0.95 - slack)
    yield "  under 6 launches: " + ", ".join(f"{n}: {median_ranks(n).level:.2%}" for n in range(2, 6)) + " at most"


def true_need(shape: Shape, precision: float, chance: np.random.Generator) -> int:
    """The fewest launches at which half of the intervals are within the precision."""
    for count in range(6, 400):
        drawn = np.sort(shape.draw(chance, (4000, count)), axis=1)
        ranks = median_ranks(count)
        median = np.median(drawn, axis=1)
        width = np.maximum(drawn[:, ranks.hi - 1] - median, median - drawn[:, ranks.lo - 1]) / median
        if np.median(width) <= precision:
            return count
    raise SystemExit(f"launch_study: {shape.name} does not reach {precision:.0%}")


def foretold(chance: np.random.Generator, samples: int) -> Iterator[Figure | str]:
    yield "\nhow many launches a precision needs: the truth, and what is foretold after so many (median; within 1.5 x)"
    worst, at_half = 1.0, []
    for shape, precision in NEEDING:
        truth = true_need(shape, precision, chance)
        cells = []
        for made in (6, 8, math.ceil(truth / 2), math.ceil(truth * 0.75)):
            made = max(6, made)
            found = [
                launches_needed(values, precision, least=6) or 1000 for values in shape.draw(chance, (samples, made))
            ]
            ratios = np.array(found) / truth
            within = float(np.mean((ratios <= 1.5) & (ratios >= 1 / 1.5)))
            cells.append(f"{made:>4}: {np.median(ratios):4.2f} {within:4.0%}")
            if "strays" not in shape.name:
                worst = max(worst, float(np.median(ratios)), 1 / float(np.median(ratios)))
        if "strays" not in shape.name:
            at_half.append(float(cells[2].split()[-1].rstrip("%")) / 100)
        yield f"  {shape.name:<26} within {precision:.0%}: {truth:>3} needed {'  '.join(cells)}"
    yield Figure(what="launches needed: worst median ratio to the truth, normal and lognormal", found=worst, most=1.5)
    yield Figure(
        what="launches needed: single estimates within 1.5 x, half of the launches made", found=float(np.mean(at_half))
    )


def stopped(chance: np.random.Generator, samples: int) -> Iterator[Figure | str]:
    yield "\n--launches auto, at most 60: launches made (median; 10th to 90th percentile) and coverage"
    covered = []
    for shape, precision in ((normal(0.05), 0.05), (normal(0.1), 0.1), (lognormal(0.2), 0.1), (tail(0.3), 0.1)):
        auto = Auto(precision=precision, most=60)
        made, holds = [], []
        for values in shape.draw(chance, (samples, 60)):
            count = next(n for n in range(6, 61) if auto.enough({"one": values[:n]}))
            found = median_of_launches(values[:count])
            made.append(count)
            holds.append(found.lo <= shape.median <= found.hi)
        covered.append(float(np.mean(holds)))
        low, middle, high = np.percentile(made, (10, 50, 90))
        yield f"  {shape.name:<26} within {precision:.0%}: {middle:4.0f}; {low:.0f} to {high:.0f}; {covered[-1]:.3f}"
    yield Figure(what="coverage where a run stops at a wanted precision, mean of the shapes", found=float(np.mean(covered)),
                 least=0.94)  # fmt: skip


def modes(chance: np.random.Generator, samples: int) -> Iterator[Figure | str]:
    counts = (6, 8, 10, 12, 16, 20, 30)
    yield "\nshare of runs in which two modes are found, by number of launches" + "".join(f"{n:>7}" for n in counts)
    alarm = 0.0
    one = (
        *(make(noise) for make in (normal, lognormal) for noise in (0.05, 0.3)),
        strays(0.05),
        strays(0.2),
        tail(0.3),
    )
    two = (*(bimodal(slow, 1.4, 0.05) for slow in (0.5, 0.3, 0.1)), bimodal(0.4, 1.83, 0.1))
    for shape in (*one, *two):
        shares = [np.mean([find_modes(row) is not None for row in shape.draw(chance, (samples, n))]) for n in counts]
        if shape in one and "tail" not in shape.name:
            alarm = max(alarm, *map(float, shares))
        yield f"  {shape.name:<63}" + "".join(f"{share:7.3f}" for share in shares)
    slack = 3 * math.sqrt(0.02 / samples)
    yield Figure(
        what="modes that are not there: the most of all, but for exponential tails", found=alarm, most=0.02 + slack
    )


def differences(chance: np.random.Generator, samples: int) -> Iterator[Figure | str]:
    yield "\nverdicts on 7 and 7 launches"
    alarms = []
    for noise in (0.01, 0.02, 0.04, 0.08):
        pairs = lognormal(noise).draw(chance, (samples, 2, 7))
        verdicts = [compare(a, b).verdict for a, b in pairs]
        alarms.append(np.mean([one in (Verdict.FASTER, Verdict.SLOWER) for one in verdicts]))
        same = np.mean([one is Verdict.SAME for one in verdicts])
        yield f"  nothing changed, noise {noise:.0%}: {alarms[-1]:.3f} FASTER or SLOWER, {same:.3f} SAME"
    slack = 3 * math.sqrt(0.01 / samples / len(alarms))
    yield Figure(what="false alarms, mean over the noises", found=float(np.mean(alarms)), most=0.01 + slack)
    pairs = lognormal(0.02).draw(chance, (samples, 2, 7))
    found = np.mean([compare(a, 1.05 * b).verdict is Verdict.SLOWER for a, b in pairs])
    slack = 3 * math.sqrt(0.09 / samples)
    yield Figure(what="SLOWER found, 5 % slower at 2 % noise", found=float(found), least=0.9 - slack)
