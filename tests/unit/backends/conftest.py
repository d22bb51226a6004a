"""The fixture ``forked_ranks``: runs of ``run_local`` whose ranks need not load torch anew."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pytest

PROGRAM = Path(__file__).with_name("forked_ranks.py")


class Rank:
    """What commbench asks of a Popen: its pid and whether it has ended."""

    def __init__(self, pid: int, ask: Callable[[int], int | None]) -> None:
        self.pid = pid
        self._ask = ask
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._ask(self.pid)
        return self._code


class Forker:
    """The process that ranks are forked from; see forked_ranks.py."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(theirs.fileno())], pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip

    def _ask(self, asked: Any, files: tuple[int, ...] = ()) -> Any:
        socket.send_fds(self._requests, [json.dumps(asked).encode()], files)
        return json.loads(self._requests.recv(1 << 10))

    def start(self, environment: dict[str, str], words: IO[bytes]) -> Rank:
        return Rank(self._ask(environment, (words.fileno(),)), self._ask)

    def close(self) -> None:
        self._requests.close()
        self._process.wait(20)


@pytest.fixture(scope="session")
def _forker() -> Iterator[Forker]:
    forker = Forker()
    yield forker
    forker.close()


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch, _forker: Forker) -> None:
    """Ranks that commbench starts on this host are real processes as ever, forked from one that has loaded torch."""

    def start(children: Any, rank: int | None, command: list[str], environment: Mapping[str, str]) -> None:
        assert command == [sys.executable, "-m", "commbench.worker"]
        children.errors[rank] = words = tempfile.TemporaryFile()  # noqa: SIM115  closed by commbench
        children.processes[rank] = _forker.start(dict(environment), words)

    monkeypatch.setattr("commbench.launch.start._start", start)
