"""Lines between clocks: values worked out by hand, exact arithmetic, and exchanges over a made-up network."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.measure.clock_model import ClockModel, Exchanges, Fit, Offsets, fit, offsets, tree

DAY_NS = 86_400 * 10**9
# Clocks that were started months apart, read within days of the reference, with drifts far beyond any crystal's.
uptimes = st.integers(0, 400 * DAY_NS)
near = st.integers(-3 * DAY_NS, 3 * DAY_NS)
drifts = st.floats(-1e-3, 1e-3)


def line(reference_ns: int, offset_ns: int, slope: float) -> ClockModel:
    return ClockModel(reference_ns=reference_ns, offset_ns=offset_ns, slope=slope)


# -- models ----------------------------------------------------------------------------------------


def test_a_line_by_hand() -> None:
    # At 1000 s of its own the clock is 5 s ahead, and it gains 20 ppm: 1000 s later 20 ms more.
    model = line(1000 * 10**9, 5 * 10**9, 2e-5)
    assert int(model.to_target(1000 * 10**9)) == 995 * 10**9
    assert int(model.to_target(2000 * 10**9)) == 1995 * 10**9 - 20_000_000
    assert model.to_local([995 * 10**9, 1995 * 10**9 - 20_000_000]).tolist() == [1000 * 10**9, 2000 * 10**9]


@given(uptimes, uptimes, drifts, near)
def test_huge_offsets_lose_nothing(reference: int, other: int, slope: float, since: int) -> None:
    model = line(reference, reference - other, slope)
    exact = reference + since - (reference - other) - Fraction(slope) * since
    assert abs(int(model.to_target(reference + since)) - exact) <= 1
    assert abs(int(model.to_local(model.to_target(reference + since))) - (reference + since)) <= 1


def test_lines_merge_as_in_hca3() -> None:
    # With both references at zero: slope s1 + s2 - s1 s2, intercept i1 + i2 - i2 s1 (1: the parent's, 2: the child's).
    s1, i1, s2, i2 = 0.25, 4_000, 0.5, 1_000
    merged = line(0, i2, s2).then(line(0, i1, s1))
    assert merged == line(0, i1 + i2 - 250, 0.25 + 0.5 - 0.125)


@given(uptimes, uptimes, uptimes, drifts, drifts, near, near)
def test_a_merged_line_goes_from_the_child_to_the_parents_target(
    child: int, parent: int, root: int, slope: float, parents_slope: float, since: int, aged: int
) -> None:
    first, second = line(child, child - parent, slope), line(parent + aged, parent - root, parents_slope)
    both = first.then(second)
    exact = second.to_target(first.to_target(child + since))
    # Rounded once instead of twice, and s1 s2 in floating point.
    assert abs(int(both.to_target(child + since)) - int(exact)) <= 3


# -- offsets ---------------------------------------------------------------------------------------


def exchanges(*rows: tuple[int, int, int, int]) -> Exchanges:
    return Exchanges(*np.array(rows, dtype=np.int64).T)


def test_an_offset_is_bounded_by_the_fastest_exchanges() -> None:
    # Child - parent is between sent - answered and received - answered: [-60, 40], [-45, 60], and [-500, 1000], which is
    # too slow to count though it would not matter; the middle of [-45, 40] rounds to -2.
    found = offsets(exchanges((1000, 1060, 1100, 0), (2000, 2045, 2105, 0), (3000, 3500, 4500, 0)))
    assert [column.tolist() for column in found] == [[1050], [-2], [100]]


def test_each_group_has_an_offset_of_its_own() -> None:
    far = 200 * DAY_NS
    found = offsets(exchanges((far, 50, far + 100, 3), (far + 500, 540, far + 600, 3), (far + 900, 950, far + 1000, 7)))
    # [far - 50, far + 50] and [far - 40, far + 60] leave [far - 40, far + 50].
    assert [column.tolist() for column in found] == [[far + 50, far + 950], [far + 5, far], [100, 100]]


def test_drift_within_a_group_is_taken_out() -> None:
    # 1000 ppm: 10 us later the offset is 10 ns more. Both exchanges say exactly that, so that the bounds agree.
    rows = ((0, 50, 100, 0), (10_000, 10_040, 10_100, 0))
    assert offsets(exchanges(*rows), slope=1e-3).offset.tolist() == [0]
    assert offsets(exchanges(*rows)).offset.tolist() == [5]


# -- fits ------------------------------------------------------------------------------------------


def network(
    rng: np.random.Generator, model: ClockModel, starts_ns: np.ndarray, *, least_ns: float = 5e3, noise_ns: float = 1e3
) -> Offsets:
    """What a clock that goes as ``model`` finds in groups of five exchanges, begun at these times of its own: each way
    takes the least time and an exponential delay."""
    rows = []
    for group, start in enumerate(starts_ns.tolist()):
        for number in range(5):
            sent = start + 40_000 * number
            there, back = least_ns + rng.exponential(noise_ns, 2)
            answered = int(model.to_target(sent)) + round(there)
            rows.append((sent, answered, int(model.to_local(answered)) + round(back), group))
    return offsets(exchanges(*rows), slope=0.0)


def every(seconds: float, count: int, first: int) -> np.ndarray:
    return first + (np.arange(count) * seconds * 1e9).astype(np.int64)


@pytest.mark.parametrize("seed", range(20))
def test_a_fit_is_as_near_the_truth_as_it_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    began = int(rng.integers(0, 400 * DAY_NS))
    truth = line(began, began - int(rng.integers(0, 400 * DAY_NS)), float(rng.uniform(-5e-5, 5e-5)))
    known = network(rng, truth, every(5e-3, 40, began))
    found = fit(known)
    assert abs(found.model.slope - truth.slope) <= found.drift_error < 2e-5
    assert found.error_s < 5e-6
    for later_s in (0, 1, 5):
        at = int(known.at[-1]) + later_s * 10**9
        off_s = abs(int(found.model.to_target(at) - truth.to_target(at))) * 1e-9
        assert off_s <= found.error_at(at)
    # A few offsets more after five seconds tell the drift ten times as well.
    again = known.followed_by(network(rng, truth, every(1e-3, 5, began + 5 * 10**9)))
    longer = fit(again)
    assert longer.drift_error < found.drift_error / 5
    at = int(again.at[-1]) + 5 * 10**9
    assert abs(int(longer.model.to_target(at) - truth.to_target(at))) * 1e-9 <= longer.error_at(at) < 1e-5


def test_a_fit_against_the_parents_target_is_the_fit_against_the_parent_merged() -> None:
    rng = np.random.default_rng(5)
    at = every(5e-3, 40, 7 * DAY_NS)
    parents = line(at[3], 2 * DAY_NS, -3e-5)
    against_parent = Offsets(at, DAY_NS + rng.integers(-900, 900, 40) + (at - at[0]) // 25_000, np.full(40, 9_000))
    target = parents.to_target(at - against_parent.offset)
    direct = fit(Offsets(at, at - target, against_parent.round_trip)).model
    merged = fit(against_parent).model.then(parents)
    assert merged.slope == pytest.approx(direct.slope, abs=5e-9)  # whole ns over 0.2 s
    np.testing.assert_allclose(merged.to_target(at) - direct.to_target(at), 0, atol=2)


def test_slow_exchanges_do_not_pull_the_line() -> None:
    rng = np.random.default_rng(2)
    truth = line(0, DAY_NS, 1e-5)
    known = network(rng, truth, every(5e-3, 40, 0), noise_ns=100)
    # Half of them were held up by a millisecond on the way there, which makes the parent answer late.
    late = np.arange(40) % 2 == 0
    held = Offsets(known.at, known.offset - 500_000 * late, known.round_trip + 1_000_000 * late)
    assert abs(int(fit(held).model.to_target(10**9) - truth.to_target(10**9))) < 2_000
    # Where the newest are all held up, older ones put the line where it belongs.
    late = np.arange(40) >= 30
    held = Offsets(known.at, known.offset - 500_000 * late, known.round_trip + 1_000_000 * late)
    found = fit(held)
    assert found.model.reference_ns == held.at[29]
    assert abs(int(found.model.to_target(10**9) - truth.to_target(10**9))) < 2_000


def test_an_error_is_never_more_than_half_of_the_round_trip() -> None:
    wild = Offsets(every(5e-3, 40, 0), np.arange(40) % 3 * 40_000, np.full(40, 10_000))
    assert fit(wild).error_s == pytest.approx(5e-6)


# -- has the clock left its line? --------------------------------------------------------------------


@pytest.fixture
def known() -> tuple[Fit, ClockModel]:
    truth = line(0, 10**9, 2e-5)
    return fit(network(np.random.default_rng(1), truth, every(5e-3, 40, 0))), truth


@pytest.mark.parametrize(
    ("moved_ns", "held_up_ns", "says"),
    [(0, 0, False), (1_000, 0, False), (40_000, 0, True), (-40_000, 0, True), (40_000, 100_000, False)],
)
def test_a_clock_that_was_set(known: tuple[Fit, ClockModel], moved_ns: int, held_up_ns: int, says: bool) -> None:
    """More than both can be wrong: but exchanges that were held up by 100 us may be 50 us wrong by themselves."""
    found, truth = known
    moved = line(0, truth.offset_ns + moved_ns, truth.slope)
    after = network(np.random.default_rng(3), moved, every(1e-3, 5, 10**9))
    assert found.contradicts(after._replace(round_trip=after.round_trip + held_up_ns)) is says


# -- who teaches whom --------------------------------------------------------------------------------


@given(st.integers(1, 300))
def test_a_tree_teaches_everyone_once_in_the_fewest_rounds(count: int) -> None:
    rounds = tree(count)
    assert len(rounds) == ceil(log2(count))
    taught = {0}
    for pairs in rounds:
        busy = [rank for pair in pairs for rank in pair]
        assert len(set(busy)) == len(busy)
        assert {parent for parent, _ in pairs} <= taught
        assert not {child for _, child in pairs} & taught
        taught |= {child for _, child in pairs}
    assert taught == set(range(count))


def test_the_tree_of_five() -> None:
    assert tree(5) == (((0, 1),), ((0, 2), (1, 3)), ((0, 4),))
