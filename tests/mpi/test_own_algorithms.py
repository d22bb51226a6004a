"""Whole runs of commbench's own algorithms over real libraries: every one is right, whatever ranks, types and groups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import commbench
from commbench.schedules import ALGORITHMS, HIERARCHICAL

pytestmark = pytest.mark.mpi

EVERY = {(name, f"own:{one}") for name, known in ALGORITHMS.items() for one in known if (name, one) not in HIERARCHICAL}
QUICK = ("--iters", "2", "--timing", "isolated")


def run(out: Path, links: Path, *options: str, timeout: float = 100) -> pd.DataFrame:
    """The points of a run that ends well."""
    done = subprocess.run(
        [sys.executable, "-m", "commbench", "run", *options, "--calibration", str(links), "--out", str(out)], check=False,
        capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*/*")
    return commbench.load(path)


def check(frame: pd.DataFrame) -> None:
    """Measured, right and verified, but for a barrier, which has nothing to verify."""
    assert frame["status"].eq("ok").all(), frame.loc[
        frame["status"] != "ok", ["backend", "collective", "algorithm", "bytes", "status", "reason"]
    ]
    assert frame["wrong"].eq(0).all()
    assert frame.loc[frame["collective"] != "barrier", "verified"].gt(0).all()
    assert frame["time_s"].gt(0).all()


@pytest.mark.parametrize(("ranks", "sizes"), [(2, "16,300K"), (3, "5000"), (4, "300K")])
def test_every_algorithm_of_every_collective_on_both_libraries(
    tmp_path: Path, links_file: Path, ranks: int, sizes: str
) -> None:
    frame = run(
        tmp_path, links_file, "--backend", "gloo,mpi", "--ranks", str(ranks), "--collective", "all", "--algorithm", "own:all",
        "--sizes", sizes, "--root", str(ranks - 1), *QUICK,
    )  # fmt: skip
    layered = frame["algorithm"] == "own:hierarchical"
    assert frame.loc[layered, "reason"].eq("a hierarchical algorithm needs two hosts or more").all()
    frame = frame[~layered]
    check(frame)
    for backend in ("gloo", "mpi"):
        mine = frame[frame["backend"] == backend]
        assert set(zip(mine["collective"], mine["algorithm"], strict=True)) == EVERY
    tree = frame[(frame["algorithm"] == "own:double_binary_tree") & (frame["bytes"] > 256 << 10)]
    assert tree["note"].fillna("").str.contains("in 2 pieces").all()


def test_in_place_with_many_types_ops_and_pieces(tmp_path: Path, links_file: Path) -> None:
    names = "all_reduce,reduce,all_gather"
    frame = run(
        tmp_path, links_file, "--backend", "gloo,mpi", "--ranks", "3", "--collective", names, "--placement", "in",
        "--algorithm", "own:ring/3", "--dtype", "float16,int64,bfloat16", "--op", "max,bxor,avg",
        "--sizes", "10000", *QUICK,
    )  # fmt: skip
    skipped = frame[frame["status"] == "skipped"]
    left = frame[frame["status"] != "skipped"]
    check(left)
    assert set(left["collective"]) == set(names.split(","))
    reasons = set(skipped["reason"])
    assert "messages over MPI are reduced by numpy, which has no bfloat16" in reasons
    assert "messages over gloo are reduced by torch, which has no 'avg' of two float16" in reasons
    assert {("gloo", "bfloat16", "max"), ("gloo", "float16", "max"), ("mpi", "float16", "max")} <= set(
        zip(left["backend"], left["dtype"], left["reduce_op"], strict=True)
    )
    assert not ((left["reduce_op"] == "avg") | ((left["reduce_op"] == "bxor") & (left["dtype"] != "int64"))).any()


def test_streamed_beside_the_library_and_in_a_group(tmp_path: Path, links_file: Path) -> None:
    frame = run(
        tmp_path, links_file, "--backend", "gloo,mpi", "--ranks", "3", "--group", "pair:0-2", "--budget", "3s",
        "--collective", "all_reduce,broadcast,barrier", "--algorithm", "library,own:ring,own:dissemination",
        "--sizes", "8,1M",
    )  # fmt: skip
    lacking = frame["status"] == "skipped"
    assert set(frame.loc[lacking, "reason"].str.partition(":")[0]) == {
        "all_reduce has no dissemination", "broadcast has no dissemination", "barrier has no ring"
    }  # fmt: skip
    check(frame[~lacking])
    assert set(frame.loc[~lacking, "ranks"]) == {2}
    assert set(frame.loc[~lacking, "timing"]) == {"isolated", "streamed"}
    # 2 backends and timings; two collectives of two sizes, two ways each, and a barrier two ways.
    assert (~lacking).sum() == 2 * 2 * (2 * 2 * 2 + 2)
    chain = frame[~lacking & (frame["algorithm"] == "own:ring") & (frame["collective"] == "broadcast")]
    one = "commbench's own broadcast has one buffer: it is always in place"
    assert set(chain.loc[chain["bytes"] == 1 << 20, "note"]) == {f"in 8 pieces; {one}"}
    assert set(chain.loc[chain["bytes"] == 8, "note"]) == {one}


def test_a_dry_run_says_what_cannot_be_done(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "commbench", "run", "--dry-run", "--backend", "gloo", "--collective", "gather,reduce",
         "--algorithm", "own:ring,own:hierarchical", "--sizes", "4K", "--timing", "isolated"],
        check=True, capture_output=True, text=True, timeout=60, cwd=tmp_path,
    )  # fmt: skip
    lines = [line.partition(" out isolated by ")[2] for line in done.stdout.splitlines()]
    assert lines == [
        "own:ring  skipped: gather has no ring: known are own:binomial_tree",
        "own:hierarchical  skipped: gather has no hierarchical: known are own:binomial_tree",
        "own:ring",
        "own:hierarchical  skipped: a hierarchical algorithm needs two hosts or more",
    ]
