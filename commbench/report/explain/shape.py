"""What a curve looks like: algorithm by size range, regimes, and where it is slower than its models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from commbench.models.prediction import NEAR
from commbench.report.explain.evidence import Curve, Spot
from commbench.report.explain.expected import algorithms_of
from commbench.stats.envelope import Envelope, fit_envelope

SWITCH_COST = 0.25  # in |log(measured / model)|, summed over sizes: a switch must explain that much better
FAR = math.log(2)  # an error beyond that counts no more: one odd time makes no switch
ALIKE = 0.05  # models that differ by less cannot be told apart
REGIME_SIZES = 8  # sizes from which regimes are looked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """From one size to another the curve is nearest to an algorithm's model.

    ``error``: the median of |measured / model - 1|; ``explains``: that it is small enough to say so. ``alike``: models
    that predict the same there. ``known``: the algorithm is known, not guessed.
    """

    first: int
    last: int
    algorithm: str
    error: float
    explains: bool
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
        looks=_looks(spots),
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


def _looks(spots: tuple[Spot, ...]) -> tuple[Look, ...]:
    if all(spot.known_s for spot in spots):
        errors = [abs(spot.seconds / spot.known_s - 1) for spot in spots if spot.known_s]
        middle = sorted(errors)[len(errors) // 2]
        name = spots[0].case.algorithm
        return (
            Look(first=spots[0].size, last=spots[-1].size, algorithm=name, error=middle, explains=middle <= NEAR,
                 known=True),
        )  # fmt: skip
    usable = tuple(spot for spot in spots if any(seconds > 0 for seconds in spot.predictions.values()))
    return tuple(_look(part, name) for name, part in _parts(usable)) if usable else ()


def _error(spot: Spot, name: str) -> float:
    model = spot.predictions.get(name, 0.0)
    return min(FAR, abs(math.log(spot.seconds / model))) if model > 0 else FAR


def _parts(spots: tuple[Spot, ...]) -> list[tuple[str, list[Spot]]]:
    """The cheapest way to give every size an algorithm, where each switch costs (Viterbi's algorithm)."""
    names = algorithms_of(spots)
    costs = {name: _error(spots[0], name) for name in names}
    paths: dict[str, list[str]] = {name: [name] for name in names}
    for spot in spots[1:]:
        best = min(names, key=costs.__getitem__)
        stay = {name: costs[name] <= costs[best] + SWITCH_COST for name in names}
        paths = {name: [*paths[name if stay[name] else best], name] for name in names}
        costs = {
            name: (costs[name] if stay[name] else costs[best] + SWITCH_COST) + _error(spot, name) for name in names
        }
    chosen = paths[min(names, key=costs.__getitem__)]
    parts: list[tuple[str, list[Spot]]] = []
    for spot, name in zip(spots, chosen, strict=True):
        if not parts or parts[-1][0] != name:
            parts.append((name, []))
        parts[-1][1].append(spot)
    return parts


def _look(spots: list[Spot], name: str) -> Look:
    errors = sorted(
        abs(spot.seconds / spot.predictions[name] - 1) if spot.predictions.get(name) else math.inf for spot in spots
    )
    others = [other for other in algorithms_of(tuple(spots)) if other != name]
    alike = [
        other for other in others
        if all(abs(spot.predictions.get(other, 0.0) / spot.predictions[name] - 1) <= ALIKE
               for spot in spots if spot.predictions.get(name))
    ]  # fmt: skip
    error = errors[len(errors) // 2]
    return Look(
        first=spots[0].size, last=spots[-1].size, algorithm=name, error=error, explains=error <= NEAR,
        alike=tuple(alike),
    )  # fmt: skip
