"""Memory that a routed case needs, by hand, and what must make it grow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from commbench.moe.memory import Need, busiest_rows, need
from commbench.moe.placement import place
from commbench.moe.routing import Router
from commbench.workloads import Workload

from .conftest import routed_case

WORKLOAD = Workload(tokens=100, hidden=256, experts=8, topk=2)


def needed(workload: Workload = WORKLOAD, ranks: int = 4, **changes: Any) -> Need:
    router = Router(workload, ranks, (0,) * ranks, 1)
    where = place(workload, ranks, (0,) * ranks, router.expected_load())
    return need(routed_case(workload, ranks, **changes), router, where)


def test_a_dispatch_by_hand() -> None:
    # 4 ranks x 100 tokens x 2 selections over 4 ranks: 200 rows of 512 B each; 24 B a token of slots and weights.
    # At most 200 copies are sent and 200 come; a record has 4 x (2 + 2 x 2) = 24 B beside its 512.
    kept = 100 * (512 + 24) + 200 * 512
    act = 2 * (200 + 200) * 536 + 200 * 2 * 512
    check = 200 * (512 + 512 + 1024) + 100 * 512
    assert needed() == Need(kept, max(act, check))


def test_a_combine_by_hand() -> None:
    kept = 100 * (512 + 24) + 200 * 512 + (200 + 100) * 512
    exchange = 2 * (200 + 200) * 512 + (200 + 100) * 1024
    dispatch = 2 * (200 + 200) * 536 + 200 * 2 * 512
    assert needed(collective="moe_combine") == Need(kept, max(exchange, dispatch))


def test_low_latency_has_room_for_all_of_every_rank() -> None:
    low = needed(replace(WORKLOAD, mode="low_latency"))
    # 2 slots a rank x 4 ranks x 100 tokens.
    assert low.kept == 100 * (512 + 24) + 800 * 512
    assert low.work == 2 * (400 + 400) * 536 + 200 * 2 * 512


def test_the_rank_that_gets_most_counts() -> None:
    router = Router(replace(WORKLOAD, routing="imbalance:2.0"), 4, (0,) * 4, 1)
    where = place(router.workload, 4, (0,) * 4, None)
    assert busiest_rows(router, where) == pytest.approx(400)
    even, skewed = needed(), needed(replace(WORKLOAD, routing="imbalance:2.0"))
    assert skewed.kept - even.kept == 200 * 512
    assert skewed.work > even.work


def test_copies_share_what_an_expert_gets() -> None:
    workload = Workload(tokens=100, hidden=128, experts=4, topk=1, routing="hotspot:1", experts_on="eplb:4")
    router = Router(workload, 4, (0,) * 4, 1)
    where = place(workload, 4, (0,) * 4, router.expected_load())
    # Expert 0 gets 320 of 400 selections; with copies on all four ranks everyone has about a quarter.
    assert busiest_rows(router, where) < 120
