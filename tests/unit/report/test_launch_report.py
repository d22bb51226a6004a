from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from commbench.records import Point
from commbench.report.frame import from_points
from commbench.report.launches import LaunchReport, launch_report, print_launches, read_facts
from commbench.stats.compare import Verdict

# Shuffled, so that neither drift nor correlation shows.
QUIET = (1.003, 0.998, 1.001, 0.997, 1.002, 0.999, 1.0, 1.004)


def point(launch: int, time_s: float, size: int = 1024, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "run_id": "r1", "launch": launch, "collective": "all_reduce", "backend": "mpi", "ranks": 2, "nodes": 1,
        "dtype": "float32", "reduce_op": "sum", "placement": "out", "bytes": size, "requested_bytes": size,
        "timing": "isolated", "case_id": f"{size}", "time_s": time_s,
    }  # fmt: skip
    parsed: dict[str, Any] = json.loads(Point(**(values | changes)).to_json())
    return parsed


def report(*points: dict[str, Any], facts: Any = None) -> LaunchReport:
    return launch_report(from_points(points), facts)


def quiet(count: int = 8, **changes: Any) -> list[dict[str, Any]]:
    return [point(launch, 1e-3 * QUIET[launch % 8], **changes) for launch in range(count)]


def test_one_launch_has_nothing_to_add() -> None:
    found = report(point(0, 1e-3), point(0, 2e-3, 8))
    assert found.lines == ()
    assert found.cases[0].interval.statement == "one launch: what is said holds for this launch alone"


def test_eight_quiet_launches_in_full() -> None:
    found = report(*quiet())
    case = found.cases[0]
    assert case.times == tuple(pytest.approx(1e-3 * value) for value in QUIET)
    assert (case.interval.lo, case.interval.hi) == pytest.approx((0.997e-3, 1.004e-3))
    assert found.correlation is not None and not found.correlation.distinguishable
    assert found.lines[:3] == (
        "launches",
        "  8 launches: 99.2% interval of the median launch, if launches are independent",
        # Deviations from 1.0005 in thousandths: squares sum to 42, over 7 that is 2.45; over the root of 8 0.87.
        "  variation (CV): 0.2% of one launch; 0.1% of the mean of the launches, 0.1% of their median",
    )
    assert found.lines[3].startswith("  correlation of launches in a row: ")
    assert found.lines[3].endswith(": not distinguishable from 0")
    assert found.lines[4].startswith("  drift: none to be seen (")
    assert len(found.lines) == 5


def test_few_launches_say_that_there_is_no_interval() -> None:
    lines = report(*quiet(3)).lines
    assert lines[1].startswith("  3 launches: no 95% interval of the median launch exists below 6; their range")
    assert lines[-1].endswith("not to be told from fewer than 5 launches")


def test_the_launch_that_varies_most_is_named() -> None:
    wild = [point(launch, time_s, 8) for launch, time_s in enumerate((1e-6, 2e-6, 3e-6, 4e-6, 5e-6, 6e-6, 7e-6, 8e-6))]
    line = report(*quiet(), *wild).lines[2]
    # 1 to 8: mean 4.5, variance 6.
    assert line.endswith("; one launch of all_reduce mpi 8 isolated: 54.4%")
    assert "of one launch, median of 2 cases;" in line


def test_drift_and_correlation_are_told() -> None:
    found = report(*(point(launch, 1e-3 * 1.01**launch) for launch in range(12)))
    assert found.correlation is not None and found.correlation.distinguishable
    assert "launches tell as much as about" in found.lines[3]
    assert found.lines[4].startswith("  drift: times change by +11.6% from the first launch to the last (p ")  # 1.01^11


def modal(core: list[int], **changes: Any) -> list[dict[str, Any]]:
    times = [(1.15e-6, 2.1e-6)[slow] * QUIET[launch % 8] for launch, slow in enumerate(core)]
    return [point(launch, time_s, 8, **changes) for launch, time_s in enumerate(times)]


CORES = [0, 1, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0]


def test_modes_are_named_with_what_goes_with_them() -> None:
    facts = {launch: {"order": launch, "rank0.core": core, "bind": "none"} for launch, core in enumerate(CORES)}
    found = report(*modal(CORES), facts=facts)
    case = found.cases[0]
    assert case.modes is not None
    assert case.modes.slow == tuple(map(bool, CORES))
    assert case.separators[0].names == ("rank0.core",)
    (line,) = (line for line in found.lines if "two modes" in line)
    assert line.startswith("  two modes: all_reduce mpi 8 isolated: 1.15 us in 58% and 2.10 us in 42% of 12 launches; ")
    # 1 of C(12, 5) = 792 tables is as rare, and 2 facts differ: order and core.
    assert "  ranks were free to move between processors: --bind core holds each to one of its own" in found.lines
    assert "rank0.core goes with them (1: 5 of 5 slow, 0: 0 of 7 slow; p 0.0025, 100% explained)" in line


def test_modes_that_nothing_explains_say_so() -> None:
    (line,) = (line for line in report(*modal(CORES)).lines if "two modes" in line)
    assert line.endswith("of 12 launches; nothing that was recorded goes with them")


def test_what_points_say_of_their_launch_is_a_fact_too() -> None:
    points = modal(CORES)
    for one, slow in zip(points, CORES, strict=True):
        one["preemptions"] = 7 if slow else 0
    (separator,) = report(*points).cases[0].separators
    assert separator.names == ("preemptions",)


def test_variants_get_verdicts_against_the_first() -> None:
    points = []
    for repetition in range(8):
        order = ("default", "tcp") if repetition % 2 == 0 else ("tcp", "default")
        for place, variant in enumerate(order):
            time_s = 1e-3 * QUIET[(repetition + 3 * place) % 8] * (1.2 if variant == "tcp" else 1.0)
            points.append(point(2 * repetition + place, time_s, variant=variant))
    found = report(*points)
    (verdict,) = found.verdicts
    assert (verdict.variant, verdict.against, verdict.comparison.verdict) == ("tcp", "default", Verdict.SLOWER)
    assert verdict.comparison.ratio == pytest.approx(1.2, rel=0.01)
    assert not verdict.paired
    assert found.lines[-2].startswith("variants against default: ratio of times, interval at 99%,")
    assert found.lines[-1].split()[:6] == [
        "all_reduce",
        "mpi",
        "1K",
        "isolated",
        "tcp",
        f"{verdict.comparison.ratio:.3f}",
    ]
    assert "SLOWER" in found.lines[-1]
    assert [case.variant for case in found.cases] == ["default", "tcp"]


@pytest.mark.parametrize("count", [7, 8])
def test_where_times_drift_variants_are_compared_pair_by_pair(count: int) -> None:
    points = []
    for launch in range(2 * count):
        repetition, variant = launch // 2, ("default", "tcp")[launch % 2]
        drift = 1.1**repetition * QUIET[launch % 8]
        points.append(point(launch, 1e-3 * drift * (1.05 if variant == "tcp" else 1.0), variant=variant))
    found = report(*points)
    (verdict,) = found.verdicts
    assert verdict.paired == (count == 8)  # of seven pairs there is no interval at 99 %
    assert verdict.comparison.verdict is (Verdict.SLOWER if count == 8 else Verdict.UNCLEAR)
    assert ("pair by pair" in found.lines[-2]) == verdict.paired


def test_a_case_that_a_variant_lacks_gets_no_verdict() -> None:
    points = [point(0, 1e-3, variant="a"), point(1, 1e-3, variant="b"), point(0, 1e-3, 8, variant="a")]
    found = report(*points)
    assert [one.title for one in found.verdicts] == ["all_reduce mpi 1K isolated"]
    assert "too few launches" in found.verdicts[0].comparison.reason


def test_only_what_is_ok_counts_and_passes_are_one_launch() -> None:
    found = report(
        point(0, 1e-3), point(1, 3e-3), point(1, 5e-3, pass_index=1), point(2, 9e-3, status="wrong"),
        point(2, 1.0, status="failed", reason="x"),
    )  # fmt: skip
    assert found.cases[0].times == (1e-3, 4e-3)


def test_no_points_no_lines() -> None:
    assert launch_report(from_points([])).lines == ()
    assert report(point(0, 1e-3, status="skipped") | {"time_s": None}).lines == ()


def test_settings_that_differ_are_in_the_title() -> None:
    found = report(*quiet(2), *quiet(2, algorithm="own:ring", case_id="other"))
    assert [case.title for case in found.cases] == [
        "all_reduce mpi 1K isolated library", "all_reduce mpi 1K isolated own:ring",
    ]  # fmt: skip


def test_facts_are_read_from_the_launches_manifests(tmp_path: Path) -> None:
    for number, facts in (
        (0, {"rank0.core": 1, "bind": "core", "odd": [1], "none": None}),
        (1, "text"),
        (12, {"x": 0.5}),
    ):
        folder = tmp_path / "launches" / str(number)
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"facts": facts}))
    assert read_facts(tmp_path) == {0: {"rank0.core": 1, "bind": "core"}, 1: {}, 12: {"x": 0.5}}


def test_printing_fits_the_width_and_holds_no_control_characters(tmp_path: Path) -> None:
    folder = tmp_path / "launches" / "0"
    folder.mkdir(parents=True)
    facts = {f"rank{rank}.core\x1b[31m": CORES[0] for rank in range(2)}
    (folder / "manifest.json").write_text(json.dumps({"facts": facts}))
    out = io.StringIO()
    print_launches(from_points(modal(CORES, variant="a\x1bb")), tmp_path, file=out)
    lines = out.getvalue().splitlines()
    assert lines[0] == "launches"
    assert max(map(len, lines)) <= 120
    assert "\x1b" not in out.getvalue()


def test_routed_cases_are_named_by_their_tokens_and_ways() -> None:
    of_moe = {
        "collective": "moe_dispatch",
        "reduce_op": None,
        "tokens": 16,
        "mode": "throughput",
        "experts_on": "contiguous",
    }
    found = report(
        *quiet(2, case_id="a", routing="uniform", **of_moe), *quiet(2, case_id="b", routing="zipf:1.2", **of_moe)
    )
    assert [case.title for case in found.cases] == [
        "moe_dispatch mpi 16 tokens isolated uniform", "moe_dispatch mpi 16 tokens isolated zipf:1.2"
    ]  # fmt: skip
