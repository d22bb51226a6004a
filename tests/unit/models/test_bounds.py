"""The bound, worked out by hand for three ranks on one host and one on another; m = 4000 B, so a block m/4 is 1000 B."""

from __future__ import annotations

import pytest

from commbench.models import Link, Links, bound

LINKS = Links(
    same_host=Link(latency_s=1e-6, seconds_per_byte=1e-10, exchange_factor=2.0),
    other_host=Link(latency_s=1e-5, seconds_per_byte=1e-9, exchange_factor=2.0),
    reduce_seconds_per_byte=1.0,
    host_seconds_per_message=1.0,
)
UNEQUAL = (0, 0, 0, 1)


@pytest.mark.parametrize(
    ("collective", "root", "bytes_of_slow_side"),
    [
        ("all_reduce", 0, 4000),  # both hosts 2(k-1)/k m = m
        ("all_gather", 0, 3000),  # rank 3 and its host take in three blocks
        ("reduce_scatter", 0, 3000),  # three contributions leave rank 3
        ("all_to_all", 0, 3000),
        ("broadcast", 0, 4000),
        ("broadcast", 3, 4000),
        ("reduce", 0, 4000),
        ("reduce", 3, 4000),  # the sum over the first host is combined there
        ("gather", 0, 1000),  # rank 3's block; what rank 0 takes in, 3000 B, has the fast links
        ("gather", 3, 3000),
        ("scatter", 0, 1000),
        ("scatter", 3, 3000),
        ("send_recv", 0, 4000),  # one message each way between the hosts
        ("barrier", 0, 0),
    ],
)
def test_streamed_bound_on_unequal_hosts(collective: str, root: int, bytes_of_slow_side: int) -> None:
    assert bound(collective, 4000, UNEQUAL, LINKS, "streamed", root) == pytest.approx(bytes_of_slow_side * 1e-9)


@pytest.mark.parametrize(
    ("collective", "share"),
    [
        ("all_reduce", 2 * 7 / 8),
        ("all_gather", 7 / 8),
        ("reduce_scatter", 7 / 8),
        ("all_to_all", 7 / 8),
        ("broadcast", 1),
        ("reduce", 1),
        ("gather", 7 / 8),
        ("scatter", 7 / 8),
        ("send_recv", 1),
    ],
)
def test_streamed_bound_of_eight_ranks_that_are_alike(collective: str, share: float) -> None:
    one_each = tuple(range(8))
    assert bound(collective, 8e6, one_each, LINKS, "streamed") == pytest.approx(share * 8e6 * 1e-9)
    assert bound(collective, 8e6, (0,) * 8, LINKS, "streamed") == pytest.approx(share * 8e6 * 1e-10)


@pytest.mark.parametrize(
    ("collective", "hosts", "share"),
    [
        ("all_reduce", (0, 0, 0, 0, 1, 1, 1, 1), 1),  # 2(k-1)/k, however many ranks a host has
        ("all_reduce", (0, 0, 1, 1, 2, 2, 3, 3), 3 / 2),
        ("all_reduce", (0, 0, 1, 2), 4 / 3),
        ("all_gather", (0, 0, 0, 0, 1, 1, 1, 1), 1 / 2),
        ("reduce_scatter", (0, 0, 0, 0, 0, 1, 1, 1), 5 / 8),  # the second host sends the first one's five sums
        ("all_to_all", (0, 0, 0, 0, 1, 1, 1, 1), 2),  # g(n-g)/n
        ("all_to_all", (0, 0, 0, 0, 0, 0, 1, 1), 6 * 2 / 8),
        ("broadcast", (0, 0, 1, 1), 1),
        ("gather", (0, 0, 1, 1), 1 / 2),
        ("send_recv", (0, 1, 0, 1), 2),
        ("send_recv", (0, 0, 1, 1), 1),
    ],
)
def test_streamed_bound_of_hosts(collective: str, hosts: tuple[int, ...], share: float) -> None:
    assert bound(collective, 8e6, hosts, LINKS, "streamed") == pytest.approx(share * 8e6 * 1e-9)


@pytest.mark.parametrize(
    ("collective", "latencies"),
    [("all_reduce", 3), ("all_gather", 3), ("broadcast", 3), ("scatter", 3), ("barrier", 3), ("send_recv", 1)],
)
def test_latency_bound_uses_the_fastest_link_there_is(collective: str, latencies: int) -> None:
    assert bound(collective, 8, tuple(range(6)), LINKS, "isolated") == pytest.approx(latencies * 1e-5)
    assert bound(collective, 8, (0, 0, 1, 1, 2, 2), LINKS, "isolated") == pytest.approx(latencies * 1e-6)


def test_greatest_and_not_the_sum() -> None:
    assert bound("broadcast", 1e6, (0, 1), LINKS, "isolated") == pytest.approx(1e-3)


def test_refuses() -> None:
    with pytest.raises(ValueError, match="isolated or streamed"):
        bound("broadcast", 8, (0, 1), LINKS, "both")
    with pytest.raises(ValueError, match="no link between hosts"):
        bound("broadcast", 8, (0, 1), Links(same_host=LINKS.same_host), "streamed")
