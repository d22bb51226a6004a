"""From what was measured of a case to the point that is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from commbench.cases import Case, Layout, group_members
from commbench.measure.loop import Measured
from commbench.models import Links, nearest, predict, predict_schedule
from commbench.records import STATUS_OK, STATUS_SKIPPED, STATUS_WRONG, Point
from commbench.schedules import Schedule, leaving

Model = Callable[[tuple[int, ...]], tuple[Schedule, tuple[int, ...]]]
"""For a group, given as the host of each rank: the schedule it carries out, and the host of each of its ranks."""


class Used(Protocol):
    """What a library says that it took for an operation; None: it does not say."""

    @property
    def algorithm(self) -> str | None: ...

    @property
    def protocol(self) -> str | None: ...

    @property
    def channels(self) -> int | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all points of one backend in one launch share."""

    run_id: str
    launch: int
    label: str
    seed: int
    layout: Layout
    backend_settings: dict[str, str]
    links: Links | None
    oversubscribed: bool
    variant: str = ""
    tainted: str | None = None


def skipped(case: Case, reason: str, setting: Setting, started_utc: str) -> Point:
    """The point of a case that cannot be run here."""
    return Point(**_identity(case, setting, started_utc), status=STATUS_SKIPPED, reason=reason)


def measured_point(
    case: Case, found: Measured, setting: Setting, *, started_utc: str, note: str | None, steal_s: float | None,
    pass_index: int, nccl_estimate_s: float | None, model: Model | None, used: Used | None = None,
    preemptions: int | None = None,
) -> Point:  # fmt: skip
    """The point of a case that was run. Wrong data leaves it without a bandwidth and without models.

    ``model``: what it was carried out by, where that is known; ``used``: what the library says that it used.
    """
    summary, wrong = found.summary, found.wrong
    point = Point(**_identity(case, setting, started_utc), status=STATUS_WRONG if wrong else STATUS_OK)
    kept = found.kept
    point.wrong, point.verified = wrong, found.verified
    point.samples, point.discarded, point.stop = summary.count, int((~kept).sum()), found.stop
    point.batch = found.batch
    point.time_s, point.time_lo_s, point.time_hi_s = summary.median, summary.lo, summary.hi
    point.interval_of, point.interval_level = summary.interval_of, summary.level
    point.time_min_s, point.time_max_s, point.time_mean_s = summary.min, summary.max, summary.mean
    point.time_p05_s, point.time_p25_s = summary.p05, summary.p25
    point.time_p75_s, point.time_p95_s, point.time_p99_s = summary.p75, summary.p95, summary.p99
    iterations = found.iterations
    slowest = Counter(iterations.last_rank[kept].tolist()).most_common(1)[0][0]
    point.slowest_rank, point.slowest_host = slowest, setting.layout.hosts[slowest]
    point.group_index = Counter(iterations.group[kept].tolist()).most_common(1)[0][0]
    if case.timing == "isolated" and found.start == "clock":
        point.skew_s = float(np.median(iterations.skew[kept]))
        point.time_first_s = float(np.median(iterations.first[kept]))
        point.late_starts = found.late_starts
    if case.timing == "isolated" and found.start == "stream":
        point.time_shortest_s = float(np.median(iterations.shortest[kept]))
    point.host_s = found.overhead_s if found.host_s is None else found.host_s
    point.host_bound = _host_bound(found, summary.median)
    point.wire_bytes = found.wire_bytes
    if used is not None:
        point.used_algorithm, point.protocol, point.channels = used.algorithm, used.protocol, used.channels
    point.start, point.note, point.steal_s, point.pass_index = found.start, note, steal_s, pass_index
    point.preemptions, point.clock_error_s = preemptions, found.clock_error_s
    # What a routed case moved and should take depends on where its tokens went, which is not known here.
    if not wrong and not case.spec.routed:
        _set_bandwidth(point, case)
        _set_models(point, case, setting, model)
        point.nccl_estimate_s = nccl_estimate_s
    return point


# From here on the number tells of the host more than of the library: what a loop adds to an operation, and the share of
# the operations for which the device had to wait for its host in the timed window.
LOOP_SHARE = 0.05
STARVED_SHARE = 0.1


def _host_bound(found: Measured, time_s: float) -> bool | None:
    if found.starved is not None:
        return found.starved > STARVED_SHARE
    if found.overhead_s is None or not time_s:
        return None
    return found.overhead_s > LOOP_SHARE * time_s


def _identity(case: Case, setting: Setting, started_utc: str) -> dict[str, Any]:
    return {
        "run_id": setting.run_id, "launch": setting.launch, "started_utc": started_utc, "label": setting.label,
        "collective": case.collective, "backend": case.backend, "algorithm": case.algorithm, "group": case.group,
        "ranks": case.ranks, "nodes": case.nodes, "ranks_per_node": case.ranks / case.nodes, "dtype": case.dtype,
        "reduce_op": case.reduce_op, "placement": case.placement, "bytes": case.bytes,
        "requested_bytes": case.requested_bytes, "timing": case.timing, "execution": case.execution,
        "cache": case.cache, "buffers": case.buffers, "case_id": case.case_id, "seed": setting.seed, "root": case.root,
        "world": setting.layout.world, "backend_settings": setting.backend_settings,
        "calibration_id": setting.links.calibration_id if setting.links else None,
        "oversubscribed": setting.oversubscribed, "variant": setting.variant, "tainted": setting.tainted,
        **_workload(case),
    }  # fmt: skip


def _workload(case: Case) -> dict[str, Any]:
    """What a routed collective was asked to send."""
    if case.workload is None:
        return {}
    asked = case.workload.to_dict()
    names = ("tokens", "hidden", "experts", "topk", "mode", "routing", "experts_on")
    return {**{name: asked[name] for name in names}, "workload": asked}


def _set_bandwidth(point: Point, case: Case) -> None:
    if case.bytes and point.time_s:
        point.algbw_Bps = case.bytes / point.time_s
        point.busbw_Bps = point.algbw_Bps * case.spec.bus_factor(case.ranks)


def _set_models(point: Point, case: Case, setting: Setting, model: Model | None) -> None:
    if setting.links is None or not point.time_s:
        return
    group = group_members(case.group, setting.layout)[point.group_index or 0]
    hosts = hosts_of(group, setting.layout)
    found = predict(
        case.collective, case.bytes, hosts, setting.links, timing=case.timing, root=case.root, itemsize=case.itemsize
    )
    # A bound of zero (streamed, without data) bounds nothing.
    point.ring_s, point.tree_s, point.bound_s = found.ring_s, found.tree_s, found.bound_s or None
    point.predictions = dict(found.times)
    factor = case.bytes * case.spec.bus_factor(case.ranks)
    point.ring_busbw_Bps = factor / found.ring_s if found.ring_s and factor else None
    point.tree_busbw_Bps = factor / found.tree_s if found.tree_s and factor else None
    if found.bound_s:
        point.efficiency = found.bound_s / point.time_s
        point.beyond_bound = point.time_s < found.bound_s
    point.nearest_model, point.nearest_error = nearest(found.times, point.time_s)
    if model is not None:
        _set_known_model(point, case, setting.layout, setting.links, model, hosts)


def _set_known_model(
    point: Point, case: Case, layout: Layout, links: Links, model: Model, hosts: tuple[int, ...]
) -> None:
    """What is known of an operation when it is known how it was carried out; ``hosts`` are of the group that counts."""
    if point.wire_bytes is not None:
        everyone = [model(hosts_of(group, layout)) for group in group_members(case.group, layout)]
        point.schedule_bytes = case.bytes * float(
            sum(sum(leaving(schedule, players).values()) for schedule, players in everyone)
        )
    schedule, players = model(hosts)
    point.predicted_s = predict_schedule(schedule, case.bytes, players, links, case.timing)
    if point.predicted_s and point.time_s:
        point.prediction_error = point.time_s / point.predicted_s - 1


def hosts_of(group: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """The number of the host of each of these ranks."""
    host_of = layout.host_of
    return tuple(host_of[rank] for rank in group)
