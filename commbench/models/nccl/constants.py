"""The numbers of NCCL's tuner by version, in SI units. The file holds 2.18's and what each later version changed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, TypeAlias

from commbench.models.nccl.inputs import PROTOCOLS

Version: TypeAlias = tuple[int, ...]
OLDEST, NEWEST = (2, 18), (2, 30)
FIRST = (2, 18, 3)  # 2.18.1 has other tree latencies and caps
_MICRO, _GIGA = 1e-6, 1e9


def parse_version(text: str) -> Version:
    """``2.27``, ``2.27.7``, ``2.27.7+cuda12.9`` or NCCL's own number 22707 as a tuple.

    Raises ValueError for another form, and for a version outside 2.18.3 to 2.30, which the model does not cover.
    """
    words = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:[-+].*)?", text.strip())
    number = re.fullmatch(r"\d{5}", text.strip())
    if words:
        version = tuple(int(part) for part in words.groups() if part is not None)
    elif number:
        value = int(number[0])
        version = (value // 10000, value // 100 % 100, value % 100)
    else:
        raise ValueError(f"{text!r} is not an NCCL version: write it like 2.27.7")
    if not OLDEST <= version[:2] <= NEWEST or version[2:] and version[:3] < FIRST:
        raise ValueError(f"NCCL {text.strip()} is outside the tuning model, which covers 2.18.3 to 2.30")
    return version


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """One version's constants: seconds and bytes a second.

    Latencies are triples in the order of ``PROTOCOLS``; bandwidth caps have a row an architecture (Volta, Ampere,
    Hopper, Blackwell) with one value each for 1, 2 and more nodes.
    """

    base_s: dict[str, tuple[float, ...]]
    hardware_s: dict[str, dict[str, tuple[float, ...]]]
    ll_max_Bps: dict[str, tuple[float, ...]]
    ring_ll128_Bps: dict[str, tuple[float, ...]]
    tree_ll128_Bps: dict[str, tuple[float, ...]]
    tree_Bps: dict[str, tuple[float, ...]]
    nvls_tree_Bps: dict[str, tuple[float, ...]]
    nvls_efficiency: dict[str, float]
    tree_correction: dict[str, tuple[float, ...]]


@lru_cache(maxsize=1)
def _file() -> dict[str, Any]:
    text = resources.files("commbench.models.nccl").joinpath("constants.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def _key(text: str) -> Version:
    return tuple(int(part) for part in text.split("."))


@lru_cache(maxsize=32)
def constants(version: Version) -> Constants:
    """What holds at ``version``: the newest entry that is not above it."""
    flat: dict[str, Any] = {}
    for key, changes in _file()["constants"].items():
        if _key(key) <= version:
            flat.update(changes)
    tables: dict[str, dict[str, Any]] = {}
    for path, value in flat.items():
        name, _, rest = path.partition("/")
        tables.setdefault(name, {})[rest] = value
    links: dict[str, dict[str, tuple[float, ...]]] = {}
    for path, triple in tables["hardware_us"].items():
        link, _, algorithm = path.partition("/")
        links.setdefault(link, {})[algorithm] = _scaled(triple, _MICRO)
    return Constants(
        base_s={name: _scaled(triple, _MICRO) for name, triple in tables["base_us"].items()},
        hardware_s=links,
        ll_max_Bps=_rows(tables["ll_max_GBps"]),
        ring_ll128_Bps=_rows(tables["ring_ll128_GBps"]),
        tree_ll128_Bps=_rows(tables["tree_ll128_GBps"]),
        tree_Bps=_rows(tables["tree_GBps"]),
        nvls_tree_Bps=_rows(tables["nvls_tree_GBps"]),
        nvls_efficiency=dict(tables["nvls_efficiency"]),
        tree_correction={name: tuple(tables["tree_correction"][name]) for name in PROTOCOLS},
    )


def _scaled(values: list[float], unit: float) -> tuple[float, ...]:
    return tuple(value * unit for value in values)


def _rows(table: dict[str, list[float]]) -> dict[str, tuple[float, ...]]:
    return {name: _scaled(row, _GIGA) for name, row in table.items()}


@lru_cache(maxsize=128)
def speeds_Bps(cc: int, version: Version, *, inter: bool) -> tuple[float, ...]:
    """The speeds a channel may have in the graph search, fastest first, for a compute capability times ten.

    GPUs newer than a version are searched with the newest list that it has.
    """
    family = "100" if cc >= 100 else "90" if cc >= 90 else "80"
    lists = _file()["speeds_GBps"]["inter" if inter else "intra"]
    if family == "100" and version < (2, 25):
        family = "90"
    known = [values for key, values in lists[family].items() if _key(key) <= version]
    return _scaled(known[-1], _GIGA)


def architecture(cc: int) -> str:
    """The row of the bandwidth caps for a compute capability times ten."""
    for least, name in ((100, "Blackwell"), (90, "Hopper"), (80, "Ampere")):
        if cc >= least:
            return name
    return "Volta"
