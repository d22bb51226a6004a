from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.stats import summary as summary_module
from commbench.stats.summary import (
    Summary,
    block_medians,
    median_interval,
    median_ranks,
    relative_half_width,
    summarise_times,
)

finite_times = st.floats(min_value=1e-9, max_value=1e3)
samples = st.lists(finite_times, min_size=1, max_size=80)


# Worked by hand from the binomial coefficients: n=10 has 1+10 of 1024 outcomes with at most one value below the
# median, 1+10+45 with at most two; n=20 has 21700 of 1048576 with at most five and 60460 with at most six.
@pytest.mark.parametrize(
    ("count", "lo", "hi", "level"),
    [
        (1, 1, 1, 0.0),
        (2, 1, 2, 0.5),
        (5, 1, 5, 0.9375),
        (6, 1, 6, 0.96875),
        (10, 2, 9, 1 - 2 * 11 / 1024),
        (11, 2, 10, 1 - 2 * 12 / 2048),
        (20, 6, 15, 1 - 2 * 21700 / 1048576),
    ],
)
def test_ranks_worked_by_hand(count: int, lo: int, hi: int, level: float) -> None:
    ranks = median_ranks(count, 0.95)
    assert (ranks.lo, ranks.hi, ranks.level) == (lo, hi, level)


def test_a_level_that_is_met_exactly_is_enough() -> None:
    assert (median_ranks(5, 0.9375).lo, median_ranks(10, 1 - 2 * 11 / 1024).lo) == (1, 2)


def test_ranks_of_100_are_those_of_the_usual_formula() -> None:
    # floor((n - 1.96 sqrt(n)) / 2) and ceil(1 + (n + 1.96 sqrt(n)) / 2), Hoefler and Belli, SC'15.
    assert (median_ranks(100).lo, median_ranks(100).hi) == (40, 61)


@pytest.mark.parametrize("count", range(1, 13))
def test_level_equals_a_count_over_every_outcome(count: int) -> None:
    ranks = median_ranks(count)
    outcomes = [sum(below) for below in product((0, 1), repeat=count)]
    assert ranks.level == sum(ranks.lo <= below < ranks.hi for below in outcomes) / len(outcomes)


@pytest.mark.parametrize("count", [6, 7, 30, 101, 400, 1000])
def test_no_narrower_pair_covers_enough(count: int) -> None:
    ranks = median_ranks(count)
    tail = sum(math.comb(count, below) for below in range(ranks.lo + 1)) / 2**count
    assert ranks.level >= 0.95 > 1 - 2 * tail


@pytest.mark.parametrize("count", [1001, 1010, 2500])
def test_approximation_beyond_exact_counting(count: int) -> None:
    ranks = median_ranks(count)
    exact = 1 - 2 * sum(math.comb(count, below) for below in range(ranks.lo)) / 2**count
    assert ranks.level == pytest.approx(exact, abs=1e-4)
    assert ranks.level >= 0.95
    assert ranks.level - 0.95 < 0.01


@pytest.mark.parametrize(("count", "level"), [(0, 0.95), (-3, 0.95), (5, 0.0), (5, 1.0), (5, float("nan"))])
def test_ranks_refuse(count: int, level: float) -> None:
    with pytest.raises(ValueError):
        median_ranks(count, level)


def test_interval_picks_the_order_statistics() -> None:
    interval = median_interval([7.0, 3.0, 9.0, 1.0, 5.0, 8.0, 2.0, 6.0, 4.0, 100.0])
    assert (interval.lo, interval.hi) == (2.0, 9.0)
    assert median_interval([3.0]).level == 0.0


@given(samples)
def test_interval_holds_the_median_and_lies_in_the_range(values: list[float]) -> None:
    interval = median_interval(values)
    assert min(values) <= interval.lo <= float(np.median(values)) <= interval.hi <= max(values)


@given(samples, st.floats(min_value=0.1, max_value=0.9), st.floats(min_value=0.91, max_value=0.999))
def test_a_higher_level_is_never_narrower(values: list[float], low: float, high: float) -> None:
    narrow, wide = median_interval(values, low), median_interval(values, high)
    assert wide.lo <= narrow.lo <= narrow.hi <= wide.hi
    assert wide.level >= narrow.level


@pytest.mark.parametrize("values", [[], [math.nan], [1.0, math.inf], [[1.0, 2.0]]])
def test_bad_samples_are_refused(values: list[float]) -> None:
    for function in (median_interval, block_medians, summarise_times):
        with pytest.raises(ValueError):
            function(values)


def test_negative_time_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        summarise_times([1.0, -1e-9])


def test_block_medians_are_consecutive_and_as_equal_as_possible() -> None:
    # Eleven values in four blocks: 3, 3, 3 and 2 of them.
    values = [1.0, 9.0, 5.0, 2.0, 2.0, 8.0, 3.0, 1.0, 7.0, 4.0, 6.0]
    assert block_medians(values, 4).tolist() == [5.0, 2.0, 3.0, 4.0]


def test_even_blocks_take_the_lower_and_the_upper_middle_in_turn() -> None:
    assert block_medians([1.0, 2.0, 4.0, 3.0, 6.0, 5.0], 3).tolist() == [1.0, 4.0, 5.0]
    assert block_medians([4.0, 1.0, 3.0, 2.0, 8.0, 5.0, 7.0, 6.0], 2).tolist() == [2.0, 7.0]


@pytest.mark.parametrize("blocks", [0, 4])
def test_blocks_that_cannot_be_cut(blocks: int) -> None:
    with pytest.raises(ValueError, match="blocks"):
        block_medians([1.0, 2.0, 3.0], blocks)


@given(st.lists(finite_times, min_size=1, max_size=60), st.integers(min_value=1, max_value=60))
def test_each_block_median_is_a_middle_value_of_its_block(values: list[float], blocks: int) -> None:
    blocks = min(blocks, len(values))
    medians = block_medians(values, blocks)
    lengths = [len(values) // blocks + (index < len(values) % blocks) for index in range(blocks)]
    start = 0
    for length, median in zip(lengths, medians, strict=True):
        ordered = sorted(values[start : start + length])
        assert median in (ordered[(length - 1) // 2], ordered[length // 2])
        start += length
    assert start == len(values)


def test_summary_of_a_known_sample() -> None:
    summary = summarise_times([float(value) for value in range(101)])
    assert (summary.count, summary.min, summary.max, summary.mean, summary.median) == (101, 0.0, 100.0, 50.0, 50.0)
    assert (summary.p05, summary.p25, summary.p75, summary.p95, summary.p99) == (5.0, 25.0, 75.0, 95.0, 99.0)
    # Blocks of 11, then nine of 10 from 11 on: medians 5, 15, 26, 35, 46, 55, 66, 75, 86, 95; ranks 2 and 9.
    assert (summary.lo, summary.hi, summary.level) == (15.0, 86.0, 1 - 2 * 11 / 1024)
    assert summary.interval_of == "iterations"


def test_percentiles_interpolate_between_order_statistics() -> None:
    # Position 1 + 3 * 0.95 = 3.85 of 10, 20, 30, 40.
    summary = summarise_times([40.0, 10.0, 30.0, 20.0])
    assert summary.p95 == pytest.approx(38.5)
    assert summary.p25 == pytest.approx(17.5)


def test_fewer_samples_than_blocks_use_the_samples_themselves() -> None:
    summary = summarise_times([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (summary.lo, summary.hi, summary.level) == (1.0, 5.0, 0.9375)
    single = summarise_times([2.5])
    assert (single.lo, single.median, single.hi, single.level) == (2.5, 2.5, 2.5, 0.0)


def test_interval_is_widened_to_hold_the_median() -> None:
    # One block of two gives its lower value; the median of both lies above it.
    summary = summarise_times([3.0, 1.0], blocks=1)
    assert (summary.lo, summary.median, summary.hi) == (1.0, 2.0, 2.0)


@given(st.lists(finite_times, min_size=1, max_size=120))
def test_summary_is_ordered_and_scales_with_its_unit(times: list[float]) -> None:
    summary = summarise_times(times)
    ladder = [summary.min, summary.p05, summary.p25, summary.median, summary.p75, summary.p95, summary.p99, summary.max]
    # Interpolation between two equal values may differ from them in the last bit.
    assert all(low <= high * (1 + 1e-12) for low, high in pairwise(ladder))
    assert summary.min <= summary.lo <= summary.median <= summary.hi <= summary.max
    doubled = summarise_times([time * 2 for time in times])
    assert (doubled.lo, doubled.median, doubled.hi) == (summary.lo * 2, summary.median * 2, summary.hi * 2)


def _summary(median: float, lo: float, hi: float, level: float = 0.97) -> Summary:
    return Summary(
        count=10, median=median, lo=lo, hi=hi, level=level, interval_of="iterations",
        min=lo, p05=lo, p25=lo, p75=hi, p95=hi, p99=hi, max=hi, mean=median,
    )  # fmt: skip


def test_relative_half_width_is_the_wider_side() -> None:
    assert relative_half_width(_summary(10.0, 9.0, 10.5)) == pytest.approx(0.1)
    assert relative_half_width(_summary(10.0, 9.9, 13.0)) == pytest.approx(0.3)
    assert relative_half_width(_summary(10.0, 10.0, 10.0)) == 0.0


def test_too_few_samples_never_stop_a_measurement() -> None:
    assert relative_half_width(summarise_times([1.0])) == math.inf
    assert relative_half_width(summarise_times([1.0] * 5)) == math.inf
    assert relative_half_width(summarise_times([1.0] * 6)) == 0.0
    assert relative_half_width(_summary(0.0, 0.0, 1.0)) == math.inf


@pytest.mark.parametrize("count", [10, 19, 20, 57, 200])
@pytest.mark.parametrize("sigma", [0.1, 1.0, 2.5])
def test_interval_covers_the_true_median_of_a_skewed_distribution(count: int, sigma: float) -> None:
    generator = np.random.default_rng(20_240_101 + count)
    trials = 300
    covered = 0
    for sample in generator.lognormal(0.0, sigma, (trials, count)):
        summary = summarise_times(sample)
        covered += summary.lo <= 1.0 <= summary.hi
    nominal = median_ranks(10).level
    noise = math.sqrt(nominal * (1 - nominal) / trials)
    assert covered / trials >= nominal - 3 * noise


def test_blocks_keep_the_coverage_of_correlated_iterations() -> None:
    generator = np.random.default_rng(7)
    trials, count, memory = 200, 400, 0.8
    covered = {"blocks": 0, "iterations": 0}
    for _ in range(trials):
        noise = generator.normal(size=count)
        series = np.empty(count)
        series[0] = noise[0] / math.sqrt(1 - memory**2)
        for index in range(1, count):
            series[index] = memory * series[index - 1] + noise[index]
        times = np.exp(0.05 * series)
        summary, naive = summarise_times(times), median_interval(times)
        covered["blocks"] += summary.lo <= 1.0 <= summary.hi
        covered["iterations"] += naive.lo <= 1.0 <= naive.hi
    assert covered["blocks"] / trials >= 0.93
    assert covered["iterations"] / trials < 0.7


def test_median_ranks_agree_where_exact_counting_hands_over(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = median_ranks(1000, 0.9)
    monkeypatch.setattr(summary_module, "EXACT_UP_TO", 10)
    median_ranks.cache_clear()
    approximate = median_ranks(1000, 0.9)
    median_ranks.cache_clear()
    assert (approximate.lo, approximate.hi) == (exact.lo, exact.hi)
    assert approximate.level == pytest.approx(exact.level, abs=1e-4)
