"""What holds for the price of any algorithm on any hosts and links."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commbench.collectives import COLLECTIVES
from commbench.models import Link, Links, bound, predict, price
from commbench.schedules import ALGORITHMS, HIERARCHICAL, Schedule, build

PAIRS = [(name, one) for name, known in ALGORITHMS.items() for one in known if (name, one) not in HIERARCHICAL]
SIZES = st.floats(8, 1e8)
Case = tuple[Schedule, tuple[int, ...], Links]


@st.composite
def any_link(draw: st.DrawFn, *, slower: float = 1.0) -> Link:
    latency = slower * 10 ** draw(st.floats(-7, -5))
    per_byte = slower * 10 ** draw(st.floats(-11, -9))
    sizes = draw(st.lists(st.integers(8, 10**7), max_size=3, unique=True))
    table = tuple((size, draw(st.floats(1, 3)) * (latency + size * per_byte)) for size in sizes)
    return Link(
        latency_s=latency,
        seconds_per_byte=per_byte,
        exchange_factor=draw(st.sampled_from([1.0, 1.3, 2.0])),
        table=table,
    )


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    """An algorithm for up to 12 ranks, spread over hosts in any way, on links of two classes."""
    collective, algorithm = draw(st.sampled_from(PAIRS))
    hosts = tuple(draw(st.lists(st.integers(0, 4), min_size=2, max_size=12)))
    root = draw(st.integers(0, len(hosts) - 1)) if COLLECTIVES[collective].rooted else 0
    links = Links(
        same_host=draw(any_link()),
        other_host=draw(any_link(slower=10.0)),
        reduce_seconds_per_byte=draw(st.sampled_from([0.0, 1e-10])),
        host_seconds_per_message=draw(st.sampled_from([0.0, 1e-6])),
        host_seconds_per_byte=draw(st.sampled_from([0.0, 1e-10])),
    )
    return build(collective, algorithm, len(hosts), root, draw(st.sampled_from([1, 2, 5]))), hosts, links


@given(case=any_case(), size=SIZES)
@settings(deadline=None, max_examples=300)
def test_never_below_the_bound(case: Case, size: float) -> None:
    schedule, hosts, links = case
    least = bound(schedule.collective, size, hosts, links, "isolated", schedule.root)
    assert price(schedule, size, hosts, links) >= least * (1 - 1e-9)
    streamed = (price(schedule, size, hosts, links, 4) - price(schedule, size, hosts, links, 2)) / 2
    least = bound(schedule.collective, size, hosts, links, "streamed", schedule.root)
    assert streamed >= least * (1 - 1e-9)


@given(case=any_case(), size=SIZES, timing=st.sampled_from(["isolated", "streamed"]))
@settings(deadline=None, max_examples=60)
def test_no_prediction_is_below_the_bound(case: Case, size: float, timing: str) -> None:
    schedule, hosts, links = case
    found = predict(schedule.collective, size, hosts, links, timing, schedule.root)
    assert min(found.times.values()) >= found.bound_s * (1 - 1e-9)


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair[1] != "double_binary_tree"], ids=":".join)
@given(data=st.data())
@settings(deadline=None, max_examples=15)
def test_monotone_where_messages_do_not_compete(pair: tuple[str, str], data: st.DataObject) -> None:
    """One rank a host, full duplex, one channel, one piece: more bytes, latency or adding never make it faster."""
    ranks = data.draw(st.integers(2, 20))
    schedule, hosts = build(*pair, ranks), tuple(range(ranks))
    link = replace(data.draw(any_link()), exchange_factor=1.0)
    links = Links(other_host=link, reduce_seconds_per_byte=data.draw(st.sampled_from([0.0, 1e-10])))
    size, factor = data.draw(SIZES), data.draw(st.floats(1, 10))
    before = price(schedule, size, hosts, links) * (1 - 1e-12)
    assert price(schedule, size * factor, hosts, links) >= before
    assert price(schedule, size, hosts, replace(links, reduce_seconds_per_byte=1e-9)) >= before
    slower = replace(link, latency_s=link.latency_s * factor)
    assert price(schedule, size, hosts, replace(links, other_host=slower)) >= before


@given(case=any_case(), size=SIZES, factor=st.floats(1, 10), crossing=st.booleans())
@settings(deadline=None, max_examples=200, derandomize=True)
def test_monotone_but_for_the_order_of_service(case: Case, size: float, factor: float, crossing: bool) -> None:
    """Where messages compete, one that comes later may let a more urgent one go first: that can save a little."""
    schedule, hosts, links = case
    before = price(schedule, size, hosts, links) * 0.85
    assert price(schedule, size * factor, hosts, links) >= before
    link = links.of(crossing=crossing)
    later = replace(link, latency_s=link.latency_s * factor)
    slower = replace(links, other_host=later) if crossing else replace(links, same_host=later)
    assert price(schedule, size, hosts, slower) >= before


@given(case=any_case(), size=SIZES)
@settings(deadline=None, max_examples=100)
def test_twice_the_bytes_over_links_of_half_the_cost_a_byte(case: Case, size: float) -> None:
    schedule, hosts, links = case

    def faster(link: Link | None) -> Link:
        assert link is not None
        table = tuple((2 * points, seconds) for points, seconds in link.table)
        return replace(link, seconds_per_byte=link.seconds_per_byte / 2, table=table)

    halved = replace(
        links,
        same_host=faster(links.same_host),
        other_host=faster(links.other_host),
        reduce_seconds_per_byte=links.reduce_seconds_per_byte / 2,
        host_seconds_per_byte=links.host_seconds_per_byte / 2,
    )
    assert price(schedule, 2 * size, hosts, halved) == pytest.approx(price(schedule, size, hosts, links), rel=1e-9)
