"""A calibration as text: each constant with its interval, what the patterns cost beside a message alone, slow hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from commbench.models.links import Link, Links
from commbench.stats.summary import median_interval
from commbench.units import format_bandwidth, format_size, format_time

SLOW = 1.15  # times the usual seconds a byte


def describe_calibration(
    backend: str, links: Links, windows: Sequence[Mapping[str, Any]], hosts: Sequence[str]
) -> list[str]:
    """Lines for a person. ``hosts``: the name of each rank's host."""
    names = list(dict.fromkeys(hosts))
    lines = [f"{backend}: {len(hosts)} ranks on {len(names)} host{'s' if len(names) > 1 else ''}"]
    for name, link, where in (
        ("same_host", links.same_host, "inside a host"), ("other_host", links.other_host, "between hosts"),
    ):  # fmt: skip
        if link is not None:
            lines.append(f"  {where}")
            lines += [f"    {line}" for line in _link(name, link, windows)]
    if links.nic:
        alone = links.of(crossing=True).seconds_per_byte
        lines.append(
            f"    NIC behind several ranks: {_rate(links.nic_seconds_per_byte)} GB/s one way, "
            f"{_rate(links.nic[-1][1] / links.nic[-1][0])} both ways, {_rate(alone)} for one rank alone"
        )
    lines.append(f"  addition: {_rate(links.reduce_seconds_per_byte)} GB/s")
    lines += [f"  {line}" for line in slow_hosts(links, names)]
    return lines


def slow_hosts(links: Links, names: Sequence[str]) -> Iterator[str]:
    """One line a host whose NIC is slower than usual."""
    if links.other_host is None:
        return
    usual = links.other_host.seconds_per_byte
    for name, (out, into) in zip(names, links.host_rates, strict=False):
        if max(out, into) > SLOW * usual:
            yield (
                f"slow host {name}: {_rate(out)} GB/s out, {_rate(into)} in, where others have {_rate(usual)}: "
                "look at its NIC, cable and driver"
            )


def _link(name: str, link: Link, windows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    def interval(value: float, pattern: str, size: float, share: float = 1.0) -> str:
        found = [
            w["seconds"] for w in windows
            if (w["link"], w["pattern"], w["bytes"]) == (name, pattern, size) and "hosts" not in w
        ]  # fmt: skip
        if not found or len(found[0]) < 2:
            return ""
        between = median_interval([seconds * share for seconds in found[0]])
        # What a disturbed window holds is left out of the constant, and must not be left out of sight.
        lo, hi = min(value, between.lo), max(value, between.hi)
        return f"  [{format_time(lo)}, {format_time(hi)}] at {between.level:.0%}"

    small, large = link.table[0][0], link.table[-1][0]
    yield f"latency       {format_time(link.table[0][1])}{interval(link.table[0][1], 'one_way', small, 0.5)}"
    yield f"a message of a stream {format_time(link.overhead_s)}{interval(link.overhead_s, 'stream', small)}"
    seconds = link.seconds_per_byte * large
    yield f"one way       {_rate(link.seconds_per_byte)} GB/s: {format_size(int(large))} in {format_time(seconds)}{interval(seconds, 'stream', large)}"
    for pattern, table in (("exchange", link.exchange), ("shift", link.shift)):
        if table:
            size, seconds = table[-1]
            yield (
                f"{pattern:<13} {_rate(seconds / size)} GB/s each way: {format_size(int(size))} in "
                f"{format_time(seconds)}{interval(seconds, pattern, size)}, {seconds / link.message_s(size):.2f} x a message alone"
            )
    if link.fan_in:
        size, seconds = link.fan_in[-1]
        yield f"fan-in        {_rate(seconds / size)} GB/s into one rank from several"


def _rate(seconds_per_byte: float) -> str:
    return format_bandwidth(1 / seconds_per_byte) if seconds_per_byte else "-"
