"""Routed cases on a backend: by its own dispatch and combine, or by commbench's data path over its exchanges.

The same face as ``algorithms.library.Library`` has for the others, and what a point of such a case says beside.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from commbench.moe.conventions import convention_bytes, default_convention, traffic
from commbench.moe.load import load_of
from commbench.moe.model import predict
from commbench.moe.placement import choose_slots, place
from commbench.moe.routing import Router, why_not
from commbench.moe.straggler import find_straggler
from commbench.moe.wire import record_bytes
from commbench.records import Point

SEEN = 16  # iterations whose load and bytes are worked out for a point: all of them would take longer than to measure
Slots = list[NDArray[np.int64]]


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

        return prepare(
            case,
            case.ranks,
            self.control,
            Numbers,
            make,
            self._uniform.free_bytes,
            set_bytes(case, most, len(where.rank_of)),
            self._most_sets(case, groups),
        )

    def _most_sets(self, case: Case, groups: Groups) -> int | None:
        library = self.backend.expert_library(groups[0]) if case.algorithm == "library" else None
        return None if library is None else library.most_sets(case.workload)  # type: ignore[arg-type]  # a routed case's

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

    def matched(self, case: Case) -> Case:
        """A plain all_to_all that sends as many bytes from each rank as this case does in the mean."""
        router, where = self._routed
        sent = [self._sent(case, router, where, number) for number in range(4)]
        each = float(np.mean([one.sum() - np.trace(one) for one in sent])) / case.ranks
        spec_bytes = each * case.ranks / max(1, case.ranks - 1)
        plain = replace(
            case, collective="all_to_all", algorithm="library", dtype="uint8", workload=None, execution="eager", bytes=0,
            requested_bytes=round(spec_bytes),
        )  # fmt: skip
        moved = plain.spec.message_bytes(plain.requested_bytes, plain.itemsize, case.ranks)
        return replace(plain, bytes=moved)

    def _sent(self, case: Case, router: Router, where: Place, number: int) -> NDArray[np.float64]:
        """[n, n] bytes of one iteration, all stages together."""
        assert case.workload is not None
        slots = self._slots(router, where, number)
        return np.asarray(
            traffic(where, slots, case.workload, case.dtype, case.collective, _own(case)).sum(axis=0), dtype=np.float64
        )

    @staticmethod
    def _slots(router: Router, where: Place, number: int) -> Slots:
        return [choose_slots(where, router.selections(rank, number)[0], rank) for rank in range(router.ranks)]

    def compare(self, point: Point, matched: Case, time_s: float) -> None:
        """Beside the point what a plain all_to_all took."""
        point.matched = {"bytes": float(matched.bytes), "time_s": time_s}
        if point.time_s:
            point.matched["ratio"] = point.time_s / time_s

    def describe(self, point: Point, case: Case, found: Measured) -> None:
        """Write into a point what was sent, how evenly, by whom last and how long each phase took."""
        workload = case.workload
        assert workload is not None
        router, where = self._routed
        numbers = _spread(np.unique(found.numbers), 1 if workload.fixed else SEEN)
        slots = {int(number): self._slots(router, where, int(number)) for number in numbers}
        each = [
            convention_bytes(where, one, workload, case.dtype, case.collective, case.algorithm)
            for one in slots.values()
        ]
        point.convention_bytes = {name: float(np.mean([one[name].mean() for one in each])) for name in each[0]}
        point.bytes_convention = default_convention(workload.mode, case.backend)
        point.load = _mean_load([load_of(where, one) for one in slots.values()])
        if workload.experts_on.startswith("eplb"):
            point.load |= self._before(router, case, slots)
        if point.time_s and not point.wrong:
            point.algbw_Bps = point.convention_bytes[point.bytes_convention] / point.time_s
            busiest = float(np.mean([one.get("wire", one["dedup_rank"]).max() for one in each]))
            point.busbw_Bps = busiest / point.time_s
        self._times(point, case, found, {number: one for number, one in zip(slots, each, strict=True)}, slots, where)
        if case.dtype.startswith("float8"):
            from commbench.moe.operations import quantise_error

            point.quantise_error = quantise_error(workload.hidden, self.seed)

    def _before(self, router: Router, case: Case, slots: dict[int, Slots]) -> dict[str, Any]:
        """The load without the redundant experts."""
        assert case.workload is not None
        plain = place(
            replace(case.workload, experts_on="contiguous", uneven_experts=True), case.ranks, self.layout.host_of, None
        )
        found = _mean_load([load_of(plain, self._slots(router, plain, number)) for number in slots])
        return {f"{name}_before": found[name] for name in ("rank_max_over_mean", "expert_max_over_mean")}

    def _times(
        self, point: Point, case: Case, found: Measured, each: dict[int, dict[str, NDArray[np.float64]]],
        slots: dict[int, Slots], where: Place,
    ) -> None:  # fmt: skip
        assert case.workload is not None
        kept = found.kept
        if case.timing == "isolated":
            ends = found.stamps[:, :, 1] - found.stamps[:, :, 0].min(axis=0)
            point.rank_times = [float(value) * 1e-9 for value in np.median(ends[:, kept], axis=1)]
            which = np.array([int(number) in each for number in found.numbers]) & kept
            loads = np.array([_load(each[int(number)]) for number in found.numbers[which]]).reshape(-1, case.ranks)
            if len(loads) and len(found.numbers) == ends.shape[1]:
                point.straggler = find_straggler(ends[:, which].T * 1e-9, loads, found.iterations.last_rank[kept])
                point.straggler["host"] = self.layout.hosts[point.straggler["rank"]]
        if found.phases is not None and self.exchanges:
            first = self.exchanges[0]
            names = first.dispatch_phases if case.collective == "moe_dispatch" else first.combine_phases
            last = found.phases[found.iterations.last_rank, np.arange(found.phases.shape[1])][kept]
            point.phases = {name: float(np.median(last[:, at])) * 1e-9 for at, name in enumerate(names)}
        if self.links is not None and not point.wrong:
            times = [predict(case, where, one, self.links, self.layout.host_of) for one in slots.values()]
            known = [value for value in times if value is not None]
            point.predicted_s = float(np.median(known)) + (self.local_s or 0.0) if known else None
            if point.predicted_s and point.time_s:
                point.prediction_error = point.time_s / point.predicted_s - 1


def set_bytes(case: Case, most_tokens: int, slots: int) -> int:
    """About what one operation of a case takes on a rank: tokens, records sent and received, expert rows, sums."""
    workload = case.workload
    assert workload is not None
    token, record, full = (
        workload.token_bytes(case.dtype), record_bytes(workload, case.dtype), workload.token_bytes("bfloat16"),
    )  # fmt: skip
    copies = min(workload.topk, case.ranks)
    rows = most_tokens * workload.topk
    if workload.mode == "low_latency":
        copies, rows = case.ranks, -(-slots // case.ranks) * case.ranks * most_tokens
    experts = rows * (token + full * (case.collective == "moe_combine"))
    return most_tokens * (3 * full + token + 2 * copies * record) + experts


def _load(convention: dict[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """What makes a rank late: the bytes that it sends and those that come to it."""
    return convention["dedup_rank"] + convention["deepep_normal"]


def _most(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def _own(case: Case) -> str:
    return case.algorithm if case.algorithm.startswith("own:") else exchange.FLAT


def _device(calls: Any) -> Any:
    import torch

    return calls.device if calls is not None else torch.device("cuda", torch.cuda.current_device())


def _seed(seed: int, case: Case) -> int:
    """Of a case: the same for dispatch and combine, for every backend and way to send, so that they compare."""
    assert case.workload is not None
    identity = replace(case.workload, mode="throughput", experts_on="contiguous", counts="exchanged")
    return seed ^ int.from_bytes(hashlib.sha256(repr(identity).encode()).digest()[:4], "big")


def _spread(numbers: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """So many of them, evenly over all."""
    chosen: NDArray[np.int64] = numbers[
        np.unique(np.linspace(0, len(numbers) - 1, min(most, len(numbers))).round().astype(int))
    ]
    return chosen


def _mean_load(loads: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several iterations the mean of every figure; per rank where it is a list."""
    found: dict[str, Any] = {}
    for name in loads[0]:
        values = [load[name] for load in loads if load[name] is not None]
        if not values:
            found[name] = None
        elif isinstance(values[0], list):
            found[name] = np.mean(values, axis=0).tolist()
        else:
            found[name] = float(np.mean(values))
    return found
