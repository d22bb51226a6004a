"""The command that predicts: its numbers, its three formats, and one line for every kind of bad input."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commbench.cli import predict as module
from commbench.cli.errors import UsageError
from commbench.cli.main import app, main
from commbench.cli.predict import predict
from commbench.models.hardware import hardware_names, load_hardware
from commbench.models.links import Link, Links
from commbench.models.nccl import nccl_estimate, nccl_inputs
from commbench.report.forecast import Forecast, Row, to_csv, to_json, to_table
from commbench.store.calibration import write_calibration

ALPHA, BETA = 1e-5, 1e-9
FLAT = Links(other_host=Link(latency_s=ALPHA, seconds_per_byte=BETA))
H200 = "h200-8x400g"


@pytest.fixture
def links(tmp_path: Path) -> Path:
    """Four ranks on four hosts, by MPI."""
    file = tmp_path / "links.json"
    write_calibration(file, hosts=("a", "b", "c", "d"), backends={"mpi": {"links": FLAT.to_dict()}})
    return file


def as_json(capsys: pytest.CaptureFixture[str], **options: Any) -> list[dict[str, Any]]:
    assert predict(format_="json", **options) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["kind"]) == (1, "prediction")
    predictions: list[dict[str, Any]] = found["predictions"]
    return predictions


def test_json_by_hand(links: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A ring of four: 6 rounds of m/4; recursive doubling: 2 of m; bound 2·3/4·m over a rank's link."""
    (found,) = as_json(capsys, calibration=links, sizes="4M")
    assert (found["ranks"], found["nodes"], found["method"], found["timing"]) == (4, 4, "simulated", "isolated")
    (row,) = found["rows"]
    m = 4 << 20
    assert row["bytes"] == row["requested_bytes"] == m
    ring = row["algorithms"]["ring"]
    assert ring["time_s"] == pytest.approx(6 * (ALPHA + m / 4 * BETA), rel=1e-12)
    assert ring["busbw_Bps"] == pytest.approx(1.5 * m / ring["time_s"], rel=1e-12)
    assert row["algorithms"]["recursive_doubling"]["time_s"] == pytest.approx(2 * (ALPHA + m * BETA), rel=1e-12)
    assert row["bound_s"] == pytest.approx(1.5 * m * BETA, rel=1e-12)
    assert row["bound_busbw_Bps"] == pytest.approx(1 / BETA, rel=1e-12)
    assert row["best"] == min(row["algorithms"], key=lambda name: row["algorithms"][name]["time_s"])
    assert row["best_s"] == row["algorithms"][row["best"]]["time_s"]
    assert "nccl_estimate_s" not in row
    assert "hierarchical" not in row["algorithms"]  # one rank a host


def test_streamed_chain_is_faster(links: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight bytes down a chain of four take 3 hops; a rank between receives and sends: 2 hops for each further one."""
    options = {"calibration": links, "collective": "broadcast", "sizes": "8", "algorithm": "ring"}
    (isolated,) = as_json(capsys, **options)
    (streamed,) = as_json(capsys, timing="streamed", **options)
    hop = ALPHA + 8 * BETA
    assert isolated["rows"][0]["algorithms"] == {
        "ring": {"time_s": pytest.approx(3 * hop), "busbw_Bps": pytest.approx(8 / (3 * hop))}
    }
    assert streamed["rows"][0]["best_s"] == pytest.approx(2 * hop)


def test_more_ranks_than_were_calibrated(links: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = as_json(capsys, calibration=links, sizes="100M", ranks=1000, nodes=1000, algorithm="ring")
    m = 100 << 20
    assert found["method"] == "closed forms"
    assert found["rows"][0]["best_s"] == pytest.approx(1998 * (ALPHA + m / 1000 * BETA), rel=1e-9)


def test_slow_host_of_the_calibration_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "links.json"
    slow = Links(other_host=FLAT.other_host, host_rates=((BETA, BETA), (4 * BETA, 4 * BETA)))
    write_calibration(file, hosts=("a", "b"), backends={"mpi": {"links": slow.to_dict()}})
    options = {"collective": "send_recv", "sizes": "1M", "calibration": file}
    (two,) = as_json(capsys, **options)
    assert two["rows"][0]["best_s"] == pytest.approx(ALPHA + (1 << 20) * 4 * BETA)
    (three,) = as_json(capsys, ranks=3, nodes=3, **options)  # whichever hosts those are
    assert three["rows"][0]["best_s"] == pytest.approx(ALPHA + (1 << 20) * BETA)


def test_hardware_and_the_tuner_estimate_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = as_json(capsys, hardware=H200, ranks=32, nodes=4, sizes="8,1G", nccl_version="2.27.7")
    assert found["source"] == H200
    inputs = nccl_inputs(load_hardware(H200), 4, 8, version="2.27.7")
    for row in found["rows"]:
        estimate = nccl_estimate("all_reduce", row["bytes"], inputs, version="2.27.7")
        assert row["nccl_estimate_s"] == estimate.seconds
        assert row["nccl_estimate_choice"] == f"{estimate.algorithm}/{estimate.protocol}"
        assert "nccl" not in row["best"]
        assert row["best_s"] == min(one["time_s"] for one in row["algorithms"].values())
    large = found["rows"][1]
    assert large["best"] == "multi_rail_ring"
    assert large["best_busbw_Bps"] == pytest.approx(370.8e9, rel=0.02)
    assert any("tuner estimate" in note for note in found["notes"])
    assert any("NVLS" in note for note in found["notes"])


def test_no_estimate_where_there_is_no_nccl(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = as_json(capsys, hardware="mi300x-8x400g", sizes="1M")
    assert (found["ranks"], found["nodes"]) == (8, 1)
    assert "nccl_estimate_s" not in found["rows"][0]
    assert found["notes"] == []
    (none,) = as_json(capsys, hardware=H200, collective="all_to_all", sizes="1M")
    assert none["rows"][0]["nccl_estimate_s"] is None  # NCCL does not model it


@pytest.mark.parametrize(
    ("collective", "nodes", "word"),
    [("all_reduce", 2, "between two nodes"), ("all_to_all", 2, "reaches 1.88 times"), ("all_to_all", 4, "1.29 times")],
)
def test_bandwidths_above_the_wire_are_explained(
    collective: str, nodes: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = as_json(capsys, hardware="mi300x-8x400g", collective=collective, nodes=nodes, sizes="1M")
    assert [note for note in found["notes"] if word in note]


def test_csv_holds_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"hardware": H200, "nodes": 2, "collective": "all_reduce,barrier", "sizes": "8,1M"}
    predictions = as_json(capsys, **options)
    assert predict(format_="csv", **options) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(line["collective"], line["bytes"]) for line in lines] == [
        ("all_reduce", "8"), ("all_reduce", str(1 << 20)), ("barrier", "0"),
    ]  # fmt: skip
    row = predictions[0]["rows"][1]
    assert float(lines[1]["ring_s"]) == row["algorithms"]["ring"]["time_s"]
    assert float(lines[1]["multi_rail_ring_busbw_Bps"]) == row["algorithms"]["multi_rail_ring"]["busbw_Bps"]
    assert float(lines[1]["nccl_estimate_s"]) == row["nccl_estimate_s"]
    assert float(lines[2]["dissemination_s"]) == predictions[1]["rows"][0]["best_s"]
    assert lines[2]["ring_s"] == lines[2]["bound_busbw_Bps"] == lines[2]["nccl_estimate_s"] == ""


def test_table(links: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict(calibration=links, collective="all_gather", sizes="1,1M", algorithm="ring,bruck") == 0
    title, upper, headings, row, still = capsys.readouterr().out.splitlines()
    assert title.startswith("all_gather: 4 ranks on 4 nodes, float32, isolated, mpi links of ")
    assert title.endswith("simulated; rates in GB/s")
    assert upper.split() == ["ring", "bruck", "best", "bound"]
    assert headings.split() == ["bytes", "time", "busbw", "time", "busbw", "time", "busbw"]
    ring, bruck = 3 * ALPHA + 0.75 * (1 << 20) * BETA, 2 * ALPHA + 0.75 * (1 << 20) * BETA
    rate = 0.75 * (1 << 20) / 1e9
    assert row.split() == [
        "1M", f"{ring * 1e6:.0f}", "us", f"{rate / ring:.2f}", f"{bruck * 1e6:.0f}", "us", f"{rate / bruck:.2f}",
        "bruck", f"{0.75 * (1 << 20) * BETA * 1e6:.0f}", "us", "1.00",
    ]  # fmt: skip
    assert still == "1: less than one float32 a rank: nothing to move"


def test_wide_tables_are_parted() -> None:
    names = tuple(f"algorithm_number_{index}" for index in range(5))
    row = Row(
        bytes=1024, requested_bytes=1024, times={name: 1e-6 * (index + 1) for index, name in enumerate(names)},
        busbw_Bps=dict.fromkeys(names, 2e9), bound_s=1e-6, bound_busbw_Bps=3e9,
    )  # fmt: skip
    forecast = Forecast(
        collective="all_reduce", ranks=8, nodes=1, dtype="float32", timing="isolated", source="x", method="simulated",
        algorithms=names, rows=(row,), notes=("a note",),
    )  # fmt: skip
    whole = to_table(forecast, 1000).splitlines()
    parted = to_table(forecast, 120).splitlines()
    assert (len(whole), len(parted)) == (6, 11)
    assert max(map(len, parted[1:])) <= 120
    assert parted[1].split() == ["algorithm_"] * 5
    assert parted[2].split() == ["number_0", "number_1", "number_2", "number_3", "number_4", "best", "bound"]
    assert parted[4].split()[:5] == ["1K", "1.00", "us", "2.00", "us"]
    assert parted[9].split() == ["1K", *["2.00"] * 5, names[0], "3.00"]
    assert whole[-1] == parted[-1] == "a note"
    assert json.loads(to_json([forecast]))["predictions"][0]["rows"][0]["best"] == names[0]
    assert len(to_csv([forecast]).splitlines()) == 2


def test_all_collectives(capsys: pytest.CaptureFixture[str]) -> None:
    assert predict(hardware=H200, collective="all", sizes="1M") == 0
    out = capsys.readouterr().out
    assert out.count(" ranks on 1 node") == 10
    assert "barrier: 8 ranks on 1 node, isolated, h200-8x400g, simulated\n" in out


def test_list_of_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    assert predict(list_hardware=True) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == list(hardware_names())
    assert predict(hardware="list") == 0
    assert capsys.readouterr().out == listed


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "give either --hardware NAME"),
    ({"hardware": H200, "calibration": Path("x")}, "give either --hardware NAME"),
    ({"hardware": "h200-8x400"}, f"did you mean '{H200}'"),
    ({"hardware": H200, "collective": "allreduce"}, "did you mean 'all_reduce'"),
    ({"hardware": H200, "collective": ","}, "--collective is empty"),
    ({"hardware": H200, "sizes": "1Q"}, "is not a size"),
    ({"hardware": H200, "ranks": 10, "nodes": 4}, "10 ranks cannot be shared out equally over 4 nodes"),
    ({"hardware": H200, "ranks": 8, "nodes": 0}, "--nodes 0: there must be 1 or more"),
    ({"hardware": H200, "ranks": 1}, "nobody to talk to"),
    ({"hardware": H200, "ranks": 32, "nodes": 2}, "8 GPUs a node, too few for 16"),
    ({"hardware": H200, "backend": "mpi"}, "--backend chooses among the links of a calibration"),
    ({"hardware": H200, "algorithm": "rings"}, "did you mean 'ring'"),
    ({"hardware": H200, "algorithm": "hierarchical"}, "known are .*recursive_doubling"),  # one node
    ({"hardware": H200, "timing": "stream"}, "did you mean 'streamed'"),
    ({"hardware": H200, "dtype": "float31"}, "did you mean 'float32'"),
    ({"hardware": H200, "format_": "xml"}, "known are csv, json, table"),
    ({"hardware": H200, "nccl_version": "1.0"}, "outside the tuning model"),
    ({"calibration": Path("absent.json")}, "cannot read calibration absent.json"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input(options: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        predict(**options)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""


def test_bad_calibrations(links: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no gloo, only mpi"):
        predict(calibration=links, backend="gloo")
    with pytest.raises(UsageError, match="no mpi link inside a host"):
        predict(calibration=links, ranks=8, nodes=4)
    several = tmp_path / "several.json"
    write_calibration(several, hosts=("a", "b"), backends={name: {"links": FLAT.to_dict()} for name in ("mpi", "gloo")})
    with pytest.raises(UsageError, match="choose one with --backend"):
        predict(calibration=several)
    (tmp_path / "text.json").write_text("no")
    with pytest.raises(UsageError, match="is not JSON"):
        predict(calibration=tmp_path / "text.json")


def test_exit_code_of_bad_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["commbench", "predict", "--hardware", "h2000"])
    assert main() == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("commbench: error: unknown hardware 'h2000'")
    assert said.err.count("\n") == 1


def test_help_shows_examples_that_parse() -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["predict", "--help"]).output
    assert "commbench predict --list-hardware" in shown
    assert module.predict.__doc__ is not None
    examples = [
        line.split()[1:] for line in module.predict.__doc__.splitlines() if line.startswith("  commbench predict")
    ]
    assert len(examples) == 4
    for words in examples:
        if "--calibration" not in words:
            result = runner.invoke(app, words, catch_exceptions=False)
            assert result.output


def test_a_hundred_thousand_ranks_load_nothing_heavy() -> None:
    """All of it, interpreter included, in well under a second of processor time (wall clock depends on who else is here)."""
    program = (
        "import sys, time\n"
        "from commbench.cli.main import main\n"
        "code = main()\n"
        "heavy = {'pandas', 'numpy', 'rich', 'torch', 'scipy', 'plotly'} & set(sys.modules)\n"
        "print(code, sorted(heavy), time.process_time(), file=sys.stderr)\n"
    )
    words = ["--hardware", H200, "--nodes", "12500", "--ranks", "100000", "--sizes", "8:4G:2x", "--format", "csv"]
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, "predict", *words], capture_output=True, text=True, check=True, timeout=60
    )
    code, heavy, seconds = done.stderr.split()
    assert (code, heavy) == ("0", "[]")
    assert float(seconds) < 1.5
    assert time.monotonic() - start < 30
    assert len(done.stdout.splitlines()) == 31
