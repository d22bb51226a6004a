"""Dispatch and combine as a picture: bandwidth and time against tokens, beside what others published of the same shapes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commbench.records import STATUS_OK
from commbench.report.figures import COLOURS, STYLE, SUFFIXES, scale_y, short_time, words
from commbench.report.moe import FACTORS, rows_of
from commbench.report.moe_published import shapes
from commbench.units import format_size

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]
_MARKS = ("D", "^", "v", "P", "X", "*", "<", ">", "p", "h", "8", "d")  # of published values; measured ones are dots
_PREDICTED: dict[str, Any] = {"linestyle": ":", "linewidth": 1.1}
_PLAIN: dict[str, Any] = {"linestyle": (0, (6, 2)), "linewidth": 0.9, "alpha": 0.8}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Curve:
    name: str
    colour: str
    rows: list[Row]

    def points(self, column: str) -> tuple[list[int], list[float]]:
        known = [(int(row["tokens"]), float(row[column])) for row in self.rows if row[column]]
        return [tokens for tokens, _ in known], [value for _, value in known]


def plot_moe(frame: pd.DataFrame, file: str | os.PathLike[str]) -> None:
    """Draw points, or cases from ``commbench.summarise``, into ``file``: PNG, SVG or PDF by its suffix.

    A row for dispatch and one for combine: on the left the bandwidth of the bytes that are named, on the right the time;
    both against tokens, all axes logarithmic. Dotted: predicted; dashed: a plain all_to_all of as many bytes. Single marks:
    values that others published of the same shape, with their hardware. Raises ValueError for another suffix and where
    nothing has a time, OSError where the file cannot be written.
    """
    path = Path(file)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{os.fspath(file)!r} is no picture's name: end it in {', '.join(SUFFIXES)}")
    rows = [row for row in rows_of(frame) if row["status"] == STATUS_OK and row["time_s"]]
    if not rows:
        raise ValueError("nothing to plot: no dispatch or combine has a time")

    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        names = list(dict.fromkeys(row["collective"] for row in rows))
        figure = Figure(figsize=(11, 3.3 * len(names) + 1.9), dpi=150)
        panels = figure.subplots(len(names), 2, squeeze=False, sharex="row")
        curves = _curves(rows)
        marks: dict[str, str] = {}
        for (left, right), name in zip(panels, names, strict=True):
            here = [row for row in rows if row["collective"] == name]
            lines = [one for one in curves if one.rows[0]["collective"] == name]
            _draw(left, right, name, lines)
            _mark(left, right, lines, marks)
            _scale((left, right), [int(row["tokens"]) for row in here])
        for panel in panels[-1]:
            panel.set_xlabel("tokens of a rank")
        _add_heading(figure, rows)
        _add_legend(figure, curves, marks)
        figure.savefig(path, metadata=SUFFIXES[path.suffix.lower()])


def _curves(rows: Sequence[Row]) -> list[_Curve]:
    varying = [name for name in FACTORS if len({row[name] for row in rows}) > 1]
    several = len({row["run_id"] for row in rows}) > 1
    colours: dict[str, str] = {}
    found: dict[tuple[str, str], _Curve] = {}
    for row in rows:
        what = [
            str(row["backend"]),
            *(str(row[name]) for name in varying if row[name]),
            *[str(row["run_id"])] * several,
        ]
        name = words(" ".join(what))
        colour = colours.setdefault(name, COLOURS[len(colours) % len(COLOURS)])
        found.setdefault((row["collective"], name), _Curve(name=name, colour=colour, rows=[])).rows.append(row)
    return list(found.values())


def _draw(left: Axes, right: Axes, name: str, curves: Sequence[_Curve]) -> None:
    conventions: dict[str, None] = {}
    for curve in curves:
        look: dict[str, Any] = {"color": curve.colour, "marker": "o", "markersize": 4.5, "linewidth": 1.4}
        tokens, rates = curve.points("algbw_Bps")
        left.plot(tokens, [rate / 1e9 for rate in rates], **look)
        right.plot(*curve.points("time_s"), **look)
        right.plot(*curve.points("predicted_s"), color=curve.colour, **_PREDICTED)
        plain = [(int(row["tokens"]), row["matched"]["time_s"]) for row in curve.rows if row["matched"]]
        right.plot([tokens for tokens, _ in plain], [time for _, time in plain], color=curve.colour, **_PLAIN)
        low, high = curve.points("time_lo_s"), curve.points("time_hi_s")
        if low[0] == high[0]:
            right.fill_between(low[0], low[1], high[1], color=curve.colour, alpha=0.18, linewidth=0)
        conventions.update(dict.fromkeys(row["bytes_convention"] for row in curve.rows if row["bytes_convention"]))
    left.set_title(f"{words(name)}: GB/s of {words(' or '.join(conventions)) or 'no convention'}")
    right.set_title(f"{words(name)}: time")


def _mark(left: Axes, right: Axes, curves: Sequence[_Curve], marks: dict[str, str]) -> None:
    """Published values, in the colour of the first curve of their shape; ``marks`` gathers which mark is whose."""
    colours = {id(row): curve.colour for curve in curves for row in curve.rows}
    for shape in shapes([row for curve in curves for row in curve.rows]):
        counted = {row["bytes_convention"] for row in shape.rows}
        for one in shape.published:
            time, same = one.time_s, one.bandwidth_Bps is not None and one.convention in counted
            if not time and not same:
                continue
            name = words(f"{one.library}, {one.hardware}")
            look: dict[str, Any] = {
                "marker": marks.setdefault(name, _MARKS[len(marks) % len(_MARKS)]), "linestyle": "", "fillstyle": "none",
                "color": colours[id(shape.rows[0])], "markersize": 6,
            }  # fmt: skip
            if time:
                right.plot([shape.tokens], [time], **look)
            if same and one.bandwidth_Bps is not None:
                left.plot([shape.tokens], [one.bandwidth_Bps / 1e9], **look)


def _scale(panels: Sequence[Axes], tokens: Sequence[int]) -> None:
    different = sorted(set(tokens))
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_xticks(different[:: max(1, -(-len(different) // 10))])
        panel.xaxis.set_major_formatter(lambda value, _: format_size(max(1, round(value))))
        panel.minorticks_off()
        if len(different) == 1:
            panel.set_xlim(different[0] / 2, different[0] * 2)
        scale_y(panel)
    panels[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panels[1].yaxis.set_major_formatter(lambda value, _: short_time(value))


def _add_heading(figure: Figure, rows: Sequence[Row]) -> None:
    first = rows[0]
    labels = [words(text) for text in dict.fromkeys(row["label"] for row in rows) if text]
    same = [
        name for name in FACTORS if len({row[name] for row in rows}) == 1 and name not in ("ranks", "nodes", "counts")
    ]
    what = [f"hidden {int(first['hidden'])}, top {int(first['topk'])} of {int(first['experts'])} experts"]
    what.append(f"{first['ranks']} ranks on {first['nodes']} host" + "s" * (first["nodes"] != 1))
    what += [words(first[name]) for name in same if first[name] not in ("", "eager", "library")]
    height = figure.get_figheight()
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - 0.6 / height))
    title = ", ".join(labels[:3]) or "Dispatch and combine of experts"
    figure.text(0.01, 1 - 0.1 / height, title, va="top", fontsize=13, fontweight="bold")
    figure.text(0.01, 1 - 0.36 / height, ", ".join(what), va="top", color="#505050")


def _add_legend(figure: Figure, curves: Sequence[_Curve], marks: dict[str, str]) -> None:
    from matplotlib.lines import Line2D

    handles = {one.name: Line2D([], [], color=one.colour, marker="o", markersize=5) for one in curves}
    rows = [row for curve in curves for row in curve.rows]
    if any(row["predicted_s"] for row in rows):
        handles["predicted"] = Line2D([], [], color="#606060", **_PREDICTED)
    if any(row["matched"] for row in rows):
        handles["plain all_to_all of as many bytes"] = Line2D([], [], color="#606060", **_PLAIN)
    for name, mark in marks.items():
        handles[f"published: {name}"] = Line2D([], [], color="#404040", marker=mark, fillstyle="none", linestyle="")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(3, len(handles)), fontsize=8)
