"""Results read into pandas: one row a point, one row a case over launches, and what a run's directory says of it."""

from __future__ import annotations

import glob
import itertools
import json
import os
import types
import typing
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from commbench.records import (
    COLUMNS,
    END,
    HOSTS,
    LAUNCHES,
    MANIFEST,
    POINTS,
    SAMPLES,
    SCHEMA,
    STATUS_FAILED,
    STATUS_OK,
    STATUS_SKIPPED,
    STATUS_WRONG,
    Point,
)
from commbench.stats.summary import LEVEL, OF_LAUNCHES, OF_PASSES, median_ranks

Source = str | os.PathLike[str]

# A line without one of these is no point: nothing can be said about what it measured.
_REQUIRED = frozenset(f.name for f in fields(Point) if f.default is MISSING and f.default_factory is MISSING)
_TYPES: dict[str, Any] = typing.get_type_hints(Point)
_DEFAULTS = {f.name: f.default for f in fields(Point) if f.default is not MISSING and f.default is not None}
_STRINGS = pd.StringDtype(na_value=np.nan)
_BLOCK = 200

# What makes two points the same case.
CASE = (
    "case_id", "collective", "backend", "algorithm", "group", "ranks", "nodes", "dtype", "reduce_op",
    "placement", "bytes", "requested_bytes", "timing", "execution", "cache", "buffers", "root",
    "variant",
)  # fmt: skip
_SEVERITY = {STATUS_OK: 0, STATUS_SKIPPED: 1, STATUS_FAILED: 2, STATUS_WRONG: 3}
_MODELS = {"ring_s": "ring_busbw_Bps", "tree_s": "tree_busbw_Bps", "bound_s": "efficiency"}
_MEDIANS = ("predicted_s", "wire_bytes", "nccl_estimate_s")
_TOTALS = ("wrong", "verified", "samples", "discarded")
_FLAGS = ("late_starts", "beyond_bound", "oversubscribed", "host_bound")
_INT64_MAX = np.iinfo(np.int64).max


def load(source: Source | Sequence[Source]) -> pd.DataFrame:
    """Every point below ``source``, one row a point, in the order of the files' paths and then of their lines.

    ``source`` is a results tree, a run's directory, a launch, a ``points.jsonl``, a glob of any of these, or a list.
    The columns of ``commbench.records.COLUMNS`` come first, all of them in that order, then columns that this version
    does not know. What a line does not say is null, or Point's own default where a point always has a value. Counts
    that may be missing are Int64, flags boolean, texts str, ``predictions`` and ``backend_settings`` dictionaries.

    A last line that a crash cut short is dropped; a garbled line anywhere else is dropped with a warning that names
    file and line. Raises ValueError in one line where there are no points files, or where a later version of
    commbench has written them.
    """
    return from_points(row for path in find_points(source) for row in _read_points(path))


def from_points(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Stored points as the frame that ``load`` describes."""
    found, count = _by_column(rows)
    nothing = [None] * count
    columns: dict[str, Any] = {name: _typed(name, found.pop(name, nothing)) for name in COLUMNS}
    columns |= {name: pd.Series(values, dtype=object).infer_objects() for name, values in found.items()}
    return pd.DataFrame(columns)


def _by_column(rows: Iterable[dict[str, Any]]) -> tuple[dict[str, list[Any]], int]:
    """The rows' values by key, None where a row lacks one, and how many rows there are.

    Done a block at a time: a hundred thousand live dictionaries cost half a gigabyte and double the time of reading,
    which the garbage collector spends on visiting them.
    """
    columns: dict[str, list[Any]] = {}
    count = 0
    remaining = iter(rows)
    while block := list(itertools.islice(remaining, _BLOCK)):
        names: dict[str, Any] = {}
        for row in block:
            names.update(row)
        for name in names:
            columns.setdefault(name, [None] * count)
        for name, values in columns.items():
            values.extend([row.get(name) for row in block])
        count += len(block)
    return columns, count


def find_points(source: Source | Sequence[Source]) -> list[Path]:
    """The points files below ``source``, each once, launch 10 after launch 2. Raises ValueError if there are none."""
    sources = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    found: dict[Path, None] = {}
    for item in sources:
        here = sorted(_points_below(os.fspath(item)), key=_natural)
        if not here:
            raise ValueError(f"{os.fspath(item)!r} holds no {POINTS}: name a results tree, a run, a launch or a file")
        found.update(dict.fromkeys(here))
    if not found:
        raise ValueError("no results were named")
    return list(found)


def _points_below(text: str) -> Iterator[Path]:
    path = Path(text)
    if path.is_file():
        yield path
    elif path.is_dir():
        for folder, subfolders, files in os.walk(path):
            subfolders[:] = [name for name in subfolders if name not in (SAMPLES, HOSTS)]
            if POINTS in files:
                yield Path(folder, POINTS)
    elif glob.has_magic(text):
        for match in glob.iglob(text, recursive=True):
            # A wildcard also meets the manifests beside the points.
            if os.path.isdir(match) or match.endswith(".jsonl"):
                yield from _points_below(match)
    else:
        raise ValueError(f"{text!r} does not exist")


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part) if part.isdecimal() else -1, part) for part in path.parts]


def _read_points(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    last = max((number for number, line in enumerate(lines) if line.strip()), default=-1)
    for start in range(0, last + 1, _BLOCK):
        stop = min(start + _BLOCK, last + 1)
        for number, row in enumerate(_parse(lines[start:stop]), start):
            if row is not None:
                yield _checked(row, f"{path}:{number + 1}")
            elif number < last and lines[number].strip():
                warnings.warn(f"{path}:{number + 1}: not a point, dropped", stacklevel=2)


def _parse(lines: list[bytes]) -> list[dict[str, Any] | None]:
    """What each line holds, None where it is no point."""
    try:
        # One call for all shares the keys between the rows, which halves the time of everything done with them.
        found = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        found = []
    if len(found) != len(lines):
        found = [_parse_line(line) for line in lines]
    return [row if isinstance(row, dict) and row.keys() >= _REQUIRED else None for row in found]


def _parse_line(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _checked(row: dict[str, Any], where: str) -> dict[str, Any]:
    schema = row.get("schema", SCHEMA)
    if not isinstance(schema, int) or schema > SCHEMA:
        raise ValueError(f"{where}: schema {schema!r} is not one that this commbench reads (1 to {SCHEMA}): upgrade it")
    return row


def _typed(name: str, found: list[Any]) -> Any:
    """A column in the type that Point gives it; a value of another type is null."""
    kind = _TYPES[name]
    values = pd.Series(found, dtype=object)
    default = _DEFAULTS.get(name)
    if default is not None:
        values = values.where(values.notna(), default)
    whole = typing.get_origin(kind)
    if whole in (dict, list):
        return pd.Series([value if isinstance(value, whole) else whole() for value in values], dtype=object)
    optional = isinstance(kind, types.UnionType)
    base = next(part for part in typing.get_args(kind) if part is not type(None)) if optional else kind
    if base is str:
        return values.astype(_STRINGS)
    if base is bool:
        return pd.array([value if isinstance(value, bool) else None for value in values], dtype="boolean")
    numbers = pd.to_numeric(values, errors="coerce")
    return _integers(numbers, optional) if base is int else numbers.astype("float64").replace([np.inf, -np.inf], np.nan)


def _integers(numbers: pd.Series[Any], optional: bool) -> pd.Series[Any]:
    whole = numbers.where(numbers.isna() | (numbers % 1 == 0))
    if whole.dtype.kind == "u" and whole.max() > _INT64_MAX:  # a seed of 64 random bits
        return whole
    return whole.astype("int64") if not optional and whole.notna().all() else whole.astype("Int64")


def summarise(frame: pd.DataFrame, *, by: Sequence[str] = (), level: float = LEVEL) -> pd.DataFrame:
    """One row a case and variant over launches: the columns of ``load``, then ``launches``, how many launches tried it,
    and ``launch_cv``, the standard deviation of the launches' medians over their mean, null for a single one.

    ``time_s`` is the median of the launches' medians; a soak's passes reduce to their launch's median first. With
    two or more timed launches the interval is that of the launches' medians (``interval_of`` is "launches"); with one
    launch of several passes that of the passes' medians; else the point's own. ``ring_s``, ``tree_s`` and ``bound_s``
    are medians over the launches, as are ``predicted_s``, ``nccl_estimate_s`` and ``wire_bytes``; bandwidths, the
    efficiency and ``prediction_error`` follow these times. ``status`` and ``reason`` are those of the worst point, ``wrong``, ``verified``, ``samples`` and ``discarded`` are totals, a flag is set where
    any point sets it, and distinct notes are joined. All other columns are those of the point whose median is nearest
    to ``time_s``. Only points that are ok are timed, unless the case has none. ``by`` names further columns to keep
    apart, such as run_id, which are otherwise pooled.
    Rows come in the order in which the cases first appear.
    """
    frame = frame.reset_index(drop=True)
    if frame.empty:
        return frame.assign(launches=pd.Series(dtype="int64"), launch_cv=pd.Series(dtype="float64"))
    case = frame.groupby([*by, *CASE], sort=False, dropna=False).ngroup().rename("case")
    launch = frame.groupby(["run_id", "launch"], sort=False, dropna=False).ngroup().rename("launch")
    used = _timed(frame, case)
    times = pd.DataFrame({"case": case[used], "launch": launch[used], "time": frame["time_s"][used]})
    medians = times.groupby(["case", "launch"], sort=False)["time"].median().reset_index()
    of_case = medians.groupby("case")["time"]
    middle = of_case.median()

    severity = frame["status"].map(_SEVERITY).fillna(_SEVERITY[STATUS_FAILED])
    worst = severity.groupby(case).idxmax()
    distance = (times["time"] - times["case"].map(middle)).abs()
    row = worst.copy()
    row.update(distance.groupby(times["case"]).idxmin())

    result = frame.loc[row.astype("int64")].reset_index(drop=True)
    result["status"], result["reason"] = (frame.loc[worst, name].array for name in ("status", "reason"))
    _follow_time(result, middle)
    _follow_models(result, frame[list(_MODELS)].groupby(case).median())
    for name in _MEDIANS:
        result[name] = frame[name].groupby(case).median().array
    result["prediction_error"] = result["time_s"] / result["predicted_s"] - 1
    _set_intervals(result, times, medians, level)
    for name in _TOTALS:
        result[name] = frame[name].groupby(case).sum(min_count=1).array
    for name in _FLAGS:
        result[name] = frame[name].groupby(case).max().array
    for name in ("tainted", "note"):
        result[name] = pd.Series(_joined(frame[name], case), dtype=_STRINGS).reindex(result.index)
    result["launches"] = launch.groupby(case).nunique().array
    result["launch_cv"] = (of_case.std() / of_case.mean()).reindex(result.index).array
    return result


def over_passes(frame: pd.DataFrame) -> pd.DataFrame:
    """One row for each run's case that a soak measured in two passes or more: collective, backend, bytes and timing,
    then ``passes`` and the ``first_s``, ``last_s``, ``least_s`` and ``greatest_s`` of the passes' median times."""
    keys = ["run_id", "case_id", "collective", "backend", "bytes", "timing"]
    timed = frame[frame["time_s"].notna()]
    times = timed.groupby([*keys, "pass_index"], sort=False)["time_s"].median().groupby(keys, sort=False)
    found = times.agg(passes="count", first_s="first", last_s="last", least_s="min", greatest_s="max").reset_index()
    return found[found["passes"] > 1]


def _timed(frame: pd.DataFrame, case: pd.Series[Any]) -> pd.Series[Any]:
    """Which points a case's time is made of."""
    has_time = frame["time_s"].notna()
    ok = has_time & (frame["status"] == STATUS_OK)
    return ok | (has_time & ~ok.groupby(case).transform("any"))


def _follow_time(result: pd.DataFrame, middle: pd.Series[Any]) -> None:
    time = middle.reindex(result.index)
    factor = result["time_s"] / time
    for name in ("algbw_Bps", "busbw_Bps", "efficiency"):
        # Wrong data in any launch leaves no bandwidth to speak of.
        result[name] = (result[name] * factor).mask(result["status"] == STATUS_WRONG)
    result["time_s"] = time


def _follow_models(result: pd.DataFrame, middle: pd.DataFrame) -> None:
    """The launches' median of every model: each launch calibrates the links anew."""
    for name, rate in _MODELS.items():
        change = (result[name] / middle[name].array).fillna(1.0)
        result[rate] = result[rate] / change if name == "bound_s" else result[rate] * change
        result[name] = middle[name].array


def _set_intervals(result: pd.DataFrame, times: pd.DataFrame, medians: pd.DataFrame, level: float) -> None:
    launches = medians.groupby("case").size()
    over_launches = launches.index[launches > 1]
    sample = pd.concat(
        [medians[medians["case"].isin(over_launches)], times[~times["case"].isin(over_launches)]], ignore_index=True
    ).sort_values(["case", "time"])
    counts = sample.groupby("case").size()
    first = counts.cumsum() - counts
    several = counts[counts > 1]
    ranks = [median_ranks(int(count), level) for count in several]
    ordered = sample["time"].to_numpy()
    for name, position in (("time_lo_s", [r.lo for r in ranks]), ("time_hi_s", [r.hi for r in ranks])):
        result.loc[several.index, name] = ordered[first[several.index].to_numpy() + np.array(position, dtype=int) - 1]
    result.loc[several.index, "interval_level"] = [r.level for r in ranks]
    result.loc[several.index, "interval_of"] = np.where(
        several.index.isin(over_launches), OF_LAUNCHES, OF_PASSES
    ).astype(object)


def _joined(texts: pd.Series[Any], case: pd.Series[Any]) -> dict[int, str]:
    found: dict[int, dict[str, None]] = {}
    said = texts.notna()
    for index, text in zip(case[said], texts[said], strict=True):
        found.setdefault(int(index), {}).setdefault(str(text))
    return {index: "; ".join(distinct) for index, distinct in found.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """What a run's directory says of the run as a whole. ``end`` is None where end.json is missing or cut short."""

    path: Path
    manifest: dict[str, Any]
    end: dict[str, Any] | None

    @property
    def run_id(self) -> str:
        return str(self.manifest.get("run_id") or self.path.name)

    @property
    def outcome(self) -> str:
        """ok, failed, timeout, interrupted, or crashed where the run never wrote how it ended."""
        return "crashed" if self.end is None else str(self.end.get("status", "ok"))

    @property
    def ending(self) -> str:
        """How the run ended, for a person."""
        if self.end is None:
            return f"crashed: no {END} (or still running); the points that finished count"
        reason = self.end.get("reason")
        return f"{self.outcome}: {reason}" if reason else self.outcome


def read_run(run_dir: Source) -> RunInfo:
    """The manifest and the end of a run. Raises ValueError if the directory is no run's."""
    path = Path(run_dir)
    if not _is_run(path):
        raise ValueError(f"{os.fspath(run_dir)!r} is not a run's directory: it has neither {MANIFEST} nor {LAUNCHES}/")
    return RunInfo(path=path, manifest=_read_object(path / MANIFEST) or {}, end=_read_object(path / END))


def taint_line(run_dir: Source, points: Iterable[str | None]) -> str | None:
    """What must be known before a run is compared with others: how many ``points`` (their ``tainted``) say why not, and
    what the launches' manifests say of the hosts; None where there is nothing."""
    told = [isinstance(text, str) and bool(text) for text in points]
    parts = [f"{sum(told)} of {len(told)} points"] if any(told) else []
    files = sorted(Path(run_dir).glob(f"{LAUNCHES}/*/{MANIFEST}"), key=_natural)
    found = [text for file in files for text in (_read_object(file) or {}).get("tainted") or ()]
    return f"tainted: {'; '.join([*parts, *dict.fromkeys(found)])}" if parts or found else None


def read_launches(run_dir: Source) -> dict[int, dict[str, Any]]:
    """What a run's directory says of each launch, by its number; a launch without a readable manifest is left out."""
    found = {}
    for folder in Path(run_dir, LAUNCHES).glob("*"):
        manifest = _read_object(folder / MANIFEST)
        if manifest is not None and folder.name.isdecimal():
            found[int(folder.name)] = manifest
    return dict(sorted(found.items()))


def find_run(results_root: Source, which: str | None = None) -> Path:
    """A run's directory: the newest below ``results_root``, or the one that ``which`` names.

    ``which`` is the beginning of a run_id, or the path of a run or of something inside it, from here or from
    ``results_root``. Raises ValueError in one line where nothing or more than one run fits.
    """
    root = Path(results_root)
    runs = sorted((path for path in root.glob("*/*") if _is_run(path)), key=lambda path: path.parts[-2:])
    if which is None:
        dated = [path for path in runs if path.parts[-2][:1].isdigit()] or runs
        if not dated:
            raise ValueError(f"{os.fspath(root)!r} holds no runs: commbench run makes one")
        # A calibration is a run too, without points.
        return next((path for path in reversed(dated) if _has_points(path)), dated[-1])
    for start in (Path(which), root / which):
        for folder in (start, *start.parents[:3]) if start.exists() else ():
            if _is_run(folder):
                return folder
    fitting = [path for path in runs if path.name.startswith(which)]
    exact = [path for path in fitting if path.name == which]
    if len(exact or fitting) == 1:
        return (exact or fitting)[0]
    if fitting:
        names = ", ".join(path.name for path in fitting[:5]) + (", ..." if len(fitting) > 5 else "")
        raise ValueError(f"{which!r} is the beginning of {len(fitting)} runs ({names}): write more of it")
    newest = f"; the newest run is {runs[-1].name}" if runs else ""
    raise ValueError(f"no run below {os.fspath(root)!r} is called {which!r}{newest}")


def _has_points(run: Path) -> bool:
    return any(file.stat().st_size for file in run.glob(f"{LAUNCHES}/*/{POINTS}"))


def _is_run(path: Path) -> bool:
    # A launch has a manifest too, but lies in a folder of launches.
    return (path / LAUNCHES).is_dir() or ((path / MANIFEST).is_file() and path.parent.name != LAUNCHES)


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
