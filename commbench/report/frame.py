"""A run's directory read into pandas: one row a point, and one row a case over launches."""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
import types
import typing
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from commbench.records import COLUMNS, HOSTS, POINTS, SAMPLES, SCHEMA, Point

Source = str | os.PathLike[str]

# A line without one of these is no point: nothing can be said about what it measured.
_REQUIRED = frozenset(f.name for f in fields(Point) if f.default is MISSING and f.default_factory is MISSING)
_TYPES: dict[str, Any] = typing.get_type_hints(Point)
_DEFAULTS = {f.name: f.default for f in fields(Point) if f.default is not MISSING and f.default is not None}
_STRINGS = pd.StringDtype(na_value=np.nan)
_BLOCK = 200
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
    return to_frame(row for path in find_points(source) for row in _read_points(path))


def to_frame(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
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
    """The points files below ``source``, each once, launch 10 after launch 2. Raises ValueError where there are none."""
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
                warnings.warn(f"{path}:{number + 1}: not a point, dropped", stacklevel=5)


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
    if typing.get_origin(kind) is dict:
        return pd.Series([value if isinstance(value, dict) else {} for value in values], dtype=object)
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
