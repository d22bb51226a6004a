"""Link calibration on links of known speed: ranks as threads, messages that take exactly as long as they should."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from commbench.cases import Layout
from commbench.measure import calibrate as module
from commbench.measure.calibrate import SIZES, calibrate
from commbench.models.links import Links

LATENCY_S = 4e-4
SECONDS_PER_BYTE = 1e-9  # 1 GB/s within a host
REMOTE_LATENCY_S = 1.2e-3
REMOTE_SECONDS_PER_BYTE = 4e-9


class Wires:
    """Mailboxes between ranks; a message costs its sender its time on the wire, and an exchange ``duplex`` of it."""

    def __init__(self, hosts: tuple[str, ...], duplex: float = 1.0) -> None:
        self.hosts = hosts
        self.duplex = duplex
        self.boxes: dict[tuple[int, int], queue.Queue[int]] = defaultdict(queue.Queue)
        self.used: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    def cost(self, a: int, b: int, size: int) -> float:
        if self.hosts[a] == self.hosts[b]:
            return LATENCY_S + size * SECONDS_PER_BYTE
        return REMOTE_LATENCY_S + size * REMOTE_SECONDS_PER_BYTE

    def box(self, source: int, to: int) -> queue.Queue[int]:
        with self._lock:
            self.used.add((source, to))
            return self.boxes[source, to]


class Channel:
    """This rank's end for messages of one size."""

    def __init__(self, wires: Wires, rank: int, size: int) -> None:
        self.wires, self.rank, self.size = wires, rank, size

    def send(self, peer: int) -> None:
        pass_time(self.wires.cost(self.rank, peer, self.size))
        self.wires.box(self.rank, peer).put(self.size)

    def recv(self, peer: int) -> None:
        assert self.wires.box(peer, self.rank).get(timeout=20) == self.size

    def exchange(self, to: int, source: int) -> None:
        latency = self.wires.cost(self.rank, to, 0)
        self.wires.box(self.rank, to).put(self.size)
        self.recv(source)
        pass_time(latency + self.wires.duplex * (self.wires.cost(self.rank, to, self.size) - latency))


def pass_time(seconds: float) -> None:
    end = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - 1e-4))
    while time.perf_counter() < end:
        time.sleep(0)


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_S", 0.01)


def links_of(
    as_ranks: Callable[..., list[Any]], hosts: tuple[str, ...], duplex: float = 1.0
) -> tuple[Links, Wires, list[tuple[float, str]]]:
    wires = Wires(hosts, duplex)
    expected: list[tuple[float, str]] = []

    def act(control: Any) -> Links | None:
        found = calibrate(lambda size: Channel(wires, control.rank, size), control, Layout(hosts=hosts), 7.0)
        expected.extend(control.expected if control.rank == 0 else [])
        return found

    found, *others = as_ranks(len(hosts), act)
    assert others == [None] * (len(hosts) - 1)
    return found, wires, expected


def test_a_link_of_known_speed(as_ranks: Callable[..., list[Any]]) -> None:
    links, _, expected = links_of(as_ranks, ("a", "a"))
    link = links.same_host
    assert link is not None
    assert links.other_host is None
    assert link.latency_s == pytest.approx(LATENCY_S, rel=0.5)
    assert [size for size, _ in link.table] == list(SIZES)
    for size, seconds in link.table[-2:]:
        assert seconds == pytest.approx(LATENCY_S + size * SECONDS_PER_BYTE, rel=0.3)
    # Four messages of 4 MiB in a row and one small answer.
    stream = (5 * LATENCY_S + 4 * 2**22 * SECONDS_PER_BYTE) / (4 * 2**22)
    assert link.seconds_per_byte == pytest.approx(stream, rel=0.3)
    assert link.exchange_factor == pytest.approx(1.0, abs=0.35)
    assert links.reduce_seconds_per_byte > 0
    assert len(links.calibration_id) == 12
    assert {seconds for seconds, _ in expected} == {7.0}
    assert all(doing.startswith("calibrating: ") for _, doing in expected)


def test_a_half_duplex_link_costs_an_exchange_both_ways(as_ranks: Callable[..., list[Any]]) -> None:
    links, _, _ = links_of(as_ranks, ("a", "a"), duplex=2.0)
    assert links.same_host is not None
    assert links.same_host.exchange_factor == pytest.approx(2.0, abs=0.35)


def test_links_within_and_between_hosts_are_told_apart(as_ranks: Callable[..., list[Any]]) -> None:
    links, wires, _ = links_of(as_ranks, ("a", "b", "a"))
    assert links.same_host is not None
    assert links.other_host is not None
    # Ranks 0 and 2 share a host, 0 and 1 do not.
    assert links.other_host.latency_s > 1.5 * links.same_host.latency_s
    large = SIZES[-1]
    assert dict(links.other_host.table)[large] == pytest.approx(
        REMOTE_LATENCY_S + large * REMOTE_SECONDS_PER_BYTE, rel=0.3
    )
    assert (0, 2) in wires.used
    assert (0, 1) in wires.used
    # With several hosts the ranks of one do not stand for all: no crowding is derived.
    assert (links.host_seconds_per_message, links.host_seconds_per_byte) == (0.0, 0.0)


def test_one_rank_a_host_has_no_link_within(as_ranks: Callable[..., list[Any]]) -> None:
    links, _, _ = links_of(as_ranks, ("a", "b"))
    assert links.same_host is None
    assert links.other_host is not None


def test_a_world_of_one_has_no_links(as_ranks: Callable[..., list[Any]]) -> None:
    links, wires, _ = links_of(as_ranks, ("a",))
    assert (links.same_host, links.other_host) == (None, None)
    assert wires.used == set()
