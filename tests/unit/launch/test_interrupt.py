"""Ctrl-C at any moment of a run."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from commbench.launch.interrupt import Interrupts


class Hub:
    """Of a hub what is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def interrupt(self, reason: str) -> None:
        self.told.append(reason)


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "told to end (SIGTERM)")]
)
def test_a_pause_ends_at_once(number: signal.Signals, reason: str) -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
        began = time.monotonic()
        interrupts.sleep(30.0)
        assert time.monotonic() - began < 10.0
        assert interrupts.reason == reason
        interrupts.sleep(30.0)  # and there is no other
        assert time.monotonic() - began < 10.0
    assert signal.getsignal(signal.SIGINT) is before


def test_the_hub_is_told_while_it_is_within_reach() -> None:
    first, second, late = Hub(), Hub(), Hub()
    with Interrupts() as interrupts:
        with interrupts.reach(first):  # type: ignore[arg-type]
            pass
        with interrupts.reach(second):  # type: ignore[arg-type]
            signal.raise_signal(signal.SIGINT)
        with interrupts.reach(late):  # type: ignore[arg-type]
            pass
        assert [hub.told for hub in (first, second, late)] == [[], ["interrupted"], ["interrupted"]]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_pause_that_nobody_ends_takes_its_time() -> None:
    with Interrupts() as interrupts:
        began = time.monotonic()
        interrupts.sleep(0.1)
        assert time.monotonic() - began >= 0.1
        assert interrupts.reason is None
