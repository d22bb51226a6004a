"""The nccl backend on real GPUs: as many ranks as there are GPUs, one each.

On one GPU two ranks share it where NCCL can (2.30 and later): then nothing but the data counts. With an older NCCL every
case is skipped, since a rank alone has nobody to talk to.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

import commbench
from commbench.backends.nccl import _nccl_version_code
from commbench.collectives import COLLECTIVES

GPUS = torch.cuda.device_count()
VERSION = _nccl_version_code() if GPUS else 0
SHARED = GPUS == 1 and VERSION >= 23000
ALONE = GPUS == 1 and not SHARED
needs_ranks = pytest.mark.skipif(ALONE, reason="one GPU, which this NCCL gives to one rank alone")
needs_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


def run(tmp_path: Path, *options: str) -> tuple[int, pd.DataFrame, str]:
    # NCCL's user guide: two ranks fit on a GPU if they take few of its multiprocessors.
    sharing = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"} if SHARED else {}
    done = subprocess.run(
        [sys.executable, "-m", "commbench", "run", "--backend", "nccl", "--ranks", str(2 if SHARED else GPUS), "--out",
         str(tmp_path), "--sizes", "1K,1M" if SHARED else "1K,1M,64M", "--iters", "20" if SHARED else "40", *options],
        check=False, capture_output=True, text=True, timeout=170, env={**os.environ, **sharing},
    )  # fmt: skip
    text = done.stdout + done.stderr
    assert list(tmp_path.rglob("points.jsonl")), text
    return done.returncode, commbench.load(tmp_path), text


def check(code: int, frame: pd.DataFrame, text: str) -> None:
    """Every case is measured and right; where a rank is alone every case is skipped, and says why."""
    assert code == 0, text
    if ALONE:
        assert frame["status"].eq("skipped").all(), text
        assert frame["reason"].eq("a world group of one rank has nobody to talk to").all(), text
        return
    assert frame["status"].eq("ok").all(), text + frame[["collective", "status", "reason"]].to_string()
    assert frame["wrong"].eq(0).all(), text
    barrier = frame["collective"] == "barrier"
    assert (frame["verified"] > 0)[~barrier].all(), text
    assert (frame["time_s"] > 0).all(), text
    assert frame["start"][~barrier].eq("stream").all(), text
    assert frame["note"][barrier].str.contains("timed by the host's clock").all(), text
    isolated = ~barrier & (frame["timing"] == "isolated")
    # Of each rank's device; the longest is what counts.
    assert (frame["time_shortest_s"] <= frame["time_max_s"])[isolated].all(), text
    assert (frame["host_s"][~barrier] > 0).all(), text
    if SHARED:
        assert frame["tainted"].str.contains("several ranks on one GPU").all(), text


@pytest.mark.parametrize("placement", ["out", "in"])
def test_every_collective(tmp_path: Path, placement: str) -> None:
    names = [name for name, spec in COLLECTIVES.items() if placement == "out" or spec.in_place]
    check(*run(tmp_path, "--collective", ",".join(names), "--placement", placement))


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "avg"])
def test_every_type_that_nccl_has(tmp_path: Path, op: str) -> None:
    dtypes = "float64,float32,float16,bfloat16,int8,uint8,int32,int64"
    check(*run(tmp_path, "--collective", "all_reduce,reduce_scatter", "--dtype", dtypes, "--op", op, "--sizes", "1M"))


@needs_ranks
def test_float8_is_reduced_or_skipped_by_compute_capability(tmp_path: Path) -> None:
    code, frame, text = run(tmp_path, "--dtype", "float8_e4m3fn,float8_e5m2", "--collective", "all_reduce,all_gather")
    assert code == 0, text
    can = all(torch.cuda.get_device_capability(i) >= (9, 0) for i in range(torch.cuda.device_count()))
    reduced = frame[frame["collective"] == "all_reduce"]
    assert reduced["status"].eq("ok" if can else "skipped").all(), text
    assert set(frame["status"]) <= {"ok", "skipped"}, text


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "commbench", "run", "--backend", "nccl", "--out", str(tmp_path),
         "--ranks", str(torch.cuda.device_count() + 1)],
        check=False, capture_output=True, text=True, timeout=120, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 3
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("commbench: "))
    assert "start at most one rank a GPU" in line


@needs_gpus
def test_points_hold_what_the_tuner_expects(tmp_path: Path) -> None:
    code, frame, text = run(tmp_path, "--collective", "all_reduce,all_to_all")
    check(code, frame, text)
    assert "nccl graphs" not in frame["backend_settings"].iloc[0], text
    modelled = frame["collective"] == "all_reduce"
    assert (frame["nccl_estimate_s"][modelled] > 0).all(), text
    assert frame["nccl_estimate_s"][~modelled].isna().all(), text


@needs_ranks
def test_graphs_are_measured_or_skipped_with_a_reason(tmp_path: Path) -> None:
    names = [name for name in COLLECTIVES if name != "barrier"]
    code, frame, text = run(tmp_path, "--collective", ",".join(names), "--execution", "eager,graph")
    check(code, frame, text)
    graphs = frame[frame["execution"] == "graph"].set_index(["case_id"])
    assert len(graphs) * 2 == len(frame), text
    if not SHARED:
        # A launch of many operations needs less of the host for each.
        small = (
            frame[(frame["bytes"] == 1024) & (frame["timing"] == "streamed")].groupby("execution")["host_s"].median()
        )
        assert small["graph"] < small["eager"], text
        assert not frame["host_bound"][(frame["execution"] == "graph") & (frame["timing"] == "streamed")].any(), text


@needs_ranks
def test_own_algorithms_on_the_device(tmp_path: Path) -> None:
    options = ("--algorithm", "own:ring", "--collective", "all_reduce", "--execution", "eager,graph", "--sizes", "64K")
    check(*run(tmp_path, *options))


@needs_ranks
@pytest.mark.skipif(VERSION < 22703, reason="this NCCL's log cannot be turned on for one call")
def test_what_nccl_took_is_known_of_every_collective_that_it_chooses_for(tmp_path: Path) -> None:
    names = "all_reduce,all_gather,reduce_scatter,broadcast,all_to_all"
    code, frame, text = run(tmp_path, "--collective", names, "--execution", "eager,graph")
    check(code, frame, text)
    chosen = frame["collective"] != "all_to_all"
    for column in ("used_algorithm", "protocol", "channels"):
        assert frame[column][chosen].notna().all(), text
        assert frame[column][~chosen].isna().all(), text
    assert frame["channels"][chosen].between(1, 64).all(), text
    assert not frame["backend_settings"].map(lambda settings: "NCCL_DEBUG" in settings).any(), text


@needs_ranks
def test_a_forced_algorithm_is_read_back(tmp_path: Path) -> None:
    code, frame, text = run(tmp_path, "--algorithm", "ring:simple", "--collective", "all_reduce,all_gather")
    check(code, frame, text)
    assert frame["used_algorithm"].eq("ring").all() and frame["protocol"].eq("simple").all(), text
