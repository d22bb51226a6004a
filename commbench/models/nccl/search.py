"""The graphs that NCCL's topology search finds on nodes whose GPUs are all alike, joined by NVLink, with even NICs.

NCCL searches real topologies by trial (ncclTopoCompute in NVIDIA NCCL's src/graph/search.cc). On an even node the
outcome follows from sums: a channel of a ring takes its speed from every GPU's NVLink and from one NIC; NVLink SHARP
takes a head's speed from every GPU and twice from the head. What the real search returns can be read from NCCL's own
dumps instead (commbench.provenance.nccl_graph), and is better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from commbench.models.hardware import Hardware
from commbench.models.nccl.constants import parse_version, speeds_Bps
from commbench.models.nccl.inputs import BALANCED_TREE, NVLS, RING, TREE, Graph, NcclInputs

MAX_CHANNELS = 32
NVLS_HEADS = 32
_LOWEST_SHARE = 0.49  # the search gives up on speeds below this share of the best one's


def nccl_inputs(
    hardware: Hardware, nodes: int, ranks_per_node: int, *, version: str = "2.30", nvls: bool = True,
    collnet: bool = False,
) -> NcclInputs:  # fmt: skip
    """The tuner's inputs for ``nodes`` equal nodes of a preset with ``ranks_per_node`` of their GPUs in use.

    A node is an NVLink domain (``hardware.node`` says which). GPUs bring their share of the node's NICs, at least one.
    ``nvls`` False is ``NCCL_NVLS_ENABLE=0``; ``collnet`` True is SHARP in the network. Raises ValueError for hardware
    without NCCL, more ranks than GPUs, and a version outside the model.
    """
    facts = hardware.nccl
    if facts is None:
        raise ValueError(f"{hardware.name} has no NCCL: its library chooses by other rules")
    if not 1 <= ranks_per_node <= hardware.gpus_per_node or nodes < 1:
        raise ValueError(
            f"{hardware.name} has {hardware.gpus_per_node} GPUs a node: {nodes} nodes of {ranks_per_node} ranks "
            "cannot be made of them"
        )
    nics = max(1, math.ceil(hardware.nics_per_node * ranks_per_node / hardware.gpus_per_node))
    ring, tree, sharp = search_graphs(
        gpus=ranks_per_node, nodes=nodes, nvlink_Bps=facts.nvlink_Bps, nics=nics,
        nic_Bps=min(facts.nic_Bps, facts.pci_Bps), cc=facts.compute_capability, version=version,
        nvls=nvls and facts.nvswitch, type_inter=facts.type_inter, latency_inter_s=facts.net_latency_s,
    )  # fmt: skip
    return NcclInputs(
        ranks=nodes * ranks_per_node, nodes=nodes, ring=ring, tree=tree, nvls=sharp, cc_min=facts.compute_capability,
        cc_max=facts.compute_capability, cpu_arch=facts.cpu_arch, cpu_vendor=facts.cpu_vendor,
        nvswitch=facts.nvswitch, collnet=collnet,
        multi_host_nvlink=ranks_per_node > hardware.gpus_per_host,
    )  # fmt: skip


def search_graphs(
    *, gpus: int, nodes: int, nvlink_Bps: float, nics: int, nic_Bps: float, cc: int, version: str = "2.30",
    nvls: bool = True, type_inter: str = "PIX", latency_inter_s: float = 0.0,
) -> tuple[Graph, Graph, Graph | None]:  # fmt: skip
    """Ring, tree and NVLS graph of one of ``nodes`` nodes; the last is None without NVSwitch or before Hopper.

    ``nvlink_Bps``: what one GPU sends over NVLink, ``nic_Bps``: the least of a NIC's rate and the path to it, both in
    NCCL's figures; ``cc``: compute capability times ten. One GPU a node has neither a chain inside nor NVLS.
    """
    known = parse_version(version)
    crossing = nodes > 1
    speeds = speeds_Bps(cc, known, inter=crossing)
    speeds = speeds[_first(speeds, lambda speed: speed <= (nic_Bps if crossing else nvlink_Bps)) :]
    # Along a chain or between nodes one GPU of each channel sends to nobody inside the node.
    open_Bps = nvlink_Bps * gpus / (gpus - 1) if gpus > 1 else math.inf
    ring_Bps = open_Bps if crossing else nvlink_Bps

    def fits(speed: float) -> int:
        inside = math.floor(ring_Bps / speed + 1e-6) if math.isfinite(ring_Bps) else MAX_CHANNELS
        return min(inside, nics * math.floor(nic_Bps / speed + 1e-6) if crossing else inside, MAX_CHANNELS)

    everything = speeds_Bps(cc, known, inter=crossing)
    channels, bandwidth = _ring(speeds, fits, cc, nvlink_Bps)
    tree_inter = speeds[_first(speeds, lambda s: s * channels <= open_Bps and (not crossing or fits(s) >= channels))]
    tree_intra = _raised(everything, tree_inter, lambda s: s * channels <= open_Bps)
    type_intra = "NVL" if gpus > 1 else "LOC"
    if not crossing:
        type_inter, latency_inter_s = "PIX", 0.0
    same = nics == 1 or not crossing
    ring = Graph(
        pattern=RING, channels=channels, bw_intra_Bps=bandwidth, bw_inter_Bps=bandwidth, type_intra=type_intra,
        type_inter=type_inter, same_channels=same, latency_inter_s=latency_inter_s,
    )  # fmt: skip
    tree = Graph(
        pattern=BALANCED_TREE if gpus > 1 else TREE, channels=channels, bw_intra_Bps=tree_intra,
        bw_inter_Bps=tree_inter, type_intra=type_intra, type_inter=type_inter, same_channels=same,
        latency_inter_s=latency_inter_s,
    )  # fmt: skip
    if not nvls or cc < 90 or gpus < 2:
        return ring, tree, None
    heads = min(gpus, NVLS_HEADS, nics if crossing else gpus)
    intra = speeds[_first(speeds, lambda speed: speed * (heads + 1) <= nvlink_Bps)]
    inter = _raised(everything, intra, lambda speed: not crossing or speed <= nic_Bps)
    sharp = Graph(
        pattern=NVLS, channels=heads, bw_intra_Bps=intra, bw_inter_Bps=inter, type_intra=type_intra,
        type_inter=type_inter, latency_inter_s=latency_inter_s,
    )  # fmt: skip
    return ring, tree, sharp


def _first(speeds: Sequence[float], holds: Callable[[float], bool]) -> int:
    """Index of the first speed for which it holds; the last one where it never does."""
    return next((index for index, speed in enumerate(speeds) if holds(speed)), len(speeds) - 1)


def _ring(speeds: Sequence[float], fits: Callable[[float], int], cc: int, total_Bps: float) -> tuple[int, float]:
    """(channels, bandwidth of one): most in sum, faster channels first, then halved into twice as many."""
    best = (0, 0.0)
    for speed in speeds:
        if best[0] and speed / best[1] <= _LOWEST_SHARE:
            break
        channels = fits(speed)
        if channels * speed > best[0] * best[1] * (1 + 1e-9):
            best = (channels, speed)
        if best[0] * best[1] >= total_Bps or channels == MAX_CHANNELS:
            break
    channels, bandwidth = best if best[0] else (1, speeds[-1])
    if bandwidth < 25e9 or (cc > 80 and bandwidth < 50e9 and channels > 4):
        return channels, bandwidth
    doubled = min(2 * channels, MAX_CHANNELS)
    return doubled, bandwidth / math.ceil(doubled / channels)


def _raised(speeds: Sequence[float], start: float, holds: Callable[[float], bool]) -> float:
    """The second pass: one of a graph's two bandwidths goes up as far as it fits, until it is twice the other."""
    bandwidth = start
    for speed in reversed(speeds):
        if speed <= start:
            continue
        if bandwidth >= 2 * start or not holds(speed):
            break
        bandwidth = speed
    return bandwidth
