from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.stats.launches import (
    Auto,
    half_width,
    launches_needed,
    least_launches,
    median_of_launches,
    spread_of_launches,
)
from commbench.stats.summary import median_ranks

times = st.lists(st.floats(1e-7, 10.0), min_size=1, max_size=40)


def test_six_launches_are_the_first_with_an_interval() -> None:
    found = median_of_launches([5.0, 1.0, 4.0, 2.0, 6.0, 3.0])
    assert (found.count, found.median, found.lo, found.hi, found.level) == (6, 3.5, 1.0, 6.0, 1 - 2 / 2**6)
    assert found.reached
    assert found.statement == "6 launches: 96.9% interval of the median launch, if launches are independent"


def test_fewer_give_their_range_with_its_own_level() -> None:
    found = median_of_launches([3.0, 1.0, 2.0, 5.0, 4.0])
    assert (found.lo, found.hi, found.level, found.reached) == (1.0, 5.0, 0.9375, False)
    assert found.statement.startswith("5 launches: no 95% interval of the median launch exists below 6; their range")
    assert "covers it with 93.75%," in found.statement


def test_one_launch_speaks_for_itself() -> None:
    found = median_of_launches([3.0])
    assert (found.lo, found.hi, found.level) == (3.0, 3.0, 0.0)
    assert found.statement == "one launch: what is said holds for this launch alone"


# 1 - 2^(1 - n): 0.5, 0.75, 0.875, 0.9375, 0.96875, 0.984375, 0.9921875, 0.99609375 for 2 to 9.
@pytest.mark.parametrize(
    ("level", "least"), [(0.5, 2), (0.75, 3), (0.9, 5), (0.9375, 5), (0.95, 6), (0.96875, 6), (0.99, 8), (0.995, 9)]
)
def test_least_launches(level: float, least: int) -> None:
    assert least_launches(level) == least
    assert median_ranks(least, level).level >= level
    assert median_ranks(max(1, least - 1), level).level < level


@given(times)
def test_the_interval_holds_its_median_and_stays_within_the_launches(values: list[float]) -> None:
    found = median_of_launches(values)
    assert min(values) <= found.lo <= found.median <= found.hi <= max(values)


def test_a_gap_at_the_middle_is_covered_whole_at_the_level() -> None:
    # Two modes of equal weight: every value between 1 and 2 is a median.
    chance = np.random.default_rng(3)
    launches = np.where(chance.random((4000, 6)) < 0.5, 1.0, 2.0)
    held = [found.lo <= 1.0 and found.hi >= 2.0 for found in map(median_of_launches, launches)]
    assert np.mean(held) == pytest.approx(1 - 2 / 2**6, abs=4 * math.sqrt(0.03 / 4000))


@pytest.mark.parametrize("slow", [0.3, 0.1])
@pytest.mark.parametrize("count", [6, 9, 20])
def test_launches_in_two_modes_are_covered(slow: float, count: int) -> None:
    chance = np.random.default_rng(count)
    noise = np.exp(0.3 * chance.standard_normal((400_000,)))
    truth = float(np.median(noise * np.where(chance.random(400_000) < slow, 1.83, 1.0)))
    launches = np.exp(0.3 * chance.standard_normal((1500, count)))
    launches *= np.where(chance.random((1500, count)) < slow, 1.83, 1.0)
    held = [found.lo <= truth <= found.hi for found in map(median_of_launches, launches)]
    assert np.mean(held) >= 0.95 - 3 * math.sqrt(0.05 / 1500)


def test_spread_of_two_values() -> None:
    found = spread_of_launches([1.0, 3.0])
    assert found is not None
    assert found.one == pytest.approx(math.sqrt(2) / 2)
    assert found.mean == pytest.approx(0.5)
    # Medians of resamples of two: 1, 2, 3 with 1/4, 1/2, 1/4, so a standard deviation of sqrt(1/2) around 2, and as much
    # again as a sample's is short of: of two launches mean and median are one.
    assert found.median == pytest.approx(found.mean, rel=0.06)
    assert spread_of_launches([1.0]) is None
    assert spread_of_launches([0.0, 0.0]) is None


def test_half_width_is_the_wider_side() -> None:
    assert half_width([1.0, 2.0, 3.0, 4.0, 5.0, 7.0]) == pytest.approx((7 - 3.5) / 3.5)
    assert half_width([1.0] * 5) == math.inf
    assert half_width([0.0] * 6) == math.inf


def test_needed_is_none_where_nobody_can_say() -> None:
    assert launches_needed([1.0, 2.0], 0.05) is None
    assert launches_needed([0.0, 1.0, 2.0], 0.05) is None
    assert launches_needed([1.0, 5.0, 9.0], 0.0001) is None  # far beyond a thousand


def test_launches_that_agree_need_the_least() -> None:
    assert launches_needed([1.0, 1.0, 1.0], 0.01) == 6
    assert launches_needed([1.0, 1.0, 1.0], 0.01, least=9) == 9


@given(st.lists(st.floats(0.5, 2.0), min_size=3, max_size=12), st.floats(1e-6, 1e6))
def test_needed_knows_no_unit_and_falls_with_the_precision(values: list[float], unit: float) -> None:
    tight, loose = (launches_needed(values, precision) for precision in (0.05, 0.2))
    assert loose is not None or tight is None
    assert tight is None or (loose is not None and loose <= tight)
    scaled = launches_needed([unit * value for value in values], 0.2)
    assert (scaled is None) == (loose is None)


def test_needed_for_a_mode_that_most_launches_are_in_follows_that_mode() -> None:
    # 8 of 10 launches within 2 %: once the ranks of the interval lie within that mode, it is narrow, however far the
    # other is. The lower rank's share must exceed 0.2: 3.1 / 21 does not, 14 of 41 (0.34) does.
    values = [1.0, 1.005, 1.01, 1.0, 0.995, 0.99, 1.003, 0.997, 2.0, 2.02]
    found = launches_needed(values, 0.05)
    assert found is not None
    assert 8 <= found <= 40


@pytest.mark.parametrize(("noise", "precision", "truth"), [(0.05, 0.05, 12), (0.1, 0.05, 37), (0.3, 0.15, 37)])
def test_needed_is_near_the_truth_in_the_median(noise: float, precision: float, truth: int) -> None:
    """``truth``: simulated, the fewest launches of which half of the intervals are within the precision."""
    chance = np.random.default_rng(7)
    for count, within in ((6, 0.4), (truth // 2, 0.6)):
        draws = np.exp(noise * chance.standard_normal((150, count)))
        ratios = np.array([launches_needed(values, precision) or 1000 for values in draws]) / truth
        assert 1 / 1.5 <= np.median(ratios) <= 1.5
        assert np.mean((ratios <= 1.5) & (ratios >= 1 / 1.5)) >= within


def test_launches_that_repeat_one_another_count_for_less() -> None:
    drifting = [1.0 + 0.01 * k for k in range(12)]
    shuffled = [drifting[k] for k in (3, 9, 0, 6, 11, 2, 8, 5, 1, 10, 4, 7)]
    slow, fast = launches_needed(drifting, 0.05), launches_needed(shuffled, 0.05)
    assert slow is not None and fast is not None
    assert slow > fast


def test_auto_stops_once_every_case_is_narrow_twice() -> None:
    auto = Auto(precision=0.05)
    assert not auto.enough({"a": [1.0] * 6})  # five before had no interval
    assert auto.enough({"a": [1.0] * 7})
    assert not auto.enough({"a": [1.0] * 7, "b": [1.0, 1.2] * 3 + [1.0]})
    assert auto.needed([1.0, 1.0, 1.0]) == 6


def test_auto_stops_at_the_most() -> None:
    wide = [1.0, 2.0] * 5
    assert not Auto(precision=0.05, most=11).enough({"a": wide})
    assert Auto(precision=0.05, most=10).enough({"a": wide})


def test_auto_covers_although_it_chooses_when_to_stop() -> None:
    chance = np.random.default_rng(11)
    auto = Auto(precision=0.1, most=40)
    held = []
    for values in np.exp(0.1 * chance.standard_normal((300, 40))):
        count = next(n for n in range(6, 41) if auto.enough({"a": values[:n]}))
        found = median_of_launches(values[:count])
        held.append(found.lo <= 1.0 <= found.hi)
    assert np.mean(held) >= 0.95 - 3 * math.sqrt(0.05 / 300)
