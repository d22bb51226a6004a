"""What measuring knows of a library: operations to run, and messages to calibrate links with. Backends make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def _nothing() -> None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One case on one set of buffers of this rank.

    ``run()`` performs it and returns when this rank's part is complete; ``enqueue()`` starts it, in order after what
    was enqueued before, and ``finish()`` waits for all of that (on a CPU library enqueue is run and finish nothing).
    ``input`` and ``output`` are byte views in host memory, empty where this rank has none; ``upload()`` makes a
    written input visible to the library and ``download()`` its output to the host. ``repeatable`` is false where the
    operation overwrites its own input.
    """

    run: Callable[[], Any]
    enqueue: Callable[[], Any]
    input: Bytes
    output: Bytes
    finish: Callable[[], Any] = _nothing
    upload: Callable[[], Any] = _nothing
    download: Callable[[], Any] = _nothing
    repeatable: bool = True


class PointToPoint(Protocol):
    """Messages of one fixed size between this rank and others, for link calibration; each call completes locally."""

    def send(self, peer: int) -> None: ...

    def recv(self, peer: int) -> None: ...

    def exchange(self, to: int, source: int) -> None:
        """Send and receive at the same time."""
