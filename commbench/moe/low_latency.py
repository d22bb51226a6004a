"""Low latency: slots of a fixed size for every expert and source rank, no counts exchanged, nothing decided by the host.

All shapes are known before: every rank has room for as many records of every other as any has tokens, and every expert
for as many rows of every source. So nothing waits for a count, and a device can be given the whole as a graph. The price is
that room is sent whether it is used or not: libraries with one-sided puts send only what is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from commbench.backends.experts import Batch, Place, Received
from commbench.backends.phases import Phases
from commbench.moe.exchange import Channel
from commbench.moe.layout import Records, Ways, batch_source, reached, weighted_sums
from commbench.workloads import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class _Handle:
    """``place``: [n, T] where each token's record lies in each rank's room, ``there``: whether it has one; ``row``,
    ``weights``: [n * T, K] the expert row of each selection that came, and its weight, 0 where there is none."""

    place: torch.Tensor
    there: torch.Tensor
    row: torch.Tensor
    weights: torch.Tensor


class LowLatency:
    """One exchange of equal parts each way.

    ``static``: no shape depends on data, as a device's graph needs; the host, which has the data anyway, copies only rows
    that are there.
    """

    dispatch_phases: tuple[str, ...] = ("layout", "quantise", "send", "recv", "permute")
    combine_phases: tuple[str, ...] = ("permute", "send", "recv", "reduce")

    def __init__(
        self, workload: Workload, dtype: str, where: Place, rank: int, most_tokens: int, world: Channel,
        static: bool | None = None,
    ) -> None:  # fmt: skip
        device = world.calls.device
        self._static = device.type == "cuda" if static is None else static
        self._records = Records(workload=workload, dtype=dtype)
        self._world, self._rank, self._room = world, rank, most_tokens
        self._ways = Ways(where, device)
        mine = where.slots_of(rank)
        self._first, self._local = mine[0], len(mine)
        self._phases = Phases(device)
        # One row more than there are slots takes what has no place.
        rows = self._local * self._ways.ranks * most_tokens + 1
        values = torch.float8_e4m3fn if self._records.fp8 else torch.bfloat16
        self._rows = torch.zeros(
            rows, workload.hidden, dtype=torch.uint8 if self._records.fp8 else values, device=device
        )
        self._values = values
        self._scales = torch.zeros(rows, workload.hidden // 128, device=device) if self._records.fp8 else None
        self._sources = torch.zeros(rows, 2, dtype=torch.int32, device=device)

    def learn(self, batch: Batch) -> None:
        return None

    def dispatch(self, batch: Batch, known: None = None) -> Received:
        phases, records, ranks, room = self._phases, self._records, self._ways.ranks, self._room
        device, topk, tokens = batch.tokens.device, records.workload.topk, len(batch.tokens)
        self._world.sent[:] = 0
        phases.begin()
        there = reached(self._ways.rank_of, batch.slots, ranks).t()  # [n, T]
        place = there.cumsum(dim=1) - 1
        at = torch.where(there, place + torch.arange(ranks, device=device)[:, None] * room, ranks * room)
        phases.mark()
        payload = records.payload(batch.tokens)
        phases.mark()
        out = torch.empty(ranks * room + 1, records.size, dtype=torch.uint8, device=device)
        begin = records.token + 8
        out[:, begin : begin + 4 * topk].view(torch.int32)[:] = -1
        every = torch.arange(tokens, device=device)
        whole = records.pack(payload, every, batch_source(batch, self._rank), batch.slots, batch.weights)
        for target in range(ranks):
            out.index_copy_(0, at[target], whole)
        parts = [room] * ranks
        taken, wait = self._world.post(out[:-1], parts, parts)
        phases.mark()
        wait()
        phases.mark()
        received = self._expert_rows(taken, place, there)
        phases.mark()
        return received

    def _expert_rows(self, taken: torch.Tensor, place: torch.Tensor, there: torch.Tensor) -> Received:
        """[L * n * room, H]: each local slot's rows, source rank after source rank, pushed together."""
        records, ranks, room = self._records, self._ways.ranks, self._room
        local, each, device = self._local, ranks * room, taken.device
        slots = records.slots(taken) - self._first  # [n * room, K]
        mine = (slots >= 0) & (slots < local)
        owner = torch.where(mine, slots, local)
        # How many records of the same slot came before, in the order of sources and tokens.
        marked = torch.zeros(ranks * room, local + 1, dtype=torch.int64, device=device).scatter_(1, owner, 1)
        before = (marked.cumsum(dim=0) - marked).gather(1, owner)
        row = torch.where(mine, owner * each + before, local * each)
        self._fill(taken, row, mine)
        rows = self._rows[:-1]
        sources = self._sources[:-1].long()
        return Received(
            rows=rows.view(self._values) if records.fp8 else rows,
            scales=None if self._scales is None else self._scales[:-1],
            begins=torch.arange(local, device=device) * each, counts=marked.sum(dim=0)[:local],
            source_rank=sources[:, 0], source_token=sources[:, 1],
            handle=_Handle(
                place=place, there=there, row=row, weights=torch.where(mine, records.weights(taken), 0.0)
            ),
        )  # fmt: skip

    def _fill(self, taken: torch.Tensor, row: torch.Tensor, mine: torch.Tensor) -> None:
        """Copy each record to the rows of its slots."""
        hidden, records = self._records.workload.hidden, self._records
        values = taken[:, :hidden] if records.fp8 else taken[:, : records.token].view(torch.bfloat16)
        scales = taken[:, hidden : records.token].view(torch.float32) if records.fp8 else None
        source = records.source(taken)
        chosen: list[tuple[Any, torch.Tensor]] = [(slice(None), column) for column in row.unbind(dim=1)]
        if not self._static:
            there, k = torch.nonzero(mine, as_tuple=True)
            chosen = [(there, row[there, k])]
        for record, to in chosen:
            self._rows.index_copy_(0, to, values[record])
            self._sources.index_copy_(0, to, source[record])
            if self._scales is not None and scales is not None:
                self._scales.index_copy_(0, to, scales[record])

    def combine(self, rows: torch.Tensor, received: Received) -> torch.Tensor:
        phases, handle, ranks, room = self._phases, received.handle, self._ways.ranks, self._room
        hidden = rows.shape[1]
        self._world.sent[:] = 0
        phases.begin()
        partial = self._partial(rows, handle)
        phases.mark()
        parts = [room] * ranks
        taken, wait = self._world.post(partial.view(torch.uint8), parts, parts)
        phases.mark()
        wait()
        phases.mark()
        back = taken.view(torch.bfloat16).view(ranks, room, hidden)
        total = torch.zeros(handle.place.shape[1], hidden, dtype=torch.float32, device=rows.device)
        for source in range(ranks):
            found = back[source][handle.place[source].clamp(min=0)]
            # What a place without a record holds may be anything, so it is not multiplied by 0 but left out.
            total += torch.where(handle.there[source][:, None], found, 0.0)
        sums = total.to(torch.bfloat16)
        phases.mark()
        return sums

    def _partial(self, rows: torch.Tensor, handle: _Handle) -> torch.Tensor:
        """[n * room, H] bfloat16: of each record that came the weighted sum of its rows here, 0 where none came."""
        if not self._static:
            record, k = torch.nonzero(handle.weights, as_tuple=True)
            return weighted_sums(rows[handle.row[record, k]], record, handle.weights[record, k], len(handle.row))
        safe = handle.row.clamp(max=len(rows) - 1)
        total = torch.zeros(len(safe), rows.shape[1], dtype=torch.float32, device=rows.device)
        for row, weight in zip(safe.unbind(dim=1), handle.weights.unbind(dim=1), strict=True):
            total += torch.where(weight[:, None] > 0, rows[row].float() * weight[:, None], 0.0)
        return total.to(torch.bfloat16)

    def phases_ns(self) -> NDArray[np.int64]:
        return self._phases.durations_ns()

    def sent_bytes(self) -> NDArray[np.int64]:
        return self._world.sent.copy()

    @property
    def channels(self) -> tuple[Channel, ...]:
        return (self._world,)

    def finish(self) -> None:
        self._world.calls.finish()
