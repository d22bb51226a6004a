"""Launches on this machine: runs that are there, and more where they are too few."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from commbench.stats.launches import median_of_launches
from commbench.stats.modes import find_modes
from commbench.stats.sequence import find_drift, serial_correlation
from commbench.stats.summary import median_ranks
from launchstudy.figure import Figure

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run's launches: by size their medians and means in s, in order."""

    medians: dict[int, list[float]]
    means: dict[int, list[float]]


class Pool:
    """Runs with the same ``words`` for `commbench run` under ``out``: those that are there, and more where that is not
    enough, ``pause_s`` apart. They are told from others by their label."""

    def __init__(self, words: Sequence[str], out: Path, *, pause_s: float = 0.0) -> None:
        self.words = list(words)
        self.out = out
        self.pause_s = pause_s
        self.label = "launch-study " + " ".join(words)

    def runs(self, count: int, launches: int) -> list[Measured]:
        """The first ``count`` runs of ``launches`` or more, oldest first, with their first ``launches``."""
        started, there = time.monotonic(), len(self._stored(launches))
        for number in range(there, count):
            made = number - there
            if made:
                time.sleep(self.pause_s)
            left = f", about {(time.monotonic() - started) / made * (count - number) / 60:.0f} min left" if made else ""
            print(f"     run {number + 1} of {count}, {launches} launches{left}", file=sys.stderr, flush=True)
            self._run(launches)
        return self._stored(launches)[:count]

    def _run(self, launches: int) -> None:
        before = len(self._stored(launches))
        command = [sys.executable, "-m", "commbench", "run", *self.words, "--launches", str(launches)]
        command += ["--label", self.label, "--out", str(self.out)]
        calibrated = [path / "calibration.json" for path in self._paths() if (path / "calibration.json").exists()]
        command += ["--calibration", str(calibrated[0])] if calibrated else []
        done = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if len(self._stored(launches)) == before:
            raise SystemExit(
                f"launch_study: a run ended with {done.returncode} and too few launches: {done.stderr[-800:]}"
            )

    def _paths(self) -> list[Path]:
        manifests = sorted(self.out.glob("*/*/manifest.json"))
        return [path.parent for path in manifests if json.loads(path.read_text()).get("label") == self.label]

    def _stored(self, launches: int) -> list[Measured]:
        read = (_read(path, launches) for path in self._paths() if any(path.rglob("points.jsonl")))
        return [run for run in read if run is not None]


def _read(path: Path, launches: int) -> Measured | None:
    """A run's first launches; None where it has fewer of any size."""
    import commbench

    frame = commbench.load(path)
    frame = frame.sort_values("launch", kind="stable")
    first = frame[frame["launch"].isin(frame["launch"].drop_duplicates().head(launches))]
    ok = first[(first["status"] == "ok") & first["time_s"].notna()]
    sizes = [int(size) for size in frame["bytes"].unique()]
    medians = {size: [float(time_s) for time_s in ok["time_s"][ok["bytes"] == size]] for size in sizes}
    means = {size: [float(time_s) for time_s in ok["time_mean_s"][ok["bytes"] == size]] for size in sizes}
    if {len(values) for values in medians.values()} != {launches}:
        return None
    return Measured(medians=medians, means=means)


def stated(runs: Sequence[Measured]) -> Iterator[Figure | str]:
    """Whether intervals hold the pooled median of all launches: those of the runs as they were, and of runs that have as
    many of the same launches, but spread over the whole time, as ``--spread`` does."""
    launches = len(next(iter(runs[0].medians.values())))
    yield f"\n{len(runs)} runs of {launches} launches: does a run's interval hold the median of all {len(runs) * launches}?"
    chance = np.random.default_rng(1)
    held: list[bool] = []
    held_spread: list[bool] = []
    for size in runs[0].medians:
        by_run = np.array([run.medians[size] for run in runs])
        pooled = float(np.median(by_run))
        intervals = [median_of_launches(values) for values in by_run]
        row = [one.lo <= pooled <= one.hi for one in intervals]
        apart = [median_of_launches(values) for values in by_run.ravel().reshape(launches, -1).T]
        spread = [one.lo <= pooled <= one.hi for one in apart]
        held, held_spread = held + row, held_spread + spread
        width = float(np.median([one.hi - one.lo for one in intervals])) / pooled
        span = float(np.median(np.ptp(by_run, axis=1))) / pooled
        drawn = np.sort(chance.choice(by_run.ravel(), size=(4000, launches)), axis=1)
        ranks = median_ranks(launches)
        at_random = np.mean((drawn[:, ranks.lo - 1] <= pooled) & (pooled <= drawn[:, ranks.hi - 1]))
        yield Figure(what=f"{size} B: share of runs, of launches in a row", found=float(np.mean(row)))
        yield Figure(
            what=f"{size} B: the same launches, spread over the time (drawn at random: {at_random:.3f})",
            found=float(np.mean(spread)),
        )
        yield Figure(
            what=f"{size} B: width of the interval / median; range of the launches {span:.3f}", found=width, most=span
        )
    yield Figure(what="share of runs, all sizes, of launches in a row", found=float(np.mean(held)))
    yield Figure(what="the same launches, spread over the time", found=float(np.mean(held_spread)), least=0.85)
    yield from in_time(runs)


def in_time(runs: Sequence[Measured]) -> Iterator[str]:
    rows = [values for run in runs for values in run.medians.values()]
    correlation = serial_correlation(rows)
    if correlation is not None:
        yield (
            f"     launches in a row, within runs: correlation {correlation.value:.2f} (independent ones: "
            f"{correlation.lo:.2f} to {correlation.hi:.2f}); {correlation.launches} tell as much as {correlation.effective:.1f}"
        )
    whole = [[value for run in runs for value in run.medians[size]] for size in runs[0].medians]
    drift = find_drift(whole)
    if drift is not None:
        yield f"     drift from the first run to the last: {drift.change:+.1%} (p {drift.p:.2g})"


def varied(runs: Sequence[Measured]) -> Iterator[Figure | str]:
    """How much what one run prints varies from run to run."""
    launches = len(next(iter(runs[0].medians.values())))
    yield f"\n{len(runs)} repetitions of {launches} launches: (P90 - P10) / median"
    for size in runs[0].medians:
        medians = np.array([run.medians[size] for run in runs])
        single = spread(np.array([run.means[size] for run in runs]).ravel())
        pooled = float(np.median(medians))
        yield Figure(what=f"{size} B: mean over one launch", found=single)
        for name, values in (("median", np.median(medians, axis=1)), ("mean", medians.mean(axis=1))):
            what = f"{size} B: {name} of {launches} launches' medians"
            yield Figure(
                what=f"{what}: {spread(values):.3f}, as a share of that", found=spread(values) / single, most=0.7
            )
            off = abs(float(np.median(values)) / pooled - 1)
            yield Figure(what=f"{what}: away from the pooled median by", found=off, most=0.1)
        split = find_modes(medians.ravel())
        if split is not None:
            (fast, slow), (share, _) = split.centres, split.shares
            yield f"     {size} B: two modes, {fast * 1e6:.3g} us in {share:.0%} and {slow * 1e6:.3g} us in {1 - share:.0%}"


def spread(values: Array) -> float:
    low, middle, high = np.percentile(values, (10, 50, 90))
    return float((high - low) / middle)
