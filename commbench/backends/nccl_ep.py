"""NCCL's own dispatch and combine (``nccl.ep`` of the nccl-extensions wheel).

Calls and their arguments are those of nccl-extensions 0.1.0 (``nccl/ep/{group,handle,tensor,enums}.py``). Its communicator is
a fresh one beside the process group of torch.distributed, as ``nccl.ep.interop.torch`` makes it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
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
from commbench.workloads import SCALE_BLOCK, Workload

FP8_HIDDEN = 512  # rows of scales must be of 16 bytes, and the low-latency kernel quantises 512 values at a time


class NcclEp(Nccl):
    """NCCL EP on the ranks of an NCCL process group."""

    name = "nccl_ep"
    process_group = "nccl"

    def __init__(self) -> None:
        super().__init__()
        self._library: NcclEpLibrary | None = None

    def start(self, context: Context) -> None:
        super().start(context)
        try:
            module = importlib.import_module("nccl.ep")
            interop = importlib.import_module("nccl.ep.interop.torch")
        except (ImportError, OSError, RuntimeError) as error:
            raise BackendError(f"nccl.ep cannot be loaded ({error}): pip install 'commbench[moe]'") from None

        def stream() -> int:
            return int(torch.cuda.current_stream(self.device).cuda_stream)

        comm = interop.get_nccl_comm_from_group()
        self._library = NcclEpLibrary(module, comm, context.world, self.device, stream)

    def version(self) -> str:
        assert self._library is not None
        return f"NCCL EP {self._library.version()}, {super().version()}"

    def expert_library(self, members: tuple[int, ...]) -> NcclEpLibrary | None:  # type: ignore[override]
        return self._library if len(members) == dist.get_world_size() else None

    def stop(self) -> None:
        if self._library is not None:
            self._library.close()
        super().stop()


class NcclEpLibrary:
    """The library on one rank; a group is made for each shape, and kept while cases ask for it."""

    def __init__(self, module: Any, comm: Any, ranks: int, device: torch.device, stream: Callable[[], int]) -> None:
        self._module, self._comm, self._ranks = module, comm, ranks
        self._device, self._stream = device, stream
        self._made: tuple[Any, Any] | None = None
        self._handles: list[NcclEpExchange] = []

    def version(self) -> str:
        return str(self._module.get_lib_version())

    def most_sets(self, workload: Workload) -> None:
        """Results are in the caller's memory."""

    def why_not(self, workload: Workload, dtype: str, algorithm: str) -> str | None:
        if dtype.startswith("float8") and workload.hidden % FP8_HIDDEN:
            return f"NCCL EP sends FP8 in multiples of {FP8_HIDDEN} values, not {workload.hidden}"
        if workload.hidden % 8:
            return f"NCCL EP moves multiples of 16 bytes, and a token of {workload.hidden} values is not"
        return None

    def make(self, workload: Workload, dtype: str, place: Place, rank: int, most_tokens: int) -> NcclEpExchange:
        """Raises RuntimeError where ranks have different numbers of expert slots, which NCCL EP knows by division."""
        ranks, slots = len(place.host_of), len(place.rank_of)
        if slots % ranks or any(owner != slot // (slots // ranks) for slot, owner in enumerate(place.rank_of)):
            raise RuntimeError(f"NCCL EP wants as many experts on every rank: {slots} slots on {ranks} ranks are not")
        group = self._group(workload, slots, most_tokens)
        made = NcclEpExchange(
            self._module, group, workload, dtype.startswith("float8"), ranks, slots // ranks, most_tokens, self._device,
            self._stream,
        )  # fmt: skip
        self._handles.append(made)
        return made

    def _group(self, workload: Workload, slots: int, most_tokens: int) -> Any:
        module, low = self._module, workload.mode == "low_latency"
        key = (low, workload.hidden, workload.topk, slots, most_tokens)
        if self._made is not None and self._made[0] == key:
            return self._made[1]
        self.close()
        config = module.GroupConfig(
            algorithm=module.Algorithm.LOW_LATENCY if low else module.Algorithm.HIGH_THROUGHPUT, num_experts=slots,
            max_dispatch_tokens_per_rank=most_tokens, max_token_bytes=2 * workload.hidden, num_topk=workload.topk,
        )  # fmt: skip
        group = module.Group.create(self._comm, config)
        self._made = (key, group)
        return group

    def close(self) -> None:
        """Handles first: they are the group's."""
        for one in self._handles:
            one.close()
        self._handles = []
        if self._made is not None:
            self._made[1].destroy()
            self._made = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arrived:
    """Of high throughput: ``record`` and ``weights`` of each expert row, and how many records came."""

    record: torch.Tensor
    weights: torch.Tensor
    records: int


class NcclEpExchange:
    """One case's exchange, with a handle of its own. High throughput is in the eager mode: the host learns how many
    tokens come before it makes room for them (``counts``); low latency has its send and receive apart."""

    def __init__(
        self, module: Any, group: Any, workload: Workload, fp8: bool, ranks: int, local: int, most_tokens: int,
        device: torch.device, stream: Callable[[], int],
    ) -> None:  # fmt: skip
        self._ep, self._group, self._workload, self._fp8 = module, group, workload, fp8
        self._ranks, self._local, self._most = ranks, local, most_tokens
        self._device, self._stream = device, stream
        self._low = workload.mode == "low_latency"
        self._phases = Phases(device)
        self._handle: Any = None
        self.dispatch_phases: tuple[str, ...] = ("counts", "quantise", "dispatch", "permute")
        self.combine_phases: tuple[str, ...] = ("permute", "combine")
        if self._low:
            self.dispatch_phases, self.combine_phases = ("layout", "send", "recv"), ("send", "recv")

    def learn(self, batch: Batch) -> torch.Tensor | None:
        """The total that comes, with the handle set to these slots."""
        if self._low or self._workload.counts != "known":
            return None
        return self._route(batch)

    def _route(self, batch: Batch) -> torch.Tensor | None:
        """Tell the handle where tokens go. High throughput exchanges who sends how many to whom in this call."""
        ep, stream = self._ep, self._stream()
        slots = ep.Tensor(batch.slots)
        total, info = None, None
        if not self._low:
            total = torch.zeros(1, dtype=torch.int32, device=self._device)
            info = ep.LayoutInfo(recv_total_counter=ep.Tensor(total))
        if self._handle is None:
            layout = ep.Layout.EXPERT_MAJOR if self._low else ep.Layout.FLAT
            self._handle = self._group.create_handle(layout, slots, layout_info=info, stream=stream)
        else:
            self._handle.update(slots, layout_info=info, stream=stream)
        return total

    def dispatch(self, batch: Batch, known: torch.Tensor | None = None) -> Received:
        return self._low_latency(batch) if self._low else self._throughput(batch, known)

    def _throughput(self, batch: Batch, known: torch.Tensor | None) -> Received:
        ep, phases, hidden, topk = self._ep, self._phases, self._workload.hidden, self._workload.topk
        phases.begin()
        total = self._route(batch) if known is None else known
        assert total is not None
        came = int(total.item())
        phases.mark()
        tokens, scales, recipe = batch.tokens, None, ep.DispatchQuantizationRecipe.NONE
        if self._fp8:
            tokens, scales = quantise(batch.tokens)
            recipe = ep.DispatchQuantizationRecipe.FWD
        phases.mark()
        rows = torch.empty(came, hidden, dtype=tokens.dtype, device=self._device)
        their_scales = None if scales is None else torch.empty(came, hidden // SCALE_BLOCK, device=self._device)
        weights = torch.empty(came, topk, device=self._device)
        idx = torch.empty(came, topk, dtype=torch.int64, device=self._device)
        self._handle.dispatch(
            ep.DispatchInputs(
                tokens=ep.Tensor(tokens), topk_weights=ep.Tensor(batch.weights),
                scales=None if scales is None else ep.Tensor(scales),
            ),
            ep.DispatchOutputs(
                tokens=ep.Tensor(rows), topk_weights=ep.Tensor(weights), topk_idx=ep.Tensor(idx),
                scales=None if their_scales is None else ep.Tensor(their_scales),
            ),
            layout_info=ep.LayoutInfo(recv_topk_idx_kind=ep.ExpertIdKind.LOCAL),
            config=ep.DispatchConfig(quantization_recipe=recipe), stream=self._stream(),
        )  # fmt: skip
        phases.mark()
        record, k = torch.nonzero(idx >= 0, as_tuple=True)
        order = torch.argsort(idx[record, k], stable=True)
        record, k = record[order], k[order]
        counts = torch.bincount(idx[record, k], minlength=self._local)
        received = Received(
            rows=rows.view(torch.uint8)[record].view(rows.dtype) if self._fp8 else rows[record],
            scales=None if their_scales is None else their_scales[record], begins=counts.cumsum(0) - counts,
            counts=counts, source_rank=None, source_token=None,
            handle=(batch, _Arrived(record=record, weights=weights[record, k], records=came)),
        )  # fmt: skip
        phases.mark()
        return received

    def _low_latency(self, batch: Batch) -> Received:
        ep, phases, hidden = self._ep, self._phases, self._workload.hidden
        phases.begin()
        self._route(batch)
        phases.mark()
        shape = (self._local, self._ranks * self._most, hidden)
        kind = torch.float8_e4m3fn if self._fp8 else torch.bfloat16
        rows = torch.empty(shape, dtype=kind, device=self._device)
        scales = torch.empty(*shape[:2], hidden // SCALE_BLOCK, device=self._device) if self._fp8 else None
        counts = torch.zeros(self._local, dtype=torch.int32, device=self._device)
        recipes = ep.DispatchQuantizationRecipe
        self._handle.dispatch(
            ep.DispatchInputs(tokens=ep.Tensor(batch.tokens)),
            ep.DispatchOutputs(tokens=ep.Tensor(rows), scales=None if scales is None else ep.Tensor(scales)),
            layout_info=ep.LayoutInfo(expert_counters=ep.Tensor(counts)),
            config=ep.DispatchConfig(
                send_only=1, quantization_recipe=recipes.DS_FP8E3M4 if self._fp8 else recipes.NONE
            ),
            stream=self._stream(),
        )  # fmt: skip
        phases.mark()
        self._handle.complete(stream=self._stream())
        phases.mark()
        return Received(
            rows=rows.view(-1, hidden), scales=None if scales is None else scales.view(-1, scales.shape[2]),
            begins=torch.arange(self._local, device=self._device) * shape[1], counts=counts.long(), source_rank=None,
            source_token=None, handle=(batch, shape),
        )  # fmt: skip

    def combine(self, rows: torch.Tensor, received: Received) -> torch.Tensor:
        ep, phases = self._ep, self._phases
        batch, arrived = received.handle
        sums = torch.empty_like(batch.tokens)
        phases.begin()
        if self._low:
            # It weighs on the way: the weights go with where the sums are to be.
            self._handle.combine(
                ep.CombineInputs(tokens=ep.Tensor(rows.view(arrived))),
                ep.CombineOutputs(tokens=ep.Tensor(sums), topk_weights=ep.Tensor(batch.weights)),
                config=ep.CombineConfig(send_only=1), stream=self._stream(),
            )  # fmt: skip
            phases.mark()
            self._handle.complete(stream=self._stream())
            phases.mark()
            return sums
        total = torch.zeros(arrived.records, rows.shape[1], dtype=torch.float32, device=rows.device)
        total.index_add_(0, arrived.record, rows.float() * arrived.weights[:, None])
        partial = total.to(torch.bfloat16)
        phases.mark()
        self._handle.combine(
            ep.CombineInputs(tokens=ep.Tensor(partial)), ep.CombineOutputs(tokens=ep.Tensor(sums)),
            config=ep.CombineConfig(), stream=self._stream(),
        )  # fmt: skip
        phases.mark()
        return sums

    def phases_ns(self) -> NDArray[np.int64]:
        return self._phases.durations_ns()

    def sent_bytes(self) -> None:
        """The library does not tell."""

    def finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.destroy()
            self._handle = None
