"""The middle of the star: relays between ranks, watches deadlines, and says who did not arrive.

It runs in the process that started the ranks, or in a thread of rank 0 under somebody else's launcher, and never
touches the backend that is being measured. Standard library only.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from commbench.launch.heartbeat import Beat
from commbench.launch.judge import Evidence, Outcome, judge_fault, judge_startup
from commbench.launch.place import WorldError
from commbench.launch.startup import DEFAULT_S
from commbench.launch.wire import Reader, WireError, make_silent, pack

TICK_S = 0.1
TICK_FAULT_S = 0.02
# After the first sign of a fault, how long the other signs may take: the cause often shows after its effects.
SETTLE_S = 1.0
# A rank that vanished is cause enough, and its launcher is about to end this process too: Open MPI's sends SIGTERM a
# quarter of a second after a rank's death and SIGKILL after another.
SETTLE_LOST_S = 0.1
ANSWER_S = 2.0


@dataclass(kw_only=True, slots=True)
class _Peer:
    """One connection; ``rank`` is None until its token has been checked."""

    socket: socket.socket
    reader: Reader = field(default_factory=Reader)
    rank: int | None = None
    unsent: bytearray = field(default_factory=bytearray)

    @property
    def open(self) -> bool:
        return self.socket.fileno() >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """A child process that ended: its rank where one child is one rank, its code (negative: signal) and last words."""

    rank: int | None
    code: int
    words: str = ""


class Hub:
    """Serves one launch, from the first rank's arrival to the last one's farewell.

    ``make_plan`` gets every rank's hello, in rank order, and returns what all ranks are told (with ``titles``, the
    cases' names); it raises WorldError when the world is not what it should be. ``watch`` returns the children that
    have ended, ``beats`` the heartbeats that can be read without asking; ``home`` is the host of children that end
    before they have said where they are; ``patient`` is true where no launcher can kill this process while it waits
    for what the launcher of the ranks says of a rank that never arrived.
    """

    def __init__(
        self, *, listener: socket.socket, world: int, token: str,
        make_plan: Callable[[list[dict[str, Any]]], dict[str, Any]],
        on_event: Callable[[dict[str, Any]], None],
        watch: Callable[[], Sequence[Exit]] = lambda: (),
        beats: Callable[[], dict[int, Beat]] = dict,
        startup_s: float = DEFAULT_S,
        home: str = "an unknown host", patient: bool = False,
    ) -> None:  # fmt: skip
        self._listener = listener
        self._token = token
        self._make_plan = make_plan
        self._on_event = on_event
        self._watch = watch
        self._beats = beats
        self._evidence = Evidence(world=world, home=home)
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}
        # A rank that is not rank 0 need not wait for the others: it may be several gathers ahead.
        self._gathering: list[deque[tuple[Any, bytes]]] = [deque() for _ in range(world)]
        self._startup_ends = time.monotonic() + startup_s
        self._startup_s = startup_s
        self._deadline: float | None = None
        self._deadline_span = 0.0
        self._asked_at: float | None = None
        self._fault_at: float | None = None
        self._interrupted: str | None = None
        self._interrupted_at = 0.0
        self._patient = patient
        self._outcome: Outcome | None = None

    def interrupt(self, reason: str) -> None:
        """End the launch from outside (Ctrl-C); takes effect within a tick. Safe from a signal handler."""
        self._interrupted, self._interrupted_at = reason, time.monotonic()

    def run(self) -> Outcome:
        """Serve until every rank has said goodbye or something has gone wrong; then the ranks wait for ``close``."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        while self._outcome is None:
            for key, mask in self._selector.select(TICK_S if self._fault_at is None else TICK_FAULT_S):
                self._serve(key.data, mask)
            self._look()
        return self._outcome

    def close(self) -> None:
        """Tell the ranks to stop if anything went wrong, and hang up."""
        code = self._outcome.code if self._outcome is not None else 3
        if code != 0:
            for rank in list(self._peers):
                self._send(rank, {"type": "stop", "code": code})
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    # -- connections ---------------------------------------------------------------------------

    def _serve(self, peer: _Peer | None, mask: int) -> None:
        if peer is None:
            self._accept()
            return
        # What another's event has made of it: a peer that could not be sent to is gone, and its own event is stale.
        if mask & selectors.EVENT_WRITE and peer.open:
            self._flush(peer)
        if mask & selectors.EVENT_READ and peer.open:
            self._read(peer)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        make_silent(connection)
        self._selector.register(connection, selectors.EVENT_READ, _Peer(socket=connection))

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(1 << 20)
            if not data:
                raise WireError("closed")
            frames = peer.reader.feed(data)
        except BlockingIOError:
            return
        except OSError:
            self._drop(peer)
            return
        for header, blob in frames:
            if peer.rank is None and not self._admit(peer, header):
                return
            self._handle(peer, header, blob)

    def _admit(self, peer: _Peer, hello: dict[str, Any]) -> bool:
        """Whether a newcomer belongs to this job: it knows the token and no one has its rank."""
        rank = hello.get("rank")
        token = str(hello.get("token", ""))
        if hello.get("type") != "hello" or not hmac.compare_digest(token.encode(), self._token.encode()):
            self._forget(peer)
            return False
        if not isinstance(rank, int) or not 0 <= rank < self._evidence.world or rank in self._peers:
            self._finish(
                Outcome.failed(
                    f"two processes say that they are rank {rank} of {self._evidence.world}: "
                    "start every rank with one launcher, and unset stale RANK/WORLD_SIZE variables"
                )
            )
            return False
        peer.rank = rank
        peer.reader.trust()
        self._peers[rank] = peer
        hello.pop("token")
        self._evidence.arrive(rank, hello)
        return True

    def _drop(self, peer: _Peer) -> None:
        """A closed connection: a stranger's is nothing, a rank's is a fault unless it said goodbye."""
        self._forget(peer)
        if peer.rank is not None and self._evidence.lose(peer.rank):
            self._fault()

    def _forget(self, peer: _Peer) -> None:
        self._selector.unregister(peer.socket)
        peer.socket.close()

    def _send(self, rank: int, header: dict[str, Any], blob: bytes = b"") -> None:
        peer = self._peers.get(rank)
        if peer is None or not peer.open:
            return
        peer.unsent += pack(header, blob)
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        try:
            while peer.unsent:
                sent = peer.socket.send(memoryview(peer.unsent)[: 1 << 20])
                del peer.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self._selector.modify(peer.socket, wanted, peer)

    # -- frames --------------------------------------------------------------------------------

    def _handle(self, peer: _Peer, header: dict[str, Any], blob: bytes) -> None:
        rank = peer.rank
        assert rank is not None
        kind = header["type"]
        if kind == "hello":
            if len(self._peers) == self._evidence.world:
                self._everyone_is_here()
        elif kind == "gather":
            self._gathering[rank].append((header["value"], blob))
            if all(self._gathering):
                self._gathered()
        elif kind == "share":
            for other in self._peers:
                if other != 0:
                    self._send(other, {"type": "shared", "value": header["value"]})
        elif kind == "expect":
            self._deadline_span = header["seconds"]
            self._deadline = time.monotonic() + self._deadline_span
            self._evidence.doing = header["doing"]
            self._on_event({"kind": "doing", "doing": header["doing"]})
        elif kind == "event":
            self._on_event(header)
        elif kind == "here":
            self._evidence.answer(rank, header["beat"])
        elif kind == "failed":
            self._evidence.fail(rank, header["reason"], header["code"], header["beat"])
            self._fault()
        elif kind == "terminated":
            self._evidence.terminate(rank, header["beat"])
            self._fault()
        elif kind == "bye":
            self._evidence.leave(rank)

    def _everyone_is_here(self) -> None:
        try:
            plan = self._make_plan([self._evidence.hellos[rank] for rank in range(self._evidence.world)])
        except WorldError as error:
            self._finish(Outcome.failed(str(error), code=error.code))
            return
        self._evidence.titles = plan["titles"]
        self._evidence.started = True
        for rank in self._peers:
            self._send(rank, {"type": "welcome", "plan": plan})
        self._deadline = None

    def _gathered(self) -> None:
        parts = [waiting.popleft() for waiting in self._gathering]
        if self._deadline is not None:
            self._deadline = time.monotonic() + self._deadline_span
        header = {"type": "gathered", "values": [v for v, _ in parts], "lengths": [len(b) for _, b in parts]}
        self._send(0, header, b"".join(blob for _, blob in parts))

    # -- faults --------------------------------------------------------------------------------

    def _look(self) -> None:
        """Once a tick: children, deadlines, the end."""
        now = time.monotonic()
        for ended in self._watch():
            if self._evidence.end(ended.rank, ended.code, ended.words):
                self._fault()
        if self._outcome is not None:
            return
        if self._interrupted is not None and not self._evidence.lost and now - self._interrupted_at > SETTLE_LOST_S:
            self._finish(Outcome.interrupted(self._interrupted, self._evidence, self._beats()))
        elif self._evidence.all_left():
            self._finish(Outcome.ok())
        elif self._fault_at is not None:
            hurry = (self._evidence.lost or self._evidence.terminated) and (self._evidence.started or not self._patient)
            if now - self._fault_at > (SETTLE_LOST_S if hurry else SETTLE_S):
                self._finish(judge_fault(self._evidence, self._beats()))
        elif not self._evidence.started:
            if now > self._startup_ends:
                self._finish(judge_startup(self._evidence, self._startup_s))
        elif self._asked_at is not None:
            if now - self._asked_at > ANSWER_S:
                self._finish(judge_fault(self._evidence, self._beats(), deadline_s=self._deadline_span))
        elif self._deadline is not None and now > self._deadline:
            self._asked_at = now
            self._evidence.ask()
            for rank in self._peers:
                self._send(rank, {"type": "where"})

    def _fault(self) -> None:
        if self._fault_at is None:
            self._fault_at = time.monotonic()

    def _finish(self, outcome: Outcome) -> None:
        if self._outcome is None:
            self._outcome = outcome
