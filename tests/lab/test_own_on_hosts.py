"""Own algorithms over hosts with links of known rate: right data, and no faster than their bytes can leave a host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commbench
from commbench.schedules import HIERARCHICAL, build, leaving

RATE_BPS = 100e6 / 8
SIZE = 1 << 20
HOSTS = (0, 0, 1, 1)


def test_hierarchical_algorithms_cross_the_link_once(
    virtual_cluster: Callable[..., Any], links_file: Path, tmp_path: Path
) -> None:
    cluster = virtual_cluster(hosts=2, rate="100mbit", ranks_per_host=2)
    done = cluster.run(
        [sys.executable, "-m", "commbench", "run", "--backend", "mpi",
         "--collective", ",".join(sorted({name for name, _ in HIERARCHICAL})),
         "--algorithm", "own:hierarchical,own:ring", "--sizes", str(SIZE), "--timing", "isolated", "--iters", "3",
         "--calibration", str(links_file), "--out", str(tmp_path)],
        timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    frame = commbench.load(tmp_path)
    assert set(frame.loc[frame["status"] != "ok", "reason"].str.partition(":")[0]) == {"all_to_all has no ring"}
    points = {(p["collective"], p["algorithm"]): p for p in frame[frame["status"] == "ok"].to_dict("records")}
    assert {name for name, algorithm in points if algorithm == "own:hierarchical"} == {name for name, _ in HIERARCHICAL}
    for (collective, algorithm), point in points.items():
        assert point["wrong"] == 0
        assert point["verified"] > 0
        share = max(leaving(build(collective, algorithm[4:], 4, hosts=HOSTS), HOSTS).values())
        # Before the last rank's start, from which `time_s` counts, the others may have sent already; nothing was sent
        # before the first. The token bucket lets 32 kB pass at once.
        assert point["time_first_s"] > (float(share) * SIZE - 64e3) / RATE_BPS, (collective, algorithm)
    # Out of each host go 2(k-1)/k of the message instead of 2(n-1)/n: two thirds of the time.
    layered, flat = (points["all_reduce", f"own:{name}"]["time_first_s"] for name in ("hierarchical", "ring"))
    assert layered < 0.85 * flat
