"""Algorithms that Open MPI is told to use: right data, and read back from the library itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import commbench
from commbench.backends.forcing import names

pytestmark = pytest.mark.mpi

COMMBENCH = (sys.executable, "-m", "commbench", "run")
QUICK = ("--iters", "3", "--timing", "isolated")


def call(*command: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )  # fmt: skip


def run(out: Path, *options: str, **environment: str) -> pd.DataFrame:
    """The points of a run that ends well."""
    done = call(*COMMBENCH, *options, *QUICK, "--out", str(out), **environment)
    assert done.returncode == 0, done.stderr
    return commbench.load(out)


def told(point: dict[str, object], operation: str) -> object:
    settings = point["backend_settings"]
    assert isinstance(settings, dict)
    assert settings["coll_tuned_use_dynamic_rules"] == "true"
    return settings[f"coll_tuned_{operation}_algorithm"]


@pytest.mark.parametrize("ranks", [3, 4])
def test_every_all_reduce_is_right_and_read_back(tmp_path: Path, ranks: int) -> None:
    every = names("mpi", "all_reduce")
    frame = run(
        tmp_path, "--backend", "mpi", "--ranks", str(ranks), "--collective", "all_reduce", "--sizes", "8,100000",
        "--algorithm", ",".join(("library", *every)),
    )  # fmt: skip
    assert frame["status"].eq("ok").all(), frame["reason"].tolist()
    assert frame["wrong"].eq(0).all()
    assert frame["verified"].gt(0).all()
    forced = frame[frame["algorithm"] != "library"]
    assert [told(point, "allreduce") for point in forced.to_dict("records")] == forced["algorithm"].tolist()
    assert set(forced["algorithm"]) == set(every)
    assert not any(
        "coll_tuned_priority" in one for one in frame.loc[frame["algorithm"] == "library", "backend_settings"]
    )
    # One set of processes each, and links measured once for all.
    assert frame.groupby("algorithm")["launch"].nunique().eq(1).all()
    assert frame["launch"].nunique() == 1 + len(every)
    assert frame["calibration_id"].nunique() == 1
    big = frame[frame["bytes"] == 100000].set_index("algorithm")
    known = {"recursive_doubling", "ring", "segmented_ring"} | ({"rabenseifner"} if ranks == 4 else set())
    assert set(big.index[big["predicted_s"].notna()]) == known


def test_a_name_of_one_backend_and_collective_is_skipped_by_the_others(tmp_path: Path, links_file: Path) -> None:
    frame = run(
        tmp_path, "--backend", "gloo,mpi", "--collective", "all_gather,barrier", "--sizes", "4K",
        "--algorithm", "ring,two_proc", "--calibration", str(links_file),
    )  # fmt: skip
    found = {(p["backend"], p["collective"], p["algorithm"]): p["reason"] or p["status"] for p in frame.fillna({"reason": ""}).to_dict("records")}  # fmt: skip
    gloo = "gloo cannot be told which algorithm to use"
    assert found == {
        ("gloo", "all_gather", "ring"): gloo, ("gloo", "all_gather", "two_proc"): gloo,
        ("gloo", "barrier", "ring"): gloo, ("gloo", "barrier", "two_proc"): gloo,
        ("mpi", "all_gather", "ring"): "ok", ("mpi", "all_gather", "two_proc"): "ok",
        ("mpi", "barrier", "ring"): "mpi has no 'ring' for barrier", ("mpi", "barrier", "two_proc"): "ok",
    }  # fmt: skip


def test_what_open_mpi_does_not_take_is_not_measured(tmp_path: Path, links_file: Path) -> None:
    frame = run(
        tmp_path, "--backend", "mpi", "--collective", "all_reduce", "--sizes", "4K", "--algorithm", "ring",
        "--calibration", str(links_file), OMPI_MCA_coll="^tuned",
    )  # fmt: skip
    (point,) = frame.to_dict("records")
    assert (point["status"], point["reason"]) == (
        "skipped",
        "asked for 'ring', but this Open MPI has no coll_tuned (coll is '^tuned'), or does not tell its settings",
    )


def test_under_mpirun_one_algorithm_a_run(tmp_path: Path) -> None:
    """There MPI has been started, to meet, before anybody knows which algorithm it shall use."""
    mpirun = (str(Path(sys.executable).with_name("mpirun")), "--map-by", ":OVERSUBSCRIBE", "-n", "2")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    options = ("--backend", "mpi", "--collective", "all_reduce", "--sizes", "4K", *QUICK, "--out", str(tmp_path))
    done = call(*mpirun, *COMMBENCH, *options, "--algorithm", "rabenseifner", **root)
    assert done.returncode == 0, done.stderr
    (point,) = commbench.load(tmp_path).to_dict("records")
    assert point["status"] == "ok"
    assert told(point, "allreduce") == "rabenseifner"
    done = call(*mpirun, *COMMBENCH, *options, "--algorithm", "library,rabenseifner", **root)
    assert done.returncode == 2
    assert "commbench: error: algorithm 'rabenseifner' needs ranks of its own" in done.stderr
