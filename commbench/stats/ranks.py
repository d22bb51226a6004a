"""Ranks and re-orderings: what tests need that assume no distribution. numpy is all it needs."""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from commbench.stats.summary import FloatArray, Times

EXACT_ORDERS_UP_TO = 7  # values whose orders are all gone through: 5040 of them
ORDERS = 4999  # drawn where there are more

IntArray = npt.NDArray[np.int64]


def midranks(values: Times) -> FloatArray:
    """The rank of each value, from 1; equal values share the mean of theirs."""
    sample = np.asarray(values, dtype=np.float64)
    _, place, counts = np.unique(sample, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    shared: FloatArray = (last - (counts - 1) / 2)[place.reshape(-1)]
    return shared


@lru_cache(maxsize=64)
def orders(count: int) -> IntArray:
    """Orders of ``count`` things, one a row, the given one first: all there are up to ``EXACT_ORDERS_UP_TO`` things,
    else that one and ``ORDERS`` drawn at random, the same ones every time.

    A share of rows that counts the given order too is a valid p-value either way (Phipson and Smyth, Stat. Appl.
    Genet. Mol. Biol. 9(1), 2010).
    """
    if count <= EXACT_ORDERS_UP_TO:
        found = np.array(list(itertools.permutations(range(count))), dtype=np.int64)
    else:
        drawn = np.random.default_rng(count).random((ORDERS, count)).argsort(axis=1)
        found = np.vstack([np.arange(count), drawn]).astype(np.int64)
    found.setflags(write=False)
    return found
