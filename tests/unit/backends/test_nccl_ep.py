"""NCCL EP's adapter on a double of the library: ranks are threads, and the double moves tokens as nccl.ep says it does.

FIELDS and SIGNATURES are those of nccl-extensions 0.1.0 (nccl/ep/*.py), and are compared with the module where it is
installed.
"""

from __future__ import annotations

import importlib.util
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, make_dataclass, replace
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commbench.backends.nccl_ep import NcclEpLibrary
from commbench.backends.quantise import quantise
from commbench.moe.operations import OPERATIONS, Numbers, Setup
from commbench.moe.placement import place
from commbench.moe.routing import Router
from commbench.workloads import Workload

RANKS = 4
WORKLOAD = Workload(tokens=11, hidden=512, experts=8, topk=3, masked=0.2)
FIELDS = {
    "GroupConfig": [
        "algorithm", "num_experts", "max_dispatch_tokens_per_rank", "max_recv_tokens_per_rank", "max_token_bytes",
        "rdma_buffer_size", "num_qp_per_rank", "num_channels", "max_num_sms", "alloc", "enable_mask", "timeout_ns",
        "zero_copy", "overflow_policy", "num_topk",
    ],
    "DispatchConfig": ["send_only", "round_scales", "pass_direction", "quantization_recipe"],
    "CombineConfig": ["send_only", "pass_direction", "quantization_recipe"],
    "LayoutInfo": ["expert_counters", "src_rank_counters", "expert_offsets", "recv_total_counter", "recv_topk_idx_kind"],
    "DispatchInputs": ["tokens", "topk_weights", "scales"],
    "DispatchOutputs": ["tokens", "topk_weights", "scales", "topk_idx"],
    "CombineInputs": ["tokens", "topk_weights", "scales"],
    "CombineOutputs": ["tokens", "topk_weights"],
}  # fmt: skip
SIGNATURES = {
    "Group.create": ["comm", "config"],
    "Group.create_handle": ["self", "layout", "topk_idx", "layout_info", "config", "stream"],
    "Handle.update": ["self", "topk_idx", "layout_info", "stream"],
    "Handle.dispatch": ["self", "inputs", "outputs", "layout_info", "config", "stream"],
    "Handle.combine": ["self", "inputs", "outputs", "config", "stream"],
    "Handle.complete": ["self", "config", "stream"],
    "Handle.destroy": ["self"],
    "Group.destroy": ["self"],
}
ENUMS = {
    "Algorithm": {"LOW_LATENCY": 0, "HIGH_THROUGHPUT": 1},
    "Layout": {"EXPERT_MAJOR": 1, "FLAT": 3},
    "ExpertIdKind": {"LOCAL": 1},
    "DispatchQuantizationRecipe": {"NONE": 0, "FWD": 1, "DS_FP8E3M4": 2},
}


class World:
    def __init__(self) -> None:
        self.door = threading.Barrier(RANKS, timeout=20)
        self.parts: dict[int, Any] = {}
        self.log: dict[int, list[str]] = {rank: [] for rank in range(RANKS)}

    def share(self, rank: int, part: Any) -> list[Any]:
        self.parts[rank] = part
        self.door.wait()
        found = [self.parts[one] for one in range(RANKS)]
        self.door.wait()
        return found


@dataclass
class Tensor:
    buffer: torch.Tensor

    def __post_init__(self) -> None:
        assert self.buffer.is_contiguous()
        assert self.buffer.dim() > 0


def double(world: World) -> Any:
    """A module like nccl.ep."""

    class Handle:
        def __init__(self, rank: int, config: Any, layout: int) -> None:
            self.rank, self.config, self.low = rank, config, layout == 1
            self.staged: Callable[[], None] | None = None
            self.destroyed = False

        def route(self, topk_idx: Tensor, layout_info: Any) -> None:
            self.idx = topk_idx.buffer
            assert self.idx.dtype == torch.int64
            if self.low:
                assert layout_info is None
                return
            each = self.config.num_experts // RANKS
            self.every = world.share(self.rank, self.idx)
            self.source = [
                (rank, token)
                for rank, idx in enumerate(self.every)
                for token, row in enumerate(idx.tolist())
                if any(expert >= 0 and expert // each == self.rank for expert in row)
            ]
            layout_info.recv_total_counter.buffer[0] = len(self.source)

        def update(self, topk_idx: Tensor, *, layout_info: Any = None, stream: int) -> None:
            assert not self.destroyed
            world.log[self.rank].append("update")
            self.route(topk_idx, layout_info)

        def dispatch(
            self, inputs: Any, outputs: Any, *, layout_info: Any = None, config: Any = None, stream: int
        ) -> None:
            assert stream == 7
            recipe = int(config.quantization_recipe)
            tokens = inputs.tokens.buffer
            assert (inputs.scales is not None) == (recipe == 1)
            assert (outputs.scales is not None) == (recipe in (1, 2))
            if self.low:
                assert config.send_only == 1
                assert recipe != 1
                world.log[self.rank].append("send")
                every = world.share(self.rank, (tokens.clone(), self.idx.clone()))
                self.staged = lambda: self.place(every, outputs, layout_info, recipe)
                return
            assert not config.send_only
            world.log[self.rank].append("dispatch")
            assert int(layout_info.recv_topk_idx_kind) == 1
            scales = None if inputs.scales is None else inputs.scales.buffer
            every = world.share(self.rank, (tokens, scales, inputs.topk_weights.buffer))
            assert len(outputs.tokens.buffer) == len(self.source)
            each = self.config.num_experts // RANKS
            for at, (rank, token) in enumerate(self.source):
                theirs, their_scales, weights = every[rank]
                outputs.tokens.buffer[at] = theirs[token]
                if their_scales is not None:
                    outputs.scales.buffer[at] = their_scales[token]
                local = self.every[rank][token] - self.rank * each
                mine = (local >= 0) & (local < each)
                outputs.topk_idx.buffer[at] = torch.where(mine, local, -1)
                outputs.topk_weights.buffer[at] = torch.where(mine, weights[token], 0.0)

        def place(self, every: list[Any], outputs: Any, layout_info: Any, recipe: int) -> None:
            each = self.config.num_experts // RANKS
            assert outputs.tokens.buffer.shape[1] == RANKS * self.config.max_dispatch_tokens_per_rank
            self.info: list[list[tuple[int, int]]] = [[] for _ in range(each)]
            counts = layout_info.expert_counters.buffer
            counts.zero_()
            for rank, (theirs, idx) in enumerate(every):
                small, scales = quantise(theirs)
                for token, row in enumerate(idx.tolist()):
                    for expert in row:
                        if expert >= 0 and expert // each == self.rank:
                            local = expert % each
                            at = len(self.info[local])
                            outputs.tokens.buffer[local, at] = small[token] if recipe else theirs[token]
                            if recipe:
                                outputs.scales.buffer[local, at] = scales[token]
                            counts[local] += 1
                            self.info[local].append((rank, token))

        def combine(self, inputs: Any, outputs: Any, *, config: Any = None, stream: int) -> None:
            tokens, sums = inputs.tokens.buffer, outputs.tokens.buffer
            if not self.low:
                world.log[self.rank].append("combine")
                assert outputs.topk_weights is None
                total = torch.zeros(sums.shape)
                for theirs, source in world.share(self.rank, (tokens, self.source)):
                    for row, (rank, token) in zip(theirs, source, strict=True):
                        if rank == self.rank:
                            total[token] += row.float()
                sums.copy_(total)
                return
            world.log[self.rank].append("send back")
            weights = outputs.topk_weights.buffer
            every = world.share(self.rank, (tokens, self.info))

            def finish() -> None:
                total = torch.zeros(sums.shape)
                each = self.config.num_experts // RANKS
                for rank, (theirs, info) in enumerate(every):
                    for local, rows in enumerate(info):
                        for at, (source, token) in enumerate(rows):
                            if source == self.rank:
                                (k,) = torch.nonzero(self.idx[token] == rank * each + local)[0]
                                total[token] += theirs[local, at].float() * weights[token, k]
                sums.copy_(total)

            self.staged = finish

        def complete(self, *, config: int = 0, stream: int) -> None:
            world.log[self.rank].append("complete")
            assert self.staged is not None
            self.staged()
            self.staged = None

        def destroy(self) -> None:
            self.destroyed = True
            world.log[self.rank].append("destroy handle")

    class Group:
        def __init__(self, rank: int, config: Any) -> None:
            self.rank, self.config = rank, config

        @classmethod
        def create(cls, comm: Any, config: Any) -> Group:
            assert config.max_token_bytes % 16 == 0
            world.log[comm].append("group")
            return cls(comm, config)

        def create_handle(
            self, layout: int, topk_idx: Tensor, *, layout_info: Any = None, config: Any = None, stream: int
        ) -> Handle:
            assert int(layout) == (1 if int(self.config.algorithm) == 0 else 3)
            world.log[self.rank].append("handle")
            found = Handle(self.rank, self.config, int(layout))
            found.route(topk_idx, layout_info)
            return found

        def destroy(self) -> None:
            world.log[self.rank].append("destroy group")

    plain = {name: make_dataclass(name, [(one, Any, 0 if name.endswith("Config") else None) for one in names])
             for name, names in FIELDS.items()}  # fmt: skip
    enums = {name: IntEnum(name, members) for name, members in ENUMS.items()}  # type: ignore[misc]
    return SimpleNamespace(Tensor=Tensor, Group=Group, Handle=Handle, get_lib_version=lambda: "0.1.0", **plain, **enums)


def on_all(act: Callable[[int, NcclEpLibrary, World], Any]) -> tuple[list[Any], World]:
    world = World()
    module = double(world)

    def one(rank: int) -> Any:
        try:
            return act(rank, NcclEpLibrary(module, rank, RANKS, torch.device("cpu"), lambda: 7), world)
        except BaseException:
            world.door.abort()
            raise

    with ThreadPoolExecutor(RANKS) as pool:
        futures = [pool.submit(one, rank) for rank in range(RANKS)]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures], world


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("collective", ["moe_dispatch", "moe_combine"])
@pytest.mark.parametrize(
    "changes", [{}, {"counts": "known"}, {"mode": "low_latency"}, {"uneven_tokens": True}, {"experts_on": "eplb:4"}]
)
def test_what_it_gives_passes_the_check(changes: dict[str, Any], collective: str, dtype: str) -> None:
    workload = replace(WORKLOAD, **changes)
    router = Router(workload, RANKS, (0,) * RANKS, 3)
    where = place(workload, RANKS, (0,) * RANKS, router.expected_load())

    def act(rank: int, library: NcclEpLibrary, world: World) -> list[int]:
        exchange = library.make(workload, dtype, where, rank, workload.tokens)
        setup = Setup(router=router, where=where, rank=rank, device=torch.device("cpu"))
        operation = OPERATIONS[collective](setup=setup, exchange=exchange).operation()
        data, wrong = Numbers(), []
        for iteration in (5, 6):
            data.fill(operation.input, iteration)
            operation.upload()
            world.log[rank].clear()
            operation.run()
            assert operation.phases is not None
            names = exchange.dispatch_phases if collective == "moe_dispatch" else exchange.combine_phases
            assert len(operation.phases()) == len(names)
            operation.download()
            wrong.append(data.wrong(operation.output, iteration))
        library.close()
        return wrong

    found, world = on_all(act)
    assert found == [[0, 0]] * RANKS
    calls = {
        ("moe_dispatch", "throughput", "exchanged"): ["update", "dispatch"],
        ("moe_dispatch", "throughput", "known"): ["dispatch"],
        ("moe_dispatch", "low_latency", "exchanged"): ["update", "send", "complete"],
        ("moe_combine", "low_latency", "exchanged"): ["send back", "complete"],
    }
    wanted = calls.get((collective, workload.mode, workload.counts), ["combine"])
    assert world.log[0] == [*wanted, "destroy handle", "destroy group"]


def test_one_group_serves_a_shape() -> None:
    where = place(WORKLOAD, RANKS, (0,) * RANKS, None)

    def act(rank: int, library: NcclEpLibrary, world: World) -> None:
        for one in (WORKLOAD, WORKLOAD, replace(WORKLOAD, mode="low_latency")):
            library.make(one, "bfloat16", where, rank, 11)
        library.close()

    _, world = on_all(act)
    assert world.log[0] == ["group", "destroy group", "group", "destroy group"]


def test_what_it_cannot_do_is_said() -> None:
    library = NcclEpLibrary(double(World()), 0, RANKS, torch.device("cpu"), lambda: 7)
    assert library.why_not(WORKLOAD, "float8_e4m3fn", "library") is None
    assert "multiples of 512 values, not 256" in str(
        library.why_not(replace(WORKLOAD, hidden=256), "float8_e4m3fn", "library")
    )
    assert library.why_not(replace(WORKLOAD, hidden=256), "bfloat16", "library") is None
    assert "a token of 130 values is not" in str(library.why_not(replace(WORKLOAD, hidden=130), "bfloat16", "library"))
    uneven = replace(WORKLOAD, experts=9, uneven_experts=True)
    with pytest.raises(RuntimeError, match="as many experts on every rank: 9 slots on 4 ranks are not"):
        library.make(uneven, "bfloat16", place(uneven, RANKS, (0,) * RANKS, None), 0, 11)


def _parameters(of: Any, name: str) -> list[str]:
    owner, _, method = name.partition(".")
    known = [one for one in inspect.signature(getattr(getattr(of, owner), method)).parameters if one != "cls"]
    return known


def test_the_double_has_the_signatures_that_were_read() -> None:
    module = double(World())
    for name, wanted in SIGNATURES.items():
        assert _parameters(module, name) == wanted, name


def _installed() -> bool:
    try:
        return importlib.util.find_spec("nccl.ep") is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.skipif(not _installed(), reason="nccl.ep is not installed")
def test_signatures_of_the_installed_library() -> None:
    from nccl import ep

    for name, wanted in SIGNATURES.items():
        assert _parameters(ep, name) == wanted, name
    for name, names in FIELDS.items():
        assert [one.name for one in fields(getattr(ep, name))] == names, name
    for name, members in ENUMS.items():
        for member, value in members.items():
            assert int(getattr(ep, name)[member]) == value
