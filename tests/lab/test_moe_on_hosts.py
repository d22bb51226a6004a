"""Dispatch and combine over a link of known speed: what the data path counts is what leaves the hosts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import commbench

pytestmark = pytest.mark.lab

RATE_BPS = 100e6 / 8


def test_bytes_across_hosts_are_those_counted_from_the_buffers(
    virtual_cluster: Callable[..., Any], links_file: Path, tmp_path: Path
) -> None:
    cluster = virtual_cluster(hosts=2, rate="100mbit", ranks_per_host=2)
    done = cluster.run(
        [sys.executable, "-m", "commbench", "moe", "--backend", "mpi", "--tokens", "512", "--hidden", "2048", "--experts",
         "16", "--topk", "4", "--dispatch", "flat,hierarchical", "--iters", "2", "--routing-fixed", "--calibration",
         str(links_file), "--out", str(tmp_path)],
        timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    frame = commbench.load(tmp_path)
    assert list(frame["status"]) == ["ok"] * 4
    assert (frame["wrong"] == 0).all()
    points = {(p["collective"], p["algorithm"]): p for p in frame.to_dict("records")}
    for key, point in points.items():
        counted = 4 * point["convention_bytes"]["wire_host"]
        assert point["wire_bytes"] == pytest.approx(counted, rel=0.03), key
        # No host sends faster than its link, but for the 32 kB that the token bucket lets pass at once.
        assert point["time_first_s"] > (counted / 2 - 64e3) / RATE_BPS, key
    # A token with experts on both ranks of the other host crosses once instead of twice.
    for collective in ("moe_dispatch", "moe_combine"):
        flat, layered = (points[collective, f"own:{name}"] for name in ("flat", "hierarchical"))
        assert layered["wire_bytes"] < 0.85 * flat["wire_bytes"]
        assert layered["time_s"] < flat["time_s"]
