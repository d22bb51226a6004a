"""Graphs of even nodes against logs of NCCL's own search, and the choices that follow from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.models.hardware import hardware_names, load_hardware
from commbench.models.nccl import Graph, nccl_estimate, nccl_inputs, search_graphs


def shape(graph: Graph | None) -> tuple[int, float, float] | None:
    """(channels, GB/s of one inside, GB/s of one between nodes)."""
    return None if graph is None else (graph.channels, graph.bw_intra_Bps / 1e9, graph.bw_inter_Bps / 1e9)


def shapes(preset: str, nodes: int, per_node: int, version: str = "2.30.7") -> list[tuple[int, float, float] | None]:
    inputs = nccl_inputs(load_hardware(preset), nodes, per_node, version=version)
    return [shape(graph) for graph in (inputs.ring, inputs.tree, inputs.nvls)]


def test_graphs_that_nccl_logged() -> None:
    # NVIDIA/nccl issue 1197, 8 H100 on one node: patterns 4, 1 and 5.
    assert shapes("h100-8x400g", 1, 8) == [(12, 30, 30), (12, 30, 30), (8, 40, 60)]
    # A 16-GPU RoCE log: "Pattern 4, crossNic 2, nChannels 8, bw 48.000000/48.000000, type NVL/PIX".
    assert shapes("h100-8x400g", 2, 8)[0] == (8, 48, 48)
    # NVIDIA/nccl issue 1189, 2 H20 and two NICs of 400 Gbit/s a node: 4 channels of 24.
    ring, _, _ = search_graphs(gpus=2, nodes=2, nvlink_Bps=370.8e9, nics=2, nic_Bps=48e9, cc=90)
    assert shape(ring) == (4, 24, 24)
    # 8 GPUs and 4 NICs a node, 2 nodes: "16 coll channels" and four NVLS heads.
    inputs = nccl_inputs(load_hardware("h100-4x400g"), 2, 8)
    assert (inputs.channels, inputs.nvls and inputs.nvls.channels) == (16, 4)
    # One node of 8 H100: "24 coll channels".
    assert nccl_inputs(load_hardware("h100-8x400g"), 1, 8).channels == 24


@pytest.mark.parametrize(
    ("preset", "nodes", "per_node", "ring", "nvls"),
    [
        ("a100-8x200g", 1, 8, (12, 20, 20), None),
        ("a100-8x200g", 2, 8, (8, 24, 24), None),
        ("a100-4x100g-efa", 2, 8, (4, 12, 12), None),
        ("b200-8x400g", 1, 8, (16, 45, 45), (8, 80, 90)),
        ("b200-8x400g", 1, 7, (16, 45, 45), (7, 90, 90)),
        ("h200-8x400g", 1, 7, (12, 30, 30), (7, 40, 60)),
        ("h200-8x400g", 1, 6, (12, 30, 30), (6, 50, 60)),
        ("h200-8x400g", 1, 5, (12, 30, 30), (5, 60, 60)),
        ("h200-8x400g", 4, 8, (8, 48, 48), (8, 40, 48)),
        ("h100-8x200g", 2, 8, (8, 24, 24), (8, 24, 24)),
        ("gb200-nvl72-4x400g", 1, 72, (16, 45, 45), (32, 20, 40)),
        ("h100-1x100g", 2, 8, (1, 12, 12), (1, 12, 12)),
    ],
)
def test_graphs_of_known_machines(
    preset: str, nodes: int, per_node: int, ring: tuple[int, float, float], nvls: tuple[int, float, float] | None
) -> None:
    """From NVIDIA's speeds: the sums of what a node's NVLink and NICs carry, as NCCL's second pass leaves them."""
    found = shapes(preset, nodes, per_node)
    assert (found[0], found[2]) == (ring, nvls)


def test_trees_of_two_nodes_may_go_twice_as_fast_inside_as_between() -> None:
    """Each node is in the middle of one of the two trees only: p4de, 4 x 100 Gbit/s, measured 78.3 GB/s on 48."""
    assert shapes("a100-4x100g-efa", 2, 8)[1] == (4, 24, 12)
    inputs = nccl_inputs(load_hardware("a100-4x100g-efa"), 2, 8)
    got = nccl_estimate("all_reduce", 1 << 31, inputs, version="2.27.7")
    assert got.algorithm == "Tree"
    assert got.bus_bandwidth_Bps("all_reduce", 1 << 31, 16) == pytest.approx(78.3e9, rel=0.1)


def test_speeds_that_versions_try() -> None:
    # 2.18 has no 50 for Hopper: six heads have to do with 40.
    assert shapes("h200-8x400g", 1, 6, "2.18.6")[2] == (6, 40, 60)
    # NICs of 800 Gbit/s on Blackwell: 48 is the most before 2.27.6, then 96, in 2.29.7 80 as well.
    assert shapes("b300-8x800g", 2, 8, "2.26.6")[2] == (8, 48, 48)
    assert shapes("b300-8x800g", 2, 8, "2.27.5")[2] == (8, 48, 48)
    assert shapes("b300-8x800g", 2, 8, "2.27.7")[2] == (8, 48, 96)
    assert shapes("b300-8x800g", 2, 8, "2.28.9")[2] == (8, 48, 96)
    assert shapes("b300-8x800g", 2, 8, "2.29.7")[2] == (8, 80, 96)


@pytest.mark.parametrize(
    ("preset", "gpus", "algorithm", "bus_GBps"),
    [
        ("h200-8x400g", 4, "Ring", 360), ("h200-8x400g", 5, "NVLS", 400), ("h200-8x400g", 6, "NVLS", 416),
        ("h200-8x400g", 7, "NVLS", 400), ("h200-8x400g", 8, "NVLS", 466),
        ("b200-8x400g", 4, "Ring", 719), ("b200-8x400g", 5, "Ring", 719), ("b200-8x400g", 6, "NVLS", 749),
        ("b200-8x400g", 7, "NVLS", 899), ("b200-8x400g", 8, "NVLS", 932),
    ],
)  # fmt: skip
def test_choices_observed_by_number_of_gpus(preset: str, gpus: int, algorithm: str, bus_GBps: int) -> None:
    """NCCL 2.27.7, 8 GiB all_reduce on a node (stas00/ml-engineering, network/README.md): all ten choices."""
    inputs = nccl_inputs(load_hardware(preset), 1, gpus, version="2.27.7")
    got = nccl_estimate("all_reduce", 1 << 33, inputs, version="2.27.7")
    assert got.algorithm == algorithm
    assert got.bus_bandwidth_Bps("all_reduce", 1 << 33, gpus) == pytest.approx(bus_GBps * 1e9, rel=2e-3)


def test_the_same_hardware_chooses_otherwise_from_2_28_on() -> None:
    for preset, gpus in (("h200-8x400g", 5), ("b200-8x400g", 6), ("b200-8x400g", 7)):
        inputs = nccl_inputs(load_hardware(preset), 1, gpus)
        assert nccl_estimate("all_reduce", 1 << 33, inputs, version="2.30.7").algorithm == "Ring"


def test_settings_and_places() -> None:
    hardware = load_hardware("gb200-nvl72-4x400g")
    assert nccl_inputs(hardware, 2, 72).multi_host_nvlink
    assert not nccl_inputs(hardware, 18, 4).multi_host_nvlink
    assert nccl_inputs(hardware, 1, 72, nvls=False).nvls is None
    assert nccl_inputs(hardware, 2, 72, collnet=True).collnet
    far = nccl_inputs(load_hardware("h100-8x400g-efa"), 2, 8)
    near = nccl_inputs(load_hardware("h100-8x400g-efa"), 1, 8)
    assert (far.ring.latency_inter_s, near.ring.latency_inter_s) == (75e-6, 0)
    assert (far.ring.same_channels, near.ring.same_channels) == (False, True)
    lone = nccl_inputs(load_hardware("h100-8x400g"), 2, 1)
    assert (lone.tree.pattern, lone.tree.type_intra, lone.nvls) == (3, "LOC", None)


@pytest.mark.parametrize(
    ("preset", "nodes", "per_node", "says"),
    [
        ("mi300x-8x400g", 1, 8, "has no NCCL"),
        ("h100-8x400g", 1, 9, "has 8 GPUs a node"),
        ("h100-8x400g", 0, 8, "cannot be made"),
        ("h100-8x400g", 1, 0, "cannot be made"),
    ],
)
def test_machines_that_cannot_be_made(preset: str, nodes: int, per_node: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        nccl_inputs(load_hardware(preset), nodes, per_node)


NVIDIA = [name for name in hardware_names() if load_hardware(name).nccl]


@given(
    st.sampled_from(NVIDIA), st.integers(1, 9), st.integers(1, 72),
    st.sampled_from(["2.18.6", "2.21.5", "2.25.1", "2.27.7", "2.30.7"]),
)  # fmt: skip
def test_no_graph_carries_more_than_the_node_has(preset: str, nodes: int, gpus: int, version: str) -> None:
    hardware = load_hardware(preset)
    gpus = min(gpus, hardware.gpus_per_node)
    inputs = nccl_inputs(hardware, nodes, gpus, version=version)
    facts = hardware.nccl
    assert facts
    tolerance = 1 + 1e-6
    graphs = [graph for graph in (inputs.ring, inputs.tree, inputs.nvls) if graph]
    assert all(1 <= graph.channels <= 32 for graph in graphs)
    if gpus > 1:
        # A chain through all GPUs uses gpus - 1 of their links.
        assert inputs.ring.total_Bps * (gpus - 1) / gpus <= facts.nvlink_Bps * tolerance
        assert inputs.tree.total_Bps * (gpus - 1) / gpus <= facts.nvlink_Bps * tolerance
    if nodes > 1:
        nics = hardware.nics_per_node * gpus / hardware.gpus_per_node
        assert inputs.ring.channels * inputs.ring.bw_inter_Bps <= max(1, -(-nics // 1)) * facts.nic_Bps * tolerance
    if inputs.nvls:
        assert (inputs.nvls.channels + 1) * inputs.nvls.bw_intra_Bps <= facts.nvlink_Bps * tolerance
    if gpus * nodes > 1 and not (inputs.multi_host_nvlink and version == "2.18.6"):
        assert nccl_estimate("all_reduce", 1 << 30, inputs, version=version).seconds
