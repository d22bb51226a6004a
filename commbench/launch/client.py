"""A rank's end of the control plane.

One TCP connection to the hub. A thread waits on it and wakes only when something arrives: a frame for the main
thread, a question where this rank is, an order to stop, or the end of the hub. Between those it costs nothing,
so it does not disturb what is timed. Standard library only.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from commbench.launch.heartbeat import Heartbeat
from commbench.launch.startup import DEFAULT_S
from commbench.launch.wire import Reader, WireError, make_silent, pack

EXIT_FAILED = 3
FAREWELL_S = 1.5


class HubGone(ConnectionError):
    """The process that holds the star together ended or cut this rank off."""


def connect(address: tuple[str, int], timeout_s: float) -> socket.socket:
    """A connection to the hub, tried again until ``timeout_s`` because ranks start in any order."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection(address, timeout=max(0.1, deadline - time.monotonic()))
            break
        except OSError as error:
            if time.monotonic() >= deadline:
                raise HubGone(
                    f"no answer from rank 0 at {address[0]}:{address[1]} within {timeout_s:.0f} s ({error.strerror or error}): "
                    "check that every rank can reach it and that rank 0 is alive"
                ) from None
            time.sleep(0.05)
    connection.settimeout(None)
    make_silent(connection)
    return connection


class Client:
    """Gather, share and report over the star. All methods but the thread's are for the main thread."""

    def __init__(
        self, *, address: tuple[str, int], token: str, hello: dict[str, Any], heartbeat: Heartbeat,
        timeout_s: float = DEFAULT_S, on_hub_gone: Callable[[], None] | None = None, obeys_stop: bool = True,
    ) -> None:  # fmt: skip
        """``obeys_stop`` is false where the hub lives in this process and ends it itself, in its own time."""
        self.rank: int = hello["rank"]
        self.world: int = hello["world"]
        self._heartbeat = heartbeat
        self._on_hub_gone = on_hub_gone
        self._obeys_stop = obeys_stop
        self._ends_at: float | None = None
        self._frames: queue.SimpleQueue[tuple[dict[str, Any], bytes] | None] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._finished = False
        self.plan: dict[str, Any] = {}
        self._socket = connect(address, timeout_s)
        self._signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        # The C-level handler writes here even while the main thread is inside a library call.
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        self._send({"type": "hello", "token": token, **hello})
        threading.Thread(target=self._listen, name="commbench-control", daemon=True).start()

    def welcome(self) -> dict[str, Any]:
        """What the hub sends once every rank has arrived and the world has been verified."""
        self.plan = self._next("welcome")[0]["plan"]
        return self.plan

    def where(self) -> str:
        """This rank's position, in words."""
        beat = self._heartbeat.read()
        titles = self.plan.get("titles", [])
        return f"during {titles[beat.case]}" if 0 <= beat.case < len(titles) else "during start-up"

    def gather(self, value: Any, blob: bytes = b"") -> list[tuple[Any, bytes]] | None:
        """Every rank's (value, blob) in rank order at rank 0, None elsewhere. ``value`` is JSON."""
        self._send({"type": "gather", "value": value}, blob)
        if self.rank != 0:
            return None
        header, joined = self._next("gathered")
        parts, offset = [], 0
        for item, length in zip(header["values"], header["lengths"], strict=True):
            parts.append((item, joined[offset : offset + length]))
            offset += length
        return parts

    def share(self, value: Any = None) -> Any:
        """Rank 0's value on every rank; the others pass nothing."""
        if self.rank == 0:
            self._send({"type": "share", "value": value})
            return value
        return self._next("shared")[0]["value"]

    def agree(self, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """What ``decide`` makes of every rank's value, at rank 0, told to all."""
        gathered = self.gather(value)
        return self.share(decide([item for item, _ in gathered]) if gathered is not None else None)

    def expect(self, seconds: float, doing: str) -> None:
        """From rank 0: something must come from every rank within ``seconds`` while ``doing``."""
        if self.rank == 0:
            self._send({"type": "expect", "seconds": seconds, "doing": doing})

    @property
    def beat_address(self) -> int:
        return self._heartbeat.iteration_address

    def beat(self, phase: str, iteration: int = 0, case: int | None = None) -> None:
        """Note where this rank is."""
        self._heartbeat.set(phase, iteration, case)

    @property
    def address(self) -> str:
        """This rank's own address on the job's network: the one that reaches the hub."""
        return str(self._socket.getsockname()[0])

    def event(self, kind: str, **fields: Any) -> None:
        """From rank 0: news for whoever watches the run."""
        self._send({"type": "event", "kind": kind, **fields})

    def fail(self, reason: str, code: int = EXIT_FAILED) -> NoReturn:
        """Tell the hub why this rank cannot go on, and end the process once it has heard."""
        try:
            self._send({"type": "failed", "reason": reason, "code": code, "beat": self._heartbeat.read().to_dict()})
            time.sleep(10.0)  # the hub answers with the order to stop, which ends this process
        except OSError:
            pass
        os._exit(code)

    def finish(self) -> None:
        """A good end: the connection's close is no fault."""
        self._finished = True
        self._send({"type": "bye"})

    # -- the listening thread ------------------------------------------------------------------

    def _listen(self) -> None:
        reader = Reader()
        reader.trust()
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._signals, select.POLLIN)
        while True:
            wait = None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic()) * 1000
            ready = {descriptor for descriptor, _ in poll.poll(wait)}
            if self._ends_at is not None and time.monotonic() >= self._ends_at:
                os._exit(EXIT_FAILED)
            if self._signals in ready and signal.SIGTERM in os.read(self._signals, 64):
                self._terminated()
            if self._socket.fileno() in ready:
                try:
                    data = self._socket.recv(1 << 20)
                    frames = reader.feed(data) if data else None
                except OSError:
                    frames = None
                if frames is None:
                    self._hub_gone()
                    return
                for header, blob in frames:
                    self._dispatch(header, blob)

    def _dispatch(self, header: dict[str, Any], blob: bytes) -> None:
        kind = header["type"]
        if kind == "stop":
            if self._obeys_stop:
                os._exit(header["code"])
            return
        if kind == "where":
            self._send({"type": "here", "beat": self._heartbeat.read().to_dict()})
            if os.environ.get("COMMBENCH_DEBUG"):
                faulthandler.dump_traceback(file=sys.stderr)
            return
        self._frames.put((header, blob))

    def _terminated(self) -> None:
        # A launcher ends its ranks by SIGTERM when one of them died: say so, that the hub does not blame this one,
        # and leave the hub a moment to speak before this process goes.
        if self._ends_at is None:
            self._ends_at = time.monotonic() + FAREWELL_S
            try:
                self._send({"type": "terminated", "beat": self._heartbeat.read().to_dict()})
            except OSError:
                pass  # the hub is gone: the closed connection tells the rest

    def _hub_gone(self) -> None:
        if self._finished or not self._obeys_stop:
            return
        if self._on_hub_gone is not None:
            self._on_hub_gone()
        os._exit(EXIT_FAILED)

    def _next(self, kind: str) -> tuple[dict[str, Any], bytes]:
        frame = self._frames.get()
        if frame is None or frame[0]["type"] != kind:
            raise WireError(f"expected {kind!r} from the hub, got {frame and frame[0]['type']!r}")
        return frame

    def _send(self, header: dict[str, Any], blob: bytes = b"") -> None:
        with self._sending:
            self._socket.sendall(pack(header, blob))
