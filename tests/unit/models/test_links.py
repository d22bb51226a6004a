"""The time of one message, and links as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.models import Link, Links

PLAIN = Link(latency_s=2e-6, seconds_per_byte=1e-9)
TABLED = Link(latency_s=2e-6, seconds_per_byte=1e-9, table=((8, 2e-6), (1000, 4e-6), (3000, 12e-6)))


@pytest.mark.parametrize(
    ("link", "size", "seconds"),
    [
        (PLAIN, 0, 2e-6),
        (PLAIN, 1000, 3e-6),
        (TABLED, 0, 2e-6),
        (TABLED, 8, 2e-6),
        (TABLED, 504, 3e-6),  # half way from 8 to 1000 B
        (TABLED, 2000, 8e-6),
        (TABLED, 5000, 20e-6),  # 4 ns a byte, as in the last stretch
        (Link(latency_s=1e-6, seconds_per_byte=1e-9, table=((1000, 3e-6),)), 2000, 4e-6),
        (Link(latency_s=1e-6, seconds_per_byte=1e-9, table=((1000, 5e-6), (2000, 4e-6))), 1000, 4e-6),  # noise
        (Link(latency_s=3e-6, seconds_per_byte=1e-9, table=((8, 1e-6), (9000, 4e-6))), 8, 3e-6),
        (Link(latency_s=1e-6, seconds_per_byte=1e-9, table=((8, 1e-6), (9000, 4e-6))), 9000, 9e-6),
    ],
)
def test_message_time(link: Link, size: float, seconds: float) -> None:
    assert link.message_s(size) == pytest.approx(seconds, rel=1e-12)


@given(
    table=st.lists(st.tuples(st.integers(0, 10**7), st.floats(0, 1)), max_size=6),
    sizes=st.tuples(st.floats(0, 1e8), st.floats(0, 1e8)),
)
def test_message_time_never_falls(table: list[tuple[float, float]], sizes: tuple[float, float]) -> None:
    link = Link(latency_s=1e-6, seconds_per_byte=1e-9, table=tuple(table))
    small, large = sorted(sizes)
    assert link.message_s(small) <= link.message_s(large) * (1 + 1e-12)
    assert link.message_s(small) >= max(1e-6, small * 1e-9)


def test_classes_of_links() -> None:
    links = Links(same_host=PLAIN, other_host=TABLED)
    assert links.of(crossing=False) is PLAIN
    assert links.of(crossing=True) is TABLED
    with pytest.raises(ValueError, match="no link between hosts is calibrated"):
        Links(same_host=PLAIN).of(crossing=True)
    with pytest.raises(ValueError, match="no link inside a host is calibrated"):
        Links(other_host=PLAIN).of(crossing=False)


def test_how_long_a_message_keeps_its_ranks_busy() -> None:
    link = Link(latency_s=2e-6, overhead_s=5e-7, seconds_per_byte=1e-9, table=((8, 2e-6), (1000, 4e-6)))
    assert link.occupied_s(1000) == pytest.approx(5e-7 + 1e-6, rel=1e-12)
    slow_start = Link(latency_s=1e-7, overhead_s=5e-7, seconds_per_byte=1e-9)
    assert slow_start.occupied_s(100) == pytest.approx(2e-7, rel=1e-12)  # never longer than the message takes


@pytest.mark.parametrize(
    ("tables", "one_pair", "other"),
    [
        ({}, 0.0, 0.0),
        ({"exchange_factor": 1.5}, 5e-7, 5e-7),  # half of the bytes' time again
        ({"exchange": ((1000, 4e-6),)}, 1e-6, 1e-6),
        ({"shift": ((1000, 5e-6),)}, 2e-6, 2e-6),
        ({"exchange": ((1000, 4e-6),), "shift": ((1000, 5e-6),)}, 1e-6, 2e-6),
        ({"exchange": ((1000, 2e-6),)}, 0.0, 0.0),  # faster than alone: noise
    ],
)
def test_both_ways_at_once(tables: dict[str, Any], one_pair: float, other: float) -> None:
    link = Link(latency_s=2e-6, seconds_per_byte=1e-9, **tables)  # 1000 B alone: 3 us
    assert link.both_ways_s(1000, one_pair=True) == pytest.approx(one_pair, rel=1e-9)
    assert link.both_ways_s(1000, one_pair=False) == pytest.approx(other, rel=1e-9)


def test_queued_messages_take_what_was_measured_but_not_less_than_their_bytes() -> None:
    link = Link(latency_s=0.0, seconds_per_byte=1e-9, fan_in=((1000, 1.5e-6), (2000, 1e-9)))
    assert link.queued_s(2000) == pytest.approx(2e-6)
    assert Link(latency_s=0.0, seconds_per_byte=1e-9, fan_in=((1000, 1.5e-6),)).queued_s(1000) == 1.5e-6


def test_rates_of_hosts_and_of_their_nics() -> None:
    links = Links(other_host=PLAIN, host_rates=((1e-9, 1e-9), (4e-9, 2e-9)), nic_seconds_per_byte=5e-10)
    assert (links.rate(1, out=True), links.rate(1, out=False), links.rate(2, out=True)) == (4e-9, 2e-9, 1e-9)
    # Two streams together get twice what one does.
    assert links.nic_rate(0, out=True) == pytest.approx(5e-10)
    assert links.nic_rate(1, out=True) == pytest.approx(2e-9)


def test_keys_of_later_versions_are_dropped() -> None:
    values = Links(other_host=PLAIN).to_dict() | {"colour": "blue"}
    values["other_host"] |= {"smell": 3}
    assert Links.from_dict(values) == Links(other_host=PLAIN)


@pytest.mark.parametrize(
    "links",
    [
        Links(),
        Links(same_host=TABLED, host_seconds_per_message=1e-7, calibration_id="0123abcd"),
        Links(other_host=PLAIN, nic=((8.0, 1e-6),), nic_seconds_per_byte=1e-10, host_rates=((1e-9, 2e-9),)),
        Links(other_host=Link(latency_s=1e-6, seconds_per_byte=1e-9, overhead_s=1e-7, shift=((8.0, 1e-6),))),
        Links(other_host=PLAIN, reduce_seconds_per_byte=1e-10, host_seconds_per_byte=1e-11),
    ],
)
def test_json_round_trip(links: Links) -> None:
    assert Links.from_dict(json.loads(json.dumps(links.to_dict()))) == links


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_constants_must_be_finite_and_not_negative(value: float) -> None:
    with pytest.raises(ValueError, match="latency_s must be a finite number"):
        Link(latency_s=value, seconds_per_byte=0.0)
    with pytest.raises(ValueError, match="table entry"):
        Link(latency_s=0.0, seconds_per_byte=0.0, table=((8, value),))
    with pytest.raises(ValueError, match="host_seconds_per_byte"):
        Links(host_seconds_per_byte=value)
