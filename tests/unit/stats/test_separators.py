from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import fisher_exact, mannwhitneyu

from commbench.stats.separators import _drawn_table_p, _rank_sum_p, _table_p, separators

SLOW = [True, True, True, True, False, False, False, False]


def test_a_lady_tasting_tea() -> None:
    # Fisher's own example, all eight right: one table in 70 on either side.
    (found,) = separators(SLOW, {"milk": ["first"] * 4 + ["last"] * 4})
    assert found.names == ("milk",)
    assert found.p == pytest.approx(2 / 70)
    assert (found.right, found.explained) == (1.0, 1.0)
    assert found.detail == "first: 4 of 4 slow, last: 0 of 4 slow"


def test_numbers_are_ranked() -> None:
    values = [9.5, 8.25, 7.5, 9.0, 1.5, 2.5, 3.5, 4.5]
    (found,) = separators(SLOW, {"load1": values})
    assert found.p == pytest.approx(2 / math.comb(8, 4))
    assert found.detail == "slow from 7.5"
    (falling,) = separators(SLOW, {"frequency_Hz": [-value for value in values]})
    assert falling.detail == "slow below -4.5"


def test_numbers_that_occur_again_are_categories() -> None:
    (found,) = separators(SLOW, {"core": [3, 3, 3, 3, 0, 1, 0, 1]})
    assert found.detail.startswith("3: 4 of 4 slow, ")
    # 4 of 4 in one group of sizes 4, 2, 2: only all of the four, 1 table, or as rare: both groups of two, 1 table.
    assert found.p == pytest.approx(2 / 70)


def test_facts_that_say_the_same_are_one() -> None:
    facts = {"order": [1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5], "started_s": [10.0, 20, 31, 40, 52, 60, 70, 90]}
    (found,) = separators(SLOW, facts)
    assert found.names == ("order", "started_s")
    assert found.p_holm == found.p


def test_holm_takes_every_fact_that_was_tried_into_account() -> None:
    noise = {f"noise{k}": [random.Random(k * 100 + i).random() for i in range(8)] for k in range(3)}
    assert separators(SLOW, {"milk": ["first"] * 4 + ["last"] * 4, **noise}) == []  # 4 x 2/70 > 0.05
    longer = [True] * 8 + [False] * 8
    noise = {f"noise{k}": [random.Random(k * 100 + i).random() for i in range(16)] for k in range(3)}
    (found,) = separators(longer, {**noise, "milk": ["first"] * 8 + ["last"] * 8})
    assert found.p == pytest.approx(2 / math.comb(16, 8))
    assert found.p_holm == pytest.approx(4 * found.p)


def test_what_says_nothing_is_not_tried() -> None:
    facts = {"host": ["a"] * 8, "id": [f"x{k}" for k in range(8)], "unknown": [None] * 8, "nan": [math.nan] * 8}
    assert separators(SLOW, facts) == []
    assert separators([False] * 8, {"milk": ["first"] * 4 + ["last"] * 4}) == []


def test_launches_that_do_not_know_a_fact_are_left_out() -> None:
    slow = [True] * 5 + [False] * 5
    (found,) = separators(slow, {"node": ["a", "a", "a", "a", None, "b", "b", "b", "b", None]})
    assert found.p == pytest.approx(2 / 70)


def test_a_fact_needs_a_value_for_every_launch() -> None:
    with pytest.raises(ValueError, match="'core' has 2 values for 8"):
        separators(SLOW, {"core": [1, 2]})


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=14))
def test_two_categories_are_fishers_exact_test(pairs: list[tuple[bool, bool]]) -> None:
    table = [[sum(s == slow and c == kind for s, c in pairs) for kind in (True, False)] for slow in (True, False)]
    cells = [(table[0][k], table[0][k] + table[1][k]) for k in (0, 1)]
    assert _table_p(cells) == pytest.approx(fisher_exact(table).pvalue)


def test_three_categories_by_going_through_all_draws() -> None:
    cells = [(2, 3), (1, 2), (0, 3)]
    groups = [0, 0, 0, 1, 1, 2, 2, 2]
    chances: dict[tuple[int, ...], int] = {}
    for drawn in itertools.combinations(range(8), 3):
        table = tuple(sum(groups[i] == g for i in drawn) for g in range(3))
        chances[table] = chances.get(table, 0) + 1
    rarer = sum(times for times in chances.values() if times <= chances[2, 1, 0])
    assert _table_p(cells) == pytest.approx(rarer / math.comb(8, 3))
    observed = math.comb(3, 2) * 2
    assert _drawn_table_p(cells, observed) == pytest.approx(rarer / math.comb(8, 3), abs=0.02)


@given(st.lists(st.booleans(), min_size=3, max_size=12).filter(lambda flags: 0 < sum(flags) < len(flags)), st.randoms())
def test_distinct_numbers_are_the_exact_rank_sum_test(slow: list[bool], chance: random.Random) -> None:
    values = [float(v) for v in chance.sample(range(1000), len(slow))]
    sides = ([v for v, s in zip(values, slow, strict=True) if s is side] for side in (True, False))
    assert _rank_sum_p(slow, values) == pytest.approx(mannwhitneyu(*sides, method="exact").pvalue)


def test_tied_numbers_by_going_through_all_draws() -> None:
    slow, values = [True, True, False, False, False], [2.0, 2.0, 2.0, 1.0, 0.0]
    ranks = [4.0, 4.0, 4.0, 2.0, 1.0]
    sums = [sum(ranks[i] for i in drawn) for drawn in itertools.combinations(range(5), 2)]
    expected = np.mean([abs(s - 6) >= abs(8 - 6) for s in sums])
    assert _rank_sum_p(slow, values) == pytest.approx(expected)


def test_ten_facts_of_chance_are_seldom_named() -> None:
    chance = np.random.default_rng(2)
    named = 0
    for _ in range(200):
        slow = (chance.permutation(12) < 5).tolist()
        facts = {f"n{k}": chance.random(12).tolist() for k in range(5)}
        facts |= {f"c{k}": chance.integers(3, size=12).astype(str).tolist() for k in range(5)}
        named += bool(separators(slow, facts))
    assert named / 200 <= 0.05 + 3 * math.sqrt(0.05 / 200)
