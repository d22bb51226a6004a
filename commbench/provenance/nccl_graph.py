"""NCCL's dumped graphs and topology: the XML of ``NCCL_GRAPH_DUMP_FILE`` and ``NCCL_TOPO_DUMP_FILE``.

A graph dump is one rank's search, before the minimum over ranks that the tuner takes; read those of all nodes and
combine them where nodes differ.
"""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commbench.models.nccl import Graph, NcclInputs
from commbench.models.nccl.inputs import AMD_CPU, ARM, INTEL_CPU, MIXED_CPU, PATHS, POWER, X86

# What the kernel and a processor call themselves, and what NCCL's model does.
ARCHITECTURES = {"x86_64": X86, "arm64": ARM, "aarch64": ARM, "ppc64": POWER, "ppc64le": POWER}
VENDORS = {"GenuineIntel": INTEL_CPU, "AuthenticAMD": AMD_CPU}
_RING, _TREE, _COLLNET_CHAIN, _NVLS, _COLLNET_DIRECT = 0, 1, 2, 3, 4
_LARGEST = 64 << 20
_GPU_CLASSES, _NIC_CLASSES = ("0x0302", "0x0300", "0x0380", "0x1200"), ("0x0200", "0x0207")
_LINK_GBPS = {"60": 18.0, "70": 20.0, "80": 20.0, "86": 12.0, "90": 20.6, "100": 40.1}  # NCCL src/graph/topo.h


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclGraphs:
    """The graphs of one communicator; a pattern that was not searched, or found nothing, is None.

    ``gpus``: how many GPUs of its node a channel of the ring visits, which are those of the communicator; None where
    that is not said.
    """

    ring: Graph | None = None
    tree: Graph | None = None
    nvls: Graph | None = None
    collnet_chain: Graph | None = None
    collnet_direct: Graph | None = None
    gpus: int | None = None

    def inputs(
        self, *, ranks: int, nodes: int, cc_min: int, cc_max: int | None = None, cpu_arch: str = X86,
        cpu_vendor: str = INTEL_CPU, nvswitch: bool = True, collnet: bool = False, multi_host_nvlink: bool = False,
    ) -> NcclInputs:  # fmt: skip
        """The tuner's inputs with these graphs. Raises ValueError without a ring and a tree.

        ``collnet``: SHARP in the network is on. That its graphs are there does not say so: NCCL searches them anyway.
        """
        if self.ring is None or self.tree is None:
            raise ValueError("the graphs lack a ring or a tree: NCCL writes both for every communicator")
        return NcclInputs(
            ranks=ranks, nodes=nodes, ring=self.ring, tree=self.tree, nvls=self.nvls,
            collnet_chain=self.collnet_chain, collnet_direct=self.collnet_direct, cc_min=cc_min,
            cc_max=cc_min if cc_max is None else cc_max, cpu_arch=cpu_arch, cpu_vendor=cpu_vendor, nvswitch=nvswitch,
            collnet=collnet, multi_host_nvlink=multi_host_nvlink,
        )  # fmt: skip


def combine_graphs(each: Iterable[NcclGraphs]) -> NcclGraphs:
    """What the ranks agree on: of each pattern the fewest channels, the least bandwidth and the widest path."""
    found = list(each)
    if not found:
        raise ValueError("no graphs to combine")
    combined: dict[str, Any] = {}
    for name in ("ring", "tree", "nvls", "collnet_chain", "collnet_direct"):
        graphs = [graph for graphs in found if (graph := getattr(graphs, name)) is not None]
        combined[name] = _least(graphs) if len(graphs) == len(found) else None
    return NcclGraphs(**combined)


def _least(graphs: list[Graph]) -> Graph:
    return Graph(
        pattern=max(g.pattern for g in graphs), channels=min(g.channels for g in graphs),
        bw_intra_Bps=min(g.bw_intra_Bps for g in graphs), bw_inter_Bps=min(g.bw_inter_Bps for g in graphs),
        type_intra=max((g.type_intra for g in graphs), key=PATHS.index),
        type_inter=max((g.type_inter for g in graphs), key=PATHS.index),
        latency_inter_s=max(g.latency_inter_s for g in graphs), same_channels=all(g.same_channels for g in graphs),
        cross_nic=max(g.cross_nic for g in graphs),
    )  # fmt: skip


def read_graphs(path: Path | str) -> NcclGraphs:
    """The graphs of an ``NCCL_GRAPH_DUMP_FILE``. Raises ValueError with one line for anything that is not one."""
    path = Path(path)
    root = _root(path, "graphs", "NCCL_GRAPH_DUMP_FILE")
    found: dict[int, Graph] = {}
    gpus = None
    for element in root.iter("graph"):
        identity = _whole(element, "id", path)
        graph = Graph(
            pattern=_whole(element, "pattern", path), channels=_whole(element, "nchannels", path),
            bw_intra_Bps=_number(element, "speedintra", path) * 1e9,
            bw_inter_Bps=_number(element, "speedinter", path) * 1e9,
            latency_inter_s=_number(element, "latencyinter", path, 0.0) * 1e-6,
            type_intra=_path_type(element, "typeintra", "NVL", path), type_inter=_path_type(element, "typeinter", "PIX", path),
            same_channels=_whole(element, "samechannels", path) == 1, cross_nic=_whole(element, "crossnic", path),
        )  # fmt: skip
        if graph.channels:
            found[identity] = graph
        channel = element.find("channel")
        if identity == _RING and channel is not None:
            gpus = len(channel.findall("gpu")) or None
    if not found:
        raise ValueError(f"{path}: no graph in it")
    return NcclGraphs(
        ring=found.get(_RING), tree=found.get(_TREE), nvls=found.get(_NVLS), collnet_chain=found.get(_COLLNET_CHAIN),
        collnet_direct=found.get(_COLLNET_DIRECT), gpus=gpus,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologyGpu:
    """``cc`` is the compute capability times ten; ``nvlinks`` counts links, ``link_Bps`` is all of them one way.

    None where the file, such as one written for a cloud's machine type, does not say.
    """

    busid: str
    cc: int | None = None
    rank: int | None = None
    nvlinks: int = 0
    link_Bps: float | None = None
    pci_Bps: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologyNic:
    """``rate_Bps`` is the line rate; ``gdr`` whether GPUDirect RDMA works; None where the file does not say."""

    name: str
    rate_Bps: float | None = None
    latency_s: float | None = None
    gdr: bool | None = None
    pci_Bps: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """One node as NCCL saw it. ``nvswitch``: GPUs are joined through switches, not to one another."""

    gpus: tuple[TopologyGpu, ...]
    nics: tuple[TopologyNic, ...]
    cpu_arch: str | None
    cpu_vendor: str | None
    hosts: int
    nvswitch: bool

    @property
    def cc_min(self) -> int | None:
        return min((gpu.cc for gpu in self.gpus if gpu.cc is not None), default=None)

    @property
    def cc_max(self) -> int | None:
        return max((gpu.cc for gpu in self.gpus if gpu.cc is not None), default=None)


def read_topology(path: Path | str) -> Topology:
    """The facts of an ``NCCL_TOPO_DUMP_FILE``. Raises ValueError with one line for anything that is not one."""
    path = Path(path)
    root = _root(path, "system", "NCCL_TOPO_DUMP_FILE")
    gpus, nics = [], []
    for pci in root.iter("pci"):
        gpu, nets = pci.find("gpu"), pci.findall("nic/net")
        kind = pci.get("class", "")
        if gpu is not None or kind.startswith(_GPU_CLASSES):
            gpus.append(_gpu(pci, gpu, path))
        elif nets or kind.startswith(_NIC_CLASSES):
            nics += [_nic(pci, net, path) for net in nets] or [
                TopologyNic(name=pci.get("busid", ""), pci_Bps=_pci_Bps(pci))
            ]
    nics += [_nic(None, net, path) for cpu in root.iter("cpu") for net in cpu.findall("nic/net")]
    if not gpus and not nics:
        raise ValueError(f"{path}: neither a GPU nor a NIC in it")
    cpus = list(root.iter("cpu"))
    links = [link.get("tclass", "") for link in root.iter("nvlink")]
    return Topology(
        gpus=tuple(gpus), nics=tuple(nics), cpu_arch=_arch(cpus), cpu_vendor=_vendor(cpus),
        hosts=max(1, len({cpu.get("host_hash", "") for cpu in cpus})),
        nvswitch=any(kind.startswith("0x0680") for kind in links),
    )  # fmt: skip


def _gpu(pci: ET.Element, gpu: ET.Element | None, path: Path) -> TopologyGpu:
    busid, pci_rate = pci.get("busid", ""), _pci_Bps(pci)
    if gpu is None:
        return TopologyGpu(busid=busid, pci_Bps=pci_rate)
    cc = _whole(gpu, "sm", path) if gpu.get("sm") else None
    links = sum(_whole(link, "count", path) for link in gpu.iter("nvlink"))
    return TopologyGpu(
        busid=busid, cc=cc, rank=_whole(gpu, "rank", path) if gpu.get("rank") else None, nvlinks=links,
        link_Bps=links * _link_GBps(cc) * 1e9 if links and cc else None, pci_Bps=pci_rate,
    )  # fmt: skip


def _nic(pci: ET.Element | None, net: ET.Element, path: Path) -> TopologyNic:
    speed = _number(net, "speed", path, 0.0)  # Mbit/s
    return TopologyNic(
        name=net.get("name", ""), rate_Bps=speed * 1e6 / 8 if speed > 0 else None,
        latency_s=_number(net, "latency", path) * 1e-6 if net.get("latency") else None,
        gdr=_whole(net, "gdr", path) == 1 if net.get("gdr") else None,
        pci_Bps=None if pci is None else _pci_Bps(pci),
    )  # fmt: skip


def _link_GBps(cc: int) -> float:
    """NCCL's rate of one NVLink: the newest generation that is not above the compute capability."""
    if cc == 86:
        return _LINK_GBPS["86"]
    return [rate for known, rate in _LINK_GBPS.items() if known != "86" and int(known) <= cc][-1] if cc >= 60 else 0.0


def _pci_Bps(pci: ET.Element) -> float | None:
    """NCCL's figure for a PCI link: 12 GB/s for 16 lanes at 8 GT/s, in proportion."""
    speed = re.match(r"([\d.]+)\s*GT/s", pci.get("link_speed", ""))
    width = pci.get("link_width", "")
    if not speed or not width.isdigit() or int(width) == 0:
        return None
    return float(speed[1]) / 8 * 12e9 * int(width) / 16


def _arch(cpus: list[ET.Element]) -> str | None:
    found = {ARCHITECTURES[text] for cpu in cpus if (text := cpu.get("arch", "")) in ARCHITECTURES}
    return found.pop() if len(found) == 1 else None


def _vendor(cpus: list[ET.Element]) -> str | None:
    found = {VENDORS.get(text, text.lower()) for cpu in cpus if (text := cpu.get("vendor", ""))}
    if len(found) > 1:
        return MIXED_CPU
    return found.pop() if found else None


def _root(path: Path, name: str, variable: str) -> ET.Element:
    """The root element. A document type or an entity is refused: NCCL writes neither, and expansion can be abused."""
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"{path}: larger than {_LARGEST >> 20} MiB, which no dump of NCCL is")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text") from None
    if re.search(r"<!\s*(DOCTYPE|ENTITY)", text, re.IGNORECASE):
        raise ValueError(f"{path}: has a document type or an entity, which NCCL does not write")
    try:
        root = ET.fromstring(text)
    except ET.ParseError as error:
        raise ValueError(f"{path}: not XML ({error})") from None
    if root.tag != name:
        raise ValueError(f"{path}: its root is <{root.tag}>, but {variable} gives <{name}>")
    return root


def _attribute(element: ET.Element, name: str, path: Path) -> str:
    text = element.get(name)
    if text is None:
        raise ValueError(f"{path}: <{element.tag}> has no {name}")
    return text.strip()


def _path_type(element: ET.Element, name: str, default: str, path: Path) -> str:
    text = element.get(name, default)
    if text not in PATHS:
        raise ValueError(f"{path}: {name}={text!r} of <{element.tag}> is none of {', '.join(PATHS)}")
    return text


def _whole(element: ET.Element, name: str, path: Path) -> int:
    text = _attribute(element, name, path)
    try:
        return int(text, 0)
    except ValueError:
        raise ValueError(f"{path}: {name}={text!r} of <{element.tag}> is not a whole number") from None


def _number(element: ET.Element, name: str, path: Path, default: float | None = None) -> float:
    if default is not None and element.get(name) is None:
        return default
    text = _attribute(element, name, path)
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{path}: {name}={text!r} of <{element.tag}> is not a number")
    return found
