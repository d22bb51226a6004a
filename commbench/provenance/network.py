"""Network interfaces and InfiniBand ports as sysfs shows them: what they are, their state and their counters.

Sources: the kernel's ABI documents sysfs-class-net and sysfs-class-infiniband.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from commbench.provenance.sources import ROOT, attempt, link_name, names, read, read_int

_NET = "sys/class/net"
_IB = "sys/class/infiniband"


def collect_network(root: Path = ROOT) -> dict[str, Any]:
    """``{"interfaces": {name: facts}, "infiniband": {device: facts}}``; rates in bits a second. Never raises."""
    return {
        "interfaces": {name: attempt(_interface, root, name) for name in _interfaces(root)},
        "infiniband": {name: attempt(_device, root, name) for name in names(root, _IB)},
    }


def collect_port_counters(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Every counter of every InfiniBand port, ``{"mlx5_0/1": {"port_xmit_data": ...}}``; data counts 4-byte words.

    The kernel may ask the adapter for them, which takes up to milliseconds: before and after a run only.
    """
    found = {}
    for device in names(root, _IB):
        for port in names(root, f"{_IB}/{device}/ports"):
            values = {}
            for kind in ("counters", "hw_counters"):
                base = f"{_IB}/{device}/ports/{port}/{kind}"
                values.update({name: read_int(root, f"{base}/{name}") for name in names(root, base)})
            values.pop("lifespan", None)  # the caching interval of hw_counters, not a counter
            found[f"{device}/{port}"] = {name: value for name, value in values.items() if value is not None}
    return found


def _interfaces(root: Path) -> list[str]:
    # bonding_masters and the like are files among the interfaces' links.
    return [name for name in names(root, _NET) if (root / _NET / name).is_dir()]


def _interface(root: Path, name: str) -> dict[str, Any]:
    base = f"{_NET}/{name}"
    megabits = read_int(root, f"{base}/speed")
    return {
        "state": read(root, f"{base}/operstate"),
        "speed_bps": megabits * 10**6 if megabits and megabits > 0 else None,
        "duplex": read(root, f"{base}/duplex"),
        "mtu": read_int(root, f"{base}/mtu"),
        "driver": link_name(root, f"{base}/device/driver"),
        "numa_node": read_int(root, f"{base}/device/numa_node"),
        "queues": len([queue for queue in names(root, f"{base}/queues") if queue.startswith("rx-")]),
        "carrier_changes": read_int(root, f"{base}/carrier_changes"),
        "master": link_name(root, f"{base}/master"),
    }


def _device(root: Path, name: str) -> dict[str, Any]:
    base = f"{_IB}/{name}"
    return {
        "type": read(root, f"{base}/hca_type"),
        "board": read(root, f"{base}/board_id"),
        "firmware": read(root, f"{base}/fw_ver"),
        "driver": link_name(root, f"{base}/device/driver"),
        "pci": link_name(root, f"{base}/device"),
        "numa_node": read_int(root, f"{base}/device/numa_node"),
        "pcie_speed": read(root, f"{base}/device/current_link_speed"),
        "pcie_width": read_int(root, f"{base}/device/current_link_width"),
        "pcie_max_speed": read(root, f"{base}/device/max_link_speed"),
        "pcie_max_width": read_int(root, f"{base}/device/max_link_width"),
        "ports": {port: attempt(_port, root, f"{base}/ports/{port}") for port in names(root, f"{base}/ports")},
    }


def _port(root: Path, base: str) -> dict[str, Any]:
    # state and phys_state read "4: ACTIVE", rate reads "200 Gb/sec (4X HDR)".
    rate = read(root, f"{base}/rate")
    gigabits = re.match(r"([\d.]+) Gb/sec", rate or "")
    return {
        "state": (read(root, f"{base}/state") or "").partition(": ")[2] or None,
        "physical_state": (read(root, f"{base}/phys_state") or "").partition(": ")[2] or None,
        "rate": rate,
        "rate_bps": float(gigabits[1]) * 1e9 if gigabits else None,
        "link_layer": read(root, f"{base}/link_layer"),
    }
