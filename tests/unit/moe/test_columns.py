"""What a routed point says beside: phases that add up, and ends of ranks whose clocks can or cannot be compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commbench.cases import Layout
from commbench.measure.loop import Measured
from commbench.measure.ranks import combine
from commbench.moe.account import account
from commbench.moe.columns import phases, rank_times, set_columns
from commbench.moe.placement import place
from commbench.moe.routing import Router
from commbench.records import Point
from commbench.stats.summary import summarise_times
from commbench.workloads import Workload

from .conftest import routed_case


def measured(stamps: list[list[tuple[int, int]]], start: str = "clock", **changes: Any) -> Measured:
    """``stamps[rank][iteration]``: (start, end) in ns."""
    array = np.array(stamps, dtype=np.int64)
    iterations = combine(array, (tuple(range(len(array))),), common_clock=start == "clock")
    count = array.shape[1]
    values: dict[str, Any] = {
        "summary": summarise_times(iterations.time), "iterations": iterations, "kept": np.ones(count, dtype=bool),
        "stamps": array, "batch": 1, "late_starts": False, "wrong": 0, "verified": 0, "stop": "", "start": start,
        "numbers": np.arange(count),
    }  # fmt: skip
    return Measured(**(values | changes))


def test_phases_are_those_of_the_last_rank_and_add_up() -> None:
    # Iterations of 100, 200 (rank 1 last), 300 and 9000 ns: the middle half is the second and third.
    stamps = [[(0, 100), (0, 150), (0, 300), (0, 9000)], [(0, 90), (0, 200), (0, 250), (0, 50)]]
    parts = np.array([[[60, 40], [7, 7], [100, 200], [1, 8999]], [[9, 9], [150, 50], [8, 8], [5, 5]]])
    found = phases(measured(stamps, phases=parts), ("send", "recv"))
    assert found == {"send": pytest.approx(125e-9), "recv": pytest.approx(125e-9), "total": pytest.approx(250e-9)}
    assert list(found) == ["send", "recv", "total"]


def test_dropped_iterations_and_those_that_nobody_asked_of_do_not_count() -> None:
    stamps = [[(0, 100), (0, 200), (0, 300)], [(0, 10), (0, 10), (0, 10)]]
    parts = np.array([[[-1, -1], [150, 50], [0, 300]], [[0, 0]] * 3])
    kept = np.array([True, True, False])
    assert phases(measured(stamps, phases=parts, kept=kept), ("a", "b")) == {
        "a": pytest.approx(150e-9), "b": pytest.approx(50e-9), "total": pytest.approx(200e-9)
    }  # fmt: skip
    assert phases(measured(stamps), ("a", "b")) == {}
    assert phases(measured(stamps, phases=np.full((2, 3, 2), -1)), ("a", "b")) == {}


def test_ends_count_from_the_first_start_of_all() -> None:
    found = rank_times(measured([[(10, 50)], [(20, 90)]]))
    np.testing.assert_allclose(found, [[40e-9], [80e-9]])


@pytest.mark.parametrize("start", ["barrier", "stream"])
def test_ranks_without_a_common_clock_count_from_their_own_start(start: str) -> None:
    # The second rank's clock is a second ahead.
    found = rank_times(measured([[(10, 50)], [(10**9, 10**9 + 70)]], start=start))
    np.testing.assert_allclose(found, [[40e-9], [70e-9]])


@pytest.mark.parametrize(
    ("changes", "convention"),
    [
        ({"nodes": 1}, "deepep_normal"), ({"nodes": 2}, "deepep_internode_rdma"),
        ({"nodes": 2, "backend": "nccl_ep", "algorithm": "library"}, "ep_bench"),
    ],
)  # fmt: skip
def test_a_bandwidth_is_of_the_convention_of_its_hosts_and_library(changes: dict[str, Any], convention: str) -> None:
    workload = Workload(tokens=12, hidden=256, experts=8, topk=3)
    layout = Layout(hosts=("a", "a", "b", "b") if changes["nodes"] == 2 else ("a",) * 4)
    router = Router(workload, 4, layout.host_of, 9)
    where = place(workload, 4, layout.host_of, None)
    case = routed_case(workload, 4, **changes)
    counted = account(case, router, where, (0,))
    found = measured([[(0, 100), (0, 200)]] * 3 + [[(0, 150), (0, 400)]], numbers=np.array([0, 1]))
    for status in ("ok", "wrong"):
        point = Point(
            collective="moe_dispatch", backend="", ranks=4, nodes=1, dtype="", reduce_op=None, placement="out", bytes=0,
            requested_bytes=0, timing="isolated", status=status, time_s=2e-6, wire_bytes=1.0,
        )  # fmt: skip
        set_columns(point, case, found, counted, layout, ())
        assert point.bytes_convention == convention
        assert point.rank_times == [pytest.approx(150e-9)] * 3 + [pytest.approx(275e-9)]
        assert (point.straggler["rank"], point.straggler["host"]) == (3, layout.hosts[3])
        if status == "wrong":
            assert (point.algbw_Bps, point.busbw_Bps) == (None, None)
        else:
            assert point.algbw_Bps == pytest.approx(counted.bytes[convention] / 2e-6)
            assert point.busbw_Bps == pytest.approx(counted.busiest_bytes / 2e-6)
        # What leaves hosts is known of commbench's own data path alone.
        assert point.schedule_bytes == (None if case.algorithm == "library" else counted.between_hosts(layout.host_of))
