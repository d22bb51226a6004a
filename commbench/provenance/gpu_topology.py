"""How a host's GPUs reach one another and its network adapters.

NVML tells of pairs of GPUs. The way from a GPU to an adapter is read off sysfs, in the words of ``nvidia-smi topo``:
PIX at most one PCIe switch between them, PXB several, PHB through a host bridge, NODE between the host bridges of one
NUMA node, SYS between NUMA nodes.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from commbench.provenance.gpu import link_numbers, links_up
from commbench.provenance.gpu_nvml import ask, handles, pci_address, session
from commbench.provenance.sources import ROOT, attempt, names, read_int

_ROOT_COMPLEX = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ANCESTORS = {0: "INTERNAL", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # nvmlGpuTopologyLevel_t
_ACCESS = {"read": 0, "write": 1, "nvlink": 2}  # nvmlGpuP2PCapsIndex_t
_STATUS = {
    0: "ok",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "topology not supported",
    4: "disabled",
    5: "not supported",
}  # fmt: skip  nvmlGpuP2PStatus_t
_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH


def collect_topology(root: Path = ROOT) -> dict[str, Any] | None:
    """None where there is no NVML or no driver, else matrices over the GPUs in NVML's order, and per GPU its adapters:

    ``pci`` addresses, ``peer_access`` {"read" | "write" | "nvlink": matrix of "ok" or the reason, null on the
    diagonal}, ``ancestors`` (the words above), ``nvlinks`` (how many active ones between two), ``nvlinks_to_switches``
    (a list), ``nics`` {name: {"pci", "numa_node"}}, ``nic_distance`` {GPU's PCI address: {name: word}}.
    """
    with session() as nvml:
        if nvml is None:
            return None
        devices = [handle for handle in handles(nvml) if handle is not None and not isinstance(handle, dict)]
        addresses = [pci_address(ask(nvml, "nvmlDeviceGetPciInfo", handle)) for handle in devices]
        between, to_switches = _nvlinks(nvml, devices, addresses)
        return {
            "pci": addresses,
            "peer_access": {name: _matrix(nvml, devices, "nvmlDeviceGetP2PStatus", _STATUS, index)
                            for name, index in _ACCESS.items()},
            "ancestors": _matrix(nvml, devices, "nvmlDeviceGetTopologyCommonAncestor", _ANCESTORS),
            "nvlinks": between,
            "nvlinks_to_switches": to_switches,
            **attempt(nic_map, root, [address for address in addresses if address]),
        }  # fmt: skip


def _matrix(nvml: Any, devices: list[Any], call: str, words: dict[int, str], *arguments: int) -> list[list[Any]]:
    def entry(row: int, column: int) -> Any:
        if row == column:
            return None
        found = ask(nvml, call, devices[row], devices[column], *arguments)
        return words.get(found, "unknown") if isinstance(found, int) else found

    return [[entry(row, column) for column in range(len(devices))] for row in range(len(devices))]


def _nvlinks(nvml: Any, devices: list[Any], addresses: list[str | None]) -> tuple[list[list[int]], list[int]]:
    """Active NVLinks per pair of GPUs, and per GPU those that end at a switch."""
    between = [[0] * len(devices) for _ in devices]
    to_switches = [0] * len(devices)
    for row, handle in enumerate(devices):
        for link, active in links_up(nvml, handle, link_numbers(nvml, handle)).items():
            if not active:
                continue
            remote = pci_address(ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link))
            if remote in addresses:
                between[row][addresses.index(remote)] += 1
            elif ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) == _SWITCH:
                to_switches[row] += 1
    return between, to_switches


# -- adapters, from sysfs ------------------------------------------------------------------------------


def nic_map(root: Path, gpus: list[str]) -> dict[str, Any]:
    """``{"nics": {name: {"pci", "numa_node"}}, "nic_distance": {gpu: {name: word}}}`` for GPUs by PCI address.

    Adapters are InfiniBand devices and network interfaces that sit on PCI; a function of an adapter that is both comes
    once under each name.
    """
    nics = {name: chain for name, chain in _nics(root).items() if chain}
    nodes = len([name for name in names(root, "sys/devices/system/node") if re.fullmatch(r"node\d+", name)])
    return {
        "nics": {name: {"pci": chain[-1], "numa_node": _numa_node(root, chain[-1])} for name, chain in nics.items()},
        "nic_distance": {
            gpu: {name: _between(root, _chain(root, f"sys/bus/pci/devices/{gpu}"), chain, nodes)
                  for name, chain in nics.items()}
            for gpu in gpus
        },
    }  # fmt: skip


def _nics(root: Path) -> dict[str, tuple[str, ...]]:
    places = [(name, f"{folder}/{name}/device") for folder in ("sys/class/infiniband", "sys/class/net")
              for name in names(root, folder)]  # fmt: skip
    return {name: _chain(root, path) for name, path in places}


def _chain(root: Path, path: str) -> tuple[str, ...]:
    """The root complex, the bridges and the function that a link of sysfs leads to; () for what is not on PCI.

    A virtio device lies below the function that carries it.
    """
    parts = Path(os.path.realpath(root / path)).parts
    first = next((n for n, part in enumerate(parts) if _ROOT_COMPLEX.fullmatch(part)), len(parts))
    chain = tuple(part for part in parts[first:] if _ROOT_COMPLEX.fullmatch(part) or _ADDRESS.fullmatch(part))
    return chain if len(chain) > 1 else ()


def _numa_node(root: Path, pci: str) -> int | None:
    node = read_int(root, f"sys/bus/pci/devices/{pci}/numa_node")
    return node if node is not None and node >= 0 else None


def _between(root: Path, one: tuple[str, ...], other: tuple[str, ...], nodes: int) -> str | None:
    if not one or not other:
        return None
    return distance(one, other, same_node=_same_node(_numa_node(root, one[-1]), _numa_node(root, other[-1]), nodes))


def _same_node(one: int | None, other: int | None, nodes: int) -> bool:
    # A machine with one node says -1 of every device.
    return one == other if one is not None and other is not None else nodes <= 1


def distance(one: tuple[str, ...], other: tuple[str, ...], *, same_node: bool) -> str:
    """The word for the way between two functions, each as its root complex, the bridges below that, and itself."""
    if one == other:
        return "X"
    common = next((n for n, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    if common == 0:
        return "NODE" if same_node else "SYS"
    if common == 1:
        return "PHB"
    # What both share is a bridge. One more bridge on either way is a port of the switch that this one belongs to.
    bridges = max(len(one), len(other)) - common - 1
    return "PIX" if bridges <= 1 else "PXB"
