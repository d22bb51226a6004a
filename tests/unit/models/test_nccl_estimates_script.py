"""scripts/nccl_estimates on files made here: what it compares, leaves out and calls a misfit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts/nccl_estimates"
HEADER = "source,hardware,nodes,gpus,collective,bytes,time_us,algbw_GBps,busbw_GBps,note"
GIB = 1 << 30


def row(hardware: str, nodes: int, gpus: int, collective: str, size: int, bus_GBps: float, note: str = "") -> str:
    factor = {"all_reduce": 2 * (gpus - 1) / gpus, "all_gather": (gpus - 1) / gpus}.get(collective, 1.0)
    microseconds = size * factor / (bus_GBps * 1e9) * 1e6
    return f'here,"{hardware}",{nodes},{gpus},{collective},{size},{microseconds},,{bus_GBps},"{note}"'


def run(folder: Path, rows: list[str], *options: str, header: str = HEADER) -> subprocess.CompletedProcess[str]:
    path = folder / "published.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(path), *options], capture_output=True, text=True, check=False, timeout=60
    )


def test_ratios_choices_and_what_is_left_out(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        [
            row("DGX H100", 1, 8, "all_gather", 16 * GIB, 360),
            row("DGX H100", 1, 8, "all_gather", GIB // 4, 1),  # not above 256 MiB
            row("DGX H100", 1, 8, "all_reduce", 16 * GIB, 360, "NCCL_ALGO=Ring, NCCL 2.30.7"),
            row("DGX H100", 1, 8, "all_to_all", GIB, 300),
            row("8x MI300X", 1, 8, "all_reduce", GIB, 310),
            row("a cluster", 1, 8, "all_reduce", GIB, 310),
            row("DGX H100", 1, 8, "all_reduce", GIB, 310, "NCCL 2.12.7"),
        ],
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split()[:1] + line.split()[2:6] for line in lines[2:4]] == [
        ["1.001", "1", "Ring", "Simple", "2.27.7"], ["1.001", "1", "Ring", "Simple", "2.30.7"],
    ]  # fmt: skip
    assert "median over 2 rows: 1.001 (bar 0.9-1.1: met)" in done.stdout
    left_out = done.stdout.partition("left out:")[2]
    for reason in ("not NCCL", "no preset", "NCCL older than 2.18", "does not model the collective"):
        assert left_out.count(f"1 rows  {reason}") + left_out.count(reason) >= 1, reason


def test_misfits_are_explained_by_a_rule_or_not_at_all(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        [
            row("DGX H100", 1, 8, "all_gather", 16 * GIB, 200),
            row("GCP a3-highgpu: TCPX", 2, 16, "all_gather", 16 * GIB, 50),
            row("GB200, IB only", 3, 12, "all_reduce", 16 * GIB, 234, "Tree, NVLS off"),
            row("DGX H100", 2, 16, "all_gather", GIB, 150),
            row("DGX H100", 2, 16, "all_gather", 2 * GIB, 200),
        ],
    )
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    answers = [line.strip() for line in lines if line.startswith("   ") and ":" in line and "rows " not in line]
    assert [answer.split(":")[0] for answer in answers[:4]] == ["MISFIT"] + ["explained"] * 3
    assert "TCPX goes through TCP" in answers[1]
    assert "sends 2(N-1)/N" in answers[2]
    assert "not at its plateau" in answers[3]
    assert "4 outside 0.75-1.35, of which 3 explained" in done.stdout


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    for rows, options, header, says in (
        ([], (), "a,b", "no column bytes, collective, gpus, hardware, nodes, note, time_us"),
        ([], (), HEADER, "no row above 256 MiB that NCCL models"),
        ([], ("--version", "2.17"), HEADER, "outside the tuning model"),
    ):
        done = run(tmp_path, rows, *options, header=header)
        assert (done.returncode, done.stdout) == (2, "")
        assert says in done.stderr and done.stderr.count("\n") == 1
