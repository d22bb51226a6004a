"""Exchanges of unequal parts, by hand: links without latency make bytes over rates, and overheads add up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commbench.models.links import Link, Links
from commbench.models.traffic import MOST_SIMULATED, busy_sides, exchange_s, limit

# 1 GB/s inside a host, 100 MB/s between hosts, full duplex, no latency.
LINKS = Links(
    same_host=Link(latency_s=0.0, seconds_per_byte=1e-9), other_host=Link(latency_s=0.0, seconds_per_byte=1e-8)
)


def sizes(ranks: int, messages: dict[tuple[int, int], float]) -> np.ndarray:
    found = np.zeros((ranks, ranks))
    for (source, target), size in messages.items():
        found[source, target] = size
    return found


@pytest.mark.parametrize(
    ("hosts", "messages", "seconds"),
    [
        # One message over each kind of link.
        ((0, 1), {(0, 1): 1e6}, 1e-2),
        ((0, 0), {(0, 1): 1e6}, 1e-3),
        # Both ways at once, full duplex.
        ((0, 1), {(0, 1): 1e6, (1, 0): 1e6}, 1e-2),
        # Three ranks send to one: its receive side takes them one after the other.
        ((0, 1, 2, 3), {(1, 0): 1e6, (2, 0): 2e6, (3, 0): 3e6}, 6e-2),
        # One sends to three.
        ((0, 1, 2, 3), {(0, 1): 1e6, (0, 2): 2e6, (0, 3): 3e6}, 6e-2),
        # Two ranks of a host share its NIC, whatever rank they send to.
        ((0, 0, 1, 2), {(0, 2): 1e6, (1, 3): 1e6}, 2e-2),
        # A rank's own part and empty ones are free.
        ((0, 1), {(0, 0): 1e9, (1, 1): 1e9}, 0.0),
    ],
)  # fmt: skip
def test_exchanges_by_hand(hosts: tuple[int, ...], messages: dict[tuple[int, int], float], seconds: float) -> None:
    assert exchange_s(sizes(len(hosts), messages), hosts, LINKS) == pytest.approx(seconds, rel=1e-9)


def test_a_slow_host_and_latency_count() -> None:
    slow = replace(LINKS, host_rates=((1e-8, 1e-8), (4e-8, 4e-8)))
    assert exchange_s(sizes(2, {(0, 1): 1e6}), (0, 1), slow) == pytest.approx(4e-2)
    late = replace(LINKS, other_host=Link(latency_s=5e-3, seconds_per_byte=1e-8))
    assert exchange_s(sizes(2, {(0, 1): 1e6}), (0, 1), late) == pytest.approx(1.5e-2)


def test_a_link_that_was_not_calibrated_is_named() -> None:
    with pytest.raises(ValueError, match="no link between hosts is calibrated"):
        exchange_s(sizes(2, {(0, 1): 1.0}), (0, 1), replace(LINKS, other_host=None))


def test_what_limits_is_named() -> None:
    incast = sizes(4, {(1, 0): 1e6, (2, 0): 2e6, (3, 0): 3e6})
    assert limit(incast, (0, 1, 2, 3), LINKS) in ("rank 0 receives", "the NIC of host 0 receives")
    shared = sizes(4, {(0, 2): 1e6, (1, 3): 1e6})
    assert limit(shared, (0, 0, 1, 2), LINKS) == "the NIC of host 0 sends"
    assert limit(np.zeros((2, 2)), (0, 1), LINKS) is None


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_between_the_busiest_side_and_all_one_after_the_other(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(2, 6))
    hosts = tuple(sorted(data.draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks))))
    size = np.array(data.draw(st.lists(st.integers(0, 10**6), min_size=ranks**2, max_size=ranks**2)), dtype=float)
    matrix = size.reshape(ranks, ranks)
    took = exchange_s(matrix, hosts, LINKS)
    busiest = max((side.seconds for side in busy_sides(matrix, hosts, LINKS)), default=0.0)
    rate = np.where(np.array(hosts)[:, None] == np.array(hosts)[None, :], 1e-9, 1e-8)
    np.fill_diagonal(rate, 0.0)
    assert busiest * (1 - 1e-9) <= took <= float((matrix * rate).sum()) * (1 + 1e-9)


def test_large_worlds_stand_by_their_busiest_side() -> None:
    ranks = MOST_SIMULATED + 2
    matrix = np.full((ranks, ranks), 1000.0)
    hosts = tuple(rank // 2 for rank in range(ranks))
    # A NIC sends what two ranks have for the ranks of all other hosts: 2 x 64 x 1000 B at 100 MB/s.
    assert exchange_s(matrix, hosts, LINKS) == pytest.approx(2 * 64 * 1000 * 1e-8)
    # The same shape simulated: nothing is idle that could be busy for long.
    fewer = MOST_SIMULATED
    simulated = exchange_s(np.full((fewer, fewer), 1000.0), hosts[:fewer], LINKS)
    assert simulated == pytest.approx(2 * 62 * 1000 * 1e-8, rel=0.1)
