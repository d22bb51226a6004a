"""Bytes, loads and the busiest rank of iterations, against loops over tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from commbench.moe.account import account, seen
from commbench.moe.placement import choose_slots, place
from commbench.moe.routing import Router
from commbench.moe.wire import record_bytes
from commbench.workloads import Workload

from .conftest import routed_case

HOSTS = (0, 0, 1, 1)
WORKLOAD = Workload(tokens=12, hidden=256, experts=8, topk=3, routing="hotspot:1")


def told(collective: str = "moe_dispatch", workload: Workload = WORKLOAD, **changes: Any) -> Any:
    router = Router(workload, 4, HOSTS, 9)
    where = place(workload, 4, HOSTS, router.expected_load())
    case = routed_case(workload, 4, collective=collective, **changes)
    return account(case, router, where, (2, 5)), router, where


def copies(router: Router, where: Any, number: int) -> np.ndarray:
    """[source, target] tokens that go to each other rank, once to each."""
    found = np.zeros((4, 4))
    for source in range(4):
        for slots in choose_slots(where, router.selections(source, number)[0], source):
            for target in {where.rank_of[slot] for slot in slots if slot >= 0} - {source}:
                found[source, target] += 1
    return found


def test_bytes_of_a_dispatch_and_of_its_combine() -> None:
    for collective, size, counts in (("moe_dispatch", record_bytes(WORKLOAD, "bfloat16"), 8), ("moe_combine", 512, 0)):
        found, router, where = told(collective)
        sent = []
        for number in (2, 5):
            matrix = copies(router, where, number) * size + counts * (1 - np.eye(4))
            sent.append(matrix if collective == "moe_dispatch" else matrix.T)
        np.testing.assert_array_equal(found.matrices, np.stack(sent))
        assert found.mean_bytes == pytest.approx(np.mean([one.sum() / 4 for one in sent]))
        assert found.mean_bytes == pytest.approx(found.bytes["wire"])
        # A hotspot: rank 0 is handed three times what anybody sends in a dispatch, and sends it in a combine.
        busiest = [max(one.sum(axis=0).max(), one.sum(axis=1).max()) for one in sent]
        assert found.busiest_bytes == pytest.approx(np.mean(busiest))
        into = np.mean([one[:, 0].sum() if collective == "moe_dispatch" else one[0].sum() for one in sent])
        assert found.busiest_bytes == pytest.approx(into)
        across = np.mean([one[:2, 2:].sum() + one[2:, :2].sum() for one in sent])
        assert found.between_hosts(HOSTS) == pytest.approx(across)


def test_a_library_is_compared_with_the_flat_path() -> None:
    flat, _, _ = told()
    library, _, _ = told(algorithm="library")
    np.testing.assert_array_equal(flat.matrices, library.matrices)
    assert "wire" not in library.bytes


def test_loads_and_what_they_are_without_balance() -> None:
    found, router, where = told(workload=replace(WORKLOAD, experts_on="eplb:4"))
    rows = np.zeros((2, 4))
    plain = np.zeros((2, 4))
    for place_of, number in enumerate((2, 5)):
        for source in range(4):
            ids, _ = router.selections(source, number)
            for expert in ids.ravel():
                plain[place_of, expert // 2] += 1
            for slot in choose_slots(where, ids, source).ravel():
                rows[place_of, where.rank_of[slot]] += 1
    assert found.load["rank_tokens"] == rows.mean(axis=0).tolist()
    assert found.load["rank_max_over_mean"] == pytest.approx(np.mean(rows.max(axis=1) / rows.mean(axis=1)))
    assert found.load["rank_max_over_mean_before"] == pytest.approx(np.mean(plain.max(axis=1) / plain.mean(axis=1)))


def test_how_many_iterations_are_looked_at() -> None:
    numbers = np.arange(7, 107)
    few = seen(numbers, routed_case(WORKLOAD, 4))
    assert (len(few), few[0], few[-1]) == (16, 7, 106)
    assert seen(numbers[:3], routed_case(WORKLOAD, 4)) == (7, 8, 9)
    assert seen(numbers, routed_case(replace(WORKLOAD, fixed=True), 4)) == (7,)
    # 64 ranks x 4096 tokens x 8 are two million selections each time.
    big = replace(WORKLOAD, tokens=4096, topk=8)
    assert len(seen(numbers, routed_case(big, 64))) == 1
    assert len(seen(numbers, routed_case(big, 8))) == 15
