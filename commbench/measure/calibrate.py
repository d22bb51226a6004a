"""Measures the links of the job before the sweep, with messages only: no figure of a collective enters.

Half ping-pong gives the time of a message by size, a one-way stream the best rate, an exchange what both directions
at once cost, a shift (every rank to the next, all at once) what the ranks of a host cost each other, and an addition
the rate of a local reduction.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from commbench.cases import Layout
from commbench.measure.control import Control
from commbench.measure.operation import PointToPoint
from commbench.models.links import Link, Links

SIZES = (8, 1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)
STEP_S = 0.06
WINDOWS = 4
LARGE = 1 << 20
STREAM_SIZE = 1 << 22
SMALL = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bench:
    """Timed exchanges between chosen ranks; every rank calls every method in step."""

    control: Control
    make: Callable[[int], PointToPoint]
    deadline_s: float

    def time(self, act: Callable[[], None] | None, doing: str) -> list[float]:
        """Seconds a call takes on each rank that acts (0 elsewhere): the least of the medians of WINDOWS windows, which
        together take about STEP_S. A link is no faster than it is, but a busy machine makes it look slower."""
        self.control.expect(self.deadline_s, f"calibrating: {doing}")
        best = self._median(act, 1)
        # On a slow link one call takes longer than all that is meant to be spent here, and says enough. On a fast one
        # the first call made connections and registered buffers: the second tells how many fit.
        if self.control.agree(best, max) <= STEP_S:
            calls = self.control.agree(self._median(act, 1), lambda all_: _calls(max(*all_, 1e-7)))
            best = min(self._median(act, calls) for _ in range(WINDOWS))
        gathered = self.control.gather(best)
        return [value for value, _ in gathered] if gathered else []

    @staticmethod
    def _median(act: Callable[[], None] | None, calls: int) -> float:
        if act is None:
            return 0.0
        times = np.empty(calls)
        for index in range(calls):
            start = time.perf_counter()
            act()
            times[index] = time.perf_counter() - start
        return float(np.median(times))

    def message(self, pair: tuple[int, int], size: int) -> float:
        """Half a ping-pong between the two ranks."""
        return max(self.time(self._ping(pair, size), f"messages of {size} B"), default=0.0) / 2

    def _ping(self, pair: tuple[int, int], size: int) -> Callable[[], None] | None:
        if self.control.rank not in pair:
            return None
        channel = self.make(size)
        first, second = pair

        def ping() -> None:
            channel.send(second)
            channel.recv(second)

        def pong() -> None:
            channel.recv(first)
            channel.send(first)

        return ping if self.control.rank == first else pong

    def stream(self, pair: tuple[int, int], size: int, messages: int) -> float:
        """Seconds a byte one way: ``messages`` in a row, then one small answer."""
        act = None
        if self.control.rank in pair:
            data, answer = self.make(size), self.make(SMALL)
            first, second = pair

            def send() -> None:
                for _ in range(messages):
                    data.send(second)
                answer.recv(second)

            def receive() -> None:
                for _ in range(messages):
                    data.recv(first)
                answer.send(first)

            act = send if self.control.rank == first else receive
        return max(self.time(act, "a one-way stream"), default=0.0) / (size * messages)

    def exchange(self, pair: tuple[int, int], size: int) -> float:
        """Both ranks of the pair send and receive at once."""
        act = None
        if self.control.rank in pair:
            channel = self.make(size)
            peer = pair[1] if self.control.rank == pair[0] else pair[0]
            act = lambda: channel.exchange(peer, peer)
        return max(self.time(act, "an exchange"), default=0.0)

    def shift(self, size: int) -> float:
        """Every rank sends to the next and receives from the one before, all at once."""
        channel = self.make(size)
        rank, world = self.control.rank, self.control.world
        act = lambda: channel.exchange((rank + 1) % world, (rank - 1) % world)
        return max(self.time(act, "a shift"), default=0.0)


def calibrate(make: Callable[[int], PointToPoint], control: Control, layout: Layout, deadline_s: float) -> Links | None:
    """The links of this job on one backend, at rank 0; None elsewhere. Takes a second or two."""
    control.beat("calibrating")
    bench = _Bench(control=control, make=make, deadline_s=deadline_s)
    same = next((ranks[:2] for ranks in layout.by_host() if len(ranks) > 1), None)
    other = tuple(ranks[0] for ranks in layout.by_host()[:2])
    same_host = _link(bench, (same[0], same[1])) if same else None
    other_host = _link(bench, (other[0], other[1])) if len(other) > 1 else None
    small, large = (bench.shift(SMALL), bench.shift(LARGE)) if control.world > 1 else (0.0, 0.0)
    if control.rank != 0:
        return None
    crowd = max(len(ranks) for ranks in layout.by_host()) if len(layout.by_host()) == 1 else 0
    links = Links(
        same_host=same_host,
        other_host=other_host,
        reduce_seconds_per_byte=_reduction(),
        host_seconds_per_message=small / crowd if crowd else 0.0,
        host_seconds_per_byte=max(0.0, large - small) / (LARGE * crowd) if crowd else 0.0,
    )
    text = json.dumps(links.to_dict(), sort_keys=True)
    return replace(links, calibration_id=hashlib.sha256(text.encode()).hexdigest()[:12])


def _calls(once_s: float) -> int:
    """Calls a window for calls of ``once_s`` seconds."""
    return max(1, min(2000, int(STEP_S / WINDOWS / once_s)))


def _link(bench: _Bench, pair: tuple[int, int]) -> Link:
    table = tuple((size, bench.message(pair, size)) for size in SIZES)
    per_byte = min(bench.stream(pair, STREAM_SIZE, 4), table[-1][1] / SIZES[-1])
    both = bench.exchange(pair, LARGE)
    # An exchange is one call on each rank where half a ping-pong is two: at sizes where the interpreter shows, it comes
    # nearer to the wire.
    latency = min(table[0][1], bench.exchange(pair, SMALL))
    one_way = dict(table)[LARGE]
    factor = (both - latency) / (one_way - latency) if one_way > latency else 1.0
    return Link(latency_s=latency, seconds_per_byte=per_byte, exchange_factor=min(2.0, max(1.0, factor)), table=table)


def _reduction() -> float:
    """Seconds a byte of adding one float32 array to another that is out of the first-level cache."""
    left, right = np.ones(1 << 18, dtype=np.float32), np.ones(1 << 18, dtype=np.float32)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        np.add(left, right, out=left)
        times.append(time.perf_counter() - start)
    return float(np.median(times)) / left.nbytes
