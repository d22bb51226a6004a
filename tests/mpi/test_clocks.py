"""Clocks that are wrong on purpose: what is measured by the common clock is what true clocks say of the same run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commbench
from commbench.launch.heartbeat import read_beats
from commbench.measure.clock import WRONG, local_clock
from commbench.measure.clock_model import ClockModel

pytestmark = pytest.mark.mpi
RANKS = 4
# Seconds apart, and two of them 100 us more with every second.
CLOCKS = {WRONG: "0:1:10,1:-3:50,2:7.5:-50,3:0.25:-20"}


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "commbench", "run", "--ranks", str(RANKS), "--collective", "all_reduce",
            "--timing", "isolated", *options]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """The stamps of all ranks in ns: as stored, of CLOCK_MONOTONIC, and as every rank's own clock read."""

    point: dict[str, Any]
    common: np.ndarray
    true: np.ndarray
    own: np.ndarray


def read_cases(launch: Path) -> list[Case]:
    fits = [json.loads(line) for line in (launch / "clock.jsonl").read_text().splitlines()]
    points = [json.loads(line) for line in (launch / "points.jsonl").read_text().splitlines()]
    since = np.array([fit["at_ns"] for fit in fits])
    found = []
    for number, point in enumerate(points):
        common = np.load(launch / f"samples/{number}.npy")
        held = np.searchsorted(since, common[:, :, 0].min(axis=0), side="right") - 1
        assert held.min() >= 0
        own, true = np.empty_like(common), np.empty_like(common)
        for rank in range(RANKS):
            for iteration, fit in enumerate(held.tolist()):
                own[rank, iteration] = model(fits[fit], rank).to_local(common[rank, iteration])
            true[rank] = local_clock(rank, CLOCKS).true(own[rank])
        found.append(Case(point=point, common=common, true=true, own=own))
    return found


def model(fit: dict[str, Any], rank: int) -> ClockModel:
    told = fit["clocks"][rank]
    return ClockModel(reference_ns=told["reference_ns"], offset_ns=told["offset_ns"], slope=told["slope"])


def time_s(stamps: np.ndarray) -> float:
    return float(np.median(stamps[:, :, 1].max(axis=0) - stamps[:, :, 0].max(axis=0))) * 1e-9


def skew_s(stamps: np.ndarray) -> float:
    return float(np.median(np.ptp(stamps[:, :, 0], axis=0))) * 1e-9


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_wrong_clocks_leave_isolated_times_right(tmp_path: Path, backend: str) -> None:
    done = subprocess.run(
        command("--backend", backend, "--sizes", "256K,4M", "--iters", "40", "--out", str(tmp_path)),
        check=False, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, env={**os.environ, **CLOCKS},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    frame = commbench.load(tmp_path)
    assert frame["start"].eq("clock").all(), frame["note"].tolist()
    assert frame["wrong"].eq(0).all()
    (launch,) = tmp_path.glob("*/*/launches/0")
    clocks = json.loads((launch / "manifest.json").read_text())["clock"][backend]
    assert [clock["ranks"] for clock in clocks["clocks"]] == [[0], [1], [2], [3]]
    assert (clocks["source"], clocks["wrong"]) == ("CLOCK_MONOTONIC", CLOCKS[WRONG])
    assert all(abs(one["off_s"]) < 1e-3 for one in clocks["after"]["clocks"][1:])
    cases = read_cases(launch)
    assert len(cases) == 2
    for case in cases:
        assert time_s(case.common) == pytest.approx(time_s(case.true), rel=0.02)
        allowed_s = case.point["clock_error_s"] + 0.02 * case.point["time_s"]
        assert skew_s(case.common) == pytest.approx(skew_s(case.true), abs=allowed_s)
        assert 0 < case.point["clock_error_s"] <= 0.1 * time_s(case.common)
        assert skew_s(case.own) > 1  # what every rank's clock says, uncorrected
    # Uncorrected, the time would be that of one rank alone: of the one whose clock is furthest ahead.
    assert max(abs(time_s(case.own) / time_s(case.true) - 1) for case in cases) > 0.02


def test_a_rank_that_stops_while_clocks_are_fitted_is_named(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    process = subprocess.Popen(
        command("--backend", "gloo", "--sizes", "64K", "--deadline", "1s", "--out", str(tmp_path)),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, **CLOCKS, "COMMBENCH_HEARTBEATS": str(pages)},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            beat = read_beats(str(pages)).get(3) if pages.exists() else None
            if beat is not None and beat.phase == "synchronising":
                os.kill(beat.pid, signal.SIGSTOP)
                break
            time.sleep(0.005)
        _, errors = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 3, errors
    assert "commbench: rank 3 on " in errors
    assert "while synchronising clocks" in errors
