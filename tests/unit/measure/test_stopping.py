"""Why a case stops: each reason, at its exact limit."""

from __future__ import annotations

import numpy as np
import pytest

from commbench.measure.stopping import MAX_SAMPLES, MIN_ROUNDS, MIN_SAMPLES, OVERTIME, StoppingRule
from commbench.stats.summary import relative_half_width, summarise_times

RULE = StoppingRule(precision=0.02, limit_s=5.0, limit_name="max_time")
STEADY = np.full(100, 1e-3)
# Ten blocks of ten: medians from 1.00 to 1.09 ms, far from within 2 %.
DRIFTING = np.repeat(1e-3 + 1e-5 * np.arange(10), 10)


def decide(
    rule: StoppingRule, times: np.ndarray, rounds: int = 20, elapsed_s: float = 1.0, made: int = 0
) -> str | None:
    return rule.decide(times, made or len(times), rounds, elapsed_s)


def test_steady_times_are_precise_after_enough_rounds() -> None:
    assert decide(RULE, STEADY, rounds=MIN_ROUNDS) == "precision"
    assert decide(RULE, STEADY, rounds=MIN_ROUNDS - 1) is None


def test_the_precision_is_that_of_the_interval_of_the_median() -> None:
    width = relative_half_width(summarise_times(DRIFTING))
    assert 0.02 < width < 0.045
    for precision, reason in ((width * 1.001, "precision"), (width * 0.999, None)):
        assert decide(StoppingRule(precision=precision, limit_s=5.0, limit_name="budget"), DRIFTING) == reason


def test_few_samples_are_never_precise() -> None:
    # Even all five of five enclose the median with 93.75 % only.
    assert decide(RULE, STEADY[:5]) is None
    assert decide(RULE, STEADY[:6]) == "precision"


@pytest.mark.parametrize("name", ["max_time", "budget"])
def test_the_limit_says_where_it_came_from(name: str) -> None:
    rule = StoppingRule(precision=0.001, limit_s=5.0, limit_name=name)
    assert decide(rule, DRIFTING, elapsed_s=4.99) is None
    assert decide(rule, DRIFTING, elapsed_s=5.0) == name


def test_a_slow_case_gets_a_few_samples_in_overtime() -> None:
    few = DRIFTING[: MIN_SAMPLES - 1]
    assert decide(RULE, few, elapsed_s=5.0) is None
    assert decide(RULE, few, elapsed_s=5.0 * OVERTIME) == "max_time"
    assert decide(RULE, DRIFTING[:MIN_SAMPLES], elapsed_s=5.0) == "max_time"


def test_a_fixed_number_turns_the_rest_off_and_counts_what_was_made() -> None:
    rule = StoppingRule(precision=0.9, limit_s=0.0, limit_name="budget", iterations=60)
    assert decide(rule, STEADY[:30], made=59, elapsed_s=1e9) is None
    assert decide(rule, STEADY[:30], made=60, elapsed_s=0.0) == "iterations"


def test_there_is_an_end_to_memory() -> None:
    wide = np.tile([1e-3, 2e-3], MAX_SAMPLES // 2)
    rule = StoppingRule(precision=1e-9, limit_s=1e9, limit_name="budget")
    assert decide(rule, wide[:-1]) is None
    assert decide(rule, wide) == "samples"
