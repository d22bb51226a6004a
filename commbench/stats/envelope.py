"""The time of a collective against its size, as the lower envelope of at most three lines.

A library has a few ways to carry a message, and each costs an intercept and a slope: NCCL's LL, LL128 and Simple
protocols, MPI's eager and rendezvous. If it always took the fastest, the time would be the least of a few lines,
which is a concave curve. A switch at the wrong size makes measured times jump up, and no envelope follows that: it is
left as misfit, and shows in the errors. A time at 8 B counts as much as one at 8 GiB, so what is minimised is the sum
of |log(predicted / measured)|; not of its square, so that one odd time does not bend the curve.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from commbench.stats.summary import FloatArray

MOST_LINES = 3
LEAST_SIZES = 2  # to a line where the search starts
START_SIZES = 32  # sizes that the search for a start looks at, of however many were measured
STARTS = 24  # that are refined
START_ROUNDS = 8
ROUNDS = 24
STEPS = np.array([1.0, 0.5, 0.25, 0.1])
TIE = 1e-9  # relative; rounding shall not choose between equally good fits
# Where the number of lines is chosen, in |log(predicted / measured)|:
CLOSE = 1e-3  # no time is known better than to 0.1 %, so a mean error below that does not argue for one more line
FAR = math.log(2)  # and an error above that counts no more, or one odd time would drown what a line gains

Numbers = Sequence[float] | npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One regime: ``intercept_s`` seconds, plus ``seconds_per_byte`` for each byte of the message."""

    intercept_s: float
    seconds_per_byte: float

    def at(self, sizes: FloatArray) -> FloatArray:
        """Seconds for each of ``sizes`` in bytes."""
        return self.intercept_s + self.seconds_per_byte * sizes

    def until(self, after: Line) -> float:
        """The size in bytes from which ``after``, which starts higher and rises less, is the lower of the two."""
        return (after.intercept_s - self.intercept_s) / (self.seconds_per_byte - after.seconds_per_byte)


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """The least of ``lines``, which come in the order in which they are lowest as the size grows.

    ``median_error`` and ``p90_error``: the median and the 90th percentile of |predicted / measured - 1| over the
    points that were fitted; other sizes are predicted somewhat worse. Raises ValueError for lines that are not in
    order, for one that is lowest nowhere, and for constants that are negative or not finite.
    """

    lines: tuple[Line, ...]
    median_error: float
    p90_error: float

    def __post_init__(self) -> None:
        constants = [value for line in self.lines for value in (line.intercept_s, line.seconds_per_byte)]
        if not constants or not all(math.isfinite(value) and value >= 0 for value in constants):
            raise ValueError("an envelope needs lines whose constants are finite and not negative")
        for line, after in zip(self.lines, self.lines[1:], strict=False):
            if not (line.intercept_s < after.intercept_s and line.seconds_per_byte > after.seconds_per_byte):
                raise ValueError("each line of an envelope must start higher and rise less than the one before it")
        if any(a >= b for a, b in zip(self.switches, self.switches[1:], strict=False)):
            raise ValueError("a line of an envelope is lowest at no size")

    @property
    def switches(self) -> tuple[float, ...]:
        """The sizes in bytes at which the lowest line changes, one fewer than there are lines."""
        return tuple(line.until(after) for line, after in zip(self.lines, self.lines[1:], strict=False))

    def predict(self, sizes: float | Numbers) -> FloatArray:
        """Seconds for each of ``sizes`` (bytes), in their shape. Raises ValueError for a size below 0 or NaN."""
        at = np.asarray(sizes, dtype=np.float64)
        if not (at >= 0).all():
            raise ValueError("a message size is negative or not a number")
        seconds: FloatArray = np.min([line.at(at) for line in self.lines], axis=0)
        return seconds

    def regime(self, size: float) -> int:
        """The index of the line that is lowest at ``size`` bytes; at a switch, the one that begins there."""
        return bisect_right(self.switches, size)


def fit_alpha_beta(sizes: Numbers, seconds: Numbers) -> Envelope:
    """One line, seconds = alpha + beta * bytes with neither below 0, of the least sum of |log(predicted / measured)|.

    ``sizes`` in bytes and ``seconds`` are of one length, in any order; a size may recur. Raises ValueError for fewer
    than two points or two different sizes, and for a size or time that is not positive and finite.
    """
    return fit_envelope(sizes, seconds, most_lines=1)


def fit_envelope(sizes: Numbers, seconds: Numbers, most_lines: int = MOST_LINES) -> Envelope:
    """The lower envelope of 1 to ``most_lines`` (at most 3) lines, constants not negative, of the least sum of errors.

    Errors are |log(predicted / measured)|. All ways to cut the sizes into stretches give the lines to start from; the
    best starts are refitted to the points at which each line is lowest until that no longer helps. A further line
    must pay for itself (``_cost``); two lines need six sizes at least, three eight. Takes and raises what
    ``fit_alpha_beta`` does, and ValueError for another ``most_lines``. The same points give the same answer in any
    order.
    """
    if not 1 <= most_lines <= MOST_LINES:
        raise ValueError(f"an envelope has 1 to {MOST_LINES} lines, not {most_lines}")
    size, time = _points(sizes, seconds)
    unit = np.array([time.max(), time.max() / size[-1]])
    lines = _in_order(_search(size / size[-1], time / time.max(), most_lines) * unit)
    error = np.abs(np.min([line.at(size) for line in lines], axis=0) / time - 1)
    return Envelope(lines=lines, median_error=float(np.median(error)), p90_error=float(np.percentile(error, 90)))


def _search(x: FloatArray, t: FloatArray, most_lines: int) -> FloatArray:
    """The best lines (lines, 2), intercept and slope, for sizes and times that are both at most 1."""
    fits: list[FloatArray] = []
    for starts in _starts(x, t, most_lines):
        if fits:  # the best with fewer lines is a start too: more lines never fit worse
            fewer = fits[-1]
            repeated = np.repeat(fewer[-1:], starts.shape[1] - len(fewer), axis=0)
            starts = np.concatenate([np.concatenate([fewer, repeated])[None], starts])
        fits.append(_lowest_somewhere(_refine(starts, x, t), x))
    distinct = len(np.unique(x))
    errors = [np.minimum(_errors(lines, x, t), FAR).mean() for lines in fits]
    costs = [_cost(float(error), len(lines), distinct) for error, lines in zip(errors, fits, strict=True)]
    return fits[costs.index(min(costs))]


def _points(sizes: Numbers, seconds: Numbers) -> tuple[FloatArray, FloatArray]:
    """Sorted by size, then by time."""
    size, time = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if size.ndim != 1 or size.shape != time.shape:
        raise ValueError(
            f"sizes and times must be two lists of one length, not of shapes {size.shape} and {time.shape}"
        )
    if len(size) < 2:
        raise ValueError(f"a line needs at least two points, not {len(size)}")
    for name, values in (("size", size), ("time", time)):
        if not (np.isfinite(values) & (values > 0)).all():
            raise ValueError(f"a {name} is not a positive, finite number")
    if size.min() == size.max():
        raise ValueError("a line needs two different sizes")
    order = np.lexsort((time, size))
    return size[order], time[order]


def _cost(error: float, lines: int, sizes: int) -> float:
    """What the choice among fits with more and fewer lines minimises: -log likelihood, and a price for constants.

    For errors of density exp(-|e| / b) / 2b the first part is sizes * log(b), with b the mean ``error``. The price is
    the greater of that of AICc (Hurvich and Tsai, Biometrika 76(2), 1989), which rules out more constants than the
    sizes can tell, and twice that of BIC: where the regimes lie is chosen too, and BIC's own price let noise add a
    line to one in six of 30-point lines. To count b as a constant, as AICc does, hid a quarter of the second lines of
    eight-size curves (simulated, 3 % noise).
    """
    constants = 2 * lines
    if sizes <= constants + 1:
        return math.inf
    price = max(sizes / (sizes - constants - 1), math.log(sizes))
    return sizes * math.log(max(error, CLOSE)) + constants * price


def _starts(x: FloatArray, t: FloatArray, most_lines: int) -> list[FloatArray]:
    """For 1, 2, … lines, the most promising of them to start from: shape (starts, lines, 2), intercept and slope.

    Each way to cut the sizes into as many stretches gives one, the stretches' own best lines; for one line, every
    stretch gives one. Ends early where there are too few sizes.
    """
    x, t = _thinned(x, t)
    first, end = np.triu_indices(len(x) + 1, LEAST_SIZES)
    place = np.arange(len(x))
    fitted = _fit_stretches(x, t, (first[:, None] <= place) & (place < end[:, None]))
    row = np.zeros((len(x) + 1, len(x) + 1), dtype=np.intp)
    row[first, end] = np.arange(len(first))
    found = []
    for count in range(1, min(most_lines, len(x) // LEAST_SIZES) + 1):
        inner = combinations(range(LEAST_SIZES, len(x) - LEAST_SIZES + 1), count - 1)
        edges = np.array([(0, *cuts, len(x)) for cuts in inner])
        edges = edges[(np.diff(edges, axis=1) >= LEAST_SIZES).all(axis=1)]
        lines = fitted[row[edges[:, :-1], edges[:, 1:]]] if count > 1 else fitted[:, None]
        best = np.argsort(_errors(lines, x, t).sum(axis=-1).round(9), kind="stable")[:STARTS]
        found.append(lines[best])
    return found


def _thinned(x: FloatArray, t: FloatArray) -> tuple[FloatArray, FloatArray]:
    """At most ``START_SIZES`` of the sizes, evenly by rank, each with its median time."""
    sizes, begin = np.unique(x, return_index=True)
    kept = np.unique(np.linspace(0, len(sizes) - 1, min(len(sizes), START_SIZES)).round().astype(int))
    parts = np.split(t, begin[1:])
    return sizes[kept], np.array([np.median(parts[index]) for index in kept])


def _fit_stretches(x: FloatArray, t: FloatArray, inside: npt.NDArray[np.bool_]) -> FloatArray:
    """One line for each row of ``inside`` (stretches, points), to the points that it marks: shape (stretches, 2)."""
    lines = _solve(inside / t, np.ones(inside.shape), t, x)
    for weight_limit in _limits(START_ROUNDS):
        lines = _improved(lines, x, t, inside, weight_limit)
    return lines


def _refine(starts: FloatArray, x: FloatArray, t: FloatArray) -> FloatArray:
    """The lines (lines, 2) of the least sum of errors that is reached from any start.

    Each round fits every line to the points where it is the lowest, and goes as far that way as helps most. It need
    not help at all: the best seen is kept.
    """
    current, best, total = starts, starts, _errors(starts, x, t).sum(axis=-1)
    each = np.arange(len(starts))
    for weight_limit in _limits(ROUNDS):
        times = current[..., :1] + current[..., 1:] * x
        lowest = times.argmin(axis=1)[:, None, :] == np.arange(starts.shape[1])[:, None]
        aim = np.where(lowest.any(axis=-1, keepdims=True), _improved(current, x, t, lowest, weight_limit), current)
        tried = current + (aim - current) * STEPS[:, None, None, None]
        totals = _errors(tried, x, t).sum(axis=-1)
        step = _first_least(totals)
        current, reached = tried[step, each], totals[step, each]
        better = reached < total * (1 - TIE)
        best = np.where(better[:, None, None], current, best)
        total = np.where(better, reached, total)
    chosen: FloatArray = best[_first_least(total)]
    return chosen


def _first_least(totals: FloatArray) -> npt.NDArray[np.intp]:
    """Along the first axis, the first index whose total is the least but for rounding."""
    first: npt.NDArray[np.intp] = (totals <= totals.min(axis=0) * (1 + TIE)).argmax(axis=0)
    return first


def _limits(rounds: int) -> FloatArray:
    """The errors below which weights stop growing, round by round: falling, so that early rounds are not stuck."""
    return np.geomspace(1e-2, 1e-8, rounds)


def _improved(
    lines: FloatArray, x: FloatArray, t: FloatArray, inside: npt.NDArray[np.bool_], limit: float
) -> FloatArray:
    """One round of least squares, reweighted so that its minimum is that of the sum of |log(line / t)|.

    ``lines`` (…, 2) and ``inside`` (…, points). The logarithm is taken as linear around the lines given; steps of
    more than a factor of two or so are held back.
    """
    times = lines[..., :1] + lines[..., 1:] * x
    error = np.log(times / t)
    return _solve(inside / np.maximum(np.abs(error), limit), 1 - np.clip(error, -1.0, 0.5), times, x)


def _solve(weight: FloatArray, aim: FloatArray, scale: FloatArray, x: FloatArray) -> FloatArray:
    """The a and b, neither below 0, of the least sum of weight * ((a + b x) / scale - aim)**2, aim > 0: (…, 2)."""
    pull = weight / scale
    square = pull / scale
    s0, s1, s2 = square.sum(axis=-1), (square * x).sum(axis=-1), (square * x * x).sum(axis=-1)
    c0, c1 = (pull * aim).sum(axis=-1), (pull * aim * x).sum(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):  # no points, or all of one size
        determinant = s0 * s2 - s1 * s1
        a, b = (c0 * s2 - c1 * s1) / determinant, (c1 * s0 - c0 * s1) / determinant
        flat = (determinant <= 1e-13 * s0 * s2) | (b < 0)
        through_zero = ~flat & (a < 0)
        a, b = np.where(flat, c0 / s0, a), np.where(flat, 0.0, b)
        return np.stack([np.where(through_zero, 0.0, a), np.where(through_zero, c1 / s2, b)], axis=-1)


def _errors(lines: FloatArray, x: FloatArray, t: FloatArray) -> FloatArray:
    """|log(predicted / measured)| of the envelope of ``lines`` (…, lines, 2): shape (…, points)."""
    errors: FloatArray = np.abs(np.log((lines[..., :1] + lines[..., 1:] * x).min(axis=-2) / t))
    return errors


def _lowest_somewhere(lines: FloatArray, x: FloatArray) -> FloatArray:
    """Those of ``lines`` that are the lowest at one of ``x`` at least."""
    used: FloatArray = lines[np.unique((lines[:, :1] + lines[:, 1:] * x).argmin(axis=0))]
    return used


def _in_order(lines: FloatArray) -> tuple[Line, ...]:
    """The lower hull of ``lines`` (lines, 2): lines that differ by rounding alone become one."""
    kept: list[Line] = []
    for a, b in sorted(lines.tolist()):
        line = Line(intercept_s=a, seconds_per_byte=b)
        if kept and b >= kept[-1].seconds_per_byte:
            continue
        if kept and a == kept[-1].intercept_s:
            kept.pop()
        while len(kept) > 1 and kept[-2].until(kept[-1]) >= kept[-1].until(line):
            kept.pop()
        kept.append(line)
    return tuple(kept)
