"""Causes that somebody hid in a real run are found in what the run stored, and a sound run has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.lab

Make = Callable[..., Any]  # the fixture's class is in conftest.py, which tests cannot import
COMMBENCH = (sys.executable, "-m", "commbench")
SWEEP = ("--backend", "mpi", "--timing", "isolated", "--budget", "2s", "--max-time", "1s")
RING = (*COMMBENCH, "run", *SWEEP, "--collective", "all_reduce", "--algorithm", "own:ring")


def explain(out: Path) -> dict[str, Any]:
    """What ``commbench explain`` says of the newest run below ``out``."""
    done = subprocess.run(
        [*COMMBENCH, "explain", "--results", str(out), "--format", "json"], check=False, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(cluster: Any, out: Path, *options: str, sizes: str = "128K,512K,1M") -> dict[str, Any]:
    done = cluster.run([*RING, "--sizes", sizes, *options, "--out", str(out)], timeout=100)
    assert done.returncode == 0, done.stderr
    return explain(out)


def local(out: Path, *options: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Two ranks on this host."""
    done = subprocess.run(
        [*COMMBENCH, "run", "--backend", "mpi", "--ranks", "2", *options, "--out", str(out)], check=False,
        capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return explain(out)


def kind(found: dict[str, Any]) -> str | None:
    return found["cause"]["kind"] if found["cause"] else None


def is_sound(found: dict[str, Any]) -> bool:
    """No cause; or that others kept this machine busy all the while, which tests cannot help."""
    return kind(found) is None or "other processes used" in found["verdict"]


def test_a_sound_run_then_a_slow_host_then_one_that_becomes_slow(virtual_cluster: Make, tmp_path: Path) -> None:
    cluster = virtual_cluster(hosts=4, rate="200mbit")
    sound = measure(cluster, tmp_path / "sound")
    assert is_sound(sound), sound["verdict"]

    cluster.slow(2, "50mbit")
    before = measure(cluster, tmp_path / "before")
    assert before["cause"]["cause"] == f"slow host {cluster.hosts[2]}", before["verdict"]
    assert "measured before the sweep" in before["verdict"]
    cluster.heal()

    # What the links were in the sound run; so this one begins to measure at once.
    (known,) = (tmp_path / "sound").glob("*/*")
    slower = threading.Thread(target=slow_when_calibrated, args=(cluster, tmp_path / "during"))
    slower.start()
    during = measure(cluster, tmp_path / "during", "--calibration", str(known))
    slower.join()
    assert during["cause"]["cause"] == f"slow host {cluster.hosts[1]}", during["verdict"]
    assert "measured after the sweep" in during["verdict"]


def slow_when_calibrated(cluster: Any, out: Path) -> None:
    """Slow one host as soon as the launch's manifest has the links."""
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        if any('"links"' in manifest.read_text() for manifest in out.glob("*/*/launches/0/manifest.json")):
            cluster.slow(1, "50mbit")
            return
        time.sleep(0.1)


def test_a_nic_that_two_ranks_share(virtual_cluster: Make, tmp_path: Path) -> None:
    # Slow enough that the NIC is the limit even while others use the processors.
    found = measure(virtual_cluster(hosts=4, rate="50mbit", ranks_per_host=2), tmp_path, sizes="512K,1M")
    causes = [cause for curve in found["curves"] for cause in curve["causes"] if cause["kind"] == "shared_nic"]
    assert causes, found["verdict"]
    assert causes[0]["judged_by"][0].startswith("2 ranks of a host reach 0.006")
    assert kind(found) == "shared_nic" or is_sound(found), found["verdict"]


def test_tcp_inside_a_host(tmp_path: Path) -> None:
    options = ("--collective", "all_reduce", "--timing", "isolated", "--sizes", "64,512,4K,64K,1M", "--budget", "1s")
    forced = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,tcp"}
    found = local(tmp_path / "tcp", *options, environment=forced)
    assert kind(found) == "tcp_instead_of_shared_memory", found["verdict"]
    assert "OMPI_MCA_btl=self,tcp" in found["verdict"]
    shared = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp"}
    found = local(tmp_path / "shared", *options, environment=shared)
    assert is_sound(found), found["verdict"]


@contextmanager
def hogs(count: int) -> Iterator[None]:
    """Processes that take all the time they get."""
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_processors_that_others_use(tmp_path: Path) -> None:
    with hogs(2 * len(os.sched_getaffinity(0))):
        found = local(
            tmp_path, "--collective", "all_reduce,all_gather", "--sizes", "64,512,4K,64K", "--budget", "3s",
            environment={},
        )  # fmt: skip
    assert kind(found) == "host_bound", found["verdict"]
    assert "other processes used" in found["verdict"]
