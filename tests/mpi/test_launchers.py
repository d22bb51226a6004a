"""Under somebody else's launcher: every rank finds its place or says why not, and a lost rank is named."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import commbench
from commbench.launch.network import LOOPBACK, listen
from commbench.launch.start import find_mpirun, mpirun_command, mpirun_environment

pytestmark = pytest.mark.mpi

COMMAND = (sys.executable, "-m", "commbench", "run")
TORCHRUN = Path(sys.executable).with_name("torchrun")
HOST = socket.gethostname()


def mpirun(ranks: int, *options: str) -> list[str]:
    path = find_mpirun()
    assert path is not None
    return [*mpirun_command(path, ranks, oversubscribed=ranks > 2), *COMMAND, *options]


def environment(**more: str) -> dict[str, str]:
    return {**mpirun_environment(os.environ, oversubscribed=True), **more}


def run(command: list[str], timeout: float = 120, **more: str) -> tuple[int, str]:
    """Exit code and standard error."""
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL,
        env=environment(**more),
    )  # fmt: skip
    return done.returncode, done.stderr


def said(errors: str) -> list[str]:
    """commbench's own lines, without the launcher's."""
    return [line for line in errors.splitlines() if line.startswith("commbench: ")]


# -- finding a place -------------------------------------------------------------------------------


def test_mpirun_with_stale_variables_of_another_launcher(tmp_path: Path) -> None:
    code, errors = run(
        mpirun(4, "--backend", "gloo,mpi", "--collective", "all_reduce,broadcast", "--sizes", "1K", "--iters", "20",
               "--root", "3", "--out", str(tmp_path)),
        RANK="7", WORLD_SIZE="64", MASTER_ADDR="192.0.2.1", MASTER_PORT="1", LOCAL_RANK="7",
    )  # fmt: skip
    assert code == 0, errors
    assert said(errors) == []
    frame = commbench.load(tmp_path)
    assert len(frame) == 8
    assert frame["status"].eq("ok").all()
    assert frame["wrong"].eq(0).all()
    assert set(frame["world"]) == set(frame["ranks"]) == {4}
    (path,) = tmp_path.glob("*/*")
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["launcher"], manifest["world"], manifest["hosts"]) == ("openmpi", 4, [HOST] * 4)
    assert json.loads((path / "end.json").read_text())["status"] == "ok"


def torchrun(*options: str) -> list[str]:
    if not TORCHRUN.exists():
        pytest.skip("no torchrun beside the interpreter")
    return [str(TORCHRUN), "--nproc-per-node", "2", "--no-python", *COMMAND, *options]


def test_torchrun(tmp_path: Path) -> None:
    code, errors = run(
        torchrun(
            "--backend", "gloo", "--collective", "all_reduce", "--sizes", "1K", "--iters", "20", "--out", str(tmp_path)
        )
    )
    assert code == 0, errors
    frame = commbench.load(tmp_path)
    assert frame["status"].eq("ok").all()
    assert set(frame["world"]) == {2}
    (path,) = tmp_path.glob("*/*")
    assert json.loads((path / "manifest.json").read_text())["launcher"] == "torchrun"


def test_mpi_that_torchrun_cannot_start(tmp_path: Path) -> None:
    """MPI would be one rank in each of the processes, and the numbers those of nobody talking to nobody."""
    code, errors = run(torchrun("--backend", "mpi", "--sizes", "1K", "--out", str(tmp_path)))
    assert code != 0
    (line,) = said(errors)
    assert re.match(
        rf"commbench: rank [01] on {HOST} failed: MPI says rank 0 of 1 where the launcher says rank [01] of 2: "
        r"start with the mpirun that belongs to mpi4py's MPI library, or with srun --mpi=pmix", line
    )  # fmt: skip


@pytest.mark.parametrize(("rank", "code", "begin"), [(0, 2, "commbench: error: "), (1, 3, "commbench: rank 1: ")])
def test_a_launcher_that_is_not_the_one_of_this_mpi(rank: int, code: int, begin: str, tmp_path: Path) -> None:
    """mpirun of another MPI sets its variables, and this MPI starts alone."""
    place = {"RANK": str(rank), "SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_SIZE": "2"}
    found, errors = run(
        [*COMMAND, "--backend", "gloo", "--out", str(tmp_path)], timeout=70,
        **{f"OMPI_COMM_WORLD_{name}": value for name, value in place.items()},
    )  # fmt: skip
    assert found == code
    (line,) = said(errors)
    assert line.startswith(f"{begin}MPI says rank 0 of 1 where openmpi says rank {rank} of 2: ")
    assert line.endswith("start with the mpirun that belongs to mpi4py's MPI (Open MPI)")


def test_a_mistake_on_the_command_line_is_said_once(tmp_path: Path) -> None:
    for options, line in (
        (("--collective", "all_reduc"), "--collective: unknown collective 'all_reduc': did you mean 'all_reduce'?"),
        (("--ranks", "3"), "--ranks 3 does not fit the 2 ranks that openmpi started: leave it out"),
    ):
        code, errors = run(mpirun(2, *options, "--out", str(tmp_path)))
        assert code == 2
        (found,) = said(errors)
        assert found.startswith(f"commbench: error: {line}")


# -- the world is verified -------------------------------------------------------------------------

OTHER_VERSION = """
import os
if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
    import commbench
    commbench.__version__ = "0.0.9"
"""


def test_ranks_of_two_versions(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHER_VERSION)
    paths = os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)])
    out = tmp_path / "results"
    code, errors = run(mpirun(2, "--backend", "gloo", "--out", str(out)), PYTHONPATH=paths)
    reason = (
        f"commbench version differs: {commbench.__version__} on rank 0 ({HOST}), 0.0.9 on rank 1 ({HOST}): "
        "use the same environment on every host"
    )
    assert code == 3
    (path,) = out.glob("*/*")
    assert said(errors) == [f"commbench: {reason}; 0 points kept in {path}"]
    end = json.loads((path / "end.json").read_text())
    assert (end["status"], end["reason"]) == ("failed", reason)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_starts(rank: int, tmp_path: Path) -> None:
    """Only ``rank`` of two is there. It gives up in time and names the other."""
    with listen(LOOPBACK) as free:
        port = free.getsockname()[1]
    began = time.monotonic()
    code, errors = run(
        [*COMMAND, "--backend", "gloo", "--out", str(tmp_path)], RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank),
        MASTER_ADDR=LOOPBACK, MASTER_PORT=str(port), COMMBENCH_STARTUP="2s",
    )  # fmt: skip
    assert code == 3
    assert time.monotonic() - began < 20
    lines = [line for line in said(errors) if not line.startswith("commbench: warning: ")]
    assert len(lines) == 1
    if rank == 0:
        assert f"rank 1 did not arrive within 2 s (arrived: 0 on {HOST})" in lines[0]
    else:
        assert f"rank 1: no answer from rank 0 at {LOOPBACK}:{port} within 2 s (Connection refused)" in lines[0]


# -- a rank is lost --------------------------------------------------------------------------------


@contextmanager
def job(command: list[str], out: Path) -> Iterator[subprocess.Popen[str]]:
    """A launcher that has been started, ended whatever the test finds."""
    process = subprocess.Popen(
        [*command, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        text=True, env=environment(),
    )  # fmt: skip
    ranks: dict[int, psutil.Process] = {}
    try:
        yield process
    finally:
        ranks = ranks_of(process.pid)
        for one in (*ranks.values(), process):
            try:
                one.kill()
            except (psutil.NoSuchProcess, ProcessLookupError):
                pass
        process.communicate(timeout=30)


def ranks_of(pid: int) -> dict[int, psutil.Process]:
    """The ranks below a launcher."""
    found = {}
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return {}
    for child in children:
        try:
            found[int(child.environ()["OMPI_COMM_WORLD_RANK"])] = child
        except (KeyError, psutil.Error):
            continue
    return found


def finished(out: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in out.glob("*/*/launches/0/points.jsonl"))


@pytest.mark.parametrize(("backend", "victim"), [("mpi", 2), ("mpi", 0), ("gloo", 1)])
def test_a_killed_rank_is_named_and_the_points_are_kept(
    backend: str, victim: int, tmp_path: Path, links_file: Path
) -> None:
    options = ("--backend", backend, "--collective", "all_reduce", "--sizes", "1K,64K", "--for", "2m", "--budget", "1s",
               "--calibration", str(links_file))  # fmt: skip
    with job(mpirun(3, *options), tmp_path) as process:
        deadline = time.monotonic() + 60
        while finished(tmp_path) < 2:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        ranks = ranks_of(process.pid)
        assert sorted(ranks) == [0, 1, 2]
        ranks[victim].kill()
        _, errors = process.communicate(timeout=20)
        # mpirun makes a code of the signal; a rank that ended before it looked gives commbench's own.
        assert process.returncode in (128 + 9, 3)
        _, alive = psutil.wait_procs(ranks.values(), timeout=5)
        assert alive == []
    (line,) = said(errors)
    (path,) = tmp_path.glob("*/*")
    assert line.startswith(f"commbench: rank {victim} on {HOST} ended without a word (killed, or its host is gone) ")
    assert f"{backend} all_reduce " in line
    kept = finished(tmp_path)
    assert kept >= 2
    if victim == 0:  # with it went the one who writes: what it had written is all there
        assert "every point that had finished is in its results directory" in line
        assert not (path / "end.json").exists()
    else:
        assert line.endswith(f"; {kept} points kept in {path}")
        end = json.loads((path / "end.json").read_text())
        assert (end["status"], end["blamed_ranks"]) == ("failed", [victim])
    assert len(commbench.load(tmp_path)) == kept
