"""Every cause asked of every curve, and the one that the run as a whole suffers from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commbench.report.explain.causes_machine import (
    algorithm_forced,
    host_bound,
    moves_more_bytes,
    protocol_forced,
    unexplained,
    unsteady_times,
)
from commbench.report.explain.causes_network import (
    half_duplex,
    shared_nic,
    slow_host,
    slower_network,
    tcp_instead_of_rdma,
    tcp_instead_of_shared_memory,
)
from commbench.report.explain.evidence import HIGH, LOW, MEDIUM, Curve, Finding, Judge
from commbench.report.explain.shape import Shape, shape_of

NONE = "none"

CAUSES: tuple[Judge, ...] = (
    algorithm_forced,
    protocol_forced,
    tcp_instead_of_rdma,
    tcp_instead_of_shared_memory,
    slow_host,
    slower_network,
    host_bound,
    shared_nic,
    half_duplex,
    moves_more_bytes,
)
"""Most specific first: among causes of the same level the first is the likeliest. A finding's kind is its judge's name."""

FALLBACKS: tuple[Judge, ...] = (unsteady_times, unexplained)
"""Descriptions more than causes: asked in turn where nothing above is likely."""

_LEVELS = (HIGH, MEDIUM, LOW)


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """A curve, its shape, and the causes that fit it, likeliest first; none where it is sound."""

    curve: Curve
    shape: Shape
    findings: tuple[Finding, ...]


def diagnose(curve: Curve) -> Diagnosis:
    """Judge one curve. One whose links were not calibrated is judged by settings, hosts and spread alone."""
    found = [finding for judge in CAUSES if (finding := judge(curve)) is not None]
    for judge in FALLBACKS:
        if all(finding.level == LOW for finding in found) and (finding := judge(curve)) is not None:
            found.append(finding)
    # Sorting is stable: the order of CAUSES decides among equals.
    return Diagnosis(
        curve=curve, shape=shape_of(curve), findings=tuple(sorted(found, key=lambda f: _LEVELS.index(f.level)))
    )


def of_the_run(diagnoses: Sequence[Diagnosis]) -> Finding | None:
    """The likeliest cause for the run as a whole, as the curve that it harms most shows it; None for a sound run.

    What concerns the run counts when it is likely, though few curves may show it. What concerns a curve alone counts
    when more than half of the curves have it as their likeliest.
    """
    found: dict[str, list[Finding]] = {}
    for diagnosis in diagnoses:
        for place, finding in enumerate(diagnosis.findings):
            if finding.level != LOW if finding.of_run else place == 0:
                found.setdefault(finding.cause, []).append(finding)
    likely = [
        min(findings, key=lambda f: (_LEVELS.index(f.level), -f.factor)) for findings in found.values()
        if findings[0].of_run or 2 * len(findings) > len(diagnoses)
    ]  # fmt: skip
    kinds = [judge.__name__ for judge in (*CAUSES, *FALLBACKS)]
    return min(likely, key=lambda f: (_LEVELS.index(f.level), kinds.index(f.kind)), default=None)
