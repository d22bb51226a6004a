"""DeepEP's adapter on a double of the library: ranks are threads, and the double moves the tokens as DeepEP says it does.

What the double takes is what ``deep_ep.Buffer`` takes: SIGNATURES are those of deep_ep/buffer.py (v1.2.1) and of
deep_ep/buffers/legacy.py (main, 2026), and are compared with the module where it is installed.
"""

from __future__ import annotations

import importlib.util
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commbench.backends.deepep import DeepEpLibrary
from commbench.moe.operations import OPERATIONS, Numbers, Setup
from commbench.moe.placement import place
from commbench.moe.routing import Router
from commbench.workloads import Workload

RANKS = 4
WORKLOAD = Workload(tokens=11, hidden=256, experts=8, topk=3, masked=0.2)
SIGNATURES = {
    "__init__": ["group", "num_nvl_bytes", "num_rdma_bytes", "low_latency_mode", "num_qps_per_rank", "explicitly_destroy"],
    "get_dispatch_layout": ["topk_idx", "num_experts"],
    "dispatch": [
        "x", "handle", "num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank", "num_tokens_per_expert",
        "topk_idx", "topk_weights",
    ],
    "combine": ["x", "handle"],
    "low_latency_dispatch": ["x", "topk_idx", "num_max_dispatch_tokens_per_rank", "num_experts", "use_fp8", "return_recv_hook"],
    "low_latency_combine": ["x", "topk_idx", "topk_weights", "handle", "return_recv_hook"],
    "get_low_latency_rdma_size_hint": ["num_max_dispatch_tokens_per_rank", "hidden", "num_ranks", "num_experts"],
    "get_dispatch_config": ["num_ranks"], "get_combine_config": ["num_ranks"], "destroy": [],
}  # fmt: skip


class World:
    """What the ranks of a double share: a place for each rank's part, and a door that all pass."""

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


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        assert (hidden_bytes, num_ranks) == (WORKLOAD.hidden * 2, RANKS)
        return 1 << 20

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


LOCAL_IDS = 1  # whether the double of version 2 counts experts from the rank's first


def double(world: World, *, elastic: bool = False) -> Any:
    """A module like deep_ep."""

    class Buffer:
        num_sms = 20

        def __init__(
            self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False,
            num_qps_per_rank: int = 24, allow_nvlink_for_low_latency_mode: bool = True, allow_mnnvl: bool = False,
            explicitly_destroy: bool = False,
        ) -> None:  # fmt: skip
            self.rank, self.low = group.rank(), low_latency_mode
            assert (num_rdma_bytes > 0) == low_latency_mode
            assert (num_nvl_bytes > 0) == (not low_latency_mode)
            assert not low_latency_mode or num_qps_per_rank == WORKLOAD.experts // RANKS
            assert explicitly_destroy
            world.log[self.rank].append("buffer")

        def destroy(self) -> None:
            world.log[self.rank].append("destroy")

        @staticmethod
        def get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
        ) -> int:
            return num_max_dispatch_tokens_per_rank * hidden * num_ranks * num_experts

        @staticmethod
        def get_dispatch_config(num_ranks: int) -> Config:
            assert num_ranks in (2, 4, 8), f"Unsupported number of EP ranks: {num_ranks}"
            return Config()

        get_combine_config = get_dispatch_config

        def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
            world.log[self.rank].append("layout")
            assert topk_idx.dtype == torch.int64
            each = num_experts // RANKS
            in_rank = torch.zeros(len(topk_idx), RANKS, dtype=torch.bool)
            for token, row in enumerate(topk_idx.tolist()):
                for expert in row:
                    if expert >= 0:
                        in_rank[token, expert // each] = True
            per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
            return in_rank.sum(0).int(), None, per_expert, in_rank, object()

        def dispatch(
            self, x: Any, handle: Any = None, num_tokens_per_rank: Any = None, num_tokens_per_rdma_rank: Any = None,
            is_token_in_rank: Any = None, num_tokens_per_expert: Any = None, topk_idx: Any = None, topk_weights: Any = None,
        ) -> tuple[Any, ...]:  # fmt: skip
            world.log[self.rank].append("dispatch" if handle is None else "dispatch again")
            values, scales = x if isinstance(x, tuple) else (x, None)
            if scales is not None:
                assert values.dtype == torch.float8_e4m3fn
                assert scales.shape == (len(values), values.shape[1] // 128)
                assert scales.t().is_contiguous()
            if handle is None:
                assert num_tokens_per_rank is not None
                assert num_tokens_per_expert is not None
            else:
                assert topk_idx is None
                is_token_in_rank, topk_idx, topk_weights = handle[1]
            every = world.share(self.rank, (values, scales, is_token_in_rank, topk_idx, topk_weights))
            each = (WORKLOAD.experts if num_tokens_per_expert is None else len(num_tokens_per_expert)) // RANKS
            rows, small, ids, weights, source = [], [], [], [], []
            for rank, (theirs, their_scales, where, idx, weight) in enumerate(every):
                for token in torch.nonzero(where[:, self.rank]).flatten().tolist():
                    rows.append(theirs[token])
                    small.append(None if their_scales is None else their_scales[token])
                    local = idx[token] - self.rank * each
                    mine = (local >= 0) & (local < each)
                    ids.append(torch.where(mine, local, -1))
                    weights.append(torch.where(mine, weight[token], 0.0))
                    source.append((rank, token))
            found = torch.stack(rows) if rows else values[:0]
            if scales is not None:
                found = (found, torch.stack(small) if small else scales[:0])
            if handle is not None:
                return found, None, None, None, None, object()
            idx = torch.stack(ids) if ids else topk_idx[:0]
            weight = torch.stack(weights) if weights else topk_weights[:0]
            mine = (is_token_in_rank, topk_idx, topk_weights)
            return found, idx, weight, [0] * each, (source, mine, len(values)), object()

        def combine(self, x: torch.Tensor, handle: Any) -> tuple[Any, ...]:
            world.log[self.rank].append("combine")
            source, _, tokens = handle
            assert x.dtype == torch.bfloat16
            assert len(x) == len(source)
            total = torch.zeros(tokens, x.shape[1])
            for theirs, their_source in world.share(self.rank, (x, source)):
                for row, (rank, token) in zip(theirs, their_source, strict=True):
                    if rank == self.rank:
                        total[token] += row.float()
            return total.to(torch.bfloat16), None, object()

        def low_latency_dispatch(
            self, x: torch.Tensor, topk_idx: torch.Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int,
            cumulative_local_expert_recv_stats: Any = None, dispatch_wait_recv_cost_stats: Any = None, use_fp8: bool = True,
            round_scale: bool = False, use_ue8m0: bool = False, async_finish: bool = False, return_recv_hook: bool = False,
        ) -> tuple[Any, ...]:  # fmt: skip
            assert self.low
            assert return_recv_hook
            assert len(x) <= num_max_dispatch_tokens_per_rank
            from commbench.backends.quantise import quantise

            each, room = num_experts // RANKS, num_max_dispatch_tokens_per_rank * RANKS
            hidden = x.shape[1]
            values = torch.full((each, room, hidden), float("nan")).to(
                torch.float8_e4m3fn if use_fp8 else torch.bfloat16
            )
            # By columns in the last two dimensions.
            scales = torch.full((each, hidden // 128, room), float("nan")).transpose(1, 2)
            counts = torch.zeros(each, dtype=torch.int32)
            info: list[list[tuple[int, int]]] = [[] for _ in range(each)]
            world.log[self.rank].append("send")
            every = world.share(self.rank, (x.clone(), topk_idx.clone()))

            def hook() -> None:
                world.log[self.rank].append("recv")
                for rank, (theirs, idx) in enumerate(every):
                    small, by_row = quantise(theirs)
                    for token, row in enumerate(idx.tolist()):
                        for expert in row:
                            if expert >= 0 and expert // each == self.rank:
                                local = expert % each
                                at = len(info[local])
                                values[local, at] = small[token] if use_fp8 else theirs[token]
                                scales[local, at] = by_row[token]
                                counts[local] += 1
                                info[local].append((rank, token))

            came = (values, scales) if use_fp8 else values
            return came, counts, (info, num_max_dispatch_tokens_per_rank), object(), hook

        def low_latency_combine(
            self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: Any, use_logfmt: bool = False,
            zero_copy: bool = False, async_finish: bool = False, return_recv_hook: bool = False, out: Any = None,
        ) -> tuple[Any, ...]:  # fmt: skip
            assert x.dim() == 3
            assert return_recv_hook
            world.log[self.rank].append("send back")
            every = world.share(self.rank, (x, handle[0]))
            total = torch.zeros(len(topk_idx), x.shape[2], dtype=torch.bfloat16)
            each = x.shape[0]

            def hook() -> None:
                sums = torch.zeros(total.shape)
                for rank, (theirs, info) in enumerate(every):
                    for local, rows in enumerate(info):
                        for at, (source, token) in enumerate(rows):
                            if source == self.rank:
                                (k,) = torch.nonzero(topk_idx[token] == rank * each + local)[0]
                                sums[token] += theirs[local, at].float() * topk_weights[token, k]
                total.copy_(sums)

            return total, object(), hook

    class ElasticBuffer:
        def __init__(
            self, group: Any, num_bytes: Any = None, num_cpu_bytes: int = 0, num_max_tokens_per_rank: int = 0, hidden: int = 0,
            num_topk: int = 0, use_fp8_dispatch: bool = False, explicitly_destroy: bool = False,
        ) -> None:  # fmt: skip
            self.rank, self.most, self.fp8 = group.rank(), num_max_tokens_per_rank, use_fp8_dispatch
            assert (hidden, num_topk) == (WORKLOAD.hidden, WORKLOAD.topk)
            assert explicitly_destroy
            world.log[self.rank].append("elastic buffer")

        def destroy(self) -> None:
            world.log[self.rank].append("destroy")

        def dispatch(
            self, x: Any, topk_idx: Any = None, topk_weights: Any = None, cumulative_local_expert_recv_stats: Any = None,
            num_experts: Any = None, num_max_tokens_per_rank: Any = None, expert_alignment: Any = None, num_sms: int = 0,
            num_qps: int = 0, handle: Any = None, do_cpu_sync: Any = None,
        ) -> tuple[Any, ...]:  # fmt: skip
            world.log[self.rank].append("dispatch" if handle is None else "dispatch again")
            assert isinstance(x, tuple) == self.fp8
            # It asks itself for its number of SMs, which wants the experts, cached or not.
            assert num_experts % RANKS == 0
            if handle is not None:
                assert topk_idx is None
                assert not do_cpu_sync
                topk_idx, topk_weights = handle.topk_idx, handle.topk_weights
            values, scales = x if self.fp8 else (x, None)
            each, rows, small, ids, weights, source = num_experts // RANKS, [], [], [], [], []
            for rank, (theirs, their_scales, idx, weight) in enumerate(
                world.share(self.rank, (values, scales, topk_idx, topk_weights))
            ):
                for token in range(len(theirs)):
                    mine = (idx[token] >= 0) & (idx[token] // each == self.rank)
                    if mine.any():
                        rows.append(theirs[token])
                        small.append(None if their_scales is None else their_scales[token])
                        ids.append(torch.where(mine, idx[token] - self.rank * each * LOCAL_IDS, -1))
                        weights.append(torch.where(mine, weight[token], 0.0))
                        source.append(rank * self.most + token)
            found = torch.stack(rows) if rows else values[:0]
            if self.fp8:
                found = (found, torch.stack(small) if small else scales[:0])
            metadata = torch.tensor(source, dtype=torch.int32).reshape(-1, 1)
            made = handle or SimpleNamespace(
                topk_idx=topk_idx, topk_weights=topk_weights, recv_src_metadata=metadata, tokens=len(values)
            )
            if handle is not None:
                return found, None, None, made, object()
            idx = torch.stack(ids) if ids else topk_idx[:0]
            return found, idx, torch.stack(weights) if weights else topk_weights[:0], made, object()

        def combine(self, x: torch.Tensor, handle: Any) -> tuple[Any, ...]:
            world.log[self.rank].append("combine")
            total = torch.zeros(handle.tokens, x.shape[1])
            for theirs, source in world.share(self.rank, (x, handle.recv_src_metadata[:, 0].tolist())):
                for row, at in zip(theirs, source, strict=True):
                    if at // self.most == self.rank:
                        total[at % self.most] += row.float()
            return total.to(torch.bfloat16), None, object()

    kinds = {"Buffer": Buffer} | ({"ElasticBuffer": ElasticBuffer} if elastic else {})
    return SimpleNamespace(__version__="2.0" if elastic else "1.2.1", **kinds)


class Group:
    def __init__(self, rank: int, size: int = RANKS) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def on_all(act: Callable[[int, DeepEpLibrary, World], Any], *, elastic: bool = False) -> tuple[list[Any], World]:
    world = World()
    module = double(world, elastic=elastic)

    def one(rank: int) -> Any:
        try:
            return act(rank, DeepEpLibrary(module, Group(rank), torch.device("cpu")), world)
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


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("collective", ["moe_dispatch", "moe_combine"])
@pytest.mark.parametrize(
    "changes", [{}, {"counts": "known"}, {"mode": "low_latency"}, {"uneven_tokens": True}, {"experts_on": "eplb:4"}]
)
def test_what_it_gives_passes_the_check(changes: dict[str, Any], collective: str, dtype: str, elastic: bool) -> None:
    workload = replace(WORKLOAD, **changes)
    router = Router(workload, RANKS, (0,) * RANKS, 3)
    where = place(workload, RANKS, (0,) * RANKS, router.expected_load())

    def act(rank: int, library: DeepEpLibrary, world: World) -> tuple[int, int]:
        exchange = library.make(workload, dtype, where, rank, workload.tokens)
        setup = Setup(router=router, where=where, rank=rank, device=torch.device("cpu"))
        operation = OPERATIONS[collective](setup=setup, exchange=exchange).operation()
        data = Numbers()
        data.fill(operation.input, 5)
        operation.upload()
        world.log[rank].clear()
        operation.run()
        assert operation.phases is not None
        names = exchange.dispatch_phases if collective == "moe_dispatch" else exchange.combine_phases
        assert len(operation.phases()) == len(names)
        operation.download()
        return data.wrong(operation.output, 5), len(world.log[rank])

    found, world = on_all(act, elastic=elastic)
    assert [wrong for wrong, _ in found] == [0] * RANKS
    calls = {
        ("moe_dispatch", "throughput", "exchanged"): ["dispatch"] if elastic else ["layout", "dispatch"],
        ("moe_dispatch", "throughput", "known"): ["dispatch again"],
        ("moe_dispatch", "low_latency", "exchanged"): ["send", "recv"],
        ("moe_combine", "low_latency", "exchanged"): ["send back"],
    }
    wanted = calls.get((collective, workload.mode, workload.counts), ["combine"])
    assert world.log[0] == wanted


def test_the_older_buffer_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    module = double(World(), elastic=True)
    assert DeepEpLibrary(module, Group(0), torch.device("cpu")).settings()["high_throughput"] == "ElasticBuffer"
    monkeypatch.setenv("COMMBENCH_DEEPEP", "legacy")
    assert DeepEpLibrary(module, Group(0), torch.device("cpu")).settings()["high_throughput"] == "Buffer"


@pytest.mark.parametrize("numbering", [0, 1])
def test_experts_of_the_elastic_buffer_however_they_are_numbered(
    numbering: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "LOCAL_IDS", numbering)
    router = Router(WORKLOAD, RANKS, (0,) * RANKS, 3)
    where = place(WORKLOAD, RANKS, (0,) * RANKS, None)

    def act(rank: int, library: DeepEpLibrary, world: World) -> int:
        exchange = library.make(WORKLOAD, "bfloat16", where, rank, WORKLOAD.tokens)
        setup = Setup(router=router, where=where, rank=rank, device=torch.device("cpu"))
        operation = OPERATIONS["moe_dispatch"](setup=setup, exchange=exchange).operation()
        data = Numbers()
        data.fill(operation.input, 5)
        operation.upload()
        operation.run()
        operation.download()
        return data.wrong(operation.output, 5)

    assert on_all(act, elastic=True)[0] == [0] * RANKS


def test_one_buffer_serves_a_shape_and_is_destroyed_for_the_next() -> None:
    where = place(WORKLOAD, RANKS, (0,) * RANKS, None)
    low = replace(WORKLOAD, mode="low_latency")

    def act(rank: int, library: DeepEpLibrary, world: World) -> None:
        for one in (WORKLOAD, WORKLOAD, low, low):
            library.make(one, "bfloat16", where, rank, 11)
        library.close()
        library.close()

    _, world = on_all(act)
    assert world.log[0] == ["buffer", "destroy", "buffer", "destroy"]


def test_what_it_cannot_do_is_said() -> None:
    module = double(World())
    three = DeepEpLibrary(module, Group(0, 3), torch.device("cpu"))
    four = DeepEpLibrary(module, Group(0), torch.device("cpu"))
    assert "no configuration for 3 ranks" in str(three.why_not(WORKLOAD, "bfloat16", "library"))
    assert "multiples of 128 values, not 200" in str(four.why_not(replace(WORKLOAD, hidden=200), "bfloat16", "library"))
    low = replace(WORKLOAD, mode="low_latency", tokens=512)
    assert "511 tokens a rank at most, not 512" in str(four.why_not(low, "bfloat16", "library"))
    assert four.why_not(replace(low, tokens=511), "bfloat16", "library") is None
    assert four.why_not(WORKLOAD, "bfloat16", "library") is None
    assert (four.most_sets(low), four.most_sets(WORKLOAD)) == (1, None)
    uneven = replace(WORKLOAD, experts=9, uneven_experts=True)
    with pytest.raises(RuntimeError, match="as many experts on every rank: 9 slots on 4 ranks are not"):
        four.make(uneven, "bfloat16", place(uneven, RANKS, (0,) * RANKS, None), 0, 11)


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is None, reason="deep_ep is not installed")
def test_signatures_of_the_installed_library() -> None:
    import deep_ep

    for name, wanted in SIGNATURES.items():
        known = list(inspect.signature(getattr(deep_ep.Buffer, name)).parameters)
        assert set(wanted) <= set(known), name


def test_the_double_has_the_signatures_that_were_read() -> None:
    buffer = double(World()).Buffer
    for name, wanted in SIGNATURES.items():
        known = list(inspect.signature(getattr(buffer, name)).parameters)
        assert set(wanted) <= set(known), name
