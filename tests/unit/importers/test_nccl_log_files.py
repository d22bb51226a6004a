"""NCCL's debug output with every prefix and in every format, and its table beside the model's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.importers.nccl_compare import choice_differences, table_differences
from commbench.importers.nccl_log import NcclLog, parse_log, read_log
from commbench.models.hardware import load_hardware
from commbench.models.nccl import ALGORITHMS, FUNCTIONS, PROTOCOLS, NcclInputs, nccl_inputs, nccl_table, parse_version
from commbench.models.nccl.enabling import allowed

SHARED_LOGS = Path(__file__).parents[3] / "../shared/logs"
RANK_0, RANK_5 = "node7:4242:4250 [0]", "node7:4247:4259 [5]"
PREFIXES = ("", "[1,0]<stdout>:", "0: ", "  3: ", "[2026-04-28 14:14:49] ", "(head, rank=0, pid=3808) [1,0]<stderr>:")


def line(text: str, who: str = RANK_0, prefix: str = "") -> str:
    return f"{prefix}{who} NCCL INFO {text}\n"


def table_lines(inputs: NcclInputs, version: str, who: str = RANK_0) -> list[str]:
    """The table that NCCL prints for a communicator, in its widths: blocks of three algorithms, one decimal."""
    known = parse_version(version)
    costs, may = nccl_table(inputs, known), allowed(inputs, known, None, None)
    names = [name for name in ALGORITHMS if name != "PAT" or known >= (2, 23)]
    lines = []
    for start in range(0, len(names), 3):
        block = names[start : start + 3]
        lines.append(line("  Algorithm   |" + "".join(f" {'':>14}   {name:>14}   {'':>14} |" for name in block), who))
        lines.append(line("  Protocol    |" + "".join(f" {name:>14} |" for name in PROTOCOLS * 3), who))
        lines.append(line(" Max NThreads |" + "".join(f" {512:>14} |" for _ in range(3 * len(block))), who))
        for function in FUNCTIONS:
            cells = ""
            for entry in ((function, a, p) for a in block for p in PROTOCOLS):
                cost = costs.get(entry)
                bandwidth = cost.bandwidth_Bps if cost and entry in may else 0.0
                latency = cost.latency_s if cost else 0.0
                cells += f"{latency * 1e6:>8.1f}/{bandwidth / 1e9:>6.1f} |"
            lines.append(line(f"{function:>13} |{cells}", who))
    return lines


INPUTS = nccl_inputs(load_hardware("h100-8x400g"), 2, 8, version="2.27.7")


@pytest.mark.parametrize("prefix", PREFIXES)
def test_single_lines_behind_any_prefix(prefix: str) -> None:
    log = parse_log(
        line(text, RANK_5, prefix)
        for text in (
            "NCCL version 2.27.7+cuda12.9",
            "NCCL_ALGO set by environment to Ring,^Tree.",
            "Pattern 4, crossNic 2, nChannels 8, bw 48.000000/45.100000, type NVL/PXN, sameChannels 0",
            " 0 : NET/0-0 GPU/0-18000 GPU/0-2a000 NET/0-1",
            "Pattern 1, crossNic 0, nChannels 8, bw 48.000000/48.000000, type NVL/PIX, sameChannels 1",
            "Pattern 5, crossNic 0, nChannels 8, bw 40.000000/48.000000, type NVL/PIX, sameChannels 0",
            "comm 0x55d0c0 rank 5 nRanks 16 nNodes 2 localRanks 8 localRank 5 MNNVL 0",
            "16 coll channels, 16 collnet channels, 24 nvls channels, 32 p2p channels, 2 p2p channels per peer",
            "AllGather: 4096 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={0..7}",
            "AllReduce [Symmetric]: 2048 Bytes -> Kernel AllReduce_AGxLL_R nchannels 8 nthreads 512 nWorks 1",
            "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM",
        )
    )
    assert (log.version, log.settings) == ("2.27.7+cuda12.9", {"NCCL_ALGO": "Ring,^Tree"})
    (graphs,) = log.graphs
    assert graphs.ring is not None and graphs.tree is not None and graphs.nvls is not None
    assert (graphs.ring.channels, graphs.ring.bw_intra_Bps, graphs.ring.bw_inter_Bps) == (8, 48e9, 45.1e9)
    assert (graphs.ring.type_inter, graphs.ring.cross_nic, graphs.tree.same_channels) == ("PXN", 2, True)
    assert (graphs.nvls.bw_intra_Bps, graphs.collnet_chain) == (40e9, None)
    (rank,) = log.ranks
    assert (rank.rank, rank.ranks, rank.nodes, rank.local_ranks, rank.multi_host_nvlink) == (5, 16, 2, 8, False)
    (channels,) = log.channels
    assert (channels.collective, channels.collnet, channels.nvls, channels.p2p_per_peer) == (16, 16, 24, 2)
    (choice,) = log.choices
    assert (choice.source, choice.function, choice.algorithm) == ("node7:4247:4259", "AllGather", "Ring")
    assert (choice.protocol, choice.channels, choice.message_bytes(16)) == ("LL128", (0, 7), 65536)
    (symmetric,) = log.symmetric
    assert (symmetric.function, symmetric.kernel, symmetric.channels) == ("AllReduce", "AllReduce_AGxLL_R", 8)


def test_choices_of_all_formats() -> None:
    log = parse_log(
        [
            line("65536 Bytes -> Algo 0 proto 0 time 37.798233"),  # 2.20 to 2.22
            line("AllGather: 65536 Bytes -> Algo 4 proto 2 time 40.5"),  # 2.23
            line("ReduceScatter: 65536 Bytes -> Algo NVLS_TREE proto SIMPLE channel{Lo..Hi}={0..15}"),  # since 2.24
            line("AllReduce: 65536 Bytes -> Algo CollNetDirect proto Simple channel{Lo..Hi}={0..0}"),
            line("AllReduce: 8 Bytes -> Algo 99 proto 0 time 1"),
            line("AllReduce: 8 Bytes -> Algo FROG proto LL channel{Lo..Hi}={0..0}"),
        ]
    )
    found = [(c.function, c.algorithm, c.protocol, c.message_bytes(8)) for c in log.choices]
    assert found == [
        (None, "Tree", "LL", 65536), ("AllGather", "NVLS", "Simple", 65536),
        ("ReduceScatter", "NVLSTree", "Simple", 8 * 65536), ("AllReduce", "CollNetDirect", "Simple", 65536),
    ]  # fmt: skip
    assert log.choices[0].predicted_s == pytest.approx(37.798233e-6)


def test_a_row_of_a_table_cut_by_messages_of_two_ranks() -> None:
    text = (
        "[0]         8192          2048     float     sum      -1[0] "
        + line("8192 Bytes -> Algo 1 proto 0 time 26.5").replace("\n", " ")
        + line("16384 Bytes -> Algo 1 proto 2 time 30.5", RANK_5)
    )
    log = parse_log([text])
    assert [(c.source, c.logged_bytes, c.protocol) for c in log.choices] == [
        ("node7:4242:4250", 8192, "LL"), ("node7:4247:4259", 16384, "Simple"),
    ]  # fmt: skip


def test_graphs_of_old_versions_and_of_several_ranks() -> None:
    ring = "Pattern 4, crossNic 0, nChannels {}, speed 1.200000/{}, type SYS/SYS, sameChannels 0"
    tree = "Pattern 1, crossNic 0, nChannels 4, speed 1.200000/1.200000, type SYS/SYS, sameChannels 0"
    chain = "Pattern 3, crossNic 0, nChannels 4, speed 1.200000/1.200000, type NVL/SYS, sameChannels 0"
    log = parse_log(
        [
            line(ring.format(4, 1.2)), line(ring.format(2, 2.4), RANK_5), line(tree), line(tree, RANK_5),
            line(chain), line("Pattern 6, crossNic 0, nChannels 0, speed 0/0, type NVL/PIX, sameChannels 1"),
            line("Pattern 4, crossNic 0, nChannels 4, speed 1/1, type FROG/SYS, sameChannels 0", "node8:1:2 [0]"),
        ]
    )  # fmt: skip
    first, second = log.graphs
    assert first.ring is not None and first.collnet_chain is not None
    assert (first.ring.channels, first.collnet_chain.type_intra, second.collnet_chain) == (4, "NVL", None)
    both = log.combined_graphs()
    assert both.ring is not None
    assert (both.ring.channels, both.ring.bw_inter_Bps, both.collnet_chain) == (2, 1.2e9, None)


@pytest.mark.parametrize("version", ["2.18.6", "2.22.3", "2.23.4", "2.27.7", "2.30.7"])
def test_a_printed_table_is_the_models(version: str) -> None:
    inputs = nccl_inputs(load_hardware("h100-8x400g"), 2, 8, version=version)
    lines = table_lines(inputs, version)
    # Another rank's lines fall in between.
    mixed = [text for own in lines for text in (own, line("Channel 00/0 : 0[0] -> 1[1] via P2P/IPC", RANK_5))]
    (table,) = parse_log(mixed).tables
    assert len(table.costs) == 5 * (7 if parse_version(version) >= (2, 23) else 6) * 3
    assert table_differences(table, inputs, version=version) == ()


def test_differences_name_what_differs() -> None:
    (table,) = parse_log(table_lines(INPUTS, "2.27.7")).tables
    narrow = replace(INPUTS, ring=replace(INPUTS.ring, bw_intra_Bps=45e9, bw_inter_Bps=45e9))
    found = table_differences(table, narrow, version="2.27.7")
    names = {(d.function, d.algorithm, d.protocol) for d in found}
    assert names >= {("AllReduce", "Ring", "Simple"), ("AllGather", "Ring", "Simple"), ("Reduce", "Ring", "Simple")}
    assert {algorithm for _, algorithm, _ in names} == {"Ring"}
    (simple,) = (d for d in found if (d.function, d.protocol) == ("AllGather", "Simple"))
    # 14 steps inside at 3.4 us and one between at 14; 8 * 48 and 8 * 45 times 16/15.
    assert str(simple) == "AllGather Ring Simple: NCCL has 70.0 us and 409.6 GB/s, the model 70.0 us and 384.0 GB/s"
    off = table_differences(table, INPUTS, version="2.27.7", proto="^LL128")
    assert {d.protocol for d in off} == {"LL128"}
    assert all(d.modelled is None and str(d).endswith("the model it disabled") for d in off)
    newer = {d.algorithm for d in table_differences(table, INPUTS, version="2.28.3")}
    assert newer == {"NVLSTree"}


def test_choices_beside_the_models() -> None:
    log = parse_log(
        [
            line("AllReduce: 8 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..0}"),
            line(f"AllReduce: {1 << 30} Bytes -> Algo RING proto SIMPLE channel{{Lo..Hi}}={{0..15}}"),
            line(f"AllReduce: {1 << 30} Bytes -> Algo RING proto SIMPLE channel{{Lo..Hi}}={{0..15}}"),
            line("SendRecv: 8 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}"),
        ]
    )
    (found,) = choice_differences(log, INPUTS, version="2.27.7")
    assert str(found) == "all_reduce of 1073741824 B logged: NCCL took Ring Simple, the model NVLSTree Simple"
    assert choice_differences(log, INPUTS, version="2.27.7", algo="ring,tree") == ()


def test_two_communicators_of_one_process_print_two_tables() -> None:
    tables = parse_log(table_lines(INPUTS, "2.27.7") * 2).tables
    assert len(tables) == 2 and tables[0] == tables[1]


def test_rows_that_are_cut_are_left_out() -> None:
    lines = table_lines(INPUTS, "2.27.7")
    at = next(index for index, text in enumerate(lines) if "AllReduce |" in text)
    lines[at] = lines[at][:60]
    (table,) = parse_log(lines).tables
    assert ("AllReduce", "Ring", "LL") not in table.costs
    assert ("AllReduce", "NVLS", "Simple") in table.costs


def test_a_file_with_nothing_in_it_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    for text in ("", "# nThread 1 nGpus 8\n", "NCCL INFO hello\n", "AllReduce | 1.0/2.0 |\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match="nothing of NCCL's in it: run with NCCL_DEBUG=INFO") as error:
            read_log(path)
        assert "\n" not in str(error.value)
    path.write_bytes(b"\xff\xfe " + line("NCCL version 2.30.7").encode())
    assert read_log(path).version == "2.30.7"


def test_a_bare_version_line(tmp_path: Path) -> None:
    assert parse_log(["NCCL version 2.18.5+cuda12.2\n"]).versions == ("2.18.5+cuda12.2",)
    two = parse_log([line("NCCL version 2.18.5"), line("NCCL version 2.27.7", RANK_5)])
    assert (two.versions, two.version) == (("2.18.5", "2.27.7"), None)


@given(st.lists(st.text(max_size=80), max_size=20))
def test_any_text_is_read_without_an_error(lines: list[str]) -> None:
    log = parse_log(line(text) for text in lines)
    assert isinstance(log, NcclLog)
    assert log.tables == ()


def test_a_log_of_an_issue() -> None:
    """NVIDIA/nccl issue 1453, shared as log 44: thirteen choices, among rows of nccl-tests that they cut."""
    path = SHARED_LOGS / "44-v2-allreduce-split-row-info.txt"
    if not path.exists():
        pytest.skip("the shared logs are not beside this checkout")
    log = read_log(path)
    assert {(c.logged_bytes, c.algorithm, c.protocol) for c in log.choices} == {
        (4096, "Tree", "LL"), (8192, "Tree", "LL"),
    }  # fmt: skip
    assert len(log.choices) == path.read_text().count("NCCL INFO")
