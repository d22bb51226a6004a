"""What a link costs: the constants that calibration measures and predictions use. Seconds and bytes."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import asdict, dataclass, fields
from typing import Any

Table = tuple[tuple[float, float], ...]
"""(bytes, seconds) of one pattern of messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One class of links, as ranks see it: each table is one pattern of traffic, which no formula of the others gives.

    ``latency_s``: time of a smallest message. ``seconds_per_byte``: inverse of the best one-way streaming rate.
    ``overhead_s``: what each message of a stream of smallest ones takes, and so how long it keeps its ranks busy.
    ``table``: one message at a time, half a ping-pong. ``exchange``: a pair both ways at once. ``shift``: every rank to
    the next at once. ``fan_in``: each further message of several that reach one rank together. A table may be empty:
    then ``exchange_factor`` stands in, the time for both directions over that for one (1 full duplex, 2 half duplex;
    less than 1 counts as 1). Raises ValueError for constants that are negative or not finite.
    """

    latency_s: float
    seconds_per_byte: float
    overhead_s: float = 0.0
    exchange_factor: float = 1.0
    table: Table = ()
    exchange: Table = ()
    shift: Table = ()
    fan_in: Table = ()

    def __post_init__(self) -> None:
        constants = {name: getattr(self, name) for name in _CONSTANTS}
        for name in _TABLES:
            constants |= {f"{name} entry {point}": value for point in getattr(self, name) for value in point}
        _check(constants)
        for name in _TABLES:
            object.__setattr__(self, name, rising(getattr(self, name)))

    def message_s(self, size: float) -> float:
        """Seconds that one message of ``size`` bytes takes alone; never falls as the size grows.

        Interpolated between the table's points and continued with the slope of its last two; latency plus bytes at the
        streaming rate where there is no table. A table that undercuts the latency or the streaming rate, which noise
        can do, is held to them.
        """
        streaming = size * self.seconds_per_byte
        if not self.table:
            return self.latency_s + streaming
        return max(interpolate(self.table, size, self.seconds_per_byte), self.latency_s, streaming)

    def occupied_s(self, size: float) -> float:
        """Seconds of a message's time during which its two ranks can do nothing else in that direction."""
        return min(self.message_s(size), self.overhead_s + size * self.seconds_per_byte)

    def both_ways_s(self, size: float, *, one_pair: bool) -> float:
        """Seconds that a message takes longer because its rank is busy in the other direction all the while.

        ``one_pair``: the other message goes between the same two ranks.
        """
        table = (self.exchange or self.shift) if one_pair else (self.shift or self.exchange)
        if not table:
            return max(self.exchange_factor - 1.0, 0.0) * size * self.seconds_per_byte
        return max(0.0, interpolate(table, size, self.seconds_per_byte) - self.message_s(size))

    def queued_s(self, size: float) -> float:
        """Seconds for which a message keeps its receiver busy when it had to wait for another rank's."""
        occupied = self.occupied_s(size)
        return max(occupied, interpolate(self.fan_in, size, self.seconds_per_byte)) if self.fan_in else occupied


_TABLES = ("table", "exchange", "shift", "fan_in")
_CONSTANTS = tuple(f.name for f in fields(Link) if f.name not in _TABLES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """The links of one machine or cluster; a class that was not measured is None.

    ``reduce_seconds_per_byte``: adding what was received to what is held. ``host_seconds_per_message`` and
    ``host_seconds_per_byte``: what one host's cores and memory need in total for each message and byte moved inside it
    when all its ranks move at once (0: no limit). ``host_rates``: per host the seconds a byte out of it and into it, by
    the host numbers that predictions use; hosts beyond it have ``other_host``'s rate. ``nic_seconds_per_byte``: one
    direction of a NIC with several ranks behind it (0: as one rank alone); ``nic``: (bytes, seconds) for which each
    message keeps such a NIC busy when both directions are in use.
    Raises ValueError for constants that are negative or not finite.
    """

    same_host: Link | None = None
    other_host: Link | None = None
    reduce_seconds_per_byte: float = 0.0
    host_seconds_per_message: float = 0.0
    host_seconds_per_byte: float = 0.0
    nic_seconds_per_byte: float = 0.0
    nic: Table = ()
    host_rates: tuple[tuple[float, float], ...] = ()
    calibration_id: str | None = None

    def __post_init__(self) -> None:
        constants = {f.name: getattr(self, f.name) for f in fields(self) if f.type == "float"}
        constants |= {f"nic entry {point}": value for point in self.nic for value in point}
        constants |= {f"host_rates entry {rates}": value for rates in self.host_rates for value in rates}
        _check(constants)
        object.__setattr__(self, "nic", rising(self.nic))

    def of(self, *, crossing: bool) -> Link:
        """The link between hosts, or the one inside a host. Raises ValueError where it was not measured."""
        link = self.other_host if crossing else self.same_host
        if link is None:
            where = "between hosts" if crossing else "inside a host"
            raise ValueError(f"no link {where} is calibrated: run commbench calibrate on ranks that have one")
        return link

    def rate(self, host: int, *, out: bool) -> float:
        """Seconds a byte out of, or into, a host for one of its ranks. Raises ValueError where none was measured."""
        if 0 <= host < len(self.host_rates):
            return self.host_rates[host][0 if out else 1]
        return self.of(crossing=True).seconds_per_byte

    def nic_rate(self, host: int, *, out: bool) -> float:
        """Seconds a byte out of, or into, a host for all its ranks together."""
        alone = self.of(crossing=True).seconds_per_byte
        together = self.nic_seconds_per_byte or alone
        return self.rate(host, out=out) * (min(1.0, together / alone) if alone else 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Links:
        """The inverse of :meth:`to_dict`, tables given as lists included; keys of later versions are dropped.

        Raises ValueError, TypeError or KeyError for values that are no links.
        """
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        for name in ("same_host", "other_host"):
            known[name] = _link_from(values.get(name))
        for name in ("nic", "host_rates"):
            known[name] = _pairs(known.get(name, ()))
        return cls(**known)


def _link_from(values: dict[str, Any] | None) -> Link | None:
    if values is None:
        return None
    known: dict[str, Any] = {name: values[name] for name in _CONSTANTS if name in values}
    known |= {name: _pairs(values.get(name, ())) for name in _TABLES}
    return Link(**known)


def _pairs(values: Any) -> Table:
    return tuple((first, second) for first, second in values)


def _check(constants: dict[str, float]) -> None:
    for name, value in constants.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number that is not negative, not {value!r}")


def rising(table: Table) -> Table:
    """Sorted by size, seconds lowered to the least of any larger message: noise only ever adds time, and a smaller
    message never needs more."""
    found: list[tuple[float, float]] = []
    lowest = math.inf
    for size, seconds in sorted(dict(sorted(table)).items(), reverse=True):
        lowest = min(lowest, seconds)
        found.append((size, lowest))
    return tuple(reversed(found))


def interpolate(table: Table, size: float, last_slope: float) -> float:
    """Seconds at ``size``, straight between the table's points and beyond the last two of them; a table of one point
    goes on with ``last_slope``."""
    at = bisect_right(table, (size, math.inf))
    if at == 0:
        return table[0][1]
    low_size, low = table[at - 1]
    if at < len(table):
        high_size, high = table[at]
        return low + (high - low) * (size - low_size) / (high_size - low_size)
    if len(table) > 1:
        before_size, before = table[-2]
        last_slope = (low - before) / (low_size - before_size)
    return low + (size - low_size) * last_slope
