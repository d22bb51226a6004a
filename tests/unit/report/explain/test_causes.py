"""Each cause put into a run whose links are known is named, with its size; its near misses are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from commbench.models import Link, Links
from commbench.records import Point

USUAL = 4e-8
SLOW = 1.6e-7
QUARTER = ((USUAL, USUAL), (USUAL, USUAL), (SLOW, SLOW), (USUAL, USUAL))
EIGHT = tuple(f"n{rank // 2}" for rank in range(8))


def kinds(diagnoses: Any) -> list[list[str]]:
    return [[finding.kind for finding in diagnosis.findings] for diagnosis in diagnoses]


def test_a_sound_run_has_no_cause(lab: Any) -> None:
    assert lab.verdict() == "none: as fast as its models say"
    assert kinds(lab.diagnoses()) == [[], []]


# -- slow hosts ----------------------------------------------------------------------------------------


def test_a_host_that_was_slow_from_the_start_is_named_with_its_rate(lab: Any, links: Links) -> None:
    slow = replace(links, host_rates=QUARTER)
    said = lab.verdict(links=slow, rates_after=QUARTER)
    assert said.startswith("slow host n2 (high): n2 0.0063 GB/s out and 0.0063 in; others 0.0250, measured before")
    for diagnosis in lab.diagnoses(links=slow, rates_after=QUARTER):
        (finding,) = diagnosis.findings
        assert finding.sizes[-1] == 4 << 20
        assert finding.factor == pytest.approx(4, rel=0.1)  # a ring goes at the pace of its slowest link


def test_a_host_that_became_slow_during_the_run_is_named(lab: Any, links: Links) -> None:
    said = lab.verdict(truth=replace(links, host_rates=QUARTER), rates_after=QUARTER)
    assert said.startswith("slow host n2 (high)")
    assert "measured after the sweep; before it, it was as fast as the others" in said


def test_only_the_curves_that_were_measured_after_it_became_slow_show_it(lab: Any) -> None:
    def late(point: Point) -> None:
        if point.collective == "all_gather" and point.bytes > 1 << 16:
            for name in ("time_s", "time_lo_s", "time_hi_s", "time_min_s", "time_p25_s", "time_p75_s"):
                setattr(point, name, 4 * getattr(point, name))

    diagnoses = lab.diagnoses(change=late, rates_after=QUARTER)
    assert kinds(diagnoses) == [[], ["slow_host"]]
    assert lab.verdict(change=late, rates_after=QUARTER).startswith("slow host n2")


def test_a_host_that_became_slow_after_the_last_time_did_no_harm(lab: Any) -> None:
    assert lab.verdict(rates_after=QUARTER).startswith("none")


def test_rates_that_differ_by_less_than_half_are_no_slow_host(lab: Any, links: Links) -> None:
    rates = (*QUARTER[:2], (1.3 * USUAL, 1.4 * USUAL), QUARTER[3])
    assert lab.verdict(links=replace(links, host_rates=rates), rates_after=rates).startswith("none")


def test_one_direction_is_enough(lab: Any, links: Links) -> None:
    rates = (*QUARTER[:2], (USUAL, SLOW), QUARTER[3])
    assert lab.verdict(links=replace(links, host_rates=rates), rates_after=rates).startswith("slow host n2 (high)")


def test_two_slow_hosts_of_four_are_both_named(lab: Any, links: Links) -> None:
    rates = (QUARTER[2], *QUARTER[1:])
    assert lab.verdict(links=replace(links, host_rates=rates), rates_after=rates).startswith("slow hosts n0, n2")


def test_a_network_that_slowed_down_everywhere_is_no_slow_host(lab: Any, links: Links) -> None:
    after = ((2 * USUAL, 2 * USUAL),) * 4
    said = lab.verdict(truth=replace(links, host_rates=after), rates_after=after)
    assert said.startswith("network slower than when it was calibrated (medium): 0.0250 GB/s before the sweep, 0.0125")


# -- a NIC and its ranks ---------------------------------------------------------------------------------


def test_ranks_that_share_a_nic_are_counted(lab: Any, links: Links) -> None:
    shared = replace(links, nic_seconds_per_byte=USUAL, nic=((8, 1e-6), (1 << 20, USUAL * 2**20)))
    said = lab.verdict(hosts=EIGHT, links=shared)
    assert said.startswith("shared NIC (high): 2 ranks of a host reach 0.0250 GB/s together, one alone 0.0250")


def test_ranks_with_a_nic_each_are_fine(lab: Any, links: Links) -> None:
    own = replace(links, nic_seconds_per_byte=USUAL / 2, nic=((8, 1e-6), (1 << 20, USUAL / 2 * 2**20)))
    assert lab.verdict(hosts=EIGHT, links=own).startswith("none")


def test_a_hierarchical_algorithm_makes_the_best_of_a_shared_nic(lab: Any) -> None:
    made = {"hosts": EIGHT, "algorithm": "own:hierarchical", "choose": lambda case: "hierarchical"}
    assert lab.verdict(**made).startswith("none")


def test_small_messages_do_not_fill_a_nic(lab: Any) -> None:
    assert lab.verdict(hosts=EIGHT, sizes=(8, 64, 512)).startswith("none")


# -- processors ------------------------------------------------------------------------------------------


def slowed(most_bytes: int, factor: float) -> Any:
    def change(point: Point) -> None:
        if point.bytes <= most_bytes:
            for name in ("time_s", "time_lo_s", "time_hi_s", "time_min_s", "time_p25_s", "time_p75_s"):
                setattr(point, name, factor * getattr(point, name))

    return change


def test_others_on_the_processors_make_small_messages_slow(lab: Any) -> None:
    said = lab.verdict(change=slowed(8192, 8.0), others=0.6, busy=1.0, choose=lambda case: fastest(case))
    assert said.startswith("host-bound (high): other processes used 1.2 of 2 processors on n")
    assert "8.0 x what the links need" in said


def fastest(case: Any) -> str:
    return "recursive_doubling"


def test_others_that_were_there_during_calibration_too_show_in_the_spread(lab: Any) -> None:
    def unsteady(point: Point) -> None:
        assert point.time_s
        point.time_p25_s, point.time_p75_s = 0.6 * point.time_s, 1.8 * point.time_s

    said = lab.verdict(change=unsteady, others=0.4, busy=1.0)
    assert said.startswith("host-bound (medium)")
    assert said.endswith("times vary up to 3.0-fold between quartiles")


@pytest.mark.parametrize(("others", "busy"), [(0.2, 1.0), (0.4, 0.7)])
def test_processors_that_are_shared_out_well_harm_nobody(lab: Any, others: float, busy: float) -> None:
    assert lab.verdict(others=others, busy=busy).startswith("none")


def test_stolen_time_is_the_hypervisors(lab: Any) -> None:
    said = lab.verdict(change=slowed(8192, 8.0), stolen=0.2, choose=fastest)
    assert said.startswith("host-bound (high): the hypervisor gave 20% of n")


def test_more_ranks_than_processors(lab: Any) -> None:
    def change(point: Point) -> None:
        slowed(8192, 6.0)(point)
        point.oversubscribed = True

    assert lab.verdict(change=change, choose=fastest).startswith("host-bound (medium): more ranks than processors")


def test_more_ranks_than_processors_that_are_as_fast_as_can_be_are_sound(lab: Any) -> None:
    assert lab.verdict(change=lambda point: setattr(point, "oversubscribed", True)).startswith("none")


def test_slow_small_messages_alone_are_told_but_are_not_the_runs_cause(lab: Any) -> None:
    diagnoses = lab.diagnoses(change=slowed(8192, 40.0))
    assert [[f.level for f in d.findings if f.kind == "host_bound"] for d in diagnoses] == [["low"], ["low"]]


def test_a_few_microseconds_are_below_what_can_be_told(lab: Any) -> None:
    def slower(point: Point) -> None:
        for name in ("time_s", "time_lo_s", "time_hi_s", "time_min_s", "time_p25_s", "time_p75_s"):
            setattr(point, name, getattr(point, name) + 4e-6)

    said = lab.verdict(hosts=("n0", "n0"), sizes=(8, 64, 512), change=slower, others=0.6, busy=1.0)
    assert "x what the links need" not in said


# -- settings --------------------------------------------------------------------------------------------

TCP_INSIDE = Link(latency_s=12e-6, seconds_per_byte=4e-10)
NO_SHARED = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,tcp"}


def test_tcp_inside_a_host_is_named_with_the_setting(lab: Any, links: Links) -> None:
    made = {"hosts": ("n0", "n0"), "links": replace(links, same_host=TCP_INSIDE, other_host=None)}
    said = lab.verdict(**made, environment=NO_SHARED)
    assert said.startswith("TCP instead of shared memory (high): OMPI_MCA_btl=self,tcp; 12.0 us and 2.50 GB/s")
    assert lab.verdict(**made).startswith("none")


def test_the_setting_alone_is_no_cause(lab: Any, links: Links) -> None:
    one_host = replace(links, other_host=None)
    assert lab.verdict(hosts=("n0", "n0"), links=one_host, environment=NO_SHARED).startswith("none")


def port(gigabits: float, state: str = "ACTIVE") -> dict[str, Any]:
    return {"mlx5_0": {"ports": {"1": {"state": state, "rate_bps": gigabits * 1e9}}}}


ETHERNET = Link(latency_s=20e-6, seconds_per_byte=8 / 20e9)  # 20 Gbit/s


@pytest.mark.parametrize(
    ("environment", "gigabits", "state", "expected"),
    [
        (
            {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp"},
            200,
            "ACTIVE",
            "TCP instead of RDMA (high): 20 Gbit/s",
        ),
        ({"UCX_TLS": "tcp,sm"}, 200, "ACTIVE", "TCP instead of RDMA (high)"),
        ({}, 400, "ACTIVE", "TCP instead of RDMA (medium): 20 Gbit/s between hosts, where port mlx5_0/1 has 400"),
        ({}, 25, "ACTIVE", "none"),
        ({"UCX_TLS": "tcp,sm"}, 200, "DOWN", "none"),
        ({"UCX_TLS": "tcp,sm"}, 25, "ACTIVE", "none"),
    ],
)
def test_tcp_between_hosts_beside_a_fast_port(
    lab: Any, links: Links, environment: dict[str, str], gigabits: float, state: str, expected: str
) -> None:
    said = lab.verdict(
        links=replace(links, other_host=ETHERNET), environment=environment, infiniband=port(gigabits, state)
    )
    assert said.startswith(expected)


def test_gloo_has_nothing_but_tcp(lab: Any, links: Links) -> None:
    made = {"links": replace(links, other_host=ETHERNET), "infiniband": port(400)}
    assert lab.verdict(backend="gloo", **made).startswith("none")


TUNED = "OMPI_MCA_coll_tuned_"


def test_a_forced_algorithm_is_named_where_a_better_one_was_there(lab: Any) -> None:
    environment = {f"{TUNED}use_dynamic_rules": "1", f"{TUNED}allreduce_algorithm": "basic_linear"}
    made = {
        "environment": environment,
        "choose": lambda case: "ring" if case.collective == "all_gather" else "binomial_tree",
    }
    assert kinds(lab.diagnoses(**made)) == [["algorithm_forced"], []]
    assert lab.verdict(**made).startswith(f"algorithm forced (high): {TUNED}allreduce_algorithm=basic_linear")
    assert lab.verdict(**(made | {"environment": {}})).startswith("none")


def test_a_forced_algorithm_that_is_the_best_is_no_cause(lab: Any) -> None:
    environment = {f"{TUNED}use_dynamic_rules": "1", f"{TUNED}allreduce_algorithm": "ring"}
    assert lab.verdict(environment=environment, sizes=(1 << 18, 1 << 20, 1 << 22)).startswith("none")


def test_a_case_that_asks_for_an_algorithm_is_judged_by_that(lab: Any) -> None:
    environment = {f"{TUNED}use_dynamic_rules": "1", f"{TUNED}allreduce_algorithm": "binomial_tree"}
    said = lab.verdict(
        algorithm="own:binomial_tree", collectives=("all_reduce",), choose=lambda case: "binomial_tree",
        environment=environment,
    )  # fmt: skip
    assert said.startswith("none")


def test_a_forced_protocol_halves_the_rate(lab: Any) -> None:
    def halved(point: Point) -> None:
        if point.bytes > 1 << 17:
            slowed(1 << 30, 2.0)(point)

    said = lab.verdict(backend="nccl", change=halved, environment={"NCCL_PROTO": "LL"})
    assert said.startswith("protocol forced (high): NCCL_PROTO=LL")


# -- the rest --------------------------------------------------------------------------------------------


def both_ways(factor: float) -> Link:
    table = tuple((float(size), 40e-6 + size * USUAL) for size in (8, 1 << 16, 1 << 20))
    slow = tuple((size, 40e-6 + factor * (seconds - 40e-6)) for size, seconds in table)
    return Link(latency_s=40e-6, seconds_per_byte=USUAL, table=table, exchange=slow, shift=slow)


@pytest.mark.parametrize(("factor", "expected"), [(2.0, "half duplex link (medium)"), (1.7, "none"), (1.4, "none")])
def test_half_duplex(lab: Any, links: Links, factor: float, expected: str) -> None:
    assert lab.verdict(links=replace(links, other_host=both_ways(factor))).startswith(expected)


def test_a_pair_at_half_rate_whose_neighbours_are_not_is_no_half_duplex(lab: Any, links: Links) -> None:
    link = replace(both_ways(2.0), shift=both_ways(1.05).shift)
    assert lab.verdict(links=replace(links, other_host=link)).startswith("none")


def twice_the_bytes(point: Point) -> None:
    if point.collective == "reduce_scatter":
        assert point.wire_bytes
        point.wire_bytes *= 2
        slowed(1 << 30, 2.0)(point)


def test_wasted_bytes_are_told_of_the_curve(lab: Any) -> None:
    made: dict[str, Any] = {"collectives": ("all_reduce", "reduce_scatter", "all_gather"), "change": twice_the_bytes}
    assert kinds(lab.diagnoses(**made)) == [[], ["moves_more_bytes"], []]
    assert lab.verdict(**made) == "none: what single curves show does not hold for the run"
    alone = lab.verdict(**(made | {"collectives": ("reduce_scatter",)}))
    assert alone.startswith("library moves more bytes than the operation needs (high): 2.04 times")


def test_times_that_come_in_two_heights(lab: Any) -> None:
    def bimodal(point: Point) -> None:
        assert point.time_s
        point.time_p25_s, point.time_p75_s = point.time_s / 2, 1.2 * point.time_s

    said = lab.verdict(change=bimodal, busy=0.3)
    assert said.startswith("unsteady times (medium): third quartile over the first: up to 2.4")
    large = {"sizes": (1 << 20, 1 << 22, 1 << 24), "collectives": ("all_reduce",)}
    assert lab.verdict(change=bimodal, busy=0.8, **large).startswith("unsteady times")
    # On processors that are in use, less than a few time slices says nothing.
    assert lab.verdict(change=bimodal, busy=0.8).startswith("none")


def test_launches_that_differ(lab: Any) -> None:
    factors: Iterator[float] = iter([1.0] * 14 + [3.0] * 14)

    def change(point: Point) -> None:
        slowed(1 << 30, next(factors))(point)

    said = lab.verdict(change=change, launches=2, busy=0.3)
    assert said.startswith("unsteady times (medium): slowest over the fastest launch or pass: up to 3.0, at 7 sizes")


def test_what_nothing_explains_is_said_to_be_so(lab: Any) -> None:
    said = lab.verdict(change=slowed(1 << 30, 12.0), collectives=("all_gather",), choose=lambda case: "ring")
    assert said.startswith("unexplained: slower than every model (low)")


def test_one_odd_size_is_an_accident(lab: Any) -> None:
    def odd(point: Point) -> None:
        if point.bytes == 1 << 18:
            slowed(1 << 30, 12.0)(point)

    assert lab.verdict(change=odd).startswith("none")


def test_an_interval_that_reaches_down_to_the_model_is_no_slowness(lab: Any) -> None:
    def vague(point: Point) -> None:
        sound = point.time_lo_s
        slowed(1 << 30, 12.0)(point)
        point.time_lo_s = sound

    assert lab.verdict(change=vague).startswith("none")
