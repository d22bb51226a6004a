"""MPI timed by the compiled loop: the data are right for every call, and without it the points say what Python adds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import commbench
from commbench.collectives import COLLECTIVES

pytestmark = pytest.mark.mpi


def run(out: Path, links: Path, *options: str, **variables: str) -> pd.DataFrame:
    done = subprocess.run(
        [sys.executable, "-m", "commbench", "run", "--backend", "mpi", *options, "--calibration", str(links), "--out",
         str(out)], check=False, capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL, env={**os.environ, **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return commbench.load(out)


def loops(frame: pd.DataFrame) -> set[str]:
    return {settings["loop"] for settings in frame["backend_settings"]}


def test_every_collective_in_and_out_of_place_is_right(tmp_path: Path, links_file: Path) -> None:
    frame = run(
        tmp_path, links_file, "--collective", "all", "--placement", "out,in", "--sizes", "24,12K", "--ranks", "3", "--root", "1",
        "--dtype", "float32,bfloat16", "--op", "sum", "--iters", "6",
    )  # fmt: skip
    assert loops(frame) == {"compiled"}
    ok = frame[frame["status"] == "ok"]
    # Ten collectives out of place and eight in place, moved or reduced; MPI adds no bfloat16.
    assert set(ok["collective"]) == set(COLLECTIVES)
    assert ok["wrong"].eq(0).all()
    assert ok.loc[ok["collective"] != "barrier", "verified"].gt(0).all()
    told = frame.loc[frame["status"] != "ok", "reason"]
    assert told.str.contains("no in-place form|no bfloat16 to reduce|less than one").all(), set(told)
    isolated = ok[ok["timing"] == "isolated"]
    assert isolated["samples"].ge(3).all()
    # Isolated operations are stamped one by one, and some take no longer than a few readings of the clock.
    assert not ok.loc[(ok["bytes"] > 0) & (ok["timing"] == "streamed"), "host_bound"].any()


def test_own_algorithms_run_as_programs(tmp_path: Path, links_file: Path) -> None:
    frame = run(
        tmp_path, links_file, "--collective", "all_reduce,all_gather,reduce_scatter", "--algorithm",
        "own:ring,own:recursive_doubling", "--sizes", "64,300K", "--ranks", "3", "--op", "sum,max",
        "--placement", "out,in", "--iters", "4",
    )  # fmt: skip
    ok = frame[frame["status"] == "ok"]
    assert len(ok) > 40
    assert ok["wrong"].eq(0).all()
    assert ok["verified"].gt(0).all()
    assert loops(ok) == {"compiled"}


def test_without_it_the_points_tell_what_python_adds(tmp_path: Path, links_file: Path) -> None:
    few = ("--collective", "all_reduce", "--sizes", "8", "--timing", "streamed", "--iters", "2000")
    compiled = run(tmp_path / "compiled", links_file, *few)
    python = run(tmp_path / "python", links_file, *few, COMMBENCH_COMPILED="0")
    assert loops(python) == {"python: COMMBENCH_COMPILED is 0"}
    assert python["wrong"].eq(0).all()
    # An empty operation costs some tens of nanoseconds through the interpreter and a few in the compiled loop.
    assert python["host_s"].iloc[0] > 3 * compiled["host_s"].iloc[0]
    shared = python["host_s"].iloc[0] > 0.05 * python["time_s"].iloc[0]
    assert bool(python["host_bound"].iloc[0]) == shared


def test_without_a_compiler_the_python_loop_serves(tmp_path: Path, links_file: Path) -> None:
    frame = run(
        tmp_path / "out",
        links_file,
        "--collective",
        "all_reduce",
        "--sizes",
        "8",
        "--iters",
        "10",
        XDG_CACHE_HOME="/proc/nowhere",
    )
    (why,) = loops(frame)
    assert why.startswith("python: no cache at /proc/nowhere/commbench/kernels: ")
    assert frame["wrong"].eq(0).all()
