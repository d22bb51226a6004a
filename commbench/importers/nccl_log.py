"""What NCCL says of itself with ``NCCL_DEBUG=INFO``: versions, settings, graphs, channels, tuning tables and choices.

Lines may carry any prefix (rank tags of a launcher, timestamps) and may cut others in the middle; what stands after
``NCCL INFO`` is read, the rest is ignored. ``NCCL_DEBUG_SUBSYS`` must have INIT, GRAPH, TUNING or ENV for what is to
be found.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commbench.models.nccl import ALGORITHMS, FUNCTIONS, PROTOCOLS, Cost, Graph
from commbench.models.nccl.inputs import COLLNET_DIRECT, NVLS, RING
from commbench.provenance.nccl_choices import Choice, is_choice, messages, read_choice
from commbench.provenance.nccl_graph import NcclGraphs, combine_graphs

__all__ = [
    "Channels", "Choice", "CommunicatorRank", "NcclLog", "SymmetricChoice", "TuningTable", "parse_log", "read_log",
]  # fmt: skip

_SYMMETRIC = re.compile(r"(\w+) \[Symmetric\]: (\d+) Bytes -> Kernel (\w+) nchannels (\d+)")
_GRAPH = re.compile(
    r"Pattern (\d+), crossNic (\d+), nChannels (\d+), (?:bw|speed) ([\d.]+)/([\d.]+), type (\w+)/(\w+), "
    r"sameChannels (\d+)"
)
_CHANNELS = re.compile(
    r"(\d+) coll channels, (?:(\d+) collnet channels, )?(\d+) nvls channels, (\d+) p2p channels, (\d+) p2p channels per"
)
_WORLD = re.compile(r"comm \S+ rank (\d+) nRanks (\d+) nNodes (\d+) localRanks (\d+) localRank (\d+)(?: MNNVL (\d+))?")
_VERSION = re.compile(r"\bNCCL version (\d+\.\d+(?:\.\d+)?(?:\+[\w.]+)?)")
_SETTING = re.compile(r"(NCCL_\w+) set by environment to (.*)")
_CELL = re.compile(r"([\d.]+)/\s*([\d.]+)\s*\|")


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningTable:
    """Latencies and bandwidths as one communicator printed them; ``source`` is host:pid:tid, empty if not given."""

    source: str
    costs: Mapping[tuple[str, str, str], Cost]


@dataclass(frozen=True, kw_only=True, slots=True)
class SymmetricChoice:
    """One call that went to a symmetric-memory kernel, which the tuner does not model."""

    source: str
    function: str
    logged_bytes: int
    kernel: str
    channels: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Channels:
    source: str
    collective: int
    collnet: int | None
    nvls: int
    p2p: int
    p2p_per_peer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicatorRank:
    """``multi_host_nvlink`` is MNNVL; None where the version does not print it."""

    source: str
    rank: int
    ranks: int
    nodes: int
    local_ranks: int
    local_rank: int
    multi_host_nvlink: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclLog:
    """Everything found, in the order of the file. ``graphs`` has one entry for each communicator of each process."""

    versions: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    tables: tuple[TuningTable, ...] = ()
    choices: tuple[Choice, ...] = ()
    symmetric: tuple[SymmetricChoice, ...] = ()
    graphs: tuple[NcclGraphs, ...] = ()
    channels: tuple[Channels, ...] = ()
    ranks: tuple[CommunicatorRank, ...] = ()

    @property
    def version(self) -> str | None:
        """The only version in the log; None where there is none, or several."""
        return self.versions[0] if len(self.versions) == 1 else None

    def combined_graphs(self) -> NcclGraphs:
        """What a single communicator's ranks agree on; do not use it for a log of several. ValueError without any."""
        return combine_graphs(self.graphs)


def read_log(path: Path | str) -> NcclLog:
    """What NCCL wrote into ``path``. Raises ValueError with one line where there is nothing of it."""
    with Path(path).open(encoding="utf-8", errors="replace") as lines:
        try:
            log = parse_log(lines)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    if log == NcclLog():
        raise ValueError(
            f"{path}: nothing of NCCL's in it: run with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,ENV,GRAPH,TUNING"
        )
    return log


def parse_log(lines: Iterable[str]) -> NcclLog:
    """The same for lines of text; empty where nothing is found."""
    reader = _Reader()
    for line in lines:
        for source, text in _messages(line):
            reader.take(source, text)
    return reader.log()


def _messages(line: str) -> Iterable[tuple[str, str]]:
    found = list(messages(line))
    if not found and (version := _VERSION.search(line)):
        found = [("", version[0])]  # NCCL_DEBUG=VERSION prints it bare
    return found


class _Reader:
    """Collects messages; what spans several lines is kept apart by source."""

    def __init__(self) -> None:
        self.versions: dict[str, None] = {}
        self.settings: dict[str, str] = {}
        self.choices: list[Choice] = []
        self.symmetric: list[SymmetricChoice] = []
        self.channels: list[Channels] = []
        self.ranks: list[CommunicatorRank] = []
        self.header: dict[str, tuple[str, ...]] = {}
        self.costs: dict[str, list[dict[tuple[str, str, str], Cost]]] = defaultdict(list)
        self.graphs: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def take(self, source: str, text: str) -> None:
        for read in (self.table, self.choice, self.graph, self.facts):
            if read(source, text):
                return

    def table(self, source: str, text: str) -> bool:
        name, bar, cells = text.partition("|")
        name = name.strip()
        if not bar:
            return False
        if name == "Algorithm":
            found = tuple(cell for cell in cells.replace("|", " ").split() if cell in ALGORITHMS)
            if "Tree" in found:
                self.costs[source].append({})
            self.header[source] = found
            return True
        algorithms = self.header.get(source, ())
        values = _CELL.findall(text)
        if name not in FUNCTIONS or len(values) != len(algorithms) * len(PROTOCOLS) or not self.costs[source]:
            return name in ("Protocol", "Max NThreads")
        pairs = [(algorithm, protocol) for algorithm in algorithms for protocol in PROTOCOLS]
        for pair, (latency, bandwidth) in zip(pairs, values, strict=True):
            cost = Cost(latency_s=float(latency) * 1e-6, bandwidth_Bps=float(bandwidth) * 1e9)
            self.costs[source][-1][(name, *pair)] = cost
        return True

    def choice(self, source: str, text: str) -> bool:
        if match := _SYMMETRIC.match(text):
            self.symmetric.append(
                SymmetricChoice(
                    source=source,
                    function=match[1],
                    logged_bytes=int(match[2]),
                    kernel=match[3],
                    channels=int(match[4]),
                )
            )
            return True
        if choice := read_choice(source, text):
            self.choices.append(choice)
        return is_choice(text)

    def graph(self, source: str, text: str) -> bool:
        match = _GRAPH.match(text)
        if not match:
            return False
        try:
            graph = Graph(
                pattern=int(match[1]), cross_nic=int(match[2]), channels=int(match[3]),
                bw_intra_Bps=float(match[4]) * 1e9, bw_inter_Bps=float(match[5]) * 1e9, type_intra=match[6],
                type_inter=match[7], same_channels=match[8] == "1",
            )  # fmt: skip
        except ValueError:
            return True
        if graph.pattern == RING:
            self.graphs[source].append({})
        if not self.graphs[source]:
            return True
        known = self.graphs[source][-1]
        names = {RING: "ring", NVLS: "nvls", COLLNET_DIRECT: "collnet_direct"}
        # Trees come after the ring, SHARP's chain, of the same pattern as a tree's, after them.
        name = names.get(graph.pattern, "collnet_chain" if "tree" in known else "tree")
        if graph.channels:
            known.setdefault(name, graph)
        return True

    def facts(self, source: str, text: str) -> bool:
        if match := _CHANNELS.match(text):
            collective, collnet, nvls, p2p, per_peer = match.groups()
            self.channels.append(
                Channels(
                    source=source,
                    collective=int(collective),
                    collnet=int(collnet) if collnet else None,
                    nvls=int(nvls),
                    p2p=int(p2p),
                    p2p_per_peer=int(per_peer),
                )
            )
        elif match := _WORLD.match(text):
            self.ranks.append(
                CommunicatorRank(
                    source=source,
                    rank=int(match[1]),
                    ranks=int(match[2]),
                    nodes=int(match[3]),
                    local_ranks=int(match[4]),
                    local_rank=int(match[5]),
                    multi_host_nvlink=None if match[6] is None else match[6] == "1",
                )
            )
        elif match := _VERSION.search(text):
            self.versions.setdefault(match[1])
        elif match := _SETTING.match(text):
            self.settings[match[1]] = match[2].strip().rstrip(".")
        else:
            return False
        return True

    def log(self) -> NcclLog:
        return NcclLog(
            versions=tuple(self.versions), settings=self.settings, choices=tuple(self.choices),
            symmetric=tuple(self.symmetric), channels=tuple(self.channels), ranks=tuple(self.ranks),
            tables=tuple(
                TuningTable(source=source, costs=costs)
                for source, tables in self.costs.items() for costs in tables if costs
            ),
            graphs=tuple(
                NcclGraphs(**graphs) for several in self.graphs.values() for graphs in several if "ring" in graphs
            ),
        )  # fmt: skip
