from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from commbench.cli.errors import UsageError
from commbench.cli.show import show
from commbench.records import COLUMNS, Point


def point(size: int, **changes: Any) -> Point:
    values: dict[str, Any] = {
        "run_id": "20250102T030405Z-aa", "collective": "all_reduce", "backend": "gloo", "ranks": 2, "nodes": 1,
        "dtype": "float32", "reduce_op": "sum", "placement": "out", "bytes": size, "requested_bytes": size,
        "timing": "isolated", "case_id": str(size), "time_s": 1e-3, "algbw_Bps": size / 1e-3, "busbw_Bps": size / 1e-3,
        "predictions": {"ring": 0.5e-3},
    }  # fmt: skip
    return Point(**(values | changes))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    run = tmp_path / "2025-01-02" / "20250102T030405Z-aa"
    launch = run / "launches" / "0"
    launch.mkdir(parents=True)
    (run / "manifest.json").write_text(json.dumps({"run_id": run.name, "label": "before"}))
    points = [point(8), point(64), point(64, timing="streamed"), point(8, collective="all_gather")]
    (launch / "points.jsonl").write_text("".join(one.to_json() + "\n" for one in points))
    return tmp_path


def run_of(results: Path) -> Path:
    return next(results.glob("*/*"))


def test_newest_run_with_a_crash_named(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(results=results) == 0
    out = capsys.readouterr().out
    assert "all_reduce gloo: 2 ranks on 1 host" in out
    assert "run 20250102T030405Z-aa 'before' ended crashed: no end.json" in out
    assert "4 points (4 ok)" in out
    assert f"results: {run_of(results)}" in out


def test_how_it_ended(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_of(results) / "end.json").write_text(json.dumps({"status": "failed", "reason": "rank 1 on n1 was killed"}))
    show(run="20250102", results=results)
    assert "ended failed: rank 1 on n1 was killed; 4 points" in capsys.readouterr().out


def test_clocks_that_left_their_models_are_one_line(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def launch(number: int, note: str | None) -> None:
        folder = run_of(results) / "launches" / str(number)
        folder.mkdir(exist_ok=True)
        (folder / "manifest.json").write_text(json.dumps({"clock": {"gloo": {"fits": 3, "note": note}}}))

    launch(0, None)
    show(results=results)
    assert "clocks:" not in capsys.readouterr().out
    launch(1, "clocks: that of n1 was 35.0 us off")
    show(results=results)
    assert "\nclocks: that of n1 was 35.0 us off\n" in capsys.readouterr().out
    launch(2, "clocks: that of n2 was 99.0 us off")
    show(results=results)
    assert "\nclocks: that of n1 was 35.0 us off (and in 1 more launches)\n" in capsys.readouterr().out


def test_filters(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(results=results, timing="streamed", collective="all_reduce")
    out = capsys.readouterr().out
    assert "all_gather" not in out
    assert "isolated" not in out
    assert "4 points" in out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"timing": "isolatd"}, "did you mean 'isolated'"),
        ({"collective": "broadcast"}, "known are all_gather, all_reduce"),
        ({"run": "1999"}, "newest run is 20250102T030405Z-aa"),
        ({"plot": Path("x.jpeg")}, r"\.png, \.svg, \.pdf"),
        ({"plot": Path("nowhere/x.png")}, "nowhere"),
        ({"csv": Path("nowhere/x.csv")}, "nowhere"),
    ],
)
def test_usage_errors_are_one_line(
    results: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], says: str
) -> None:
    monkeypatch.chdir(results)
    with pytest.raises(UsageError, match=says) as error:
        show(**({"results": results} | options))
    assert "\n" not in str(error.value)


def test_no_results_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no runs"):
        show(results=tmp_path / "results")


def test_a_run_that_crashed_before_its_first_point(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    next(results.rglob("points.jsonl")).unlink()
    assert show(results=results) == 0
    assert (
        "ended crashed: no end.json (or still running); the points that finished count; 0 points"
        in capsys.readouterr().out
    )


def test_a_garbled_line_is_a_warning(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = next(results.rglob("points.jsonl"))
    file.write_text("garbage\n" + file.read_text())
    show(results=results)
    captured = capsys.readouterr()
    assert captured.err == f"commbench: warning: {file}:1: not a point, dropped\n"
    assert "4 points" in captured.out


def test_csv_holds_every_point_and_column(results: Path, tmp_path: Path) -> None:
    file = tmp_path / "points.csv"
    show(results=results, csv=file)
    frame = pd.read_csv(file)
    assert tuple(frame.columns) == COLUMNS
    assert len(frame) == 4
    assert json.loads(frame["predictions"].iloc[0]) == {"ring": 0.5e-3}


def test_plot_is_drawn_and_named(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "busbw.png"
    show(results=results, plot=file)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert f"written: {file}" in capsys.readouterr().out


def test_help_has_examples() -> None:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(show)
    answer = CliRunner().invoke(app, ["--help"])
    assert answer.exit_code == 0
    assert "commbench show 20250102T0304 --timing streamed" in answer.output
