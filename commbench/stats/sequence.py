"""Whether launches in a row resemble one another, and whether their times drift.

Both look at ranks within each case, so that one slow launch does not decide, and put all cases of a run together. Their
null distributions come from re-ordering the launches, of all cases in the same way: cases share their launches, and a
hundred of them are no hundred times as much evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from commbench.stats.ranks import midranks, orders
from commbench.stats.summary import LEVEL, FloatArray, Times

LEAST = 5  # launches: of four, no order is rarer than one in twelve


@dataclass(frozen=True, kw_only=True, slots=True)
class Correlation:
    """Of each launch with the next: ``value``, freed of its bias for few launches, and the exact or drawn p of both
    sides. Independent launches give ``lo`` to ``hi`` 95 % of the time. ``effective``: how many independent launches
    tell as much about a mean as these ``launches`` do."""

    value: float
    lo: float
    hi: float
    p: float
    launches: int
    effective: float
    cases: int

    @property
    def distinguishable(self) -> bool:
        """From 0, at 95 %."""
        return self.p <= 1 - LEVEL


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """A trend over the order of the launches. ``rho``: Spearman's, the mean over the cases, with the p of both sides;
    ``change``: what the trend amounts to from the first to the last launch, as a share, the median over the cases of
    Theil-Sen slopes of log times."""

    rho: float
    p: float
    change: float
    launches: int
    cases: int

    @property
    def distinguishable(self) -> bool:
        """From no drift, at 95 %."""
        return self.p <= 1 - LEVEL


def serial_correlation(rows: Sequence[Times]) -> Correlation | None:
    """The lag-1 autocorrelation of ranks over launches; ``rows``: a case each, in the order of launches, NaN or a
    shorter row where a launch lacks the case.

    Per case the sum of products of neighbours' centred ranks over the sum of squares, then the mean over the cases.
    In random order that sum is expected at exactly -1/n (each of n - 1 pairs at -squares / n (n - 1)), which is taken
    off. ``effective`` is n / (1 + 2 sum over k of (1 - k/n) r^k), an autoregression's (Bayley and Hammersley, Suppl. J.
    R. Stat. Soc. 8(2), 1946); a correlation below 0 counts as 0. None for fewer than ``LEAST`` launches, or where
    nothing varies.
    """
    scaled = _scaled(rows)
    if scaled is None:
        return None
    cases, count = scaled.shape
    products = scaled.T @ scaled / cases
    order = orders(count)
    found = products[order[:, :-1], order[:, 1:]].sum(axis=1)
    found -= found.mean()
    value = float(found[0])
    lo, hi = (float(q) for q in np.quantile(found, ((1 - LEVEL) / 2, (1 + LEVEL) / 2)))
    return Correlation(
        value=value, lo=lo, hi=hi, p=_share_as_far(found), launches=count, effective=effective_number(count, value),
        cases=cases,
    )  # fmt: skip


def effective_number(count: int, correlation: float) -> float:
    """How many independent values tell as much about a mean as ``count`` with this lag-1 correlation: 1 to ``count``."""
    rho = min(max(correlation, 0.0), 0.99)
    lags = np.arange(1, count)
    return float(max(1.0, count / (1 + 2 * np.sum((1 - lags / count) * rho**lags))))


def find_drift(rows: Sequence[Times]) -> Drift | None:
    """The trend of times over launches; ``rows`` as for ``serial_correlation``. None where that is None."""
    scaled = _scaled(rows)
    if scaled is None:
        return None
    cases, count = scaled.shape
    position = np.arange(count) - (count - 1) / 2
    position /= np.linalg.norm(position)
    found = scaled.mean(axis=0)[orders(count)] @ position
    slopes = [theil_sen(np.log(row)) for row in _aligned(rows) if np.isfinite(row).sum() > 1]
    return Drift(
        rho=float(found[0]), p=_share_as_far(found), change=float(np.expm1(np.median(slopes) * (count - 1))),
        launches=count, cases=cases,
    )  # fmt: skip


def theil_sen(values: Times) -> float:
    """The median slope between any two values, per step of their order; NaN stands for a missing one."""
    sample = np.asarray(values, dtype=np.float64)
    first, second = np.triu_indices(len(sample), 1)
    return float(np.nanmedian((sample[second] - sample[first]) / (second - first)))


def _share_as_far(found: FloatArray) -> float:
    """How many of the re-ordered results, the first being the given one, are as far from 0."""
    return float(np.mean(np.abs(found) >= abs(found[0]) - 1e-12))


def _aligned(rows: Sequence[Times]) -> FloatArray:
    count = max((len(row) for row in rows), default=0)
    matrix = np.full((len(rows), count), np.nan)
    for index, row in enumerate(rows):
        matrix[index, : len(row)] = row
    return matrix


def _scaled(rows: Sequence[Times]) -> FloatArray | None:
    """Centred ranks with unit norm, a case each; 0 where a launch lacks the case."""
    found = []
    for row in _aligned(rows):
        known = np.isfinite(row)
        ranks = np.zeros(len(row))
        ranks[known] = midranks(row[known]) - (known.sum() + 1) / 2
        if known.sum() >= LEAST and ranks.any():
            found.append(ranks / np.linalg.norm(ranks))
    return np.array(found) if found else None
