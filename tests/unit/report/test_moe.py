"""The table of dispatch and combine, cell by cell, and its figure."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from commbench.records import Point
from commbench.report.frame import from_points
from commbench.report.moe import plot_moe, print_moe
from commbench.workloads import Workload


def point(tokens: int = 128, **changes: Any) -> dict[str, Any]:
    workload = Workload(tokens=tokens, hidden=7168, experts=256, topk=8, mode="low_latency")
    values: dict[str, Any] = {
        "run_id": "r", "case_id": f"c{tokens}", "collective": "moe_dispatch", "backend": "mpi", "algorithm": "own:flat",
        "ranks": 8, "nodes": 1, "dtype": "float8_e4m3fn", "reduce_op": None, "placement": "out", "bytes": 7569408,
        "requested_bytes": 7569408, "timing": "isolated", "tokens": tokens, "hidden": 7168, "experts": 256, "topk": 8,
        "mode": "low_latency", "routing": "uniform", "experts_on": "contiguous", "workload": workload.to_dict(),
        "bytes_convention": "deepep_low_latency", "convention_bytes": {"deepep_low_latency": 7585792.0},
        "load": {"rank_max_over_mean": 1.25}, "phases": {"layout": 1e-3, "send": 2e-3, "recv": 4e-3},
        "matched": {"bytes": 1.0, "time_s": 5e-3, "ratio": 1.4}, "straggler": {}, "time_s": 7e-3, "time_lo_s": 6.9e-3,
        "time_hi_s": 7.7e-3, "interval_level": 0.97, "interval_of": "iterations", "algbw_Bps": 1.5e9, "busbw_Bps": 0.5e9,
        "predicted_s": 6e-3, "slowest_rank": 3, "slowest_host": "h", "wrong": 0, "samples": 40,
    }  # fmt: skip
    return asdict(Point(**(values | changes)))


def printed(*points: dict[str, Any], phases: tuple[str, ...] = ()) -> str:
    out = io.StringIO()
    print_moe(from_points(points), phases, file=out)
    return out.getvalue()


def test_every_cell() -> None:
    lines = printed(point(), point(16, time_s=2e-3, time_lo_s=2e-3, time_hi_s=2e-3)).splitlines()
    assert lines[0].startswith(
        "moe_dispatch mpi: hidden 7168, top 8 of 256 experts, 8 ranks, 1 host, low_latency, flat"
    )
    head = next(index for index, line in enumerate(lines) if line.startswith("tokens"))
    assert lines[head].split() == [
        "tokens", "time", "±", "GB/s", "wire", "load", "layout", "send", "recv", "model", "a2a", "last", "wrong",
    ]  # fmt: skip
    assert lines[head + 1].split() == [
        "128", "7.00", "ms", "10%", "1.50", "0.50", "1.25", "1.00", "ms", "2.00", "ms", "4.00", "ms", "6.00", "ms",
        "5.00", "ms", "3", "0",
    ]  # fmt: skip


def test_phases_that_are_asked_for() -> None:
    head = next(line for line in printed(point(), phases=("total", "send")).splitlines() if line.startswith("tokens"))
    assert "send" in head.split()
    assert "recv" not in head.split()


def test_the_convention_and_published_values_stand_under_it() -> None:
    text = " ".join(printed(point()).split())
    assert "GB/s: of deepep_low_latency: every valid selection, of H + 4 H/128 + 16 bytes in FP8" in text
    # DeepEP docs/legacy.md, EP 8.
    assert "DeepEP V1 on H800 77.0 us 98.0 GB/s of deepep_low_latency (DeepEP docs/legacy.md)" in text
    assert "published" not in printed(
        point(hidden=1024, workload=Workload(tokens=128, hidden=1024, experts=256, topk=8).to_dict())
    )


def test_skipped_and_wrong_ones_are_named() -> None:
    text = printed(
        point(),
        point(16, status="skipped", reason="no room", time_s=None),
        point(17, status="wrong", wrong=5, algbw_Bps=None),
    )
    assert "flat 16 tokens uniform float8_e4m3fn: skipped: no room" in text
    assert "flat 17 tokens uniform float8_e4m3fn: wrong: 5 elements are wrong" in text


def test_a_straggler_is_explained() -> None:
    straggler = {
        "rank": 3,
        "host": "h\x1b[1m",
        "share": 0.9,
        "load_over_mean": 2.0,
        "explained": "its load, 2.00 times the mean",
    }
    text = printed(point(straggler=straggler))
    assert "rank 3 on h" in text
    assert "is last in 90%: its load, 2.00 times the mean" in " ".join(text.split())
    assert "\x1b" not in text


def test_the_figure(tmp_path: Path) -> None:
    file = tmp_path / "moe.png"
    plot_moe(from_points([point(), point(16)]), file)
    assert file.read_bytes()[:4] == b"\x89PNG"


def test_what_cannot_be_drawn_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no picture's name"):
        plot_moe(from_points([point()]), tmp_path / "moe.txt")
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_moe(from_points([point(status="skipped", time_s=None)]), tmp_path / "moe.png")
