"""Ctrl-C, and the signals that ask a process to end, at any moment of a run: in order the first time."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, final

from commbench.launch.hub import Hub

_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@final
class Interrupts:
    """While entered, notes who asks to end and passes it on to the hub; a second Ctrl-C does what it always did.

    ``reason`` is what to tell a person, None as long as nobody asked. For the main thread.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._hub: Hub | None = None
        self._before: dict[int, Any] = {}
        self._awake, self._wake = os.pipe()

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._ask) for number in _ASKING}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: a library in C had it, which Python cannot give it back to.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.close(self._awake)
        os.close(self._wake)

    @contextmanager
    def reach(self, hub: Hub) -> Iterator[None]:
        """Within, the hub is told, so that it ends the launch."""
        self._hub = hub
        try:
            if self.reason is not None:
                hub.interrupt(self.reason)
            yield
        finally:
            self._hub = None

    def sleep(self, seconds: float) -> None:
        """Until the time is over or somebody asks to end, whichever is first."""
        if self.reason is None and seconds > 0:
            select.select([self._awake], [], [], seconds)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        name = signal.Signals(number).name
        self.reason = "interrupted" if number == signal.SIGINT else f"told to end ({name})"
        os.write(self._wake, b"!")
        if self._hub is not None:
            self._hub.interrupt(self.reason)
