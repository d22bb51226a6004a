"""Straight lines that take one clock's readings to another's, fitted to offsets that exchanged messages have bounded.

Pure. Clocks are read in ns as 64-bit integers and may be days apart: floating point carries differences only, from a
reading nearby. The method is HCA3's with SKaMPI's offsets, as in Hunold & Carpen-Amarie's ReproMPI (hunsa/reprompi,
``clock_sync_old/sync_methods/HCA3ClockSync.cpp`` and ``offset/``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Times = NDArray[np.int64]

FAST = 1.1  # exchanges that take at most this much longer than the quickest tell the offset; ReproMPI's factor
SURE = 3.0  # standard deviations that an error is stated as
BESIDE_NS = 100_000_000  # offsets that near to one another are of one measurement


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockModel:
    """``target = local - (offset_ns + slope * (local - reference_ns))``, both ways exact to a nanosecond."""

    reference_ns: int
    offset_ns: int
    slope: float

    def to_target(self, local_ns: ArrayLike) -> Times:
        local = np.asarray(local_ns, dtype=np.int64)
        drifted = np.rint(self.slope * (local - self.reference_ns)).astype(np.int64)
        return np.asarray(local - self.offset_ns - drifted)

    def to_local(self, target_ns: ArrayLike) -> Times:
        """The inverse."""
        since = np.asarray(target_ns, dtype=np.int64) - (self.reference_ns - self.offset_ns)
        drifted = np.rint(self.slope / (1 - self.slope) * since).astype(np.int64)
        return np.asarray(self.reference_ns + since + drifted)

    def then(self, parent: ClockModel) -> ClockModel:
        """From this clock to its parent's and from there to the parent's target.

        The same line comes out of a fit against the parent's target itself: slope = s1 + s2 - s1 s2, and with both
        references at zero intercept = i1 + i2 - i2 s1, where 1 is the parent and 2 the child.
        """
        there = int(self.to_target(self.reference_ns))
        return ClockModel(
            reference_ns=self.reference_ns,
            offset_ns=self.reference_ns - int(parent.to_target(there)),
            slope=parent.slope + self.slope - parent.slope * self.slope,
        )


SAME = ClockModel(reference_ns=0, offset_ns=0, slope=0.0)


class Exchanges(NamedTuple):
    """Messages there and back, in order: the child's clock when it sent, the parent's when it answered, the child's when
    the answer was there. Exchanges with the same ``group`` make one offset; groups are numbered upwards."""

    sent: Times
    answered: Times
    received: Times
    group: Times


class Offsets(NamedTuple):
    """Of the child's clock against the parent's, each with the child's time and the round trip that bounded it."""

    at: Times
    offset: Times
    round_trip: Times

    def last(self, since_ns: int, most: int) -> Offsets:
        """Those not older than ``since_ns``, and no more than ``most``."""
        first = max(int(np.searchsorted(self.at, since_ns)), len(self.at) - most)
        return Offsets(*(values[first:] for values in self))

    def followed_by(self, other: Offsets) -> Offsets:
        return Offsets(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))


NONE = Offsets(*(np.empty(0, dtype=np.int64) for _ in range(3)))


def offsets(found: Exchanges, slope: float = 0.0) -> Offsets:
    """One offset a group, in the middle of what its fastest exchanges leave possible.

    The parent read its clock between the child's two readings, so child - parent lies between ``sent - answered`` and
    ``received - answered``. ``slope``: the drift, by which exchanges of one group are brought to the same moment.
    """
    round_trip = found.received - found.sent
    rows = []
    for group in np.unique(found.group):
        inside = np.flatnonzero(found.group == group)
        best = inside[np.argmin(round_trip[inside])]
        fast = inside[round_trip[inside] <= FAST * round_trip[best]]
        at = found.sent[best] + round_trip[best] // 2
        drifted = slope * (found.sent[fast] + round_trip[fast] // 2 - at)
        base = found.sent[best] - found.answered[best]
        least = (found.sent[fast] - found.answered[fast] - base - drifted).max()
        most = (found.received[fast] - found.answered[fast] - base - drifted).min()
        rows.append((at, base + round((least + most) / 2), round_trip[best]))
    return Offsets(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A model, and how sure it is: ``error_s`` at its reference, ``drift_error`` more a second away from there.
    ``noise_s``: standard deviation of fast offsets about the line; ``round_trip_s``: the shortest."""

    model: ClockModel
    error_s: float
    drift_error: float
    noise_s: float
    round_trip_s: float

    def error_at(self, local_ns: int) -> float:
        return self.error_s + self.drift_error * abs(local_ns - self.model.reference_ns) * 1e-9

    def contradicts(self, found: Offsets) -> bool:
        """Whether the quickest of these offsets is further from the line than both can be wrong."""
        best = int(np.argmin(found.round_trip))
        at = int(found.at[best])
        off_s = abs(int(self.model.to_target(at)) - (at - int(found.offset[best]))) * 1e-9
        slow_s = max(0.0, float(found.round_trip[best]) * 1e-9 - self.round_trip_s) / 2
        return off_s > self.error_at(at) + SURE * self.noise_s + slow_s


def fit(found: Offsets) -> Fit:
    """The least-squares line through the offsets, each weighted by what it may be wrong by, moved to the newest that are
    right. Needs three offsets at two times.

    What a round trip is longer than the shortest may be a delay on one way alone, and moves its offset by half of that.
    The line's error is three standard deviations; what round trips that count as fast may hide; and, where the newest were
    all slow, half of what they are too long, or what the drift can have made of older ones. A difference of the two ways
    that is always there shows in no exchange; it moves the line by at most half of the shortest round trip.
    """
    shortest = max(1.0, float(found.round_trip.min()))
    unseen = (FAST - 1) * shortest / 2
    at, offset = found.at - found.at[-1], found.offset - found.offset[-1]
    x, y = at.astype(float), offset.astype(float)
    weights = (unseen / (unseen + (found.round_trip - shortest) / 2)) ** 2
    total = float(weights.sum())
    x0, y0 = float((weights * x).sum()) / total, float((weights * y).sum()) / total
    spread = float((weights * (x - x0) ** 2).sum())
    slope = float((weights * (x - x0) * (y - y0)).sum()) / spread
    residuals = y - y0 - slope * (x - x0)
    count = total**2 / float((weights**2).sum())  # as many as if all had the same weight
    noise = float(np.sqrt((weights * residuals**2).sum() / max(1.0, count - 2)))
    # What all offsets may be off by unseen, those at one end alone may be too.
    drift_error = SURE * noise / float(np.sqrt(spread)) + unseen / float(np.sqrt(12 * spread / total))
    slow = np.maximum(found.round_trip - FAST * shortest, 0)
    best = len(at) - 1 - int(np.argmin((slow / 2 - drift_error * at)[::-1]))
    beside = np.flatnonzero((at > at[best] - BESIDE_NS) & (slow <= slow[best]))
    moved = float((offset[beside] - slope * (at[beside] - at[best])).mean())
    error = min(SURE * noise + unseen + float(slow[best]) / 2, float(found.round_trip[best]) / 2)
    return Fit(
        model=ClockModel(
            reference_ns=int(found.at[best]), offset_ns=int(found.offset[-1]) + round(moved), slope=slope
        ),
        error_s=error * 1e-9, drift_error=drift_error, noise_s=noise * 1e-9, round_trip_s=shortest * 1e-9,
    )  # fmt: skip


def tree(count: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Rounds of (parent, child), ceil(log2 count) of them: in each, whoever has a model already teaches one that has
    none. 0 is the root."""
    rounds = []
    taught = 1
    while taught < count:
        rounds.append(tuple((parent, parent + taught) for parent in range(min(taught, count - taught))))
        taught *= 2
    return tuple(rounds)
