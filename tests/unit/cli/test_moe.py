"""``commbench moe`` as it is typed: what becomes of options, and one line for what cannot be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from commbench.__main__ import main
from commbench.cli.errors import UsageError
from commbench.cli.moe_options import MoeOptions, read_moe_options
from commbench.workloads import Workload


def options(**given: object) -> MoeOptions:
    return read_moe_options(None, given, None)


def test_defaults() -> None:
    found = options()
    assert found.workloads == tuple(
        Workload(tokens=tokens, hidden=7168, experts=256, topk=8) for tokens in (1, 16, 128, 1024)
    )
    sweep = found.sweep(5)
    assert sweep.collectives == ("moe_dispatch", "moe_combine")
    assert (sweep.algorithms, sweep.dtypes, sweep.timings, sweep.seed) == (
        ("own:flat",),
        ("bfloat16",),
        ("isolated",),
        5,
    )
    assert sweep.left_out == (("gloo", "library"), ("mpi", "library"))


def test_every_combination() -> None:
    found = options(
        tokens="16,4K", mode="throughput,low_latency", routing="uniform,zipf:1.20", experts_on="contiguous,eplb:4",
        counts="exchanged,known", dispatch="flat,hierarchical", dtype="fp8,bf16", masked="10%", phases="total,send",
        uneven_tokens=True, routing_fixed=True,
    )  # fmt: skip
    # Low latency has no counts to know: 2 tokens x 2 routings x 2 placements x (2 counts + 1).
    assert len(found.workloads) == 24
    assert {one.routing for one in found.workloads} == {"uniform", "zipf:1.2"}
    assert {one.tokens for one in found.workloads} == {16, 4096}
    assert all(one.masked == 0.1 and one.uneven_tokens and one.fixed for one in found.workloads)
    sweep = found.sweep(1)
    assert sweep.collectives == ("moe_dispatch",)
    assert sweep.algorithms == ("own:flat", "own:hierarchical")
    assert sweep.dtypes == ("float8_e4m3fn", "bfloat16")


def test_a_profile_stands_behind_what_is_given() -> None:
    found = read_moe_options(None, {"hidden": "1024"}, "deepseek-v3-decode")
    (one,) = found.workloads
    assert (one.tokens, one.hidden, one.experts, one.topk, one.mode) == (128, 1024, 256, 8, "low_latency")
    assert found.dtype == ("float8_e4m3fn",)


def test_a_file_has_the_same_keys(tmp_path: Path) -> None:
    file = tmp_path / "moe.toml"
    file.write_text('tokens = [16, 32]\nrouting = "ramp"\nrouting-fixed = true\nprofile = "qwen3-235b"\n')
    found = read_moe_options(file, {"tokens": "64"}, None)
    assert [one.tokens for one in found.workloads] == [64]
    assert {(one.hidden, one.experts, one.routing, one.fixed) for one in found.workloads} == {(4096, 128, "ramp", True)}
    file.write_text("profile = 'gpt-9'\n")
    with pytest.raises(UsageError, match=r"moe.toml: profile: unknown profile 'gpt-9'"):
        read_moe_options(file, {}, None)
    file.write_text("sizes = '1K'\n")
    with pytest.raises(UsageError, match=r"moe.toml: unknown key 'sizes'"):
        read_moe_options(file, {}, None)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--topk", "9", "--experts", "8"], "topk 9 is more than 8 experts"),
        (["--hidden", "100", "--dtype", "fp8"], "--hidden 100: FP8 has one scale for 128 values"),
        (["--hidden", "101"], "--hidden 101: tokens are of an even number"),
        (["--routing", "zip:1"], "unknown routing"),
        (["--routing", "zipf"], "zipf"),
        (["--routing", "imbalance:5", "--experts", "8", "--topk", "2"], "imbalance"),
        (["--routing", "file:nowhere.npz"], "nowhere.npz"),
        (["--experts", "9"], "9 experts"),
        (["--experts-on", "eplb:x"], "eplb"),
        (["--dtype", "float32"], "tokens are sent as bf16 or fp8, not float32"),
        (["--mode", "fast"], "unknown mode 'fast'"),
        (["--dispatch", "tree"], "unknown way to dispatch 'tree'"),
        (["--phases", "all"], "unknown phase 'all'"),
        (["--tokens", "0"], "tokens"),
        (["--profile", "gpt-9"], "--profile: unknown profile 'gpt-9'"),
        (["--masked", "150%"], "mask"),
        (["--plot", "moe.jpeg"], "--plot moe.jpeg: no picture's name: end it in .png, .svg, .pdf"),
        (["--plot", "nowhere/moe.png"], "--plot nowhere/moe.png: there is no directory nowhere"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["commbench", "moe", *words, "--dry-run"])
    assert main() == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("commbench: error: ")
    assert says in line


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (np.tile([0, 8], (2, 16, 1)), "8"),
        (np.tile([0, 1], (3, 16, 1)), "3"),
        (np.zeros((2, 16, 2)), "float64"),
        (np.zeros((16, 2), dtype=int), "shape"),
    ],
    ids=["out of range", "ranks", "not whole", "two axes"],
)  # fmt: skip
def test_a_bad_routing_file_is_one_line(
    ids: np.ndarray, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ids.npz"
    np.savez(file, ids=ids)
    words = ["--routing", f"file:{file}", "--experts", "8", "--topk", "2", "--tokens", "16"]
    monkeypatch.setattr("sys.argv", ["commbench", "moe", *words, "--dry-run"])
    assert main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "ids.npz" in line
    assert says in line


def test_a_dry_run_lists_cases(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = "moe --backend mpi --tokens 16 --hidden 256 --experts 8 --topk 2 --mode low_latency --dispatch flat,hierarchical"
    monkeypatch.setattr("sys.argv", ["commbench", *words.split(), "--dry-run"])
    assert main() == 0
    said = capsys.readouterr()
    assert said.err == "4 cases\n"
    lines = said.out.splitlines()
    assert (
        "mpi moe_dispatch 16 tokens x 256, top 2 of 8, low_latency, uniform bfloat16 isolated by own:flat" in lines[0]
    )
    assert lines[1].endswith("skipped: low latency goes straight to the experts' ranks: there is no hierarchical form")


def test_run_points_to_moe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["commbench", "run", "--collective", "moe_dispatch", "--dry-run"])
    assert main() == 2
    assert "measure it with commbench moe" in capsys.readouterr().err


def test_a_dry_run_says_what_no_backend_can_do_and_which_launches_there_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "moe --backend gloo,mpi --tokens 16 --execution graph --phases total,send --launches 2"
    monkeypatch.setattr("sys.argv", ["commbench", *words.split(), "--dry-run"])
    assert main() == 0
    said = capsys.readouterr()
    assert [line.rpartition("skipped: ")[2] for line in said.out.splitlines()] == [
        f"{backend} works on the host, and only a device launches graphs" for backend in ("gloo", "mpi")
    ]
    assert "launch 4: gloo, 1 cases" in said.err


def test_all_phases_are_shown_unless_some_are_named() -> None:
    assert options().shown_phases == ()
    assert options(phases="total,quantise,combine").shown_phases == ("total", "quantise", "combine")
