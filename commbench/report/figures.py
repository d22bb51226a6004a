"""Results as a picture: bandwidth and time against message size, beside what the models allow."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commbench.records import STATUS_WRONG
from commbench.report.frame import summarise
from commbench.report.tables import IDENTITY, plain
from commbench.units import format_size

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}  # no dates: equal data, equal file
MOST_SIZES = 10  # labelled on an axis

# Okabe and Ito's palette, told apart with any colour vision; without its yellow, which is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = {"isolated": ("o", "full"), "streamed": ("s", "none")}
_MODELS: dict[str, tuple[str, Any]] = {
    "ring_s": ("ring model", (0, (6, 2))),
    "tree_s": ("tree model", (0, (6, 2, 1, 2))),
    "bound_s": ("bound", ":"),
}
WRONG: dict[str, Any] = {"linestyle": "", "marker": "x", "markersize": 8, "color": "red", "zorder": 4}
STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.grid": True,
    "axes.axisbelow": True, "grid.color": "#e4e4e4", "grid.linewidth": 0.6, "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": "#808080", "xtick.color": "#404040", "ytick.color": "#404040",
    "legend.frameon": False, "svg.hashsalt": "commbench",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Series:
    """One line: its cases with sizes ascending, and its colour."""

    name: str
    colour: str
    timing: str
    rows: pd.DataFrame

    @property
    def label(self) -> str:
        return f"{self.name}, {self.timing}"


def plot(frame: pd.DataFrame, file: str | os.PathLike[str]) -> None:
    """Draw points, or cases from ``commbench.summarise``, into ``file``: PNG, SVG or PDF by its suffix.

    A row a collective: bus bandwidth (GB/s) on the left, time on the right, both against message size and all axes
    logarithmic, because a linear one flattens every small message onto zero. A line a backend and timing, with the
    interval of the median as a band; the models of the timing drawn first in thin lines of the backend's colour, or in
    grey where all backends share them. Wrong data shows as a red cross in the time. Raises ValueError for another
    suffix and for a frame that holds no time of a sized message, OSError where the file cannot be written.
    """
    path = Path(file)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{os.fspath(file)!r} is no picture's name: end it in {', '.join(SUFFIXES)}")
    cases = frame if "launches" in frame else summarise(frame, by=("run_id",))
    drawn = cases[(cases["bytes"] > 0) & (cases["time_s"] > 0)]
    if drawn.empty:
        raise ValueError("nothing to plot: no message with a size has a time")

    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        names = list(dict.fromkeys(drawn["collective"]))
        figure = Figure(figsize=(11, 2.9 * len(names) + 1.6), dpi=150)
        panels = figure.subplots(len(names), 2, squeeze=False, sharex="row")
        everything = list(_series(drawn))
        for (left, right), name in zip(panels, names, strict=True):
            here = [series for series in everything if series.rows["collective"].iloc[0] == name]
            _draw(left, right, words(name), here)
        for panel in panels[-1]:
            panel.set_xlabel("message size (bytes; K, M, G are powers of 1024)")
        _add_heading(figure, drawn)
        _add_legend(figure, everything)
        figure.savefig(path, metadata=SUFFIXES[path.suffix.lower()])


def _series(cases: pd.DataFrame) -> Iterator[_Series]:
    varying = [name for name in IDENTITY if _varies(cases, name)]
    colours: dict[str, str] = {}
    for _, rows in cases.groupby(["collective", "backend", "timing", *varying], sort=False, dropna=False):
        first = rows.iloc[0]
        settings = [f"{IDENTITY[name]} {first[name]}" for name in varying if first[name] == first[name]]
        name = words(" ".join([first["backend"], *settings]))
        colour = colours.setdefault(name, COLOURS[len(colours) % len(COLOURS)])
        yield _Series(name=name, colour=colour, timing=str(first["timing"]), rows=rows.sort_values("bytes"))


def _varies(cases: pd.DataFrame, name: str) -> bool:
    # Collectives without a reduction have no op: that alone tells no two lines of a panel apart.
    return bool((cases.groupby(["collective", "backend"])[name].nunique() > 1).any())


def words(text: object) -> str:
    """Stored text as a picture may show it: printable, and no dollar sign begins a formula."""
    return plain(text).replace("$", r"\$")


def _draw(left: Axes, right: Axes, name: str, here: list[_Series]) -> None:
    for colour, series in _model_owners(here):
        for column, (_, dashes) in _MODELS.items():
            time = series.rows[column]
            if time.notna().any():
                look: dict[str, Any] = {
                    "color": colour,
                    "linestyle": dashes,
                    "linewidth": 0.9,
                    "alpha": 0.8,
                    "zorder": 1,
                }
                left.plot(series.rows["bytes"], _rate(series.rows, time), **look)
                right.plot(series.rows["bytes"], time, **look)
    for series in here:
        rows = series.rows
        marker, fill = _MARKERS.get(series.timing, ("^", "full"))
        look = {"color": series.colour, "marker": marker, "fillstyle": fill, "markersize": 4.5, "linewidth": 1.4}
        left.plot(rows["bytes"], _rate(rows, rows["time_s"]), **look)
        right.plot(rows["bytes"], rows["time_s"], **look)
        band: dict[str, Any] = {"color": series.colour, "alpha": 0.18, "linewidth": 0}
        left.fill_between(rows["bytes"], _rate(rows, rows["time_hi_s"]), _rate(rows, rows["time_lo_s"]), **band)
        right.fill_between(rows["bytes"], rows["time_lo_s"], rows["time_hi_s"], **band)
        wrong = rows[rows["status"] == STATUS_WRONG]
        right.plot(wrong["bytes"], wrong["time_s"], **WRONG)
    left.set_title(f"{name}: bus bandwidth (GB/s)")
    right.set_title(f"{name}: time")
    for panel in (left, right):
        _scale(panel, [size for series in here for size in series.rows["bytes"]])
    left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    right.yaxis.set_major_formatter(lambda value, _: short_time(value))


def _rate(rows: pd.DataFrame, time: pd.Series[Any]) -> pd.Series[Any]:
    """The bus bandwidth in GB/s if the operation took ``time``: the same bytes in another time."""
    return rows["busbw_Bps"] * rows["time_s"] / time / 1e9


def _model_owners(here: list[_Series]) -> list[tuple[str, _Series]]:
    """The series whose models are drawn, one a backend: those of its isolated timing where it has both.

    Models come from links and not from backends where one calibration serves all: equal curves are drawn once.
    """
    owners: dict[str, _Series] = {}
    for series in sorted(here, key=lambda one: one.timing):
        owners.setdefault(series.name, series)
    curves = {
        tuple(series.rows.set_index("bytes")[column].round(12).to_json() for column in _MODELS): series
        for series in owners.values()
    }
    if len(curves) == 1:
        return [("#606060", series) for series in curves.values()]
    return [(series.colour, series) for series in owners.values()]


def _scale(panel: Axes, sizes: list[int]) -> None:
    panel.set_xscale("log", base=2)
    first, last = math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes)))
    step = max(1, math.ceil((last - first) / (MOST_SIZES - 1)))
    panel.set_xticks([2**power for power in range(first, last + 1, step)])
    panel.xaxis.set_major_formatter(lambda value, _: format_size(round(value)))
    scale_y(panel)


def scale_y(panel: Axes) -> None:
    """Logarithmic, with a few labels however narrow the range is."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    if math.isinf(panel.dataLim.minposy):
        panel.minorticks_off()
        panel.set_yticks([])  # all data are wrong: there is no bandwidth
        return
    panel.set_yscale("log")
    panel.minorticks_off()
    low, high = panel.get_ylim()
    decades = math.log10(high / low)
    # Powers of ten alone would leave a narrow range without a label.
    if decades < 1:
        panel.yaxis.set_major_locator(MaxNLocator(5))
    elif decades < 2.5:
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))


def short_time(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale * 0.9995:
            return f"{seconds / scale:g} {unit}"
    return f"{seconds / 1e-9:g} ns"


def _add_heading(figure: Figure, cases: pd.DataFrame) -> None:
    labels = [words(text) for text in dict.fromkeys(cases["label"].dropna()) if text]
    runs = [words(text) for text in dict.fromkeys(cases["run_id"].dropna()) if text]
    ranks, hosts = span_of(cases["ranks"]), span_of(cases["nodes"])
    what = [f"{ranks} ranks on {hosts} host" + "s" * (hosts != "1")]
    for name in ("dtype", "placement"):
        if cases[name].nunique() == 1:
            what.append({"out": "out of place", "in": "in place"}.get(cases[name].iloc[0], words(cases[name].iloc[0])))
    launches = int(cases["launches"].max())
    what += [f"{launches} launches"] * (launches > 1)
    what += runs[:1] if len(runs) == 1 else [f"{len(runs)} runs"] * (len(runs) > 1)
    title = ", ".join(labels[:3]) or "Collective communication"
    height = figure.get_figheight()
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - 0.6 / height))
    figure.text(0.01, 1 - 0.1 / height, title, va="top", fontsize=13, fontweight="bold")
    figure.text(0.01, 1 - 0.36 / height, ", ".join(what), va="top", color="#505050")


def span_of(values: pd.Series[Any]) -> str:
    low, high = int(values.min()), int(values.max())
    return str(low) if low == high else f"{low} to {high}"


def _add_legend(figure: Figure, everything: list[_Series]) -> None:
    from matplotlib.lines import Line2D

    handles = {}
    for series in everything:
        marker, fill = _MARKERS.get(series.timing, ("^", "full"))
        handles[series.label] = Line2D([], [], color=series.colour, marker=marker, fillstyle=fill, markersize=5)  # type: ignore[arg-type]
    timings = dict.fromkeys(series.timing for series in everything)
    of = f" ({min(timings)})" if len(timings) > 1 else ""
    for column, (label, dashes) in _MODELS.items():
        if any(series.rows[column].notna().any() for series in everything):
            handles[label + of] = Line2D([], [], color="#606060", linestyle=dashes, linewidth=1.2)
    if any((series.rows["status"] == STATUS_WRONG).any() for series in everything):
        handles["wrong data"] = Line2D([], [], **WRONG)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)))
