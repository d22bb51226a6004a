"""Predictions as a table, as CSV and as JSON. Standard library only: a table is out before pandas would be loaded."""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from commbench.units import format_bandwidth, format_size, format_time

NOTHING = "-"
GAP = "  "
LONGEST = 12  # of a name that stays on one line


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """NCCL's tuner's own, never mixed with predictions; ``choice`` is its algorithm and protocol."""

    seconds: float | None
    busbw_Bps: float | None
    choice: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One size. ``times``: seconds by algorithm, empty where nothing can be moved; ``busbw_Bps`` of 0 has no meaning."""

    bytes: int
    requested_bytes: int
    times: dict[str, float]
    busbw_Bps: dict[str, float | None]
    bound_s: float | None
    bound_busbw_Bps: float | None
    nccl: Estimate | None = None

    @property
    def best(self) -> str | None:
        """The algorithm that takes the least time; the first of equals."""
        return min(self.times, key=lambda name: self.times[name]) if self.times else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values in SI units."""
        best = self.best
        found: dict[str, Any] = {
            "bytes": self.bytes,
            "requested_bytes": self.requested_bytes,
            "algorithms": {
                name: {"time_s": seconds, "busbw_Bps": self.busbw_Bps[name]} for name, seconds in self.times.items()
            },
            "best": best,
            "best_s": self.times[best] if best else None,
            "best_busbw_Bps": self.busbw_Bps[best] if best else None,
            "bound_s": self.bound_s,
            "bound_busbw_Bps": self.bound_busbw_Bps,
        }
        if self.nccl is not None:
            found |= {
                "nccl_estimate_s": self.nccl.seconds,
                "nccl_estimate_busbw_Bps": self.nccl.busbw_Bps,
                "nccl_estimate_choice": self.nccl.choice,
            }
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The predictions for one collective. ``source`` says whose links, ``method`` how the times were found."""

    collective: str
    ranks: int
    nodes: int
    dtype: str
    timing: str
    source: str
    method: str
    algorithms: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def with_nccl(self) -> bool:
        return any(row.nccl is not None for row in self.rows)


def to_json(forecasts: Sequence[Forecast]) -> str:
    """One object with a list of forecasts; times in seconds, rates in bytes a second, null where there is none."""
    names = ("collective", "ranks", "nodes", "dtype", "timing", "source", "method")
    values = [
        {**{name: getattr(f, name) for name in names}, "rows": [r.to_dict() for r in f.rows], "notes": list(f.notes)}
        for f in forecasts
    ]
    return json.dumps({"schema": 1, "kind": "prediction", "predictions": values}, indent=1, allow_nan=False)


def to_csv(forecasts: Sequence[Forecast]) -> str:
    """One line a collective and size, SI units, an empty cell where there is none; ends without a line break."""
    algorithms = list(dict.fromkeys(name for forecast in forecasts for name in forecast.algorithms))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    shared = ("collective", "ranks", "nodes", "dtype", "timing", "source")
    plain = ("bytes", "requested_bytes", "best", "best_s", "best_busbw_Bps", "bound_s", "bound_busbw_Bps")
    nccl: tuple[str, ...] = ()
    if any(forecast.with_nccl for forecast in forecasts):
        nccl = ("nccl_estimate_s", "nccl_estimate_busbw_Bps", "nccl_estimate_choice")
    by_algorithm = [f"{name}_{what}" for name in algorithms for what in ("s", "busbw_Bps")]
    writer.writerow([*shared, *plain, *nccl, *by_algorithm])
    for forecast in forecasts:
        for row in forecast.rows:
            values = row.to_dict()
            cells = [getattr(forecast, name) for name in shared] + [values.get(name) for name in (*plain, *nccl)]
            for name in algorithms:
                cells += [row.times.get(name), row.busbw_Bps.get(name)]
            writer.writerow(cells)
    return out.getvalue().rstrip("\n")


def to_table(forecast: Forecast, width: int) -> str:
    """One line a size. Where that is wider than ``width``, times come first and bus bandwidths in a table below."""
    lines = [_title(forecast)]
    moving = [row for row in forecast.rows if row.times]
    times = [(name, "time", lambda row, name=name: format_time(row.times.get(name))) for name in forecast.algorithms]
    rates = [
        (name, "busbw", lambda row, name=name: format_bandwidth(row.busbw_Bps.get(name)))
        for name in forecast.algorithms
    ]
    best: list[_Column] = [("best", "", lambda row: row.best)]
    bound_time: list[_Column] = [("bound", "time", lambda row: format_time(row.bound_s))]
    bound_rate: list[_Column] = [("bound", "busbw", lambda row: format_bandwidth(row.bound_busbw_Bps))]
    nccl_time: list[_Column] = []
    nccl_rate: list[_Column] = []
    if forecast.with_nccl:
        nccl_time = [("NCCL tuner estimate", "time", lambda row: format_time(row.nccl.seconds)),
                     ("NCCL tuner estimate", "choice", lambda row: row.nccl.choice or NOTHING)]  # fmt: skip
        nccl_rate = [("NCCL tuner estimate", "busbw", lambda row: format_bandwidth(row.nccl.busbw_Bps))]
    carries = any(row.bytes for row in moving)
    paired = [column for pair in zip(times, rates, strict=True) for column in pair]
    whole = [*paired, *best, *bound_time, *bound_rate, *nccl_time[:1], *nccl_rate, *nccl_time[1:]]
    if not carries:
        lines += _lines(moving, [*times, *best, *bound_time, *nccl_time])
    elif moving:
        found = _lines(moving, whole)
        if max(map(len, found)) > width:
            upper = _lines(moving, [*times, *best, *bound_time, *nccl_time])
            lower = _lines(moving, [*rates, *best, *bound_rate, *nccl_rate])
            found = [*upper, "", *lower]
        lines += found
    still = [format_size(row.requested_bytes) for row in forecast.rows if not row.times]
    if still:
        sizes = still[0] if len(still) == 1 else f"{still[0]} - {still[-1]}"
        lines.append(f"{sizes}: less than one {forecast.dtype} a rank: nothing to move")
    for note in forecast.notes:
        lines += textwrap.wrap(note, width, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


_Column = tuple[str, str, Callable[[Any], str | None]]


def _title(forecast: Forecast) -> str:
    nodes = f"{forecast.nodes} node" + "s" * (forecast.nodes != 1)
    carries = any(row.bytes for row in forecast.rows)
    dtype, rates = (f"{forecast.dtype}, ", "; rates in GB/s") if carries else ("", "")
    return (
        f"{forecast.collective}: {forecast.ranks} ranks on {nodes}, {dtype}{forecast.timing}, {forecast.source}, "
        f"{forecast.method}{rates}"
    )


def _lines(rows: Sequence[Row], columns: Sequence[_Column]) -> list[str]:
    """Three lines of headings, the upper two over all columns that share them, then one a row."""
    sizes: list[_Column] = [("", "bytes", lambda row: format_size(row.bytes))]
    columns = [*sizes, *columns]
    cells = [[heading, *(cell(row) or NOTHING for row in rows)] for _, heading, cell in columns]
    widths = [max(map(len, column)) for column in cells]
    above: list[list[str]] = [[], []]
    for name, members in groupby(range(len(columns)), key=lambda index: columns[index][0]):
        first, *rest = members
        last = rest[-1] if rest else first
        parts = _in_two(name)
        # Columns that are narrower than the name above them give it room in the last of them.
        widths[last] += max(0, max(map(len, parts)) - sum(widths[first : last + 1]) - len(GAP) * (last - first))
        room = sum(widths[first : last + 1]) + len(GAP) * (last - first)
        for line, part in zip(above, parts, strict=True):
            line.append(part.rjust(room))
    below = [
        [column[line].rjust(width) for column, width in zip(cells, widths, strict=True)]
        for line in range(len(rows) + 1)
    ]
    lines = [GAP.join(line).rstrip() for line in (*above, *below)]
    return lines if lines[0] else lines[1:]


def _in_two(name: str) -> tuple[str, str]:
    """A long name on two lines, parted near its middle."""
    breaks = [index + 1 for index, char in enumerate(name) if char in "_ "]
    if len(name) <= LONGEST or not breaks:
        return "", name
    at = min(breaks, key=lambda index: abs(2 * index - len(name)))
    return name[:at].rstrip(), name[at:]
