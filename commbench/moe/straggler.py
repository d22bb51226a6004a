"""Who is done last, and whether what it had to move explains it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

LIKE = 0.5  # a correlation from here on is more than chance makes of a few iterations
MORE = 1.05  # times the mean load
FEWEST = 10  # iterations: of less, somebody was last by chance


def find_straggler(ends_s: NDArray[np.float64], loads: NDArray[np.float64], last: NDArray[np.int64]) -> dict[str, Any]:
    """``ends_s``, ``loads``: [iterations, ranks], seconds from the common start and bytes; ``last``: who was last in each.

    ``rank`` was last most often, in ``share`` of the iterations; ``load_over_mean`` is its load; ``load_correlation`` that of
    ranks' ends with their loads within iterations, None where loads are all alike; ``explained`` says what follows.
    """
    rank, times = Counter(last.tolist()).most_common(1)[0]
    mean = float(loads.mean())
    over = float(loads[:, rank].mean()) / mean if mean else 1.0
    correlation = _within(ends_s, loads)
    share = times / len(last)
    if len(last) < FEWEST:
        why = "too few iterations to say"
    elif share <= 1.5 / ends_s.shape[1]:
        why = "no rank is last much more often than another"
    elif over >= MORE and (correlation is None or correlation >= LIKE):
        why = f"its load, {over:.2f} times the mean"
    elif over >= MORE:
        why = f"its load is {over:.2f} times the mean, but ends do not follow loads"
    else:
        why = "not its load: look at its host, its core and its links"
    return {
        "rank": int(rank),
        "share": share,
        "load_over_mean": over,
        "load_correlation": correlation,
        "explained": why,
    }


def _within(ends_s: NDArray[np.float64], loads: NDArray[np.float64]) -> float | None:
    """Correlation of the ranks' ranks in both, iteration by iteration."""

    def ranked(values: NDArray[np.float64]) -> NDArray[np.float64]:
        order = np.argsort(np.argsort(values, axis=1, kind="stable"), axis=1).astype(np.float64)
        # Equal values share their places' mean.
        for row, places in zip(values, order, strict=True):
            for value in np.unique(row):
                same = row == value
                places[same] = places[same].mean()
        return np.asarray(order - order.mean(axis=1, keepdims=True))

    first, second = ranked(ends_s), ranked(loads)
    size = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return float((first * second).sum() / size) if size else None
