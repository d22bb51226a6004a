"""Under a real srun: a Slurm of one node, private to these tests, on loopback."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

import commbench
from commbench.launch.network import LOOPBACK, listen

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(
        any(shutil.which(name) is None for name in ("srun", "slurmd", "slurmctld")), reason="no Slurm: apt-get install slurm-wlm"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd needs root"),
]  # fmt: skip

HOST = socket.gethostname()
# Four cores are claimed whatever the machine has; no munge, no cgroups.
CONFIG = """
ClusterName=commbench
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
PlugStackConfig=/dev/null
NodeName={host} NodeAddr=127.0.0.1 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=100
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which srun finds the test's own Slurm."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    with listen(LOOPBACK) as one, listen(LOOPBACK) as other:
        ports = [one.getsockname()[1], other.getsockname()[1]]
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=HOST, ports=ports, folder=folder))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SALLOC", "SBATCH"))}
    environment["SLURM_CONF"] = str(config)
    with ExitStack() as stack:
        for command in (["slurmctld", "-D", "-i"], ["slurmd", "-D", "-N", HOST]):
            daemon = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(_end, daemon)
        deadline = time.monotonic() + 20
        while _state(environment) != "idle":
            if time.monotonic() > deadline:
                pytest.skip(f"this machine's Slurm does not start: its node is {_state(environment) or 'not there'}")
            time.sleep(0.2)
        yield environment


def _state(environment: dict[str, str]) -> str:
    asked = subprocess.run(
        ["sinfo", "-h", "-o", "%T"], check=False, capture_output=True, text=True, timeout=20, env=environment
    )
    return asked.stdout.strip()


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(15)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait(15)


def srun(ranks: int, *options: str) -> list[str]:
    return ["srun", "-n", str(ranks), "-t", "2", "--export=ALL", sys.executable, "-m", "commbench", "run", *options]


def said(errors: str) -> list[str]:
    """commbench's own lines, without srun's."""
    return [line for line in errors.splitlines() if line.startswith("commbench: ")]


def test_ranks_find_each_other(slurm: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        srun(3, "--backend", "gloo", "--collective", "all_reduce", "--sizes", "1K", "--iters", "10", "--out", str(tmp_path)),
        check=False, capture_output=True, text=True, timeout=100, env={**slurm, "RANK": "7", "WORLD_SIZE": "64"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert said(done.stderr) == []
    frame = commbench.load(tmp_path)
    assert frame["status"].eq("ok").all()
    assert set(frame["world"]) == {3}
    (path,) = tmp_path.glob("*/*")
    assert json.loads((path / "manifest.json").read_text())["launcher"] == "slurm"


def test_mpi_that_srun_was_not_asked_to_start(slurm: dict[str, str], tmp_path: Path) -> None:
    """Without --mpi every process is an MPI of its own."""
    done = subprocess.run(
        srun(2, "--backend", "mpi", "--collective", "all_reduce", "--sizes", "1K", "--out", str(tmp_path)),
        check=False, capture_output=True, text=True, timeout=100, env=slurm,
    )  # fmt: skip
    assert done.returncode == 3
    (line,) = said(done.stderr)
    assert f" on {HOST} failed: MPI says rank 0 of 1 where the launcher says rank " in line
    assert "or with srun --mpi=pmix" in line


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named(slurm: dict[str, str], tmp_path: Path, victim: int) -> None:
    process = subprocess.Popen(
        srun(3, "--backend", "gloo", "--collective", "all_reduce", "--sizes", "1K", "--for", "2m", "--budget", "1s",
             "--out", str(tmp_path)),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**slurm, "COMMBENCH_TEST": str(tmp_path)},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not any(file.read_text() for file in tmp_path.glob("*/*/launches/0/points.jsonl")):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        ranks = _ranks(str(tmp_path))
        assert sorted(ranks) == [0, 1, 2]
        ranks[victim].kill()
        _, errors = process.communicate(timeout=30)
        assert process.returncode != 0
        _, alive = psutil.wait_procs(ranks.values(), timeout=5)
        assert alive == []
        (line,) = said(errors)
        assert line.startswith(
            f"commbench: rank {victim} on {HOST} ended without a word (killed, or its host is gone) "
        )
        assert not commbench.load(tmp_path).empty
    finally:
        process.kill()
        process.communicate(timeout=30)


def _ranks(mark: str) -> dict[int, psutil.Process]:
    """The step's ranks: children of slurmstepd, not of srun."""
    found = {}
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if environment.get("COMMBENCH_TEST") == mark and process.name() != "srun":
                found[int(environment["SLURM_PROCID"])] = process
        except (KeyError, psutil.Error):
            continue
    return found
