"""The fixture ``virtual_cluster``: hosts of one's own, with links of a known rate, for one test."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/virtual_cluster"


def _environment() -> dict[str, str]:
    """With the programs beside this interpreter on PATH."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def _script(*words: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    """scripts/virtual_cluster with these arguments; what it said and its exit code."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], check=False, capture_output=True, text=True, timeout=timeout,
        stdin=subprocess.DEVNULL, env=_environment(),
    )  # fmt: skip


def _succeed(*words: str) -> str:
    done = _script(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass(kw_only=True)
class VirtualCluster:
    """A cluster that is up. Hosts are given by index or name."""

    name: str
    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    setup_s: float
    _started: list[subprocess.Popen[str]] = field(default_factory=list)

    def exec(self, host: int | str, argv: Sequence[str], timeout: float = 30) -> subprocess.CompletedProcess[str]:
        """Run a command on one host."""
        return _script("exec", "--cluster", self.name, str(host), "--", *argv, timeout=timeout)

    def start(self, host: int | str, argv: Sequence[str]) -> subprocess.Popen[str]:
        """Begin a command on one host; it ends with the test at the latest."""
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "exec", "--cluster", self.name, str(host), "--", *argv],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment(),
        )  # fmt: skip
        self._started.append(process)
        return process

    def run(
        self, argv: Sequence[str], timeout: float = 120, launcher: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on every rank, started by what fits it or by ``launcher``."""
        chosen = ("--launcher", launcher) if launcher else ()
        return _script("run", "--cluster", self.name, *chosen, "--", *argv, timeout=timeout)

    def slow(self, host: int | str, rate: str) -> None:
        """Give a host's link another rate, both ways."""
        _succeed("slow", "--cluster", self.name, str(host), rate)

    def cut(self, host: int | str) -> None:
        """Pull a host's cable."""
        _succeed("cut", "--cluster", self.name, str(host))

    def heal(self) -> None:
        """Undo every ``slow`` and ``cut``."""
        _succeed("heal", "--cluster", self.name)

    def status(self) -> dict[str, tuple[str, str]]:
        """Per host its rate, and ``connected`` or ``cut``."""
        rows = [line.split() for line in _succeed("status", "--cluster", self.name).splitlines()]
        return {host: (rate, state) for host, _, rate, state in rows}

    def down(self) -> None:
        """Take it down; the fixture does so at the end of the test."""
        done = _script("down", "--cluster", self.name)
        for process in self._started:
            process.communicate(timeout=10)
        assert done.returncode == 0 or "no cluster" in done.stderr, done.stderr


@pytest.fixture
def cluster_script() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``cluster_script(*words, timeout=30)``: scripts/virtual_cluster itself."""
    return _script


@functools.cache
def _why_not() -> str | None:
    checked = _script("check")
    return None if checked.returncode == 0 else checked.stderr.strip()


@pytest.fixture
def virtual_cluster(record_property: Callable[[str, object], None]) -> Iterator[Callable[..., VirtualCluster]]:
    """``virtual_cluster(hosts=2, rate="100mbit", ranks_per_host=1)``: a new cluster, gone after the test.

    A cluster ends with pytest, however pytest ends. Skips where the kernel has no namespaces or no token bucket.
    """
    if reason := _why_not():
        pytest.skip(reason)
    made: list[VirtualCluster] = []

    def make(hosts: int = 2, rate: str = "100mbit", ranks_per_host: int = 1) -> VirtualCluster:
        began = time.monotonic()
        name = _succeed(
            "up", "--hosts", str(hosts), "--rate", rate, "--ranks-per-host", str(ranks_per_host),
            "--owner", str(os.getpid()),
        ).strip()  # fmt: skip
        rows = [line.split() for line in _succeed("status", "--cluster", name).splitlines()]
        cluster = VirtualCluster(
            name=name, hosts=tuple(row[0] for row in rows), addresses=tuple(row[1] for row in rows),
            setup_s=time.monotonic() - began,
        )  # fmt: skip
        made.append(cluster)
        return cluster

    yield make
    began = time.monotonic()
    for cluster in made:
        cluster.down()
    record_property("cluster_setup_s", round(sum(cluster.setup_s for cluster in made), 3))
    record_property("cluster_teardown_s", round(time.monotonic() - began, 3))
