"""Links of known rate: what calibration finds of them, and what is predicted from it and then measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import commbench
from commbench.models.links import Links
from commbench.store.calibration import read_calibration

RATE_BPS = 200e6 / 8
COMMBENCH = [sys.executable, "-m", "commbench"]
# A run calibrates more quickly than the command that does nothing else.
ONE_POINT = ["run", "--collective", "barrier", "--timing", "isolated", "--iters", "1"]


def run(cluster: Any, words: Sequence[str], timeout: float = 150) -> str:
    done = cluster.run([*COMMBENCH, *words], timeout=timeout)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def links_of(file: Path, backend: str = "mpi") -> Links:
    return read_calibration(file).backend(backend).links


def test_ring_is_predicted_from_links_alone_and_counted_by_the_nics(
    virtual_cluster: Callable[..., Any], tmp_path: Path
) -> None:
    cluster = virtual_cluster(hosts=3, rate="200mbit")
    file = tmp_path / "links.json"
    said = run(cluster, ["calibrate", "--backend", "mpi", "--file", str(file), "--out", str(tmp_path / "c")])
    assert f"calibration: {file}" in said
    assert "slow host" not in said
    link = links_of(file).other_host
    assert link is not None
    # A frame of MTU 9000 carries 8948 of its 9014 bytes as data; the bucket lets a little pass at once.
    assert 0.9 < 1 / link.seconds_per_byte / RATE_BPS < 1.02
    assert link.shift[-1][0] >= 1 << 18
    run(
        cluster,
        ["run", "--backend", "mpi", "--calibration", str(file), "--algorithm", "own:ring", "--collective",
         "all_reduce,all_gather,reduce_scatter", "--sizes", "1M,4M", "--timing", "isolated", "--iters", "5", "--out",
         str(tmp_path / "r")],
    )  # fmt: skip
    frame = commbench.load(tmp_path / "r")
    assert frame["status"].eq("ok").all()
    assert frame["calibration_id"].eq(links_of(file).calibration_id).all()
    (manifest,) = (tmp_path / "r").rglob("launches/0/manifest.json")
    assert "windows" not in json.loads(manifest.read_text())["backends"]["mpi"]
    # A ring sends (n-1)/n of the message from each of n hosts for each pass; all_reduce makes two.
    passes = frame["collective"].map({"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1})
    assert frame["schedule_bytes"].tolist() == (passes * 2 * frame["bytes"]).tolist()
    ratio = frame["wire_bytes"] / frame["schedule_bytes"]
    assert ratio.between(1.0, 1.025).all(), ratio.tolist()
    # Alone on the machine 5 %; a test may not be.
    assert frame["prediction_error"].abs().median() < 0.35, frame["prediction_error"].tolist()


def test_a_slow_host_is_found_and_priced(virtual_cluster: Callable[..., Any], tmp_path: Path) -> None:
    cluster = virtual_cluster(hosts=4, rate="200mbit")
    cluster.slow(2, "50mbit")
    run(cluster, [*ONE_POINT, "--backend", "mpi", "--out", str(tmp_path)])
    (file,) = tmp_path.rglob("calibration.json")
    links = links_of(file)
    assert links.other_host is not None
    usual = links.other_host.seconds_per_byte
    assert 1 / usual / RATE_BPS == pytest.approx(1.0, abs=0.1)
    slow = [max(pair) > 2.5 * usual for pair in links.host_rates]
    assert slow == [False, False, True, False]
    said = run(cluster, ["run", "--calibration", str(file), "--backend", "mpi", "--collective", "broadcast",
                         "--algorithm", "own:binomial_tree", "--sizes", "512K", "--timing", "isolated", "--iters", "5",
                         "--out", str(tmp_path / "r")])  # fmt: skip
    frame = commbench.load(tmp_path / "r")
    # From 0 to 2, then from 0 to 1 and from 2 to 3: in both rounds a hop goes at a quarter of the rate.
    assert frame["predicted_s"].iloc[0] == pytest.approx(2 * 4 * (512 << 10) / RATE_BPS, rel=0.15)
    assert "model" in said


def test_ranks_that_share_a_nic(virtual_cluster: Callable[..., Any], tmp_path: Path) -> None:
    cluster = virtual_cluster(hosts=2, rate="200mbit", ranks_per_host=2)
    run(cluster, [*ONE_POINT, "--backend", "gloo", "--out", str(tmp_path)])
    (file,) = tmp_path.rglob("calibration.json")
    links = links_of(file, "gloo")
    size, seconds = links.nic[-1]
    # Two ranks' messages take turns: each keeps the NIC for about its bytes at the rate of the link.
    assert size / seconds / RATE_BPS == pytest.approx(1.0, abs=0.35)
    assert links.same_host is not None
    assert links.other_host is not None
    assert links.same_host.seconds_per_byte < links.other_host.seconds_per_byte / 5
