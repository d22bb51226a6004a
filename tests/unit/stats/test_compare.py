"""Verdicts on two sets of launches: exact ranks, known populations, and the courage to say 'unclear'."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from commbench.stats.compare import FASTER, NODATA, SAME, SLOWER, UNCLEAR, _orders, _rank, compare

times = st.lists(st.floats(0.1, 10.0), min_size=4, max_size=9)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 3), (4, 4), (7, 7), (5, 9)])
def test_orders_are_counted_as_scipy_counts_them(n: int, m: int) -> None:
    counts = _orders(n, m)
    assert sum(counts) == math.comb(n + m, n)
    a, b = np.arange(n) + 0.5, np.arange(m) + 100.0
    assert stats.mannwhitneyu(a, b, method="exact").pvalue == pytest.approx(min(1.0, 2 * counts[0] / sum(counts)))


def test_ranks_are_those_of_the_tables() -> None:
    """Critical values of U, two-sided 5 %: 8 for 7 and 7, 2 for 5 and 5, 0 for 4 and 4 (Mann and Whitney, 1947)."""
    assert _rank(7, 7, 0.95)[0] == 8 + 1
    assert _rank(5, 5, 0.95)[0] == 2 + 1
    assert _rank(4, 4, 0.95)[0] == 0 + 1
    assert _rank(3, 3, 0.95) == (0, 0.0)
    assert _rank(4, 4, 0.95)[1] == pytest.approx(1 - 2 / 70)


@pytest.mark.parametrize(
    ("second", "verdict", "ratio"),
    [
        ([2.0, 2.02, 1.98, 2.04, 2.0, 1.96], SLOWER, 2.0),
        ([0.5, 0.505, 0.495, 0.51, 0.5, 0.49], FASTER, 0.5),
        ([1.0, 1.001, 0.999, 1.002, 1.0, 0.998], SAME, 1.0),
        ([1.01, 1.011, 1.0095, 1.0105, 1.01, 1.0098], UNCLEAR, 1.01),
        ([0.7, 1.4, 1.0, 0.8, 1.3, 1.1], UNCLEAR, None),
    ],
)
def test_verdicts(second: list[float], verdict: str, ratio: float | None) -> None:
    # The fourth differs for sure, and by less than matters.
    first = [1.0, 1.001, 0.999, 1.0005, 0.9995, 1.0]
    found = compare(first, second)
    assert found.verdict == verdict
    assert found.lo is not None
    assert found.hi is not None
    assert found.ratio is not None
    assert found.lo <= found.ratio <= found.hi
    if ratio is not None:
        assert found.ratio == pytest.approx(ratio, rel=0.01)


def test_too_few_launches_say_how_many_it_takes() -> None:
    found = compare([1.0, 1.1, 0.9], [2.0, 2.1])
    assert (found.verdict, found.needed, found.lo) == (UNCLEAR, 4, None)
    assert found.reason == "3 and 2 launches tell nothing at 95%: make 4 and 4, or more"
    assert compare([], [1.0]).verdict == NODATA
    wide = compare([0.7, 1.4, 1.0, 0.8], [0.9, 1.3, 1.1, 0.7])
    assert wide.needed is not None
    assert wide.needed > 4


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="above zero"):
        compare([1.0, bad], [1.0])


@given(times, times)
def test_exchanging_the_sides_turns_the_verdict_round(first: list[float], second: list[float]) -> None:
    one, other = compare(first, second), compare(second, first)
    assert {SLOWER: FASTER, FASTER: SLOWER}.get(one.verdict, one.verdict) == other.verdict
    assert one.ratio == pytest.approx(1 / other.ratio if other.ratio else None)


@given(times, st.floats(0.01, 100.0))
def test_the_unit_does_not_matter(first: list[float], unit: float) -> None:
    second = [1.3 * value for value in first]
    one, other = compare(first, second), compare([unit * v for v in first], [unit * v for v in second])
    assert one.ratio == pytest.approx(other.ratio)
    assert one.ratio == pytest.approx(1.3)


@pytest.mark.parametrize("noise", [0.01, 0.02, 0.04, 0.08])
def test_seven_launches_a_side_at_98_percent(noise: float) -> None:
    """Nothing changed: SLOWER in 1 of 100 at most. A true 5 %, at 2 % noise and less: found in 9 of 10."""
    rng = np.random.default_rng(11)

    def share(factor: float) -> float:
        verdicts = [
            compare(rng.normal(1, noise, 7), factor * rng.normal(1, noise, 7), level=0.98).verdict for _ in range(1500)
        ]
        return verdicts.count(SLOWER) / len(verdicts)

    assert share(1.0) <= 0.01 + 0.007
    if noise <= 0.02:
        assert share(1.05) >= 0.9


@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_the_interval_covers_the_true_ratio(noise: float) -> None:
    rng = np.random.default_rng(12)
    held = 0
    for _ in range(1500):
        found = compare(np.exp(rng.normal(0, noise, 6)), 1.1 * np.exp(rng.normal(0, noise, 6)))
        assert found.lo is not None
        assert found.hi is not None
        held += found.lo <= 1.1 <= found.hi
    assert held / 1500 >= 0.95 - 0.02
