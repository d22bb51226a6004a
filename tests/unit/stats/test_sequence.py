from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.stats.ranks import midranks, orders
from commbench.stats.sequence import effective_number, find_drift, serial_correlation, theil_sen


def test_midranks_share_ties() -> None:
    assert midranks([30.0, 10.0, 20.0, 10.0]).tolist() == [4.0, 1.5, 3.0, 1.5]


@given(st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=1, max_size=12))
def test_midranks_sum_to_what_ranks_sum_to(values: list[float]) -> None:
    assert midranks(values).sum() == len(values) * (len(values) + 1) / 2


def test_orders_are_all_there_are_or_many() -> None:
    assert sorted(map(tuple, orders(4).tolist())) == sorted(itertools.permutations(range(4)))
    assert orders(9).shape == (5000, 9)
    assert (np.sort(orders(9), axis=1) == np.arange(9)).all()
    assert orders(4)[0].tolist() == list(range(4))
    assert orders(9)[0].tolist() == list(range(9))


def test_correlation_of_five_rising_launches() -> None:
    # Centred ranks -2 to 2: neighbours' products 2 + 0 + 0 + 2 of squares that sum to 10; in random order -1/5.
    found = serial_correlation([[1.0, 2.0, 3.0, 4.0, 5.0]])
    assert found is not None
    assert found.value == pytest.approx(0.4 + 0.2)
    ranks = (-2, -1, 0, 1, 2)
    sums = [sum(a * b for a, b in itertools.pairwise(order)) / 10 + 0.2 for order in itertools.permutations(ranks)]
    assert np.mean(sums) == pytest.approx(0)
    assert found.p == pytest.approx(np.mean([abs(value) >= 0.6 - 1e-9 for value in sums]))
    assert (found.launches, found.cases) == (5, 1)


def test_one_slow_launch_does_not_decide() -> None:
    calm, struck = ([1.0, 5.0, 2.0, 4.0, 3.0, last] for last in (6.0, 600.0))
    assert serial_correlation([calm]) == serial_correlation([struck])


def test_cases_of_the_same_launches_are_no_more_evidence() -> None:
    row = [1.0, 2.0, 4.0, 3.0, 5.0, 6.0]
    one, ten = serial_correlation([row]), serial_correlation([row] * 10)
    assert one is not None and ten is not None
    assert ten.p == one.p
    assert ten.value == pytest.approx(one.value)


def test_nothing_to_say() -> None:
    assert serial_correlation([[1.0, 2.0, 3.0, 4.0]]) is None
    assert serial_correlation([[1.0] * 8]) is None
    assert serial_correlation([]) is None
    assert find_drift([[1.0, 2.0]]) is None


def test_a_launch_that_lacks_a_case_is_left_out() -> None:
    found = serial_correlation([[1.0, 2.0, 3.0, math.nan, 4.0, 5.0], [5.0, 1.0, 4.0, 2.0, 3.0]])
    assert found is not None
    assert (found.launches, found.cases) == (6, 2)


@pytest.mark.parametrize(("rho", "least"), [(0.0, 0.0), (0.7, 0.6)])
def test_how_often_correlation_is_told(rho: float, least: float) -> None:
    chance = np.random.default_rng(5)
    told = 0
    for _ in range(150):
        series = [chance.standard_normal()]
        for _ in range(19):
            series.append(rho * series[-1] + math.sqrt(1 - rho**2) * chance.standard_normal())
        found = serial_correlation([np.exp(0.1 * np.array(series))])
        assert found is not None
        told += found.distinguishable
    assert told / 150 <= 0.12 if rho == 0 else told / 150 >= least


def test_effective_number_by_hand() -> None:
    assert effective_number(2, 0.5) == pytest.approx(2 / (1 + 2 * 0.5 * 0.5))
    assert effective_number(3, 0.5) == pytest.approx(3 / (1 + 2 * (2 / 3 * 0.5 + 1 / 3 * 0.25)))
    assert effective_number(7, 0.0) == 7
    assert effective_number(7, -0.5) == 7
    assert effective_number(1000, 0.5) == pytest.approx(1000 / 3, rel=0.01)  # (1 - r) / (1 + r) of many
    assert effective_number(6, 1.0) >= 1


def test_drift_of_a_steady_rise() -> None:
    found = find_drift([[1.1**k for k in range(5)], [2 * 1.1**k for k in range(5)]])
    assert found is not None
    assert found.rho == pytest.approx(1)
    assert found.p == pytest.approx(2 / math.factorial(5))
    assert found.change == pytest.approx(1.1**4 - 1)
    assert found.distinguishable


def test_a_rise_and_a_fall_are_no_drift() -> None:
    found = find_drift([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]])
    assert found is not None
    assert found.rho == pytest.approx(0)
    assert not found.distinguishable


def test_theil_sen_shrugs_at_one_stray() -> None:
    assert theil_sen([0.0, 1.0, 2.0, 50.0, 4.0]) == 1.0
    assert theil_sen([0.0, math.nan, 4.0, 6.0]) == 2.0
