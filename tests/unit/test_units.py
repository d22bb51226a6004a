"""Sizes, durations and percentages that a user types, and how values are printed back."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.units import (
    MAX_SIZES,
    format_bandwidth,
    format_size,
    format_time,
    parse_duration,
    parse_fraction,
    parse_size,
    parse_sizes,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8", 8), ("1K", 1024), ("64M", 67108864), ("2G", 2147483648), ("1T", 1099511627776), (" 16m ", 16777216),
        ("4KiB", 4096), ("4KB", 4096), ("512B", 512), ("007", 7),
    ],
)  # fmt: skip
def test_a_size_is_1024_based(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", " ", "K", "1.5K", "-8", "+8", "12Q", "8 K", "0x10", "1e3", "8K\x00", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8:128", (8, 16, 32, 64, 128)),
        ("8:100:4x", (8, 32)),
        ("1M:4M:+1M", (1048576, 2097152, 3145728, 4194304)),
        ("1:10:+4", (1, 5, 9)),
        ("8:8:2x", (8,)),
        ("1K,8,1K,16", (1024, 8, 16)),
        ("8:32,24,16", (8, 16, 32, 24)),
        ("8:64:4X", (8, 32)),
    ],
)
def test_ranges_and_lists(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@given(st.integers(1, 2**45), st.integers(1, 2**45), st.integers(2, 2**20))
def test_a_range_multiplies_up_to_its_end(first: int, last: int, factor: int) -> None:
    if last < first:
        with pytest.raises(ValueError, match="ends below its start"):
            parse_sizes(f"{first}:{last}:{factor}x")
        return
    sizes = parse_sizes(f"{first}:{last}:{factor}x")
    assert sizes[0] == first
    assert all(after == factor * before for before, after in itertools.pairwise(sizes))
    assert sizes[-1] <= last < sizes[-1] * factor


def test_too_many_sizes_are_refused_before_they_are_made() -> None:
    assert len(parse_sizes(f"1:{MAX_SIZES}:+1")) == MAX_SIZES
    for text in (f"1:{MAX_SIZES + 1}:+1", "1:1000000000T:+1", f"1:{MAX_SIZES}:+1,{MAX_SIZES + 1}"):
        with pytest.raises(ValueError, match="use a larger step"):
            parse_sizes(text)


@given(st.integers(1, 2**60))
def test_a_printed_size_is_read_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("size", "text"), [(1, "1"), (1000, "1000"), (1024, "1K"), (1536, "1536"), (16777216, "16M"), (3 << 30, "3G")]
)
def test_the_shortest_exact_size(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 5.0), ("5s", 5.0), ("300ms", 0.3), ("10m", 600.0), ("2h", 7200.0), ("1d", 86400.0), ("20us", 2e-5),
     (".5 s", 0.5), ("1.5h", 5400.0)],
)  # fmt: skip
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("text", ["", "s", "-1s", "5 parsecs", "1e3", "inf", "nan", "0", "0.0ms", "5s5s", "5M"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


@pytest.mark.parametrize(("text", "value"), [("2%", 0.02), ("0.02", 0.02), (" 5 % ", 0.05), ("99.9%", 0.999)])
def test_fractions(text: str, value: float) -> None:
    assert parse_fraction(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("text", ["", "%", "0", "0%", "1", "100%", "-2%", "nan", "inf", "2%%", "two"])
def test_what_is_no_fraction(text: str) -> None:
    with pytest.raises(ValueError, match=r"percentage|between"):
        parse_fraction(text)


@given(st.text(max_size=30) | st.text("0123456789.:,+xKMGTBi%smuhd -", max_size=30))
def test_no_text_makes_a_parser_crash(text: str) -> None:
    for parse in (parse_size, parse_sizes, parse_duration, parse_fraction):
        try:
            value = parse(text)
        except ValueError as error:
            assert "\n" not in str(error) or "\n" in text
            continue
        values = value if isinstance(value, tuple) else (value,)
        assert values
        assert all(one > 0 and math.isfinite(one) for one in values)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"), (math.nan, "-"), (0.0, "0 ns"), (4.2e-8, "42 ns"), (9.99e-7, "999 ns"), (9.996e-7, "1.00 us"),
        (1.234e-6, "1.23 us"), (12.34e-6, "12.3 us"), (123.4e-6, "123 us"), (999.6e-6, "1.00 ms"), (0.5, "500 ms"),
        (9.996, "10.0 s"), (90.0, "90.0 s"), (120.0, "120 s"),
    ],
)  # fmt: skip
def test_times_have_three_digits_and_never_a_thousand(seconds: float | None, text: str) -> None:
    assert format_time(seconds) == text


@given(st.floats(1e-6, 1e4))
def test_a_printed_time_is_within_half_a_percent(seconds: float) -> None:
    value, unit = format_time(seconds).split()
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]
    assert float(value) * scale == pytest.approx(seconds, rel=0.0051)


@pytest.mark.parametrize(
    ("rate", "text"),
    [(None, "-"), (math.nan, "-"), (0.0, "0.0000"), (1.234e9, "1.23"), (12.34e9, "12.3"), (123.4e9, "123"),
     (0.5e9, "0.50"), (2.5e6, "0.0025"), (1.24e5, "1.2e-04")],
)  # fmt: skip
def test_bandwidths_are_gigabytes_of_1e9_bytes(rate: float | None, text: str) -> None:
    assert format_bandwidth(rate) == text
