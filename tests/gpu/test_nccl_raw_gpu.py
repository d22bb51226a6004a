"""The nccl_raw backend on real GPUs: one rank a GPU, or two ranks on the only one, where nothing but the data counts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import commbench
from commbench.collectives import COLLECTIVES

if importlib.util.find_spec("cupy") is None:
    pytest.skip("cupy is not installed: pip install 'commbench[cuda13]'", allow_module_level=True)

import cupy

GPUS: int
try:
    GPUS = cupy.cuda.runtime.getDeviceCount()
except cupy.cuda.runtime.CUDARuntimeError as error:
    pytest.skip(f"cupy sees no GPU: {error}", allow_module_level=True)
RANKS = max(2, GPUS)
needs_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs: ranks that share one hinder one another")


def run(tmp_path: Path, *options: str) -> tuple[int, pd.DataFrame, str]:
    # NCCL's user guide: two ranks fit on a GPU, if they take few of its multiprocessors.
    sharing = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"} if GPUS < 2 else {}
    done = subprocess.run(
        [sys.executable, "-m", "commbench", "run", "--backend", "nccl_raw", "--ranks", str(RANKS), "--out",
         str(tmp_path), "--iters", "20", *options],
        check=False, capture_output=True, text=True, timeout=170, env={**os.environ, **sharing},
    )  # fmt: skip
    text = done.stdout + done.stderr
    assert list(tmp_path.rglob("points.jsonl")), text
    return done.returncode, commbench.load(tmp_path), text


def check(code: int, frame: pd.DataFrame, text: str) -> None:
    assert code == 0, text
    assert frame["status"].eq("ok").all(), text + frame[["collective", "status", "reason"]].to_string()
    checked = frame["collective"] != "barrier"
    assert (frame["wrong"][checked] == 0).all() and (frame["verified"][checked] > 0).all(), text
    assert (frame["time_s"] > 0).all(), text
    assert frame["tainted"].notna().eq(GPUS < 2).all(), text


@pytest.mark.parametrize("placement", ["out", "in"])
def test_every_collective(tmp_path: Path, placement: str) -> None:
    names = [name for name, spec in COLLECTIVES.items() if placement == "out" or spec.in_place]
    check(*run(tmp_path, "--collective", ",".join(names), "--placement", placement, "--sizes", "1K,1M"))


def test_every_type_and_op(tmp_path: Path) -> None:
    code, frame, text = run(
        tmp_path, "--collective", "all_reduce,all_to_all", "--dtype", "all", "--op", "sum,prod,min,max,avg", "--sizes", "4K",
        "--timing", "isolated",
    )  # fmt: skip
    float8 = frame["dtype"].str.startswith("float8") & frame["reduce_op"].notna()
    check(code, frame[~float8], text)
    assert set(frame["status"][float8]) <= {"ok", "skipped"}, text


def test_a_captured_graph_moves_the_same_data(tmp_path: Path) -> None:
    names = "all_reduce,all_gather,all_to_all,send_recv,barrier"
    check(*run(tmp_path, "--collective", names, "--execution", "graph", "--sizes", "1K,1M"))


def test_messages_and_what_is_made_of_them(tmp_path: Path) -> None:
    code, frame, text = run(
        tmp_path, "--collective", "all_reduce", "--algorithm", "own:ring,own:recursive_doubling", "--sizes", "1K,1M"
    )
    check(code, frame, text)


def test_grouped_sends_and_receives(tmp_path: Path) -> None:
    check(*run(tmp_path, "--collective", "all_to_all,gather,scatter", "--algorithm", "grouped", "--sizes", "64K"))


@pytest.mark.parametrize("kind", ["registered", "symmetric"])
def test_buffers_that_nccl_knows(tmp_path: Path, kind: str) -> None:
    """Windows are refused where ranks cannot map one another's memory, as two ranks on one GPU may not."""
    code, frame, text = run(
        tmp_path, "--collective", "all_reduce,all_gather,reduce_scatter", "--buffers", kind, "--placement", "out,in",
        "--sizes", "1K,1M",
    )  # fmt: skip
    if kind == "symmetric" and frame["status"].eq("skipped").all():
        assert frame["reason"].notna().all(), text
        pytest.skip(str(frame["reason"].iloc[0]))
    check(code, frame, text)
    assert set(frame["buffers"]) == {kind}


@needs_gpus
def test_times_are_those_of_the_device(tmp_path: Path) -> None:
    """No figure of any machine: what must hold on all. 256 times the data cannot take less than 4 times as long."""
    code, frame, text = run(
        tmp_path, "--collective", "all_reduce", "--sizes", "1M,256M", "--execution", "eager,graph", "--iters", "50"
    )
    check(code, frame, text)
    assert frame["start"][frame["timing"] == "isolated"].eq("stream").all(), text
    for _, curve in frame.groupby(["timing", "execution"]):
        small, large = curve.sort_values("bytes")["time_s"]
        assert large > 4 * small, text
    large = frame[(frame["bytes"] == 256 << 20) & (frame["timing"] == "streamed")].set_index("execution")["time_s"]
    assert large["graph"] == pytest.approx(large["eager"], rel=0.25), text
