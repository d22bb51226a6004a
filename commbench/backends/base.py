"""What a backend is: it turns a case into an operation that can be run, and nothing more.

Backends do not time, check or decide; ``measure`` does, through this interface.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from commbench.backends.experts import AllToAllV, ExpertLibrary
from commbench.backends.forcing import Chosen
from commbench.cases import Case
from commbench.measure.data import Pattern
from commbench.measure.operation import Bytes, Messenger, Operation
from commbench.measure.timed import Loop


class BackendError(RuntimeError):
    """A library that cannot start or cannot do what was asked: one line that says what to do."""


def _alone(value: Any, decide: Callable[[list[Any]], Any]) -> Any:
    return decide([value])


def _unwatched(seconds: float, doing: str) -> None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What a backend may know of the job. ``share(value)`` hands rank 0's JSON value to every rank.

    ``agree(value, decide)`` hands every rank what ``decide`` makes of all ranks' values, in their order, at rank 0.
    ``expect(seconds, doing)``, from rank 0, gives all ranks that long from now until they are heard of again.
    ``address`` and ``interface`` are this rank's own on the job's network (loopback when all share a host).
    ``forced``: by collective the algorithm that the backend shall make the library use; one in all.
    """

    rank: int
    world: int
    local_rank: int
    hosts: tuple[str, ...]
    address: str
    interface: str
    share: Callable[[Any], Any]
    agree: Callable[[Any, Callable[[list[Any]], Any]], Any] = _alone
    expect: Callable[[float, str], None] = _unwatched
    forced: Mapping[str, str] = field(default_factory=dict)


class Backend(Protocol):
    """The interface. Ranks in ``members`` are world ranks in group order; methods are called on every rank alike."""

    name: str

    def start(self, context: Context) -> None:
        """Bring the library up; BackendError with one line if it cannot."""

    def version(self) -> str: ...

    def settings(self) -> dict[str, str]:
        """What was set or chosen in the library that bears on speed."""

    def why_not(self, case: Case) -> str | None:
        """Why the library has no such operation, or None. Only this may be known of a case before it is tried."""

    def note(self, case: Case) -> str | None:
        """What a reader of the number must know of how the library does it."""

    def why_not_forced(self, collective: str) -> str | None:
        """Why the library, by its own account, does not use the algorithm that it was told to; None where it does, or
        where only a call shows it. Asked once it has started."""

    def chosen(self, case: Case, operation: Operation | None) -> list[Chosen] | None:
        """What this rank's library says that it takes for a case, whose ``operation`` (None: this rank takes no part) it may
        perform once more for that; asked on all ranks in step, after the case was timed. None where it does not say.
        """

    def tainted(self) -> str | None:
        """Why no time of this job is to be compared with others, or None; asked once it has started."""

    def gpu(self) -> str | None:
        """The UUID of this rank's device, asked once it has started; None where buffers lie in host memory."""

    def estimate(self, case: Case, members: tuple[int, ...]) -> float | None:
        """Seconds that the library's own model of itself puts on its operation; None where it has none, or tells none.

        Asked on rank 0 alone, ``members`` being any group.
        """

    def join(self, groups: tuple[tuple[int, ...], ...]) -> None:
        """Make the communicator of every group (a call of all ranks, before ``operation``)."""

    def operation(self, case: Case, members: tuple[int, ...], pattern: Pattern) -> Operation:
        """This rank's operation, on fresh buffers. ``members`` includes this rank and has been joined."""

    def loop(self, case: Case) -> Loop | None:
        """What times this case's operations, prepared so that nothing is made in timed code; None: a Python loop does.

        Asked once the case's operations have been made, and the same kind on every rank.
        """

    def messenger(self, members: tuple[int, ...]) -> Messenger:
        """Messages within a group that has been joined, of which this rank is one."""

    def all_to_all_v(self, members: tuple[int, ...]) -> AllToAllV | None:
        """Exchanges of torch's memory within a group that has been joined; None where it has none."""

    def expert_library(self, members: tuple[int, ...]) -> ExpertLibrary | None:
        """The library's own dispatch and combine within a group that has been joined; None where it has none."""

    def why_not_reduce(self, dtype: str, op: str) -> str | None:
        """Why a messenger of this backend cannot reduce elements of this type by this op, or None."""

    def device_memory(self) -> int | None:
        """Bytes that new buffers may take on this rank's device; None where buffers lie in host memory."""

    def stop(self) -> None: ...


def aligned(size: int) -> Bytes:
    """Host memory at a page boundary, touched, so that no first-touch fault falls into a timed window."""
    page = 4096
    raw = np.empty(size + page, dtype=np.uint8)
    start = -raw.ctypes.data % page
    view: Bytes = raw[start : start + size]
    view.fill(0)
    return view
