"""What a link costs: the constants that calibration measures and predictions use. Seconds and bytes."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One class of links, as two ranks see it.

    ``latency_s``: time of a smallest message. ``seconds_per_byte``: inverse of the best one-way streaming rate.
    ``exchange_factor``: time for both directions at once over the time for one (1 full duplex, 2 half duplex; less
    than 1 counts as 1). ``table``: (bytes, seconds) of single messages, half a ping-pong; may be empty.
    Raises ValueError for constants that are negative or not finite.
    """

    latency_s: float
    seconds_per_byte: float
    exchange_factor: float = 1.0
    table: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        constants = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "table"}
        _check(constants | {f"table entry {point}": value for point in self.table for value in point})
        object.__setattr__(self, "table", _rising(self.latency_s, self.table))

    def message_s(self, size: float) -> float:
        """Seconds that one message of ``size`` bytes takes alone; never falls as the size grows.

        Interpolated between the table's points and continued with the slope of its last two; latency plus bytes at the
        streaming rate where there is no table. A table that undercuts the latency or the streaming rate, which noise
        can do, is held to them.
        """
        streaming = size * self.seconds_per_byte
        if not self.table:
            return self.latency_s + streaming
        return max(_interpolate(self.table, size, self.seconds_per_byte), self.latency_s, streaming)


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """The links of one machine or cluster; a class that was not measured is None.

    ``reduce_seconds_per_byte``: adding what was received to what is held. ``host_seconds_per_message`` and
    ``host_seconds_per_byte``: what one host's cores and memory need in total for each message and byte moved inside it
    when all its ranks move at once (0: no limit). Raises ValueError for constants that are negative or not finite.
    """

    same_host: Link | None = None
    other_host: Link | None = None
    reduce_seconds_per_byte: float = 0.0
    host_seconds_per_message: float = 0.0
    host_seconds_per_byte: float = 0.0
    calibration_id: str | None = None

    def __post_init__(self) -> None:
        _check({f.name: getattr(self, f.name) for f in fields(self)[2:5]})

    def between(self, host_a: int, host_b: int) -> Link:
        """The link of two ranks by the hosts they are on. Raises ValueError where it was not measured."""
        return self.of(crossing=host_a != host_b)

    def of(self, *, crossing: bool) -> Link:
        """The link between hosts, or the one inside a host. Raises ValueError where it was not measured."""
        link = self.other_host if crossing else self.same_host
        if link is None:
            where = "between hosts" if crossing else "inside a host"
            raise ValueError(f"no link {where} is calibrated: run commbench calibrate on ranks that have one")
        return link

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Links:
        """The inverse of :meth:`to_dict`, tables given as lists included."""
        rest = {f.name: values[f.name] for f in fields(cls)[2:] if f.name in values}
        return cls(
            same_host=_link_from(values.get("same_host")), other_host=_link_from(values.get("other_host")), **rest
        )


def _link_from(values: dict[str, Any] | None) -> Link | None:
    if values is None:
        return None
    table = tuple((size, seconds) for size, seconds in values.get("table", ()))
    return Link(**{**values, "table": table})


def _check(constants: dict[str, float]) -> None:
    for name, value in constants.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number that is not negative, not {value!r}")


def _rising(latency_s: float, table: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    """Sorted by size, seconds lowered to the least of any larger message: noise only ever adds time, and a smaller
    message never needs more."""
    rising: list[tuple[float, float]] = []
    least = math.inf
    for size, seconds in sorted(dict(sorted(table)).items(), reverse=True):
        least = min(least, seconds)
        rising.append((size, least))
    return tuple(reversed(rising))


def _interpolate(table: tuple[tuple[float, float], ...], size: float, last_slope: float) -> float:
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
