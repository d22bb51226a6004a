"""``commbench show``: a stored run again, as tables, a picture or a CSV file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commbench.cli.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

    from commbench.report.frame import RunInfo


def show(
    run: Annotated[
        str | None, typer.Argument(help="The beginning of a run's id, or its directory. The newest run if left out.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Where the runs are.")] = Path("results"),
    collective: Annotated[str | None, typer.Option(help="Only these, such as all_reduce,all_gather.")] = None,
    backend: Annotated[str | None, typer.Option(help="Only these, such as gloo,mpi.")] = None,
    timing: Annotated[str | None, typer.Option(help="Only isolated or only streamed.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw bandwidth and time into a .png, .svg or .pdf file.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every point and column, in SI units, as CSV.")
    ] = None,
) -> int:
    """Print a stored run's tables again, and say how it ended.

    Several launches of a case become one row, with the interval over launches.

    \b
    commbench show                                   the newest run
    commbench show 20250102T0304 --timing streamed   one run, by the beginning of its id
    commbench show --plot busbw.png --csv points.csv
    """
    from commbench.report.frame import find_run, read_run, taint_line
    from commbench.report.launches import print_launches
    from commbench.report.moe import is_routed, print_moe
    from commbench.report.tables import plain, print_tables

    try:
        info = read_run(find_run(results, run))
        frame = points_of(info)
        filters = {"collective": collective, "backend": backend, "timing": timing}
        chosen = _choose(frame, {name: text for name, text in filters.items() if text is not None})
        if plot is not None:
            from commbench.report.figures import plot as draw
            from commbench.report.moe_figure import plot_moe

            (plot_moe if is_routed(chosen).all() and len(chosen) else draw)(chosen, plot)
        if csv is not None:
            _write_csv(chosen, csv)
    except ValueError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        # pandas raises OSError with a sentence and nothing else.
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise UsageError(f"{what}: choose another place") from None
    routed = is_routed(chosen)
    if routed.any():
        print_moe(chosen[routed])
    if not routed.all():
        print_tables(chosen[~routed])
    if len(chosen):
        print_launches(chosen, info.path)
    print(plain(_headline(info, frame)))
    if (line := taint_line(info.path, frame["tainted"])) is not None:
        print(plain(line))
    if (line := _clock_line(info)) is not None:
        print(plain(line))
    print(f"results: {info.path}")
    for file in (plot, csv):
        if file is not None:
            print(f"written: {file}")
    return 0


def points_of(info: RunInfo) -> pd.DataFrame:
    """The run's points; none where it ended before the first."""
    import sys
    import warnings

    from commbench.records import POINTS
    from commbench.report.frame import from_points, load

    if not any(info.path.rglob(POINTS)):
        return from_points([])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        frame = load(info.path)
    for warning in caught:
        print(f"commbench: warning: {warning.message}", file=sys.stderr)
    return frame


def _choose(frame: pd.DataFrame, filters: dict[str, str]) -> pd.DataFrame:
    from commbench.registry import unknown_name

    for column, text in filters.items():
        names = [name.strip() for name in text.split(",") if name.strip()]
        known = list(dict.fromkeys(frame[column]))
        for name in names:
            if name not in known:
                raise ValueError(f"{unknown_name(column, name, known or ['none'])} in this run")
        frame = frame[frame[column].isin(names)]
    return frame


def _write_csv(frame: pd.DataFrame, file: Path) -> None:
    import json

    def in_one_cell(value: Any) -> Any:
        return json.dumps(value, sort_keys=True) if isinstance(value, (dict, list)) else value

    flat = frame.copy()
    for name in flat.columns[flat.dtypes == object]:
        flat[name] = flat[name].map(in_one_cell)
    flat.to_csv(file, index=False)


def _clock_line(info: RunInfo) -> str | None:
    """What is to be said of the hosts' clocks, where they did not go as they were said to."""
    from commbench.report.frame import read_launches

    clocks = [one for launch in read_launches(info.path).values() for one in launch.get("clock", {}).values()]
    notes = [one["note"] for one in clocks if one.get("note")]
    return notes[0] + (f" (and in {len(notes) - 1} more launches)" if len(notes) > 1 else "") if notes else None


def _headline(info: RunInfo, frame: pd.DataFrame) -> str:
    counts = frame["status"].value_counts()
    parts = [f"{count} {status}" for status, count in counts.items()]
    points = f"{len(frame)} point" + "s" * (len(frame) != 1) + (f" ({', '.join(parts)})" if parts else "")
    label = f" {info.manifest['label']!r}" if info.manifest.get("label") else ""
    return f"run {info.run_id}{label} ended {info.ending}; {points}"
