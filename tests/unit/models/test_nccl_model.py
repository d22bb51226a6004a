"""NCCL's tuning model against tables worked out by hand, a printed table, observed choices and version differences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commbench.models.nccl import (
    Graph,
    NcclInputs,
    nccl_estimate,
    nccl_table,
    parse_version,
)
from commbench.models.nccl.enabling import allowed
from commbench.models.nccl.inputs import BALANCED_TREE, NVLS, RING, TREE

VERSIONS = (
    "2.18.6", "2.19.4", "2.20.5", "2.21.5", "2.22.3", "2.23.4", "2.24.3", "2.25.1", "2.26.6", "2.27.7", "2.28.3",
    "2.28.7", "2.28.9", "2.29.2", "2.29.7", "2.30.7",
)  # fmt: skip
NEWEST = "2.30.7"


def graph(pattern: int, channels: int, intra: float, inter: float, **rest: object) -> Graph:
    return Graph(
        pattern=pattern, channels=channels, bw_intra_Bps=intra * 1e9, bw_inter_Bps=inter * 1e9,
        **rest,  # type: ignore[arg-type]
    )  # fmt: skip


H100_NODE = NcclInputs(
    ranks=8, nodes=1, ring=graph(RING, 12, 30, 30, same_channels=True), tree=graph(BALANCED_TREE, 12, 30, 30),
    nvls=graph(NVLS, 8, 40, 60),
)  # fmt: skip
H200_FOUR_NODES = NcclInputs(
    ranks=32, nodes=4, ring=graph(RING, 8, 45, 45), tree=graph(BALANCED_TREE, 8, 45, 45), nvls=graph(NVLS, 8, 40, 48)
)


def printed(inputs: NcclInputs, version: str, *entry: str) -> tuple[float, float]:
    """(microseconds, GB/s) as NCCL prints them."""
    cost = nccl_table(inputs, parse_version(version))[entry]  # type: ignore[index]
    return round(cost.latency_s * 1e6, 1), round(cost.bandwidth_Bps / 1e9, 1)


@pytest.mark.parametrize(
    ("inputs", "entry", "expected"),
    [
        # 8 H100 on one node: 12 channels of 30 GB/s, 8 NVLS heads of 40.
        (H100_NODE, ("AllReduce", "Ring", "LL"), (15.0, 80.6)),  # 6.6 + 14*.6; 141 * 8/14
        (H100_NODE, ("AllReduce", "Ring", "LL128"), (40.6, 189.3)),  # 14 + 14*1.9; .92*360 * 8/14
        (H100_NODE, ("AllReduce", "Ring", "Simple"), (56.0, 205.7)),  # 8.4 + 14*3.4; 360 * 8/14
        (H100_NODE, ("AllReduce", "Tree", "Simple"), (64.4, 165.6)),  # 8.4 + 2*7*4; .92*360 / 2
        (H100_NODE, ("AllReduce", "NVLS", "Simple"), (25.0, 272.0)),  # 8 * 40*.85*7/8*2 * 8/14
        (H100_NODE, ("AllGather", "Ring", "LL"), (10.8, 161.1)),
        (H100_NODE, ("AllGather", "Ring", "LL128"), (27.3, 378.5)),
        (H100_NODE, ("AllGather", "Ring", "Simple"), (32.2, 411.4)),
        (H100_NODE, ("AllGather", "NVLS", "Simple"), (25.0, 208.2)),  # 8 * 40*.85*7/8 * 7/8
        # 32 H200 on four nodes: 8 channels of 45, 8 heads of 40 with 48 between nodes.
        (H200_FOUR_NODES, ("AllReduce", "Ring", "LL"), (78.8, 10.5)),  # 20.4 * 32/62: the row of Intel processors
        (H200_FOUR_NODES, ("AllReduce", "Ring", "LL128"), (144.4, 151.5)),  # 8 * 36.7 * 32/62
        (H200_FOUR_NODES, ("AllReduce", "Ring", "Simple"), (282.8, 185.8)),
        (H200_FOUR_NODES, ("AllReduce", "Tree", "Simple"), (120.4, 144.0)),  # 8 * 36 / 2
        (H200_FOUR_NODES, ("AllReduce", "NVLSTree", "Simple"), (108.6, 187.9)),  # 8 * 45.5 * 32/62
        (H200_FOUR_NODES, ("AllGather", "Ring", "LL"), (42.7, 21.1)),
        (H200_FOUR_NODES, ("AllGather", "Ring", "LL128"), (79.2, 303.1)),
        (H200_FOUR_NODES, ("AllGather", "Ring", "Simple"), (145.6, 371.6)),
    ],
)
def test_tables_worked_by_hand(inputs: NcclInputs, entry: tuple[str, str, str], expected: tuple[float, float]) -> None:
    assert printed(inputs, NEWEST, *entry) == expected


def test_a_table_that_nccl_2_29_7_printed() -> None:
    """Two nodes of one RTX 5090 over sockets (eunomia-bpf/nccl-eBPF, docs/tmp): 1 GPU a node, PAT, trees of one GPU."""
    inputs = NcclInputs(
        ranks=2, nodes=2, cc_min=120, cc_max=120, nvswitch=False,
        ring=graph(RING, 2, 1.2, 1.2, type_intra="LOC", type_inter="SYS", same_channels=True),
        tree=graph(TREE, 2, 2.4, 1.2, type_intra="LOC", type_inter="SYS"),
    )  # fmt: skip
    expected = {
        ("Broadcast", "Ring", "LL"): (9.3, 1.2), ("Broadcast", "Ring", "Simple"): (22.4, 2.4),
        ("AllGather", "Ring", "LL"): (11.6, 2.4), ("ReduceScatter", "Ring", "Simple"): (22.4, 4.8),
        ("AllReduce", "Tree", "LL"): (16.8, 0.5), ("AllReduce", "Tree", "Simple"): (36.4, 1.9),
        ("AllReduce", "Ring", "LL"): (16.6, 1.2), ("AllReduce", "Ring", "Simple"): (36.4, 2.4),
        ("AllGather", "PAT", "Simple"): (17.6, 3.6),
    }  # fmt: skip
    for entry, values in expected.items():
        assert printed(inputs, "2.29.7", *entry) == values, entry
    assert not any(protocol == "LL128" for _, _, protocol in allowed(inputs, (2, 29, 7), None, None))
    # The choices of the same log: LL up to 16 KiB, Simple from 32 KiB.
    for size, protocol in ((1024, "LL"), (16384, "LL"), (32768, "Simple"), (1 << 27, "Simple")):
        assert nccl_estimate("broadcast", size, inputs, version="2.29.7").protocol == protocol


def test_tree_latency_that_a_log_of_three_nodes_shows() -> None:
    """NVIDIA/nccl issue 1453: 24 H100 on 3 nodes, Tree LL: 25.874907 us at 4096 B and 26.549810 us at 8192 B."""
    logged = 2 * 25.874907 - 26.549810
    inputs = NcclInputs(ranks=24, nodes=3, ring=graph(RING, 8, 45, 45), tree=graph(BALANCED_TREE, 8, 45, 45))
    for version in VERSIONS:
        latency = nccl_table(inputs, parse_version(version))["AllReduce", "Tree", "LL"].latency_s
        assert latency * 1e6 == pytest.approx(logged, abs=1e-3)


def test_size_switch_observed_on_eight_h200() -> None:
    """stas00/ml-engineering, network/README.md: NCCL 2.27.7 takes RING/LL up to 1 MiB and NVLS/SIMPLE from 2 MiB."""
    for size in (1 << k for k in range(3, 21)):
        chosen = nccl_estimate("all_reduce", size, H100_NODE, version="2.27.7")
        assert (chosen.algorithm, chosen.protocol) == ("Ring", "LL"), size
    for size in (1 << k for k in range(21, 34)):
        chosen = nccl_estimate("all_reduce", size, H100_NODE, version="2.27.7")
        assert (chosen.algorithm, chosen.protocol) == ("NVLS", "Simple"), size


def test_time_is_latency_and_bytes_over_bandwidth_with_the_plateau_of_the_ring() -> None:
    ring = {"algo": "Ring", "proto": "Simple", "version": NEWEST}
    size = 1 << 30
    got = nccl_estimate("all_reduce", size, H200_FOUR_NODES, **ring).seconds
    assert got == pytest.approx(1.4 * 282.8e-6 + size / (360e9 * 32 / 62), rel=1e-9)
    # 64 B for each of 16 channels and 32 ranks are needed for it: 32 KiB.
    below = nccl_estimate("all_reduce", (32 << 10) - 1, H200_FOUR_NODES, **ring).seconds
    assert below == pytest.approx(282.8e-6 + 32767 / (360e9 * 32 / 62), rel=1e-9)
    volta = replace(H200_FOUR_NODES, cc_min=70, cc_max=70)
    older = nccl_estimate("all_reduce", size, volta, **ring).seconds
    assert older == pytest.approx(1.9 * 282.8e-6 + size / (360e9 * 32 / 62), rel=1e-9)
    one_node = nccl_estimate("all_reduce", size, H100_NODE, **ring).seconds
    assert one_node == pytest.approx(56e-6 + size / (360e9 * 8 / 14), rel=1e-9)


def test_trees_of_middle_sizes_are_corrected() -> None:
    for size, factor in ((64, 0.9), (64 << 11, 0.5), (64 << 22, 0.9), (64 << 23, 1.0)):
        got = nccl_estimate("all_reduce", size, H100_NODE, version=NEWEST, algo="Tree", proto="Simple").seconds
        assert got == pytest.approx(64.4e-6 + size / (165.6e9 * factor), rel=1e-9), size
    # Below 64 B the oldest take the first factor, the later ones none.
    for version, factor in (("2.21.5", 0.9), ("2.22.3", 1.0)):
        latency = nccl_table(H100_NODE, parse_version(version))["AllReduce", "Tree", "Simple"].latency_s
        got = nccl_estimate("all_reduce", 8, H100_NODE, version=version, algo="Tree", proto="Simple").seconds
        assert got is not None
        assert got - latency == pytest.approx(8 / (165.6e9 * factor), rel=1e-4)


def test_latency_of_the_tree_by_version() -> None:
    entry = ("AllReduce", "Tree", "Simple")
    assert printed(H100_NODE, "2.18.6", *entry)[0] == 56.0  # 0 + 14*4
    for version in ("2.19.4", "2.22.3"):
        assert printed(H100_NODE, version, *entry)[0] == 392.0  # 0 + 14*28
    for version in ("2.23.4", NEWEST):
        assert printed(H100_NODE, version, *entry)[0] == 64.4  # 8.4 + 14*4


def test_ring_ll_by_version() -> None:
    """A quarter of the bus bandwidth of all_reduce and of any operation between nodes before 2.21, else a third."""
    assert printed(H100_NODE, "2.20.5", "AllReduce", "Ring", "LL")[1] == round(87.7 * 8 / 14, 1)
    slow = replace(H100_NODE, ring=graph(RING, 2, 30, 30))
    assert printed(slow, "2.20.5", "AllReduce", "Ring", "LL")[1] == round(15 * 8 / 14, 1)
    assert printed(slow, "2.20.5", "AllGather", "Ring", "LL")[1] == round(20 * 8 / 7, 1)
    assert printed(slow, "2.21.5", "AllGather", "Ring", "LL")[1] == round(30 * 8 / 7, 1)


def test_ring_between_nodes_had_one_crossing_more_before_2_23() -> None:
    entry = ("AllReduce", "Ring", "Simple")
    # 62 steps: 8 between nodes at 14 us and 54 inside at 3.4; then 6 and 56.
    assert printed(H200_FOUR_NODES, "2.22.3", *entry)[0] == round(8.4 + 54 * 3.4 + 8 * 14, 1)
    assert printed(H200_FOUR_NODES, "2.23.4", *entry)[0] == round(8.4 + 56 * 3.4 + 6 * 14, 1)


def test_one_gpu_a_node_by_version() -> None:
    lone = NcclInputs(ranks=4, nodes=4, ring=graph(RING, 2, 24, 24), tree=graph(TREE, 2, 48, 24))
    # LL128 at .7 before 2.23, .92 since; LL's step over the network is the tree's 5 us since 2.23, 2.7 before.
    assert printed(lone, "2.22.3", "AllGather", "Ring", "LL128")[1] == round(0.7 * 48 * 4 / 3, 1)
    assert printed(lone, "2.23.4", "AllGather", "Ring", "LL128")[1] == round(0.92 * 48 * 4 / 3, 1)
    assert printed(lone, "2.22.3", "AllGather", "Ring", "LL")[0] == round(6.6 + 3 * 2.7, 1)
    assert printed(lone, "2.23.4", "AllGather", "Ring", "LL")[0] == round(6.6 + 3 * 5.0, 1)
    # PAT: since 2.23, at .85 of the tree's bandwidth and then .75; base + log2 N of a crossing / 3.5 + 2.8 a rank.
    assert ("AllGather", "PAT", "Simple") not in nccl_table(lone, (2, 22, 3))
    assert printed(lone, "2.23.4", "AllGather", "PAT", "Simple") == (round(8 + 2 * 14 / 3.5 + 11.2, 1), 40.8)
    assert printed(lone, "2.24.3", "AllGather", "PAT", "Simple") == (round(8 + 2 * 14 / 3.5 + 11.2, 1), 36.0)
    # A tree of single GPUs costs .85.
    assert printed(lone, NEWEST, "AllReduce", "Tree", "Simple")[1] == round(0.92 * 48 * 0.85 / 2, 1)


def test_nvls_by_version() -> None:
    entry = ("AllReduce", "NVLS", "Simple")
    assert printed(H100_NODE, "2.18.6", *entry) == (23.0, round(320 * 5 / 6, 1))
    assert printed(H100_NODE, "2.20.5", *entry) == (23.0, round(320 * 5 / 6, 1))
    assert printed(H100_NODE, "2.27.7", *entry) == (25.0, round(320 * 5 / 6, 1))
    assert printed(H100_NODE, "2.28.3", *entry) == (25.0, 272.0)
    gather = ("AllGather", "NVLS", "Simple")
    assert gather not in nccl_table(H100_NODE, (2, 18, 6))
    assert printed(H100_NODE, "2.19.4", *gather)[1] == round(320 * 5 / 6, 1)
    assert printed(H100_NODE, "2.23.4", *gather)[1] == 320.0
    assert printed(H100_NODE, "2.27.7", *gather)[1] == 280.0  # 8 * 40 * 7/8
    assert printed(H100_NODE, "2.28.3", *gather)[1] == 208.2


def test_nvls_tree_by_version() -> None:
    entry = ("AllReduce", "NVLSTree", "Simple")
    four = H200_FOUR_NODES
    two = replace(four, ranks=16, nodes=2)
    assert printed(four, "2.18.6", *entry) == (23 + 6 * 19.0, round(384 * 0.7 * 4 / 6, 1))  # 8 channels of bw_inter
    assert printed(two, "2.18.6", *entry) == (23 + 2 * 19.0, round(320 * 0.7, 1))
    assert printed(four, "2.27.7", *entry) == (25 + 4 * 14.0, round(8 * 24 * 5 / 6, 1))
    assert printed(two, "2.27.7", *entry)[1] == round(320 * 5 / 6, 1)
    assert printed(two, "2.28.3", *entry)[1] == round(8 * 57.7 * 16 / 30, 1)
    assert printed(four, "2.28.9", *entry)[0] == 25 + 4 * 20.9
    # Measured with that algorithm forced, 4 GiB on 4 nodes of p5en, NCCL 2.27.7: 310 GB/s of bus bandwidth.
    forced = nccl_estimate("all_reduce", 1 << 32, four, version="2.27.7", algo="allreduce:nvlstree")
    assert forced.bus_bandwidth_Bps("all_reduce", 1 << 32, 32) == pytest.approx(310e9, rel=0.01)


BLACKWELL = replace(H100_NODE, cc_min=100, cc_max=100)


@pytest.mark.parametrize(
    ("version", "ll_max", "ring128", "tree", "nvls_tree_four"),
    [
        ("2.24.3", 141, 36.7, 38.7, None),
        ("2.25.1", 282, 73.4, 77.4, None),
        ("2.27.7", 282, 73.4, 77.4, None),
        ("2.28.3", 282, 73.4, 70.0, 43.1),
        ("2.28.9", 282, 73.4, 70.0, 43.8),
        ("2.29.2", 282, 34.5, 70.0, 43.8),
        ("2.29.7", 282, 40.0, 70.0, 43.8),
        ("2.30.7", 282, 40.0, 70.0, 80.0),
    ],
)
def test_blackwells_caps_by_version(
    version: str, ll_max: float, ring128: float, tree: float, nvls_tree_four: float | None
) -> None:
    wide = graph(RING, 16, 300, 300)
    inputs = replace(BLACKWELL, ring=wide, tree=replace(wide, pattern=BALANCED_TREE))
    assert printed(inputs, version, "AllReduce", "Ring", "LL")[1] == round(ll_max * 8 / 14, 1)
    assert printed(inputs, version, "AllReduce", "Ring", "LL128")[1] == round(16 * ring128 * 8 / 14, 1)
    assert printed(inputs, version, "AllReduce", "Tree", "Simple")[1] == round(16 * tree / 2, 1)
    if nvls_tree_four is not None:
        heads = replace(inputs, ranks=32, nodes=4, nvls=graph(NVLS, 8, 300, 300))
        bandwidth = printed(heads, version, "AllReduce", "NVLSTree", "Simple")[1]
        assert bandwidth == round(8 * nvls_tree_four * 32 / 62, 1)


def test_two_nodes_of_blackwell_have_a_ring_cap_of_their_own_from_2_28_7() -> None:
    inputs = replace(BLACKWELL, ranks=16, nodes=2, ring=graph(RING, 16, 300, 300))
    for version, cap in (("2.28.3", 73.4), ("2.28.7", 34.6), ("2.28.9", 34.6), ("2.29.2", 34.6), ("2.29.7", 40.0)):
        assert printed(inputs, version, "AllReduce", "Ring", "LL128")[1] == round(16 * cap * 16 / 30, 1), version


def test_nvls_tree_is_corrected_on_blackwell_with_x86_from_2_29() -> None:
    inputs = replace(H200_FOUR_NODES, cc_min=100, cc_max=100)
    size = 64 << 11
    for version, arch, factor in (("2.28.9", "x86", 1.0), ("2.29.2", "x86", 0.5), ("2.29.2", "arm", 1.0)):
        changed = replace(inputs, cpu_arch=arch)
        cost = nccl_table(changed, parse_version(version))["AllReduce", "NVLSTree", "Simple"]
        got = nccl_estimate("all_reduce", size, changed, version=version, algo="NVLSTree").seconds
        assert got == pytest.approx(cost.latency_s + size / (cost.bandwidth_Bps * factor), rel=1e-9)


def test_processor_decides_ll_between_nodes_and_the_cost_of_posting() -> None:
    entry = ("AllReduce", "Ring", "LL")
    amd = replace(H200_FOUR_NODES, cpu_vendor="amd")
    assert printed(amd, NEWEST, *entry) == (round(6.6 + 56 * 2.0 + 6 * 2.7, 1), round(19 * 32 / 62, 1))
    mixed = replace(H200_FOUR_NODES, cpu_vendor="mixed")
    assert printed(mixed, "2.23.4", *entry)[1] == round(20.4 * 32 / 62, 1)
    assert printed(mixed, "2.24.3", *entry)[1] == round(19 * 32 / 62, 1)
    told = replace(H200_FOUR_NODES, net_overhead_s=5e-6)
    assert printed(told, NEWEST, *entry)[0] == round(6.6 + 56 * 5.0 + 6 * 2.7, 1)
    pci = replace(H100_NODE, tree=graph(BALANCED_TREE, 12, 30, 30, type_intra="SYS"), cpu_arch="power")
    assert printed(pci, NEWEST, "AllReduce", "Tree", "Simple")[0] == round(8.4 + 14 * 5.7, 1)


def test_latency_of_the_nic_counts_twice_for_simple() -> None:
    far = replace(H200_FOUR_NODES, ring=replace(H200_FOUR_NODES.ring, latency_inter_s=35e-6))
    assert printed(far, NEWEST, "AllGather", "Ring", "LL")[0] == round(42.7 + 3 * 35, 1)
    assert printed(far, NEWEST, "AllGather", "Ring", "Simple")[0] == round(145.6 + 3 * 70, 1)


def test_sharp_in_the_network() -> None:
    chain = graph(TREE, 8, 45, 45)
    inputs = replace(H200_FOUR_NODES, collnet_direct=replace(chain, pattern=6), collnet_chain=chain, collnet=True)
    # Direct: 2(3.7 + 7 * .4) + 31 us, 360 GB/s * .85 / 2; chain: 2*7*2.8 + 30 us, 360 / 2.
    assert printed(inputs, NEWEST, "AllReduce", "CollNetDirect", "Simple") == (44.0, 153.0)
    assert printed(inputs, NEWEST, "AllReduce", "CollNetChain", "Simple") == (69.2, 180.0)
    assert printed(inputs, "2.18.6", "AllReduce", "CollNetDirect", "Simple")[0] == round(2 * (8 + 7 * 0.5) + 10.7, 1)
    assert ("AllGather", "CollNetDirect", "Simple") not in nccl_table(inputs, (2, 19, 4))
    assert printed(inputs, NEWEST, "AllGather", "CollNetDirect", "Simple")[1] == 0
    able = replace(inputs, collnet_gathers=True)
    assert printed(able, "2.26.6", "AllGather", "CollNetDirect", "Simple")[1] == round(8 * 45 * 0.85, 1)
    assert printed(able, NEWEST, "AllGather", "CollNetDirect", "Simple")[1] == round(8 * 40.5, 1)
    assert printed(able, NEWEST, "AllGather", "NVLS", "Simple")[1] > 0
    off = {a for _, a, _ in allowed(H200_FOUR_NODES, (2, 30), None, None)}
    on = {a for _, a, _ in allowed(inputs, (2, 30), None, None)}
    assert on - off == {"CollNetDirect", "CollNetChain", "NVLS"}
