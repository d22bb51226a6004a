"""Latency and bandwidth of every function, algorithm and protocol of a communicator, before anything is disabled.

The formulas are those of ncclTopoTuneModel in NVIDIA NCCL's src/graph/tuning.cc, read at the tags v2.18.3-1 to
v2.30.7-1; each version branch here is a difference between two of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from commbench.models.nccl.constants import Constants, Version, architecture, constants
from commbench.models.nccl.inputs import (
    ALGORITHMS,
    AMD_CPU,
    FUNCTIONS,
    MIXED_CPU,
    POWER,
    PROTOCOLS,
    TREE,
    X86,
    Graph,
    NcclInputs,
)

GATHERING = ("AllGather", "ReduceScatter")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """``bandwidth_Bps`` is message bytes (nccl-tests' size) a second; 0 means that NCCL will not use the pair."""

    latency_s: float
    bandwidth_Bps: float


Table = Mapping[tuple[str, str, str], Cost]


@lru_cache(maxsize=256)
def nccl_table(inputs: NcclInputs, version: Version) -> Table:
    """(function, algorithm, protocol) to its cost, for all that the version models; what it does not is absent."""
    model = _Model(inputs=inputs, version=version, numbers=constants(version))
    table = {}
    for function in FUNCTIONS:
        for algorithm in ALGORITHMS:
            graph = inputs.graph(algorithm)
            if graph is None or not modelled(function, algorithm, version):
                continue
            for index, protocol in enumerate(PROTOCOLS):
                if algorithm in ("NVLS", "NVLSTree", "PAT") and protocol != "Simple":
                    continue
                table[function, algorithm, protocol] = Cost(
                    latency_s=model.latency(function, algorithm, index, graph),
                    bandwidth_Bps=model.bandwidth(function, algorithm, protocol, graph),
                )
    return MappingProxyType(table)


def modelled(function: str, algorithm: str, version: Version) -> bool:
    """Whether a version's model has the pair at all."""
    if function == "AllReduce":
        return algorithm != "PAT"
    if function not in GATHERING:
        return algorithm == "Ring"
    since = {"Ring": (2, 18), "NVLS": (2, 19), "CollNetDirect": (2, 20), "PAT": (2, 23)}
    return algorithm in since and version >= since[algorithm]


def steps(function: str, ranks: int) -> int:
    """Steps of the ring, by which NCCL turns bus bandwidth into algorithm bandwidth."""
    return {"AllReduce": 2 * (ranks - 1), "AllGather": ranks - 1, "ReduceScatter": ranks - 1}.get(function, ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Model:
    inputs: NcclInputs
    version: Version
    numbers: Constants

    @property
    def column(self) -> int:
        return min(self.inputs.nodes, 3) - 1

    def cap(self, rows: dict[str, tuple[float, ...]]) -> float:
        return rows[architecture(self.inputs.cc_min)][self.column]

    @property
    def ll_max(self) -> float:
        """By GPU on one node, by processor on several (a quirk of NCCL's)."""
        if self.inputs.nodes == 1:
            return self.cap(self.numbers.ll_max_Bps)
        mixed_counts = self.inputs.cpu_vendor == MIXED_CPU and self.version >= (2, 24)
        row = "Ampere" if self.inputs.cpu_vendor == AMD_CPU or mixed_counts else "Volta"
        return self.numbers.ll_max_Bps[row][self.column]

    def bandwidth(self, function: str, algorithm: str, protocol: str, graph: Graph) -> float:
        """Algorithm bandwidth in bytes a second."""
        if algorithm in ("NVLS", "NVLSTree"):
            bus = graph.channels * self.nvls_channel(function, algorithm, graph)
        elif algorithm in ("CollNetDirect", "CollNetChain"):
            bus = self.collnet(function, algorithm, graph) if protocol == "Simple" else 0.0
        elif algorithm == "Ring":
            bus = self.ring(function, protocol, graph)
        else:
            bus = self.tree(function, algorithm, protocol, graph)
        if algorithm in ("NVLS", "CollNetDirect") and not self.gathers_over_nodes(function, graph):
            return 0.0
        return bus * self.ratio(function, algorithm)

    def plain(self, graph: Graph) -> float:
        """Up to two nodes a ring's and a tree's NIC traffic does not slow the links inside the node."""
        per_channel = graph.bw_intra_Bps if self.inputs.nodes <= 2 else graph.bw_inter_Bps
        return graph.channels * per_channel

    def ring(self, function: str, protocol: str, graph: Graph) -> float:
        bus = self.plain(graph)
        if protocol == "LL":
            share = 1 / 2
            if self.version < (2, 21):
                quarter = self.inputs.nodes > 1 or function in ("AllReduce", "Reduce")
                share = 1 / 4 if quarter else 1 / 3
            return min(self.ll_max, bus * share)
        if protocol == "LL128":
            alone = self.inputs.ranks_per_node < 2 and self.version < (2, 23)
            return min(bus * (0.7 if alone else 0.92), graph.channels * self.cap(self.numbers.ring_ll128_Bps))
        return bus

    def tree(self, function: str, algorithm: str, protocol: str, graph: Graph) -> float:
        bus = self.plain(graph)
        if algorithm == "PAT":
            return bus * (0.85 if self.version < (2, 24) else 0.75)
        bus = min(0.92 * bus, graph.channels * self.cap(self.numbers.tree_Bps))
        if protocol == "LL":
            bus = min(bus / 3.8, self.ll_max)
        if protocol == "LL128":
            share = 7 / 9 if self.inputs.nodes == 1 else 120 / 128
            bus = min(bus * share, graph.channels * self.cap(self.numbers.tree_ll128_Bps))
        return bus * 0.85 if graph.pattern == TREE else bus

    def nvls_channel(self, function: str, algorithm: str, graph: Graph) -> float:
        """Bus bandwidth of one NVLS channel."""
        intra, inter = graph.bw_intra_Bps, graph.bw_inter_Bps
        nodes, per_node = self.inputs.nodes, self.inputs.ranks_per_node
        if self.version >= (2, 28):
            if graph.channels < 2:
                return 0.0
            efficiency = self.numbers.nvls_efficiency[architecture(self.inputs.cc_min)]
            inside = intra * efficiency * (graph.channels - 1) / graph.channels
            inside *= 2 if function == "AllReduce" else (per_node - 1) / per_node
            if algorithm == "NVLS":
                return min(inside, inter)
            return min(inside, inter * 2 if nodes <= 2 else inter, self.cap(self.numbers.nvls_tree_Bps))
        if self.version < (2, 19):
            return intra if nodes <= 2 else inter
        if algorithm == "NVLSTree":
            return min(intra, inter if nodes <= 2 else inter / 2)
        if self.version >= (2, 27) and function in GATHERING:
            return min(intra * (per_node - 1) / per_node, 0.9 * inter)
        return min(intra, inter)

    def collnet(self, function: str, algorithm: str, graph: Graph) -> float:
        per_node = self.inputs.ranks_per_node
        if algorithm == "CollNetChain":
            return graph.total_Bps
        if function in GATHERING:
            if self.version >= (2, 27):
                return per_node * min(graph.bw_intra_Bps, 0.9 * graph.bw_inter_Bps)
            weight = (per_node - 1) / 7
            return per_node * graph.bw_intra_Bps * (weight * 0.85 + (1 - weight) * 0.95)
        # Every GPU would need a NIC of its own to go at full speed.
        factor = per_node / graph.channels if graph.channels else 1.0
        factor -= (factor - 1) / 2
        return graph.total_Bps / factor * (0.85 if self.inputs.cc_min >= 90 else 1.0)

    def gathers_over_nodes(self, function: str, graph: Graph) -> bool:
        """Between nodes these two only gather through a network plugin that can, with a NIC for each GPU."""
        if function not in GATHERING or self.inputs.nodes == 1:
            return True
        return self.inputs.collnet and self.inputs.collnet_gathers and self.inputs.ranks_per_node <= graph.channels

    def ratio(self, function: str, algorithm: str) -> float:
        """Algorithm bandwidth over bus bandwidth."""
        ranks, nodes = self.inputs.ranks, self.inputs.nodes
        by_steps = ranks / max(1, steps(function, ranks))
        if algorithm == "Ring":
            return by_steps
        unscaled = self.version >= (2, 23) or (algorithm == "CollNetDirect" and self.version >= (2, 20))
        if function in GATHERING and unscaled:
            return 1.0
        if algorithm in ("NVLS", "NVLSTree"):
            if self.version >= (2, 28):
                return by_steps
            if algorithm == "NVLSTree" and self.version < (2, 19):
                return 0.7 * nodes / (2 * (nodes - 1)) if nodes > 1 else 0.0
            return 5 / 6
        return 0.5

    def latency(self, function: str, algorithm: str, protocol: int, graph: Graph) -> float:
        """Seconds of a smallest message; ``protocol`` is its index."""
        simple = PROTOCOLS[protocol] == "Simple"
        base = self.numbers.base_s[algorithm][protocol]
        inside = self.inside(algorithm, protocol, graph)
        alone = self.inputs.ranks_per_node == 1 and self.version >= (2, 23)
        between = self.numbers.hardware_s["Net"]["Tree" if alone else algorithm][protocol]
        between += graph.latency_inter_s * (2 if simple else 1)  # Simple flushes as well
        hops = int(self.inputs.ranks_per_node) - 1
        levels = self.inputs.nodes.bit_length() - 1
        if algorithm == "Ring":
            return base + self.ring_latency(function, protocol, graph, inside, between)
        if algorithm == "Tree":
            return base + 2 * (hops * inside + levels * between)
        if algorithm == "CollNetDirect":
            arity = 0.5e-6 if self.version < (2, 19) else 0.4e-6
            return base + 2 * (min(1, hops) * inside + hops * arity) + between
        if algorithm == "CollNetChain":
            return base + 2 * hops * inside + between
        if algorithm == "PAT":
            return base + levels * between / 3.5 + self.inputs.ranks * 2.8e-6
        return self.nvls_latency(algorithm, base, inside, between, levels)

    def nvls_latency(self, algorithm: str, base: float, inside: float, between: float, levels: int) -> float:
        nodes = self.inputs.nodes
        if self.version < (2, 19):
            wire = self.numbers.hardware_s["Net"][algorithm][PROTOCOLS.index("Simple")]
            return base + wire * (min(1, nodes - 1) if algorithm == "NVLS" else 2 * (nodes - 1))
        if algorithm == "NVLS":
            return inside + (between if nodes > 1 else 0.0)
        return base + inside + 2 * levels * between

    def ring_latency(self, function: str, protocol: int, graph: Graph, inside: float, between: float) -> float:
        nodes, count = self.inputs.nodes, steps(function, self.inputs.ranks)
        simple = PROTOCOLS[protocol] == "Simple"
        if function in ("Broadcast", "Reduce"):
            link = self.link(graph) if nodes == 1 else "Net"
            if graph.same_channels:
                return self.hardware(link, "Ring", protocol)
            return count * self.hardware(link, "Tree" if simple else "Ring", protocol)
        if nodes > 1:
            inside = max(inside, self.net_overhead_s * (3 if simple else 1))
        crossings = nodes - 1
        if function == "AllReduce":
            crossings = 2 * (nodes if self.version < (2, 23) and nodes > 1 else nodes - 1)
        return (count - crossings) * inside + crossings * between

    def link(self, graph: Graph) -> str:
        return "NVLink" if graph.type_intra == "NVL" else "PCI"

    def inside(self, algorithm: str, protocol: int, graph: Graph) -> float:
        return self.hardware(self.link(graph), algorithm, protocol)

    def hardware(self, link: str, algorithm: str, protocol: int) -> float:
        if (link, algorithm, PROTOCOLS[protocol], self.inputs.cpu_arch) == ("PCI", "Tree", "Simple", POWER):
            algorithm = "Ring"
        return self.numbers.hardware_s[link][algorithm][protocol]

    @property
    def net_overhead_s(self) -> float:
        """What posting to the network costs the processor."""
        if self.inputs.net_overhead_s is not None:
            return self.inputs.net_overhead_s
        return 2e-6 if (self.inputs.cpu_arch, self.inputs.cpu_vendor) == (X86, AMD_CPU) else 1e-6
