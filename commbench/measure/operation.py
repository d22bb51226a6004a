"""What measuring knows of a library: operations to run, and messages to make algorithms and patterns of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple, Protocol

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
    operation overwrites its own input. ``program`` is what the backend's own loop takes for it, where it has one.
    ``capture()`` makes a graph of the device's of it and returns what launches that; RuntimeError with the library's
    reason where it cannot be captured, None where there is no device. ``phases()``: how many ns each phase of the last
    run took, for operations that have some. ``alone()``: seconds of what it does besides waiting for messages, where that
    can be told; a call of all ranks.
    """

    run: Callable[[], Any]
    enqueue: Callable[[], Any]
    input: Bytes
    output: Bytes
    finish: Callable[[], Any] = _nothing
    upload: Callable[[], Any] = _nothing
    download: Callable[[], Any] = _nothing
    repeatable: bool = True
    program: Any = None
    capture: Callable[[], Callable[[], Any]] | None = None
    phases: Callable[[], NDArray[np.int64]] | None = None
    alone: Callable[[], float | None] | None = None


def in_order(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """One call that makes all of these."""
    if len(calls) == 1:
        return calls[0]

    def run() -> None:
        for call in calls:
            call()

    return run


def rotate(sets: Sequence[Sequence[Callable[[], Any]]]) -> Callable[[int], Any]:
    """So many times the calls of one set, each time of the next."""
    rotation = cycle([in_order(calls) for calls in sets])

    def repeat(times: int) -> None:
        for _ in range(times):
            next(rotation)()

    return repeat


class Post(NamedTuple):
    """One side of a message: memory to send from or to receive into, the other rank, and a tag (below 32768).

    Messages from one rank to another that have the same tag meet in the order in which they are posted. Those of one
    step have no order: give them different tags, or the same number of them to both ranks' steps.
    """

    memory: Any
    peer: int
    tag: int = 0


class Messenger(Protocol):
    """Messages among the ranks of one group, and what can be done to memory of the library's kind between them.

    ``peer`` is a rank within the group. Memory is one-dimensional and of bytes (a numpy array or a torch tensor on the
    rank's device); a slice of it is memory too. Every method but ``finish`` prepares: what it returns does the work,
    again at each call, in the order of the calls, and makes the host wait no more than the library does.
    """

    def buffer(self, size: int) -> Any:
        """``size`` bytes of memory, all zero, touched, and at a page boundary where it is the host's."""

    def step(self, sends: Sequence[Post], receives: Sequence[Post]) -> Callable[[], Any]:
        """Post all of these messages together and wait for all of them.

        A rank and its peers must prepare matching steps; empty memory makes an empty message, which is sent. A library
        that works on a device lets the device wait, not the host: call ``finish`` before reading what has arrived.
        """

    def copy(self, target: Any, source: Any) -> Callable[[], Any]:
        """``target = source``, of equal length and not overlapping."""

    def reduce(self, target: Any, left: Any, right: Any, dtype: str, op: str) -> Callable[[], Any]:
        """``target = left op right``, element by element; ``target`` may be ``left`` or ``right``.

        ``dtype`` and ``op`` are a case's; only those that the backend's ``why_not_reduce`` has no objection to.
        """

    def finish(self) -> None:
        """Wait until all that was called is done."""

    def operation(self, calls: Sequence[Callable[[], Any]], given: Any, taken: Any, repeatable: bool) -> Operation:
        """The operation that these calls, in their order, perform on memory that holds this rank's input and output."""

    def repeat(self, sets: Sequence[Sequence[Callable[[], Any]]]) -> Callable[[int], Any]:
        """What performs the calls of one set, so many times, each time of the next set: as an operation is timed."""
