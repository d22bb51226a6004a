"""How many selections of all ranks go to each expert, so that the most loaded rank has a given multiple of the mean."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def totals(
    name: str, factor: float, homes: NDArray[np.int64], ranks: int, tokens: int, topk: int, valid: int
) -> NDArray[np.int64]:
    """[E + K] selections of each expert, and of K that stand for masked ones (of which a token may have several).

    Rank 0 has ``factor`` times the ranks' mean of the ``valid`` selections, the others equal shares, as their experts.
    ``homes``: [E] the experts' ranks; ``tokens``: of all ranks; ``name``: what a message calls the routing. Raises
    ValueError where tokens that choose ``topk`` different experts cannot load the ranks so.
    """
    own = np.bincount(homes, minlength=ranks)
    hot, lowest = round(valid * factor / ranks), int(level(valid, own * tokens).max())
    if hot > min(own[0] * tokens, valid):
        highest = min(int(own[0]) * tokens, valid) * ranks / max(valid, 1)
        raise ValueError(
            f"{name} cannot be reached: a token has {topk} different experts and a rank {own[0]}, "
            f"so that the most loaded of {ranks} ranks gets at most {highest:.4g} times the mean"
        )
    if hot < lowest - 1:  # one selection more or less is rounding
        raise ValueError(
            f"{name} cannot be reached: a token has {topk} different experts and some ranks only {own.min()}, "
            f"so that the most loaded of {ranks} ranks gets at least {lowest * ranks / valid:.4g} times the mean"
        )
    hot = max(hot, lowest)
    by_rank = [hot, *level(valid - hot, own[1:] * tokens).tolist()]
    found = np.zeros(len(homes) + topk, dtype=np.int64)
    for rank, count in enumerate(by_rank):
        mine = np.flatnonzero(homes == rank)
        found[mine] = level(count, np.full(len(mine), tokens))
    found[len(homes) :] = level(tokens * topk - valid, np.full(topk, tokens))
    return found


def level(total: int, room: NDArray[np.int64]) -> NDArray[np.int64]:
    """``total`` in whole shares as equal as can be, none above its room, which is enough for all."""
    found = np.zeros(len(room), dtype=np.int64)
    while (missing := total - int(found.sum())) > 0:
        open_ = np.flatnonzero(found < room)
        each = max(1, min(missing // len(open_), int((room - found)[open_].min())))
        found[open_[: missing // each]] += each
    return found
