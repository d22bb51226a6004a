"""What NCCL's tuner was given: its dumped graphs in their file, the processor, and nodes as NCCL counts them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from commbench.models.nccl import Graph, NcclInputs
from commbench.provenance.nccl_graph import NcclGraphs
from commbench.provenance.nccl_tuner import VARIABLE, GraphDump, nccl_variable, processor, tuner_inputs

RING = Graph(pattern=4, channels=1, bw_intra_Bps=48e9, bw_inter_Bps=45e9)
GRAPHS = NcclGraphs(ring=RING, tree=replace(RING, pattern=1), gpus=2)
ONE_GRAPH = (
    '<graphs><graph id="0" pattern="4" nchannels="1" speedintra="48" speedinter="45" crossnic="0" samechannels="0">'
    '<channel><net dev="0"/><gpu dev="0"/><gpu dev="1"/><net dev="0"/></channel></graph></graphs>'
)
INTEL, AMD = ("x86", "intel"), ("x86", "amd")


# -- the file ----------------------------------------------------------------------------------------


def test_a_private_file_is_there_until_it_is_closed() -> None:
    environment = {"OTHER": "1"}
    dump = GraphDump(environment)
    path = Path(environment[VARIABLE])
    assert dump.private and path.parent.is_dir()
    assert path.parent.stat().st_mode & 0o077 == 0
    path.write_text(ONE_GRAPH)
    found = dump.graphs()
    assert (found.ring, found.tree, found.gpus) == (RING, None, 2)
    dump.close()
    assert environment == {"OTHER": "1"}
    assert not path.parent.exists()


def test_a_users_file_counts_once_it_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "mine.xml"
    path.write_text(ONE_GRAPH)
    environment = {VARIABLE: str(path)}
    dump = GraphDump(environment)
    assert not dump.private
    with pytest.raises(ValueError, match="^not written$"):
        dump.graphs()
    path.write_text(ONE_GRAPH.replace('"48"', '"24.0"'))
    ring = dump.graphs().ring
    assert ring is not None and ring.bw_intra_Bps == 24e9
    dump.close()
    assert path.exists() and environment == {VARIABLE: str(path)}


def test_what_cannot_be_read_is_one_line_without_a_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.xml"
    dump = GraphDump({VARIABLE: str(path)})
    with pytest.raises(ValueError, match="^not written$"):
        dump.graphs()
    path.mkdir()
    with pytest.raises(ValueError, match="^not readable: Is a directory$"):
        dump.graphs()
    path.rmdir()
    path.write_text("<graphs/>")
    with pytest.raises(ValueError, match="^not readable: no graph in it$"):
        dump.graphs()


def test_no_place_for_a_file_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    environment: dict[str, str] = {}
    dump = GraphDump(environment)
    with pytest.raises(ValueError, match="^not written$"):
        dump.graphs()
    dump.close()
    assert environment == {}


# -- the facts beside it -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "vendor"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\nprocessor\t: 1\nvendor_id\t: GenuineIntel\n", "intel"),
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\n", "amd"),
        ("processor\t: 0\nvendor_id\t: HygonGenuine\n", "hygongenuine"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", ""),
        (None, ""),
    ],
)
def test_processor(tmp_path: Path, text: str | None, vendor: str) -> None:
    (tmp_path / "proc").mkdir()
    if text is not None:
        (tmp_path / "proc/cpuinfo").write_text(text)
    architectures = {"x86_64": "x86", "aarch64": "arm", "ppc64le": "power"}
    assert processor(tmp_path) == (architectures[os.uname().machine], vendor)


@pytest.fixture
def set_beneath_python() -> Iterator[None]:
    """A variable that the process has and os.environ does not know of: what NCCL does with nccl.conf."""
    process = ctypes.CDLL(None)
    process.setenv(b"NCCL_TEST_BENEATH", b"Tree", 0)
    yield
    process.unsetenv(b"NCCL_TEST_BENEATH")


@pytest.mark.usefixtures("set_beneath_python")
def test_variables_that_nccl_set_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "NCCL_TEST_BENEATH" not in os.environ
    assert nccl_variable("NCCL_TEST_BENEATH") == "Tree"
    monkeypatch.setenv("NCCL_TEST_ABOVE", "Ring")
    assert nccl_variable("NCCL_TEST_ABOVE") == "Ring"
    assert nccl_variable("NCCL_TEST_NOWHERE") is None


def inputs(
    graphs: NcclGraphs, hosts: str, *, cc: tuple[int, ...] = (90,), cpus: tuple[tuple[str, str], ...] = (INTEL,)
) -> NcclInputs:
    """``hosts`` has a letter a rank."""
    return tuner_inputs(graphs, tuple(hosts), cc, cpus)


@pytest.mark.parametrize(
    ("hosts", "gpus", "nodes", "over_hosts"),
    [
        ("aabb", 2, 2, False),
        ("aab", 2, 2, False),  # hosts need not be equal
        ("aabb", None, 2, False),
        ("aaaabbbb", 8, 1, True),  # NVLink joins the hosts
        ("aabbccdd", 4, 2, True),
        ("aaaa", 2, 2, False),  # something divides the host, such as containers
    ],
)
def test_nodes_are_what_the_graphs_join(hosts: str, gpus: int | None, nodes: int, over_hosts: bool) -> None:
    found = inputs(replace(GRAPHS, gpus=gpus), hosts)
    assert (found.ranks, found.nodes, found.multi_host_nvlink) == (len(hosts), nodes, over_hosts)
    assert (found.ring, found.tree, found.nvls) == (GRAPHS.ring, GRAPHS.tree, None)


def test_nodes_that_do_not_come_out_even() -> None:
    with pytest.raises(ValueError, match="^of 3 GPUs a node, which 4 ranks do not make$"):
        inputs(replace(GRAPHS, gpus=3), "aabb")
    with pytest.raises(ValueError, match="lack a ring or a tree"):
        inputs(replace(GRAPHS, tree=None), "aabb")


def test_unlike_gpus_and_processors() -> None:
    alike = inputs(GRAPHS, "aabb", cc=(80, 80, 80, 80), cpus=(AMD,) * 4)
    assert (alike.cc_min, alike.cc_max, alike.cpu_arch, alike.cpu_vendor) == (80, 80, "x86", "amd")
    unlike = inputs(GRAPHS, "aabb", cc=(90, 80, 100, 90), cpus=(AMD, AMD, INTEL, INTEL))
    assert (unlike.cc_min, unlike.cc_max, unlike.cpu_arch, unlike.cpu_vendor) == (80, 100, "x86", "mixed")
