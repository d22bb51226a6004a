"""What a point of a dispatch or combine says beside what every point does."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from commbench.cases import Case, Layout
from commbench.measure.loop import Measured
from commbench.moe.account import Account
from commbench.moe.conventions import default_convention
from commbench.moe.straggler import find_straggler
from commbench.records import STATUS_WRONG, Point

TOTAL = "total"


def set_columns(
    point: Point, case: Case, found: Measured, account: Account, layout: Layout, phase_names: tuple[str, ...]
) -> None:
    """Bytes, load, phases and who was last. Wrong data leave a point without bandwidths."""
    workload = case.workload
    assert workload is not None
    point.convention_bytes, point.load = account.bytes, account.load
    point.bytes_convention = default_convention(workload.mode, case.backend, case.nodes)
    if point.wire_bytes is not None and case.algorithm != "library":
        point.schedule_bytes = account.between_hosts(layout.host_of)
    if case.timing == "isolated":
        point.phases = phases(found, phase_names)
        _set_ranks(point, found, account, layout, workload.fixed)
    if point.time_s and point.status != STATUS_WRONG:
        point.algbw_Bps = account.bytes[point.bytes_convention] / point.time_s
        point.busbw_Bps = account.busiest_bytes / point.time_s


def phases(found: Measured, names: tuple[str, ...]) -> dict[str, float]:
    """Seconds of each on the rank that was done last, and in ``total`` how long it was inside: means over those iterations
    whose times are the middle half, so that the phases add up to the total but for what taking stamps takes."""
    if found.phases is None or found.phases.shape[:2] != found.stamps.shape[:2]:
        return {}
    last, at = found.iterations.last_rank, np.arange(found.stamps.shape[1])
    parts = found.phases[last, at]  # [iterations, phases]
    middle = _middle(found.iterations.time, found.kept & (parts >= 0).all(axis=1))
    if not middle.any():
        return {}
    inside = (found.stamps[last, at, 1] - found.stamps[last, at, 0])[middle]
    means = parts[middle].mean(axis=0) * 1e-9
    return {**dict(zip(names, means.tolist(), strict=True)), TOTAL: float(inside.mean()) * 1e-9}


def _middle(times: NDArray[np.float64], usable: NDArray[np.bool_]) -> NDArray[np.bool_]:
    if not usable.any():
        return usable
    low, high = np.quantile(times[usable], (0.25, 0.75), method="nearest")
    found: NDArray[np.bool_] = usable & (times >= low) & (times <= high)
    return found


def rank_times(found: Measured) -> NDArray[np.float64]:
    """[ranks, iterations] seconds to each rank's end, from the first start of all; from its own start where the ranks' clocks
    cannot be compared."""
    begins, ends = found.stamps[:, :, 0], found.stamps[:, :, 1]
    started = begins.min(axis=0) if found.start == "clock" else begins
    seconds: NDArray[np.float64] = (ends - started) * 1e-9
    return seconds


def _set_ranks(point: Point, found: Measured, account: Account, layout: Layout, fixed: bool) -> None:
    kept = np.flatnonzero(found.kept)
    times = rank_times(found)[:, kept]
    point.rank_times = np.median(times, axis=1).tolist()
    places = {int(number): place for place, number in enumerate(found.numbers[kept])}
    pairs = [(places[number], index) for index, number in enumerate(account.numbers) if number in places]
    if fixed:
        pairs = [(place, 0) for place in range(len(kept))]  # one load is every iteration's
    if not pairs:
        return
    at, looked = map(list, zip(*pairs, strict=True))
    last = found.iterations.last_rank[kept]
    point.straggler = find_straggler(times[:, at].T, account.handled[looked], last)
    point.straggler["host"] = layout.hosts[point.straggler["rank"]]
