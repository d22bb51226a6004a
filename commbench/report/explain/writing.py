"""Diagnoses as text for a person and as JSON for a program."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from commbench.models.prediction import NEAR
from commbench.report.explain.evidence import Curve, Finding
from commbench.report.explain.judging import NONE, Diagnosis, of_the_run
from commbench.report.explain.shape import Look, Shape, Stretch
from commbench.report.tables import plain
from commbench.units import format_size

SOUND = "as fast as its models say"
NOT_NEAR = "no algorithm's model is near at all sizes, but it is not slower than all of them"
SMALL_ONLY = "only small messages are slower than their models, which are rough there"
NOT_SLOW = "no curve is slower than its models, though some are near none of them"
UNCALIBRATED = "nothing to judge by: its links were not calibrated"
WIDTH = 120
_LABEL = 12


def to_text(run_id: str, diagnoses: Sequence[Diagnosis]) -> str:
    """A block a curve, and the line for the run."""
    blocks = ["\n".join(_block(diagnosis)) for diagnosis in diagnoses]
    return "\n\n".join([*blocks, plain(f"run {run_id}: {verdict(diagnoses)}")])


def verdict(diagnoses: Sequence[Diagnosis]) -> str:
    """The run's likeliest cause in one line, or none."""
    found = of_the_run(diagnoses)
    if found is not None:
        return f"{found.cause} ({found.level}): {'; '.join(found.judged_by)}"
    if not diagnoses:
        return f"{NONE}: it has no times"
    if not any(diagnosis.curve.setups for diagnosis in diagnoses):
        return f"{NONE}: {UNCALIBRATED}"
    if all(not diagnosis.findings for diagnosis in diagnoses):
        near = all(_soundness(diagnosis.shape) == SOUND for diagnosis in diagnoses)
        return f"{NONE}: {SOUND if near else NOT_SLOW}"
    return f"{NONE}: what single curves show does not hold for the run"


def to_json(run_id: str, diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    """``{"run_id", "cause", "verdict", "curves": [...]}``; sizes in bytes, levels high, medium or low."""
    found = of_the_run(diagnoses)
    return {
        "run_id": run_id,
        "cause": _finding(found) if found else None,
        "verdict": verdict(diagnoses),
        "curves": [_curve(diagnosis) for diagnosis in diagnoses],
    }


def _curve(diagnosis: Diagnosis) -> dict[str, Any]:
    case, shape = diagnosis.curve.case, diagnosis.shape
    names = ("collective", "backend", "algorithm", "group", "ranks", "nodes", "dtype", "reduce_op", "placement", "timing",
             "root", "execution", "cache", "buffers")  # fmt: skip
    regimes = shape.regimes
    return {
        **{name: getattr(case, name) for name in names},
        "sizes": [spot.size for spot in diagnosis.curve.spots],
        "looks_like": [asdict(look) for look in shape.looks],
        "switches": None if regimes is None else list(regimes.switches),
        "regimes_error": None if regimes is None else regimes.median_error,
        "below_fastest": [asdict(stretch) for stretch in shape.below_fastest],
        "below_every": [asdict(stretch) for stretch in shape.below_every],
        "causes": [_finding(finding) for finding in diagnosis.findings],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {**asdict(finding), "sizes": list(finding.sizes), "judged_by": list(finding.judged_by)}


def _block(diagnosis: Diagnosis) -> Iterator[str]:
    yield plain(_title(diagnosis.curve))
    lines = [*_shape_lines(diagnosis.shape), *_cause_lines(diagnosis)]
    for label, text in lines:
        yield textwrap.fill(
            plain(text), WIDTH, initial_indent=f"  {label:<{_LABEL}}", subsequent_indent=" " * (_LABEL + 2),
            break_on_hyphens=False, break_long_words=False,
        )  # fmt: skip


def _title(curve: Curve) -> str:
    case = curve.case
    hosts = f"{case.ranks} ranks on {case.nodes} host" + "s" * (case.nodes != 1)
    by = [] if case.algorithm == "library" else [case.algorithm]
    where = [] if case.group == "world" else [case.group]
    how = [case.dtype, case.reduce_op, f"{case.placement} of place" if case.placement == "out" else "in place"]
    unusual = [case.execution] * (case.execution != "eager") + [f"{case.cache} cache"] * (case.cache != "rotate")
    unusual += [f"{case.buffers} buffers"] * (case.buffers != "plain")
    kind = [" ".join(filter(None, how))] if case.spec.sized else []
    return f"{case.collective} {case.backend}: {', '.join([*by, *where, hosts, *kind, *unusual, case.timing])}"


def _shape_lines(shape: Shape) -> Iterator[tuple[str, str]]:
    if shape.looks:
        yield "is" if shape.looks[0].known else "looks like", ", then ".join(map(_look, shape.looks))
    if shape.regimes is not None:
        sizes = [format_size(round(size)) for size in shape.regimes.switches]
        change = f"change at {' and '.join(sizes)}" if sizes else "one"
        yield (
            "regimes",
            f"{change}; time = latency + bytes / rate in each, right within {shape.regimes.median_error:.0%}",
        )
    known = bool(shape.looks) and shape.looks[0].known
    for stretches, what in ((shape.below_fastest, "its model" if known else "the fastest model"),
                            ((), "") if known else (shape.below_every, "every model")):  # fmt: skip
        if stretches:
            yield "slower than", f"{what}: {', '.join(map(_stretch, stretches))}"


def _look(look: Look) -> str:
    where = f" {_range(look.first, look.last)}" if look.last else ""
    if look.algorithm is None or look.error is None:
        return f"no algorithm{where}"
    name = look.algorithm + (f" (or {', '.join(look.alike)})" if look.alike else "")
    return f"{name}{where}, {look.error:.0%} off"


def _stretch(stretch: Stretch) -> str:
    least, most = f"{stretch.least:.1f}", f"{stretch.most:.1f}"
    return f"{least if least == most else f'{least} to {most}'} x at {_range(stretch.first, stretch.last)}"


def _range(first: int, last: int) -> str:
    return format_size(first) if first == last else f"{format_size(first)} - {format_size(last)}"


def _cause_lines(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    if not diagnosis.curve.setups:
        yield "cause", f"{NONE}: {UNCALIBRATED}"
    elif not diagnosis.findings:
        yield "cause", f"{NONE}: {_soundness(diagnosis.shape)}"
    for place, finding in enumerate(diagnosis.findings):
        sizes = f" at {_range(finding.sizes[0], finding.sizes[-1])}" if finding.sizes[-1] else ""
        label = "cause" if place == 0 else "or"
        yield label, f"{finding.cause} ({finding.level}){sizes}: {'; '.join(finding.judged_by)}"


def _soundness(shape: Shape) -> str:
    if shape.below_every:
        return SMALL_ONLY
    near = all(look.error is not None and look.error <= NEAR for look in shape.looks)
    return SOUND if near else NOT_NEAR
