"""How long each phase of a call takes: stamps between them on the host, events where a device does the work."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class Phases:
    """The stamps of one call after another. ``mark`` ends a phase; the first one begins the call."""

    def __init__(self, device: torch.device) -> None:
        self._marks: list[Any] = []
        self._on_device = device.type == "cuda"
        self._captured = False
        self._stamp: Callable[[], Any] = self._event if self._on_device else time.monotonic_ns

    def begin(self) -> None:
        # Events of a graph cannot be asked for their times.
        self._captured = self._on_device and torch.cuda.is_current_stream_capturing()
        self._marks = []
        self.mark()

    def mark(self) -> None:
        if not self._captured:
            self._marks.append(self._stamp())

    @staticmethod
    def _event() -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def durations_ns(self) -> NDArray[np.int64]:
        """Of each phase of the last call, once the device is done with it."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._on_device:
            return np.array([round(first.elapsed_time(last) * 1e6) for first, last in pairs], dtype=np.int64)
        return np.array([last - first for first, last in pairs], dtype=np.int64)
