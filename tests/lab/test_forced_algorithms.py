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


@pytest.mark.mpi
def test_open_mpi_sends_what_the_forced_algorithm_does(virtual_cluster: Callable[..., Any], tmp_path: Path) -> None:
    cluster = virtual_cluster(hosts=4, rate="200mbit")
    links: tuple[str, ...] = ()
    # What all hosts send of one message: 2(n-1)/n from each of n by ring and by halving and doubling, else log2 n.
    for algorithm, messages in {"ring": 6, "recursive_doubling": 8, "rabenseifner": 6}.items():
        options = ("--backend", "mpi", "--collective", "all_reduce", "--algorithm", algorithm, *links)
        frame = run(cluster, tmp_path / algorithm, *options)
        (point,) = frame.to_dict("records")
        assert point["backend_settings"]["coll_tuned_allreduce_algorithm"] == algorithm
        assert point["schedule_bytes"] == messages * SIZE
        ratio = point["wire_bytes"] / point["schedule_bytes"]
        print(f"{algorithm}: {ratio:.4f} of the schedule's bytes, {point['prediction_error']:+.0%} of its time")
        assert 1.00 <= ratio <= 1.03
        assert point["predicted_s"] > 0
        links = ("--calibration", str(next((tmp_path / "ring").rglob("calibration.json"))))


def test_gloo_sends_what_its_one_algorithm_does(virtual_cluster: Callable[..., Any], tmp_path: Path) -> None:
    cluster = virtual_cluster(hosts=4, rate="200mbit")
    names = {"all_reduce": 6, "reduce_scatter": 6, "all_gather": 3}
    frame = run(cluster, tmp_path, "--backend", "gloo", "--collective", ",".join(names))
    assert dict(zip(frame["collective"], frame["schedule_bytes"] / SIZE, strict=True)) == names
    ratio = frame["wire_bytes"] / frame["schedule_bytes"]
    print(frame.assign(ratio=ratio)[["collective", "ratio", "prediction_error"]].to_string(index=False))
    assert ratio.between(1.00, 1.03).all(), ratio.tolist()
    assert frame["predicted_s"].gt(0).all()
