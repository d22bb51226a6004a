from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commbench.stats.compare import Verdict, compare

QUIET = [1.0, 1.001, 0.999, 1.002, 0.998, 1.0005, 0.9995]
times = st.lists(st.floats(0.5, 2.0), min_size=5, max_size=7)


def test_slower_and_faster() -> None:
    slow = [1.1 * value for value in QUIET]
    found = compare(QUIET, slow)
    assert found.verdict is Verdict.SLOWER
    assert found.ratio == pytest.approx(1.1, rel=1e-3)
    assert found.lo is not None and found.hi is not None
    assert 1.09 < found.lo < 1.1 < found.hi < 1.11
    # 17 of the 3432 ways to label 14 launches on either side are at most 0.5 %.
    assert found.level == pytest.approx(1 - 2 * 17 / 3432)
    assert compare(slow, QUIET).verdict is Verdict.FASTER


def test_same_needs_the_interval_within_the_least_effect() -> None:
    assert compare(QUIET, [1.0005 * value for value in QUIET]).verdict is Verdict.SAME
    noisy = [1.0, 1.03, 0.97, 1.02, 0.98, 1.01, 0.99]
    found = compare(noisy, list(reversed(noisy)))
    assert found.verdict is Verdict.UNCLEAR
    assert found.needed is not None and found.needed > 7
    assert found.reason.endswith(f"about {found.needed} launches of each are needed")


def test_a_difference_that_does_not_count_is_not_slower() -> None:
    found = compare(QUIET, [1.01 * value for value in QUIET])
    assert found.lo is not None and found.lo > 1
    assert found.verdict is Verdict.SAME
    assert compare(QUIET, [1.01 * value for value in QUIET], min_effect=0.005).verdict is Verdict.SLOWER


def test_levels_without_ties_or_noise() -> None:
    # All alike on either side: only the true ratio is not rejected. 5 and 5: 1 of 252 on either side.
    found = compare([1.0] * 5, [2.0] * 5)
    assert (found.lo, found.ratio, found.hi) == pytest.approx((2.0, 2.0, 2.0), rel=1e-5)
    assert found.level == pytest.approx(1 - 2 / 252)
    assert compare([1.0] * 5, [1.0] * 5).verdict is Verdict.SAME


@pytest.mark.parametrize(("a", "b", "needed"), [(3, 3, 5), (4, 4, 5), (1, 9, 5)])
def test_too_few(a: int, b: int, needed: int) -> None:
    found = compare(QUIET[:a], [2 * value for value in (QUIET + QUIET)[:b]])
    assert found.verdict is Verdict.UNCLEAR
    assert (found.lo, found.hi, found.level) == (None, None, None)
    assert found.ratio == pytest.approx(2, rel=0.01)
    assert found.needed == needed
    assert found.reason == f"too few launches for an interval at 99%: about {needed} launches of each are needed"


def test_no_data() -> None:
    assert compare([], QUIET).verdict is Verdict.NODATA
    assert compare([], []).launches == (0, 0)


@pytest.mark.parametrize("values", [[1.0, 0.0], [1.0, -1.0], [1.0, math.nan], [math.inf]])
def test_times_must_be_positive(values: list[float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        compare(values, QUIET)


def test_pairs_must_match() -> None:
    with pytest.raises(ValueError, match="7 and 6 launches do not make pairs"):
        compare(QUIET, QUIET[:6], paired=True)


@settings(max_examples=25)
@given(times, times, st.floats(1e-6, 1e3))
def test_the_unit_cancels_and_turning_round_inverts(a: list[float], b: list[float], unit: float) -> None:
    found, scaled, turned = compare(a, b), compare([unit * x for x in a], [unit * x for x in b]), compare(b, a)
    assert None not in (found.ratio, found.lo, found.hi, scaled.ratio, turned.ratio, turned.lo, turned.hi)
    assert found.lo <= found.ratio <= found.hi  # type: ignore[operator]
    assert scaled.ratio == pytest.approx(found.ratio, rel=1e-3)
    opposite = {Verdict.SLOWER: Verdict.FASTER, Verdict.FASTER: Verdict.SLOWER}
    assert turned.verdict is opposite.get(found.verdict, found.verdict)
    assert 1 / turned.hi == pytest.approx(found.lo, rel=1e-3)  # type: ignore[operator]
    assert 1 / turned.lo == pytest.approx(found.hi, rel=1e-3)  # type: ignore[operator]


def test_a_stray_does_not_hide_a_difference() -> None:
    ten = [*QUIET, 1.0003, 0.9997, 1.0015]
    found = compare([*ten[:9], 5.0], [1.1 * value for value in ten])
    assert found.verdict is Verdict.SLOWER
    assert found.ratio == pytest.approx(1.1, rel=0.005)


def test_pairs_see_through_drift() -> None:
    drift = [1.02**k for k in range(12)]
    a = [d * QUIET[k % 7] for k, d in enumerate(drift)]
    b = [1.05 * d * QUIET[(k + 3) % 7] for k, d in enumerate(drift)]
    assert compare(a, b).verdict is Verdict.UNCLEAR
    found = compare(a, b, paired=True)
    assert found.verdict is Verdict.SLOWER
    assert found.ratio == pytest.approx(1.05, rel=5e-3)
    assert found.level == pytest.approx(1 - 2 * 20 / 4096)
    assert compare(a[:7], b[:7], paired=True).level is None  # 2/128 is above 1 %


def test_many_launches_are_relabelled_at_random() -> None:
    chance = np.random.default_rng(1)
    a, b = np.exp(0.05 * chance.standard_normal((2, 30)))
    found = compare(a, 1.2 * b)
    assert found.verdict is Verdict.SLOWER
    assert found.level == pytest.approx(0.99, abs=1e-3)
    assert compare(a, 1.2 * b) == found  # the same ones every time


def simulated(noise: float, factor: float, runs: int = 120) -> list[Verdict]:
    chance = np.random.default_rng(round(1000 * noise))
    pairs = np.exp(noise * chance.standard_normal((runs, 2, 7)))
    return [compare(a, factor * b).verdict for a, b in pairs]


@pytest.mark.parametrize("noise", [0.01, 0.08])
def test_false_alarms_are_rare(noise: float) -> None:
    alarms = sum(verdict in (Verdict.SLOWER, Verdict.FASTER) for verdict in simulated(noise, 1.0))
    assert alarms <= 5  # of 120; 1.2 are expected at 1 %, more than 5 in two of a thousand


def test_five_percent_slower_is_found() -> None:
    assert sum(verdict is Verdict.SLOWER for verdict in simulated(0.02, 1.05)) >= 98  # of 120; 108 are expected
