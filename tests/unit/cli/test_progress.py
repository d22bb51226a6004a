"""What is said of a run while it goes on, where standard error is no terminal."""

from __future__ import annotations

import pytest

from commbench.cli.progress import Progress, describe


def launch(number: int, of: int, title: str, *, unknown: bool = False) -> dict[str, object]:
    return {"kind": "launch", "number": number, "of": of, "cases": 12, "title": title, "open": unknown}


def test_launches_and_pauses_are_told_once_each(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(3)
    for event in (
        launch(1, 4, "mpi, variant default"), {"kind": "doing", "doing": "starting mpi"},
        {"kind": "pause", "left_s": 41.7}, {"kind": "pause", "left_s": 40.7}, launch(2, 4, "mpi, variant ring"),
        {"kind": "pause", "left_s": 3.0}, launch(3, 20, "mpi", unknown=True), {"kind": "note", "line": "enough"},
    ):  # fmt: skip
        progress.hear(event)
    progress.close()
    assert capsys.readouterr().err.splitlines() == [
        "launch 1 of 4: mpi, variant default", "next launch in 42 s", "launch 2 of 4: mpi, variant ring",
        "next launch in 3 s", "launch 3 of about 20: mpi", "enough",
    ]  # fmt: skip


def test_a_single_launch_is_not_counted_but_its_points_are(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(3)
    progress.hear({**launch(1, 1, "gloo"), "cases": 2})
    point = {"backend": "gloo", "collective": "all_reduce", "bytes": 8, "timing": "isolated", "status": "skipped",
             "reason": "no such operation"}  # fmt: skip
    progress.hear({"kind": "point", "point": point})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[1/2 ")
    assert line.endswith("] gloo all_reduce 8 isolated: skipped, no such operation")


def test_a_routed_point_is_told_by_its_tokens() -> None:
    point = {
        "backend": "mpi", "collective": "moe_dispatch", "bytes": 7, "requested_bytes": 7, "timing": "isolated", "tokens": 16,
        "routing": "zipf:1.2", "experts_on": "eplb:4", "dtype": "float8_e4m3fn", "mode": "throughput",
        "algorithm": "own:flat", "status": "ok", "pass_index": 0, "time_s": 2e-3, "workload": {"tokens": 16}, "algbw_Bps": 1.5e9, "busbw_Bps": 1.0,
        "bytes_convention": "deepep_normal",
    }  # fmt: skip
    name = "mpi moe_dispatch 16 tokens zipf:1.2 eplb:4 float8_e4m3fn throughput flat isolated"
    assert describe(point) == f"{name}: 2.00 ms, 1.50 GB/s deepep_normal"
    assert describe({**point, "status": "skipped", "reason": "no room"}) == f"{name}: skipped, no room"
