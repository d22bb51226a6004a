"""Machines known by name: link rates and latencies as plain numbers, each with its source, from ``hardware.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from commbench.registry import unknown_name


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclFacts:
    """What NCCL makes of the hardware, in NCCL's own figures: bytes a second one way, seconds.

    ``nvlink_Bps`` is one GPU's NVLink in all, ``pci_Bps`` its path to the NIC, ``nic_Bps`` the line rate of a NIC.
    ``compute_capability`` is times ten.
    """

    compute_capability: int
    nvlink_Bps: float
    pci_Bps: float
    nic_Bps: float
    nvswitch: bool
    cpu_arch: str
    cpu_vendor: str
    type_inter: str
    net_latency_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A preset. Rates are usable bytes a second in one direction.

    ``link_Bps`` and ``link_latency_s``: one GPU to the others of its node; ``nic_Bps`` and ``nic_latency_s``: one NIC to
    another node's; ``reduce_Bps``: received bytes that one GPU adds to what it holds. ``node`` says what a node is: the
    GPUs that links join, which may be a rack of several hosts with ``gpus_per_host`` GPUs each. ``nccl`` is None where
    there is no NCCL. ``sources``: (field, where its number is from); "approximation" stands where it is one.
    """

    name: str
    description: str
    vendor: str
    arch: str
    node: str
    gpus_per_node: int
    gpus_per_host: int
    link_Bps: float
    link_latency_s: float
    nics_per_node: int
    nic_line_Gbps: float
    nic_Bps: float
    nic_latency_s: float
    reduce_Bps: float
    nccl: NcclFacts | None
    sources: tuple[tuple[str, str], ...]

    @property
    def node_Bps(self) -> float:
        """All NICs of a node, one direction."""
        return self.nics_per_node * self.nic_Bps

    def constants(self) -> dict[str, float]:
        """The numbers that link models take, in SI units, by field name."""
        names = (
            "gpus_per_node", "link_Bps", "link_latency_s", "nics_per_node", "nic_Bps", "nic_latency_s", "reduce_Bps",
        )  # fmt: skip
        return {name: float(getattr(self, name)) for name in names}


def hardware_names() -> tuple[str, ...]:
    """The presets' names, in the order of the file."""
    return tuple(_file()["presets"])


def load_hardware(name: str) -> Hardware:
    """The preset called ``name``, such as ``h200-8x400g``: GPU, then NICs a node (a host where it is a rack) × Gbit/s.

    Raises ValueError for a name that is not listed, with the nearest one that is.
    """
    if name not in _file()["presets"]:
        raise ValueError(unknown_name("hardware", name, hardware_names()))
    return _preset(name)


@lru_cache(maxsize=1)
def _file() -> dict[str, Any]:
    text = resources.files("commbench.models").joinpath("hardware.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


@lru_cache(maxsize=64)
def _preset(name: str) -> Hardware:
    preset = _file()["presets"][name]
    gpu, nic = _file()["gpus"][preset["gpu"]], _file()["nics"][preset["nic"]]
    numbers = {
        "link_Bps": gpu["link_Bps"], "link_latency_s": gpu["link_latency_s"], "reduce_Bps": gpu["reduce_Bps"],
        "nic_Bps": nic["rate_Bps"], "nic_latency_s": nic["latency_s"],
    }  # fmt: skip
    sources = [(field, number["source"]) for field, number in numbers.items()]
    facts = None
    if "nccl" in preset:
        facts, more = _nccl(preset["nccl"], gpu, nic)
        sources += more
    return Hardware(
        name=name, description=preset["source"], vendor=gpu["vendor"], arch=gpu["arch"], node=preset["node"],
        gpus_per_node=preset["gpus_per_node"], gpus_per_host=preset["gpus_per_host"],
        nics_per_node=preset["nics_per_node"], nic_line_Gbps=nic["line_Gbps"], nccl=facts, sources=tuple(sources),
        **{field: float(number["value"]) for field, number in numbers.items()},
    )  # fmt: skip


def _nccl(preset: dict[str, Any], gpu: dict[str, Any], nic: dict[str, Any]) -> tuple[NcclFacts, list[tuple[str, str]]]:
    pci = _file()["pci"][preset["pci"]]
    latency = preset.get("net_latency_s", {"value": 0.0, "source": "NCCL's own InfiniBand and RoCE transport says 0"})
    facts = NcclFacts(
        compute_capability=gpu["compute_capability"], nvlink_Bps=float(gpu["link_Bps"]["value"]),
        pci_Bps=float(pci["value"]), nic_Bps=nic["line_Gbps"] / 8 * 1e9, nvswitch=preset["nvswitch"],
        cpu_arch=preset["cpu_arch"], cpu_vendor=preset["cpu_vendor"], type_inter=preset["type_inter"],
        net_latency_s=float(latency["value"]),
    )  # fmt: skip
    return facts, [("nccl.pci_Bps", pci["source"]), ("nccl.net_latency_s", latency["source"])]
