"""Dispatch and combine on real devices: commbench's data path over NCCL, and the libraries that have their own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import commbench

pytestmark = pytest.mark.gpu

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
SHAPE = ["--tokens", "16,128", "--hidden", "7168", "--experts", "64", "--topk", "8", "--iters", "20"]


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def moe(out: Path, *words: str) -> None:
    command = [sys.executable, "-m", "commbench", "moe", "--ranks", str(GPUS), *SHAPE, *words, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    frame = commbench.load(out)
    ok = frame[frame["status"] == "ok"]
    assert len(ok)
    assert (ok["wrong"] == 0).all()
    assert (ok["verified"] > 0).all()


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("mode", ["throughput", "low_latency"])
def test_over_nccl(tmp_path: Path, mode: str) -> None:
    moe(tmp_path, "--backend", "nccl", "--mode", mode, "--dtype", "fp8,bf16")


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_low_latency_in_a_graph(tmp_path: Path) -> None:
    moe(tmp_path, "--backend", "nccl", "--mode", "low_latency", "--execution", "graph", "--timing", "isolated,streamed")


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("backend", "module"), [("deepep", "deep_ep"), ("nccl_ep", "nccl.ep")])
@pytest.mark.parametrize("mode", ["throughput", "low_latency"])
def test_the_libraries_own(tmp_path: Path, backend: str, module: str, mode: str) -> None:
    if not installed(module):
        pytest.skip(f"{module} is not installed")
    moe(tmp_path, "--backend", backend, "--mode", mode, "--dtype", "fp8,bf16", "--counts", "exchanged,known")
