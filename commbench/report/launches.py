"""What several launches of a run say: how much they vary, whether they hang together, their modes, and verdicts on
variants."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING

import numpy as np

from commbench.records import STATUS_OK
from commbench.report.frame import Source, read_launches
from commbench.report.tables import IDENTITY, PLAIN_WIDTH, plain
from commbench.stats.compare import CONFIDENCE, LEAST_PAIRS, MIN_EFFECT, Comparison, compare
from commbench.stats.launches import LaunchInterval, Spread, median_of_launches, spread_of_launches
from commbench.stats.modes import Modes, find_modes
from commbench.stats.separators import Fact, Separator, separators
from commbench.stats.sequence import LEAST, Correlation, Drift, find_drift, serial_correlation
from commbench.units import format_size, format_time

if TYPE_CHECKING:
    import pandas as pd

Facts = Mapping[int, Mapping[str, Fact]]

# Besides size and timing, in the order in which a line names them where they differ within the run.
_NAMED = (
    "variant", *(name for name in IDENTITY if name not in ("run_id", "variant", "protocol")), "mode", "routing", "experts_on",
)  # fmt: skip
_OF_POINT = ("steal_s", "preemptions")  # facts of a launch that are stored with each of its points
_MOST_LINES = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseLaunches:
    """One case, under one variant: each launch's median time in s, in the order of the launches, and what they show.

    ``separators``: facts that go with the two modes, where there are two.
    """

    title: str
    case_id: str
    variant: str
    launches: tuple[int, ...]
    times: tuple[float, ...]
    interval: LaunchInterval
    spread: Spread | None
    modes: Modes | None
    separators: tuple[Separator, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantVerdict:
    """A case under ``variant`` against the same case under ``against``; ``paired``: launch by launch."""

    title: str
    variant: str
    against: str
    paired: bool
    comparison: Comparison


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchReport:
    """``correlation`` and ``drift`` are those of all cases together, None for fewer than five launches. ``lines``: all
    of it for a person, empty for one launch."""

    cases: tuple[CaseLaunches, ...]
    correlation: Correlation | None
    drift: Drift | None
    verdicts: tuple[VariantVerdict, ...]
    lines: tuple[str, ...]


def print_launches(frame: pd.DataFrame, run_dir: Source, *, file: IO[str] | None = None) -> None:
    """Print what the launches of one run's points say; nothing where there is only one launch."""
    import sys

    out = file or sys.stdout
    width = max(60, min(shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns, PLAIN_WIDTH))
    for line in launch_report(frame, read_facts(run_dir)).lines:
        text = plain(line, getattr(out, "encoding", None) or "utf-8")
        print("\n".join(textwrap.wrap(text, width, subsequent_indent="    ", break_on_hyphens=False)), file=out)


def read_facts(run_dir: Source) -> dict[int, dict[str, Fact]]:
    """What was recorded of each launch of a run: by its number and by name a text or a number."""
    found: dict[int, dict[str, Fact]] = {}
    for number, manifest in read_launches(run_dir).items():
        facts = manifest.get("facts")
        known = facts.items() if isinstance(facts, dict) else ()
        found[number] = {str(name): value for name, value in known if isinstance(value, (str, int, float))}
    return found


def launch_report(frame: pd.DataFrame, facts: Facts | None = None) -> LaunchReport:
    """What the launches in ``frame``, points of one run, say. ``facts``: see ``read_facts``.

    Only points that are ok count; a soak's passes reduce to their launch's median.
    """
    timed = _with_position(frame)
    timed = timed[(timed["status"] == STATUS_OK) & timed["time_s"].notna()]
    names = [name for name in _NAMED if timed[name].nunique(dropna=False) > 1]
    ordered = timed.sort_values(["collective", "backend", "timing", "bytes", "case_id", "launch"], kind="stable")
    groups = ordered.groupby(["case_id", "variant"], sort=False)
    cases = tuple(_case(points, names, facts or {}) for _, points in groups)
    rows = [case.times for case in cases]
    correlation, drift = serial_correlation(rows), find_drift(rows)
    moved = any(found is not None and found.distinguishable for found in (correlation, drift))
    verdicts = tuple(_verdicts(cases, moved))
    found = LaunchReport(cases=cases, correlation=correlation, drift=drift, verdicts=verdicts, lines=())
    unbound = all(of.get("bind", "none") == "none" for of in (facts or {}).values())
    return replace(found, lines=tuple(_lines(found, unbound)))


def _with_position(frame: pd.DataFrame) -> pd.DataFrame:
    """With the number of each case in its launch: the order differs from launch to launch."""
    return frame.assign(
        position=frame.groupby("launch", sort=False)["case_id"].transform(lambda ids: ids.factorize()[0])
    )


def _case(points: pd.DataFrame, names: Sequence[str], facts: Facts) -> CaseLaunches:
    first = points.iloc[0]
    medians = points.groupby("launch", sort=False)["time_s"].median()
    times = tuple(float(time) for time in medians)
    modes = find_modes(times) if min(times) > 0 else None
    size = format_size(int(first["bytes"] or first["requested_bytes"]))
    if points["tokens"].notna().all():
        size = f"{int(first['tokens'])} tokens"
    title = " ".join([f"{first['collective']} {first['backend']} {size} {first['timing']}", *(
        str(first[name]) for name in names if name != "variant" and first[name] == first[name]
    )])  # fmt: skip
    launches = tuple(int(launch) for launch in medians.index)
    return CaseLaunches(
        title=title, case_id=str(first["case_id"]), variant=str(first["variant"]), launches=launches, times=times,
        interval=median_of_launches(times), spread=spread_of_launches(times), modes=modes,
        separators=() if modes is None else tuple(separators(modes.slow, _facts_of(points, launches, facts))),
    )  # fmt: skip


def _facts_of(points: pd.DataFrame, launches: Sequence[int], facts: Facts) -> dict[str, list[Fact]]:
    """By name the values of every launch: what was recorded of it, then what its points of this case say."""
    names = dict.fromkeys(name for launch in launches for name in facts.get(launch, {}))
    found: dict[str, list[Fact]] = {
        name: [facts.get(launch, {}).get(name) for launch in launches] for name in names
    }  # fmt: skip
    for name in (*_OF_POINT, "position"):
        values = points.groupby("launch", sort=False)[name].first()
        found.setdefault(name, [float(value) if value == value and value is not None else None
                                for value in values.astype(object).where(values.notna(), None)])  # fmt: skip
    return found


def _verdicts(cases: Sequence[CaseLaunches], moved: bool) -> Iterator[VariantVerdict]:
    """Every variant against the first, which is that of the first launch; pair by pair where times ``moved`` in the
    course of the run."""
    variants = list(dict.fromkeys(case.variant for case in sorted(cases, key=lambda case: case.launches[0])))
    by_key = {(case.case_id, case.variant): case for case in cases}
    for base in (case for case in cases if case.variant == variants[0]):
        for name in variants[1:]:
            other = by_key.get((base.case_id, name))
            if other is not None and min((*base.times, *other.times)) > 0:
                count = len(base.times)
                paired = moved and count == len(other.times) and count >= LEAST_PAIRS
                comparison = compare(base.times, other.times, paired=paired)
                yield VariantVerdict(
                    title=base.title, variant=name, against=base.variant, paired=paired, comparison=comparison
                )


# -- for a person --------------------------------------------------------------------------------------


def _lines(report: LaunchReport, unbound: bool) -> Iterator[str]:
    most = max((case.interval.count for case in report.cases), default=0)
    if most < 2:
        return
    statements = dict.fromkeys(case.interval.statement for case in report.cases)
    yield "launches"
    for statement in statements:
        yield f"  {statement}"
    yield from _spread_lines(report.cases)
    yield from _order_lines(report, most)
    yield from _mode_lines(report.cases, unbound)
    yield from _verdict_lines(report)


def _spread_lines(cases: Sequence[CaseLaunches]) -> Iterator[str]:
    known = [(case, case.spread) for case in cases if case.spread is not None]
    if not known:
        return
    one, mean, median = (
        float(np.median([getattr(spread, name) for _, spread in known])) for name in ("one", "mean", "median")
    )
    worst, most = max(known, key=lambda pair: pair[1].one)
    yield (
        f"  variation (CV): {one:.1%} of one launch" + (f", median of {len(known)} cases" if len(known) > 1 else "")
        + f"; {mean:.1%} of the mean of the launches, {median:.1%} of their median"
        + (f"; one launch of {_titled(worst)}: {most.one:.1%}" if len(known) > 1 else "")
    )  # fmt: skip


def _titled(case: CaseLaunches) -> str:
    return case.title + (f", variant {case.variant}" if case.variant else "")


def _order_lines(report: LaunchReport, most: int) -> Iterator[str]:
    correlation, drift = report.correlation, report.drift
    if correlation is None or drift is None:
        if most < LEAST:
            yield f"  correlation of launches in a row, and drift: not to be told from fewer than {LEAST} launches"
        return
    found = (
        f"  correlation of launches in a row: {correlation.value:.2f}, where independent ones give "
        f"{correlation.lo:.2f} to {correlation.hi:.2f}"
    )
    if not correlation.distinguishable:
        yield f"{found}: not distinguishable from 0"
    elif correlation.value < 0:
        yield f"{found} (p {correlation.p:.2g}): every other launch is alike"
    else:
        yield (
            f"{found} (p {correlation.p:.2g}): {correlation.launches} launches tell as much as about "
            f"{correlation.effective:.1f} independent ones, and intervals are narrower than they should be; spread them"
        )
    if drift.distinguishable:
        yield f"  drift: times change by {drift.change:+.1%} from the first launch to the last (p {drift.p:.2g})"
    else:
        yield f"  drift: none to be seen ({drift.change:+.1%} from the first launch to the last, p {drift.p:.2g})"


def _mode_lines(cases: Sequence[CaseLaunches], unbound: bool) -> Iterator[str]:
    split = [case for case in cases if case.modes is not None]
    for case in split[:_MOST_LINES]:
        assert case.modes is not None
        fast, slow = case.modes.centres
        yield (
            f"  two modes: {_titled(case)}: {format_time(fast)} in {case.modes.shares[0]:.0%} and {format_time(slow)} in "
            f"{case.modes.shares[1]:.0%} of {len(case.times)} launches; {_separated(case.separators)}"
        )
    if len(split) > _MOST_LINES:
        yield f"  two modes: {len(split) - _MOST_LINES} more cases"
    if split and unbound:
        yield "  ranks were free to move between processors: --bind core holds each to one of its own"


def _separated(found: Sequence[Separator]) -> str:
    if not found:
        return "nothing that was recorded goes with them"
    best = found[0]
    names = ", ".join(best.names[:3]) + (f" and {len(best.names) - 3} more" if len(best.names) > 3 else "")
    others = [name for other in found[1:] for name in other.names]
    also = f"; also {', '.join(others[:3])}" if others else ""
    return f"{names} goes with them ({best.detail}; p {best.p_holm:.2g}, {best.explained:.0%} explained{also})"


def _verdict_lines(report: LaunchReport) -> Iterator[str]:
    if not report.verdicts:
        return
    how = "pair by pair, since launches drift or are correlated; " if any(one.paired for one in report.verdicts) else ""
    yield (
        f"variants against {report.verdicts[0].against or 'none'}: ratio of times, {how}interval at {CONFIDENCE:.0%}, "
        f"differences below {MIN_EFFECT:.0%} do not count"
    )
    rows = [
        (one.title, one.variant, *_ratio(one.comparison), one.comparison.verdict.value, one.comparison.reason)
        for one in report.verdicts
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=False))
        yield f"  {'  '.join(cells)}  {row[-1]}"


def _ratio(comparison: Comparison) -> tuple[str, str]:
    def text(ratio: float) -> str:
        return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.3g}"

    ratio = "-" if comparison.ratio is None else text(comparison.ratio)
    if comparison.lo is None or comparison.hi is None:
        return ratio, "-"
    return ratio, f"[{text(comparison.lo)}, {text(comparison.hi)}]"
