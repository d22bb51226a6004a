"""Draws of each token's different experts: with equal chances, with given ones, with given counts. All in whole numbers,
so that no rounding can give a token one expert twice. T tokens, K selections each, E experts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UNIT = 1 << 32  # a chance of one, in the whole numbers that chances are kept in
SORTED = 1 << 16  # experts in all random orders of one draw: all tokens have their own where experts are few


def subsets(rng: np.random.Generator, tokens: int, topk: int, experts: int) -> NDArray[np.int64]:
    """[T, K] different experts a token, every set of them equally likely (what the top k of random scores are).

    Floyd's sampling: R. Bentley, B. Floyd, "A sample of brilliance", CACM 30(9), 1987.
    """
    chosen = np.empty((tokens, topk), dtype=np.int64)
    for at, last in enumerate(range(experts - topk, experts)):
        drawn = rng.integers(0, last + 1, size=tokens)
        taken = (chosen[:, :at] == drawn[:, None]).any(axis=1)
        chosen[:, at] = np.where(taken, last, drawn)
    return chosen


def group_limited(
    rng: np.random.Generator, tokens: int, topk: int, group_of: NDArray[np.int64], most: int
) -> NDArray[np.int64]:
    """[T, K] the top k of random scores within the ``most`` groups that hold the highest (DeepEP's internode test).

    Scores alone decide the order of experts, which is a random permutation: it is read from its top, an expert a step
    (drawn with replacement; one that came before is passed over). The first ``most`` groups that appear are those with
    the highest scores, and experts of others are passed over. ``group_of``: [E], with at least k experts in any
    ``most`` groups.
    """
    chosen = np.full((tokens, topk), -1, dtype=np.int64)
    seen = np.zeros((tokens, int(group_of.max()) + 1), dtype=bool)
    count = np.zeros(tokens, dtype=np.int64)
    active = np.arange(tokens)
    while len(active):
        drawn = rng.integers(0, len(group_of), size=len(active))
        group = group_of[drawn]
        allowed = seen[active, group] | (seen[active].sum(axis=1) < most)
        takes = allowed & (chosen[active] != drawn[:, None]).all(axis=1)
        who = active[takes]
        chosen[who, count[who]] = drawn[takes]
        seen[who, group[takes]] = True
        count[who] += 1
        active = active[count[active] < topk]
    return chosen


def shares(weights: NDArray[np.float64], topk: float) -> NDArray[np.float64]:
    """[E] how likely a token is to choose each expert: proportional to the weights, but certain where that is over one.

    They add up to ``topk``; needs at least that many positive weights.
    """
    order = np.argsort(-weights, kind="stable")
    sorted_weights = weights[order]
    rest = np.cumsum(sorted_weights[::-1])[::-1]
    certain = 0
    while certain < topk and certain < len(weights) and sorted_weights[certain] * (topk - certain) > rest[certain]:
        certain += 1
    found = np.ones(len(weights))
    if certain < topk:
        found[order[certain:]] = sorted_weights[certain:] * ((topk - certain) / rest[certain])
    else:
        found[order[certain:]] = 0.0
    return np.minimum(found, 1.0)


def by_chances(rng: np.random.Generator, tokens: int, topk: int, chances: NDArray[np.float64]) -> NDArray[np.int64]:
    """[T, K] different experts a token, of which expert e is one with a probability of ``chances[e]`` exactly.

    Systematic sampling (W. G. Madow, Ann. Math. Stat. 20, 1949): the chances lie end to end on a line of length k, and a
    token takes those under k points a unit apart, from a random beginning. Experts that lie near one another are not
    chosen together, so there are many lines, in random orders that are new in every draw, and tokens take turns between
    them. ``chances``: [E], none above one, adding up to ``topk``.
    """
    experts = len(chances)
    lines = min(tokens, max(1, SORTED // experts))
    parts = _whole(chances * UNIT, topk * UNIT, np.full(experts, UNIT))
    order = rng.permuted(np.tile(np.arange(experts), (lines, 1)), axis=1)
    ends = np.cumsum(parts[order], axis=1)
    # All lines end to end, so that one search serves all tokens.
    begins = np.arange(lines, dtype=np.int64) * (topk * UNIT)
    line = np.arange(tokens) % lines
    points = (rng.integers(0, UNIT, size=tokens) + begins[line])[:, None] + np.arange(topk, dtype=np.int64) * UNIT
    found = np.searchsorted((ends + begins[:, None]).ravel(), points, side="right")
    chosen: NDArray[np.int64] = order.ravel()[found]
    return chosen


def by_counts(rng: np.random.Generator, tokens: int, topk: int, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """[T, K] different experts a token, of which expert e is one of exactly ``counts[e]`` tokens.

    Selections are laid out expert after expert, in random order, and dealt in k rounds of T (McNaughton's wrap-around
    rule): as no count exceeds T, a token can meet an expert twice only where its selections run on from one round into
    the next, and these go to other tokens. Within a round tokens are in random order. ``counts`` add up to T K.
    """
    order = rng.permutation(len(counts))
    rounds = np.repeat(order, counts[order]).reshape(topk, tokens)
    chosen = np.empty((tokens, topk), dtype=np.int64)
    for at in range(topk):
        who = rng.permutation(tokens)
        first = rounds[at, 0]
        if at and rounds[at - 1, -1] == first:
            free = chosen[who, at - 1] != first
            begin = who[free][: int((rounds[at] == first).sum())]
            left = np.ones(tokens, dtype=bool)
            left[begin] = False
            who = np.concatenate([begin, who[left[who]]])
        chosen[who, at] = rounds[at]
    return chosen


def spread(
    rng: np.random.Generator, totals: NDArray[np.int64], rows: NDArray[np.int64], topk: int
) -> NDArray[np.int64]:
    """[rows, E] how many of its ``rows[r]`` tokens each rank sends to each expert, so that experts get ``totals``.

    Rank after rank gets its share, rounded so that what experts got so far is as near as can be to what they should
    have. ``totals`` add up to the tokens times k, and none exceeds the tokens.
    """
    order = rng.permutation(len(totals))  # or equal remainders would favour the first experts
    given = np.zeros(len(totals), dtype=np.int64)
    found = np.empty((len(rows), len(totals)), dtype=np.int64)
    everyone = int(rows.sum())
    for at, (count, so_far) in enumerate(zip(rows.tolist(), np.cumsum(rows).tolist(), strict=True)):
        need = totals[order] * so_far / everyone - given[order]
        found[at, order] = _whole(need, count * topk, np.full(len(totals), count))
        given += found[at]
    return found


def _whole(ideal: NDArray[np.float64], total: int, most: NDArray[np.int64]) -> NDArray[np.int64]:
    """Whole numbers from 0 to ``most`` that add up to ``total``, near ``ideal``: largest remainders are rounded up."""
    found = np.clip(np.floor(ideal).astype(np.int64), 0, most)
    missing = total - int(found.sum())
    while missing:
        step = 1 if missing > 0 else -1
        may = np.flatnonzero(found < most if step > 0 else found > 0)
        nearest = may[np.argsort(-step * (ideal - found)[may], kind="stable")][: abs(missing)]
        found[nearest] += step
        missing -= step * len(nearest)
    return found
