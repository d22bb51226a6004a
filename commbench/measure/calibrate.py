"""Measures the links of the job, with messages only: no figure of a collective or of a schedule enters.

What is measured and what it becomes is told in docs/models.md. Seconds and bytes.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from commbench.cases import Layout
from commbench.measure.control import Control
from commbench.measure.operation import Messenger
from commbench.measure.patterns import Bench, Effort, fan_in, one_way, shift, stream
from commbench.models.links import Link, Links, Table

SIZES = (8, 512, 4096, 1 << 14, 1 << 15, 1 << 16, 1 << 17, 1 << 18, 1 << 20, 1 << 22)
RATE_SIZE = 1 << 18  # long enough to be all rate, short enough for a slow link
ALIKE = 1.15  # hosts whose rates differ less are the same for predictions
QUICK = Effort(windows=3, window_s=0.012, slow_s=0.05)
THOROUGH = Effort(windows=7, window_s=0.03, slow_s=0.06)
QUICK_ROUNDS, THOROUGH_ROUNDS = 3, 15  # partners that each host's rate is tried with

Windows = dict[int, list[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """``links`` for predictions, and what they were made from: per pattern its windows' seconds a call.

    ``windows``: one entry a pattern and size, ``{"link", "pattern", "bytes", "seconds": [...]}``.
    """

    links: Links
    windows: list[dict[str, Any]] = field(default_factory=list)


def calibrate(
    messenger: Messenger, control: Control, layout: Layout, *, cache: str = "rotate", deadline_s: float,
    thorough: bool = False, clock: Callable[[], float] = time.perf_counter,
) -> Calibration:  # fmt: skip
    """The links of this job on one backend, the same on every rank. ``messenger`` is the whole world's.

    A few seconds at most on links that are worth the name, ten times as long where ``thorough``.
    """
    control.beat("calibrating")
    bench = Bench(
        control=control, messenger=messenger, effort=THOROUGH if thorough else QUICK, cache=cache,
        deadline_s=deadline_s, clock=clock,
    )  # fmt: skip
    job = _Job(bench=bench, hosts=layout.by_host(), rounds=THOROUGH_ROUNDS if thorough else QUICK_ROUNDS)
    links = job.between_hosts(job.inside_hosts(Links(reduce_seconds_per_byte=job.reduction())))
    text = json.dumps(links.to_dict(), sort_keys=True)
    return Calibration(
        links=replace(links, calibration_id=hashlib.sha256(text.encode()).hexdigest()[:12]), windows=job.windows
    )


def host_rates(
    messenger: Messenger, control: Control, layout: Layout, links: Links, *, cache: str = "rotate", deadline_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[tuple[float, float], ...]:  # fmt: skip
    """Seconds a byte out of and into each host now, as :class:`Links` holds them: what was calibrated may have changed.

    Empty where all are as usual, and where there are too few hosts to tell whose rate it is.
    """
    control.beat("calibrating")
    bench = Bench(
        control=control, messenger=messenger, effort=QUICK, cache=cache, deadline_s=deadline_s, clock=clock
    )  # fmt: skip
    job = _Job(bench=bench, hosts=layout.by_host(), rounds=QUICK_ROUNDS)
    rates = job.rates([ranks[0] for ranks in job.hosts])
    return _per_host(rates, len(job.hosts), links.of(crossing=True).seconds_per_byte) if rates else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """``hosts``: the world ranks of each host. Keeps every window."""

    bench: Bench
    hosts: tuple[tuple[int, ...], ...]
    rounds: int
    windows: list[dict[str, Any]] = field(default_factory=list)

    def _sweep(self, link: str, pattern: str, traffic: Any, sizes: Sequence[int] = SIZES) -> Windows:
        found = self.bench.sweep(f"{pattern} {link}", traffic, sizes)
        self.windows.extend(
            {"link": link, "pattern": pattern, "bytes": size, "seconds": seconds} for size, seconds in found.items()
        )
        return found

    def reduction(self) -> float:
        """Seconds a byte of adding float32 to float32 that is out of the first-level cache, on the slowest rank."""
        messenger, size, calls = self.bench.messenger, 1 << 20, 10
        left, right = messenger.buffer(size), messenger.buffer(size)
        add = messenger.repeat([[messenger.reduce(left, left, right, "float32", "sum")]])
        times = []
        for _ in range(3):
            start = self.bench.clock()
            add(calls)
            messenger.finish()
            times.append((self.bench.clock() - start) / calls / size)
        slowest: float = self.bench.control.agree(float(np.median(times)), max)
        return slowest

    # -- inside hosts --------------------------------------------------------------------------

    def inside_hosts(self, links: Links) -> Links:
        crowded = [ranks for ranks in self.hosts if len(ranks) > 1]
        if not crowded:
            return links
        ranks = max(crowded, key=len)
        link = self._link("same_host", (ranks[0], ranks[1]), ranks[1:])
        crowd = len(ranks)
        if len(crowded) == 1 and crowd == 2:
            together = dict(link.exchange)
        else:
            found = self._sweep("same_host", "shift", shift(crowded))
            together = dict(_medians(found))
            link = replace(link, shift=tuple(together.items()))
        small, large = min(together), max(together)
        return replace(
            links, same_host=link,
            host_seconds_per_message=together[small] / crowd,
            host_seconds_per_byte=max(0.0, together[large] - together[small]) / (large * crowd),
        )  # fmt: skip

    # -- between hosts -------------------------------------------------------------------------

    def between_hosts(self, links: Links) -> Links:
        if len(self.hosts) < 2:
            return links
        leaders = [ranks[0] for ranks in self.hosts]
        rates = self.rates(leaders)
        first, second = _usual_pair(rates, len(leaders)) if rates else (0, 1)
        link = self._link(
            "other_host", (leaders[first], leaders[second]),
            [rank for host, rank in enumerate(leaders) if host != first],
            to=leaders[first],
        )  # fmt: skip
        per_host = _per_host(rates, len(leaders), link.seconds_per_byte)
        slowest = _slowest_hop(per_host, link.seconds_per_byte)
        if len(leaders) > 2:
            found = _medians(self._sweep("other_host", "shift", shift([leaders])))
            link = replace(link, shift=_on_usual_hosts(found, link, slowest))
        links = replace(links, other_host=link, host_rates=per_host)
        most = max(map(len, self.hosts))
        rails = [[ranks[i] for ranks in self.hosts if i < len(ranks)] for i in range(most)]
        rails = [rail for rail in rails if len(rail) > 1]
        if len(rails) < 2:
            return links
        found = _medians(self._sweep("other_host", "nic", shift(rails)))
        return replace(links, **_nic(_on_usual_hosts(found, link, slowest), link, len(rails)))

    def rates(self, leaders: list[int]) -> dict[tuple[int, int], float]:
        """Seconds a byte from host to host, for the pairs tried: in each round every host has another partner."""
        rates: dict[tuple[int, int], float] = {}
        if len(leaders) < 3:
            return rates
        for pairs in partners(len(leaders), self.rounds):
            rates.update(self._rates_of(pairs, leaders))
            rates.update(self._rates_of([(b, a) for a, b in pairs], leaders))
        return rates

    def _rates_of(self, pairs: list[tuple[int, int]], leaders: list[int]) -> dict[tuple[int, int], float]:
        """All pairs' streams at once, each timed by itself."""
        traffic = stream([(leaders[a], leaders[b]) for a, b in pairs])
        everyone = self.bench.each("rates of hosts", traffic, RATE_SIZE)
        rates = {(a, b): max(everyone[leaders[a]], everyone[leaders[b]]) / RATE_SIZE for a, b in pairs}
        self.windows.extend(
            {"link": "other_host", "pattern": "stream", "bytes": RATE_SIZE, "seconds": [rate * RATE_SIZE],
             "hosts": list(pair)} for pair, rate in rates.items()
        )  # fmt: skip
        return rates

    # -- one link ------------------------------------------------------------------------------

    def _link(self, name: str, pair: tuple[int, int], others: Sequence[int], to: int | None = None) -> Link:
        """All that is measured of one class of links but its shift."""
        there = _medians(self._sweep(name, "one_way", one_way(*pair)))
        table = tuple((size, seconds / 2) for size, seconds in there)
        both = _medians(self._sweep(name, "exchange", shift([pair])))
        large = int(table[-1][0])
        streamed = self._sweep(name, "stream", stream([pair]), (SIZES[0], large))
        # A link is no faster than it is, but a busy machine makes it look slower: for what bounds, the least counts.
        per_byte = min(min(streamed.get(large, [np.inf])) / large, table[-1][1] / large)
        # An exchange is one call on each rank where half a ping-pong is two: at sizes where the interpreter shows, it
        # comes nearer to the wire.
        latency = min(table[0][1], both[0][1])
        link = Link(
            latency_s=latency, seconds_per_byte=per_byte, overhead_s=float(np.median(streamed[SIZES[0]])),
            table=table, exchange=both,
        )  # fmt: skip
        if len(others) < 2:
            return link
        gathered = _medians(self._sweep(name, "fan_in", fan_in(others, pair[0] if to is None else to)))
        more = len(others) - 1
        return replace(
            link,
            fan_in=tuple((size, max(0.0, seconds - link.message_s(size)) / more) for size, seconds in gathered),
        )


def _medians(found: Windows) -> Table:
    return tuple((size, float(np.median(seconds))) for size, seconds in found.items())


def partners(hosts: int, rounds: int) -> list[list[tuple[int, int]]]:
    """Pairs of hosts, all at once in each of at most ``rounds`` rounds, no pair twice (the circle method)."""
    seats: list[int | None] = [*range(hosts), *([None] if hosts % 2 else [])]
    found = []
    for _ in range(min(rounds, len(seats) - 1)):
        half = len(seats) // 2
        tables = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(a, b) for a, b in tables if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def _best_rates(rates: dict[tuple[int, int], float], hosts: int) -> list[tuple[float, float]]:
    """Seconds a byte out of and into each host: what it reached with its best partner, NaN where it had none."""
    found = []
    for host in range(hosts):
        out = min((rate for (source, _), rate in rates.items() if source == host), default=np.nan)
        into = min((rate for (_, target), rate in rates.items() if target == host), default=np.nan)
        found.append((out, into))
    return found


def _usual_pair(rates: dict[tuple[int, int], float], hosts: int) -> tuple[int, int]:
    """The pair whose rate is nearest to that of the middle one of the hosts."""
    middle = float(np.nanmedian(_best_rates(rates, hosts)))
    return min(rates, key=lambda pair: (abs(rates[pair] - middle), pair))


def _per_host(rates: dict[tuple[int, int], float], hosts: int, usual: float) -> tuple[tuple[float, float], ...]:
    """Seconds a byte out of and into each host, ``usual`` where that is about right. Empty where all are alike."""
    found = tuple(
        (out if out > ALIKE * usual else usual, into if into > ALIKE * usual else usual)
        for out, into in _best_rates(rates, hosts)
    )
    return found if any(pair != (usual, usual) for pair in found) else ()


def _slowest_hop(per_host: tuple[tuple[float, float], ...], usual: float) -> float:
    """Seconds a byte of the slowest link in the ring of hosts."""
    following = (*per_host[1:], *per_host[:1])
    return max((max(out, into) for (out, _), (_, into) in zip(per_host, following, strict=True)), default=usual)


def _on_usual_hosts(found: Table, link: Link, slowest: float) -> Table:
    """A shift that went at the pace of a slow host, as it would be among usual ones: what it takes above a message alone
    shrinks with the rate."""
    if slowest <= link.seconds_per_byte:
        return found
    table = []
    for size, seconds in found:
        alone = link.message_s(size)
        longer = max(0.0, seconds - alone - size * (slowest - link.seconds_per_byte))
        table.append((size, alone + longer * link.seconds_per_byte / slowest))
    return tuple(table)


def _nic(found: Table, link: Link, ranks: int) -> dict[str, Any]:
    """What each of the messages of several ranks keeps their NIC busy for, and the best rate in one direction."""
    busy = []
    for size, seconds in found:
        latency = link.message_s(size) - link.occupied_s(size)
        busy.append((size, max(0.0, seconds - latency) / ranks))
    size, seconds = busy[-1]
    return {"nic": tuple(busy), "nic_seconds_per_byte": min(link.seconds_per_byte, seconds / size)}
