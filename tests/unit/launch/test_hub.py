"""The hub with ranks that are bare sockets: relaying, admission, deadlines, and whom it blames."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from commbench.launch.hub import Exit, Hub
from commbench.launch.judge import Outcome
from commbench.launch.network import LOOPBACK, listen
from commbench.launch.place import WorldError
from commbench.launch.wire import Reader, pack

TOKEN = "secret"
TITLES = ["case zero", "case one"]


class FakeRank:
    """A rank that says what the test makes it say."""

    def __init__(
        self, address: tuple[str, int], rank: int, world: int, token: str = TOKEN, pid: int | None = None
    ) -> None:
        self.rank = rank
        self.socket = socket.create_connection(address, timeout=10)
        self.reader = Reader()
        self.reader.trust()
        self.frames: list[tuple[dict[str, Any], bytes]] = []
        self.send("hello", token=token, rank=rank, world=world, host=f"host{rank}", pid=pid or 1000 + rank)

    def send(self, type_: str, blob: bytes = b"", **fields: Any) -> None:
        self.socket.sendall(pack({"type": type_, **fields}, blob))

    def receive(self) -> tuple[dict[str, Any], bytes]:
        while not self.frames:
            data = self.socket.recv(1 << 16)
            if not data:
                return {"type": "closed"}, b""
            self.frames += self.reader.feed(data)
        return self.frames.pop(0)


class Job:
    """A hub in a thread, and its ranks."""

    def __init__(self, world: int, **options: Any) -> None:
        self.listener = listen(LOOPBACK)
        self.address: tuple[str, int] = self.listener.getsockname()
        self.world = world
        self.events: list[dict[str, Any]] = []
        self.ended: list[Exit] = []
        plan = options.pop("make_plan", lambda hellos: {"titles": TITLES, "hosts": [h["host"] for h in hellos]})
        self.hub = Hub(
            listener=self.listener, world=world, token=TOKEN, make_plan=plan, on_event=self.events.append,
            watch=self._exits, **options,
        )  # fmt: skip
        self.outcome: Outcome | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.ranks: list[FakeRank] = []

    def _run(self) -> None:
        self.outcome = self.hub.run()
        self.hub.close()

    def _exits(self) -> list[Exit]:
        ended, self.ended = self.ended, []
        return ended

    def arrive(self) -> list[FakeRank]:
        self.ranks = [FakeRank(self.address, rank, self.world) for rank in range(self.world)]
        for rank in self.ranks:
            assert rank.receive()[0]["type"] == "welcome"
        return self.ranks

    def end(self, seconds: float = 10.0) -> Outcome:
        self.thread.join(seconds)
        assert self.outcome is not None, "the hub did not end"
        return self.outcome


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(world: int, **options: Any) -> Job:
        jobs.append(Job(world, **options))
        return jobs[-1]

    yield make
    for one in jobs:
        one.hub.interrupt("test over")
        one.thread.join(5)


def beat(rank: int, case: int = 0, iteration: int = 0, phase: str = "inside") -> dict[str, Any]:
    return {"rank": rank, "pid": 1000 + rank, "case": case, "iteration": iteration, "phase": phase}


def test_gathers_in_rank_order_with_blobs_and_shares(job: Callable[..., Job]) -> None:
    one = job(3)
    ranks = one.arrive()
    for rank in (2, 0, 1):
        ranks[rank].send("gather", bytes([rank]) * rank, value=f"v{rank}")
    header, blob = ranks[0].receive()
    assert (header["values"], header["lengths"], blob) == (["v0", "v1", "v2"], [0, 1, 2], b"\x01\x02\x02")
    ranks[0].send("share", value={"go": 1})
    assert [rank.receive()[0]["value"] for rank in ranks[1:]] == [{"go": 1}, {"go": 1}]
    for rank in ranks:
        rank.send("bye")
    assert one.end() == Outcome.ok()


def test_a_rank_may_be_several_gathers_ahead(job: Callable[..., Job]) -> None:
    one = job(2)
    ranks = one.arrive()
    for value in ("a", "b", "c"):
        ranks[1].send("gather", value=value)
    got = []
    for value in (1, 2, 3):
        ranks[0].send("gather", value=value)
        got.append(ranks[0].receive()[0]["values"])
    assert got == [[1, "a"], [2, "b"], [3, "c"]]


def test_a_stranger_is_turned_away_and_changes_nothing(job: Callable[..., Job]) -> None:
    one = job(1)
    stranger = FakeRank(one.address, 0, 1, token="guess")
    assert stranger.receive()[0]["type"] == "closed"
    noise = socket.create_connection(one.address)
    noise.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert noise.recv(100) == b""
    (rank,) = one.arrive()
    rank.send("bye")
    assert one.end() == Outcome.ok()


def test_two_processes_with_one_rank(job: Callable[..., Job]) -> None:
    one = job(2)
    _both = [FakeRank(one.address, 1, 2) for _ in range(2)]
    outcome = one.end()
    assert (outcome.status, outcome.code) == ("failed", 3)
    assert outcome.line.startswith("two processes say that they are rank 1 of 2")


def test_missing_ranks_are_named_when_start_up_ends(job: Callable[..., Job]) -> None:
    one = job(4, startup_s=0.5)
    _here = [FakeRank(one.address, rank, 4) for rank in (0, 2)]
    outcome = one.end()
    assert (outcome.status, outcome.ranks) == ("timeout", (1, 3))
    assert outcome.line.startswith("ranks 1, 3 did not arrive within 0 s (arrived: 0 on host0, 2 on host2)")


def test_a_world_that_does_not_fit_ends_with_its_code(job: Callable[..., Job]) -> None:
    def refuse(hellos: list[dict[str, Any]]) -> dict[str, Any]:
        raise WorldError("versions differ", code=2)

    one = job(1, make_plan=refuse)
    rank = FakeRank(one.address, 0, 1)
    outcome = one.end()
    assert (outcome.code, outcome.line) == (2, "versions differ")
    assert rank.receive()[0] == {"type": "stop", "code": 2}


def test_a_vanished_rank_is_blamed_before_those_it_broke(job: Callable[..., Job]) -> None:
    one = job(3)
    ranks = one.arrive()
    ranks[0].send("failed", reason="connection closed by peer", code=3, beat=beat(0, 1, 7))
    ranks[1].send("terminated", beat=beat(1, 1, 7))
    ranks[2].socket.close()
    outcome = one.end()
    assert (outcome.code, outcome.ranks) == (3, (2,))
    assert outcome.line.startswith("rank 2 on host2 ended without a word")
    assert ranks[0].receive()[0] == {"type": "stop", "code": 3}


def test_a_rank_that_cannot_be_sent_to_and_has_vanished_at_once(job: Callable[..., Job]) -> None:
    """Both show in one turn of the hub: the failed send drops the connection whose end is then still to be read."""
    go = threading.Event()
    one = job(2)
    ranks = one.arrive()
    one.hub._on_event = lambda event: go.wait(5)
    ranks[0].send("event", kind="point")
    time.sleep(0.2)  # the hub now waits in the event, and the rest arrives meanwhile
    ranks[0].send("share", value=1)
    time.sleep(0.1)
    ranks[1].socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    ranks[1].socket.close()
    time.sleep(0.1)
    go.set()
    assert one.end().ranks == (1,)


def test_a_killed_child_is_named_with_its_signal(job: Callable[..., Job]) -> None:
    one = job(2, beats=dict)
    ranks = one.arrive()
    ranks[0].send("expect", seconds=60, doing="warming up case one")
    ranks[1].socket.close()
    one.ended = [Exit(rank=1, code=-9)]
    assert one.end().line == "rank 1 on host1 was killed by signal 9 (SIGKILL) while warming up case one"


def test_only_a_failure_names_the_rank_that_reports_it(job: Callable[..., Job]) -> None:
    one = job(2)
    ranks = one.arrive()
    ranks[1].send("failed", reason="cannot write /x (No space left on device)", code=3, beat=beat(1, 1, 4))
    outcome = one.end()
    assert (
        outcome.line == "rank 1 on host1 failed: cannot write /x (No space left on device) during case one, iteration 4"
    )


def test_a_silent_rank_is_named_at_the_deadline(job: Callable[..., Job]) -> None:
    one = job(3)
    ranks = one.arrive()
    ranks[0].send("expect", seconds=0.3, doing="case one")
    for rank in (0, 1):
        assert ranks[rank].receive()[0]["type"] == "where"
        ranks[rank].send("here", beat=beat(rank, 1, 9))
    outcome = one.end()
    assert (outcome.status, outcome.code, outcome.ranks) == ("timeout", 3, (2,))
    assert outcome.line == ("rank 2 on host2 did not answer (stopped, frozen or unreachable) within 0 s while case one")


def test_a_rank_that_lags_behind_is_named_at_the_deadline(job: Callable[..., Job]) -> None:
    one = job(3)
    ranks = one.arrive()
    ranks[0].send("expect", seconds=0.3, doing="case one")
    for rank, iteration in ((0, 9), (1, 8), (2, 9)):
        assert ranks[rank].receive()[0]["type"] == "where"
        ranks[rank].send("here", beat=beat(rank, 1, iteration))
    outcome = one.end()
    assert outcome.ranks == (1,)
    assert outcome.line == "rank 1 on host1 did not arrive within 0 s during case one, iteration 8"


def test_a_gather_moves_the_deadline_on(job: Callable[..., Job]) -> None:
    one = job(1)
    (rank,) = one.arrive()
    rank.send("expect", seconds=1.0, doing="case one")
    for _ in range(4):
        time.sleep(0.4)
        rank.send("gather", value=None)
        assert rank.receive()[0]["type"] == "gathered"
    rank.send("bye")
    assert one.end() == Outcome.ok()


def test_an_interrupt_says_where_the_run_was(job: Callable[..., Job]) -> None:
    one = job(2)
    ranks = one.arrive()
    ranks[0].send("expect", seconds=60, doing="warming up case zero")
    time.sleep(0.3)
    one.hub.interrupt("interrupted")
    outcome = one.end()
    assert (outcome.status, outcome.code) == ("interrupted", 3)
    assert outcome.line == "interrupted while warming up case zero, ranks 0-1 on host0, host1"


def test_events_reach_the_head(job: Callable[..., Job]) -> None:
    one = job(1)
    (rank,) = one.arrive()
    rank.send("event", kind="point", point={"bytes": 8})
    rank.send("bye")
    one.end()
    assert one.events == [{"type": "event", "kind": "point", "point": {"bytes": 8}}]


def test_a_stopped_process_is_told_from_one_that_cannot_answer(job: Callable[..., Job]) -> None:
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(victim.pid, signal.SIGSTOP)
        one = job(2, home="host1")
        one.ranks = [FakeRank(one.address, 0, 2), FakeRank(one.address, 1, 2, pid=victim.pid)]
        assert [rank.receive()[0]["type"] for rank in one.ranks] == ["welcome", "welcome"]
        one.ranks[0].send("failed", reason="timed out waiting for a peer", code=3, beat=beat(0, -1, 0, "starting"))
        outcome = one.end()
        assert outcome.ranks == (1,)
        assert outcome.line.startswith("rank 1 on host1 is stopped (SIGSTOP or a debugger)")
    finally:
        victim.kill()
        victim.wait()


def test_a_rank_killed_before_it_arrived_is_named_from_the_launchers_words(job: Callable[..., Job]) -> None:
    one = job(3, home="here", patient=True)
    ranks = [FakeRank(one.address, rank, 3) for rank in (0, 2)]
    for rank in ranks:
        rank.send("terminated", beat=beat(rank.rank, -1, 0, "starting"))
    words = "prterun noticed that process rank 1 with PID 4711 on node here exited on signal 9 (Killed)."
    one.ended = [Exit(rank=None, code=137, words=words)]
    outcome = one.end()
    assert outcome.ranks == (1,)
    assert outcome.line.startswith("rank 1 on here was killed by signal 9 (SIGKILL)")
