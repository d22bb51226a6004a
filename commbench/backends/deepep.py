"""DeepEP's dispatch and combine: deep_ep.Buffer of version 1.2, kept in version 2, and version 2's ElasticBuffer.

Calls and their arguments are those of ``deep_ep/buffer.py`` (v1.2.1), ``deep_ep/buffers/legacy.py`` and
``deep_ep/buffers/elastic.py`` (main). High throughput is the elastic buffer's where there is one, unless COMMBENCH_DEEPEP is
``legacy``; low latency is always the older one's, since the elastic one has none. Its process
group is NCCL's through torch.distributed, and so are plain collectives, which stand beside.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from commbench.backends.base import BackendError, Context
from commbench.backends.experts import Batch, Place, Received
from commbench.backends.nccl import Nccl
from commbench.backends.phases import Phases
from commbench.backends.quantise import quantise
from commbench.workloads import Workload

SWITCH = "COMMBENCH_DEEPEP"  # legacy: the older buffer, where there are both
QPS_DEPTH = 1024  # NVSHMEM_QP_DEPTH that Buffer sets: (tokens + 1) * 2 must fit


class DeepEp(Nccl):
    """DeepEP on the ranks of an NCCL process group."""

    name = "deepep"
    process_group = "nccl"

    def __init__(self) -> None:
        super().__init__()
        self._library: DeepEpLibrary | None = None

    def start(self, context: Context) -> None:
        super().start(context)
        try:
            module = importlib.import_module("deep_ep")
        except (ImportError, OSError) as error:
            raise BackendError(f"deep_ep cannot be loaded ({error}): build it for this torch and CUDA") from None
        self._library = DeepEpLibrary(module, dist.group.WORLD, self.device)

    def version(self) -> str:
        assert self._library is not None
        return f"DeepEP {self._library.version()}, {super().version()}"

    def settings(self) -> dict[str, str]:
        assert self._library is not None
        return {**super().settings(), **self._library.settings()}

    def expert_library(self, members: tuple[int, ...]) -> DeepEpLibrary | None:  # type: ignore[override]
        return self._library if len(members) == dist.get_world_size() else None

    def stop(self) -> None:
        if self._library is not None:
            self._library.close()
        super().stop()


class DeepEpLibrary:
    """The library on one rank; a Buffer is made for each mode and shape, and kept while cases ask for it."""

    # A low-latency result lies in one of two buffers, which the call after next overwrites.
    most_low_latency_sets = 1

    def __init__(self, module: Any, group: Any, device: torch.device) -> None:
        self._module, self._group, self._device = module, group, device
        self._made: tuple[Any, Any] | None = None
        self._elastic = hasattr(module, "ElasticBuffer") and os.environ.get(SWITCH) != "legacy"

    def version(self) -> str:
        return str(getattr(self._module, "__version__", "of unknown version"))

    def settings(self) -> dict[str, str]:
        kind = "ElasticBuffer" if self._elastic else "Buffer"
        return {"high_throughput": kind, "num_sms": str(self._module.Buffer.num_sms)}

    def most_sets(self, workload: Workload) -> int | None:
        """How many results can be held at once; None: as many as there is memory."""
        return self.most_low_latency_sets if workload.mode == "low_latency" else None

    def why_not(self, workload: Workload, dtype: str, algorithm: str) -> str | None:
        ranks = self._group.size()
        if workload.hidden % 128:
            return f"DeepEP moves multiples of 128 values, not {workload.hidden}"
        if workload.mode == "low_latency":
            if (workload.tokens + 1) * 2 > QPS_DEPTH:
                return f"DeepEP's low latency has {QPS_DEPTH // 2 - 1} tokens a rank at most, not {workload.tokens}"
            return None
        if self._elastic:
            return None
        try:
            self._module.Buffer.get_dispatch_config(ranks)
        except AssertionError as error:
            return f"DeepEP has no configuration for {ranks} ranks ({error})"
        return None

    def make(
        self, workload: Workload, dtype: str, place: Place, rank: int, most_tokens: int
    ) -> DeepEpNormal | DeepEpElastic | DeepEpLowLatency:
        """Raises RuntimeError where ranks have different numbers of expert slots, which DeepEP knows by division."""
        ranks, slots = len(place.host_of), len(place.rank_of)
        if any(owner != slot // (slots // ranks) for slot, owner in enumerate(place.rank_of)) or slots % ranks:
            raise RuntimeError(f"DeepEP wants as many experts on every rank: {slots} slots on {ranks} ranks are not")
        low = workload.mode == "low_latency"
        fp8 = dtype.startswith("float8")
        buffer = self._buffer(workload, fp8, ranks, slots, most_tokens)
        kind = DeepEpLowLatency if low else DeepEpElastic if self._elastic else DeepEpNormal
        return kind(buffer, workload, fp8, slots, slots // ranks, most_tokens, self._device)

    def _buffer(self, workload: Workload, fp8: bool, ranks: int, slots: int, tokens: int) -> Any:
        low, hidden, topk = workload.mode == "low_latency", workload.hidden, workload.topk
        key = (low, hidden, topk, slots, tokens, fp8)
        if self._made is not None and self._made[0] == key:
            return self._made[1]
        self.close()
        kind = self._module.Buffer
        if low:
            size = kind.get_low_latency_rdma_size_hint(tokens, hidden, ranks, slots)
            made = kind(
                self._group, 0, size, low_latency_mode=True, num_qps_per_rank=slots // ranks, explicitly_destroy=True
            )
        elif self._elastic:
            made = self._module.ElasticBuffer(
                self._group, num_max_tokens_per_rank=tokens, hidden=hidden, num_topk=topk, use_fp8_dispatch=fp8,
                explicitly_destroy=True,
            )  # fmt: skip
        else:
            configs = (kind.get_dispatch_config(ranks), kind.get_combine_config(ranks))
            nvl = max(config.get_nvl_buffer_size_hint(hidden * 2, ranks) for config in configs)
            rdma = max(config.get_rdma_buffer_size_hint(hidden * 2, ranks) for config in configs)
            made = kind(self._group, nvl, rdma, explicitly_destroy=True)
        self._made = (key, made)
        return made

    def close(self) -> None:
        if self._made is not None:
            self._made[1].destroy()
            self._made = None


class _DeepEp:
    """What both modes share. ``slots``: of the world, ``local`` of this rank; selections name them as DeepEP's experts."""

    def __init__(
        self, buffer: Any, workload: Workload, fp8: bool, slots: int, local: int, most_tokens: int, device: torch.device
    ) -> None:
        self._buffer, self._workload, self._fp8 = buffer, workload, fp8
        self._slots, self._local, self._most, self._device = slots, local, most_tokens, device
        self._phases = Phases(device)

    def phases_ns(self) -> NDArray[np.int64]:
        return self._phases.durations_ns()

    def sent_bytes(self) -> None:
        """The library does not tell."""

    def finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arrived:
    """``handle``: DeepEP's; ``record``, ``weights``: of each expert row, which received token it is of and its weight."""

    handle: Any
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    record: torch.Tensor
    weights: torch.Tensor
    tokens: int


class DeepEpNormal(_DeepEp):
    """High throughput. Rows come one for each token and rank; putting them in the experts' order, and adding up what a
    rank's experts make of a token, is not DeepEP's: both are phases of their own."""

    dispatch_phases = ("layout", "quantise", "dispatch", "permute")
    combine_phases = ("permute", "combine")

    def learn(self, batch: Batch) -> _Arrived | None:
        if self._workload.counts != "known":
            return None
        found: _Arrived = self.dispatch(batch).handle
        return found

    def dispatch(self, batch: Batch, known: _Arrived | None = None) -> Received:
        phases, buffer = self._phases, self._buffer
        phases.begin()
        layout: dict[str, Any] = {}
        if known is None:
            per_rank, per_rdma_rank, per_expert, in_rank, _ = buffer.get_dispatch_layout(batch.slots, self._slots)
            layout = {
                "num_tokens_per_rank": per_rank, "num_tokens_per_rdma_rank": per_rdma_rank, "is_token_in_rank": in_rank,
                "num_tokens_per_expert": per_expert, "topk_idx": batch.slots, "topk_weights": batch.weights,
            }  # fmt: skip
        phases.mark()
        x: Any = batch.tokens
        if self._fp8:
            small, by_row = quantise(batch.tokens)
            x = (small, by_row.t().contiguous().t())  # by columns, as its tests hand them over
        phases.mark()
        if known is None:
            came, idx, weights, _, handle, _ = buffer.dispatch(x, **layout)
        else:
            came, _, _, _, _, _ = buffer.dispatch(x, handle=known.handle)
            idx, weights, handle = known.topk_idx, known.topk_weights, known.handle
        phases.mark()
        values, scales = came if self._fp8 else (came, None)
        record, k = torch.nonzero(idx >= 0, as_tuple=True)
        order = torch.argsort(idx[record, k], stable=True)
        record, k = record[order], k[order]
        counts = torch.bincount(idx[record, k], minlength=self._local)
        rows = values.view(torch.uint8)[record].view(values.dtype) if self._fp8 else values[record]
        received = Received(
            rows=rows, scales=None if scales is None else scales[record], begins=counts.cumsum(0) - counts,
            counts=counts, source_rank=None, source_token=None,
            handle=_Arrived(
                handle=handle, topk_idx=idx, topk_weights=weights, record=record, weights=weights[record, k],
                tokens=len(values),
            ),
        )  # fmt: skip
        phases.mark()
        return received

    def combine(self, rows: torch.Tensor, received: Received) -> torch.Tensor:
        phases, arrived = self._phases, received.handle
        phases.begin()
        total = torch.zeros(arrived.tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
        total.index_add_(0, arrived.record, rows.float() * arrived.weights[:, None])
        partial = total.to(torch.bfloat16)
        phases.mark()
        # It adds without weights: they are in what is sent.
        sums: torch.Tensor = self._buffer.combine(partial, arrived.handle)[0]
        phases.mark()
        return sums


class DeepEpElastic(_DeepEp):
    """High throughput of version 2: the layout is worked out within the dispatch, which tells where tokens come from."""

    dispatch_phases = ("quantise", "dispatch", "permute")
    combine_phases = ("permute", "combine")

    def learn(self, batch: Batch) -> _Arrived | None:
        if self._workload.counts != "known":
            return None
        found: _Arrived = self.dispatch(batch).handle
        return found

    def dispatch(self, batch: Batch, known: _Arrived | None = None) -> Received:
        phases = self._phases
        phases.begin()
        x: Any = quantise(batch.tokens) if self._fp8 else batch.tokens
        phases.mark()
        if known is None:
            came, idx, weights, handle, _ = self._buffer.dispatch(
                x, topk_idx=batch.slots, topk_weights=batch.weights, num_experts=self._slots,
                num_max_tokens_per_rank=self._most, do_cpu_sync=True,
            )  # fmt: skip
        else:
            came, _, _, handle, _ = self._buffer.dispatch(x, handle=known.handle, num_experts=self._slots)
            idx, weights = known.topk_idx, known.topk_weights
        phases.mark()
        values, scales = came if self._fp8 else (came, None)
        record, k = torch.nonzero(idx >= 0, as_tuple=True)
        # Of its own experts, whether it counts them from the first of the world or from the rank's own first.
        local = idx[record, k] % self._local
        order = torch.argsort(local, stable=True)
        record, k = record[order], k[order]
        counts = torch.bincount(local, minlength=self._local)
        source = handle.recv_src_metadata[: len(values), 0].long()[record]
        received = Received(
            rows=values.view(torch.uint8)[record].view(values.dtype) if self._fp8 else values[record],
            scales=None if scales is None else scales[record], begins=counts.cumsum(0) - counts, counts=counts,
            source_rank=source // self._most, source_token=source % self._most,
            handle=_Arrived(
                handle=handle, topk_idx=idx, topk_weights=weights, record=record, weights=weights[record, k],
                tokens=len(values),
            ),
        )  # fmt: skip
        phases.mark()
        return received

    def combine(self, rows: torch.Tensor, received: Received) -> torch.Tensor:
        phases, arrived = self._phases, received.handle
        phases.begin()
        total = torch.zeros(arrived.tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
        total.index_add_(0, arrived.record, rows.float() * arrived.weights[:, None])
        partial = total.to(torch.bfloat16)
        phases.mark()
        sums: torch.Tensor = self._buffer.combine(partial, arrived.handle)[0]
        phases.mark()
        return sums


class _Scales:
    """[N, H/128] of a result whose scales lie by columns: taken out only where somebody looks, outside of timed code."""

    def __init__(self, scales: torch.Tensor) -> None:
        self._scales = scales

    def __getitem__(self, index: torch.Tensor) -> torch.Tensor:
        return self._scales.reshape(-1, self._scales.shape[-1])[index]


class DeepEpLowLatency(_DeepEp):
    """Low latency, with its receive hooks between the phases: sending and receiving are two kernels."""

    dispatch_phases = ("send", "recv")
    combine_phases = ("send", "recv")

    def learn(self, batch: Batch) -> None:
        return None

    def dispatch(self, batch: Batch, known: None = None) -> Received:
        phases = self._phases
        phases.begin()
        came, counts, handle, _, hook = self._buffer.low_latency_dispatch(
            batch.tokens, batch.slots, self._most, self._slots, use_fp8=self._fp8, return_recv_hook=True
        )
        phases.mark()
        hook()
        phases.mark()
        values, scales = came if self._fp8 else (came, None)
        each = values.shape[1]
        return Received(
            rows=values.view(-1, values.shape[2]), scales=None if scales is None else _Scales(scales),
            begins=torch.arange(self._local, device=values.device) * each, counts=counts.long(), source_rank=None,
            source_token=None, handle=(handle, batch, values.shape),
        )  # fmt: skip

    def combine(self, rows: torch.Tensor, received: Received) -> torch.Tensor:
        phases = self._phases
        handle, batch, shape = received.handle
        phases.begin()
        sums, _, hook = self._buffer.low_latency_combine(
            rows.view(shape), batch.slots, batch.weights, handle, return_recv_hook=True
        )
        phases.mark()
        hook()
        phases.mark()
        found: torch.Tensor = sums
        return found
