"""From every rank's stamps to one time an iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Iterations:
    """Per iteration, in seconds: ``time`` (last end - last start), ``first`` (last end - first start) and ``skew``
    (their difference); the world rank that ended last; the index of the slowest group; and ``shortest``, the shortest time
    that one of its ranks was inside."""

    time: Floats
    first: Floats
    skew: Floats
    last_rank: NDArray[np.int64]
    group: NDArray[np.int64]
    shortest: Floats


def combine(stamps: NDArray[np.int64], groups: tuple[tuple[int, ...], ...], *, common_clock: bool) -> Iterations:
    """``stamps[rank, iteration]`` = (start, end) in ns. All groups run at once; the slowest one counts.

    Without a common clock only durations can be compared: the longest counts and skew is unknown (0).
    """
    per_group = [_of_group(stamps[list(members)], common_clock) for members in groups]
    times = np.stack([times for times, _, _ in per_group])
    slowest = np.argmax(times, axis=0)
    columns = np.arange(times.shape[1])
    skew = np.stack([skew for _, skew, _ in per_group])[slowest, columns]
    last = np.stack([np.asarray(groups[g])[last] for g, (_, _, last) in enumerate(per_group)])[slowest, columns]
    time = times[slowest, columns]
    inside = np.stack([(stamps[list(m), :, 1] - stamps[list(m), :, 0]).min(axis=0) for m in groups])
    shortest = inside[slowest, columns] * 1e-9
    return Iterations(time=time, first=time + skew, skew=skew, last_rank=last, group=slowest, shortest=shortest)


def joined(parts: list[Iterations]) -> Iterations:
    """Consecutive iterations as one."""

    def all_of(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(part, name) for part in parts])

    return Iterations(
        time=all_of("time"), first=all_of("first"), skew=all_of("skew"), last_rank=all_of("last_rank"),
        group=all_of("group"), shortest=all_of("shortest"),
    )  # fmt: skip


def _of_group(stamps: NDArray[np.int64], common_clock: bool) -> tuple[Floats, Floats, NDArray[np.int64]]:
    starts, ends = stamps[:, :, 0], stamps[:, :, 1]
    if not common_clock:
        durations = ends - starts
        return durations.max(axis=0) * 1e-9, np.zeros(stamps.shape[1]), np.argmax(durations, axis=0)
    last_start = starts.max(axis=0)
    time = (ends.max(axis=0) - last_start) * 1e-9
    return time, (last_start - starts.min(axis=0)) * 1e-9, np.argmax(ends, axis=0)


def well_started(found: Iterations, clock_error_s: float) -> tuple[NDArray[np.bool_], bool]:
    """Which iterations to keep, and whether starts were late.

    An iteration is dropped when its skew exceeds the clock error and a tenth of its time; but at least half are
    kept, those with the least skew, and then the point must say ``late_starts``.
    """
    keep = found.skew <= np.maximum(clock_error_s, 0.1 * found.time)
    need = (len(keep) + 1) // 2
    if keep.sum() >= need:
        return keep, False
    keep = np.zeros(len(keep), dtype=bool)
    keep[np.argsort(found.skew, kind="stable")[:need]] = True
    return keep, True
