"""A backend with what commbench puts on top of it: how a case is carried out, by the library or by its messages alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from commbench.algorithms import executor
from commbench.algorithms.executor import Executor
from commbench.backends import forcing, why_not_buffers, why_not_graph
from commbench.backends.base import Backend
from commbench.backends.forcing import Chosen
from commbench.cases import Case, Layout, is_own
from commbench.measure.control import Control
from commbench.measure.data import Pattern
from commbench.measure.loop import Measured
from commbench.measure.operation import Operation
from commbench.measure.prepare import Prepared, host_memory, prepare
from commbench.measure.timed import Loop
from commbench.records import Point

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """One backend on every rank of a world; ``unforced``: by collective, why it does not do as it was told."""

    backend: Backend
    control: Control
    layout: Layout
    seed: int
    unforced: Mapping[str, str | None] = field(default_factory=dict)

    def why_not(self, case: Case, groups: Groups) -> str | None:
        """Why a case cannot be carried out, known before it is tried, or None."""
        if reason := why_not_buffers(case) or why_not_graph(case):
            return reason
        if is_own(case.algorithm):
            return executor.why_not(case, groups, self.layout.host_of, self.backend)
        reason = None
        if forcing.is_forced(case.algorithm):
            reason = forcing.why_not(case.backend, case.collective, case.algorithm) or self.unforced[case.collective]
        return reason or self.backend.why_not(case)

    def prepare(self, case: Case, groups: Groups) -> Prepared:
        """The case's operations on this rank, on every rank in step."""
        backend, rank = self.backend, self.control.rank
        backend.join(groups)
        members = next((group for group in groups if rank in group), None)
        shared: Executor | None = None

        pattern: Pattern | None = None

        def make_data() -> Pattern | None:
            nonlocal pattern
            if members is not None:
                pattern = Pattern(
                    collective=case.spec, dtype=case.itemtype, op=case.reduce_op, ranks=len(members),
                    rank=members.index(rank), root=case.root, block_elements=case.block_elements, seed=self.seed,
                )  # fmt: skip
            return pattern

        def make() -> Operation:
            nonlocal shared
            assert members is not None
            assert pattern is not None
            if not is_own(case.algorithm):
                return backend.operation(case, members, pattern)
            # Its sets of buffers share one executor.
            if shared is None:
                shared = Executor(case, members, self.layout.host_of, backend.messenger(members))
            return shared.operation(pattern, members.index(rank))

        return prepare(case, sum(map(len, groups)), self.control, make_data, make, self.free_bytes)

    def free_bytes(self) -> float:
        """What buffers may take on this rank; a device's have as many copies on the host."""
        per_host = max(len(ranks) for ranks in self.layout.by_host())
        device, mine = self.backend.device_memory(), host_memory() / per_host
        return mine if device is None else min(mine, device)

    def loop(self, case: Case) -> Loop | None:
        """What times it, if not a Python loop."""
        return self.backend.loop(case)

    def describe(self, point: Point, case: Case, found: Measured) -> None:
        """What a point says beside what all do: nothing."""

    def matched(self, case: Case) -> None:
        """Another case to stand beside it: none."""

    def compare(self, point: Point, matched: Case, time_s: float) -> None:
        raise NotImplementedError

    def barrier(self, case: Case) -> Operation:
        """What starts a case's iterations together where clocks cannot be compared: a barrier of the whole world."""
        everyone = tuple(range(self.control.world))
        empty = replace(
            case, collective="barrier", algorithm="library", group="world", bytes=0, requested_bytes=0, reduce_op=None,
            placement="out", ranks=len(everyone), root=0,
        )  # fmt: skip
        pattern = Pattern(
            collective=empty.spec, dtype=empty.itemtype, op=None, ranks=len(everyone), rank=self.control.rank, root=0,
            block_elements=0, seed=0,
        )  # fmt: skip
        return self.backend.operation(empty, everyone, pattern)

    def chosen(self, case: Case, operations: list[Operation]) -> list[Chosen] | None:
        """What the library says that it takes, on any rank; None where it does not tell."""
        if is_own(case.algorithm):
            return None
        found = self.backend.chosen(case, operations[0] if operations else None)
        if found is None:
            return None
        every = self.control.agree(found, lambda each: sorted({tuple(one) for part in each for one in part}, key=str))
        return [Chosen(*one) for one in every]

    def note(self, case: Case) -> str | None:
        """What a reader of the number must know of how it was carried out."""
        if not is_own(case.algorithm):
            forced = forcing.note_of(case.backend, case, self.backend.settings())
            return "; ".join(filter(None, (forced, self.backend.note(case)))) or None
        # What is to be said of the library's messages holds for what is made of them.
        notes = (self.backend.note(replace(case, collective="send_recv")), executor.note(case))
        return "; ".join(filter(None, notes)) or None
