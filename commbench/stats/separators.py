"""What goes with a split of launches in two: a search among recorded facts, exact and held to one error rate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from commbench.stats.ranks import midranks

ALPHA = 0.05
_TABLES = 200_000  # beyond so many tables with the same margins they are drawn
_DRAWN = 9999

Fact = str | float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Separator:
    """A fact that goes with the split, or several that say the same of every launch.

    ``p`` is exact, ``p_holm`` as it stands among all facts that were tried. ``right`` is the share of launches that the
    fact alone puts into their part, and ``explained`` how much of the guessing it saves: Goodman and Kruskal's lambda
    (J. Am. Stat. Assoc. 49, 1954), 0 to 1. ``detail``: how the two go together.
    """

    names: tuple[str, ...]
    p: float
    p_holm: float
    right: float
    explained: float
    detail: str


def separators(slow: Sequence[bool], facts: Mapping[str, Sequence[Fact]], *, alpha: float = ALPHA) -> list[Separator]:
    """The facts that go with ``slow``, the likeliest first; nothing where none does.

    ``facts``: by name a value per launch, None where it is not known. Texts, and numbers of which most occur again
    (processors, nodes), are categories: Fisher's exact test, in Freeman and Halton's form for more than two (Biometrika
    38, 1951). Other numbers are compared by the exact rank-sum test. Facts that split the launches alike are one
    candidate. Chosen so that the chance of naming any fact where none matters is at most ``alpha`` (Holm, Scand. J.
    Stat. 6, 1979). Raises ValueError where a fact has not one value a launch.
    """
    candidates: dict[tuple[object, ...], tuple[list[str], Separator]] = {}
    for name, values in facts.items():
        if len(values) != len(slow):
            raise ValueError(f"fact {name!r} has {len(values)} values for {len(slow)} launches")
        tried = _try(slow, values)
        if tried is not None:
            signature, found = tried
            candidates.setdefault(signature, ([], found))[0].append(name)
    ranked = sorted(candidates.values(), key=lambda item: (item[1].p, -item[1].explained))
    kept, reached = [], 0.0
    for index, (names, found) in enumerate(ranked):
        reached = max(reached, min(1.0, found.p * (len(ranked) - index)))
        if reached <= alpha:
            kept.append(replace(found, names=tuple(names), p_holm=reached))
    return kept


def _try(slow: Sequence[bool], values: Sequence[Fact]) -> tuple[tuple[object, ...], Separator] | None:
    """What makes two facts the same, and the test of one; None where it says nothing."""
    known = [(bool(is_slow), value) for is_slow, value in zip(slow, values, strict=True) if _is_known(value)]
    labels = [is_slow for is_slow, _ in known]
    found = [value for _, value in known]
    if len(set(found)) < 2 or len(set(labels)) < 2:
        return None
    where = tuple(_is_known(value) for value in values)
    numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in found)
    if numeric and len(set(found)) > len(found) / 2:
        ranks = midranks([float(value) for value in found if value is not None])
        return ("number", where, tuple(ranks)), _of_numbers(labels, [float(v) for v in found if v is not None])
    codes = {value: code for code, value in enumerate(dict.fromkeys(found))}
    return ("category", where, tuple(codes[value] for value in found)), _of_categories(labels, found)


def _is_known(value: Fact) -> bool:
    return value is not None and value == value


def _of_categories(slow: Sequence[bool], values: Sequence[Fact]) -> Separator:
    totals = Counter(values)
    slows = Counter(value for is_slow, value in zip(slow, values, strict=True) if is_slow)
    cells = [(slows[value], total) for value, total in totals.items()]
    right = sum(max(k, total - k) for k, total in cells)
    by_share = sorted(totals, key=lambda value: (-slows[value] / totals[value], -totals[value]))
    detail = ", ".join(f"{_text(value)}: {slows[value]} of {totals[value]} slow" for value in by_share)
    return _separator(slow, _table_p(cells), right, detail)


def _of_numbers(slow: Sequence[bool], values: Sequence[float]) -> Separator:
    ordered = sorted(zip(values, slow, strict=True))
    numbers = [value for value, _ in ordered]
    flags = np.array([flag for _, flag in ordered])
    best, detail = 0, ""
    for cut in range(1, len(ordered)):
        if numbers[cut] == numbers[cut - 1]:
            continue
        slow_above = int(flags[cut:].sum() + (~flags[:cut]).sum())
        for right, side in ((slow_above, "from"), (len(flags) - slow_above, "below")):
            if right > best:
                best, detail = right, f"slow {side} {_text(numbers[cut])}"
    return _separator(slow, _rank_sum_p(slow, values), best, detail)


def _separator(slow: Sequence[bool], p: float, right: int, detail: str) -> Separator:
    count = len(slow)
    common = max(sum(slow), count - sum(slow))
    return Separator(
        names=(), p=p, p_holm=p, right=right / count, explained=(right - common) / (count - common), detail=detail
    )


def _text(value: Fact) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def _table_p(cells: Sequence[tuple[int, int]]) -> float:
    """The chance of a table no likelier than this one; ``cells``: per category how many are slow, of how many.

    With all margins given, a table has the probability of the product of its binomial coefficients.
    """
    slow = sum(k for k, _ in cells)
    count = sum(total for _, total in cells)
    observed = math.prod(math.comb(total, k) for k, total in cells)
    if math.prod(total // 2 + 1 for _, total in cells) > _TABLES:
        return _drawn_table_p(cells, observed)
    ways: dict[int, Counter[int]] = {0: Counter({1: 1})}
    for _, total in cells:
        grown: dict[int, Counter[int]] = {}
        for used, weights in ways.items():
            for k in range(min(total, slow - used) + 1):
                factor = math.comb(total, k)
                target = grown.setdefault(used + k, Counter())
                for weight, times in weights.items():
                    target[weight * factor] += times
        ways = grown
    rarer = sum(weight * times for weight, times in ways[slow].items() if weight <= observed)
    return rarer / math.comb(count, slow)


def _drawn_table_p(cells: Sequence[tuple[int, int]], observed: int) -> float:
    members = np.repeat(np.arange(len(cells)), [total for _, total in cells])
    slow = sum(k for k, _ in cells)
    chance = np.random.default_rng(len(members))
    rarer = 1
    for _ in range(_DRAWN):
        drawn = np.bincount(chance.permutation(members)[:slow], minlength=len(cells)).tolist()
        rarer += math.prod(math.comb(total, k) for k, (_, total) in zip(drawn, cells, strict=True)) <= observed
    return rarer / (_DRAWN + 1)


def _rank_sum_p(slow: Sequence[bool], values: Sequence[float]) -> float:
    """The chance that as many launches drawn at random have ranks whose sum is as far from its mean; ties included."""
    doubled = (2 * midranks(values)).astype(int).tolist()  # whole numbers even for ties
    chosen = sum(slow)
    observed = sum(rank for rank, is_slow in zip(doubled, slow, strict=True) if is_slow)
    ways = np.zeros((chosen + 1, sum(doubled) + 1))  # [how many were drawn, sum of their ranks]
    ways[0, 0] = 1
    for rank in doubled:
        ways[1:, rank:] += ways[:-1, : ways.shape[1] - rank].copy()
    centre = chosen * (len(values) + 1)
    far = np.abs(np.arange(ways.shape[1]) - centre) >= abs(observed - centre)
    return float(ways[chosen, far].sum() / ways[chosen].sum())
