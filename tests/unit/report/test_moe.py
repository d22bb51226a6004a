"""The table of dispatch and combine, cell by cell, and its figure."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from commbench.moe.published import published_for
from commbench.records import Point
from commbench.report.frame import from_points
from commbench.report.moe import print_moe
from commbench.report.moe_figure import plot_moe
from commbench.workloads import Workload


def point(tokens: int = 128, **changes: Any) -> dict[str, Any]:
    workload = Workload(tokens=tokens, hidden=7168, experts=256, topk=8, mode="low_latency")
    values: dict[str, Any] = {
        "run_id": "r", "case_id": f"c{tokens}", "collective": "moe_dispatch", "backend": "mpi", "algorithm": "own:flat",
        "ranks": 8, "nodes": 1, "dtype": "float8_e4m3fn", "reduce_op": None, "placement": "out", "bytes": 7569408,
        "requested_bytes": 7569408, "timing": "isolated", "tokens": tokens, "hidden": 7168, "experts": 256, "topk": 8,
        "mode": "low_latency", "routing": "uniform", "experts_on": "contiguous", "workload": workload.to_dict(),
        "bytes_convention": "deepep_low_latency", "convention_bytes": {"deepep_low_latency": 7585792.0},
        "load": {"rank_max_over_mean": 1.25}, "phases": {"layout": 1e-3, "send": 2e-3, "recv": 4e-3, "total": 7.01e-3},
        "matched": {"bytes": 1.0, "time_s": 5e-3, "ratio": 1.4}, "straggler": {}, "time_s": 7e-3, "time_lo_s": 6.9e-3,
        "time_hi_s": 7.7e-3, "interval_level": 0.97, "interval_of": "iterations", "algbw_Bps": 1.5e9, "busbw_Bps": 0.5e9,
        "predicted_s": 6e-3, "slowest_rank": 3, "slowest_host": "h", "wrong": 0, "samples": 40,
    }  # fmt: skip
    return asdict(Point(**(values | changes)))


def printed(*points: dict[str, Any], phases: tuple[str, ...] = ()) -> str:
    out = io.StringIO()
    print_moe(from_points(points), phases, file=out)
    return out.getvalue()


def cells(text: str, heading: str) -> list[list[str]]:
    """The words of the table whose headings contain ``heading``, row by row."""
    lines = text.splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("tokens") and heading in line.split())
    end = next(index for index in range(head, len(lines)) if not lines[index])
    return [line.split() for line in lines[head:end]]


def test_every_cell() -> None:
    text = printed(point(), point(16, time_s=2e-3, time_lo_s=2e-3, time_hi_s=2e-3))
    assert text.splitlines()[0] == (
        "moe_dispatch mpi: hidden 7168, top 8 of 256 experts, 8 ranks, 1 host, low_latency, flat, float8_e4m3fn, isolated,"
    )
    few, many = cells(text, "GB/s")[1:]
    assert cells(text, "GB/s")[0] == ["tokens", "time", "±", "GB/s", "wire", "load", "model", "a2a", "last", "wrong"]
    assert few == ["16", "2.00", "ms", "0.0%", "1.50", "0.50", "1.25", "6.00", "ms", "5.00", "ms", "3", "0"]
    assert many == ["128", "7.00", "ms", "10%", "1.50", "0.50", "1.25", "6.00", "ms", "5.00", "ms", "3", "0"]
    assert cells(text, "send") == [
        ["tokens", "layout", "send", "recv", "total"], ["16", "1.00", "ms", "2.00", "ms", "4.00", "ms", "7.01", "ms"],
        ["128", "1.00", "ms", "2.00", "ms", "4.00", "ms", "7.01", "ms"],
    ]  # fmt: skip


def test_what_differs_is_a_column_and_a_dispatch_comes_first() -> None:
    text = printed(
        point(collective="moe_combine", case_id="a", dtype="bfloat16"), point(case_id="b", routing="zipf:1.2"),
        point(case_id="c", algorithm="own:hierarchical"),
        point(case_id="d", load={"rank_max_over_mean": 1.25, "rank_max_over_mean_before": 3.5}, experts_on="eplb:8"),
    )  # fmt: skip
    lines = text.splitlines()
    assert lines[0].startswith("moe_dispatch")
    assert "moe_combine" in next(line for line in lines[1:] if line.startswith("moe_"))
    table = cells(text, "GB/s")
    assert table[0] == [
        "tokens",
        "dispatch",
        "experts",
        "on",
        "routing",
        "time",
        "±",
        "GB/s",
        "wire",
        "load",
        "before",
        "model",
        "a2a",
        "last",
        "wrong",
    ]
    assert [row[1:4] for row in table[1:]] == [
        ["flat", "contiguous", "zipf:1.2"], ["flat", "eplb:8", "uniform"], ["hierarchical", "contiguous", "uniform"],
    ]  # fmt: skip
    assert "3.50" in table[2]
    assert "before: without balanced experts" in " ".join(text.split())


def test_phases_that_are_asked_for() -> None:
    assert cells(printed(point(), phases=("total", "send")), "send")[0] == ["tokens", "send", "total"]
    assert "of which" not in printed(point(), phases=("total",))


def test_launches_are_one_row_with_their_variation() -> None:
    text = printed(*(point(launch=launch, time_s=(6 + launch) * 1e-3) for launch in range(3)))
    assert "3 launches" in " ".join(text.split())
    (head, row) = cells(text, "GB/s")
    # 6, 7 and 8 ms: a standard deviation of 1 of 7.
    assert row[head.index("cv") + 1] == "14.3%"


def test_published_values_stand_beside_a_shape_that_matches() -> None:
    text = printed(point())
    assert "GB/s: of deepep_low_latency: every valid selection, of H + 4 H/128 + 16 bytes in FP8" in " ".join(
        text.split()
    )
    lines = text.splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("what"))
    assert lines[head + 1].split()[:3] == ["mpi", "flat,", "here"]
    for cell in ("7.00 ms", "1.50", "deepep_low_latency"):
        assert cell in lines[head + 1]
    # DeepEP docs/legacy.md, EP 8: the same convention, and so first.
    assert lines[head + 2].startswith("DeepEP V1")
    assert "H800, CX7 400 Gb/s" in lines[head + 2]
    assert "77.0 us" in lines[head + 2]
    assert "98.0" in lines[head + 2]
    assert "DeepEP docs/legacy.md" in lines[head + 2]
    rest = [line for line in lines if "more of them" in line]
    values = len(published_for(Workload(**point()["workload"]), 8, "moe_dispatch", "float8_e4m3fn"))
    assert rest == [f"{values - 6} more of them are in deepep_published.csv, in commbench's package"]
    other = Workload(tokens=128, hidden=1024, experts=256, topk=8).to_dict()
    assert "published" not in printed(point(hidden=1024, workload=other))


def test_equal_reasons_share_a_line() -> None:
    text = printed(
        point(), point(16, status="skipped", reason="no room", time_s=None),
        point(32, status="skipped", reason="no room", time_s=None, dtype="bfloat16"),
        point(17, status="wrong", wrong=5, algbw_Bps=None),
    )  # fmt: skip
    assert "  16, 32 tokens, bfloat16 and float8_e4m3fn: skipped: no room" in text
    assert "  17 tokens, float8_e4m3fn: wrong: 5 elements are wrong" in text


def test_nothing_but_what_could_not_be_done() -> None:
    text = printed(point(status="skipped", reason="no room", time_s=None))
    assert text.splitlines()[0].startswith("moe_dispatch mpi: hidden 7168, top 8 of 256 experts, 8 ranks")
    assert "  128 tokens: skipped: no room" in text
    assert "time" not in text


def test_a_straggler_is_explained() -> None:
    straggler = {"rank": 3, "host": "h\x1b[1m", "share": 0.9, "explained": "its load, 2.00 times the mean"}
    text = printed(point(straggler=straggler))
    assert "is last in 90%: its load, 2.00 times the mean" in " ".join(text.split())
    assert "\x1b" not in text
    assert "is last" not in printed(point(straggler={**straggler, "share": 0.2}))


def test_notes_are_told_once() -> None:
    text = printed(point(note="why so"), point(16, note="why so"))
    assert text.count("why so") == 1


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_figure(tmp_path: Path, suffix: str, magic: bytes) -> None:
    file = tmp_path / f"moe{suffix}"
    plot_moe(from_points([point(), point(16), point(16, case_id="x", collective="moe_combine")]), file)
    assert file.read_bytes().startswith(magic)


def test_what_the_figure_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    rows = [point(), point(16), point(case_id="x", routing="zipf:1.2", label="now $")]
    plot_moe(from_points(rows), tmp_path / "text.svg")
    text = (tmp_path / "text.svg").read_text()
    for part in (
        "moe_dispatch: GB/s of deepep_low_latency", "moe_dispatch: time", "mpi uniform", "mpi zipf:1.2", "predicted",
        "plain all_to_all of as many bytes", "published: DeepEP V1, H800", ">16<", ">128<", "8 ranks on 1 host", "now $",
    ):  # fmt: skip
        assert part in text, part


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"end it in \.png, \.svg, \.pdf"):
        plot_moe(from_points([point()]), tmp_path / "moe.jpeg")
    with pytest.raises(ValueError, match="no dispatch or combine has a time"):
        plot_moe(from_points([point(status="skipped", time_s=None)]), tmp_path / "moe.png")
    assert list(tmp_path.iterdir()) == []


def test_how_sure_a_time_is_and_what_is_to_be_known_of_it() -> None:
    text = " ".join(printed(point(oversubscribed=True, discarded=3)).split())
    assert (
        "time: median, and the wider side of its interval, of iterations (this launch alone) at 97 % confidence" in text
    )
    assert "oversubscribed: more ranks than cores" in text
    assert "iterations whose ranks did not start together were discarded" in text
    assert "late starts" not in text


def test_passes_of_a_soak_are_told_by_case() -> None:
    rows = [point(pass_index=number, time_s=(7 + number) * 1e-3) for number in range(3)] + [point(16)]
    text = " ".join(printed(*rows).split())
    assert (
        "over the passes of the soak: moe_dispatch mpi flat low_latency 128 tokens uniform float8_e4m3fn isolated: 3 passes, "
        "first 7.00 ms, last 9.00 ms (+28.6%)"
    ) in text
    assert text.count("passes, first") == 1
