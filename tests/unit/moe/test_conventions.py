"""Bytes by convention against loops over sets, against published numbers, and against what the data path hands over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commbench.backends.experts import Batch, Place
from commbench.cases import Layout
from commbench.moe.conventions import CONVENTIONS, convention_bytes, default_convention, traffic
from commbench.moe.exchange import make_exchange
from commbench.moe.load import count, load_of
from commbench.moe.placement import choose_slots, place
from commbench.moe.routing import Router
from commbench.workloads import Workload

from .conftest import routed_case

DEEPSEEK = Workload(tokens=128, hidden=7168, experts=256, topk=8, mode="low_latency")
FP8 = "float8_e4m3fn"


def routed(workload: Workload, hosts: tuple[int, ...], iteration: int = 0) -> tuple[Place, list[np.ndarray]]:
    router = Router(workload, len(hosts), hosts, 11)
    where = place(workload, len(hosts), hosts, router.expected_load())
    return where, [choose_slots(where, router.selections(rank, iteration)[0], rank) for rank in range(len(hosts))]


def test_deepep_low_latency_gives_the_published_bandwidths() -> None:
    """DeepEP docs/legacy.md, EP8: dispatch in 77 us is printed as 98 GB/s, combine in 114 us as 127 GB/s."""
    where, slots = routed(DEEPSEEK, (0,) * 8)
    dispatch = convention_bytes(where, slots, DEEPSEEK, FP8, "moe_dispatch", "library")["deepep_low_latency"]
    combine = convention_bytes(where, slots, DEEPSEEK, FP8, "moe_combine", "library")["deepep_low_latency"]
    assert (dispatch == 128 * 8 * (7168 + 56 * 4 + 16)).all()
    assert (combine == 128 * 8 * 7168 * 2).all()
    assert round(float(dispatch[0]) / 77e-6 / 1e9, 1) == 98.5
    assert round(float(combine[0]) / 114e-6 / 1e9, 1) == 128.8


def test_deepep_internode_counts_the_own_host_and_what_leaves_it_less() -> None:
    """With tokens on all of 4 hosts, DeepEP's RDMA bytes are 4/3 of what crosses (DeepEP#51)."""
    workload = replace(DEEPSEEK, mode="throughput", tokens=512, routing="uniform", topk=64)
    where, slots = routed(workload, tuple(rank // 2 for rank in range(8)))
    found = convention_bytes(where, slots, workload, FP8, "moe_dispatch", "library")
    assert (found["deepep_internode_rdma"] == 512 * 4 * 7392).all()
    assert (found["ep_bench_rdma"] == 512 * 3 * 7392).all()


def naive(
    where: Place, slots: list[np.ndarray], workload: Workload, dtype: str, collective: str
) -> dict[str, list[float]]:
    """By sets, a token after the other."""
    ranks, hidden = len(where.host_of), workload.hidden
    fp8 = dtype == FP8 and collective == "moe_dispatch"
    token = hidden + hidden // 128 * 4 if fp8 else 2 * hidden
    found = {name: [0.0] * ranks for name in CONVENTIONS if not name.startswith("wire")}
    for rank in range(ranks):
        for row in slots[rank].tolist():
            chosen = [slot for slot in row if slot >= 0]
            to_ranks = {where.rank_of[slot] for slot in chosen}
            to_hosts = {where.host_of[goal] for goal in to_ranks}
            found["logical"][rank] += len(chosen) * token
            found["dedup_rank"][rank] += len(to_ranks) * token
            found["dedup_host"][rank] += len(to_hosts) * token
            found["deepep_internode_rdma"][rank] += len(to_hosts) * hidden * 2 * ((1 + 4 / 128) / 2 if fp8 else 1)
            found["deepep_low_latency"][rank] += len(chosen) * (hidden + hidden / 128 * 4 + 16 if fp8 else hidden * 2)
            found["ep_bench_rdma"][rank] += len(to_hosts - {where.host_of[rank]}) * token
            for goal in to_ranks:
                found["deepep_normal"][goal] += hidden * 2 * ((1 + 4 / 128) / 2 if fp8 else 1)
                if workload.mode == "throughput":
                    found["ep_bench"][goal] += token
            if workload.mode == "low_latency":
                found["ep_bench"][rank] += len(chosen) * token
    return found


SHAPES = st.fixed_dictionaries(
    {
        "tokens": st.integers(1, 12), "hidden": st.sampled_from([128, 256]), "topk": st.integers(1, 6),
        "masked": st.sampled_from([0.0, 0.3]), "uneven_tokens": st.booleans(),
        "routing": st.sampled_from(["uniform", "ramp", "zipf:1"]),
        "experts_on": st.sampled_from(["contiguous", "round_robin", "eplb:4"]),
        "mode": st.sampled_from(["throughput", "low_latency"]),
    }
)  # fmt: skip
HOSTS = st.sampled_from([(0, 0), (0, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0), (0, 0, 1, 1, 2, 2), (0, 1, 2, 2, 1, 0)])


@settings(max_examples=80, deadline=None)
@given(
    shape=SHAPES, hosts=HOSTS, dtype=st.sampled_from(["bfloat16", FP8]),
    collective=st.sampled_from(["moe_dispatch", "moe_combine"]),
)  # fmt: skip
def test_every_convention_counts_as_a_loop_over_sets_does(
    shape: dict[str, Any], hosts: tuple[int, ...], dtype: str, collective: str
) -> None:
    workload = Workload(experts=12, uneven_experts=True, **shape)
    where, slots = routed(workload, hosts)
    found = convention_bytes(where, slots, workload, dtype, collective, "library")
    wanted = naive(where, slots, workload, dtype, collective)
    assert set(found) == set(wanted)
    for name, values in wanted.items():
        assert found[name].tolist() == pytest.approx(values), name
    load = load_of(where, slots)
    if load["dedup_rank"] is not None:
        assert load["dedup_rank"] == pytest.approx(sum(wanted["logical"]) / sum(wanted["dedup_rank"]))
        assert load["dedup_host"] == pytest.approx(sum(wanted["logical"]) / sum(wanted["dedup_host"]))


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("own:flat", {}), ("own:flat", {"counts": "known"}), ("own:hierarchical", {}),
        ("own:hierarchical", {"counts": "known"}), ("own:flat", {"mode": "low_latency"}),
        ("own:hierarchical", {"masked": 0.5, "uneven_tokens": True}), ("own:flat", {"masked": 0.5, "uneven_tokens": True}),
        ("own:hierarchical", {"experts_on": "eplb:4", "routing": "zipf:1.2"}),
        ("own:flat", {"mode": "low_latency", "uneven_tokens": True}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", FP8])
@pytest.mark.parametrize("names", ["aabb", "abab", "aabbcc"])
def test_traffic_is_what_the_data_path_hands_over(
    as_threads: Callable[..., list[Any]], algorithm: str, changes: dict[str, Any], dtype: str, names: str
) -> None:
    workload = replace(Workload(tokens=9, hidden=256, experts=12, topk=3, uneven_experts=True), **changes)
    layout = Layout(hosts=tuple(names))
    where, slots = routed(workload, layout.host_of)
    most = max(len(one) for one in slots)

    def act(rank: int, backend: Any) -> tuple[np.ndarray, np.ndarray]:
        case = routed_case(workload, layout.world, algorithm=algorithm, dtype=dtype)
        exchange = make_exchange(case, where, layout, rank, most, backend)
        batch = Batch(
            tokens=torch.ones(len(slots[rank]), workload.hidden, dtype=torch.bfloat16),
            slots=torch.from_numpy(slots[rank].copy()), weights=torch.ones(slots[rank].shape),
        )  # fmt: skip
        received = exchange.dispatch(batch, exchange.learn(batch))
        dispatched = exchange.sent_bytes()
        rows = torch.zeros(received.rows.shape, dtype=torch.bfloat16)
        exchange.combine(rows, received)
        return dispatched, exchange.sent_bytes()

    handed = as_threads(layout, act)
    for at, collective in enumerate(("moe_dispatch", "moe_combine")):
        stages = traffic(where, slots, workload, dtype, collective, algorithm)
        assert len(stages) == (2 if algorithm == "own:hierarchical" else 1)
        sent = np.stack([found[at] for found in handed])
        assert stages.sum(axis=0).tolist() == sent.tolist()
        wire = convention_bytes(where, slots, workload, dtype, collective, algorithm)
        host = layout.host_of
        for rank in range(layout.world):
            others = [goal for goal in range(layout.world) if goal != rank]
            assert wire["wire"][rank] == sum(sent[rank, goal] for goal in others)
            assert wire["wire_host"][rank] == sum(sent[rank, goal] for goal in others if host[goal] != host[rank])


def test_hierarchical_crosses_hosts_along_rails_alone_and_then_stays_inside() -> None:
    workload = Workload(tokens=30, hidden=128, experts=16, topk=4)
    where, slots = routed(workload, (0, 0, 1, 1))
    rails, inside = traffic(where, slots, workload, "bfloat16", "moe_dispatch", "own:hierarchical")
    for source in range(4):
        for goal in range(4):
            assert (rails[source, goal] > 0) == (source % 2 == goal % 2)
            assert (inside[source, goal] > 0) == (source // 2 == goal // 2)
    back = traffic(where, slots, workload, "bfloat16", "moe_combine", "own:hierarchical")
    assert (back[0].sum(), back[1].sum()) != (back[1].sum(), back[0].sum())
    assert (np.argwhere(back[0]) == np.argwhere(inside)).all()


def test_every_convention_has_a_text_and_defaults_are_among_them() -> None:
    where, slots = routed(DEEPSEEK, (0,) * 8)
    assert list(convention_bytes(where, slots, DEEPSEEK, FP8, "moe_dispatch", "own:flat")) == list(CONVENTIONS)
    assert default_convention("low_latency", "deepep") == "deepep_low_latency"
    assert default_convention("throughput", "deepep") == "deepep_normal"
    assert default_convention("throughput", "mpi", hosts=2) == "deepep_internode_rdma"
    assert default_convention("low_latency", "nccl_ep") == "ep_bench"


def test_load_by_hand() -> None:
    # Two ranks with two experts each; three tokens of rank 0, two of rank 1.
    where = place(Workload(tokens=3, hidden=128, experts=4, topk=2), 2, (0, 1), None)
    slots = [np.array([[0, 1], [0, 2], [3, -1]]), np.array([[0, 3], [-1, -1]])]
    load = load_of(where, slots)
    assert load["rank_tokens"] == [4, 3]
    assert load["rank_max_over_mean"] == pytest.approx(4 / 3.5)
    assert load["rank_cv"] == pytest.approx(0.5 / 3.5)
    assert load["expert_max_over_mean"] == pytest.approx(3 / 1.75)  # 3, 1, 1 and 2 selections
    assert load["expert_cv"] == pytest.approx(np.std([3, 1, 1, 2]) / 1.75)
    # Seven selections in six copies: the first token has both experts on one rank.
    assert load["dedup_rank"] == pytest.approx(7 / 6)
    counts = count(where, slots)
    assert counts.selections.tolist() == [[2, 1, 1, 1], [1, 0, 0, 1]]
    assert counts.rank_copies.tolist() == [[2, 2], [1, 1]]


def test_load_of_nothing_is_none() -> None:
    where = place(Workload(tokens=1, hidden=128, experts=2, topk=1), 2, (0, 0), None)
    load = load_of(where, [np.full((1, 1), -1), np.full((1, 1), -1)])
    assert load["rank_tokens"] == [0, 0]
    assert [load[name] for name in load if name != "rank_tokens"] == [None] * 6
