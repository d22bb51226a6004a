from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commbench.records import COLUMNS, SCHEMA, Point
from commbench.report.frame import find_run, from_points, load, read_launches, read_run, summarise, taint_line

RUN = "20250102T030405Z-00000000000000aa"


def point(**changes: Any) -> Point:
    values: dict[str, Any] = {
        "run_id": RUN, "collective": "all_reduce", "backend": "gloo", "ranks": 4, "nodes": 2, "dtype": "float32",
        "reduce_op": "sum", "placement": "out", "bytes": 1000, "requested_bytes": 1000, "timing": "isolated",
        "case_id": "c1", "time_s": 1e-3, "algbw_Bps": 1e6, "busbw_Bps": 1.5e6,
    }  # fmt: skip
    return Point(**(values | changes))


def frame_of(*points: Point) -> pd.DataFrame:
    return from_points([json.loads(one.to_json()) for one in points])


def write_run(root: Path, *launches: list[Point], run_id: str = RUN, day: str = "2025-01-02") -> Path:
    run = root / day / run_id
    (run / "launches").mkdir(parents=True)
    (run / "manifest.json").write_text(json.dumps({"run_id": run_id, "world": 4}))
    for index, points in enumerate(launches):
        folder = run / "launches" / str(index)
        folder.mkdir()
        (folder / "manifest.json").write_text("{}")
        (folder / "points.jsonl").write_text("".join(one.to_json() + "\n" for one in points))
    return run


def test_columns_come_first_and_in_order_with_unknown_ones_kept(tmp_path: Path) -> None:
    file = tmp_path / "points.jsonl"
    file.write_text(json.dumps({"temperature": 51.5, **json.loads(point().to_json())}) + "\n")
    frame = load(file)
    assert tuple(frame.columns) == (*COLUMNS, "temperature")
    assert frame["temperature"].tolist() == [51.5]


def test_what_an_older_line_does_not_say_is_null_or_the_default(tmp_path: Path) -> None:
    line = {
        "collective": "barrier", "backend": "mpi", "ranks": 2, "nodes": 1, "dtype": "float32", "reduce_op": None,
        "placement": "out", "bytes": 0, "requested_bytes": 0, "timing": "isolated",
    }  # fmt: skip
    (tmp_path / "points.jsonl").write_text(json.dumps(line))
    row = load(tmp_path).iloc[0]
    for name in ("time_s", "wrong", "slowest_rank", "slowest_host", "reduce_op", "late_starts", "note", "skew_s"):
        assert pd.isna(row[name]), name
    assert (row["launch"], row["algorithm"], row["status"], row["predictions"]) == (0, "library", "ok", {})


def test_types() -> None:
    frame = frame_of(point(wrong=0, slowest_rank=3, late_starts=True, seed=2**64 - 1), point())
    assert frame["bytes"].dtype == "int64"
    assert frame["time_s"].dtype == "float64"
    assert (str(frame["wrong"].dtype), str(frame["late_starts"].dtype)) == ("Int64", "boolean")
    assert isinstance(frame["collective"].dtype, pd.StringDtype)
    assert int(frame["seed"].iloc[0]) == 2**64 - 1
    assert frame["slowest_rank"].tolist() == [3, pd.NA]


def test_values_of_another_type_are_null_not_an_error() -> None:
    row = json.loads(point().to_json())
    frame = from_points([row | {"time_s": "fast", "wrong": 1.5, "late_starts": "yes", "predictions": 7, "launch": [1]}])
    assert frame[["time_s", "wrong", "late_starts", "launch"]].isna().all(axis=None)
    assert frame["predictions"].iloc[0] == {}


def test_every_kind_of_source_gives_the_same_points(tmp_path: Path) -> None:
    run = write_run(tmp_path, [point(bytes=1), point(bytes=2)], [point(bytes=3, launch=1)])
    (run / "launches" / "0" / "samples").mkdir()
    whole = [1, 2, 3]
    assert load(tmp_path)["bytes"].tolist() == whole
    assert load(str(run))["bytes"].tolist() == whole
    assert load(f"{tmp_path}/*/*")["bytes"].tolist() == whole
    assert load(f"{tmp_path}/**/*.jsonl")["bytes"].tolist() == whole
    assert load(f"{run}/launches/*/*")["bytes"].tolist() == whole
    assert load(run / "launches" / "1")["bytes"].tolist() == [3]
    assert load(run / "launches" / "0" / "points.jsonl")["bytes"].tolist() == [1, 2]
    assert load([run / "launches" / "1", run])["bytes"].tolist() == [3, 1, 2]


def test_launch_ten_comes_after_launch_two(tmp_path: Path) -> None:
    write_run(tmp_path, *[[point(launch=index)] for index in range(11)])
    assert load(tmp_path)["launch"].tolist() == list(range(11))


@pytest.mark.parametrize("source", ["nowhere", "*.none", "empty", []])
def test_no_files_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError) as error:
        load(source)
    assert "\n" not in str(error.value)
    assert not source or source in str(error.value)


def test_a_file_without_points_is_an_empty_frame(tmp_path: Path) -> None:
    (tmp_path / "points.jsonl").touch()
    frame = load(tmp_path)
    assert len(frame) == 0
    assert tuple(frame.columns) == COLUMNS
    assert len(summarise(frame)) == 0


def test_launch_cv_is_the_deviation_of_the_launches_medians_over_their_mean() -> None:
    # Medians 1, 2 (of two passes 1.5 and 2.5) and 3: deviation 1, mean 2.
    frame = frame_of(
        point(time_s=1.0), point(launch=1, time_s=1.5), point(launch=1, time_s=2.5, pass_index=1),
        point(launch=2, time_s=3.0), point(case_id="c2", bytes=8, time_s=1.0), point(launch=1, time_s=9.0, status="wrong"),
    )  # fmt: skip
    cases = summarise(frame)
    assert cases["launch_cv"].iloc[0] == pytest.approx(0.5)
    assert pd.isna(cases["launch_cv"].iloc[1])


def test_variants_of_a_case_are_kept_apart() -> None:
    frame = frame_of(*(point(launch=k, variant=name, time_s=t) for k, (name, t) in enumerate((("a", 1.0), ("b", 2.0)))))
    cases = summarise(frame)
    assert cases[["variant", "time_s", "launches"]].values.tolist() == [["a", 1.0, 1], ["b", 2.0, 1]]


def test_what_is_said_of_launches(tmp_path: Path) -> None:
    run = write_run(tmp_path, *[[point(launch=index)] for index in range(11)])
    (run / "launches" / "10" / "manifest.json").write_text('{"seed": 5}')
    (run / "launches" / "3" / "manifest.json").write_text("{cut sh")
    found = read_launches(run)
    assert list(found) == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert found[10] == {"seed": 5}
    assert read_launches(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("tail", ['{"collective":"all_re', "\x00" * 40, '{"a":1}\n', "\n\n"])
def test_a_last_line_cut_short_is_dropped_in_silence(tmp_path: Path, tail: str) -> None:
    file = tmp_path / "points.jsonl"
    file.write_text(point().to_json() + "\n" + tail)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(load(file)) == 1


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(min_value=0, max_value=2000))
def test_a_crash_at_any_byte_loses_the_unfinished_point_only(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    lines = [point(bytes=size).to_json().encode() + b"\n" for size in (1, 2)]
    kept = b"".join(lines)[:cut]
    file = tmp_path_factory.mktemp("cut") / "points.jsonl"
    file.write_bytes(kept)
    complete = sum(len(kept) >= end for end in (len(lines[0]) - 1, len(lines[0] + lines[1]) - 1))
    assert load(file)["bytes"].tolist() == [1, 2][:complete]


@pytest.mark.parametrize("bad", [b"{", b"[1]", b'{"collective":"all_reduce"}', b"\xff\xfe{}", b"[" * 100_000])
def test_a_garbled_line_in_the_middle_is_named(tmp_path: Path, bad: bytes) -> None:
    file = tmp_path / "points.jsonl"
    good = point().to_json().encode()
    file.write_bytes(b"\n".join([good, bad, good]) + b"\n")
    with pytest.warns(UserWarning, match=r"points\.jsonl:2: not a point"):
        frame = load(file)
    assert len(frame) == 2


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "points.jsonl"
    file.write_text(point().to_json() + "\n" + point(schema=SCHEMA + 1).to_json() + "\n")
    with pytest.raises(ValueError, match=rf"points\.jsonl:2: schema {SCHEMA + 1} .* upgrade"):
        load(file)


def test_one_launch_keeps_its_own_interval() -> None:
    row = summarise(frame_of(point(time_lo_s=0.9e-3, time_hi_s=1.2e-3, interval_of="iterations", interval_level=0.978)))
    assert row[["time_lo_s", "time_hi_s", "interval_of", "interval_level", "launches"]].iloc[0].tolist() == [
        0.9e-3, 1.2e-3, "iterations", 0.978, 1,
    ]  # fmt: skip


def test_five_launches_give_the_median_of_medians_and_their_range() -> None:
    times = [5.0, 1.0, 4.0, 2.0, 3.0]
    points = [
        point(launch=index, time_s=time, algbw_Bps=1000 / time, busbw_Bps=1500 / time, bound_s=1.5, efficiency=1.5 / time,
              slowest_rank=index, wrong=0, samples=10, interval_of="iterations", interval_level=0.98)
        for index, time in enumerate(times)
    ]  # fmt: skip
    result = summarise(frame_of(*points))
    assert len(result) == 1
    row = result.iloc[0]
    assert (row["time_s"], row["time_lo_s"], row["time_hi_s"]) == (3.0, 1.0, 5.0)
    assert (row["interval_of"], row["interval_level"], row["launches"]) == ("launches", 0.9375, 5)
    assert (row["slowest_rank"], row["samples"], row["wrong"]) == (4, 50, 0)
    assert row["busbw_Bps"] == pytest.approx(500.0)


def test_an_even_number_of_launches_scales_rates_to_the_median() -> None:
    points = [
        point(launch=i, time_s=t, algbw_Bps=12 / t, busbw_Bps=18 / t, efficiency=1 / t) for i, t in ((0, 2.0), (1, 4.0))
    ]
    row = summarise(frame_of(*points)).iloc[0]
    assert row[["time_s", "algbw_Bps", "busbw_Bps"]].tolist() == pytest.approx([3.0, 4.0, 6.0])
    assert row["efficiency"] == pytest.approx(1 / 3)
    assert (row["time_lo_s"], row["time_hi_s"], row["interval_level"]) == (2.0, 4.0, 0.5)


def test_models_are_the_median_of_the_launches_calibrations() -> None:
    points = [
        point(launch=i, time_s=t, busbw_Bps=12 / t, ring_s=r, ring_busbw_Bps=12 / r, bound_s=b, efficiency=b / t)
        for i, (t, r, b) in enumerate([(4.0, 2.0, 1.0), (8.0, 6.0, 2.0), (6.0, 3.0, 1.5), (5.0, 4.0, 1.0)])
    ]
    row = summarise(frame_of(*points)).iloc[0]
    assert row[["time_s", "ring_s", "bound_s"]].tolist() == [5.5, 3.5, 1.25]
    assert row["ring_busbw_Bps"] == pytest.approx(12 / 3.5)
    assert row["efficiency"] == pytest.approx(1.25 / 5.5)
    assert pd.isna(row["tree_s"])


def test_the_tuners_estimate_is_the_median_over_launches() -> None:
    launches = [point(launch=k, nccl_estimate_s=value) for k, value in enumerate((2e-6, 9e-6, 3e-6))]
    row = summarise(frame_of(*launches, point(case_id="c2"))).iloc[0]
    assert row["nccl_estimate_s"] == 3e-6
    assert pd.isna(row["predicted_s"]) and pd.isna(row["bound_s"])


def test_an_efficiency_without_a_bound_is_kept() -> None:
    assert summarise(frame_of(point(efficiency=0.8)))["efficiency"].tolist() == [0.8]


def test_passes_of_a_soak_reduce_to_their_launch_first() -> None:
    # Launch 0 has passes 1, 2, 3 (median 2), launch 1 one of 7: the launches' median is 4.5, that of all points 2.5.
    passes = [(0, 0, 1.0), (0, 1, 2.0), (0, 2, 3.0), (1, 0, 7.0)]
    row = summarise(frame_of(*[point(launch=k, pass_index=i, time_s=t) for k, i, t in passes])).iloc[0]
    assert (row["time_s"], row["time_lo_s"], row["time_hi_s"], row["launches"]) == (4.5, 2.0, 7.0, 2)


def test_passes_of_a_single_launch_give_the_interval_of_their_medians() -> None:
    points = [point(pass_index=i, time_s=float(i + 1), interval_of="iterations") for i in range(10)]
    row = summarise(frame_of(*points)).iloc[0]
    assert (row["time_s"], row["time_lo_s"], row["time_hi_s"]) == (5.5, 2.0, 9.0)
    assert (row["interval_of"], row["interval_level"], row["launches"]) == ("passes", 1 - 22 / 1024, 1)


def test_wrong_failed_and_skipped_stay_with_their_reasons() -> None:
    result = summarise(
        frame_of(
            point(case_id="a", launch=0, wrong=0),
            point(case_id="a", launch=1, wrong=3, status="wrong", reason="3 elements", algbw_Bps=None, busbw_Bps=None),
            point(case_id="b", bytes=2, time_s=None, status="skipped", reason="no memory"),
            point(case_id="c", bytes=3, launch=0),
            point(case_id="c", bytes=3, launch=1, time_s=None, status="failed", reason="timed out"),
        )
    )
    assert result["status"].tolist() == ["wrong", "skipped", "failed"]
    assert result["reason"].tolist() == ["3 elements", "no memory", "timed out"]
    assert result["launches"].tolist() == [2, 1, 2]
    assert int(result["wrong"].iloc[0]) == 3
    assert result[["algbw_Bps", "busbw_Bps", "efficiency"]].iloc[0].isna().all()
    assert pd.isna(result["time_s"].iloc[1])
    assert result["busbw_Bps"].iloc[2] == 1.5e6


def test_flags_and_notes_are_gathered() -> None:
    row = summarise(
        frame_of(
            point(launch=0, late_starts=False, note="algorithm forced"),
            point(launch=1, late_starts=True, note="socket only", tainted="throttled"),
            point(launch=2, note="algorithm forced"),
        )
    ).iloc[0]
    assert bool(row["late_starts"])
    assert pd.isna(row["host_bound"])
    assert (row["note"], row["tainted"]) == ("algorithm forced; socket only", "throttled")


def test_runs_are_pooled_unless_kept_apart() -> None:
    frame = frame_of(point(run_id="r1", time_s=1.0), point(run_id="r2", time_s=3.0))
    assert summarise(frame)[["time_s", "launches"]].iloc[0].tolist() == [2.0, 2]
    assert summarise(frame, by=("run_id",))["time_s"].tolist() == [1.0, 3.0]


def test_the_slowest_group_may_change_between_launches() -> None:
    assert (
        len(summarise(frame_of(point(group="node", group_index=0), point(group="node", group_index=1, launch=1)))) == 1
    )


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(min_value=1e-6, max_value=1e3), min_size=1, max_size=30))
def test_summary_of_launches_agrees_with_the_definition(times: list[float]) -> None:
    row = summarise(frame_of(*[point(launch=index, time_s=time) for index, time in enumerate(times)])).iloc[0]
    assert row["time_s"] == pytest.approx(pd.Series(times).median())
    if len(times) > 1:
        assert min(times) <= row["time_lo_s"] <= row["time_s"] <= row["time_hi_s"] <= max(times)


def test_find_run_by_age_prefix_and_path(tmp_path: Path) -> None:
    old = write_run(tmp_path, [point()], run_id="20250101T000000Z-aa", day="2025-01-01")
    new = write_run(tmp_path, [point()], run_id="20250103T000000Z-bb", day="2025-01-03")
    sample = write_run(tmp_path, [point()], run_id="20240101T000000Z-cc", day="sample")
    assert find_run(tmp_path) == new
    assert find_run(tmp_path, "20250101") == old
    assert find_run(tmp_path, str(old)) == old
    assert find_run(tmp_path, str(old / "launches" / "0" / "points.jsonl")) == old
    assert find_run(tmp_path, f"sample/{sample.name}") == sample
    with pytest.raises(ValueError, match="beginning of 2 runs"):
        find_run(tmp_path, "2025")
    with pytest.raises(ValueError, match="newest run is"):
        find_run(tmp_path, "1999")
    with pytest.raises(ValueError, match="holds no runs"):
        find_run(tmp_path / "none")


@pytest.mark.parametrize(
    ("end", "outcome", "ending"),
    [
        ({"status": "ok", "reason": ""}, "ok", "ok"),
        ({"status": "failed", "reason": "rank 2 on n1 was killed"}, "failed", "failed: rank 2 on n1 was killed"),
        ({"status": "interrupted"}, "interrupted", "interrupted"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, end: dict[str, Any], outcome: str, ending: str) -> None:
    run = write_run(tmp_path, [point()])
    (run / "end.json").write_text(json.dumps(end))
    info = read_run(run)
    assert (info.run_id, info.outcome, info.ending, info.manifest["world"]) == (RUN, outcome, ending, 4)


def test_what_tainted_a_run_in_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path, [point()])
    assert taint_line(run, [None, float("nan")]) is None  # type: ignore[list-item]
    assert taint_line(run, ["hot", None, "hot"]) == "tainted: 2 of 3 points"
    for launch, said in {"0": ["a: GPU 1: hot"], "1": ["b: GPU 0: 2 PCIe replays", "a: GPU 1: hot"], "10": []}.items():
        folder = run / "launches" / launch
        folder.mkdir(exist_ok=True)
        (folder / "manifest.json").write_text(json.dumps({"tainted": said}))
    assert taint_line(run, []) == "tainted: a: GPU 1: hot; b: GPU 0: 2 PCIe replays"
    assert taint_line(run, ["hot"]) == "tainted: 1 of 1 points; a: GPU 1: hot; b: GPU 0: 2 PCIe replays"


@pytest.mark.parametrize("content", [None, "", '{"status": "o', "[]"])
def test_a_missing_or_cut_end_is_a_crash(tmp_path: Path, content: str | None) -> None:
    run = write_run(tmp_path, [point()])
    if content is not None:
        (run / "end.json").write_text(content)
    info = read_run(run)
    assert info.outcome == "crashed"
    assert "no end.json" in info.ending


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, [point()])
    for folder in (tmp_path, run / "launches" / "0"):
        with pytest.raises(ValueError, match="not a run's directory"):
            read_run(folder)
