"""NCCL's dumped XML: graphs and topologies as written by it, and files that are none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from commbench.models.nccl import nccl_estimate
from commbench.provenance.nccl_graph import NcclGraphs, combine_graphs, read_graphs, read_topology

GRAPHS = """<graphs version="1">
  <graph id="0" pattern="4" crossnic="2" nchannels="1" speedintra="48" speedinter="45" latencyinter="35" \
typeintra="NVL" typeinter="PXN" samechannels="0">
    <channel>
      <net dev="0"/>
      <gpu dev="0" rank="0"/>
      <gpu dev="1" rank="1"/>
      <net dev="1"/>
    </channel>
  </graph>
  <graph id="1" pattern="1" crossnic="0" nchannels="1" speedintra="48" speedinter="24" latencyinter="35" \
typeintra="NVL" typeinter="PIX" samechannels="1"><channel><net dev="0"/><gpu dev="0"/></channel></graph>
  <graph id="4" pattern="6" crossnic="0" nchannels="0" speedintra="0" speedinter="0" latencyinter="0" \
typeintra="NVL" typeinter="PIX" samechannels="1"/>
  <graph id="3" pattern="5" crossnic="0" nchannels="2" speedintra="40" speedinter="48" \
typeintra="NVL" typeinter="PIX" samechannels="0"><channel><gpu dev="0"/></channel></graph>
</graphs>
"""
TOPOLOGY = """<system version="1">
  <cpu host_hash="0x1" numaid="0" affinity="ffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:10:00.0" class="0x060400" vendor="0x1000" device="0xc030" link_speed="32.0 GT/s PCIe" \
link_width="16">
      <pci busid="0000:11:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="90" rank="0" gdr="1">
          <nvlink target="0000:05:00.0" count="10" tclass="0x068000"/>
          <nvlink target="0000:06:00.0" count="8" tclass="0x068000"/>
        </gpu>
      </pci>
      <pci busid="0000:12:00.0" class="0x020700" link_speed="16 GT/s" link_width="8">
        <nic>
          <net name="mlx5_0" dev="0" speed="400000" port="1" latency="2.5" guid="0x1" maxconn="131072" gdr="1"/>
          <net name="mlx5_1" dev="1" speed="100000" port="2" latency="0.0" guid="0x1" maxconn="131072" gdr="0"/>
        </nic>
      </pci>
    </pci>
  </cpu>
  <cpu host_hash="0x2" numaid="1" affinity="ffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <nic><net name="eth0" dev="2" speed="25000" gdr="0"/></nic>
  </cpu>
</system>
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "dump.xml"
    path.write_text(text, encoding="utf-8")
    return path


def test_graphs(tmp_path: Path) -> None:
    graphs = read_graphs(written(tmp_path, GRAPHS))
    assert graphs.ring is not None and graphs.tree is not None and graphs.nvls is not None
    ring = graphs.ring
    assert (ring.pattern, ring.channels, ring.bw_intra_Bps, ring.bw_inter_Bps) == (4, 1, 48e9, 45e9)
    assert (ring.type_intra, ring.type_inter) == ("NVL", "PXN")
    assert ring.latency_inter_s == pytest.approx(35e-6)
    assert (ring.same_channels, ring.cross_nic) == (False, 2)
    assert (graphs.tree.bw_intra_Bps, graphs.tree.bw_inter_Bps, graphs.tree.same_channels) == (48e9, 24e9, True)
    assert (graphs.nvls.channels, graphs.nvls.latency_inter_s) == (2, 0.0)
    # Nothing was found for CollNetDirect: no channels.
    assert (graphs.collnet_direct, graphs.collnet_chain) == (None, None)
    assert graphs.gpus == 2  # of the ring; a channel of NVLS has one
    assert read_graphs(written(tmp_path, GRAPHS.replace('id="0"', 'id="2"'))).gpus is None


def test_the_estimate_takes_graphs_from_a_file(tmp_path: Path) -> None:
    inputs = read_graphs(written(tmp_path, GRAPHS)).inputs(ranks=6, nodes=3, cc_min=90)
    got = nccl_estimate("all_gather", 1 << 30, inputs, version="2.30.7", algo="Ring", proto="Simple")
    # 5 steps, 2 of them between nodes at 14 + 2*35 us and 3 inside at 3.4; 45 GB/s of bus bandwidth.
    assert got.seconds == pytest.approx((8.4 + 3 * 3.4 + 2 * 84) * 1e-6 + (1 << 30) * 5 / 6 / 45e9)


def test_ranks_agree_on_the_least(tmp_path: Path) -> None:
    one = read_graphs(written(tmp_path, GRAPHS))
    assert one.ring is not None
    slower = replace(one.ring, bw_inter_Bps=12e9, type_intra="SYS", same_channels=True)
    both = combine_graphs([one, replace(one, ring=slower, nvls=None)])
    assert both.ring == replace(slower, same_channels=False)
    assert (both.tree, both.nvls) == (one.tree, None)
    with pytest.raises(ValueError, match="no graphs to combine"):
        combine_graphs([])
    with pytest.raises(ValueError, match="lack a ring or a tree"):
        NcclGraphs(ring=one.ring).inputs(ranks=2, nodes=1, cc_min=90)


def test_topology(tmp_path: Path) -> None:
    topology = read_topology(written(tmp_path, TOPOLOGY))
    (gpu,) = topology.gpus
    assert (gpu.busid, gpu.cc, gpu.rank, gpu.nvlinks) == ("0000:11:00.0", 90, 0, 18)
    assert gpu.link_Bps == pytest.approx(370.8e9)
    assert gpu.pci_Bps == pytest.approx(48e9)
    assert [nic.name for nic in topology.nics] == ["mlx5_0", "mlx5_1", "eth0"]
    first, second, third = topology.nics
    assert (first.rate_Bps, first.gdr, third.pci_Bps) == (50e9, True, None)
    assert first.latency_s == pytest.approx(2.5e-6)
    assert first.pci_Bps == pytest.approx(12e9)
    assert (second.gdr, third.rate_Bps) == (False, 3.125e9)
    assert (topology.cpu_arch, topology.cpu_vendor, topology.hosts, topology.nvswitch) == ("x86", "intel", 2, True)
    assert (topology.cc_min, topology.cc_max) == (90, 90)


def test_a_topology_written_for_a_kind_of_machine_says_less(tmp_path: Path) -> None:
    text = """<system version="1">
      <cpu numaid="0" arch="x86_64" vendor="GenuineIntel">
        <pci busid="0001:00:00.0" class="0x030200" link_speed="8 GT/s" link_width="16"/></cpu>
      <cpu numaid="1" arch="x86_64" vendor="AuthenticAMD">
        <pci busid="0101:00:00.0" class="0x020700" link_speed="" link_width="0"/></cpu>
    </system>"""
    topology = read_topology(written(tmp_path, text))
    assert (topology.gpus[0].cc, topology.gpus[0].link_Bps, topology.gpus[0].pci_Bps) == (None, None, 12e9)
    assert (topology.nics[0].rate_Bps, topology.nics[0].pci_Bps) == (None, None)
    assert (topology.cpu_vendor, topology.cc_min, topology.nvswitch, topology.hosts) == ("mixed", None, False, 1)


def test_links_of_newer_gpus_are_those_of_the_generation_before(tmp_path: Path) -> None:
    for sm, rate in ((103, 40.1), (100, 40.1), (89, 20.0), (86, 12.0), (80, 20.0), (70, 20.0), (60, 18.0)):
        gpu = read_topology(written(tmp_path, TOPOLOGY.replace('sm="90"', f'sm="{sm}"'))).gpus[0]
        assert gpu.link_Bps == pytest.approx(18 * rate * 1e9), sm


ENTITY = '<!DOCTYPE a [<!ENTITY b "c">]><graphs version="1">&b;</graphs>'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (ENTITY, "a document type or an entity"),
        ("<!doctype graphs><graphs/>", "a document type or an entity"),
        ("", "not XML"),
        ("<graphs><graph></graphs>", "not XML"),
        ("<system version='1'/>", "its root is <system>, but NCCL_GRAPH_DUMP_FILE gives <graphs>"),
        ("<graphs version='1'/>", "no graph in it"),
        ("<graphs><graph id='0'/></graphs>", "<graph> has no pattern"),
        (GRAPHS.replace('nchannels="1"', 'nchannels="one"'), "nchannels='one' of <graph> is not a whole number"),
        (GRAPHS.replace('speedinter="45"', 'speedinter="fast"'), "speedinter='fast' of <graph> is not a number"),
        (GRAPHS.replace('typeinter="PXN"', 'typeinter="USB"'), "typeinter='USB' of <graph> is none of"),
        (GRAPHS.replace('pattern="4"', 'pattern="9"'), "pattern must be 1 to 6"),
    ],
)
def test_what_is_no_graph_dump_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        read_graphs(written(tmp_path, text))
    assert "\n" not in str(error.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "dump.xml"
    # The same entity in UTF-16 must not get past the check.
    path.write_bytes(ENTITY.encode("utf-16"))
    with pytest.raises(ValueError, match="not UTF-8"):
        read_graphs(path)
    with pytest.raises(ValueError, match="its root is <graphs>, but NCCL_TOPO_DUMP_FILE gives <system>"):
        read_topology(written(tmp_path, GRAPHS))
    with pytest.raises(ValueError, match="neither a GPU nor a NIC"):
        read_topology(written(tmp_path, "<system version='1'><cpu/></system>"))
