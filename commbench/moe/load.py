"""How many copies of tokens go where, and how evenly ranks and experts are loaded by them.

A *selection* is a token and an expert slot that it goes to; a *copy* is a token sent once to a rank, or to a host, that
has several of its experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commbench.backends.experts import Place


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Of n ranks on h hosts with s expert slots: ``selections`` [n, s] of every rank's tokens to each slot;
    ``rank_copies`` [n, n] and ``host_copies`` [n, h] of its tokens to each rank and each host, its own included."""

    selections: NDArray[np.int64]
    rank_copies: NDArray[np.int64]
    host_copies: NDArray[np.int64]


def count(place: Place, slots_of_all_ranks: Sequence[NDArray[np.int64]]) -> Counts:
    """``slots_of_all_ranks[rank]``: [T, K] expert slots, -1 for none."""
    rank_of = np.array(place.rank_of, dtype=np.int64)
    host_of = np.array(place.host_of, dtype=np.int64)
    host_of_slot = host_of[rank_of]
    slots_in_all, ranks, hosts = len(rank_of), len(host_of), int(host_of.max()) + 1
    selections, rank_copies, host_copies = [], [], []
    for slots in slots_of_all_ranks:
        token, at = np.nonzero(slots >= 0)
        chosen = slots[token, at]
        selections.append(np.bincount(chosen, minlength=slots_in_all))
        rank_copies.append(_once(token, rank_of[chosen], len(slots), ranks))
        host_copies.append(_once(token, host_of_slot[chosen], len(slots), hosts))
    return Counts(selections=np.stack(selections), rank_copies=np.stack(rank_copies), host_copies=np.stack(host_copies))


def load_of(place: Place, slots_of_all_ranks: Sequence[NDArray[np.int64]]) -> dict[str, Any]:
    """How even the load of one iteration is, for a point's column.

    ``rank_tokens``: per rank the rows that its experts work on, one a selection. ``*_max_over_mean`` and ``*_cv`` (the
    standard deviation over the mean) are over ranks, and over expert slots, copies of one expert being slots of their
    own; None where nothing is selected. ``dedup_rank`` and ``dedup_host``: selections per copy, 1 where no token has two
    of its experts on one rank, or host.
    """
    counts = count(place, slots_of_all_ranks)
    by_slot = counts.selections.sum(axis=0)
    by_rank = np.bincount(place.rank_of, weights=by_slot, minlength=len(place.host_of)).astype(np.int64)
    valid = int(by_slot.sum())
    return {
        "rank_max_over_mean": _max_over_mean(by_rank),
        "rank_cv": _variation(by_rank),
        "expert_max_over_mean": _max_over_mean(by_slot),
        "expert_cv": _variation(by_slot),
        "rank_tokens": by_rank.tolist(),
        "dedup_rank": valid / int(counts.rank_copies.sum()) if valid else None,
        "dedup_host": valid / int(counts.host_copies.sum()) if valid else None,
    }


def _once(token: NDArray[np.int64], goal: NDArray[np.int64], tokens: int, goals: int) -> NDArray[np.int64]:
    """[goals] how many different tokens go to each goal."""
    goes = np.zeros((tokens, goals), dtype=bool)
    goes[token, goal] = True
    found: NDArray[np.int64] = goes.sum(axis=0, dtype=np.int64)
    return found


def _max_over_mean(values: NDArray[np.int64]) -> float | None:
    mean = float(values.mean())
    return float(values.max()) / mean if mean else None


def _variation(values: NDArray[np.int64]) -> float | None:
    mean = float(values.mean())
    return float(values.std()) / mean if mean else None
