"""Calibration on links of known speed: ranks as threads with clocks of their own, messages that take exactly what they
should, so that every constant can be worked out by hand."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from commbench.cases import Layout
from commbench.measure import calibrate as module
from commbench.measure.calibrate import SIZES, Calibration, calibrate, partners
from commbench.measure.operation import Post, rotate

LATENCY, PER_BYTE = 4e-6, 1e-9  # inside a host
FAR_LATENCY, FAR_PER_BYTE = 1e-4, 1e-8  # between hosts: 1 MiB takes 10.6 ms
ADDING = 2e-10


class Wires:
    """Rendezvous between ranks. ``duplex``: factor on bytes where both ends are busy both ways. ``slow``: factor of the
    rate of each host's NIC; ranks that share a NIC take turns on it where ``shared``."""

    def __init__(
        self, hosts: tuple[str, ...], *, duplex: float = 1.0, slow: dict[str, float] | None = None, shared: bool = False
    ) -> None:
        self.hosts, self.duplex, self.slow, self.shared = hosts, duplex, slow or {}, shared
        self._boxes: dict[tuple[int, int], tuple[queue.Queue[Any], queue.Queue[Any]]] = defaultdict(
            lambda: (queue.Queue(), queue.Queue())
        )
        self._lock = threading.Lock()

    def boxes(self, source: int, target: int) -> tuple[queue.Queue[Any], queue.Queue[Any]]:
        with self._lock:
            return self._boxes[source, target]

    def seconds(self, source: int, target: int, size: int, *, both: bool, messages: int) -> float:
        """``messages``: how many arrive at the target in the same step, one after the other."""
        here, there = self.hosts[source], self.hosts[target]
        factor = self.duplex if both else 1.0
        if here == there:
            return LATENCY + messages * size * PER_BYTE * factor
        rate = FAR_PER_BYTE * max(self.slow.get(here, 1.0), self.slow.get(there, 1.0))
        turns = max(self.hosts.count(here), self.hosts.count(there)) if self.shared else 1
        return FAR_LATENCY + messages * size * rate * factor * turns


class Messenger:
    """One rank's end, with a clock that only messages and additions move."""

    def __init__(self, wires: Wires, rank: int) -> None:
        self.wires, self.rank, self.now = wires, rank, 100.0 * rank  # clocks of different ranks have nothing in common

    def buffer(self, size: int) -> Any:
        return np.zeros(size, dtype=np.uint8)

    def step(self, sends: Sequence[Post], receives: Sequence[Post]) -> Callable[[], Any]:
        both = bool(sends and receives)

        def go() -> None:
            for post in sends:
                self.wires.boxes(self.rank, post.peer)[0].put((len(post.memory), both))
            longest = 0.0
            for post in receives:
                offers, answers = self.wires.boxes(post.peer, self.rank)
                size, sender_both = offers.get(timeout=20)
                assert size == len(post.memory)
                seconds = self.wires.seconds(
                    post.peer, self.rank, size, both=both and sender_both, messages=len(receives)
                )
                answers.put(seconds)
                longest = max(longest, seconds)
            for post in sends:
                longest = max(longest, self.wires.boxes(self.rank, post.peer)[1].get(timeout=20))
            self.now += longest

        return go

    def reduce(self, target: Any, left: Any, right: Any, dtype: str, op: str) -> Callable[[], Any]:
        assert (dtype, op) == ("float32", "sum")

        def add() -> None:
            self.now += len(target) * ADDING

        return add

    def repeat(self, sets: Sequence[Sequence[Callable[[], Any]]]) -> Callable[[int], Any]:
        return rotate(sets)

    def finish(self) -> None: ...

    def clock(self) -> float:
        return self.now


AsRanks = Callable[..., list[Any]]


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """On clocks that never err a few calls tell as much as thousands."""
    for name in ("QUICK", "THOROUGH"):
        monkeypatch.setattr(module, name, replace(getattr(module, name), window_s=1e-5))


def calibration_of(as_ranks: AsRanks, wires: Wires, *, thorough: bool = False) -> Calibration:
    def act(control: Any) -> Calibration:
        messenger = Messenger(wires, control.rank)
        return calibrate(
            messenger, control, Layout(hosts=wires.hosts), deadline_s=7.0, thorough=thorough, clock=messenger.clock,
            cache="warm",
        )  # fmt: skip

    found: list[Calibration] = as_ranks(len(wires.hosts), act)
    assert all(other.links == found[0].links for other in found)
    return found[0]


def test_a_link_inside_a_host(as_ranks: AsRanks) -> None:
    links = calibration_of(as_ranks, Wires(("a", "a"))).links
    link = links.same_host
    assert links.other_host is None
    assert link is not None
    assert link.latency_s == pytest.approx(LATENCY + 8 * PER_BYTE)
    assert [size for size, _ in link.table] == list(SIZES)
    assert dict(link.table) == pytest.approx({size: LATENCY + size * PER_BYTE for size in SIZES})
    # Each message of a stream waits for the one before: nothing hides its latency on these wires.
    assert link.seconds_per_byte == pytest.approx(PER_BYTE + LATENCY / SIZES[-1])
    assert link.overhead_s == pytest.approx(LATENCY + 8 * PER_BYTE)
    assert links.reduce_seconds_per_byte == pytest.approx(ADDING)
    assert links.calibration_id is not None
    assert len(links.calibration_id) == 12
    # Two ranks exchanging: each message has half of what the host can do.
    assert links.host_seconds_per_message == pytest.approx((LATENCY + 8 * PER_BYTE) / 2)


def test_half_duplex_is_seen_in_exchange_and_shift(as_ranks: AsRanks) -> None:
    links = calibration_of(as_ranks, Wires(("a", "a", "a"), duplex=2.0)).links
    link = links.same_host
    assert link is not None
    megabyte = 1 << 20
    for table in (link.exchange, link.shift):
        assert dict(table)[megabyte] == pytest.approx(LATENCY + 2 * megabyte * PER_BYTE)
    assert link.both_ways_s(megabyte, one_pair=True) == pytest.approx(megabyte * PER_BYTE)
    # Three ranks in a ring: a third of what the host can do.
    assert links.host_seconds_per_byte == pytest.approx(2 * PER_BYTE / 3, rel=1e-3)
    # Two senders to one: the second message's bytes come on top.
    assert dict(link.fan_in)[megabyte] == pytest.approx(megabyte * PER_BYTE)


def test_links_within_and_between_hosts_are_told_apart(as_ranks: AsRanks) -> None:
    links = calibration_of(as_ranks, Wires(("a", "b", "a"))).links
    assert links.same_host is not None
    assert links.other_host is not None
    assert links.same_host.latency_s == pytest.approx(LATENCY, rel=0.01)
    assert links.other_host.latency_s == pytest.approx(FAR_LATENCY, rel=0.01)
    # 1 MiB takes 10.6 ms, 4 MiB 42 ms: neither is slow enough to end the table.
    assert dict(links.other_host.table)[1 << 22] == pytest.approx(FAR_LATENCY + (1 << 22) * FAR_PER_BYTE)


def test_a_pattern_stops_growing_where_the_link_is_slow(as_ranks: AsRanks) -> None:
    wires = Wires(("a", "b"), slow={"a": 10.0, "b": 10.0})  # 256 KiB take 26 ms, 1 MiB 105 ms
    quick = calibration_of(as_ranks, wires).links.other_host
    assert quick is not None
    assert quick.table[-1][0] == 1 << 18  # there and back in 52 ms
    assert quick.exchange[-1][0] == 1 << 20
    assert quick.message_s(1 << 24) == pytest.approx(FAR_LATENCY + (1 << 24) * 10 * FAR_PER_BYTE, rel=0.01)


def test_a_slow_host_has_its_own_rate_and_spoils_no_other(as_ranks: AsRanks) -> None:
    slow = calibration_of(as_ranks, Wires(("a", "b", "c", "d"), slow={"c": 4.0}, duplex=1.5)).links
    even = calibration_of(as_ranks, Wires(("a", "b", "c", "d"), duplex=1.5)).links
    assert even.host_rates == ()
    assert slow.other_host is not None
    assert even.other_host is not None
    usual = slow.other_host.seconds_per_byte
    assert usual == pytest.approx(FAR_PER_BYTE, rel=0.01)
    assert [out > 3 * usual and into > 3 * usual for out, into in slow.host_rates] == [False, False, True, False]
    assert slow.rate(0, out=True) == usual
    # The shift went at the pace of c; among usual hosts it would not have.
    for size in (1 << 18, 1 << 20):
        assert dict(slow.other_host.shift)[size] == pytest.approx(dict(even.other_host.shift)[size], rel=0.01)


def test_ranks_that_share_a_nic(as_ranks: AsRanks) -> None:
    links = calibration_of(as_ranks, Wires(("a", "a", "b", "b"), shared=True)).links
    assert links.other_host is not None
    megabyte = 1 << 20
    # Both ranks' messages together take two turns each: each keeps the NIC busy for two of its own.
    assert dict(links.nic)[megabyte] == pytest.approx(megabyte * 2 * FAR_PER_BYTE / 2, rel=0.02)
    assert links.nic_seconds_per_byte <= links.other_host.seconds_per_byte


def test_one_rank_a_host_has_no_link_within(as_ranks: AsRanks) -> None:
    links = calibration_of(as_ranks, Wires(("a", "b"))).links
    assert links.same_host is None
    assert links.nic == ()


def test_a_world_of_one_has_no_links(as_ranks: AsRanks) -> None:
    found = calibration_of(as_ranks, Wires(("a",)))
    assert (found.links.same_host, found.links.other_host) == (None, None)
    assert found.windows == []


def test_windows_are_kept_with_what_they_timed(as_ranks: AsRanks) -> None:
    quick = calibration_of(as_ranks, Wires(("a", "a", "a")))
    thorough = calibration_of(as_ranks, Wires(("a", "a", "a")), thorough=True)
    for found, windows in ((quick, 3), (thorough, 7)):
        entry = next(e for e in found.windows if (e["pattern"], e["bytes"]) == ("shift", 1 << 16))
        assert entry["link"] == "same_host"
        assert len(entry["seconds"]) == windows
        assert entry["seconds"] == pytest.approx([LATENCY + (1 << 16) * PER_BYTE] * windows)
    assert {e["pattern"] for e in quick.windows} == {"one_way", "exchange", "stream", "shift", "fan_in"}


@pytest.mark.parametrize("hosts", [2, 3, 4, 7, 8, 33])
def test_partners_meet_once(hosts: int) -> None:
    rounds = partners(hosts, 100)
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met)) == hosts * (hosts - 1) // 2
    for pairs in rounds:
        assert len({host for pair in pairs for host in pair}) == 2 * len(pairs)
    assert partners(hosts, 2) == rounds[:2]
