"""Dispatch and combine of all three kinds against references that know nothing of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commbench.backends.experts import Batch
from commbench.cases import Layout
from commbench.moe.exchange import make_exchange
from commbench.moe.placement import choose_slots, place
from commbench.moe.routing import Router
from commbench.workloads import Workload

from .conftest import routed_case

ONE_HOST = Layout(hosts=("a",) * 4)
TWO_BY_TWO = Layout(hosts=("a", "a", "b", "b"))
BASE = Workload(tokens=13, hidden=256, experts=8, topk=3)
KINDS = {
    "flat": ("own:flat", "throughput"),
    "hierarchical": ("own:hierarchical", "throughput"),
    "low_latency": ("own:flat", "low_latency"),
}


def tokens_of(rank: int, tokens: int, hidden: int) -> torch.Tensor:
    """Whole numbers from -8 to 7, exact in bfloat16 and, in blocks whose largest is 7 or 8, in FP8 too."""
    found = torch.randint(-7, 8, (tokens, hidden), generator=torch.Generator().manual_seed(rank), dtype=torch.int64)
    found[:, ::128] = 7
    return found.to(torch.bfloat16)


def exchange_all(
    as_threads: Callable[..., list[Any]], workload: Workload, layout: Layout, kind: str, dtype: str = "bfloat16",
    selections: Callable[[int], tuple[np.ndarray, np.ndarray]] | None = None, rounds: int = 1,
) -> tuple[list[Any], Any, list[np.ndarray]]:  # fmt: skip
    """What every rank got, where experts are, and every rank's slots; experts multiply by their number plus one."""
    algorithm, mode = KINDS[kind]
    workload = replace(workload, mode=mode)
    router = Router(workload, layout.world, layout.host_of, 7)
    where = place(workload, layout.world, layout.host_of, None)
    chosen = selections or (lambda rank: router.selections(rank, 0))
    slots = [choose_slots(where, chosen(rank)[0], rank) for rank in range(layout.world)]
    most = max(len(one) for one in slots)

    def act(rank: int, backend: Any) -> dict[str, Any]:
        case = routed_case(workload, layout.world, algorithm=algorithm, dtype=dtype)
        exchange = make_exchange(case, where, layout, rank, most, backend)
        batch = Batch(
            tokens=tokens_of(rank, len(slots[rank]), workload.hidden), slots=torch.from_numpy(slots[rank].copy()),
            weights=torch.from_numpy(chosen(rank)[1].copy()),
        )  # fmt: skip
        known = exchange.learn(batch)
        for _ in range(rounds):
            received = exchange.dispatch(batch, known)
            found = {
                "phases": exchange.phases_ns(), "sent": exchange.sent_bytes(), "exchange": exchange,
                "received": received,
            }  # fmt: skip
            rows = received.rows.float()
            if received.scales is not None:
                rows = (rows.view(len(rows), rows.shape[1] // 128, 128) * received.scales[:, :, None]).view(rows.shape)
            found["rows"] = rows.clone()
            out = torch.full(rows.shape, float("nan"), dtype=torch.bfloat16)  # what lies between is not read
            for local, slot in enumerate(where.slots_of(rank)):
                begin, count = int(received.begins[local]), int(received.counts[local])
                out[begin : begin + count] = rows[begin : begin + count] * (where.expert_of[slot] + 1)
            found["sums"] = exchange.combine(out, received)
            found["combine_sent"] = exchange.sent_bytes()
        return found

    return as_threads(layout, act), where, slots


def naive_rows(where: Any, slots: list[np.ndarray], rank: int) -> dict[int, list[tuple[int, int]]]:
    """By local slot, who sends which token to it."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for source, one in enumerate(slots):
        for token in range(len(one)):
            for slot in one[token]:
                if slot >= 0 and where.rank_of[slot] == rank:
                    found[int(slot)].append((source, token))
    return found


def check(found: list[Any], where: Any, slots: list[np.ndarray], weights: list[np.ndarray], hidden: int) -> None:
    for rank, mine in enumerate(found):
        received = mine["received"]
        wanted = naive_rows(where, slots, rank)
        for local, slot in enumerate(where.slots_of(rank)):
            begin, count = int(received.begins[local]), int(received.counts[local])
            got = list(
                zip(
                    received.source_rank[begin : begin + count].tolist(),
                    received.source_token[begin : begin + count].tolist(), strict=True,
                )
            )  # fmt: skip
            assert sorted(got) == sorted(wanted[slot]), (rank, slot)
            for row, (source, token) in zip(mine["rows"][begin : begin + count], got, strict=True):
                assert torch.equal(row, tokens_of(source, len(slots[source]), hidden)[token].float())
        exact = np.zeros((len(slots[rank]), hidden))
        sent = tokens_of(rank, len(slots[rank]), hidden).double().numpy()
        for token, row in enumerate(slots[rank]):
            for k, slot in enumerate(row):
                if slot >= 0:
                    exact[token] += float(weights[rank][token, k]) * (where.expert_of[slot] + 1) * sent[token]
        np.testing.assert_allclose(mine["sums"].double().numpy(), exact, rtol=2**-6, atol=1e-30)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [ONE_HOST, TWO_BY_TWO, Layout(hosts=("a", "b", "a", "b"))])
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"masked": 0.3}, {"uneven_tokens": True}, {"experts": 10, "uneven_experts": True}, {"experts_on": "round_robin"},
        {"experts_on": "eplb:4"}, {"counts": "known"}, {"tokens": 1}, {"topk": 1}, {"topk": 8}, {"masked": 0.99},
        {"routing": "hotspot:2", "topk": 2},
    ],
)  # fmt: skip
def test_every_token_reaches_its_experts_and_its_sum_comes_back(
    as_threads: Callable[..., list[Any]], changes: dict[str, Any], layout: Layout, kind: str, dtype: str
) -> None:
    workload = replace(BASE, **changes)
    router = Router(replace(workload, mode=KINDS[kind][1]), 4, layout.host_of, 7)
    found, where, slots = exchange_all(as_threads, workload, layout, kind, dtype)
    check(found, where, slots, [router.selections(rank, 0)[1] for rank in range(4)], workload.hidden)


def test_all_on_one_rank_and_ranks_that_send_nothing(as_threads: Callable[..., list[Any]]) -> None:
    # Experts 2 and 3 are rank 1's; ranks 2 and 3 have tokens whose selections are all masked.
    ids = [np.array([[2, 3]] * 5), np.array([[3, 2]] * 5), np.full((5, 2), -1), np.full((5, 2), -1)]
    weights = [np.full((5, 2), 0.5, dtype=np.float32) * (one >= 0) for one in ids]
    workload = replace(BASE, topk=2, tokens=5)
    for kind in KINDS:
        found, where, slots = exchange_all(
            as_threads, workload, TWO_BY_TWO, kind, selections=lambda rank: (ids[rank], weights[rank])
        )
        check(found, where, slots, weights, workload.hidden)
        assert [int(mine["received"].counts.sum()) for mine in found] == [0, 20, 0, 0]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_random_shapes(data: st.DataObject) -> None:
    hosts = data.draw(st.integers(1, 3))
    per_host = data.draw(st.integers(1, 3))
    if hosts * per_host < 2:
        per_host = 2
    layout = Layout(hosts=tuple(f"h{index // per_host}" for index in range(hosts * per_host)))
    experts = layout.world * data.draw(st.integers(1, 4))
    workload = Workload(
        tokens=data.draw(st.integers(1, 9)), hidden=128 * data.draw(st.integers(1, 2)), experts=experts,
        topk=data.draw(st.integers(1, min(experts, 5))), masked=data.draw(st.sampled_from((0.0, 0.4))),
        routing=data.draw(st.sampled_from(("uniform", "zipf:1.2", "ramp"))),
        uneven_tokens=data.draw(st.booleans()),
    )  # fmt: skip
    kind, dtype = data.draw(st.sampled_from(sorted(KINDS))), data.draw(st.sampled_from(("bfloat16", "float8_e4m3fn")))
    router = Router(replace(workload, mode=KINDS[kind][1]), layout.world, layout.host_of, 7)
    run = as_threads_function()
    found, where, slots = exchange_all(run, workload, layout, kind, dtype, rounds=2)
    check(found, where, slots, [router.selections(rank, 0)[1] for rank in range(layout.world)], workload.hidden)


def as_threads_function() -> Callable[..., list[Any]]:
    from .conftest import as_threads

    return as_threads.__wrapped__()  # type: ignore[no-any-return, attr-defined]
