"""scripts/launch_study: its simulations, and its figures of runs that are there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from commbench.records import Point

SCRIPT = Path(__file__).parents[3] / "scripts/launch_study"
SETTINGS = "--backend mpi --collective all_reduce --sizes 8 --timing streamed --ranks 2 --bind none"


def study(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False, timeout=120
    )


def store(root: Path, number: int, medians: list[float], label: str = f"launch-study {SETTINGS}") -> None:
    """A run whose launches have these medians, and means that are twice as far from 1."""
    run = root / "2025-01-02" / f"run{number}"
    for launch, time_s in enumerate(medians):
        folder = run / "launches" / str(launch)
        folder.mkdir(parents=True)
        point = Point(
            run_id=run.name, launch=launch, collective="all_reduce", backend="mpi", ranks=2, nodes=1, dtype="float32",
            reduce_op="sum", placement="out", bytes=8, requested_bytes=8, timing="streamed", case_id="c",
            time_s=time_s, time_mean_s=2 * time_s - 1,
        )  # fmt: skip
        (folder / "points.jsonl").write_text(point.to_json() + "\n")
    (run / "manifest.json").write_text(json.dumps({"label": label}))


def lines_with(done: subprocess.CompletedProcess[str], part: str) -> list[str]:
    return [line for line in done.stdout.splitlines() if part in line]


def test_simulations_with_few_samples() -> None:
    done = study("--simulate", "--samples", "0.1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "under 6 launches: 2: 50.00%, 3: 75.00%, 4: 87.50%, 5: 93.75% at most" in done.stdout
    assert len(lines_with(done, "ok ")) == 6
    assert lines_with(done, "normal 10%                 within 5%")[0].split()[4] in ("36", "37", "38")


@pytest.fixture
def three_runs(tmp_path: Path) -> Path:
    # The pooled median of the first six of each is 1.0; the third run lies above it.
    store(tmp_path, 1, [0.9, 1.0, 1.1, 0.95, 1.05, 1.0, 50.0])
    store(tmp_path, 2, [0.8, 0.9, 1.0, 0.9, 1.0, 0.99, 50.0])
    store(tmp_path, 3, [1.2, 1.3, 1.2, 1.1, 1.3, 1.2, 50.0])
    store(tmp_path, 4, [9.0] * 5)  # fewer than six
    store(tmp_path, 5, [9.0] * 6, label="another")
    return tmp_path


def test_which_intervals_hold_the_pooled_median(three_runs: Path) -> None:
    done = study("--runs", "3", "--launches", "6", "--sizes", "8", "--out", str(three_runs))
    assert done.returncode == 0
    assert done.stderr == ""  # nothing was run
    (share,) = lines_with(done, "share of runs, all sizes, of launches in a row")
    assert share.split()[-1] == "0.667"
    # Every third launch makes a run, such as 0.9, 0.95, 0.8, 0.9, 1.2, 1.1: all three hold 1.0.
    (share,) = lines_with(done, "the same launches, spread over the time  ")
    assert share.split()[0] == "ok"
    assert share.split()[-3:] == ["1.000", ">=", "0.85"]
    # Ranges 0.2 of each run, and six launches' interval is their range.
    assert lines_with(done, "width of the interval")[0].split()[-3:] == ["0.200", "<=", "0.2"]


def test_launches_that_are_spread_and_yet_miss(tmp_path: Path) -> None:
    # Every second launch is alike: spread, one run has all of one kind and the other all of the other.
    for number in (1, 2):
        store(tmp_path, number, [1.0, 9.0] * 3)
    done = study("--runs", "2", "--launches", "6", "--sizes", "8", "--out", str(tmp_path))
    assert done.returncode == 1
    assert lines_with(done, "all sizes, of launches in a row")[0].split()[-1] == "1.000"
    assert lines_with(done, "spread over the time  ")[0].split()[-3:] == ["0.000", ">=", "0.85"]


def test_how_much_the_median_of_launches_varies(three_runs: Path) -> None:
    done = study("--repetitions", "3", "--launches", "6", "--sizes", "8", "--out", str(three_runs))
    # Medians of the runs 1.0, 0.945, 1.2: P10 and P90 lie a fifth of the way in from either end: 0.956 and 1.16.
    (line,) = lines_with(done, "median of 6 launches' medians: 0.204, as a share of that")
    single = float(lines_with(done, "mean over one launch")[0].split()[-1])
    assert float(line.split()[-3]) == pytest.approx(0.204 / single, rel=0.01)


def test_it_says_what_to_do() -> None:
    done = study()
    assert done.returncode == 2
    assert "--simulate, --runs N or --repetitions N" in done.stderr
    assert "scripts/launch_study --runs 15 --launches 6" in study("--help").stdout
