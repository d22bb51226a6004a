"""Where tokens go and where what arrives belongs, without a loop over tokens or experts.

Records are as ``wire.py`` has them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commbench.backends.experts import Batch, Place, Received
from commbench.backends.quantise import quantise
from commbench.moe.wire import record_bytes
from commbench.workloads import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """How a record lies in memory; all parts begin at multiples of 4 bytes."""

    workload: Workload
    dtype: str

    @property
    def fp8(self) -> bool:
        return self.dtype.startswith("float8")

    @property
    def token(self) -> int:
        return self.workload.token_bytes(self.dtype)

    @property
    def size(self) -> int:
        return record_bytes(self.workload, self.dtype)

    def payload(self, tokens: torch.Tensor) -> torch.Tensor:
        """[N, token] bytes of [N, H] bfloat16: quantised where the type says so."""
        if not self.fp8:
            return tokens.view(torch.uint8)
        values, scales = quantise(tokens)
        return torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], dim=1)

    def pack(
        self,
        payload: torch.Tensor,
        index: torch.Tensor,
        source: torch.Tensor,
        slots: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """[N, size] bytes of the tokens at ``index`` [N]. ``payload``, ``source`` (rank and index), ``weights``: of all
        tokens; ``slots``: [N, K] of the copies."""
        topk, at = self.workload.topk, self.token
        out = torch.empty(len(index), self.size, dtype=torch.uint8, device=payload.device)
        out[:, :at] = payload[index]
        numbers = out[:, at:].view(torch.int32)
        numbers[:, :2] = source[index]
        numbers[:, 2 : 2 + topk] = slots
        numbers[:, 2 + topk :] = weights.view(torch.int32)[index]
        return out

    def source(self, records: torch.Tensor) -> torch.Tensor:
        return records[:, self.token : self.token + 8].view(torch.int32)

    def slots(self, records: torch.Tensor) -> torch.Tensor:
        begin = self.token + 8
        return records[:, begin : begin + 4 * self.workload.topk].view(torch.int32).long()

    def weights(self, records: torch.Tensor) -> torch.Tensor:
        return records[:, self.token + 8 + 4 * self.workload.topk :].contiguous().view(torch.float32)

    def rows(self, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[N, H] values and, in FP8, [N, H/128] scales of [N, token] bytes."""
        hidden = self.workload.hidden
        if not self.fp8:
            return payload.view(torch.bfloat16), None
        return (
            payload[:, :hidden].contiguous().view(torch.float8_e4m3fn),
            payload[:, hidden:].contiguous().view(torch.float32),
        )


class Ways:
    """Tensors of a Place: which rank and host each slot is on. ``device``: where tokens are."""

    def __init__(self, where: Place, device: torch.device) -> None:
        self.ranks = len(where.host_of)
        self.rank_of = torch.tensor(where.rank_of, dtype=torch.int64, device=device)
        self.host_of = torch.tensor(where.host_of, dtype=torch.int64, device=device)[self.rank_of]
        self.slots = len(where.rank_of)


def reached(owner_of: torch.Tensor, slots: torch.Tensor, count: int) -> torch.Tensor:
    """[T, count] bool: whether a token has a slot of each owner. ``owner_of[slot]``, ``slots``: [T, K], -1: none."""
    owners = torch.where(slots >= 0, owner_of[slots.clamp(min=0)], count)
    found = torch.zeros(len(slots), count + 1, dtype=torch.bool, device=slots.device)
    return found.scatter_(1, owners, True)[:, :count]


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Copies in the order in which they are sent: by destination, then as their tokens are. ``index``: [N] tokens of the
    copies; ``counts``: [destinations]."""

    index: torch.Tensor
    to: torch.Tensor
    counts: torch.Tensor


def by_destination(marked: torch.Tensor) -> Order:
    """The copies that [T, destinations] marks."""
    to, index = torch.nonzero(marked.t(), as_tuple=True)
    return Order(index=index, to=to, counts=marked.sum(dim=0))


def only(owner_of: torch.Tensor, slots: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
    """[N, K]: the slots that belong to each row's owner, -1 for the others."""
    return torch.where((slots >= 0) & (owner_of[slots.clamp(min=0)] == owners[:, None]), slots, -1)


def expert_major(
    records: torch.Tensor, of: Records, first_slot: int, local_slots: int
) -> tuple[Received, torch.Tensor, torch.Tensor]:
    """Rows of a rank's own slots, one slot's after the other's; and of each row its record and which of its slots it is."""
    slots = of.slots(records)
    record, k = torch.nonzero(slots >= 0, as_tuple=True)
    local = slots[record, k] - first_slot
    order = torch.argsort(local, stable=True)
    record, k = record[order], k[order]
    counts = torch.bincount(local, minlength=local_slots)
    rows, scales = of.rows(records[record, : of.token])
    source = of.source(records)[record].long()
    received = Received(
        rows=rows, scales=scales, begins=counts.cumsum(0) - counts, counts=counts, source_rank=source[:, 0],
        source_token=source[:, 1], handle=None,
    )  # fmt: skip
    return received, record, k


STRETCH_ELEMENTS = 2**18  # that are widened to float32 at a time on the host: what its second-level cache holds


def weighted_sums(rows: torch.Tensor, record: torch.Tensor, weights: torch.Tensor, records: int) -> torch.Tensor:
    """[records, H] bfloat16: per record the sum of its rows times their weights, added in float32."""
    total = torch.zeros(records, rows.shape[1], dtype=torch.float32, device=rows.device)
    for part in _stretches(rows):
        total.index_add_(0, record[part], rows[part].float().mul_(weights[part, None]))
    return total.to(torch.bfloat16)


def sums_by_token(partial: torch.Tensor, index: torch.Tensor, tokens: int) -> torch.Tensor:
    """[tokens, H] bfloat16: per token the sum of what came back for it, added in float32."""
    total = torch.zeros(tokens, partial.shape[1], dtype=torch.float32, device=partial.device)
    for part in _stretches(partial):
        total.index_add_(0, index[part], partial[part].float())
    return total.to(torch.bfloat16)


def _stretches(rows: torch.Tensor) -> list[slice]:
    """All rows at once on a device, some at a time on the host."""
    count, hidden = rows.shape
    step = max(1, STRETCH_ELEMENTS // max(1, hidden)) if rows.device.type == "cpu" else max(1, count)
    return [slice(begin, min(begin + step, count)) for begin in range(0, count, step)]


def batch_source(batch: Batch, rank: int) -> torch.Tensor:
    """[T, 2]: rank and index of each token."""
    index = torch.arange(len(batch.tokens), dtype=torch.int32, device=batch.tokens.device)
    return torch.stack([torch.full_like(index, rank), index], dim=1)
