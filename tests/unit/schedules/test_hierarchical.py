"""Hierarchical algorithms: they compute their collective, and each byte leaves a host as often as it must, no more."""

from __future__ import annotations

from fractions import Fraction

import pytest

from commbench.schedules import ALGORITHMS, HIERARCHICAL, ScheduleError, build, buildable, count, leaving
from commbench.schedules.simulation import Verdict, simulate

PAIRS = sorted(HIERARCHICAL)
# Hosts in order, ranks dealt out in turn, and neither.
LAYOUTS = [
    tuple(host for host in range(k) for _ in range(local)) for k in (2, 3, 4, 5) for local in (2, 3, 4)
] + [tuple(range(k)) * local for k in (2, 3) for local in (2, 4)] + [(7, 7, 2, 5, 2, 5), (1, 0, 0, 1, 0, 1, 1, 0)]  # fmt: skip


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
@pytest.mark.parametrize("hosts", LAYOUTS, ids=lambda hosts: "".join(map(str, hosts)))
def test_computes_and_counts(collective: str, algorithm: str, hosts: tuple[int, ...]) -> None:
    n, k = len(hosts), len(set(hosts))
    local = n // k
    for root in (0, n // 2, n - 1) if collective in ("broadcast", "reduce") else (0,):
        schedule = build(collective, algorithm, n, root, 1, hosts)
        assert simulate(schedule) == Verdict(correct=True)
        assert simulate(build(collective, algorithm, n, root, 3, hosts)) == Verdict(correct=True)
        # The tables of the literature: rounds, and the share of the message that leaves each host.
        rounds, share = {
            "all_reduce": (2 * (local - 1) + 2 * (k - 1), Fraction(2 * (k - 1), k)),
            "all_gather": (k - 1 + local - 1, Fraction(k - 1, k)),
            "reduce_scatter": (k - 1 + local - 1, Fraction(k - 1, k)),
            "all_to_all": (k - 1 + local - 1, Fraction(local * (n - local), n)),
            "broadcast": (k - 1 + local - 1, Fraction(1)),
            "reduce": (k - 1 + local - 1, Fraction(1)),
        }[collective]
        assert count(schedule).rounds == rounds
        out = leaving(schedule, hosts)
        if collective in ("broadcast", "reduce"):
            # A chain of hosts: all but one of them pass the message on. A reduction ends at the root's.
            assert sorted(out.values()) == [0] + [share] * (k - 1)
            assert collective == "broadcast" or out[hosts[root]] == 0
        else:
            assert out == dict.fromkeys(hosts, share)


def test_fewer_bytes_and_fewer_messages_between_hosts_than_flat() -> None:
    hosts = (0,) * 8 + (1,) * 8
    layered, flat = (leaving(build("all_reduce", name, 16, hosts=hosts), hosts)[0] for name in ("hierarchical", "ring"))
    assert layered / flat == Fraction(8, 15)  # ((k-1)/k) / ((n-1)/n)
    # Between hosts each rank sends one message where the direct exchange sends eight, with the same bytes in all.
    layered_a2a, direct = (build("all_to_all", name, 16, hosts=hosts) for name in ("hierarchical", "pairwise"))
    assert leaving(layered_a2a, hosts) == leaving(direct, hosts)
    assert count(layered_a2a).messages == 16 * (1 + 7)
    assert count(direct).messages == 16 * 15


@pytest.mark.parametrize(
    ("hosts", "reason"),
    [
        ((0, 0, 0, 0), "a hierarchical algorithm needs two hosts or more"),
        ((0, 1, 2, 3), "a hierarchical algorithm needs two ranks or more on each host"),
        ((0, 0, 0, 1, 1), "a hierarchical algorithm needs equal hosts, not 2 to 3 ranks"),
    ],
)
def test_layouts_without_a_hierarchy_are_refused(hosts: tuple[int, ...], reason: str) -> None:
    for collective, algorithm in PAIRS:
        assert buildable(collective, algorithm, hosts) == reason
        with pytest.raises(ScheduleError, match=reason):
            build(collective, algorithm, len(hosts), hosts=hosts)


def test_hosts_must_be_known() -> None:
    with pytest.raises(ScheduleError, match="hierarchical all_reduce needs the hosts of all 4 ranks"):
        build("all_reduce", "hierarchical", 4)
    with pytest.raises(ScheduleError, match="needs the hosts of all 4 ranks"):
        build("all_reduce", "hierarchical", 4, hosts=(0, 0, 1))


def test_the_others_do_not_care_about_hosts() -> None:
    for collective, known in ALGORITHMS.items():
        for algorithm in known:
            if (collective, algorithm) not in HIERARCHICAL:
                assert buildable(collective, algorithm, (0, 0, 0)) is None
                assert build(collective, algorithm, 3, hosts=(0, 0, 1)) is build(collective, algorithm, 3)


def test_what_hosts_are_called_does_not_count() -> None:
    assert build("all_reduce", "hierarchical", 4, hosts=(9, 9, 4, 4)) is build(
        "all_reduce", "hierarchical", 4, hosts=[0, 0, 1, 1]
    )
