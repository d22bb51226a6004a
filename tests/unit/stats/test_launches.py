"""What launches tell together, against values worked out by hand and populations whose median is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.stats.launches import Auto, in_sequence, launch_interval, launches_needed, least_launches

Draw = Callable[[np.random.Generator, int], np.ndarray]
MODE = math.log(1.8)


def _modes(share: float) -> Draw:
    """A lower mode around 1 and an upper one around 1.8, each with 10 % noise."""
    return lambda rng, n: np.exp(0.1 * rng.standard_normal(n) + MODE * (rng.random(n) < share))


SHAPES: dict[str, tuple[Draw, float, float]] = {
    # How launches are drawn, and between what the population's median lies.
    "gaussian 20 %": (lambda rng, n: np.maximum(0.01, rng.normal(1, 0.2, n)), 1, 1),
    "gaussian 40 %": (lambda rng, n: np.maximum(0.01, rng.normal(1, 0.4, n)), 1, 1),
    "lognormal 20 %": (lambda rng, n: np.exp(rng.normal(0, 0.2, n)), 1, 1),
    "lognormal 40 %": (lambda rng, n: np.exp(rng.normal(0, 0.4, n)), 1, 1),
    # Between the modes lies as good as nothing: half of all launches are below any value of the gap.
    "bimodal 50/50": (_modes(0.5), 1.35, 1.4),
    "bimodal 30/70": (_modes(0.7), 1.6879, 1.6879),
    "bimodal 10/90": (_modes(0.9), 1.7748, 1.7748),
}


def test_the_medians_of_the_two_moded_populations_are_those_stated() -> None:
    """share * F((log m - MODE) / 0.1) + (1 - share) * F(log m / 0.1) = 1/2, F the normal distribution."""

    def below(median: float, share: float) -> float:
        def normal(x: float) -> float:
            return (1 + math.erf(x / math.sqrt(2))) / 2

        return share * normal((math.log(median) - MODE) / 0.1) + (1 - share) * normal(math.log(median) / 0.1)

    assert below(1.6879, 0.7) == pytest.approx(0.5, abs=1e-4)
    assert below(1.7748, 0.9) == pytest.approx(0.5, abs=1e-4)
    assert below(1.35, 0.5) == pytest.approx(0.5, abs=2e-3)
    assert below(1.4, 0.5) == pytest.approx(0.5, abs=4e-3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [6, 7, 8, 12, 20, 30])
def test_from_six_launches_on_the_interval_holds_the_median_launch(shape: str, count: int) -> None:
    draw, least, greatest = SHAPES[shape]
    rng = np.random.default_rng(count)
    tries = 3000
    held = 0
    for _ in range(tries):
        found = launch_interval(draw(rng, count))
        held += found.lo <= greatest and found.hi >= least
        assert found.sufficient
        assert found.level >= 0.95
    # Four standard errors of 3,000 tries at 95 % are 1.6 %.
    assert held / tries >= 0.95 - 0.016


def test_six_launches_are_the_fewest() -> None:
    assert least_launches() == 6
    assert least_launches(0.99) == 8
    five = launch_interval([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (five.lo, five.hi, five.level, five.sufficient) == (1.0, 5.0, 0.9375, False)
    assert five.half_width == math.inf
    six = launch_interval([5.0, 1.0, 4.0, 2.0, 3.0, 6.0])
    assert (six.lo, six.hi, six.level, six.sufficient) == (1.0, 6.0, 0.96875, True)
    assert six.half_width == 2.5 / 3.5
    one = launch_interval([3.0])
    assert (one.lo, one.hi, one.level, one.sufficient) == (3.0, 3.0, 0.0, False)


# -- in a row --------------------------------------------------------------------------------------


def _autoregressive(rng: np.random.Generator, cases: int, count: int, rho: float) -> list[list[float]]:
    """Launches whose noise is shared by the cases and remembers itself."""
    common = np.empty(count)
    common[0] = rng.standard_normal()
    for at in range(1, count):
        common[at] = rho * common[at - 1] + math.sqrt(1 - rho**2) * rng.standard_normal()
    return [list((case + 1) * np.exp(0.1 * common + 0.02 * rng.standard_normal(count))) for case in range(cases)]


def test_correlated_launches_are_told_from_independent_ones() -> None:
    rng = np.random.default_rng(5)
    found = [in_sequence(_autoregressive(rng, 3, 30, 0.7), seed) for seed in range(40)]
    assert np.mean([one.correlation_p < 0.05 for one in found if one]) > 0.8
    assert np.median([one.correlation for one in found if one]) == pytest.approx(0.65, abs=0.15)
    # 30 launches of correlation 0.7 are worth 30 * 0.3 / 1.7.
    assert np.median([one.effective for one in found if one]) == pytest.approx(5.3, abs=3)
    alone = [in_sequence(_autoregressive(rng, 3, 12, 0.0), seed) for seed in range(200)]
    assert np.mean([one.correlation_p < 0.05 for one in alone if one]) < 0.1
    assert np.mean([one.drift_p < 0.05 for one in alone if one]) < 0.1
    assert abs(np.mean([one.correlation for one in alone if one])) < 0.08


def test_a_drift_is_told_with_its_size() -> None:
    rng = np.random.default_rng(6)
    grows = np.exp(np.linspace(0, math.log(1.2), 20))
    found = in_sequence([list(grows * np.exp(0.01 * rng.standard_normal(20))) for _ in range(4)])
    assert found is not None
    assert found.drift == pytest.approx(0.2, abs=0.03)
    assert found.drift_p == 1 / 2000


def test_alternating_launches_are_worth_no_more_than_they_are() -> None:
    found = in_sequence([[1.0, 2.0] * 5])
    assert found is not None
    # Nine products of -1 over ten, and the bias of -1/10 taken off.
    assert found.correlation == pytest.approx(-0.8)
    assert found.effective == 10


def test_too_few_or_equal_launches_tell_nothing() -> None:
    assert in_sequence([[1.0, 2.0, 3.0]]) is None
    assert in_sequence([[1.0] * 8]) is None
    assert in_sequence([]) is None


@pytest.mark.parametrize("values", [[[1.0] * 5, [1.0] * 6], [[1.0, 0.0, 1.0, 2.0]], [[1.0, math.nan, 1.0, 2.0]]])
def test_what_makes_no_sense_is_refused(values: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="launch"):
        in_sequence(values)


# -- how many --------------------------------------------------------------------------------------

# By simulation apart from this code: the fewest launches whose median half width is within the precision.
TRUE = {("gaussian", 0.05, 0.05): 12, ("gaussian", 0.1, 0.1): 12, ("gaussian", 0.2, 0.1): 37, ("lognormal", 0.2, 0.1): 37}


@pytest.mark.parametrize(("shape", "noise", "precision"), TRUE)
def test_how_many_launches_are_needed_is_told_after_the_first_few(shape: str, noise: float, precision: float) -> None:
    needed = TRUE[shape, noise, precision]
    rng = np.random.default_rng(7)

    def draw(count: int) -> np.ndarray:
        unit = rng.standard_normal(count)
        return np.exp(noise * unit) if shape == "lognormal" else np.maximum(0.05, 1 + noise * unit)

    first = [launches_needed(draw(6), precision) or 1000 for _ in range(200)]
    assert 1 / 1.5 <= np.median(first) / needed <= 1.5
    later = np.array([launches_needed(draw(needed), precision) or 1000 for _ in range(200)]) / needed
    assert np.mean((later >= 1 / 1.5) & (later <= 1.5)) >= 0.75


def test_two_modes_are_not_taken_for_one_that_is_broad() -> None:
    rng = np.random.default_rng(8)
    half = np.exp(0.01 * rng.standard_normal(20) + MODE * (np.arange(20) % 2))
    assert launches_needed(half, 0.05, most=200) is None


def test_launches_that_hardly_vary_need_no_more_than_the_fewest() -> None:
    assert launches_needed([1.0, 1.001, 0.999], 0.05) == 6


@pytest.mark.parametrize("values", [[1.0], [1.0, 0.0], [1.0, math.inf]])
def test_it_takes_two_real_times(values: list[float]) -> None:
    with pytest.raises(ValueError, match="two launches"):
        launches_needed(values, 0.05)


def test_auto_goes_on_until_every_case_is_known_well() -> None:
    auto = Auto(precision=0.05, most=30)
    steady = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98]
    assert auto.enough({"a": steady})
    assert not auto.enough({"a": steady[:5]})
    assert not auto.enough({"a": steady, "b": [1.0, 1.2, 0.9, 1.0, 1.1, 0.8]})
    assert auto.needed(steady) == 6
    assert auto.needed([1.0, 3.0, 0.5, 1.0, 2.0, 0.4]) is None


@given(st.lists(st.floats(0.5, 2.0), min_size=6, max_size=20), st.floats(0.01, 0.5))
def test_what_is_enough_needs_no_more(values: list[float], precision: float) -> None:
    auto = Auto(precision=precision, most=60)
    needed = auto.needed(values)
    if auto.enough({"case": values}):
        assert needed == len(values)
    else:
        assert needed is None or len(values) < needed <= 60
