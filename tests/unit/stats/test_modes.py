from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.stats.modes import fewest_members, find_modes

TWO = [1.14, 2.12, 1.15, 1.16, 2.08, 2.10]


def test_two_modes_with_centres_and_shares() -> None:
    found = find_modes(TWO)
    assert found is not None
    assert found.centres == (1.15, 2.10)
    assert found.shares == (0.5, 0.5)
    assert found.slow == (False, True, False, False, True, True)


def test_the_gap_is_in_spreads_within() -> None:
    # Deviations of 0.01, 0, 0.01 and 0.02, 0, 0.02: squares 0.0010 over 4, a spread of 0.0158 around; the gap is 0.92.
    found = find_modes(TWO)
    assert found is not None
    logs = [math.log(value) for value in (1.14, 1.15, 1.16, 2.08, 2.10, 2.12)]
    squares = sum((x - sum(part) / 3) ** 2 for part in (logs[:3], logs[3:]) for x in part)
    of_logs = (logs[3] - logs[2]) / math.sqrt(squares / 4)
    assert found.gap == pytest.approx(min(0.92 / math.sqrt(0.0010 / 4), of_logs))


@pytest.mark.parametrize(
    "values",
    [
        TWO[:5],  # too few
        [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],  # evenly spread
        [1.0] * 8,  # all alike
        [1.0, 1.01, 1.02, 1.0, 0.99, 1.01, 9.0],  # one stray
        [1.0, 1.01, 1.02, 1.0, 0.99, 1.01, 1.0, 0.98, 1.02, 1.01, 1.7, 2.9],  # two strays, far from each other
    ],
)
def test_no_modes(values: list[float]) -> None:
    assert find_modes(values) is None


def test_values_that_repeat_exactly_are_modes() -> None:
    found = find_modes([1.0, 1.0, 2.0, 2.0, 1.0, 2.0])
    assert found is not None
    assert found.gap == math.inf


@given(st.permutations(range(6)), st.floats(1e-7, 1e3))
def test_neither_the_order_nor_the_unit_matters(order: list[int], unit: float) -> None:
    base = find_modes(TWO)
    found = find_modes([unit * TWO[k] for k in order])
    assert base is not None and found is not None
    assert found.slow == tuple(base.slow[k] for k in order)
    assert found.shares == base.shares


@pytest.mark.parametrize("values", [[1.0] * 6 + [0.0], [1.0] * 6 + [math.nan]])
def test_times_must_be_positive(values: list[float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        find_modes(values)


@pytest.mark.parametrize("count", [6, 12, 13, 20, 27, 28, 40])
def test_so_many_strays_are_rare(count: int) -> None:
    """``fewest_members`` or more of 3 % strays come in at most 5 % of samples; one fewer comes in more."""
    chance = random.Random(count)
    members = fewest_members(count)
    drawn = [sum(chance.random() < 0.03 for _ in range(count)) for _ in range(20_000)]
    assert np.mean([strays >= members for strays in drawn]) <= 0.056
    assert members == 2 or np.mean([strays >= members - 1 for strays in drawn]) > 0.044


@pytest.mark.parametrize("count", [6, 8, 12, 20, 30])
@pytest.mark.parametrize("shape", ["normal", "lognormal", "strays"])
def test_false_alarms_are_rare(count: int, shape: str) -> None:
    chance = np.random.default_rng(count)
    noise = chance.standard_normal((1000, count))
    if shape == "normal":
        launches = np.maximum(0.02, 1 + 0.2 * noise)
    elif shape == "lognormal":
        launches = np.exp(0.2 * noise)
    else:
        stray = chance.random(noise.shape) < 0.03
        launches = np.exp(0.05 * noise + stray * chance.uniform(math.log(1.3), math.log(4), noise.shape))
    found = sum(find_modes(values) is not None for values in launches)
    assert found / 1000 <= 0.02 + 3 * math.sqrt(0.02 / 1000)


@pytest.mark.parametrize(
    ("count", "slow", "least"), [(12, 0.5, 0.72), (12, 0.3, 0.67), (20, 0.5, 0.91), (20, 0.3, 0.86), (30, 0.3, 0.93)]
)
def test_modes_a_ratio_of_1_4_apart_are_found(count: int, slow: float, least: float) -> None:
    chance = np.random.default_rng(count)
    launches = np.exp(0.05 * chance.standard_normal((500, count)))
    launches *= np.where(chance.random((500, count)) < slow, 1.4, 1.0)
    assert np.mean([find_modes(values) is not None for values in launches]) >= least
