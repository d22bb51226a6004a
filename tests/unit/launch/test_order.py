"""The order of launches and of cases: that drift favours nobody, and that it can be repeated."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.cases import Layout, Sweep
from commbench.launch.order import LEAST, Launches, launch_seed, parse_auto, sets_in_order, shuffled
from commbench.launch.sets import ProcessSet, process_sets
from commbench.stats.launches import least_launches


def test_two_sets_go_back_and_forth() -> None:
    rows = ["".join("AB"[number] for number in sets_in_order(2, repetition)) for repetition in range(4)]
    assert rows == ["AB", "BA", "BA", "AB"]
    assert [sets_in_order(1, repetition) for repetition in range(3)] == [(0,)] * 3


def test_three_sets_by_hand() -> None:
    # Williams: 0 2 1, then 1 0 2, then 2 1 0, where 2 and 1 have changed names so that the first row is 0 1 2.
    assert [sets_in_order(3, repetition) for repetition in range(6)] == [
        (0, 1, 2), (2, 1, 0), (2, 0, 1), (1, 0, 2), (1, 2, 0), (0, 2, 1),
    ]  # fmt: skip


@given(st.integers(1, 12), st.integers(0, 30))
def test_over_two_repetitions_a_linear_drift_cancels_out(count: int, pair: int) -> None:
    launches = [*sets_in_order(count, 2 * pair), *sets_in_order(count, 2 * pair + 1)]
    means = {number: sum(place for place, one in enumerate(launches) if one == number) / 2 for number in range(count)}
    assert set(means.values()) == {(2 * count - 1) / 2}
    assert sets_in_order(count, 0) == tuple(range(count))


@given(st.integers(2, 12))
def test_over_a_whole_design_places_and_neighbours_are_balanced(count: int) -> None:
    rows = [sets_in_order(count, repetition) for repetition in range(2 * count)]
    assert set(Counter((place, one) for row in rows for place, one in enumerate(row)).values()) == {2}
    after = Counter(pair for row in rows for pair in pairwise(row))
    assert len(after) == count * (count - 1)
    assert set(after.values()) == {2}


def some_set() -> ProcessSet:
    sweep = Sweep(backends=("gloo", "nccl"), sizes=(8, 64, 512, 4096))
    (found,) = process_sets(sweep.backends, sweep.expand(Layout(hosts=("here", "here"))))
    return found


@given(st.integers(0, 2**31 - 1), st.integers(0, 1000))
def test_a_shuffle_keeps_every_case_and_a_backends_cases_together(seed: int, launch: int) -> None:
    before = some_set()
    after = shuffled(before, launch_seed(seed, launch))
    assert sorted(case.case_id for case in after.cases) == sorted(case.case_id for case in before.cases)
    assert sorted(after.backends) == ["gloo", "nccl"]
    half = len(after.cases) // 2
    assert [{case.backend for case in part} for part in (after.cases[:half], after.cases[half:])] == [
        {name} for name in after.backends
    ]
    assert shuffled(before, launch_seed(seed, launch)) == after


def test_each_launch_has_an_order_of_its_own() -> None:
    seeds = [launch_seed(7, launch) for launch in range(50)]
    assert len(set(seeds)) == 50
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seeds[0] != launch_seed(8, 0)
    orders = {tuple(case.case_id for case in shuffled(some_set(), seed).cases) for seed in seeds}
    assert len(orders) == 50
    assert len({shuffled(some_set(), seed).backends for seed in seeds}) == 2


def test_how_many() -> None:
    assert least_launches(0.95) == LEAST
    assert parse_auto("auto:5%") == Launches(least=6, most=40, precision=0.05)
    assert str(parse_auto("auto:2.5%:30")) == "auto:0.025:30"
    assert parse_auto(str(parse_auto("auto:2.5%:30"))) == parse_auto("auto:2.5%:30")
    assert (str(Launches.fixed(3)), Launches.fixed(3).several, Launches().several) == ("3", True, False)
    for text in ("auto", "auto:5%:5", "auto:5%:x", "auto:0%", "auto:5%:6:7", "every:5%"):
        with pytest.raises(ValueError, match=r"launches are too few|must lie between|is neither a number nor"):
            parse_auto(text)
