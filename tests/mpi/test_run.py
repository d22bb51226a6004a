"""Whole runs: what the command measures, what it stores, and that no case is silently left out."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import commbench
from commbench.cases import DTYPES, REDUCE_OPS
from commbench.collectives import COLLECTIVES
from commbench.records import COLUMNS

pytestmark = pytest.mark.mpi


def run(out: Path, *options: str, timeout: float = 150) -> tuple[pd.DataFrame, Path, str]:
    """The points, the run's directory and standard output of a run that ends well."""
    done = subprocess.run(
        [sys.executable, "-m", "commbench", "run", *options, "--out", str(out)], check=False, capture_output=True,
        text=True, timeout=timeout, stdin=subprocess.DEVNULL, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stderr.splitlines() if line.startswith("commbench: ")], done.stderr
    (path,) = out.glob("*/*")
    return commbench.load(path), path, done.stdout


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


# -- one run that most tests look at ---------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[pd.DataFrame, Path, str]:
    """All ten collectives on both libraries, in two launches."""
    return run(
        tmp_path_factory.mktemp("whole"), "--backend", "gloo,mpi", "--collective", "all", "--sizes", "4K,256K",
        "--launches", "2", "--budget", "8s", "--label", "the whole",
    )  # fmt: skip


def test_every_collective_is_measured_right_on_both_libraries(whole: tuple[pd.DataFrame, Path, str]) -> None:
    frame = whole[0]
    # Nine collectives of two sizes and a barrier, two timings, two launches.
    assert frame.groupby("backend").size().to_dict() == {"gloo": 76, "mpi": 76}
    assert set(frame["collective"]) == set(COLLECTIVES)
    assert frame["status"].eq("ok").all(), frame.loc[frame["status"] != "ok", ["collective", "backend", "reason"]]
    assert frame["wrong"].eq(0).all()
    assert frame.loc[frame["collective"] != "barrier", "verified"].ge(1).all()
    assert frame.loc[frame["collective"] == "barrier", "verified"].eq(0).all()  # it carries nothing to verify
    assert (frame["verified"] <= (frame["samples"] + frame["discarded"]) * 1000).all()
    per_case = frame.groupby("case_id").size()
    assert per_case.eq(2).all()
    assert len(per_case) == 76


def test_times_are_ordered_and_rates_follow_from_them(whole: tuple[pd.DataFrame, Path, str]) -> None:
    frame = whole[0]
    order = ["min", "p05", "p25", "p75", "p95", "p99", "max"]
    for low, high in itertools.pairwise(order):
        assert (frame[f"time_{low}_s"] <= frame[f"time_{high}_s"] * (1 + 1e-12)).all()
    assert frame["time_s"].between(frame["time_lo_s"], frame["time_hi_s"]).all()
    assert frame["time_s"].between(frame["time_min_s"], frame["time_max_s"]).all()
    sized = frame[frame["collective"] != "barrier"]
    np.testing.assert_allclose(sized["algbw_Bps"], sized["bytes"] / sized["time_s"])
    factor = sized["collective"].map({name: entry.bus_factor(2) for name, entry in COLLECTIVES.items()})
    np.testing.assert_allclose(sized["busbw_Bps"], sized["algbw_Bps"] * factor)
    barrier = frame[frame["collective"] == "barrier"]
    assert barrier["algbw_Bps"].isna().all()
    isolated, streamed = frame[frame["timing"] == "isolated"], frame[frame["timing"] == "streamed"]
    assert (isolated["skew_s"] >= 0).all()
    assert isolated["start"].eq("clock").all()
    assert streamed["skew_s"].isna().all()
    assert set(frame["stop"]) <= {"precision", "max_time", "budget", "samples"}
    precise = frame[frame["stop"] == "precision"]
    half = np.maximum(precise["time_hi_s"] - precise["time_s"], precise["time_s"] - precise["time_lo_s"])
    assert (half <= 0.02 * precise["time_s"] * (1 + 1e-9)).all()


def test_every_number_stands_beside_what_it_should_be(whole: tuple[pd.DataFrame, Path, str]) -> None:
    frame = whole[0]
    bounded = ~((frame["collective"] == "barrier") & (frame["timing"] == "streamed"))  # no data, and latencies overlap
    assert frame.loc[~bounded, ["bound_s", "efficiency", "beyond_bound"]].isna().all(axis=None)
    frame = frame[bounded]
    assert frame["bound_s"].gt(0).all()
    np.testing.assert_allclose(frame["efficiency"], frame["bound_s"] / frame["time_s"])
    assert (frame["beyond_bound"] == (frame["time_s"] < frame["bound_s"])).all()
    reduced = frame[frame["collective"] == "all_reduce"]
    assert reduced["ring_s"].gt(0).all()
    assert reduced["tree_s"].gt(0).all()
    np.testing.assert_allclose(reduced["ring_busbw_Bps"], reduced["bytes"] / reduced["ring_s"])
    named = frame[frame["nearest_model"].notna()]
    assert len(named) > 0
    for point in named.to_dict("records"):
        off = point["time_s"] / point["predictions"][point["nearest_model"]] - 1
        assert abs(off) == pytest.approx(abs(point["nearest_error"]), rel=1e-6)
        assert abs(off) <= 0.3
    assert frame.groupby(["backend", "launch"])["calibration_id"].nunique().eq(1).all()


def test_a_reader_is_told_what_the_library_does(whole: tuple[pd.DataFrame, Path, str]) -> None:
    frame, _, output = whole
    gloo = frame[(frame["backend"] == "gloo") & (frame["collective"] == "reduce_scatter")]
    note = "torch's gloo performs reduce_scatter by an all_reduce: it moves twice the bytes"
    assert gloo["note"].eq(note).all()
    assert "performs reduce_scatter by an all_reduce" in " ".join(output.split())


def test_what_is_stored(whole: tuple[pd.DataFrame, Path, str]) -> None:
    frame, path, output = whole
    assert set(COLUMNS) <= set(frame.columns)
    assert f"results: {path}" in output
    manifest, end = read(path / "manifest.json"), read(path / "end.json")
    assert (manifest["run_id"], manifest["label"], manifest["launcher"]) == (path.name, "the whole", "commbench")
    assert (manifest["world"], manifest["launches"], manifest["cases"]) == (2, 4, 152)
    assert manifest["sweep"]["collectives"] == list(COLLECTIVES)
    assert (end["status"], end["exit_code"], end["points"]) == ("ok", 0, {"ok": 152})
    (host,) = (path / "hosts").iterdir()
    assert {"host", "before", "after"} <= set(read(host))
    # Two launches of each library, whose ranks are started differently; the second time the other way round.
    launches = sorted((path / "launches").iterdir(), key=lambda folder: int(folder.name))
    assert [folder.name for folder in launches] == ["0", "1", "2", "3"]
    assert frame.groupby("launch")["backend"].unique().map(list).to_list() == [["gloo"], ["mpi"], ["mpi"], ["gloo"]]
    for folder in launches:
        facts = read(folder / "manifest.json")
        (backend,) = facts["backends"]
        assert facts["backends"][backend]["version"]
        assert facts["backends"][backend]["links"]["same_host"]["latency_s"] > 0
        assert {"seed", "order", "before", "after", "started_utc", "ended_utc"} <= set(facts)
        lines = [json.loads(line) for line in (folder / "points.jsonl").read_text().splitlines()]
        assert [line["case_id"] for line in lines] == facts["order"]
        for index, line in enumerate(lines):
            stamps = np.load(folder / "samples" / f"{index}.npy", allow_pickle=False)
            assert stamps.shape == (2, line["samples"] + line["discarded"], 2)
            assert (stamps[:, :, 1] >= stamps[:, :, 0]).all()


def test_the_launches_become_one_row_a_case(whole: tuple[pd.DataFrame, Path, str]) -> None:
    rows = commbench.summarise(whole[0])
    assert len(rows) == 76


# -- further runs ----------------------------------------------------------------------------------


def test_groups_and_placements_of_four_ranks(tmp_path: Path, links_file: Path) -> None:
    frame, _, _ = run(
        tmp_path, "--ranks", "4", "--group", "pair:1-2,node,rail", "--placement", "out,in", "--iters", "20", "--collective",
        "all_reduce,all_gather,all_to_all,broadcast", "--root", "1", "--sizes", "4K", "--timing", "isolated",
        "--calibration", str(links_file),
    )  # fmt: skip
    # Both libraries, four collectives, three groups, two placements.
    assert len(frame) == 48
    silent = frame[(frame["status"] != "ok") & frame["reason"].isna()]
    assert silent.empty
    rail = frame[frame["group"] == "rail"]
    assert rail["reason"].eq("a rail group of one rank has nobody to talk to").all()
    rest = frame[frame["group"] != "rail"]
    no_place = rest[(rest["collective"] == "all_to_all") & (rest["placement"] == "in")]
    assert no_place["reason"].eq("all_to_all has no in-place form").all()
    measured = rest.drop(no_place.index)
    assert measured["status"].eq("ok").all(), measured[["collective", "backend", "reason"]]
    assert measured["verified"].ge(1).all()
    assert measured.groupby("group")["ranks"].unique().map(list).to_dict() == {"node": [4], "pair:1-2": [2]}
    assert set(measured.loc[measured["group"] == "pair:1-2", "slowest_rank"]) <= {1, 2}
    assert measured["oversubscribed"].eq(4 > len(os.sched_getaffinity(0))).all()


def test_no_type_and_no_op_is_left_out_in_silence(tmp_path: Path, links_file: Path) -> None:
    frame, _, _ = run(
        tmp_path, "--collective", "all_reduce,all_gather", "--dtype", "all", "--op", "all", "--sizes", "1K", "--iters", "3",
        "--timing", "isolated", "--calibration", str(links_file),
    )  # fmt: skip
    assert len(frame) == 2 * (len(DTYPES) * len(REDUCE_OPS) + len(DTYPES))
    assert set(frame["status"]) == {"ok", "skipped"}
    assert frame.loc[frame["status"] == "skipped", "reason"].str.len().gt(10).all()
    ok = frame[frame["status"] == "ok"]
    assert ok["wrong"].eq(0).all()
    # MPI moves bytes of any type; both reduce the everyday ones.
    moved = frame[(frame["collective"] == "all_gather") & (frame["backend"] == "mpi")]
    assert moved["status"].eq("ok").all(), moved[["dtype", "reason"]]
    everyday = {
        (dtype, op) for dtype in ("float32", "float64", "int32", "int64") for op in ("sum", "prod", "min", "max")
    }
    for backend in ("gloo", "mpi"):
        assert everyday <= set(
            ok.loc[ok["backend"] == backend, ["dtype", "reduce_op"]].itertuples(index=False, name=None)
        )
    bitwise = frame[
        frame["reduce_op"].isin(["band", "bor", "bxor"]) & frame["dtype"].str.startswith(("float", "bfloat"))
    ]
    assert bitwise["reason"].str.startswith("bitwise ").all()


def test_a_soak_measures_the_same_cases_again_and_again(tmp_path: Path) -> None:
    frame, path, _ = run(
        tmp_path,
        "--backend",
        "mpi",
        "--collective",
        "all_reduce,barrier",
        "--sizes",
        "1K",
        "--for",
        "3s",
        "--iters",
        "50",
    )
    assert len(set(frame["case_id"])) == 4
    passes = frame.groupby("case_id")["pass_index"].apply(list)
    assert len(passes.iloc[0]) >= 2
    assert all(found == list(range(len(passes.iloc[0]))) for found in passes)
    assert read(path / "end.json")["points"] == {"ok": len(frame)}


def test_a_rank_takes_three_messages_of_memory_at_most(tmp_path: Path) -> None:
    size = 192 << 20
    frame, path, _ = run(
        tmp_path, "--backend", "gloo", "--collective", "all_reduce,all_gather,reduce_scatter", "--sizes", "192M",
        "--iters", "2",
    )  # fmt: skip
    assert frame["status"].eq("ok").all()
    facts = read(path / "launches" / "0" / "manifest.json")["facts"]
    for rank in range(2):
        assert size < facts[f"rank{rank}.peak_bytes_end"] <= 3 * size + (300 << 20)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("backend", "ranks"), [("mpi", 64), ("gloo", 32)])
def test_many_more_ranks_than_cores(tmp_path: Path, backend: str, ranks: int) -> None:
    """Slow to start (so many times torch on a machine's few cores), and it must come to its end all the same."""
    frame, _, _ = run(
        tmp_path, "--backend", backend, "--ranks", str(ranks), "--collective", "all_reduce", "--sizes", "1K", "--iters", "10",
        timeout=280,
    )  # fmt: skip
    assert frame["status"].eq("ok").all()
    assert set(frame["ranks"]) == {ranks}
    assert frame["wrong"].eq(0).all()
