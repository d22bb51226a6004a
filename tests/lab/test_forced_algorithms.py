"""What hosts send is what the schedules of forced and fixed algorithms send: they are what the library carried out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import commbench

SIZE = 1 << 20


def run(cluster: Any, out: Path, *options: str) -> pd.DataFrame:
    done = cluster.run(
        [sys.executable, "-m", "commbench", "run", *options, "--sizes", str(SIZE), "--timing", "isolated",
         "--iters", "4", "--out", str(out)],
        timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    frame = commbench.load(out)
    assert frame["status"].eq("ok").all(), frame["reason"].tolist()
    assert frame["wrong"].eq(0).all()
    return frame


# What all four hosts send of one message. Halving and doubling: 2(n-1)/n from each, as the ring; doubling: log2 n.
@pytest.mark.mpi
@pytest.mark.parametrize(("algorithm", "messages"), [("ring", 6), ("recursive_doubling", 8), ("rabenseifner", 6)])
def test_open_mpi_sends_what_the_forced_algorithm_does(
    virtual_cluster: Callable[..., Any], tmp_path: Path, algorithm: str, messages: int
) -> None:
    cluster = virtual_cluster(hosts=4, rate="200mbit")
    frame = run(cluster, tmp_path, "--backend", "mpi", "--collective", "all_reduce", "--algorithm", algorithm)
    (point,) = frame.to_dict("records")
    assert point["backend_settings"]["coll_tuned_allreduce_algorithm"] == algorithm
    assert point["schedule_bytes"] == messages * SIZE
    assert 1.00 <= point["wire_bytes"] / point["schedule_bytes"] <= 1.03
    assert point["predicted_s"] > 0


def test_gloo_sends_what_its_one_algorithm_does(virtual_cluster: Callable[..., Any], tmp_path: Path) -> None:
    cluster = virtual_cluster(hosts=4, rate="200mbit")
    names = {"all_reduce": 6, "reduce_scatter": 6, "all_gather": 3, "broadcast": 3}
    frame = run(cluster, tmp_path, "--backend", "gloo", "--collective", ",".join(names))
    assert dict(zip(frame["collective"], frame["schedule_bytes"] / SIZE, strict=True)) == names
    ratio = frame["wire_bytes"] / frame["schedule_bytes"]
    assert ratio.between(1.00, 1.03).all(), ratio.tolist()
    assert frame["predicted_s"].gt(0).all()
