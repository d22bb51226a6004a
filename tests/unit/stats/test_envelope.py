from __future__ import annotations

import math
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commbench.stats.envelope import Envelope, Line, fit_alpha_beta, fit_envelope
from commbench.stats.summary import FloatArray

SCRIPT = Path(__file__).parents[3] / "scripts" / "envelope_accuracy"


def powers_of_two(count: int, step: int = 1) -> FloatArray:
    """Sizes from 8 B, each 2**step times the one before."""
    return np.array([8.0 * 2.0 ** (step * index) for index in range(count)])


# Switches by hand: (20 - 10) us / (1 - 0.5) ns/B = 20000 B, and (320 - 20) us / (0.5 - 0.1) ns/B = 750000 B.
LINES = ((10e-6, 1e-9), (20e-6, 0.5e-9), (320e-6, 0.1e-9))
SWITCHES = (20e3, 750e3)

SIZES = powers_of_two(30)

time_values = st.floats(min_value=1e-7, max_value=10.0)
size_values = st.one_of(
    st.integers(min_value=0, max_value=34).map(lambda power: 2.0**power),
    st.floats(min_value=1.0, max_value=1e10),
)
sweeps = st.lists(st.tuples(size_values, time_values), min_size=2, max_size=16).filter(
    lambda points: len({size for size, _ in points}) > 1
)
bounded = settings(max_examples=40, deadline=None)


def least_of(lines: tuple[tuple[float, float], ...], sizes: FloatArray) -> FloatArray:
    least: FloatArray = np.min([a + b * sizes for a, b in lines], axis=0)
    return least


def constants(envelope: Envelope) -> list[tuple[float, float]]:
    return [(line.intercept_s, line.seconds_per_byte) for line in envelope.lines]


def misfit(envelope: Envelope, sizes: FloatArray, seconds: FloatArray) -> float:
    return float(np.abs(np.log(envelope.predict(sizes) / seconds)).sum())


def columns(points: list[tuple[float, float]]) -> tuple[FloatArray, FloatArray]:
    sizes, seconds = zip(*points, strict=True)
    return np.array(sizes), np.array(seconds)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_lines_without_noise_are_found_again(count: int) -> None:
    fit = fit_envelope(SIZES, least_of(LINES[:count], SIZES))
    assert constants(fit) == [pytest.approx(line, rel=1e-6) for line in LINES[:count]]
    assert fit.switches == pytest.approx(SWITCHES[: count - 1], rel=1e-5)
    assert fit.p90_error < 1e-6


def test_lines_are_found_again_among_a_thousand_sizes() -> None:
    sizes = np.array(np.geomspace(8, 2**32, 1000), dtype=np.float64)
    fit = fit_envelope(sizes, least_of(LINES, sizes))
    assert constants(fit) == [pytest.approx(line, rel=1e-6) for line in LINES]


# Four lines, of which the middle two are close: with three, one stands for both, within their greatest distance.
def test_no_more_than_three_lines() -> None:
    four = ((10e-6, 1e-9), (20e-6, 0.5e-9), (22e-6, 0.48e-9), (120e-6, 0.1e-9))
    fit = fit_envelope(SIZES, least_of(four, SIZES))
    assert len(fit.lines) == 3
    assert fit.p90_error < 0.02


@pytest.mark.parametrize(("sizes", "true", "found"), [(3, 2, 1), (5, 2, 1), (7, 2, 2), (8, 3, 3)])
def test_a_further_line_needs_sizes_of_its_own(sizes: int, true: int, found: int) -> None:
    at = np.array([10.0**power for power in np.linspace(3, 8, sizes).tolist()])
    seconds = least_of(((10e-6, 4e-9), (40e-6, 0.5e-9), (400e-6, 0.03e-9))[:true], at)
    assert len(fit_envelope(at, seconds).lines) == found
    repeated = fit_envelope(np.repeat(at, 20), np.repeat(seconds, 20))
    assert len(repeated.lines) == found, "measuring the same sizes again tells no more about the shape"


@pytest.mark.parametrize("most", [1, 2, 3])
def test_most_lines_is_kept(most: int) -> None:
    assert len(fit_envelope(SIZES, least_of(LINES, SIZES), most).lines) == most


@pytest.mark.parametrize("factor", [0.1, 0.5, 10.0, 1000.0])
@pytest.mark.parametrize("at", [0, 6, 14, 29])
def test_one_odd_time_does_not_bend_the_curve(at: int, factor: float) -> None:
    seconds = least_of(LINES, SIZES)
    seconds[at] *= factor
    fit = fit_envelope(SIZES, seconds)
    assert constants(fit) == [pytest.approx(line, rel=1e-4) for line in LINES]
    assert fit.median_error < 1e-5


# Twice the time at one of five sizes: errors 0, 0, 0, 0, 1/2. The 90th percentile lies 0.6 of the way between the last.
def test_errors_worked_by_hand() -> None:
    fit = fit_alpha_beta([100, 200, 300, 400, 500], [2e-6, 3e-6, 8e-6, 5e-6, 6e-6])
    assert constants(fit) == [pytest.approx((1e-6, 1e-8), rel=1e-5)]
    assert fit.median_error == pytest.approx(0, abs=1e-5)
    assert fit.p90_error == pytest.approx(0.3, abs=1e-5)


def test_constants_are_never_negative() -> None:
    assert constants(fit_alpha_beta([8, 16, 32], [5e-6, 5e-6, 5e-6])) == [pytest.approx((5e-6, 0.0))]
    assert constants(fit_alpha_beta([8, 16, 32], [9e-6, 5e-6, 2e-6])) == [pytest.approx((5e-6, 0.0), rel=1e-4)]
    assert constants(fit_alpha_beta([1e3, 1e6, 1e9], [1e-6, 1e-3, 1.0])) == [pytest.approx((0.0, 1e-9), abs=1e-12)]
    # Faster than in proportion: 1 us at 1 kB, but 4 us at 2 kB. Of all b m, the middle ratio is b.
    steep = fit_alpha_beta([1e3, 2e3, 4e3], [1e-6, 4e-6, 16e-6])
    assert constants(steep) == [pytest.approx((0.0, 2e-9), rel=1e-4)]


def test_two_points_are_met() -> None:
    assert constants(fit_envelope([1000, 3000], [2e-6, 4e-6])) == [pytest.approx((1e-6, 1e-9), rel=1e-9)]


def test_a_jump_up_is_left_as_misfit_and_reported() -> None:
    sizes = powers_of_two(24)
    seconds = (10e-6 + 1e-10 * sizes) * np.where(sizes >= 2**16, 3, 1)
    fit = fit_envelope(sizes, seconds)
    assert fit.p90_error > 0.2
    assert fit.median_error < 0.05


def test_alpha_beta_is_no_worse_than_any_line_of_a_grid() -> None:
    rng = np.random.default_rng(5)
    sizes = powers_of_two(15, 2)
    for _ in range(5):
        seconds = (20e-6 + 1e-10 * sizes) * np.exp(0.3 * rng.standard_normal(len(sizes)))
        a, b = np.meshgrid(np.geomspace(5e-6, 80e-6, 300), np.geomspace(2e-11, 5e-10, 300))
        errors = np.abs(np.log((a[..., None] + b[..., None] * sizes) / seconds)).sum(axis=-1)
        assert misfit(fit_alpha_beta(sizes, seconds), sizes, seconds) <= errors.min() * (1 + 1e-6)


# The minimum of a sum of absolute errors nearly always goes through as many points as it has constants.
def test_two_lines_are_no_worse_than_any_two_through_points() -> None:
    rng = np.random.default_rng(6)
    sizes = powers_of_two(14, 2)
    for _ in range(5):
        seconds = least_of(LINES[::2], sizes) * np.exp(0.1 * rng.standard_normal(len(sizes)))
        through = []
        for i, j in combinations(range(len(sizes)), 2):
            slope = (seconds[j] - seconds[i]) / (sizes[j] - sizes[i])
            intercept = seconds[i] - slope * sizes[i]
            if slope >= 0 and intercept >= 0:
                through.append((intercept, slope))
        pairs = [np.abs(np.log(least_of(pair, sizes) / seconds)).sum() for pair in combinations(through, 2)]
        fit = fit_envelope(sizes, seconds, most_lines=2)
        assert len(fit.lines) == 2
        assert misfit(fit, sizes, seconds) <= min(pairs) * 1.01


@pytest.mark.parametrize(("count", "points"), [(1, 15), (1, 30), (2, 15), (2, 30), (3, 30)])
def test_noise_seldom_adds_or_hides_a_line(count: int, points: int) -> None:
    lines = ((10e-6, 4e-9), (40e-6, 0.5e-9), (400e-6, 0.03e-9))[:count]
    rng = np.random.default_rng(7)
    sizes = np.array(np.geomspace(64, 2**29, points), dtype=np.float64)
    right = 0
    for _ in range(30):
        seconds = least_of(lines, sizes) * np.exp(0.03 * rng.standard_normal(points))
        right += len(fit_envelope(sizes, seconds).lines) == count
    assert right >= 26


def test_sizes_between_those_fitted_are_predicted_within_the_noise() -> None:
    rng = np.random.default_rng(8)
    seconds = least_of(LINES, SIZES) * np.exp(0.02 * rng.standard_normal(len(SIZES)))
    fit = fit_envelope(SIZES[::2], seconds[::2])
    error = np.abs(fit.predict(SIZES[1::2]) / seconds[1::2] - 1)
    assert np.median(error) < 0.03
    assert np.percentile(error, 90) < 0.06


@bounded
@given(sweeps)
def test_predictions_are_positive_and_never_fall(points: list[tuple[float, float]]) -> None:
    fit = fit_envelope(*columns(points))
    seconds = fit.predict(np.geomspace(1, 1e11, 200).tolist())
    assert (seconds > 0).all()
    assert (np.diff(seconds) >= 0).all()


@bounded
@given(sweeps)
def test_more_lines_never_fit_worse(points: list[tuple[float, float]]) -> None:
    sizes, seconds = columns(points)
    one, two, three = (misfit(fit_envelope(sizes, seconds, most), sizes, seconds) for most in (1, 2, 3))
    assert two <= one * (1 + 1e-6) + 1e-9
    assert three <= two * (1 + 1e-6) + 1e-9


@bounded
@given(sweeps, st.randoms(use_true_random=False))
def test_the_order_of_points_does_not_matter(points: list[tuple[float, float]], random: object) -> None:
    shuffled = points.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert fit_envelope(*columns(shuffled)) == fit_envelope(*columns(points))


# Powers of two scale floating-point numbers exactly.
@bounded
@given(sweeps, st.integers(min_value=-8, max_value=8), st.integers(min_value=-8, max_value=8))
def test_units_do_not_matter(points: list[tuple[float, float]], size_power: int, time_power: int) -> None:
    sizes, seconds = columns(points)
    size_unit, time_unit = 2.0**size_power, 2.0**time_power
    fit, scaled = fit_envelope(sizes, seconds), fit_envelope(sizes * size_unit, seconds * time_unit)
    assert constants(scaled) == [(a * time_unit, b * time_unit / size_unit) for a, b in constants(fit)]
    assert (scaled.median_error, scaled.p90_error) == (fit.median_error, fit.p90_error)


@bounded
@given(sweeps, st.floats(min_value=1.0, max_value=1e11))
def test_the_regime_is_the_lowest_line(points: list[tuple[float, float]], size: float) -> None:
    fit = fit_envelope(*columns(points))
    assert list(fit.switches) == sorted(fit.switches)
    line = fit.lines[fit.regime(size)]
    assert line.intercept_s + line.seconds_per_byte * size == pytest.approx(float(fit.predict(size)), rel=1e-9)


def test_regimes_and_switches() -> None:
    lines = tuple(Line(intercept_s=a, seconds_per_byte=b) for a, b in ((1.0, 4.0), (3.0, 2.0), (9.0, 0.0)))
    envelope = Envelope(lines=lines, median_error=0.0, p90_error=0.0)
    assert envelope.switches == (1.0, 3.0)
    assert [envelope.regime(size) for size in (0, 0.5, 1, 2, 3, 1e9)] == [0, 0, 1, 1, 2, 2]
    assert envelope.predict([0, 1, 2, 3, 4]).tolist() == [1, 5, 7, 9, 9]
    assert envelope.predict(2).shape == ()
    with pytest.raises(ValueError, match="negative or not a number"):
        envelope.predict([1, math.nan])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "finite and not negative"),
        (((1.0, -1.0),), "finite and not negative"),
        (((math.nan, 1.0),), "finite and not negative"),
        (((2.0, 1.0), (1.0, 2.0)), "start higher and rise less"),
        (((1.0, 4.0), (8.0, 2.0), (9.0, 0.0)), "lowest at no size"),
    ],
)
def test_lines_that_make_no_envelope(lines: tuple[tuple[float, float], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Envelope(
            lines=tuple(Line(intercept_s=a, seconds_per_byte=b) for a, b in lines), median_error=0.0, p90_error=0.0
        )


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ([], [], "at least two points, not 0"),
        ([8], [1e-6], "at least two points, not 1"),
        ([8, 8], [1e-6, 2e-6], "two different sizes"),
        ([8, 16], [1e-6], "of one length"),
        ([[8, 16]], [[1e-6, 2e-6]], "of one length"),
        ([0, 16], [1e-6, 2e-6], "a size is not a positive, finite number"),
        ([8, math.inf], [1e-6, 2e-6], "a size is not a positive, finite number"),
        ([8, 16], [1e-6, 0.0], "a time is not a positive, finite number"),
        ([8, 16], [1e-6, -2e-6], "a time is not a positive, finite number"),
        ([8, 16], [1e-6, math.nan], "a time is not a positive, finite number"),
    ],
)
def test_bad_points_are_refused(sizes: list[float], seconds: list[float], message: str) -> None:
    for fit in (fit_envelope, fit_alpha_beta):
        with pytest.raises(ValueError, match=message) as caught:
            fit(sizes, seconds)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("most", [0, 4, -1])
def test_a_count_of_lines_that_cannot_be_had_is_refused(most: int) -> None:
    with pytest.raises(ValueError, match="1 to 3 lines"):
        fit_envelope([8, 16], [1e-6, 2e-6], most)


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_the_accuracy_script_tells_an_envelope_from_a_line(tmp_path: Path) -> None:
    table = tmp_path / "sweeps.csv"
    rows = ["source,hardware,nodes,gpus,collective,bytes,time_us,algbw_GBps,busbw_GBps,note"]
    rows += [
        f"here,box,1,8,all_reduce,{size:.0f},{1e6 * seconds!r},,,"
        for size, seconds in zip(SIZES, least_of(LINES, SIZES).tolist(), strict=True)
    ]
    rows += [
        "here,box,1,8,all_reduce,0,3.0,,,",
        "here,box,1,8,moe_dispatch,,,,150,no times",
        "here,box,1,8,reduce,8,1,,,",
    ]
    table.write_text("\n".join(rows) + "\n")
    done = run_script(str(table))
    assert done.returncode == 0, done.stderr
    overall = done.stdout.splitlines()[-1]
    assert overall.startswith("median of 1 sweeps")
    median, p90, line_median, line_p90 = (float(figure.rstrip("%")) for figure in overall.split()[-4:])
    assert (median, p90) == (0, 0)
    assert line_median > 1
    assert line_p90 > 10


def test_the_accuracy_script_refuses_other_files(tmp_path: Path) -> None:
    table = tmp_path / "other.csv"
    table.write_text("bytes,time_us\n8,1\n")
    for path, message in ((table, "columns are missing"), (tmp_path / "none.csv", "No such file")):
        done = run_script(str(path))
        assert done.returncode == 2
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
