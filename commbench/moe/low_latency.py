"""Low latency: slots of a fixed size for every expert and source rank, no counts exchanged, nothing decided by the host.

All shapes are known before: every rank has room for as many records of every other as that can have tokens, and every
expert for ``slots`` rows of every source. So nothing waits for a count, and a device can be given the whole as a graph. The
price is that room is sent whether it is used or not: libraries with one-sided puts send only what is there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from commbench.backends.experts import Batch, Place, Received
from commbench.moe.exchange import Channel
from commbench.moe.layout import Records, Ways, batch_source, reached
from commbench.moe.phases import Phases
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
    """One exchange of equal parts each way. ``dropped`` counts selections that found no slot."""

    dispatch_phases: tuple[str, ...] = ("layout", "quantise", "send", "recv", "permute")
    combine_phases: tuple[str, ...] = ("permute", "send", "recv", "reduce")

    def __init__(
        self, workload: Workload, dtype: str, where: Place, rank: int, most_tokens: int, world: Channel
    ) -> None:
        self._records = Records(workload=workload, dtype=dtype)
        self._world, self._rank = world, rank
        self._ways = Ways(where, world.calls.device)
        mine = where.slots_of(rank)
        self._first, self._local = mine[0], len(mine)
        self._room = most_tokens
        self._slots = min(most_tokens, workload.slots or most_tokens)
        self._phases = Phases(world.calls.device)
        self.dropped = torch.zeros((), dtype=torch.int64, device=world.calls.device)

    def learn(self, batch: Batch) -> None:
        return None

    def dispatch(self, batch: Batch, known: None = None) -> Received:
        phases, records, ranks, room = self._phases, self._records, self._ways.ranks, self._room
        device, topk, tokens = batch.tokens.device, records.workload.topk, len(batch.tokens)
        self._world.sent[:] = 0
        phases.begin()
        there = reached(self._ways.rank_of, batch.slots, ranks).t()  # [n, T]
        place = there.cumsum(dim=1) - 1
        # One record more than there is room for takes what has no place.
        at = torch.where(there, place + torch.arange(ranks, device=device)[:, None] * room, ranks * room)
        phases.mark()
        payload = records.payload(batch.tokens)
        phases.mark()
        out = torch.empty(ranks * room + 1, records.size, dtype=torch.uint8, device=device)
        begin = records.token + 8
        out[:, begin : begin + 4 * topk].view(torch.int32)[:] = -1
        whole = torch.empty(tokens, records.size, dtype=torch.uint8, device=device)
        records.pack(whole, payload, batch_source(batch, self._rank), batch.slots, batch.weights)
        out[at] = whole  # [n, T, size] of [T, size]
        parts = [room] * ranks
        taken, wait = self._world.post(out[:-1], parts, parts)
        phases.mark()
        wait()
        phases.mark()
        received = self._expert_rows(taken, place, there)
        phases.mark()
        return received

    def _expert_rows(self, taken: torch.Tensor, place: torch.Tensor, there: torch.Tensor) -> Received:
        """[L * n * slots, H]: each local slot's rows, source rank after source rank, pushed together."""
        records, ranks, room = self._records, self._ways.ranks, self._room
        local, each, device = self._local, ranks * self._slots, taken.device
        slots = records.slots(taken) - self._first  # [n * room, K]
        mine = (slots >= 0) & (slots < local)
        owner = torch.where(mine, slots, local)
        # How many of the same expert came before, in the order of sources and tokens.
        marked = torch.zeros(ranks * room, local + 1, dtype=torch.int64, device=device).scatter_(1, owner, 1)
        by_source = marked.view(ranks, room, -1)
        of_source = (by_source.cumsum(dim=1) - by_source).view(ranks * room, -1).gather(1, owner)
        kept = mine & (of_source < self._slots)
        self.dropped += (mine & ~kept).sum()
        fits = torch.zeros_like(marked).scatter_(1, torch.where(kept, owner, local), 1)
        before = (fits.cumsum(dim=0) - fits).gather(1, owner)
        row = torch.where(kept, owner * each + before, local * each)
        source = torch.arange(ranks * room, device=device)[:, None].expand_as(row)
        record = torch.zeros(local * each + 1, dtype=torch.int64, device=device)
        record[row.reshape(-1)] = source.reshape(-1)
        record = record[:-1]
        rows, scales = records.rows(taken[:, : records.token][record])
        sources = records.source(taken)[record].long()
        handle = _Handle(place=place, there=there, row=row, weights=torch.where(kept, records.weights(taken), 0.0))
        return Received(
            rows=rows, scales=scales, begins=torch.arange(local, device=device) * each,
            counts=fits.sum(dim=0)[:local], source_rank=sources[:, 0], source_token=sources[:, 1], handle=handle,
        )  # fmt: skip

    def combine(self, rows: torch.Tensor, received: Received) -> torch.Tensor:
        phases, handle, ranks, room = self._phases, received.handle, self._ways.ranks, self._room
        hidden = rows.shape[1]
        self._world.sent[:] = 0
        phases.begin()
        safe = handle.row.clamp(max=len(rows) - 1)
        partial = torch.zeros(ranks * room, hidden, dtype=torch.float32, device=rows.device)
        for k in range(safe.shape[1]):
            # What a slot without a token holds may be anything, so it is not multiplied by 0 but left out.
            weight = handle.weights[:, k, None]
            partial += torch.where(weight > 0, rows[safe[:, k]].float() * weight, 0.0)
        phases.mark()
        parts = [room] * ranks
        taken, wait = self._world.post(partial.to(torch.bfloat16).view(torch.uint8), parts, parts)
        phases.mark()
        wait()
        phases.mark()
        back = taken.view(torch.bfloat16).view(ranks, room, hidden)
        total = torch.zeros(handle.place.shape[1], hidden, dtype=torch.float32, device=rows.device)
        for source in range(ranks):
            found = back[source][handle.place[source].clamp(min=0)].float()
            total += torch.where(handle.there[source][:, None], found, 0.0)
        sums = total.to(torch.bfloat16)
        phases.mark()
        return sums

    def phases_ns(self) -> NDArray[np.int64]:
        return self._phases.durations_ns()

    def sent_bytes(self) -> NDArray[np.int64]:
        return self._world.sent.copy()

    def finish(self) -> None:
        self._world.calls.finish()
