"""Faults in the middle of a sweep: the right rank, host and case are named, nothing is left running, nothing is lost."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commbench.launch.heartbeat import Beat, read_beats

pytestmark = pytest.mark.mpi

RANKS = 4
LIMIT_S = 15.0
SWEEP = ("--collective", "all_reduce,all_gather", "--sizes", "64K,1M", "--ranks", str(RANKS), "--for", "5m",
         "--max-time", "0.3s")  # fmt: skip
SKIP_CASES = 2  # strike after some points have been finished


class Victim:
    """A run in progress, and the means to strike at one of its ranks."""

    def __init__(self, tmp_path: Path, links: Path, backend: str, *options: str, out: Path | None = None) -> None:
        self.out = out or tmp_path / "results"
        self.pages = tmp_path / "pages"
        arguments = ["run", "--backend", backend, *SWEEP, *options, "--out", str(self.out), "--calibration", str(links)]
        self.titles = _titles(arguments)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "commbench", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "COMMBENCH_HEARTBEATS": str(self.pages)}, start_new_session=True,
        )  # fmt: skip
        self.pids: list[int] = []

    def freeze_inside(self, rank: int) -> Beat:
        """Stop ``rank`` while it is inside an iteration, a few cases into the sweep; where it stands."""
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.process.communicate()[1]
            beat = read_beats(str(self.pages)).get(rank) if self.pages.exists() else None
            if beat is not None and beat.case >= SKIP_CASES and beat.phase == "inside":
                os.kill(beat.pid, signal.SIGSTOP)
                time.sleep(0.05)
                beats = read_beats(str(self.pages))
                self.pids = [other.pid for other in beats.values()]
                if beats[rank].phase == "inside":
                    return beats[rank]
                os.kill(beat.pid, signal.SIGCONT)
            time.sleep(0.002)
        raise AssertionError("the rank was never seen inside an iteration")

    def end(self, within_s: float) -> tuple[int, str]:
        """The exit code and the one line of the command, which must end in time and leave no process behind."""
        began = time.monotonic()
        _, errors = self.process.communicate(timeout=within_s + 30)
        took = time.monotonic() - began
        assert took < within_s, f"took {took:.1f} s\n{errors}"
        assert [pid for pid in self.pids if _alive(pid)] == []
        lines = [line for line in errors.splitlines() if line.startswith("commbench: ")]
        assert len(lines) == 1, errors
        return self.process.returncode, lines[0]

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _titles(arguments: list[str]) -> list[str]:
    listed = subprocess.run(
        [sys.executable, "-m", "commbench", *arguments, "--dry-run"], capture_output=True, text=True, check=True
    )
    return [line.split("  ")[1] for line in listed.stdout.splitlines()]


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture
def victims(tmp_path: Path) -> Iterator[list[Victim]]:
    started: list[Victim] = []
    yield started
    for victim in started:
        victim.stop()


def check_kept(out: Path, line: str, status: str) -> None:
    """Every finished point is on disk and shown, and the run says how it ended."""
    (run,) = out.glob("*/*")
    finished = [json.loads(text) for text in (run / "launches/0/points.jsonl").read_text().splitlines()]
    assert len(finished) >= SKIP_CASES
    assert f"{len(finished)} points kept in {run}" in line
    end = json.loads((run / "end.json").read_text())
    assert (end["status"], end["exit_code"]) == (status, 3)
    shown = subprocess.run(
        [sys.executable, "-m", "commbench", "show", str(run)], capture_output=True, text=True, check=True
    ).stdout
    for point in finished:
        assert point["collective"] in shown
    assert end["reason"].split(",")[0] in shown.replace("\n", " ")


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
@pytest.mark.parametrize("rank", [0, random.SystemRandom().randrange(1, RANKS)], ids=["rank0", "other"])
def test_a_killed_rank_is_named(
    tmp_path: Path, links_file: Path, victims: list[Victim], backend: str, rank: int
) -> None:
    victim = Victim(tmp_path, links_file, backend)
    victims.append(victim)
    beat = victim.freeze_inside(rank)
    os.kill(beat.pid, signal.SIGKILL)
    code, line = victim.end(LIMIT_S)
    assert code == 3
    assert f"rank {rank} on {socket.gethostname()} " in line
    assert f"during {victim.titles[beat.case]}, iteration {beat.iteration};" in line
    if backend == "gloo":
        assert "was killed by signal 9 (SIGKILL)" in line
    check_kept(victim.out, line, "failed")


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
@pytest.mark.parametrize("rank", [0, random.SystemRandom().randrange(1, RANKS)], ids=["rank0", "other"])
def test_a_frozen_rank_is_named_at_the_deadline(
    tmp_path: Path, links_file: Path, victims: list[Victim], backend: str, rank: int
) -> None:
    victim = Victim(tmp_path, links_file, backend, "--deadline", "5s")
    victims.append(victim)
    beat = victim.freeze_inside(rank)
    code, line = victim.end(5.0 + LIMIT_S)
    assert code == 3
    assert f"rank {rank} on {socket.gethostname()} did not answer" in line
    # The deadline is 5 s, or a hundred times what the round was expected to take.
    where = re.escape(f"during {victim.titles[beat.case]}, iteration {beat.iteration};")
    assert re.search(rf"within \d+ s {where}", line), line
    check_kept(victim.out, line, "timeout")


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_ctrl_c_keeps_the_points(tmp_path: Path, links_file: Path, victims: list[Victim], backend: str) -> None:
    victim = Victim(tmp_path, links_file, backend)
    victims.append(victim)
    beat = victim.freeze_inside(1)
    os.kill(beat.pid, signal.SIGCONT)
    victim.process.send_signal(signal.SIGINT)
    code, line = victim.end(LIMIT_S)
    assert code == 3
    assert re.search(rf"interrupted during {backend} all_.*ranks 0-3 on {socket.gethostname()}", line)
    check_kept(victim.out, line, "interrupted")


def test_a_killed_command_leaves_no_rank_behind(tmp_path: Path, links_file: Path, victims: list[Victim]) -> None:
    for backend in ("gloo", "mpi"):
        victim = Victim(tmp_path / backend, links_file, backend)
        victims.append(victim)
        beat = victim.freeze_inside(2)
        os.kill(beat.pid, signal.SIGCONT)
        victim.process.kill()
        victim.process.wait()
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and any(_alive(pid) for pid in victim.pids):
            time.sleep(0.1)
        assert [pid for pid in victim.pids if _alive(pid)] == []
        (run,) = victim.out.glob("*/*")
        assert not (run / "end.json").exists()
        assert len((run / "launches/0/points.jsonl").read_text().splitlines()) >= SKIP_CASES


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_full_disk_stops_the_run_and_keeps_what_fits(
    tmp_path: Path, links_file: Path, victims: list[Victim], backend: str
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("mount is not allowed here")
    try:
        victim = Victim(tmp_path, links_file, backend, "--iters", "3", out=disk / "results")
        victims.append(victim)
        output, errors = victim.process.communicate(timeout=120)
        assert victim.process.returncode == 3
        lines = [line for line in errors.splitlines() if line.startswith("commbench: ")]
        assert re.search(
            rf"rank 0 on {socket.gethostname()} failed: cannot write .*No space left on device.* during {backend} all_",
            lines[0],
        )
        (run,) = (disk / "results").glob("*/*")
        finished = (run / "launches/0/points.jsonl").read_text().splitlines()
        for text in finished:
            json.loads(text)
        shown = subprocess.run(
            [sys.executable, "-m", "commbench", "show", str(run)], capture_output=True, text=True, check=True
        )
        assert "all_reduce" in shown.stdout
        assert "all_reduce" in output  # the tables are printed from memory too
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
