from __future__ import annotations

import json
import struct
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from commbench.records import Point
from commbench.report.figures import plot
from commbench.report.frame import from_points

SIZES = tuple(8 << (3 * power) for power in range(8))


def points(**changes: Any) -> list[dict[str, Any]]:
    values: dict[str, Any] = {
        "run_id": "r1", "collective": "all_reduce", "backend": "gloo", "ranks": 4, "nodes": 2, "dtype": "float32",
        "reduce_op": "sum", "placement": "out", "timing": "isolated", "label": "before",
    } | changes  # fmt: skip
    found = []
    for size in SIZES:
        time = 20e-6 + size / 2e9
        measured = {
            "bytes": size, "requested_bytes": size, "time_s": time, "time_lo_s": time * 0.98, "time_hi_s": time * 1.03,
            "busbw_Bps": 1.5 * size / time, "ring_s": time * 0.9, "bound_s": time * 0.7,
        }  # fmt: skip
        found.append(json.loads(Point(**(measured | values)).to_json()))
    return found


def frame_of(*more: list[dict[str, Any]]) -> pd.DataFrame:
    return from_points([row for rows in more for row in rows])


def png_size(file: Path) -> tuple[int, int]:
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".PDF", b"%PDF")])
def test_the_suffix_chooses_the_format(tmp_path: Path, suffix: str, magic: bytes) -> None:
    file = tmp_path / f"busbw{suffix}"
    plot(frame_of(points()), file)
    assert file.read_bytes().startswith(magic)


@pytest.mark.parametrize("name", ["busbw.jpeg", "busbw", "busbw.png.exe"])
def test_another_suffix_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"\.png, \.svg, \.pdf") as error:
        plot(frame_of(points()), tmp_path / name)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_row_a_collective(tmp_path: Path) -> None:
    one, four = tmp_path / "1.png", tmp_path / "4.png"
    plot(frame_of(points()), one)
    plot(frame_of(*[points(collective=name) for name in ("all_reduce", "all_gather", "all_to_all", "broadcast")]), four)
    assert png_size(four)[0] == png_size(one)[0]
    assert png_size(four)[1] > 2.5 * png_size(one)[1]


def drawn_text(frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    plot(frame, tmp_path / "text.svg")
    return (tmp_path / "text.svg").read_text()


def test_it_says_what_it_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    frame = frame_of(points(), points(timing="streamed"), points(backend="mpi"))
    text = drawn_text(frame, monkeypatch, tmp_path)
    for part in (
        "before", "4 ranks on 2 hosts", "float32", "out of place", "r1", "all_reduce: bus bandwidth (GB/s)",
        "all_reduce: time", "gloo, isolated", "gloo, streamed", "mpi, isolated", "ring model (isolated)",
        "bound (isolated)", ">8<", ">16M<", "message size",
    ):  # fmt: skip
        assert part in text, part
    assert "tree model" not in text
    assert "wrong data" not in text


def test_lines_of_one_backend_are_told_apart_by_what_varies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    frame = frame_of(points(), points(dtype="bfloat16"), points(collective="all_gather", reduce_op=None))
    text = drawn_text(frame, monkeypatch, tmp_path)
    assert "gloo dtype float32, isolated" in text
    assert "gloo dtype bfloat16, isolated" in text
    assert "op sum" not in text


def test_wrong_data_is_marked_and_stored_text_is_no_formula(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = points(label="cost $5 \x1b[31m<script>")
    rows[2] |= {"status": "wrong", "busbw_Bps": None}
    text = drawn_text(frame_of(rows), monkeypatch, tmp_path)
    assert "wrong data" in text
    assert "cost $5" in text
    assert "<script>" not in text
    assert "\x1b" not in text


def test_equal_data_gives_an_equal_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        plot(frame_of(points()), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_odd_frames_are_drawn_without_a_warning(tmp_path: Path) -> None:
    single = points()[-1:]
    narrow = points()[-2:]
    no_rate = [row | {"busbw_Bps": None, "status": "wrong"} for row in points()]
    gaps = [row | {"time_lo_s": None, "time_hi_s": None, "ring_s": None, "bound_s": None} for row in points()]
    gaps[3] |= {"time_s": None, "status": "failed"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (single, narrow, no_rate, gaps):
            plot(frame_of(rows), tmp_path / "odd.png")


def test_a_narrow_range_still_has_labels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # 1.0 to 1.3 GB/s: no power of ten lies inside.
    rows = [
        row | {"busbw_Bps": 1.1e9 + 0.02e9 * index, "ring_s": None, "bound_s": None}
        for index, row in enumerate(points())
    ]
    text = drawn_text(frame_of(rows), monkeypatch, tmp_path)
    assert ">1.1<" in text or ">1.15<" in text


@pytest.mark.parametrize("rows", [[], [point | {"time_s": None} for point in points()], [points()[0] | {"bytes": 0}]])
def test_nothing_to_draw_is_an_error(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="nothing to plot"):
        plot(frame_of(rows), tmp_path / "none.png")


def test_launches_of_a_case_are_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = drawn_text(frame_of(points(launch=0), points(launch=1), points(launch=2)), monkeypatch, tmp_path)
    assert "3 launches" in text
