"""From stamps to times: values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.measure.ranks import Iterations, combine, joined, well_started

US = 1000  # ns


def stamps(*ranks: list[tuple[int, int]]) -> np.ndarray:
    """``ranks[rank][iteration]`` = (start, end) in microseconds, as stored: ns."""
    return np.array(ranks, dtype=np.int64) * US


def test_the_time_is_from_the_last_start_to_the_last_end() -> None:
    # Iteration 0: starts 100, 102, 101, ends 110, 115, 109. Iteration 1: starts 200, 200, 230, ends 250, 220, 240.
    found = combine(
        stamps([(100, 110), (200, 250)], [(102, 115), (200, 220)], [(101, 109), (230, 240)]),
        ((0, 1, 2),), common_clock=True,
    )  # fmt: skip
    np.testing.assert_allclose(found.time, [13e-6, 20e-6])
    np.testing.assert_allclose(found.first, [15e-6, 50e-6])
    np.testing.assert_allclose(found.skew, [2e-6, 30e-6])
    assert found.last_rank.tolist() == [1, 0]
    assert found.group.tolist() == [0, 0]


def test_without_a_common_clock_the_longest_duration_counts() -> None:
    # Rank 1's clock is a second ahead, and only its durations mean anything.
    found = combine(
        stamps([(100, 110), (200, 250)], [(1000100, 1000115), (1000200, 1000220)]), ((0, 1),), common_clock=False
    )
    np.testing.assert_allclose(found.time, [15e-6, 50e-6])
    np.testing.assert_allclose(found.first, found.time)
    assert found.skew.tolist() == [0.0, 0.0]
    assert found.last_rank.tolist() == [1, 0]


def test_groups_run_at_once_and_the_slowest_counts() -> None:
    # Group (0, 3) takes 10 and 30 us, group (2, 1) takes 12 and 5 us; rank 4 is in none and has zeros.
    found = combine(
        stamps(
            [(100, 110), (200, 230)], [(100, 108), (200, 205)], [(101, 113), (200, 204)], [(100, 109), (190, 220)],
            [(0, 0), (0, 0)],
        ),
        ((0, 3), (2, 1)), common_clock=True,
    )  # fmt: skip
    np.testing.assert_allclose(found.time, [12e-6, 30e-6])
    np.testing.assert_allclose(found.skew, [1e-6, 10e-6])
    assert found.group.tolist() == [1, 0]
    assert found.last_rank.tolist() == [2, 0]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=3, max_size=3),
        min_size=2, max_size=5,
    ),
    st.booleans(),
)  # fmt: skip
def test_what_always_holds(ranks: list[list[tuple[int, int]]], common: bool) -> None:
    made = np.array([[(start, start + length) for start, length in rank] for rank in ranks], dtype=np.int64)
    found = combine(made, (tuple(range(len(ranks))),), common_clock=common)
    assert (found.time >= 0).all()
    assert (found.skew >= 0).all()
    np.testing.assert_allclose(found.first, found.time + found.skew)
    for iteration in range(3):
        ends = made[:, iteration, 1] if common else made[:, iteration, 1] - made[:, iteration, 0]
        assert ends[found.last_rank[iteration]] == ends.max()


def test_joined_is_what_combining_all_at_once_gives() -> None:
    rng = np.random.default_rng(3)
    starts = rng.integers(0, 1000, (4, 9))
    made = np.stack([starts, starts + rng.integers(1, 500, (4, 9))], axis=2)
    groups = ((0, 2), (1, 3))
    whole = combine(made, groups, common_clock=True)
    parts = [combine(made[:, at : at + 3], groups, common_clock=True) for at in (0, 3, 6)]
    for name in ("time", "first", "skew", "last_rank", "group"):
        np.testing.assert_array_equal(getattr(joined(parts), name), getattr(whole, name))


def iterations(time_us: list[float], skew_us: list[float]) -> Iterations:
    time, skew = np.array(time_us) * 1e-6, np.array(skew_us) * 1e-6
    zeros = np.zeros(len(time), dtype=np.int64)
    return Iterations(time=time, first=time + skew, skew=skew, last_rank=zeros, group=zeros, shortest=time)


@pytest.mark.parametrize(
    ("time_us", "skew_us", "keep", "late"),
    [
        # A tenth of the time is allowed: 10 of 100, 1 of 10.
        ([100, 100, 10, 10], [9, 11, 0.9, 1.1], [True, False, True, False], False),
        # However short the operation, the clock's error (0.2 us) is allowed.
        ([0.5, 0.5], [0.19, 0.21], [True, False], False),
        # Half may be dropped and no more: of five, three are kept, those with the least skew, and starts are late.
        ([10] * 5, [0.5, 5, 4, 3, 2], [True, False, False, True, True], True),
        # Exactly half in order is enough, and of an odd number the greater half is needed.
        ([10] * 4, [0, 0, 9, 9], [True, True, False, False], False),
        ([10] * 3, [0, 9, 8], [True, False, True], True),
        ([10] * 2, [9, 9], [True, False], True),
        ([10], [9], [True], True),
        ([10], [0], [True], False),
    ],
)
def test_well_started(time_us: list[float], skew_us: list[float], keep: list[bool], late: bool) -> None:
    kept, said = well_started(iterations(time_us, skew_us), clock_error_s=2e-7)
    assert (kept.tolist(), said) == (keep, late)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=50))
def test_at_least_half_is_kept_and_never_a_worse_start_for_a_better(pairs: list[tuple[float, float]]) -> None:
    found = iterations([time for time, _ in pairs], [skew for _, skew in pairs])
    kept, late = well_started(found, 2e-7)
    assert kept.sum() >= len(pairs) / 2
    good = found.skew <= np.maximum(2e-7, 0.1 * found.time)
    if late:
        assert good.sum() < len(pairs) / 2
        assert found.skew[kept].max() <= found.skew[~kept].min() if (~kept).any() else True
    else:
        np.testing.assert_array_equal(kept, good)
