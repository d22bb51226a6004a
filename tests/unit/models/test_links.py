"""The time of one message, and links as JSON."""

from __future__ import annotations

import json

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


def test_between() -> None:
    links = Links(same_host=PLAIN, other_host=TABLED)
    assert links.between(3, 3) is PLAIN
    assert links.between(3, 4) is TABLED
    with pytest.raises(ValueError, match="no link between hosts is calibrated"):
        Links(same_host=PLAIN).between(0, 1)
    with pytest.raises(ValueError, match="no link inside a host is calibrated"):
        Links(other_host=PLAIN).between(0, 0)


@pytest.mark.parametrize(
    "links",
    [
        Links(),
        Links(same_host=TABLED, host_seconds_per_message=1e-7, calibration_id="0123abcd"),
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
