"""Predictions of a case, and which model is nearest to a measurement."""

from __future__ import annotations

import math

import pytest

from commbench.models import Link, Links, bound, bus_bandwidth, closed_form, nearest, predict, price
from commbench.schedules import ALGORITHMS, build

ALPHA, BETA = 1e-5, 1e-9
LINKS = Links(
    same_host=Link(latency_s=ALPHA / 10, seconds_per_byte=BETA / 10, exchange_factor=1.3),
    other_host=Link(latency_s=ALPHA, seconds_per_byte=BETA, exchange_factor=1.2),
    reduce_seconds_per_byte=BETA / 10,
    host_seconds_per_message=1e-7,
)
DUPLEX = Links(other_host=Link(latency_s=ALPHA, seconds_per_byte=BETA))


def test_two_ranks() -> None:
    found = predict("all_reduce", 1e6, (0, 1), DUPLEX)
    assert found.ring_s == pytest.approx(2 * ALPHA + 1e6 * BETA)
    assert found.times["recursive_doubling"] == pytest.approx(ALPHA + 1e6 * BETA)
    assert found.bound_s == pytest.approx(1e6 * BETA)
    assert set(found.times) == set(ALGORITHMS["all_reduce"]) - {"hierarchical"}  # there is one rank a host
    assert found.tree_s == found.times["double_binary_tree"]


@pytest.mark.parametrize("timing", ["isolated", "streamed"])
@pytest.mark.parametrize("collective", ALGORITHMS)
def test_what_does_not_exist_is_none(collective: str, timing: str) -> None:
    found = predict(collective, 4096, (0, 0, 1, 1), LINKS, timing)
    assert (found.ring_s is not None) == ("ring" in ALGORITHMS[collective])
    assert (found.tree_s is not None) == (collective in ("all_reduce", "broadcast", "reduce"))
    assert found.bound_s == bound(collective, 4096, (0, 0, 1, 1), LINKS, timing)
    assert min(found.times.values()) >= found.bound_s * (1 - 1e-9)


@pytest.mark.parametrize("size", [64, 1e4, 1e6, 1e8])
@pytest.mark.parametrize("ranks", [3, 8])
def test_tree_has_the_best_number_of_pieces(size: float, ranks: int) -> None:
    hosts = tuple(range(ranks))
    found = predict("all_reduce", size, hosts, DUPLEX)
    by_pieces = [
        price(build("all_reduce", "double_binary_tree", ranks, 0, 2**k), size, hosts, DUPLEX)
        for k in range(7)
        if 2**k * 8 <= max(size, 8)
    ]
    assert found.tree_s == pytest.approx(min(by_pieces), rel=0.02)


def test_a_piece_has_at_least_one_element() -> None:
    """Eight bytes are two float32, one for each tree: nothing to cut. A formula that ignored it would cut here."""
    no_latency = Links(other_host=Link(latency_s=0.0, seconds_per_byte=BETA))
    one_piece = price(build("broadcast", "double_binary_tree", 4), 8, (0, 1, 2, 3), no_latency)
    assert predict("broadcast", 8, (0, 1, 2, 3), no_latency, itemsize=4).tree_s == one_piece
    finer = predict("broadcast", 8, (0, 1, 2, 3), no_latency, itemsize=1).tree_s
    assert finer is not None
    assert finer < one_piece


def test_streamed_is_the_growth_per_operation() -> None:
    hosts = (0, 0, 1, 1)
    schedule = build("reduce", "ring", 4, 2)
    longer, shorter = (price(schedule, 4, hosts, LINKS, repeats) for repeats in (4, 2))
    found = predict("reduce", 4, hosts, LINKS, "streamed", root=2)
    assert found.ring_s == pytest.approx((longer - shorter) / 2)
    isolated = predict("reduce", 4, hosts, LINKS, "isolated", root=2)
    assert found.times["ring"] < isolated.times["ring"]  # a chain works on several at once


def test_many_ranks_have_the_closed_form() -> None:
    hosts = tuple(range(100))
    found = predict("all_reduce", 1e8, hosts, DUPLEX)
    assert found.ring_s == pytest.approx(2 * 99 * ALPHA + 2 * 99 / 100 * 1e8 * BETA)
    pieces = 2 ** round(math.log2(math.sqrt(13 * 1e8 * BETA / ALPHA)))
    assert found.tree_s is not None
    assert found.tree_s <= closed_form("all_reduce", "double_binary_tree", 100, min(pieces, 64)).seconds(
        1e8, ALPHA, BETA
    )
    eight_a_host = tuple(rank // 8 for rank in range(256))
    shared_nic = predict("all_to_all", 1e8, eight_a_host, LINKS)
    # Eight ranks share a NIC: 248 of their 256 blocks each leave through it, half duplex 1.2 times as long.
    assert shared_nic.bound_s == pytest.approx(8 * 248 / 256 * 1e8 * BETA)
    assert shared_nic.times["pairwise"] == pytest.approx(1.2 * shared_nic.bound_s, rel=0.02)


@pytest.mark.parametrize(
    ("measured", "name", "error"),
    [(2.0, "b", 0.0), (2.4, "b", 0.2), (1.2, "a", 0.2), (0.9, "a", -0.1), (2.7, None, 0.35), (0.6, None, -0.4)],
)
def test_nearest(measured: float, name: str | None, error: float) -> None:
    found, relative = nearest({"a": 1.0, "b": 2.0}, measured)
    assert found == name
    assert relative == pytest.approx(error)


def test_nearest_is_by_ratio() -> None:
    assert nearest({"a": 1.0, "b": 2.0}, math.sqrt(2) * 1.001)[1] == pytest.approx(math.sqrt(2) * 1.001 / 2 - 1)


@pytest.mark.parametrize(
    ("times", "measured"), [({}, 1.0), ({"a": 0.0}, 1.0), ({"a": 1.0}, 0.0), ({"a": 1.0}, math.nan)]
)
def test_nearest_of_nothing(times: dict[str, float], measured: float) -> None:
    assert nearest(times, measured) == (None, None)


def test_bus_bandwidth() -> None:
    assert bus_bandwidth("all_reduce", 8e9, 8, 2.0) == 7e9
    assert bus_bandwidth("broadcast", 8e9, 8, 2.0) == 4e9
