"""What others published of dispatch and combine, to stand beside a measurement of the same shape.

``deepep_published.csv`` has one row a value, as its source prints it: all values are others', on their hardware. ``gbps``
counts bytes by the named convention, ``busbw`` as nccl-tests do, and nothing where only times were published.
``timing``: ``kernel`` where it is that of the kernels alone, ``call`` where host work between is in it.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from commbench.workloads import Workload

DATA = Path(__file__).with_name("deepep_published.csv")


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One value. ``dtype``: what was sent. ``nodes`` and ``experts`` are None where not said, seconds and bytes a second
    where not published. ``note``: what the reader must know to compare."""

    library: str
    mode: str
    hardware: str
    network: str
    ranks: int
    nodes: int | None
    tokens: int
    hidden: int
    experts: int | None
    topk: int
    collective: str
    dtype: str
    time_s: float | None
    bandwidth_Bps: float | None
    convention: str | None
    timing: str
    note: str
    source: str


@lru_cache(maxsize=1)
def published() -> tuple[Published, ...]:
    """All values, in the order of the file."""
    with DATA.open(newline="", encoding="utf-8") as lines:
        return tuple(_value(row) for row in csv.DictReader(lines))


def published_for(
    workload: Workload, ranks: int, collective: str, dtype: str | None = None, nodes: int | None = None
) -> tuple[Published, ...]:
    """The values of a matching shape: the same mode, tokens, hidden size, top k and number of ranks.

    ``dtype`` and ``nodes`` narrow it, where given; values that do not say their nodes stay. How many experts there are
    is not compared: it changes no token's size, and DeepEP's tables do not say it.
    """
    shape = (workload.mode, workload.tokens, workload.hidden, workload.topk, ranks, collective)
    return tuple(
        value
        for value in published()
        if (value.mode, value.tokens, value.hidden, value.topk, value.ranks, value.collective) == shape
        and dtype in (None, value.dtype)
        and (nodes is None or value.nodes in (None, nodes))
    )


def _value(row: dict[str, str]) -> Published:
    return Published(
        library=row["library"], mode=row["mode"], hardware=row["hardware"], network=row["network"],
        ranks=int(row["ranks"]), nodes=int(row["nodes"]) if row["nodes"] else None, tokens=int(row["tokens"]),
        hidden=int(row["hidden"]), experts=int(row["experts"]) if row["experts"] else None, topk=int(row["topk"]),
        collective=row["collective"],
        dtype=row["dtype"], time_s=float(row["time_us"]) / 1e6 if row["time_us"] else None,
        bandwidth_Bps=float(row["gbps"]) * 1e9 if row["gbps"] else None, convention=row["convention"] or None,
        timing=row["timing"], note=row["note"], source=row["source"],
    )  # fmt: skip
