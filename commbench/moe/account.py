"""What the tokens of timed iterations come to: bytes by every convention, who sends what to whom, and how even loads are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commbench.backends.experts import Place
from commbench.cases import Case
from commbench.moe.conventions import convention_bytes, traffic
from commbench.moe.exchange import FLAT
from commbench.moe.load import load_of
from commbench.moe.placement import choose_slots, place
from commbench.moe.routing import Router

# Every iteration has tokens of its own, which have to be drawn again for all ranks: all iterations would take longer than
# to measure them, and the other ranks wait meanwhile.
MOST_ITERATIONS = 16
MOST_SELECTIONS = 4_000_000  # about a second
Slots = list[NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """``numbers``: the iterations that were looked at; ``slots``: of all ranks in each.

    ``bytes``: by convention the mean over iterations and ranks. ``matrices``: [iterations, n, n] bytes that every rank hands
    over for every other in all stages, 0 on the diagonal: those of commbench's own data path, flat where the case is
    a library's. ``load``: the means of ``load_of``, and where experts are balanced what it is without. ``handled``:
    [iterations, n] bytes of tokens that each rank sends and gets, its own included: what can make it late.
    """

    numbers: tuple[int, ...]
    slots: tuple[Slots, ...]
    bytes: dict[str, float]
    matrices: NDArray[np.float64]
    load: dict[str, Any]
    handled: NDArray[np.float64]

    @property
    def mean_bytes(self) -> float:
        """That a rank hands over for others."""
        return float(self.matrices.sum(axis=2).mean())

    @property
    def busiest_bytes(self) -> float:
        """That the rank hands over or is handed which has most of it: the mean over iterations."""
        return float(np.maximum(self.matrices.sum(axis=2), self.matrices.sum(axis=1)).max(axis=1).mean())

    def between_hosts(self, host_of: tuple[int, ...]) -> float:
        """What goes from host to host in an iteration."""
        hosts = np.array(host_of)
        return float(np.where(hosts[:, None] != hosts, self.matrices, 0.0).sum(axis=(1, 2)).mean())


def seen(numbers: NDArray[np.int64], case: Case) -> tuple[int, ...]:
    """Evenly spaced ones of the iterations, as many as are worth their time; one where all are routed alike."""
    workload = case.workload
    assert workload is not None
    each = case.ranks * workload.tokens * workload.topk
    most = 1 if workload.fixed else max(1, min(MOST_ITERATIONS, MOST_SELECTIONS // each))
    different = np.unique(numbers)
    at = np.unique(np.linspace(0, len(different) - 1, min(most, len(different))).round().astype(int))
    return tuple(different[at].tolist())


def account(case: Case, router: Router, where: Place, numbers: Iterable[int]) -> Account:
    """Draw the tokens of these iterations again, for all ranks, and count."""
    workload = case.workload
    assert workload is not None
    chosen = tuple(numbers)
    slots = tuple(_slots(router, where, number) for number in chosen)
    by_name = [convention_bytes(where, one, workload, case.dtype, case.collective, case.algorithm) for one in slots]
    way = case.algorithm if case.algorithm.startswith("own:") else FLAT
    matrices = np.stack(
        [traffic(where, one, workload, case.dtype, case.collective, way).sum(axis=0) for one in slots]
    ).astype(np.float64)
    index = np.arange(router.ranks)
    matrices[:, index, index] = 0
    load = _means([load_of(where, one) for one in slots])
    if workload.experts_on.startswith("eplb"):
        load |= _before(router, where, chosen)
    return Account(
        numbers=chosen, slots=slots, matrices=matrices, load=load,
        bytes={name: float(np.mean([one[name].mean() for one in by_name])) for name in by_name[0]},
        handled=np.stack([one["dedup_rank"] + one["deepep_normal"] for one in by_name]),
    )  # fmt: skip


def _slots(router: Router, where: Place, number: int) -> Slots:
    return [choose_slots(where, router.selections(rank, number)[0], rank) for rank in range(router.ranks)]


def _before(router: Router, where: Place, numbers: tuple[int, ...]) -> dict[str, Any]:
    """The load without the redundant experts."""
    unbalanced = replace(router.workload, experts_on="contiguous", uneven_experts=True)
    plain = place(unbalanced, router.ranks, where.host_of, None)
    found = _means([load_of(plain, _slots(router, plain, number)) for number in numbers])
    return {f"{name}_before": found[name] for name in ("rank_max_over_mean", "expert_max_over_mean")}


def _means(loads: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several iterations the mean of every figure; per rank where it is a list."""
    found: dict[str, Any] = {}
    for name in loads[0]:
        values = [load[name] for load in loads if load[name] is not None]
        mean = np.mean(values, axis=0) if values else None
        found[name] = None if mean is None else mean.tolist()
    return found
