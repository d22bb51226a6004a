"""Hosts that are one machine: their clocks are the same in truth, so that what is fitted to them can be judged."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import commbench
from commbench.measure.clock import WRONG, local_clock
from commbench.measure.clock_model import ClockModel

Make = Callable[..., Any]


def run(cluster: Any, out: Path, backend: str, wrong: str = "") -> tuple[pd.DataFrame, Path]:
    done = cluster.run(
        ["env", f"{WRONG}={wrong}", sys.executable, "-m", "commbench", "run", "--backend", backend,
         "--collective", "all_reduce", "--sizes", "64K,512K", "--iters", "20", "--out", str(out)]
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (launch,) = out.glob("*/*/launches/0")
    return commbench.load(out), launch


def check_fits(launch: Path, clocks_of: list[list[int]], wrong: str = "") -> None:
    """Every fit, those between cases and the one at the end too, is as near the truth as it says."""
    fits = [json.loads(line) for line in (launch / "clock.jsonl").read_text().splitlines()]
    clocks = json.loads((launch / "manifest.json").read_text())["clock"]
    (clock,) = clocks.values()
    assert len(fits) == clock["fits"] >= 2
    assert {"at_ns": fits[-1]["at_ns"], "clocks": fits[-1]["clocks"]} == clock["after"]
    assert [one["ranks"] for one in clock["clocks"]] == clocks_of
    environment = {WRONG: wrong}
    for fit in fits:
        # The moment, on each rank's clock as it was made wrong: that of rank 0 is the common one.
        true_ns = int(local_clock(0, environment).true(fit["at_ns"]))
        for ranks, told in zip(clocks_of, fit["clocks"], strict=True):
            model = ClockModel(reference_ns=told["reference_ns"], offset_ns=told["offset_ns"], slope=told["slope"])
            found_ns = int(model.to_target(local_clock(ranks[0], environment).read(true_ns)))
            aged_s = (fit["at_ns"] - told["since_ns"]) * 1e-9
            assert abs(found_ns - fit["at_ns"]) * 1e-9 <= told["error_s"] + told["drift_error"] * aged_s + 2e-9


@pytest.mark.parametrize("backend", [pytest.param("mpi", marks=pytest.mark.mpi), "gloo"])
def test_iterations_of_hosts_start_by_the_clock(virtual_cluster: Make, tmp_path: Path, backend: str) -> None:
    frame, launch = run(virtual_cluster(hosts=2, rate="200mbit"), tmp_path, backend)
    assert frame["start"].eq("clock").all(), frame["note"].tolist()
    isolated = frame[frame["timing"] == "isolated"]
    assert (isolated["clock_error_s"] <= 0.1 * isolated["time_s"]).all()
    assert isolated["skew_s"].notna().all()
    assert (isolated["time_first_s"] >= isolated["time_s"]).all()
    check_fits(launch, [[0], [1]])


def test_wrong_clocks_of_hosts_with_two_ranks(virtual_cluster: Make, tmp_path: Path) -> None:
    """The first host's ranks share a clock. On the second one rank's is wrong, which makes it another."""
    wrong = "2:-3:-50"
    frame, launch = run(virtual_cluster(hosts=2, rate="200mbit", ranks_per_host=2), tmp_path, "gloo", wrong)
    assert frame["start"].eq("clock").all(), frame["note"].tolist()
    assert (frame["skew_s"].dropna() < 1).all()  # seconds without correction
    check_fits(launch, [[0, 1], [2], [3]], wrong)
