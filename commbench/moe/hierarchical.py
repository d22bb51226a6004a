"""Throughput mode over two networks: a token crosses to a host once, and is handed on inside it.

First to the rank of the same place on every host that has an expert of it (DeepEP's internode kernels do the same over
RDMA), then from there to each rank of the host that has one. A combine goes the same way back and adds twice: what the
ranks of a host have found, before it crosses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from commbench.backends.experts import Batch, Place, Received
from commbench.backends.phases import Phases
from commbench.moe.exchange import Channel
from commbench.moe.flat import Counts, _with_handle
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


class Known(NamedTuple):
    """Rows to and from the ranks of the rail, and those of the host."""

    rail: Counts
    node: Counts


@dataclass(frozen=True, kw_only=True, slots=True)
class _Handle:
    """``across``: copies to hosts; ``inside``: what is handed on, of the records that came over the rail."""

    across: Order
    inside: Order
    known: Known
    tokens: int
    relayed: int
    record: torch.Tensor
    weights: torch.Tensor
    records: int


class Hierarchical:
    """Two exchanges each way."""

    dispatch_phases: tuple[str, ...] = ("layout", "quantise", "counts", "send", "recv", "forward", "permute")
    combine_phases: tuple[str, ...] = ("permute", "gather", "send", "recv", "reduce")

    def __init__(self, workload: Workload, dtype: str, where: Place, rank: int, rail: Channel, node: Channel) -> None:
        self._records = Records(workload=workload, dtype=dtype)
        self._rail, self._node, self._rank = rail, node, rank
        device = rail.calls.device
        self._ways = Ways(where, device)
        mine = where.slots_of(rank)
        self._first, self._local = mine[0], len(mine)
        self._phases = Phases(device)
        hosts = {where.host_of[member]: place for place, member in enumerate(rail.members)}
        inside = {member: place for place, member in enumerate(node.members)}
        # Of each slot the rail's member on its host, and the host's member that has it, beyond all others elsewhere.
        self._member_of = torch.tensor([hosts[where.host_of[owner]] for owner in where.rank_of], device=device)
        self._inside_of = torch.tensor([inside.get(owner, len(inside)) for owner in where.rank_of], device=device)

    def learn(self, batch: Batch) -> Known | None:
        """Sends the tokens once, since who hands on what is only known where they arrive."""
        if self._records.workload.counts != "known":
            return None
        received = self.dispatch(batch)
        known: Known = received.handle.known
        return known

    def _announce(self, channel: Channel, order: Order) -> Counts:
        return Counts(order.counts.tolist(), channel.announce(order.counts).tolist())

    def dispatch(self, batch: Batch, known: Known | None = None) -> Received:
        phases, records = self._phases, self._records
        self._rail.sent[:] = 0
        phases.begin()
        across = by_destination(reached(self._member_of, batch.slots, len(self._rail.members)))
        slots = only(self._member_of, batch.slots[across.index], across.to)
        phases.mark()
        payload = records.payload(batch.tokens)
        phases.mark()
        rail = known.rail if known else self._announce(self._rail, across)
        phases.mark()
        out = records.pack(payload, across.index, batch_source(batch, self._rank), slots, batch.weights)
        relayed, wait = self._rail.post(out, rail.give, rail.take)
        phases.mark()
        wait()
        phases.mark()
        inside = by_destination(reached(self._inside_of, records.slots(relayed), len(self._node.members)))
        node = known.node if known else self._announce(self._node, inside)
        onward = relayed[inside.index]
        topk, at = records.workload.topk, records.token
        onward[:, at + 8 : at + 8 + 4 * topk].view(torch.int32)[:] = only(
            self._inside_of, records.slots(onward), inside.to
        )
        taken, wait = self._node.post(onward, node.give, node.take)
        wait()
        phases.mark()
        received, record, k = expert_major(taken, records, self._first, self._local)
        handle = _Handle(
            across=across, inside=inside, known=Known(rail, node), tokens=len(batch.tokens), relayed=len(relayed),
            record=record, weights=records.weights(taken)[record, k], records=len(taken),
        )  # fmt: skip
        phases.mark()
        return _with_handle(received, handle)

    def combine(self, rows: torch.Tensor, received: Received) -> torch.Tensor:
        phases, handle = self._phases, received.handle
        rail, node = handle.known
        self._rail.sent[:] = 0
        phases.begin()
        partial = weighted_sums(rows, handle.record, handle.weights, handle.records)
        phases.mark()
        gathered, wait = self._node.post(partial.view(torch.uint8), node.take, node.give)
        wait()
        of_host = sums_by_token(gathered.view(torch.bfloat16), handle.inside.index, handle.relayed)
        phases.mark()
        taken, wait = self._rail.post(of_host.view(torch.uint8), rail.take, rail.give)
        phases.mark()
        wait()
        phases.mark()
        sums = sums_by_token(taken.view(torch.bfloat16), handle.across.index, handle.tokens)
        phases.mark()
        return sums

    def phases_ns(self) -> NDArray[np.int64]:
        return self._phases.durations_ns()

    def sent_bytes(self) -> NDArray[np.int64]:
        return self._rail.sent.copy()

    @property
    def channels(self) -> tuple[Channel, ...]:
        return (self._rail, self._node)

    def finish(self) -> None:
        self._node.calls.finish()
