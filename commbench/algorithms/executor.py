"""Carries out a schedule with a backend's messages.

Everything is prepared: a run calls, in order, what the messenger made of a plan's copies, steps and reductions. A
schedule of several channels is carried out as one channel, its rounds in order (``Schedule.merged``): gloo cannot wait
for whichever of several messages comes first, and what is timed should be the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commbench.algorithms.plan import Copy, Exchange, Mail, Plan, Reduce, Span, make_plan
from commbench.backends.base import Backend
from commbench.cases import Case
from commbench.measure.data import Pattern
from commbench.measure.operation import Messenger, Operation, Post
from commbench.schedules.own import own_pieces, own_schedule, why_not_own

# The libraries' broadcasts have one buffer; a copy at the root would be all that a second one adds.
ONE_BUFFER = ("broadcast",)


def why_not(case: Case, groups: tuple[tuple[int, ...], ...], host_of: tuple[int, ...], backend: Backend) -> str | None:
    """Why the case's own algorithm cannot be carried out, the same on every rank, or None.

    ``groups`` are world ranks, ``host_of[rank]`` numbers the host of each.
    """
    for group in groups:
        hosts = tuple(host_of[rank] for rank in group)
        if reason := why_not_own(case.collective, case.algorithm, hosts):
            return reason
    return backend.why_not_reduce(case.dtype, case.reduce_op) if case.reduce_op else None


def note(case: Case) -> str | None:
    """What a reader of the number must know of how it is done."""
    found = []
    pieces = own_pieces(case.collective, case.algorithm, case.bytes)
    if pieces > 1:
        found.append(f"in {pieces} pieces")
    if case.collective in ONE_BUFFER and case.placement == "out":
        found.append(f"commbench's own {case.collective} has one buffer: it is always in place")
    return "; ".join(found) or None


class Executor:
    """One rank's part in one case. Sets of buffers share the memory that is neither input nor output."""

    def __init__(self, case: Case, members: tuple[int, ...], host_of: tuple[int, ...], messenger: Messenger) -> None:
        hosts = tuple(host_of[rank] for rank in members)
        self._case = case
        self._messenger = messenger
        self._schedule = own_schedule(case.collective, case.algorithm, case.bytes, hosts, case.root)
        self._plan: Plan | None = None
        self._shared: dict[str, Any] = {}

    def operation(self, pattern: Pattern, rank: int) -> Operation:
        """The operation of group rank ``rank`` on fresh buffers for its input and output."""
        case, messenger = self._case, self._messenger
        in_place = case.placement == "in" or case.collective in ONE_BUFFER
        if self._plan is None:
            slices = pattern.in_place_slices() if in_place else None
            self._plan = make_plan(self._schedule, rank, case.block_elements, slices)
            for name in ("scratch", "staging"):
                self._shared[name] = messenger.buffer(self._plan.sizes[name] * case.itemsize)
        plan = self._plan
        own = {name: messenger.buffer(plan.sizes[name] * case.itemsize) for name in ("input", "output")}
        memory = _Memory(own | self._shared, case.itemsize)
        calls = tuple(_prepare(action, memory, messenger, case) for action in plan.actions)

        return messenger.operation(
            calls, memory.of(plan.given), memory.of(plan.taken), not (in_place and case.spec.reduces)
        )


class _Memory:
    def __init__(self, buffers: dict[str, Any], itemsize: int) -> None:
        self._buffers, self._itemsize = buffers, itemsize

    def of(self, span: Span) -> Any:
        return self._buffers[span.buffer][span.start * self._itemsize : span.stop * self._itemsize]

    def posts(self, mail: tuple[Mail, ...]) -> list[Post]:
        return [Post(self.of(one.span), one.peer, one.tag) for one in mail]


def _prepare(action: Copy | Reduce | Exchange, memory: _Memory, messenger: Messenger, case: Case) -> Callable[[], Any]:
    if isinstance(action, Exchange):
        return messenger.step(memory.posts(action.sends), memory.posts(action.receives))
    if isinstance(action, Copy):
        return messenger.copy(memory.of(action.target), memory.of(action.source))
    assert case.reduce_op is not None, "only collectives that reduce have additions in their schedules"
    target, left, right = map(memory.of, action)
    return messenger.reduce(target, left, right, case.dtype, case.reduce_op)
