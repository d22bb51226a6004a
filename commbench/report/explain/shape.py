"""What a curve looks like: algorithm by size range, regimes, and where it is slower than its models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from commbench.models.prediction import NEAR
from commbench.report.explain.evidence import Curve, Spot
from commbench.report.explain.expected import algorithms_of, known_name
from commbench.stats.envelope import Envelope, fit_envelope

SWITCH_COST = 0.25  # in |log(measured / model)|, summed over sizes: a switch must explain that much better
FAR = math.log(2)  # an error beyond that counts no more: one odd time makes no switch
UNLIKE_COST = math.log(1 + NEAR)  # of a size that is like no algorithm: dearer than any that explains it
ALIKE = 0.05  # models that differ by less cannot be told apart
REGIME_SIZES = 8  # sizes from which regimes are looked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """From one size to another the curve is nearest to an algorithm's model, or, with ``algorithm`` None, to no one's.

    ``error``: the median of |measured / model - 1|, None without an algorithm. ``alike``: models that predict the same
    there. ``known``: the algorithm is known, not guessed.
    """

    first: int
    last: int
    algorithm: str | None
    error: float | None
    alike: tuple[str, ...] = ()
    known: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Sizes at which it takes surely from ``least`` to ``most`` times what a model says."""

    first: int
    last: int
    least: float
    most: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """``regimes``: None where there are too few sizes. ``below_fastest`` and ``below_every``: stretches of two sizes or
    more that are slower than the fastest model, and than all of them."""

    looks: tuple[Look, ...]
    regimes: Envelope | None
    below_fastest: tuple[Stretch, ...]
    below_every: tuple[Stretch, ...]


def shape_of(curve: Curve) -> Shape:
    """A curve's shape; one without models has no looks and no stretches."""
    spots = curve.spots
    sized = [spot for spot in spots if spot.size > 0]
    regimes = None
    if len({spot.size for spot in sized}) >= REGIME_SIZES:
        regimes = fit_envelope([spot.size for spot in sized], [spot.seconds for spot in sized])
    return Shape(
        looks=_looks(spots, curve.setups[0].read_back if curve.setups else {}),
        regimes=regimes,
        below_fastest=stretches(spots, [spot.times(spot.fastest_s) for spot in spots]),
        below_every=stretches(spots, [spot.times(spot.slowest_s) for spot in spots]),
    )


def stretches(spots: Sequence[Spot], times: Sequence[float], least: int = 2) -> tuple[Stretch, ...]:
    """Where ``times`` are at the spots' limits or above for ``least`` sizes in a row, or for all."""
    found, current = [], []  # type: list[Stretch], list[int]
    for at in range(len(spots) + 1):
        if at < len(spots) and times[at] >= spots[at].limit:
            current.append(at)
            continue
        if current and len(current) >= min(least, len(spots)):
            values = [times[i] for i in current]
            found.append(
                Stretch(first=spots[current[0]].size, last=spots[current[-1]].size, least=min(values), most=max(values))
            )
        current = []
    return tuple(found)


def _looks(spots: tuple[Spot, ...], read_back: Mapping[str, str]) -> tuple[Look, ...]:
    if all(spot.known_s for spot in spots):
        errors = [abs(spot.seconds / spot.known_s - 1) for spot in spots if spot.known_s]
        name = known_name(spots[-1].case, read_back)
        return (Look(first=spots[0].size, last=spots[-1].size, algorithm=name, error=median(errors), known=True),)
    usable = tuple(spot for spot in spots if spot.predictions)
    return tuple(_look(name, part) for name, part in _parts(usable)) if usable else ()


def _error(spot: Spot, name: str | None) -> float:
    """|log(measured / model)|; what it costs to be like nobody."""
    if name is None:
        return UNLIKE_COST
    model = spot.predictions.get(name)
    return min(FAR, abs(math.log(spot.seconds / model))) if model else FAR


def _parts(spots: tuple[Spot, ...]) -> list[tuple[str | None, list[Spot]]]:
    """The cheapest way to give every size an algorithm, or none, where each switch costs (Viterbi's algorithm)."""
    names: list[str | None] = [*algorithms_of(spots), None]
    costs = {name: _error(spots[0], name) for name in names}
    paths: dict[str | None, list[str | None]] = {name: [name] for name in names}
    for spot in spots[1:]:
        best = min(names, key=costs.__getitem__)
        before = {name: name if costs[name] <= costs[best] + SWITCH_COST else best for name in names}
        paths = {name: [*paths[before[name]], name] for name in names}
        costs = {
            name: costs[before[name]] + SWITCH_COST * (before[name] != name) + _error(spot, name) for name in names
        }
    parts: list[tuple[str | None, list[Spot]]] = []
    for spot, name in zip(spots, paths[min(names, key=costs.__getitem__)], strict=True):
        if not parts or parts[-1][0] != name:
            parts.append((name, []))
        parts[-1][1].append(spot)
    return parts


def _look(name: str | None, spots: list[Spot]) -> Look:
    if name is None:
        return Look(first=spots[0].size, last=spots[-1].size, algorithm=None, error=None)
    at = [spot for spot in spots if name in spot.predictions]
    alike = [
        other for other in algorithms_of(tuple(spots))
        if other != name
        and all(abs(spot.predictions.get(other, 0.0) / spot.predictions[name] - 1) <= ALIKE for spot in at)
    ]  # fmt: skip
    return Look(
        first=spots[0].size, last=spots[-1].size, algorithm=name, alike=tuple(alike),
        error=median(abs(spot.seconds / spot.predictions[name] - 1) for spot in at) if at else None,
    )  # fmt: skip
