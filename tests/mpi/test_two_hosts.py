"""Ranks on hosts whose clocks may differ: each rank gets a host name of its own from a UTS namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import commbench
from commbench.launch.start import find_mpirun, mpirun_command, mpirun_environment

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None, reason="host names of one's own need root"
    ),
]

# Two ranks a host; argv: the command.
AS_HOST = (
    'hostname "node$((OMPI_COMM_WORLD_RANK / 2))" && '
    'OMPI_COMM_WORLD_LOCAL_RANK=$((OMPI_COMM_WORLD_RANK % 2)) OMPI_COMM_WORLD_LOCAL_SIZE=2 exec "$@"'
)


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_groups_links_and_starts_over_two_hosts(tmp_path: Path, backend: str) -> None:
    mpirun = find_mpirun()
    assert mpirun is not None
    done = subprocess.run(
        [*mpirun_command(mpirun, 4, oversubscribed=True), "unshare", "--uts", "sh", "-c", AS_HOST, "sh",
         sys.executable, "-m", "commbench", "run", "--backend", backend, "--collective", "all_reduce", "--sizes", "64K",
         "--group", "world,node,rail", "--nodes", "2", "--budget", "5s", "--out", str(tmp_path)],
        check=False, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
        env={**mpirun_environment(os.environ, oversubscribed=True), "COMMBENCH_INTERFACE": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    frame = commbench.load(tmp_path).set_index(["group", "timing"])
    assert frame["status"].eq("ok").all()
    assert frame["wrong"].eq(0).all()
    # Four ranks on few cores may not know their clocks well enough for the shortest operations, and then say so.
    by_clock = frame["start"].eq("clock")
    isolated = frame.index.get_level_values("timing") == "isolated"
    assert by_clock.xs("streamed", level="timing").all()
    assert by_clock["node", "isolated"]
    assert frame.loc[~by_clock, "start"].eq("barrier").all()
    assert frame.loc[~by_clock, "note"].str.contains("apart, more than a tenth of").all()
    assert frame["skew_s"].notna().eq(by_clock & isolated).all()
    assert frame["clock_error_s"].notna().all()
    shape = frame.xs("isolated", level="timing")[["ranks", "nodes", "ranks_per_node"]].to_dict("index")
    assert shape == {
        "world": {"ranks": 4, "nodes": 2, "ranks_per_node": 2.0},
        "node": {"ranks": 2, "nodes": 1, "ranks_per_node": 2.0},
        "rail": {"ranks": 2, "nodes": 2, "ranks_per_node": 1.0},
    }
    (run,) = tmp_path.glob("*/*")
    assert sorted(file.stem for file in (run / "hosts").iterdir()) == ["node0", "node1"]


def test_fewer_hosts_than_expected_end_the_run(tmp_path: Path) -> None:
    mpirun = find_mpirun()
    assert mpirun is not None
    done = subprocess.run(
        [*mpirun_command(mpirun, 2, oversubscribed=False), sys.executable, "-m", "commbench", "run", "--backend", "mpi",
         "--nodes", "2", "--out", str(tmp_path)],
        check=False, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
        env=mpirun_environment(os.environ, oversubscribed=False),
    )  # fmt: skip
    assert done.returncode == 3
    assert "commbench: 2 hosts were asked for and the ranks are on 1" in done.stderr
