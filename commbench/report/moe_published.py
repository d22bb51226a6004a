"""What others published of the shapes in a table of dispatch and combine, beside what was measured here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commbench.moe.published import DATA, Published, published_for
from commbench.report.tables import NOTHING
from commbench.units import format_bandwidth, format_time
from commbench.workloads import Workload

MOST = 6  # values of one shape: of some there are twenty, of the same library on other hardware
Row = Mapping[str, Any]
Columns = list[tuple[str, list[str]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Measured ``rows`` of one shape, and what was ``published`` of it, best comparable first; ``more`` are left out."""

    collective: str
    tokens: int
    hidden: int
    topk: int
    ranks: int
    dtype: str
    mode: str
    rows: tuple[Row, ...]
    published: tuple[Published, ...]
    more: int

    @property
    def title(self) -> str:
        return (
            f"{self.collective} of {self.tokens} tokens x {self.hidden}, top {self.topk}, on {self.ranks} ranks, {self.mode}, "
            f"{self.dtype}: here, and as published for other hardware; GB/s of the bytes that are named"
        )


def shapes(rows: Sequence[Row]) -> Iterator[Shape]:
    """The shapes among measured rows of which others have published something."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = (row["collective"], int(row["tokens"]), int(row["ranks"]), row["dtype"], row["mode"], int(row["hidden"]))
        found.setdefault((*key, int(row["topk"])), []).append(row)
    for (collective, tokens, ranks, dtype, mode, hidden, topk), mine in found.items():
        known = published_for(Workload(**mine[0]["workload"]), ranks, collective, dtype)
        if not known:
            continue
        best = sorted(known, key=lambda one: _distance(one, mine[0]))
        yield Shape(
            collective=collective, tokens=tokens, hidden=hidden, topk=topk, ranks=ranks, dtype=dtype, mode=mode,
            rows=tuple(mine), published=tuple(best[:MOST]), more=len(known) - MOST,
        )  # fmt: skip


def _distance(one: Published, row: Row) -> tuple[bool, bool, bool]:
    """First what counts the same bytes, is of as many hosts, and says on which hardware."""
    other_hosts = one.nodes is not None and one.nodes != row["nodes"]
    return (one.convention != row["bytes_convention"], other_hosts, "not said" in one.hardware)


def columns(shape: Shape) -> Columns:
    """The table of one shape: a line for each measured row, then one for each published value."""
    lines = [_measured(row) for row in shape.rows] + [_published(one) for one in shape.published]
    headings = ("what", "hardware", "hosts", "time", "GB/s", "of", "timed", "source")
    return [(heading, [line[at] for line in lines]) for at, heading in enumerate(headings)]


def rest(shape: Shape) -> str | None:
    """A line about what is left out."""
    return f"{shape.more} more of them are in {DATA.name}, in commbench's package" if shape.more > 0 else None


def _measured(row: Row) -> tuple[str, ...]:
    way = str(row["algorithm"])
    what = f"{row['backend']} {way}, here" if way != "library" else f"{row['backend']}, here"
    bandwidth = format_bandwidth(row["algbw_Bps"]) if row["algbw_Bps"] else NOTHING
    time = format_time(row["time_s"])
    return (
        what,
        NOTHING,
        str(int(row["nodes"])),
        time,
        bandwidth,
        row["bytes_convention"] or NOTHING,
        row["timing"],
        NOTHING,
    )


def _published(one: Published) -> tuple[str, ...]:
    hardware = one.hardware if one.network == "not said" else f"{one.hardware}, {one.network}"
    return (
        one.library, hardware, NOTHING if one.nodes is None else str(one.nodes),
        format_time(one.time_s) if one.time_s else NOTHING,
        format_bandwidth(one.bandwidth_Bps) if one.bandwidth_Bps else NOTHING, one.convention or NOTHING, one.timing,
        one.source,
    )  # fmt: skip
