"""What NCCL's tuning model is given: the graphs that its topology search found, and the communicator."""

from __future__ import annotations

from dataclasses import dataclass

ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
FUNCTIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
FUNCTION_OF = {
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_reduce": "AllReduce",
}
# Nearest first; the order is NCCL's and is what "at most PXB" means. C2C exists since 2.26, P2C since 2.27.
PATHS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS", "NET", "DIS")
BALANCED_TREE, SPLIT_TREE, TREE, RING, NVLS, COLLNET_DIRECT = 1, 2, 3, 4, 5, 6
AMD_CPU, INTEL_CPU, MIXED_CPU = "amd", "intel", "mixed"
X86, ARM, POWER = "x86", "arm", "power"


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """One pattern's graph. Bandwidths are of one channel, in bytes a second; ``latency_inter_s`` is the NIC's.

    ``type_intra`` and ``type_inter`` are the widest paths used, of ``PATHS``. ``pattern``: 1 balanced tree, 2 split
    tree, 3 tree, 4 ring, 5 NVLS, 6 CollNetDirect. Raises ValueError for values that no graph has.
    """

    pattern: int
    channels: int
    bw_intra_Bps: float
    bw_inter_Bps: float
    type_intra: str = "NVL"
    type_inter: str = "PIX"
    latency_inter_s: float = 0.0
    same_channels: bool = False
    cross_nic: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.pattern <= 6:
            raise ValueError(f"graph pattern must be 1 to 6, not {self.pattern}")
        if self.channels < 0 or min(self.bw_intra_Bps, self.bw_inter_Bps, self.latency_inter_s) < 0:
            raise ValueError(f"channels, bandwidths and latency of a graph cannot be negative: {self}")
        for name in (self.type_intra, self.type_inter):
            if name not in PATHS:
                raise ValueError(f"unknown path type {name!r}: known are {', '.join(PATHS)}")

    @property
    def total_Bps(self) -> float:
        """Channels times the bandwidth of one, inside a node."""
        return self.channels * self.bw_intra_Bps

    def within(self, path: str, *, inter: bool) -> bool:
        """Whether no link of the graph is wider than ``path``."""
        widest = self.type_inter if inter else self.type_intra
        return PATHS.index(widest) <= PATHS.index(path)


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclInputs:
    """A communicator as NCCL's tuner sees it. ``nodes`` are NVLink domains: a whole rack where NVLink joins its hosts.

    The graphs are those after the minimum over ranks; ``nvls`` is None without NVLink SHARP. ``collnet``: SHARP in the
    network is there and enabled; ``collnet_gathers``: its plugin also does all_gather and reduce_scatter. ``cc_min``
    and ``cc_max`` are compute capabilities times ten. ``multi_host_nvlink``: a node spans several hosts.
    ``net_overhead_s`` None means NCCL's default for the processor. Raises ValueError for impossible counts.
    """

    ranks: int
    nodes: int
    ring: Graph
    tree: Graph
    nvls: Graph | None = None
    collnet_direct: Graph | None = None
    collnet_chain: Graph | None = None
    cc_min: int = 90
    cc_max: int = 90
    cpu_arch: str = X86
    cpu_vendor: str = INTEL_CPU
    nvswitch: bool = True
    collnet: bool = False
    collnet_gathers: bool = False
    multi_host_nvlink: bool = False
    net_overhead_s: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= self.ranks:
            raise ValueError(f"{self.ranks} ranks on {self.nodes} nodes: at least one node, and a rank on each")
        if self.cc_min > self.cc_max:
            raise ValueError(f"compute capability: least {self.cc_min} is above greatest {self.cc_max}")

    @property
    def ranks_per_node(self) -> float:
        return self.ranks / self.nodes

    @property
    def channels(self) -> int:
        """Channels of the communicator: twice those of the search, and twice again for few fast ones between nodes."""
        channels = min(64, 2 * min(self.ring.channels, self.tree.channels))
        if self.cc_min >= 90 and self.nodes > 1 and self.ring.bw_intra_Bps > 45e9 and channels < 16:
            channels *= 2
        return channels

    def graph(self, algorithm: str) -> Graph | None:
        """The graph that an algorithm runs on; None where there is none."""
        graphs = {
            "Ring": self.ring, "Tree": self.tree, "PAT": self.tree, "NVLS": self.nvls, "NVLSTree": self.nvls,
            "CollNetDirect": self.collnet_direct, "CollNetChain": self.collnet_chain,
        }  # fmt: skip
        return graphs[algorithm]
