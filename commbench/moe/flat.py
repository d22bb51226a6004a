"""Throughput mode, straight to the experts' ranks: what is routed is sent, once for each rank that has an expert of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from commbench.backends.experts import Batch, Place, Received
from commbench.backends.phases import Phases
from commbench.moe.exchange import Channel
from commbench.moe.layout import (
    Order,
    Records,
    Ways,
    batch_source,
    by_destination,
    expert_major,
    only,
    reached,
    sums_by_token,
    weighted_sums,
)
from commbench.workloads import Workload


class Counts(NamedTuple):
    """Rows to and from each rank of a group."""

    give: list[int]
    take: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Handle:
    """``record``, ``weights``: of each expert row, which record it is of and its weight there; ``records``: how many came."""

    order: Order
    counts: Counts
    tokens: int
    record: torch.Tensor
    weights: torch.Tensor
    records: int


class Flat:
    """One exchange of all ranks each way. A combine sends one row back for each record, the weighted sum of its experts'."""

    dispatch_phases: tuple[str, ...] = ("layout", "quantise", "counts", "send", "recv", "permute")
    combine_phases: tuple[str, ...] = ("permute", "send", "recv", "reduce")

    def __init__(self, workload: Workload, dtype: str, where: Place, rank: int, world: Channel) -> None:
        self._records = Records(workload=workload, dtype=dtype)
        self._world, self._rank = world, rank
        self._ways = Ways(where, world.calls.device)
        mine = where.slots_of(rank)
        self._first, self._local = mine[0], len(mine)
        self._phases = Phases(world.calls.device)

    def learn(self, batch: Batch) -> Counts | None:
        if self._records.workload.counts != "known":
            return None
        return self._counts(self._order(batch))

    def _order(self, batch: Batch) -> Order:
        return by_destination(reached(self._ways.rank_of, batch.slots, self._ways.ranks))

    def _counts(self, order: Order) -> Counts:
        taken = self._world.announce(order.counts)
        return Counts(order.counts.tolist(), taken.tolist())

    def dispatch(self, batch: Batch, known: Counts | None = None) -> Received:
        phases, records = self._phases, self._records
        self._world.sent[:] = 0
        phases.begin()
        order = self._order(batch)
        slots = only(self._ways.rank_of, batch.slots[order.index], order.to)
        phases.mark()
        payload = records.payload(batch.tokens)
        phases.mark()
        counts = known or self._counts(order)
        phases.mark()
        out = records.pack(payload, order.index, batch_source(batch, self._rank), slots, batch.weights)
        taken, wait = self._world.post(out, counts.give, counts.take)
        phases.mark()
        wait()
        phases.mark()
        received, record, k = expert_major(taken, records, self._first, self._local)
        handle = _Handle(
            order=order, counts=counts, tokens=len(batch.tokens), record=record, weights=records.weights(taken)[record, k],
            records=len(taken),
        )  # fmt: skip
        phases.mark()
        return _with_handle(received, handle)

    def combine(self, rows: torch.Tensor, received: Received) -> torch.Tensor:
        phases, handle = self._phases, received.handle
        self._world.sent[:] = 0
        phases.begin()
        partial = weighted_sums(rows, handle.record, handle.weights, handle.records)
        phases.mark()
        taken, wait = self._world.post(partial.view(torch.uint8), handle.counts.take, handle.counts.give)
        phases.mark()
        wait()
        phases.mark()
        sums = sums_by_token(taken.view(torch.bfloat16), handle.order.index, handle.tokens)
        phases.mark()
        return sums

    def phases_ns(self) -> NDArray[np.int64]:
        return self._phases.durations_ns()

    def sent_bytes(self) -> NDArray[np.int64]:
        return self._world.sent.copy()

    @property
    def channels(self) -> tuple[Channel, ...]:
        return (self._world,)

    def finish(self) -> None:
        self._world.calls.finish()


def _with_handle(received: Received, handle: object) -> Received:
    return Received(
        rows=received.rows, scales=received.scales, begins=received.begins, counts=received.counts,
        source_rank=received.source_rank, source_token=received.source_token, handle=handle,
    )  # fmt: skip
