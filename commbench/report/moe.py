"""Dispatch and combine as a table and a figure: time, load, bytes by a stated convention, phases, and what stands beside."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from commbench.records import STATUS_OK
from commbench.report.tables import NOTHING, print_rows, say_lines, spread_of
from commbench.units import format_bandwidth, format_time

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

Row = dict[str, Any]
_SHAPE = ("hidden", "experts", "topk")
# What tells the cases of one table apart, with the heading that it gets where it does.
_FACTORS = {
    "ranks": "ranks", "nodes": "hosts", "mode": "mode", "algorithm": "dispatch", "dtype": "dtype",
    "timing": "timing", "execution": "execution", "experts_on": "experts on", "routing": "routing", "counts": "counts",
    "variant": "variant",
}  # fmt: skip
_UNSAID = ("", "exchanged", "eager", None)  # what a title need not say
_DISPENSABLE = ("quantise", "counts", "layout", "wire", "reduce", "gather", "permute", "forward", "last")
PHASES = (
    "total",
    "layout",
    "send",
    "recv",
    "combine",
)  # as `commbench moe --phases` names them: all of them, all phases


def is_routed(frame: pd.DataFrame) -> pd.Series:
    """Which rows of points or cases are of a dispatch or combine."""
    return frame["tokens"].notna() | frame["collective"].astype(str).str.startswith("moe_")


def print_moe(
    frame: pd.DataFrame, phases: Sequence[str] = (), *, console: Console | None = None, file: IO[str] | None = None
) -> None:
    """A table for each collective, backend and shape; bandwidths in GB/s (1e9 bytes) of the bytes that are named.

    ``phases``: which of them to show, all where none is named. Under the tables: what the columns are of, slowest ranks, and
    published values of the same shape with their hardware.
    """
    from commbench.report.frame import summarise

    frame = frame[is_routed(frame)]
    if "launches" not in frame:
        frame = summarise(frame, by=("run_id",))
    rows = _rows(frame)
    rows.sort(
        key=lambda row: (str(row["run_id"]), row["collective"], row["backend"], *(row[name] or 0 for name in _SHAPE))
    )
    legend: dict[str, None] = {}
    for key, group in groupby(
        rows, key=lambda row: (row["collective"], row["backend"], *(row[name] for name in _SHAPE))
    ):
        members = list(group)
        timed = [row for row in members if row["status"] == STATUS_OK]
        title = (
            f"{key[0]} {key[1]}: hidden {key[2]}, top {key[4]} of {key[3]} experts" if key[2] else f"{key[0]} {key[1]}"
        )
        if timed:
            shared, columns = _columns(timed, phases)
            narrow = print_rows(
                ", ".join([title, *shared]), columns, dispensable=_DISPENSABLE, console=console, file=file
            )
            if narrow:
                legend[f"left out of a table for its width: {', '.join(narrow)}"] = None
        elif members:
            print_rows(title, [], console=console, file=file)
        for row in members:
            if row["status"] != STATUS_OK:
                why = row["reason"] or f"{row['wrong']} elements are wrong"
                say_lines(
                    [f"  {row['workload_title']} {row['dtype']}: {row['status']}: {why}"], console=console, file=file
                )
        legend.update(dict.fromkeys(_legend(timed)))
    say_lines(list(legend), console=console, file=file)


def _rows(frame: pd.DataFrame) -> list[Row]:
    return [_row({str(key): value for key, value in row.items()}) for row in frame.to_dict("records")]


def _row(row: Row) -> Row:
    found = {key: (None if isinstance(value, float) and value != value else value) for key, value in row.items()}
    found["interval_level"] = found.get("interval_level") or 0
    workload = found.get("workload") or {}
    found["counts"] = workload.get("counts", "exchanged")
    found["algorithm"] = str(found["algorithm"]).removeprefix("own:")
    tokens = found.get("tokens")
    found["workload_title"] = f"{found['algorithm']}" + (f" {int(tokens)} tokens {found['routing']}" if tokens else "")
    return found


def _columns(rows: list[Row], phases: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """What all rows share, for the title, and the columns."""
    shared, factors = [], []
    for name, heading in _FACTORS.items():
        values = [row.get(name) for row in rows]
        if len({str(value) for value in values}) > 1:
            factors.append((heading, [str(value) for value in values]))
        elif name in ("ranks", "nodes"):
            shared.append(f"{values[0]} {heading}" if values[0] != 1 else f"1 {heading[:-1]}")
        elif values[0] not in _UNSAID:
            shared.append(str(values[0]))
    shown = [name for name in _phase_names(rows) if not phases or set(PHASES) <= set(phases) or name in phases]
    columns = [
        ("tokens", [str(int(row["tokens"])) for row in rows]),
        *factors,
        ("time", [format_time(row["time_s"]) for row in rows]),
        ("±", [spread_of(row) or NOTHING for row in rows]),
        ("GB/s", [_rate(row["algbw_Bps"]) for row in rows]),
        ("wire", [_rate(row["busbw_Bps"]) for row in rows]),
        ("load", [_number(row["load"].get("rank_max_over_mean")) for row in rows]),
        *((name, [_time(row["phases"].get(name)) for row in rows]) for name in shown),
        ("model", [_time(row["predicted_s"]) for row in rows]),
        ("a2a", [_time(row["matched"].get("time_s")) for row in rows]),
        ("last", [_slowest(row) for row in rows]),
        ("wrong", [str(int(row["wrong"] or 0)) for row in rows]),
    ]
    return shared, [(heading, cells) for heading, cells in columns if any(cell != NOTHING for cell in cells)]


def _phase_names(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["phases"] if name != "total"))


def _legend(rows: list[Row]) -> list[str]:
    found = []
    conventions = {row["bytes_convention"] for row in rows if row["bytes_convention"]}
    if conventions:
        from commbench.moe.conventions import CONVENTIONS

        found += [f"GB/s: of {name}: {CONVENTIONS[name]}" for name in sorted(conventions)]
        found.append(
            "wire: what the busiest rank hands over or is handed, by the time; load: the most loaded rank over the mean"
        )
        found.append(
            "a2a: a plain all_to_all of as many bytes from each rank; phases and last: of the rank that was done last"
        )
    for row in rows:
        straggler = row["straggler"]
        if (
            straggler
            and "too few" not in straggler["explained"]
            and straggler["share"] > 2 / row["ranks"]
            and row["ranks"] > 2
        ):
            found.append(
                f"{row['collective']} {row['workload_title']}: rank {straggler['rank']} on {straggler['host']} is last in "
                f"{straggler['share']:.0%}: {straggler['explained']}"
            )
    errors = {row["quantise_error"] for row in rows if row["quantise_error"]}
    if errors:
        found.append(f"FP8 changes normally distributed values by {max(errors):.2%} (root mean square)")
    found += _published(rows)
    return found


def _published(rows: list[Row]) -> list[str]:
    """A line for each collective and number of tokens that others have published something of."""
    from commbench.moe.published import published_for
    from commbench.workloads import Workload

    found: dict[str, dict[str, None]] = {}
    for row in rows:
        shape = f"{row['collective']} of {int(row['tokens'])} tokens on {int(row['ranks'])} ranks in {row['dtype']}"
        for one in published_for(Workload(**row["workload"]), int(row["ranks"]), row["collective"], row["dtype"]):
            what = [format_time(one.time_s)] if one.time_s else []
            if one.bandwidth_Bps:
                of = f" of {one.convention}" if one.convention else ""
                what.append(f"{format_bandwidth(one.bandwidth_Bps)} GB/s{of}")
            text = f"{one.library} on {one.hardware} {' '.join(what)} ({one.source})"
            found.setdefault(shape, {})[text] = None
    return [f"published, {shape}: {'; '.join(texts)}" for shape, texts in found.items()]


def _rate(value: float | None) -> str:
    return format_bandwidth(value) if value else NOTHING


def _time(value: float | None) -> str:
    return format_time(value) if value else NOTHING


def _number(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else NOTHING


def _slowest(row: Row) -> str:
    return str(int(row["slowest_rank"])) if row["slowest_rank"] is not None else NOTHING


def plot_moe(frame: pd.DataFrame, path: Path) -> None:
    """Time, and bandwidth of the stated bytes, against tokens; published values of the same shape as single marks.

    PNG, SVG or PDF by the suffix of ``path``. Raises ValueError for another one and where no dispatch or combine has a
    time, OSError where the file cannot be written.
    """
    from commbench.report.figures import SUFFIXES

    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{str(path)!r} is no picture's name: end it in {', '.join(SUFFIXES)}")
    rows = _rows(frame[is_routed(frame) & (frame["status"] == STATUS_OK)])
    if not rows:
        raise ValueError("nothing to plot: no dispatch or combine has a time")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 9), sharex=True, layout="constrained")
    varying = [name for name in _FACTORS if len({str(row.get(name)) for row in rows}) > 1]
    curves: dict[str, list[Row]] = {}
    for row in rows:
        name = " ".join(str(row[one]) for one in ("collective", "backend", *varying))
        curves.setdefault(name, []).append(row)
    for name, members in curves.items():
        members.sort(key=lambda row: row["tokens"])
        tokens = [row["tokens"] for row in members]
        (line,) = above.plot(tokens, [row["time_s"] for row in members], marker="o", label=name)
        below.plot(tokens, [(row["algbw_Bps"] or 0) / 1e9 for row in members], marker="o", color=line.get_color())
        predicted = [(row["tokens"], row["predicted_s"]) for row in members if row["predicted_s"]]
        if predicted:
            above.plot(*zip(*predicted, strict=True), linestyle=":", color=line.get_color())
        for row in members:
            _mark_published(row, above, below, line.get_color())
    above.set(xscale="log", yscale="log", ylabel="time of an operation, s (dotted: predicted)")
    conventions = sorted({row["bytes_convention"] for row in rows if row["bytes_convention"]})
    below.set(xlabel="tokens of a rank", ylabel=f"GB/s of {' or '.join(conventions)}", ylim=(0, None))
    above.legend(fontsize="small")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _mark_published(row: Row, above: Any, below: Any, color: str) -> None:
    from commbench.moe.published import published_for
    from commbench.workloads import Workload

    for one in published_for(Workload(**row["workload"]), int(row["ranks"]), row["collective"], row["dtype"]):
        name = f"{one.library}, {one.hardware}"
        if one.time_s:
            above.plot([row["tokens"]], [one.time_s], marker="x", color=color)
            above.annotate(name, (row["tokens"], one.time_s), fontsize="x-small")
        if one.bandwidth_Bps and one.convention == row["bytes_convention"]:
            below.plot([row["tokens"]], [one.bandwidth_Bps / 1e9], marker="x", color=color)
            below.annotate(name, (row["tokens"], one.bandwidth_Bps / 1e9), fontsize="x-small")
