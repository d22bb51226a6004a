"""Results as text: a table a collective and backend, with what failed beside what was measured.

The rows are laid out here and only styled by rich: rich's own tables place a thousand rows a second, and a results
tree holds a hundred thousand.
"""

from __future__ import annotations

import itertools
import os
import textwrap
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import IO, TYPE_CHECKING, Any

from commbench.records import STATUS_OK, STATUS_WRONG
from commbench.stats.summary import LEVEL, OF_LAUNCHES
from commbench.units import format_bandwidth, format_size, format_time

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

Row = dict[str, Any]

PLAIN_WIDTH = 120  # where the output is no terminal
NOTHING = "-"
_ALONE = " (this launch alone)"

# What tells rows of one table apart, with the heading it gets as a column; stated in the title where all agree.
IDENTITY = {
    "run_id": "run", "group": "group", "ranks": "ranks", "nodes": "hosts", "dtype": "dtype", "reduce_op": "op",
    "placement": "place", "algorithm": "algorithm", "root": "root", "execution": "execution",
    "cache": "cache", "buffers": "buffers", "variant": "variant",
}  # fmt: skip
# What a title need not say.
_USUAL = {
    "group": "world", "algorithm": "library", "root": 0, "execution": "eager", "cache": "rotate",
    "buffers": "plain", "variant": "",
}  # fmt: skip
_READ = (
    *IDENTITY, "collective", "backend", "bytes", "requested_bytes", "timing", "status", "reason", "wrong", "samples",
    "discarded", "time_s", "time_lo_s", "time_hi_s", "interval_of", "interval_level", "algbw_Bps", "busbw_Bps",
    "ring_busbw_Bps", "tree_busbw_Bps", "bound_s", "efficiency", "nearest_model", "nearest_error", "slowest_rank",
    "slowest_host", "predicted_s", "prediction_error", "nccl_estimate_s", "used_algorithm", "protocol", "channels",
    "wire_bytes", "tainted", "host_bound", "oversubscribed", "beyond_bound", "late_starts", "note", "launches", "launch_cv",
)  # fmt: skip
# Given up in this order where a table is wider than the terminal.
_DISPENSABLE = ("algbw", "slowest", "nearest", "wire", "tuner", "took", "tree", "ring", "eff", "bound", "cv")
FLAGS = {
    "late_starts": "late starts: in most iterations the ranks did not start together, so the time holds some waiting",
    "beyond_bound": "beyond the bound: faster than messages over the calibrated links; inside a host libraries may use shared memory instead",
    "oversubscribed": "oversubscribed: more ranks than cores, so times hold the waiting for a core",
    "host_bound": "host-bound: a good part of the time is the host's own, or a device waited for it",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Column:
    heading: str
    cells: list[str]
    left: bool = False

    @property
    def width(self) -> int:
        return max(map(_width, (self.heading, *self.cells)))


def print_tables(frame: pd.DataFrame, *, console: Console | None = None, file: IO[str] | None = None) -> None:
    """Print points, or cases from ``commbench.summarise``, to ``console``, to ``file`` or to standard output.

    Points are summarised over launches first, each run by itself. A time stands with the wider side of its median's
    interval, bandwidths are in GB/s (1e9 bytes), ring, tree and bound are the bus bandwidths that the models allow.
    Cases without a time are listed under their table with the reason; equal reasons share a line. Columns that do
    not fit a terminal are left out and named; where the output is no terminal it is 120 columns wide and has no
    colour. Control characters in what was stored are never written.
    """
    console = console or _console(file)
    drift: list[Any] = []
    if "launches" not in frame:
        from commbench.report.frame import over_passes, summarise

        drift = over_passes(frame).to_dict("records")
        frame = summarise(frame, by=("run_id",))
    rows = sorted(_records(frame, console.encoding), key=_order)
    timed = [row for row in rows if row["time_s"] is not None]
    marks, legend = _footnotes(timed)
    legend = [*interval_legend(timed), *_model_legend(timed), *legend]
    narrow: dict[str, None] = {}
    for _, group in groupby(rows, key=lambda row: (row["collective"], row["backend"])):
        narrow.update(dict.fromkeys(_print_table(console, list(group), marks)))
    if narrow:
        legend.append(f"left out at {console.width} columns: {', '.join(narrow)}")
    for line in legend:
        _say(console, line, style="dim")
    if drift:
        _say(console, "over the passes of the soak:")
        for row in drift:
            _say(console, "  " + plain(drift_line(row), console.encoding))


def print_rows(
    title: str, columns: Sequence[tuple[str, list[str]]], *, dispensable: Sequence[str] = (), left: Collection[str] = (),
    console: Console | None = None, file: IO[str] | None = None,
) -> list[str]:  # fmt: skip
    """A table of any columns, given as (heading, cells), under its title; in the style of the others. Texts, the headings of
    which are ``left``, begin at the left. Returns the headings that did not fit, of the ``dispensable`` ones, which go in
    that order."""
    console = console or _console(file)
    _say(console, plain(title, console.encoding), style="bold")
    if columns:
        cells = [
            _Column(
                heading=_plus_minus(console.encoding) if heading == "±" else plain(heading, console.encoding),
                cells=[plain(cell, console.encoding) for cell in found], left=heading in left,
            )
            for heading, found in columns
        ]  # fmt: skip
        kept, gap, dropped = _fit(cells, console.width, dispensable)
        lines = _lines(kept, gap)
        console.out(lines[0], style="bold", highlight=False)
        console.out("\n".join(lines[1:]), highlight=False)
        console.out("")
        return dropped
    return []


def say_lines(lines: Sequence[str], *, console: Console | None = None, file: IO[str] | None = None) -> None:
    """Sentences under tables, wrapped."""
    console = console or _console(file)
    for line in lines:
        _say(console, plain(line, console.encoding), style="dim")


def drift_line(row: Row, name: str | None = None) -> str:
    """What the passes of a soak say of a case, from ``over_passes``; ``name``: what to call it."""
    called = name or f"{row['collective']} {row['backend']} {format_size(int(row['bytes']))} {row['timing']}"
    return (
        f"{called}: {row['passes']} passes, first {format_time(row['first_s'])}, last {format_time(row['last_s'])} "
        f"({row['last_s'] / row['first_s'] - 1:+.1%}), least {format_time(row['least_s'])}, "
        f"greatest {format_time(row['greatest_s'])}"
    )


def plain(text: object, encoding: str = "utf-8") -> str:
    """Text that came from outside, without what could steer a terminal or does not exist in ``encoding``."""
    cleaned = "".join("\ufffd" if unicodedata.category(char)[0] == "C" else char for char in str(text))
    return cleaned.encode(encoding, "replace").decode(encoding)


def _console(file: IO[str] | None) -> Console:
    import sys

    from rich.console import Console

    stream = file or sys.stdout
    # A launcher may give its ranks a terminal that nobody looks at.
    if stream.isatty() and "PMIX_RANK" not in os.environ:
        return Console(file=file)
    return Console(file=file, width=PLAIN_WIDTH, color_system=None, force_terminal=False)


def _records(frame: pd.DataFrame, encoding: str) -> list[Row]:
    """The rows as dictionaries with None for null and printable texts."""
    columns = []
    for name in _READ:
        values = frame[name].astype(object).where(frame[name].notna(), None).tolist()
        known: dict[str, str] = {}
        for index, value in enumerate(values):
            if isinstance(value, str):
                if value not in known:
                    known[value] = plain(value, encoding)
                values[index] = known[value]
        columns.append(values)
    return [dict(zip(_READ, values, strict=True)) for values in zip(*columns, strict=True)]


def _order(row: Row) -> tuple[Any, ...]:
    identity = [(row[name] is not None, row[name] or 0 if name in ("ranks", "nodes", "root") else row[name] or "")
                for name in IDENTITY]  # fmt: skip
    return (row["collective"], row["backend"], identity, row["timing"], _size(row))


def _size(row: Row) -> int:
    return int(row["bytes"] or row["requested_bytes"] or 0)  # a size that could not be cut into shares moves nothing


def _print_table(console: Console, rows: list[Row], marks: dict[int, list[str]]) -> list[str]:
    """One table; returns the headings that did not fit."""
    varying = [name for name in IDENTITY if len({row[name] for row in rows}) > 1]
    one_timing = len({row["timing"] for row in rows}) == 1
    timed = [row for row in rows if row["time_s"] is not None]
    shared = [mark for mark in marks[id(timed[0])] if all(mark in marks[id(row)] for row in timed)] if timed else []
    _say(console, _title(rows, varying, one_timing) + "".join(f" [{mark}]" for mark in shared), style="bold")
    dropped: list[str] = []
    if timed:
        own = {id(row): " ".join(mark for mark in marks[id(row)] if mark not in shared) for row in timed}
        columns = _columns(timed, varying, one_timing, own, console.encoding)
        columns, gap, dropped = _fit(columns, console.width)
        lines = _lines(columns, gap)
        console.out(lines[0], style="bold", highlight=False)
        bad = [row["status"] != STATUS_OK for row in timed]
        for is_bad, stretch in groupby(zip(bad, lines[1:], strict=True), key=lambda pair: pair[0]):
            text = "\n".join(line for _, line in stretch)
            console.out(text, style="red" if is_bad else None, highlight=False)
    for line in _reasons(rows, varying, one_timing):
        _say(console, line, style="yellow")
    console.out("")
    return dropped


def _title(rows: list[Row], varying: list[str], one_timing: bool) -> str:
    row = rows[0]
    hosts = f"on {row['nodes']} host" + "s" * (row["nodes"] != 1)
    group = row["group"]
    said = {
        "ranks": f"{row['ranks']} ranks" + f" {hosts}" * ("nodes" not in varying),
        "nodes": hosts if "ranks" in varying else None,
        "dtype": row["dtype"],
        "reduce_op": row["reduce_op"],
        "placement": {"out": "out of place", "in": "in place"}.get(row["placement"], row["placement"]),
        "group": f"in each {group}" if group in ("node", "rail") else group,
        "algorithm": f"algorithm {row['algorithm']}",
        "root": f"root {row['root']}",
        "execution": row["execution"],
        "cache": f"{row['cache']} cache",
        "buffers": f"{row['buffers']} buffers",
        "variant": f"variant {row['variant']}",
    }
    silent = {*varying, *(name for name, value in _USUAL.items() if row[name] == value)}
    if not any(map(_size, rows)):
        silent |= {"dtype", "placement"}  # a barrier carries no data
    parts = [text for name, text in said.items() if text is not None and name not in silent]
    launches = max(row["launches"] for row in rows)
    parts += [row["timing"]] * one_timing + [f"{launches} launches"] * (launches > 1)
    rates = "; rates in GB/s" * any(row["busbw_Bps"] is not None for row in rows)
    return f"{row['collective']} {row['backend']}: {', '.join(parts)}{rates}"


def _columns(
    rows: list[Row], varying: list[str], one_timing: bool, marks: dict[int, str], encoding: str
) -> list[_Column]:
    hosts_matter = len({row["slowest_host"] for row in rows}) > 1

    def column(heading: str, cell: Callable[[Row], str | None], *, left: bool = False) -> _Column:
        return _Column(heading=heading, cells=[cell(row) or NOTHING for row in rows], left=left)

    def rate(name: str) -> Callable[[Row], str]:
        return lambda row: format_bandwidth(row[name])

    found = [
        column("bytes", lambda row: format_size(_size(row))),
        *(column(IDENTITY[name], lambda row, name=name: _text(row[name]), left=True) for name in varying),  # type: ignore[misc]
        *([] if one_timing else [column("timing", lambda row: row["timing"], left=True)]),
        column("time", lambda row: format_time(row["time_s"])),
        column(_plus_minus(encoding), spread_of),
        column("cv", lambda row: None if row["launch_cv"] is None else f"{row['launch_cv']:.1%}"),
        column("algbw", rate("algbw_Bps")),
        column("busbw", rate("busbw_Bps")),
        column("ring", rate("ring_busbw_Bps")),
        column("tree", rate("tree_busbw_Bps")),
        column("bound", lambda row: _rate_at(row, "bound_s")),
        column(
            "eff",
            lambda row: (
                None
                if row["efficiency"] is None
                else f"{row['efficiency']:.0%}"
                if row["efficiency"] < 9.995
                else ">999%"
            ),
        ),
        column("took", _took, left=True),
        column("model", _prediction),
        column("nearest", _nearest, left=True),
        column("tuner", lambda row: _rate_at(row, "nccl_estimate_s")),
        column("wire", _wire),
        column("slowest", lambda row: _slowest(row, hosts_matter), left=True),
        column("wrong", lambda row: _text(row["wrong"])),
        _Column(heading="note", cells=[marks.get(id(row), "") for row in rows], left=True),
    ]
    return [column for column in found if any(cell not in (NOTHING, "") for cell in column.cells)]


def _plus_minus(encoding: str) -> str:
    return "±" if plain("±", encoding) == "±" else "+-"


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def spread_of(row: Row) -> str | None:
    """The wider side of a row's interval as a share of its time; a star where the interval is below the usual level."""
    share = _share(row)
    if share is None:
        return None
    amount = "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"
    amount = amount if share < 9.995 else ">999%"
    return amount + ("*" if _below_level(row) else " ")


def _share(row: Row) -> float | None:
    """The wider side of the interval as a share of the median; None where one sample leaves no interval."""
    if row["time_lo_s"] is None or row["time_hi_s"] is None or not row["time_s"] or row["interval_level"] == 0:
        return None
    return float(max(row["time_hi_s"] - row["time_s"], row["time_s"] - row["time_lo_s"]) / row["time_s"])


def _below_level(row: Row) -> bool:
    return row["interval_level"] is not None and row["interval_level"] < LEVEL


def _rate_at(row: Row, model: str) -> str:
    # The same bytes in another time: a bus bandwidth scales with the inverse of it.
    if row["busbw_Bps"] is None or not row[model]:
        return NOTHING
    return format_bandwidth(row["busbw_Bps"] * row["time_s"] / row[model])


def _nearest(row: Row) -> str | None:
    if row["nearest_model"] is None or row["nearest_error"] is None:
        return _text(row["nearest_model"])
    return f"{row['nearest_model']} {abs(row['nearest_error']):.0%}"


def _took(row: Row) -> str | None:
    """What the library says that it took: algorithm, protocol and channels."""
    name = ":".join(filter(None, (row["used_algorithm"], row["protocol"])))
    channels = None if row["channels"] is None else f"x{int(row['channels'])}"
    return " ".join(filter(None, (name, channels))) or None


def _prediction(row: Row) -> str | None:
    """Measured against the predicted time of the very algorithm that was carried out."""
    return None if row["prediction_error"] is None else f"{row['prediction_error']:+.0%}"


def _wire(row: Row) -> str | None:
    """What left all hosts, in messages."""
    return None if row["wire_bytes"] is None or not row["bytes"] else f"{row['wire_bytes'] / row['bytes']:.2f}x"


def _slowest(row: Row, hosts_matter: bool) -> str | None:
    host = f" {row['slowest_host']}" if hosts_matter and row["slowest_host"] is not None else ""
    return None if row["slowest_rank"] is None else f"{row['slowest_rank']}{host}"


def _fit(
    columns: list[_Column], width: int, dispensable: Sequence[str] = _DISPENSABLE
) -> tuple[list[_Column], int, list[str]]:
    """The columns that fit, the blanks between them, and the headings of those that had to go."""
    dropped: list[str] = []
    candidates = list(dispensable)
    while True:
        for gap in (2, 1):
            if sum(column.width for column in columns) + gap * (len(columns) - 1) <= width:
                return columns, gap, dropped
        present = [name for name in candidates if any(column.heading == name for column in columns)]
        if not present:
            return columns, 1, dropped
        columns = [column for column in columns if column.heading != present[0]]
        dropped.append(present[0])
        candidates.remove(present[0])


def _lines(columns: list[_Column], gap: int) -> list[str]:
    padded = []
    for column in columns:
        width = column.width
        cells = (column.heading + " " if column.heading in ("±", "+-") else column.heading, *column.cells)
        padded.append([_pad(cell, width, column.left) for cell in cells])
    return [(" " * gap).join(cells).rstrip() for cells in zip(*padded, strict=True)]


def _pad(text: str, width: int, left: bool) -> str:
    blanks = " " * (width - _width(text))
    return text + blanks if left else blanks + text


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _reasons(rows: list[Row], varying: list[str], one_timing: bool) -> list[str]:
    """A line for what was skipped, failed or wrong: equal reasons share it, runs of sizes are written as a range."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for (identity, timing), group in groupby(rows, key=lambda row: (tuple(row[n] for n in varying), row["timing"])):
        for (status, reason), sizes in _by_reason(list(group)).items():
            key = (identity, sizes, status, reason)
            found.setdefault(key, []).append(timing)
    lines = []
    for (identity, sizes, status, reason), timings in found.items():
        settings = [str(value) for value in identity if value is not None]
        where = " ".join([sizes, *settings, *([] if one_timing else [" and ".join(timings)])])
        default = "wrong data, so no bandwidth is given" if status == STATUS_WRONG else "no reason was stored"
        lines.append(f"{where}: {status}: {reason or default}")
    return lines


def _by_reason(rows: list[Row]) -> dict[tuple[str, str | None], str]:
    """Per status and reason the sizes; ``rows`` are one setting's, ascending, and ranges are among these."""
    stretches: dict[tuple[str, str | None], list[str]] = {}
    for (status, reason), group in groupby(rows, key=lambda row: (row["status"], row["reason"])):
        if status == STATUS_OK:
            continue
        sizes = [format_size(_size(row)) for row in group]
        stretches.setdefault((status, reason), []).append(
            sizes[0] if len(set(sizes)) == 1 else f"{sizes[0]} - {sizes[-1]}"
        )
    return {key: ", ".join(parts) for key, parts in stretches.items()}


def _footnotes(rows: list[Row]) -> tuple[dict[int, list[str]], list[str]]:
    """Per timed row (by its ``id``) the letters of what there is to say about it, and the lines that explain them."""
    said = {id(row): _remarks(row) for row in rows}
    letters: dict[str, str] = {}
    for text in itertools.chain.from_iterable(said.values()):
        letters.setdefault(text, _letter(len(letters)))
    lines = [f"{letter}  {text}" for text, letter in letters.items()]
    if rows and all(row["bound_s"] is None for row in rows):
        lines.append("no model columns: the links of this run were not calibrated")
    by_age = list(letters).index
    return {key: [letters[text] for text in sorted(texts, key=by_age)] for key, texts in said.items()}, lines


def _remarks(row: Row) -> list[str]:
    remarks = [text for name, text in FLAGS.items() if row[name]]
    if row["bytes"] and row["bytes"] != row["requested_bytes"]:
        remarks.append("size rounded down from the one that was asked for, to equal shares of whole elements")
    if row["discarded"]:
        remarks.append("iterations whose ranks did not start together were discarded")
    if row["tainted"]:
        remarks.append(f"tainted: {row['tainted']}")
    return [*remarks, *row["note"].split("; ")] if row["note"] else remarks


def _letter(index: int) -> str:
    """a to z, then aa, ab, ..."""
    letter = chr(ord("a") + index % 26)
    return letter if index < 26 else _letter(index // 26 - 1) + letter


def interval_legend(rows: Sequence[Row]) -> list[str]:
    levels: dict[str, set[float]] = {}
    for row in rows:
        if _share(row) is not None and row["interval_level"] is not None:
            levels.setdefault(row["interval_of"] or "samples", set()).add(round(100 * row["interval_level"], 1))
    if not levels:
        return []
    alone = {OF_LAUNCHES: ""}  # all else is of one launch, and speaks of no other
    parts = [f"of {name}{alone.get(name, _ALONE)} at {_span(found)} % confidence" for name, found in levels.items()]
    text = f"time: median, and the wider side of its interval, {' and '.join(parts)}"
    few = any(_below_level(row) for row in rows)
    varied = any(row["launch_cv"] is not None for row in rows)
    return [
        text + "; * below 95 %: too few of them" * few,
        *["cv: standard deviation of the launches' medians, as a share of their mean"] * varied,
    ]


def _model_legend(rows: Sequence[Row]) -> Iterator[str]:
    if any(_prediction(row) for row in rows):
        yield "model: measured time against what this very algorithm should take on the calibrated links"
    if any(row["nccl_estimate_s"] for row in rows):
        yield "tuner: tuner estimate, what NCCL's own model expects of its own choice; neither a bound nor a prediction"
    if any(_wire(row) for row in rows):
        yield "wire: bytes that left all hosts together, headers included, in sizes of the message"


def _span(values: Iterable[float]) -> str:
    ordered = sorted(values)
    return f"{ordered[0]:g}" if len(ordered) == 1 else f"{ordered[0]:g} to {ordered[-1]:g}"


def _say(console: Console, text: str, *, style: str | None = None) -> None:
    """A sentence, wrapped with a hanging indent."""
    wrapped = textwrap.wrap(text, console.width, subsequent_indent="  ", break_on_hyphens=False) or [""]
    console.out("\n".join(wrapped), style=style, highlight=False)
