"""The nccl backend on real GPUs: as many ranks as there are GPUs, one each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

import commbench
from commbench.collectives import COLLECTIVES


def run(tmp_path: Path, *options: str, ranks: int | None = None) -> tuple[int, pd.DataFrame, str]:
    ranks = ranks or torch.cuda.device_count()
    done = subprocess.run(
        [sys.executable, "-m", "commbench", "run", "--backend", "nccl", "--ranks", str(ranks), "--out", str(tmp_path),
         "--sizes", "1K,1M,64M", "--iters", "40", *options],
        check=False, capture_output=True, text=True, timeout=170, env=dict(os.environ),
    )  # fmt: skip
    text = done.stdout + done.stderr
    assert list(tmp_path.rglob("points.jsonl")), text
    return done.returncode, commbench.load(tmp_path), text


def check(code: int, frame: pd.DataFrame, text: str) -> None:
    """Every case is measured and right; with one GPU every case is skipped, and says why."""
    assert code == 0, text
    if torch.cuda.device_count() == 1:
        assert frame["status"].eq("skipped").all(), text
        assert frame["reason"].eq("a world group of one rank has nobody to talk to").all(), text
        return
    assert frame["status"].eq("ok").all(), text
    assert frame["wrong"].eq(0).all(), text
    assert (frame["verified"] > 0)[frame["collective"] != "barrier"].all(), text
    assert (frame["time_s"] > 0).all(), text
    assert frame["note"].str.contains("timed by the host's clock").all(), text


@pytest.mark.parametrize("placement", ["out", "in"])
def test_every_collective(tmp_path: Path, placement: str) -> None:
    names = [name for name, spec in COLLECTIVES.items() if placement == "out" or spec.in_place]
    check(*run(tmp_path, "--collective", ",".join(names), "--placement", placement))


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "avg"])
def test_every_type_that_nccl_has(tmp_path: Path, op: str) -> None:
    dtypes = "float64,float32,float16,bfloat16,int8,uint8,int32,int64"
    check(*run(tmp_path, "--collective", "all_reduce,reduce_scatter", "--dtype", dtypes, "--op", op, "--sizes", "1M"))


def test_float8_is_reduced_or_skipped_by_compute_capability(tmp_path: Path) -> None:
    if torch.cuda.device_count() == 1:
        pytest.skip("needs two GPUs")
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


def test_points_hold_what_the_tuner_expects(tmp_path: Path) -> None:
    if torch.cuda.device_count() == 1:
        pytest.skip("needs two GPUs")
    code, frame, text = run(tmp_path, "--collective", "all_reduce,all_to_all")
    check(code, frame, text)
    assert "nccl graphs" not in frame["backend_settings"].iloc[0], text
    modelled = frame["collective"] == "all_reduce"
    assert (frame["nccl_estimate_s"][modelled] > 0).all(), text
    assert frame["nccl_estimate_s"][~modelled].isna().all(), text
