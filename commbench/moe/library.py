"""Routed cases on a backend: by its own dispatch and combine, or by commbench's data path over its exchanges.

The same face as ``algorithms.library.Library`` has for the others, and what a point of such a case says beside.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from commbench.algorithms.library import Groups, Library
from commbench.backends import why_not_graph
from commbench.backends.base import Backend
from commbench.backends.experts import ExpertExchange, Place
from commbench.backends.forcing import Chosen
from commbench.cases import Case, Layout
from commbench.measure.control import Control
from commbench.measure.loop import Measured
from commbench.measure.operation import Operation
from commbench.measure.prepare import Prepared, prepare
from commbench.measure.timed import Loop
from commbench.models import Links
from commbench.moe import exchange
from commbench.moe.account import Account, account, seen
from commbench.moe.columns import set_columns
from commbench.moe.memory import need
from commbench.moe.model import predict
from commbench.moe.placement import place
from commbench.moe.routing import Router, why_not
from commbench.records import STATUS_WRONG, Point

# Each set is filled with tokens of its own before it is used, and for a combine dispatched: more would take longer than
# to measure them.
MOST_SETS = 32


@dataclass(kw_only=True)
class RoutedLibrary:
    """One backend on every rank of a world, for one routed case: the one that all methods are given."""

    case: Case
    backend: Backend
    control: Control
    layout: Layout
    seed: int
    links: Links | None = None
    exchanges: list[ExpertExchange] = field(default_factory=list)
    local_s: float | None = None  # of the slowest rank, see Operation.alone
    _account: Account | None = None  # at rank 0, once it was described

    def why_not(self, case: Case, groups: Groups) -> str | None:
        assert case.workload is not None
        if reason := why_not_graph(case):
            return reason
        if case.execution == "graph" and case.workload.mode != "low_latency":
            return "in throughput mode the host waits for counts: only low latency can be captured in a graph"
        if reason := why_not(case.workload, case.ranks, self.layout.host_of):
            return reason
        if case.algorithm == "library":
            library = self.backend.expert_library(groups[0])
            if library is None:
                return f"{case.backend} has no dispatch and combine of its own: ask for --dispatch flat or hierarchical"
            return library.why_not(case.workload, case.dtype, case.algorithm)
        if self.backend.all_to_all_v(groups[0]) is None:
            return f"{case.backend} cannot exchange parts of unequal size in torch's memory"
        return exchange.why_not(case, self.layout)

    @cached_property
    def _routed(self) -> tuple[Router, Place]:
        """Where its tokens go, and where its experts are."""
        case = self.case
        assert case.workload is not None
        router = Router(case.workload, case.ranks, self.layout.host_of, _seed(self.seed, case))
        return router, place(case.workload, case.ranks, self.layout.host_of, router.expected_load())

    def prepare(self, case: Case, groups: Groups) -> Prepared:
        from commbench.moe.operations import OPERATIONS, Numbers, Setup

        assert case.workload is not None
        backend, rank = self.backend, self.control.rank
        backend.join(groups)
        router, where = self._routed
        most = max(router.tokens(one) for one in range(case.ranks))

        def make_exchange() -> ExpertExchange:
            if case.algorithm == "library":
                library = backend.expert_library(groups[0])
                assert library is not None
                made = library.make(case.workload, case.dtype, where, rank, most)  # type: ignore[arg-type]  # asserted
            else:
                made = exchange.make_exchange(case, where, self.layout, rank, most, backend)
            self.exchanges.append(made)
            return made

        calls = backend.all_to_all_v(groups[0])
        setup = Setup(router=router, where=where, rank=rank, device=_device(calls), graph=case.execution == "graph")

        def make() -> Operation:
            return OPERATIONS[case.collective](setup=setup, exchange=make_exchange()).operation()

        kept, work = need(case, router, where)
        return prepare(
            case, case.ranks, self.control, Numbers, make, self._uniform.free_bytes, set_bytes=kept, work_bytes=work,
            most_sets=self._most_sets(case, groups),
        )  # fmt: skip

    def _most_sets(self, case: Case, groups: Groups) -> int:
        library = self.backend.expert_library(groups[0]) if case.algorithm == "library" else None
        held = None if library is None else library.most_sets(case.workload)  # type: ignore[arg-type]  # a routed case's
        return min(MOST_SETS, held or MOST_SETS)

    @property
    def _uniform(self) -> Library:
        return Library(backend=self.backend, control=self.control, layout=self.layout, seed=self.seed)

    def loop(self, case: Case) -> Loop | None:
        """A device keeps the time of what it does; on the host Python does, which calls torch in any case."""
        return self.backend.loop(case) if self.backend.device_memory() is not None else None

    def barrier(self, case: Case) -> Operation:
        return self._uniform.barrier(replace(case, workload=None, dtype="float32"))

    def chosen(self, case: Case, operations: list[Operation]) -> list[Chosen] | None:
        """Nothing is to choose; but here all ranks are in step, and can time what they do besides exchanging."""
        alone = operations[0].alone
        self.local_s = self.control.agree(alone() if alone is not None else None, _most)
        return None

    def note(self, case: Case) -> str | None:
        return self.backend.note(replace(case, collective="all_to_all", workload=None))

    # -- what a point says beside ------------------------------------------------------------------------

    def describe(self, point: Point, case: Case, found: Measured) -> None:
        """Write into a point what was sent, how evenly, by whom last, how long each phase took, and how long all of it
        should have."""
        router, where = self._routed
        counted = self._account = account(case, router, where, seen(found.numbers, case))
        first = self.exchanges[0]
        names = first.dispatch_phases if case.collective == "moe_dispatch" else first.combine_phases
        set_columns(point, case, found, counted, self.layout, names)
        if self.links is not None and point.status != STATUS_WRONG:
            times = [predict(case, where, one, self.links, self.layout.host_of) for one in counted.slots]
            known = [value for value in times if value is not None]
            point.predicted_s = float(np.median(known)) + (self.local_s or 0.0) if known else None
            if point.predicted_s and point.time_s:
                point.prediction_error = point.time_s / point.predicted_s - 1
        if case.dtype.startswith("float8"):
            from commbench.moe.operations import quantise_error

            point.quantise_error = quantise_error(router.workload.hidden, self.seed)

    def matched(self, case: Case) -> Case | None:
        """A plain all_to_all that sends as many bytes from each rank as this case, which rank 0 has described, does in the
        mean; None where it sends none."""
        each: float = self.control.share(self._account.mean_bytes if self._account is not None else None)
        plain = plain_all_to_all(case, each)
        return plain if plain.bytes else None

    def compare(self, point: Point, matched: Case, time_s: float) -> None:
        """Beside the point what a plain all_to_all took."""
        point.matched = {"bytes": float(matched.bytes), "time_s": time_s}
        if point.time_s:
            point.matched["ratio"] = point.time_s / time_s


def plain_all_to_all(case: Case, rank_bytes: float) -> Case:
    """One in which every rank sends ``rank_bytes`` to others, and, as all_to_all's bytes are counted, a share to itself."""
    plain = replace(
        case, collective="all_to_all", algorithm="library", dtype="uint8", workload=None, execution="eager", bytes=0,
        requested_bytes=round(rank_bytes * case.ranks / max(1, case.ranks - 1)),
    )  # fmt: skip
    return replace(plain, bytes=plain.spec.message_bytes(plain.requested_bytes, plain.itemsize, case.ranks))


def _most(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def _device(calls: Any) -> Any:
    import torch

    return calls.device if calls is not None else torch.device("cuda", torch.cuda.current_device())


def _seed(seed: int, case: Case) -> int:
    """Of a case: the same for dispatch and combine, for every backend and way to send, so that they compare."""
    assert case.workload is not None
    identity = replace(case.workload, mode="throughput", experts_on="contiguous", counts="exchanged")
    return seed ^ int.from_bytes(hashlib.sha256(repr(identity).encode()).digest()[:4], "big")
