from __future__ import annotations

import io
import json
import textwrap
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from commbench.records import Point
from commbench.report.frame import from_points, summarise
from commbench.report.tables import plain, print_tables


def point(size: int = 1024, **changes: Any) -> dict[str, Any]:
    # 4 ranks in a ring: 1.5 of the bytes cross each link. 1 ms for 1 MiB is 1.05 GB/s, 1.57 on the bus.
    time = changes.get("time_s", 1e-3)
    values: dict[str, Any] = {
        "run_id": "r1", "collective": "all_reduce", "backend": "gloo", "ranks": 4, "nodes": 2, "dtype": "float32",
        "reduce_op": "sum", "placement": "out", "bytes": size, "requested_bytes": size, "timing": "isolated",
        "case_id": f"{size}", "time_s": time, "interval_of": "iterations", "interval_level": 0.978515625, "wrong": 0,
    }  # fmt: skip
    if time is not None:
        values |= {"algbw_Bps": size / time, "busbw_Bps": 1.5 * size / time}
        values |= {"time_lo_s": time * 0.99, "time_hi_s": time * 1.02}
    parsed: dict[str, Any] = json.loads(Point(**(values | changes)).to_json())
    return parsed


def text_of(*points: dict[str, Any], width: int | None = None) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None) if width else None
    print_tables(from_points(points), console=console, file=out)
    return out.getvalue()


def test_a_small_table_in_full() -> None:
    size = 1 << 20
    models = {
        "ring_s": 0.8e-3, "ring_busbw_Bps": 1.5 * size / 0.8e-3, "tree_s": 2e-3, "tree_busbw_Bps": 1.5 * size / 2e-3,
        "bound_s": 0.5e-3, "efficiency": 0.5, "nearest_model": "ring", "nearest_error": 0.2, "slowest_rank": 3,
    }  # fmt: skip
    text = text_of(
        point(8, time_s=100e-6, timing="isolated", slowest_rank=0, slowest_host="n0", late_starts=True),
        point(size, **models, slowest_host="n1"),
        point(2 * size, time_s=None, status="skipped", reason="needs 8 GB a rank", wrong=None),
        point(4 * size, time_s=None, status="skipped", reason="needs 8 GB a rank", wrong=None),
    )
    assert text == textwrap.dedent(
        """\
        all_reduce gloo: 4 ranks on 2 hosts, float32, sum, out of place, isolated; rates in GB/s
        bytes     time     ±     algbw    busbw  ring  tree  bound  eff  nearest   slowest  wrong  note
            8   100 us  2.0%   8.0e-05  1.2e-04     -     -      -    -  -         0 n0         0  a
           1M  1.00 ms  2.0%      1.05     1.57  1.97  0.79   3.15  50%  ring 20%  3 n1         0
        2M - 4M: skipped: needs 8 GB a rank

        time: median, and the wider side of its interval, of iterations (this launch alone) at 97.9 % confidence
        a  late starts: in most iterations the ranks did not start together, so the time holds some waiting
        """
    )


def lines_with(text: str, part: str) -> list[str]:
    return [line for line in text.splitlines() if part in line]


def test_a_table_a_collective_and_backend() -> None:
    text = text_of(point(), point(backend="mpi"), point(collective="all_gather", reduce_op=None))
    titles = lines_with(text, "rates in GB/s")
    assert [title.split(":")[0] for title in titles] == ["all_gather gloo", "all_reduce gloo", "all_reduce mpi"]


def test_rows_are_sorted_by_timing_and_size() -> None:
    text = text_of(point(64, timing="streamed"), point(1024), point(8), point(8, timing="streamed"))
    rows = [line.split()[:2] for line in text.splitlines()[2:6]]
    assert rows == [["8", "isolated"], ["1K", "isolated"], ["8", "streamed"], ["64", "streamed"]]


def test_what_varies_is_a_column_and_what_does_not_is_in_the_title() -> None:
    text = text_of(point(dtype="float32"), point(dtype="bfloat16"), point(dtype="int8", placement="in"))
    title, heading = text.splitlines()[:2]
    assert title.startswith("all_reduce gloo: 4 ranks on 2 hosts, sum, isolated")
    assert heading.split()[:3] == ["bytes", "dtype", "place"]
    plain_title = text_of(point(nodes=1, group="node", algorithm="own:ring", cache="warm", root=2)).splitlines()[0]
    assert ", symmetric buffers, isolated;" in text_of(point(buffers="symmetric"))
    assert text_of(point(), point(buffers="symmetric")).splitlines()[1].split()[:2] == ["bytes", "buffers"]
    for part in ("on 1 host,", "in each node", "algorithm own:ring", "root 2", "warm cache"):
        assert part in plain_title


def test_everything_may_vary() -> None:
    title, heading, *rest = text_of(
        point(), point(ranks=8, nodes=4, dtype="int8", reduce_op="max", placement="in", group="node", run_id="r2")
    ).splitlines()
    assert title == "all_reduce gloo: isolated; rates in GB/s"
    assert heading.split()[:8] == ["bytes", "run", "group", "ranks", "hosts", "dtype", "op", "place"]
    assert [line.split()[1] for line in rest[:2]] == ["r1", "r2"]
    assert text_of(point(), point(ranks=8)).startswith("all_reduce gloo: on 2 hosts, float32, sum")


def test_launches_are_summarised_and_a_low_level_is_marked() -> None:
    text = text_of(
        *[point(launch=index, time_s=time) for index, time in enumerate((1e-3, 1.1e-3, 1.2e-3, 1.3e-3, 2e-3))]
    )
    assert "5 launches" in text.splitlines()[0]
    # Deviations from the mean 1.32 are -0.32, -0.22, -0.12, -0.02, 0.68: squares 0.628 over 4, 0.396 / 1.32 = 30.0 %.
    assert text.splitlines()[1].split()[:4] == ["bytes", "time", "±", "cv"]
    assert text.splitlines()[2].split()[1:5] == ["1.20", "ms", "67%*", "30.0%"]
    assert "of launches at 93.8 % confidence; * below 95 %" in text
    assert "cv: standard deviation of the launches' medians, as a share of their mean" in text


def test_variants_are_rows_of_their_own() -> None:
    text = text_of(point(launch=0, variant="default"), point(launch=1, variant="tcp", time_s=2e-3))
    assert [line.split()[:4] for line in text.splitlines()[1:4]] == [
        ["bytes", "variant", "time", "±"], ["1K", "default", "1.00", "ms"], ["1K", "tcp", "2.00", "ms"],
    ]  # fmt: skip
    assert ", variant tcp," in text_of(point(variant="tcp")).splitlines()[0] + ","
    assert "variant" not in text_of(point())


def test_a_summary_can_be_printed_too() -> None:
    out = io.StringIO()
    frame = from_points([point(), point(64)])
    print_tables(summarise(frame), file=out)
    assert out.getvalue() == text_of(point(), point(64))


def test_wrong_data_shows_its_count_and_no_bandwidth() -> None:
    text = text_of(point(8), point(1024, status="wrong", wrong=17, algbw_Bps=None, busbw_Bps=None))
    row = lines_with(text, "1K")[0].split()
    assert row[0] == "1K"
    assert row[4:6] == ["-", "-"]
    assert row[-1] == "17"
    assert "1K: wrong: wrong data, so no bandwidth is given" in text


def test_equal_reasons_share_a_line_over_sizes_and_timings() -> None:
    skipped = {"time_s": None, "status": "skipped", "reason": "gloo has no avg"}
    points = [point(size, timing=timing, **skipped) for timing in ("isolated", "streamed") for size in (8, 64, 512)]
    text = text_of(*points)
    assert lines_with(text, "avg") == ["8 - 512 isolated and streamed: skipped: gloo has no avg"]


def test_a_range_does_not_reach_over_a_size_that_worked() -> None:
    failed = {"time_s": None, "status": "failed", "reason": "timed out"}
    text = text_of(point(8, **failed), point(64), point(512, **failed), point(4096, **failed))
    assert lines_with(text, "timed out") == ["8, 512 - 4K: failed: timed out"]


def test_a_size_that_rounds_to_nothing_is_named_as_it_was_asked() -> None:
    text = text_of(point(0, requested_bytes=8, time_s=None, status="skipped", reason="less than one element a rank"))
    assert "8: skipped: less than one element a rank" in text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"requested_bytes": 1030}, "rounded down"),
        ({"late_starts": True}, "late starts"),
        ({"beyond_bound": True}, "beyond the bound"),
        ({"oversubscribed": True}, "oversubscribed"),
        ({"host_bound": True}, "host-bound"),
        ({"discarded": 4}, "discarded"),
        ({"tainted": "GPU 3 throttled"}, "tainted: GPU 3 throttled"),
        ({"note": "algorithm was forced"}, "algorithm was forced"),
    ],
)
def test_footnotes(changes: dict[str, Any], says: str) -> None:
    text = text_of(point(8), point(1024, **changes))
    assert len(lines_with(text, says)) == 1
    assert lines_with(text, says)[0].startswith("a  ")
    assert lines_with(text, "1K")[0].split()[-1] == "a"
    assert lines_with(text, "    8")[0].split()[-1] != "a"


def test_a_note_of_the_whole_table_is_in_its_title_and_is_explained_once() -> None:
    text = text_of(*[point(size, note="sockets only") for size in (8, 64, 512)], point(backend="mpi"))
    assert lines_with(text, "gloo")[0].endswith("rates in GB/s [a]")
    assert text.count("sockets only") == 1
    assert "note" not in text.splitlines()[1]


def test_no_calibration_is_said_and_empty_columns_are_left_out() -> None:
    text = text_of(point())
    assert text.splitlines()[1].split() == ["bytes", "time", "±", "algbw", "busbw", "wrong"]
    assert "no model columns" in text


def test_the_tuners_estimate_has_a_column_of_its_own() -> None:
    # 1.5 times 64 and 80 MB in 1 and 4 ms; wrong data have no rate to set beside it.
    text = text_of(
        point(64_000_000, backend="nccl", nccl_estimate_s=1e-3, bound_s=2e-3, time_s=4e-3),
        point(
            80_000_000, backend="nccl", nccl_estimate_s=4e-3, status="wrong", wrong=1, algbw_Bps=None, busbw_Bps=None
        ),
    )
    heading, right, wrong = text.splitlines()[1:4]
    assert heading.split()[-4:] == ["busbw", "bound", "tuner", "wrong"]
    assert right.split()[-4:] == ["24.0", "48.0", "96.0", "0"]
    assert wrong.split()[-3:] == ["-", "-", "1"]
    assert len(lines_with(text, "tuner: tuner estimate, what NCCL's own model expects")) == 1
    assert "tuner" not in text_of(point())


def test_what_the_library_took_has_a_column_of_its_own() -> None:
    text = text_of(
        point(1024, used_algorithm="tree", protocol="ll", channels=8),
        point(2048, used_algorithm="nvls", protocol="simple", channels=16),
        point(4096, protocol="ll"),
        point(8192),
    )
    _, heading, *rows = text.splitlines()[:6]
    assert heading.split()[-2:] == ["took", "wrong"]
    assert [row[heading.index("took") : heading.index("wrong")].split() for row in rows] == [
        ["tree:ll", "x8"], ["nvls:simple", "x16"], ["ll"], ["-"]
    ]  # fmt: skip
    assert "took" not in text_of(point())


def test_a_barrier_has_a_time_and_no_rate() -> None:
    text = text_of(point(0, collective="barrier", reduce_op=None, algbw_Bps=None, busbw_Bps=None))
    assert text.startswith("barrier gloo: 4 ranks on 2 hosts, isolated\n")
    assert "1.00 ms" in text


def wide_points() -> list[dict[str, Any]]:
    models = {"ring_busbw_Bps": 1e9, "tree_busbw_Bps": 1e9, "bound_s": 1e-6, "efficiency": 0.5, "nearest_model": "tree"}
    return [
        point(8 << k, timing=timing, **models, nearest_error=0.1, slowest_rank=k, slowest_host=f"gpu-node-{k:03d}")
        for timing in ("isolated", "streamed")
        for k in range(3)
    ]


@pytest.mark.parametrize("width", [60, 80])
def test_columns_that_do_not_fit_are_left_out_and_named(width: int) -> None:
    text = text_of(*wide_points(), width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "algbw" not in text.splitlines()[1]
    left_out = " ".join(text.split()).split(f"left out at {width} columns: ")[1]
    assert "algbw" in left_out
    for essential in ("bytes", "timing", "time", "busbw", "wrong"):
        assert essential in text


def test_everything_fits_120_columns() -> None:
    text = text_of(*wide_points())
    assert "left out" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_stored_text_cannot_steer_the_terminal_or_be_markup() -> None:
    evil = "n0\x1b[31m[bold]\u202e\r\n:smile:"
    text = text_of(
        point(8, slowest_rank=0, slowest_host=evil), point(64, slowest_rank=1, slowest_host="n1"),
        point(512, time_s=None, status="failed", reason=evil),
    )  # fmt: skip
    assert not set(text) & {"\x1b", "\r", "\u202e"}
    assert "n0\ufffd[31m[bold]\ufffd\ufffd\ufffd:smile:" in text


def test_plain_keeps_to_an_encoding() -> None:
    assert plain("knoten-ä ±", "ascii") == "knoten-? ?"
    assert plain("a\tb\x00\x9b\u2066c") == "a\ufffdb\ufffd\ufffd\ufffdc"


def test_an_ascii_terminal_gets_ascii() -> None:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="ascii") as stream:
        print_tables(from_points([point(slowest_rank=1), point(64, slowest_host="ä", slowest_rank=2)]), file=stream)
        stream.flush()
        assert b"+-" in raw.getvalue()


def test_wide_characters_keep_the_columns_straight() -> None:
    text = text_of(point(8, slowest_rank=0, slowest_host="節点"), point(64, slowest_rank=1, slowest_host="node"))
    first, second = text.splitlines()[2:4]
    assert first.index("0 節点") == second.index("1 node")
    assert cell_len(first) == cell_len(second)


def test_an_empty_frame_prints_nothing() -> None:
    assert text_of() == ""


def test_a_soak_shows_how_times_moved_over_its_passes() -> None:
    times = (100e-6, 90e-6, 400e-6, 150e-6)
    text = text_of(*(point(8, time_s=time, pass_index=index) for index, time in enumerate(times)))
    assert lines_with(text, "passes,") == [
        "  all_reduce gloo 8 isolated: 4 passes, first 100 us, last 150 us (+50.0%), least 90.0 us, greatest 400 us"
    ]
    assert "of passes (this launch alone) at" in text
