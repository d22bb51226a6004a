"""Dispatch and combine as tables: time, load, bytes by a stated convention, phases, and what stands beside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import IO, TYPE_CHECKING, Any

from commbench.collectives import ROUTED
from commbench.moe.columns import TOTAL
from commbench.moe.conventions import CONVENTIONS
from commbench.records import STATUS_OK
from commbench.report import moe_published
from commbench.report.tables import FLAGS, NOTHING, drift_line, interval_legend, print_rows, say_lines, spread_of
from commbench.units import format_bandwidth, format_time

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

Row = dict[str, Any]
Columns = list[tuple[str, list[str]]]
_SHAPE = ("hidden", "experts", "topk")
# What tells the cases of one table apart, with the heading that it gets where it does.
FACTORS = {
    "ranks": "ranks", "nodes": "hosts", "mode": "mode", "algorithm": "dispatch", "dtype": "dtype",
    "timing": "timing", "execution": "execution", "experts_on": "experts on", "routing": "routing", "counts": "counts",
    "others": "besides", "variant": "variant",
}  # fmt: skip
_UNSAID = ("", "exchanged", "eager", "library", None)  # what a title need not say
_LEFT = frozenset(FACTORS.values()) - {"ranks", "hosts"} | {"what", "hardware", "of", "timed", "source"}
_DISPENSABLE = ("cv", "before", "last", "wire")
_DISPENSABLE_BESIDE = ("hosts", "timed", "source")
_STANDS_OUT = 2.0  # times as often last as chance would have it


def is_routed(frame: pd.DataFrame) -> pd.Series:
    """Which rows of points or cases are of a dispatch or combine."""
    return frame["tokens"].notna() | frame["collective"].astype(str).str.startswith("moe_")


def print_moe(
    frame: pd.DataFrame, phases: Sequence[str] = (), *, console: Console | None = None, file: IO[str] | None = None
) -> None:
    """Tables for each run, collective, backend and shape: of the times, and of the phases that they are made of.

    ``phases``: which of these to show, all where none is named. Under them: what the columns are of, slowest ranks, and
    published values of the same shapes with their hardware. Bandwidths are in GB/s (1e9 bytes) of bytes that are named.
    """
    rows = rows_of(frame)
    drift = list(_drift(frame, rows)) if "launches" not in frame else []
    legend: dict[str, None] = dict.fromkeys(interval_legend([row for row in rows if row["time_s"] is not None]))
    for key, group in groupby(rows, key=_table):
        members = list(group)
        timed = [row for row in members if row["status"] == STATUS_OK]
        shared, factors = _factors(timed or members)
        _, backend, hidden, experts, topk, _, collective = key
        layer = [f"hidden {hidden}", f"top {topk} of {experts} experts"] if hidden else []
        narrow = print_rows(
            f"{collective} {backend}: {', '.join([*layer, *shared])}", _columns(timed, factors) if timed else [], dispensable=_DISPENSABLE, left=_LEFT,
            console=console, file=file,
        )  # fmt: skip
        if narrow:
            legend[f"left out of a table for its width: {', '.join(narrow)}"] = None
        say_lines(list(_reasons(members)), console=console, file=file)
        if parts := _phase_columns([row for row in timed if row["phases"]], phases):
            print_rows("of which, on the rank that was done last:", parts, left=_LEFT, console=console, file=file)
        legend.update(dict.fromkeys(_legend(timed)))
    say_lines([*legend, *["over the passes of the soak:"] * bool(drift), *drift], console=console, file=file)
    for shape in moe_published.shapes([row for row in rows if row["status"] == STATUS_OK]):
        columns = moe_published.columns(shape)
        print_rows(shape.title, columns, dispensable=_DISPENSABLE_BESIDE, left=_LEFT, console=console, file=file)
        say_lines(list(filter(None, [moe_published.rest(shape)])), console=console, file=file)


def rows_of(frame: pd.DataFrame) -> list[Row]:
    """Cases of dispatch and combine in the order of their tables, with None for what is not known."""
    from commbench.report.frame import summarise

    frame = frame[is_routed(frame)]
    if "launches" not in frame:
        frame = summarise(frame, by=("run_id",))
    rows = [_row({str(key): value for key, value in row.items()}) for row in frame.to_dict("records")]
    return sorted(rows, key=lambda row: (*_table(row), *(_sortable(row[name]) for name in FACTORS), row["tokens"] or 0))


def _table(row: Row) -> tuple[Any, ...]:
    """What rows of one table agree on; a dispatch comes before its combine."""
    order = list(ROUTED)
    place = order.index(row["collective"]) if row["collective"] in order else len(order)
    shape = (int(row[name] or 0) for name in _SHAPE)
    return (str(row["run_id"]), row["backend"], *shape, place, row["collective"])


def _sortable(value: Any) -> tuple[bool, Any]:
    return (isinstance(value, str), value)


def _row(row: Row) -> Row:
    found = {key: (None if isinstance(value, float) and value != value else value) for key, value in row.items()}
    found["interval_level"] = found.get("interval_level") or 0
    asked = found.get("workload") or {}
    found["counts"] = asked.get("counts", "exchanged")
    share = f"{asked['masked']:.3g} masked" if asked.get("masked") else ""
    kinds = {"uneven_tokens": "uneven tokens", "fixed": "fixed routing"}
    found["others"] = ", ".join(filter(None, (share, *(text for name, text in kinds.items() if asked.get(name)))))
    found["algorithm"] = str(found["algorithm"]).removeprefix("own:")
    found["variant"] = found["variant"] or ""
    for name in ("ranks", "nodes"):
        found[name] = int(str(found[name]))
    return found


def _factors(rows: list[Row]) -> tuple[list[str], list[str]]:
    """What all rows share, for the title, and the names of what they differ in."""
    shared, factors = [], []
    for name, heading in FACTORS.items():
        values = [row[name] for row in rows]
        if len(set(values)) > 1:
            factors.append(name)
        elif name in ("ranks", "nodes"):
            shared.append(f"{values[0]} {heading}" if values[0] != 1 else f"1 {heading[:-1]}")
        elif values[0] not in _UNSAID:
            shared.append(str(values[0]))
    launches = max(int(row.get("launches") or 1) for row in rows)
    return shared + [f"{launches} launches"] * (launches > 1), factors


def _identity(rows: list[Row], factors: list[str]) -> Columns:
    tokens = [str(int(row["tokens"])) for row in rows]
    return [("tokens", tokens), *((FACTORS[name], [str(row[name] or NOTHING) for row in rows]) for name in factors)]


def _columns(rows: list[Row], factors: list[str]) -> Columns:
    measured = [
        ("time", [format_time(row["time_s"]) for row in rows]),
        ("±", [spread_of(row) or NOTHING for row in rows]),
        ("cv", [f"{row['launch_cv']:.1%}" if row["launch_cv"] is not None else NOTHING for row in rows]),
        ("GB/s", [_rate(row["algbw_Bps"]) for row in rows]),
        ("wire", [_rate(row["busbw_Bps"]) for row in rows]),
        ("load", [_number(row["load"].get("rank_max_over_mean")) for row in rows]),
        ("before", [_number(row["load"].get("rank_max_over_mean_before")) for row in rows]),
        ("model", [_time(row["predicted_s"]) for row in rows]),
        ("a2a", [_time(row["matched"].get("time_s")) for row in rows]),
        ("last", [_number(row["slowest_rank"], digits=0) for row in rows]),
        ("wrong", [str(int(row["wrong"] or 0)) for row in rows]),
    ]
    return _identity(rows, factors) + [(heading, cells) for heading, cells in measured if set(cells) != {NOTHING}]


def _phase_columns(rows: list[Row], asked: Sequence[str]) -> Columns:
    """One for each phase that is asked for, and their total; none where only that is."""
    fullest_first = sorted(rows, key=lambda row: -len(row["phases"]))  # all names in the order in which phases follow
    known = dict.fromkeys(name for row in fullest_first for name in row["phases"] if name != TOTAL)
    shown = [name for name in known if not asked or name in asked]
    if not shown:
        return []
    _, factors = _factors(rows)
    parts = [(name, [_time(row["phases"].get(name)) for row in rows]) for name in (*shown, TOTAL)]
    return _identity(rows, factors) + parts


def _reasons(rows: list[Row]) -> Iterator[str]:
    """A line for each reason why something was not measured, or is wrong, with all that it is the reason of."""
    _, factors = _factors(rows)
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["status"] != STATUS_OK:
            why = row["reason"] or f"{int(row['wrong'] or 0)} elements are wrong"
            found.setdefault((row["status"], why), []).append(row)
    for (status, why), members in found.items():
        of = sorted({int(row["tokens"]) for row in members if row["tokens"]})
        said = [f"{', '.join(map(str, of))} tokens"] if of else []
        said += [" and ".join(dict.fromkeys(str(row[name]) for row in members if row[name])) for name in factors]
        yield f"  {', '.join(filter(None, said))}: {status}: {why}"


def _legend(rows: list[Row]) -> Iterator[str]:
    conventions = sorted({row["bytes_convention"] for row in rows if row["bytes_convention"]})
    yield from (f"GB/s: of {name}: {CONVENTIONS[name]}" for name in conventions if name in CONVENTIONS)
    if conventions:
        yield (
            "wire: what the busiest rank hands over or is handed, by the time; load: the most loaded rank over the mean"
            + ", before: without balanced experts" * any("rank_max_over_mean_before" in row["load"] for row in rows)
        )
        yield "model: what the traffic should take on these links, and the work around it; last: which rank is, most often"
    if any(row["matched"] for row in rows):
        yield "a2a: a plain all_to_all of as many bytes from each rank"
    for row in rows:
        yield from _straggler(row)
    errors = [row["quantise_error"] for row in rows if row["quantise_error"]]
    if errors:
        yield f"FP8 changes normally distributed values by {max(errors):.2%} (root mean square)"
    yield from (text for name, text in FLAGS.items() if any(row[name] for row in rows))
    if any(row["discarded"] for row in rows):
        yield "iterations whose ranks did not start together were discarded"
    for note in dict.fromkeys(row["note"] for row in rows if row["note"]):
        yield f"note: {note}"
    for text in dict.fromkeys(row["tainted"] for row in rows if row["tainted"]):
        yield f"tainted: {text}"


def _drift(frame: pd.DataFrame, rows: list[Row]) -> Iterator[str]:
    from commbench.report.frame import over_passes

    named = {row["case_id"]: _name(row) for row in rows}
    for row in over_passes(frame[is_routed(frame)]).to_dict("records"):
        yield "  " + drift_line({str(key): value for key, value in row.items()}, named[row["case_id"]])


def _name(row: Row) -> str:
    """What a line calls a case."""
    return (
        f"{row['collective']} {row['backend']} {row['algorithm']} {row['mode']} {int(row['tokens'])} tokens {row['routing']} "
        f"{row['dtype']} {row['timing']}"
    )


def _straggler(row: Row) -> Iterator[str]:
    found = row["straggler"]
    if (
        found
        and "too few" not in found["explained"]
        and row["ranks"] > 2
        and found["share"] > _STANDS_OUT / row["ranks"]
    ):
        yield f"{_name(row)}: rank {found['rank']} on {found['host']} is last in {found['share']:.0%}: {found['explained']}"


def _rate(value: float | None) -> str:
    return format_bandwidth(value) if value else NOTHING


def _time(value: float | None) -> str:
    return format_time(value) if value else NOTHING


def _number(value: float | None, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if value is not None else NOTHING
