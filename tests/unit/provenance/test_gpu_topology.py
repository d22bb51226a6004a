"""Ways between GPUs, as NVML tells them, and to adapters, from trees of sysfs whose classes were worked out by hand."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from commbench.provenance.gpu_topology import collect_topology, distance, nic_map

_spec = importlib.util.spec_from_file_location("pynvml_double", Path(__file__).with_name("pynvml_double.py"))
assert _spec and _spec.loader
double = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(double)

# One host bridge with a switch (upstream 0000:16:00.0, downstream 0000:17:00.0 and so on) and a root port without one;
# a second host bridge of the same NUMA node; a third of the other node.
BEHIND_SWITCH = "pci0000:15/0000:15:01.0/0000:16:00.0"
PLACES = {
    # GPUs
    "0000:1b:00.0": (f"{BEHIND_SWITCH}/0000:17:00.0/0000:1b:00.0", 0),
    "0000:2b:00.0": ("pci0000:40/0000:40:01.0/0000:2b:00.0", 1),
    # adapters
    "0000:18:00.0": (f"{BEHIND_SWITCH}/0000:17:01.0/0000:18:00.0", 0),  # another port of the same switch
    "0000:1e:00.0": (f"{BEHIND_SWITCH}/0000:17:02.0/0000:1c:00.0/0000:1d:00.0/0000:1e:00.0", 0),  # a second switch
    "0000:19:00.0": ("pci0000:15/0000:15:05.0/0000:19:00.0", 0),  # another root port
    "0000:31:00.0": ("pci0000:30/0000:30:01.0/0000:31:00.0", 0),  # another host bridge of the node
    "0000:41:00.0": ("pci0000:40/0000:40:02.0/0000:41:00.0", 1),
}
ADAPTERS = {
    "infiniband": {"mlx5_0": "0000:18:00.0", "mlx5_1": "0000:1e:00.0", "mlx5_2": "0000:41:00.0"},
    "net": {"eth0": "0000:19:00.0", "ib0": "0000:18:00.0", "eth1": "0000:31:00.0"},
}


def link(path: Path, target: Path) -> None:
    """A relative link, as the kernel makes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    devices = tmp_path / "sys/devices"
    for address, (place, node) in PLACES.items():
        folder = devices / place
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
        link(tmp_path / "sys/bus/pci/devices" / address, folder)
    for node in (0, 1):
        (devices / f"system/node/node{node}").mkdir(parents=True)
    for kind, adapters in ADAPTERS.items():
        for name, address in adapters.items():
            # /sys/class/net/eth0 leads to .../0000:19:00.0/net/eth0, whose "device" leads back.
            folder = devices / PLACES[address][0] / kind / name
            folder.mkdir(parents=True)
            link(folder / "device", devices / PLACES[address][0])
            link(tmp_path / "sys/class" / kind / name, folder)
    (devices / "virtual/net/lo").mkdir(parents=True)
    link(tmp_path / "sys/class/net/lo", devices / "virtual/net/lo")
    return tmp_path


def test_every_class_of_distance(machine: Path) -> None:
    found = nic_map(machine, ["0000:1b:00.0", "0000:2b:00.0"])
    assert found["nic_distance"] == {
        "0000:1b:00.0": {
            "mlx5_0": "PIX",
            "ib0": "PIX",
            "mlx5_1": "PXB",
            "eth0": "PHB",
            "eth1": "NODE",
            "mlx5_2": "SYS",
        },
        "0000:2b:00.0": {"mlx5_0": "SYS", "ib0": "SYS", "mlx5_1": "SYS", "eth0": "SYS", "eth1": "SYS", "mlx5_2": "PHB"},
    }
    assert found["nics"]["mlx5_1"] == {"pci": "0000:1e:00.0", "numa_node": 0}
    assert "lo" not in found["nics"]


def test_a_virtual_adapter_counts_as_the_function_that_carries_it(tmp_path: Path) -> None:
    carrier = tmp_path / "sys/devices/pci0000:00/0000:00:03.0"
    (carrier / "virtio0/net/eth0").mkdir(parents=True)
    link(carrier / "virtio0/net/eth0/device", carrier / "virtio0")
    link(tmp_path / "sys/class/net/eth0", carrier / "virtio0/net/eth0")
    gpu = tmp_path / "sys/devices/pci0000:00/0000:00:05.0"
    gpu.mkdir()
    link(tmp_path / "sys/bus/pci/devices/0000:00:05.0", gpu)
    assert nic_map(tmp_path, ["0000:00:05.0"]) == {
        "nics": {"eth0": {"pci": "0000:00:03.0", "numa_node": None}}, "nic_distance": {"0000:00:05.0": {"eth0": "PHB"}},
    }  # fmt: skip


def test_one_node_says_no_node_of_its_devices(tmp_path: Path) -> None:
    for bridge, address in (("00", "0000:01:00.0"), ("80", "0000:81:00.0")):
        folder = tmp_path / f"sys/devices/pci0000:{bridge}/0000:{bridge}:01.0/{address}"
        (folder / "net/eth0").mkdir(parents=True)
        (folder / "numa_node").write_text("-1\n")
        link(tmp_path / "sys/bus/pci/devices" / address, folder)
    link(folder / "net/eth0/device", folder)
    link(tmp_path / "sys/class/net/eth0", folder / "net/eth0")
    (tmp_path / "sys/devices/system/node/node0").mkdir(parents=True)
    assert nic_map(tmp_path, ["0000:01:00.0"])["nic_distance"] == {"0000:01:00.0": {"eth0": "NODE"}}
    (tmp_path / "sys/devices/system/node/node1").mkdir()
    assert nic_map(tmp_path, ["0000:01:00.0"])["nic_distance"] == {"0000:01:00.0": {"eth0": "SYS"}}


def test_a_gpu_that_sysfs_does_not_show(machine: Path) -> None:
    assert set(nic_map(machine, ["0000:ff:00.0"])["nic_distance"]["0000:ff:00.0"].values()) == {None}
    assert nic_map(machine / "nothing", []) == {"nics": {}, "nic_distance": {}}


def test_distance_is_the_same_both_ways_and_none_to_itself(machine: Path) -> None:
    chains = [tuple(place.split("/")) for place, _ in PLACES.values()]
    for one in chains:
        assert distance(one, one, same_node=True) == "X"
        for other in chains:
            assert distance(one, other, same_node=False) == distance(other, one, same_node=False)


def test_functions_of_one_adapter_share_its_port() -> None:
    port = ("pci0000:15", "0000:15:01.0")
    assert distance((*port, "0000:16:00.0"), (*port, "0000:16:00.1"), same_node=True) == "PIX"


def test_peers_ancestors_and_links(monkeypatch: pytest.MonkeyPatch, machine: Path) -> None:
    # GPU 0 and 1 have two links and a third that is down; GPU 2 has one to a switch.
    gpus: list[Any] = [
        double.Gpu(0, links=[1, 1, None], ancestors={1: 10, 2: 50}, peers={(2, 0): 3, (2, 1): 3, (2, 2): 5}),
        double.Gpu(1, links=[0, 0, None], ancestors={0: 10, 2: 30}),
        double.Gpu(2, links=["switch"], ancestors={0: 50, 1: 40}, fails={"nvmlDeviceGetP2PStatus": 3}),
    ]
    nvml = double.Nvml(*gpus)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = collect_topology(machine)
    assert found is not None
    assert found["pci"] == ["0000:1b:00.0", "0000:2b:00.0", "0000:3b:00.0"]
    assert found["peer_access"]["read"][0] == [None, "ok", None]  # the call fails for a pair with GPU 2
    assert found["ancestors"] == [[None, "PIX", "SYS"], ["PIX", None, "PHB"], ["SYS", "NODE", None]]
    assert (found["nvlinks"], found["nvlinks_to_switches"]) == ([[0, 2, 0], [2, 0, 0], [0, 0, 0]], [0, 0, 1])
    assert found["nic_distance"]["0000:1b:00.0"]["mlx5_0"] == "PIX"
    assert nvml.users == 0
    gpus[2].fails.clear()
    found = collect_topology(machine)
    assert found is not None
    assert [found["peer_access"][name][0][2] for name in ("read", "write", "nvlink")] == [
        "topology not supported", "topology not supported", "not supported"
    ]  # fmt: skip
    assert found["peer_access"]["nvlink"][1] == ["ok", None, "ok"]
