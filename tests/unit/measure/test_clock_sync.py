"""Clocks of ranks fitted to one another, with ranks as threads and messages in memory: the truth is known."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from commbench.measure import clock_sync
from commbench.measure.clock import SAME_HOST_ERROR_S, WRONG, LocalClock, OneClock, local_clock, now_ns
from commbench.measure.clock_model import tree
from commbench.measure.clock_sync import CommonClock, FittedClock, Told, common_clock, find_clocks
from commbench.measure.operation import Post

SECOND = 10**9


class Network:
    """Messengers of bytes among threads. ``sent`` counts the messages from rank to rank."""

    def __init__(self, world: int) -> None:
        self.queues: dict[tuple[int, int], queue.Queue[bytes]] = {
            (source, to): queue.Queue() for source in range(world) for to in range(world)
        }
        self.sent: dict[tuple[int, int], int] = dict.fromkeys(self.queues, 0)

    def of(self, rank: int) -> Any:
        return _Messenger(self, rank)


@dataclass
class _Messenger:
    network: Network
    rank: int

    def buffer(self, size: int) -> np.ndarray:
        return np.zeros(size, dtype=np.uint8)

    def step(self, sends: Sequence[Post], receives: Sequence[Post]) -> Callable[[], None]:
        queues, counts = self.network.queues, self.network.sent

        def exchange() -> None:
            for post in sends:
                counts[self.rank, post.peer] += 1
                queues[self.rank, post.peer].put(post.memory.tobytes())
            for post in receives:
                post.memory[:] = np.frombuffer(queues[post.peer, self.rank].get(timeout=20), dtype=np.uint8)

        return exchange


@dataclass
class Bench:
    as_ranks: Callable[..., list[Any]]
    fits: list[dict[str, Any]] = field(default_factory=list)

    def run(self, hosts: Sequence[str], act: Callable[[Any, Any, Network], Any]) -> list[Any]:
        """What ``act`` makes on every rank of its control plane and its common clock."""
        network = Network(len(hosts))

        def one(control: Any) -> Any:
            clock = common_clock(
                lambda: network.of(control.rank), control, hosts[control.rank], deadline_s=30.0, on_fit=self.fits.append
            )
            return act(control, clock, network)

        return self.as_ranks(len(hosts), one)


@pytest.fixture
def bench(as_ranks: Callable[..., list[Any]]) -> Bench:
    return Bench(as_ranks)


def off_ns(control: Any, clock: CommonClock, true_ns: int) -> int:
    """How far this rank's common time is from rank 0's at the same moment, which one machine knows."""
    return int(clock.to_common(true_ns)) - int(local_clock(0).read(true_ns))


# -- several clocks --------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 5])
def test_wrong_clocks_are_put_right(bench: Bench, monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    monkeypatch.setenv(WRONG, "7")

    def act(control: Any, clock: Any, network: Network) -> Any:
        control.gather(None)
        true_ns = control.share(now_ns())
        later = true_ns + SECOND
        stated = control.share([clock.error_s((0, rank)) for rank in range(world)] if control.rank == 0 else None)
        here = control.share(clock.now_ns())
        mine = clock.to_mine([here, here + SECOND])
        return {
            "off": off_ns(control, clock, true_ns), "later": off_ns(control, clock, later), "stated": stated,
            "mine": mine.tolist(), "back": (clock.to_common(mine) - here).tolist(), "wrong": local_clock(control.rank),
        }  # fmt: skip

    found = bench.run(["a"] * world, act)
    # Seconds apart they were, and drifting by tens of microseconds a second.
    apart = [one["wrong"].offset_ns - found[0]["wrong"].offset_ns for one in found[1:]]
    assert min(map(abs, apart)) > SECOND / 10
    (fit,) = bench.fits
    assert (found[0]["off"], found[0]["later"]) == (0, 0)
    # Threads take turns, so that one way may always be slower than the other, by at most a round trip.
    unseen_s = sum(told["round_trip_s"] for told in fit["clocks"]) / 2
    for rank, one in enumerate(found):
        allowed_ns = (one["stated"][rank] + unseen_s) * 1e9
        assert abs(one["off"]) <= allowed_ns <= 1e6
        assert (
            abs(one["later"])
            <= allowed_ns + (fit["clocks"][rank]["drift_error"] + unseen_s / clock_sync.WINDOW_S) * 1e9
        )
        # A common time is a time of everybody's true clock, and comes back as it was.
        assert abs(one["mine"][0] - found[0]["mine"][0]) <= allowed_ns
        assert max(abs(back) for back in (one["back"][0], one["back"][1] - SECOND)) <= 2


def test_ranks_of_a_host_share_its_model(bench: Bench) -> None:
    """Two hosts with two ranks each: one speaks for both, and in truth all read one clock."""

    def act(control: Any, clock: Any, network: Network) -> Any:
        control.gather(None)
        true_ns = control.share(now_ns())
        errors = [clock.error_s(group) for group in ((0, 1), (2, 3), (0, 2))] if control.rank == 0 else None
        round_trip_ns = clock.told[1].round_trip_s * 1e9 if control.rank == 0 else None
        return clock.clocks, int(clock.to_common(true_ns)) - true_ns, errors, dict(network.sent), round_trip_ns

    found = bench.run(["a", "a", "b", "b"], act)
    assert {clocks for clocks, *_ in found} == {((0, 1), (2, 3))}
    assert found[0][1] == found[1][1] == 0
    assert found[2][1] == found[3][1]
    same, other, between = found[0][2]
    assert same == other == SAME_HOST_ERROR_S < between
    assert abs(found[2][1]) <= between * 1e9 + found[0][4] / 2
    talked = {pair for pair, count in found[0][3].items() if count}
    assert talked == {(2, 0), (0, 2), (0, 1), (2, 3)}
    assert found[0][3][0, 1] == found[0][3][2, 3] == 1


def test_children_learn_from_their_parents_in_the_tree(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WRONG, "3")
    found = bench.run(["a"] * 5, lambda control, clock, network: dict(network.sent))
    talked = {frozenset(pair) for pair, count in found[0].items() if count}
    assert talked == {frozenset(pair) for pairs in tree(5) for pair in pairs}


def test_what_rank_0_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WRONG, "1:2:-40")

    def act(control: Any, clock: Any, network: Network) -> Any:
        clock.refit(17)
        summary = clock.summary(("x", "y"), "after") if control.rank == 0 else None
        return control.expected, control.where, summary

    (expected, where, summary), _ = bench.run(["x", "y"], act)
    assert expected == [(32.0, "synchronising clocks")] * 2
    assert where == ("synchronising", 17)
    assert (summary["source"], summary["wrong"], summary["fits"]) == ("CLOCK_MONOTONIC", "1:2:-40", 2)
    assert summary["clocks"] == [{"host": "x", "ranks": [0]}, {"host": "y", "ranks": [1]}]
    first, second = bench.fits
    assert summary["after"] == second
    assert first["at_ns"] < second["at_ns"]
    assert [one["off_s"] is None for one in first["clocks"]] == [True, True]
    root, other = second["clocks"]
    assert (root["offset_ns"], root["slope"], root["error_s"], root["off_s"]) == (0, 0.0, 0.0, None)
    assert other["offset_ns"] == pytest.approx(2 * SECOND - 4e-5 * now_ns(), abs=1e8)
    assert other["slope"] == pytest.approx(-4e-5, abs=2 * other["drift_error"])
    assert abs(other["off_s"]) <= other["stated_s"]
    assert 0 < other["round_trip_s"] < 0.1


# -- clocks that do not go on as they did ------------------------------------------------------------


class SetClock(LocalClock):
    """A clock that somebody sets."""

    ahead_ns = 0

    def reader(self) -> Callable[[], int]:
        return lambda: now_ns() + SetClock.ahead_ns


def test_a_clock_that_was_set_is_learnt_anew_and_told(as_ranks: Callable[..., list[Any]]) -> None:
    SetClock.ahead_ns = 0
    network = Network(2)

    def one(control: Any) -> Any:
        local = SetClock() if control.rank else LocalClock()
        clock = FittedClock(
            control=control, messenger=network.of(control.rank), local=local, clocks=((0,), (1,)), deadline_s=30.0
        )
        clock.refit()
        control.gather(None)
        quiet = clock.summary("ab")["note"] if control.rank == 0 else None
        if control.rank:
            SetClock.ahead_ns = 3_000_000
        clock.refit()
        return quiet, clock

    (quiet, clock), _ = as_ranks(2, one)
    assert quiet is None
    assert (clock.fits, clock.off) == (2, 1)
    told = clock.told[1]
    assert told.off_s == pytest.approx(3e-3, abs=told.stated_s)
    assert told.offset_ns == pytest.approx(3_000_000, abs=(told.error_s * 1e9) + 1)
    note = clock.summary("ab")["note"]
    assert note.startswith("clocks: that of b was 3.0")
    assert "(so in 1 of 1 checks)" in note


def test_when_to_fit_again(as_ranks: Callable[..., list[Any]]) -> None:
    def one(control: Any) -> None:
        clock = FittedClock(
            control=control, messenger=Network(1).of(0), local=LocalClock(), clocks=((0,),), deadline_s=30.0
        )

        def due(age_s: float, drift_error: float, took_s: float) -> bool:
            clock.told = [
                Told(
                    reference_ns=0, offset_ns=0, slope=0.0, since_ns=now_ns() - round(age_s * 1e9), error_s=1e-6,
                    drift_error=drift_error, off_s=None, stated_s=None, round_trip_s=1e-5,
                )
            ]  # fmt: skip
            clock.at_ns, clock._took_s = now_ns() - round(age_s * 1e9), took_s
            return clock.due()

        # 1e-8 a second makes 1 us in 100 s: only the age counts. 1e-6 a second makes it in 1 s, 1e-5 in 0.1 s.
        assert [due(age, 1e-8, 0.0) for age in (0.6, 4.9, 5.1)] == [False, False, True]
        assert [due(age, 1e-6, 0.0) for age in (0.6, 0.9, 1.1)] == [False, False, True]
        assert [due(age, 1e-5, 0.0) for age in (0.2, 0.4, 0.6)] == [False, False, True]
        assert [due(age, 1e-5, 0.2) for age in (0.6, 1.9, 2.1)] == [False, False, True]

    as_ranks(1, one)


def test_an_error_grows_until_the_next_fit(as_ranks: Callable[..., list[Any]]) -> None:
    def one(control: Any) -> None:
        clock = FittedClock(
            control=control,
            messenger=Network(4).of(0),
            local=LocalClock(),
            clocks=((0,), (1, 2), (3,)),
            deadline_s=30.0,
        )
        clock.told = [
            Told(
                reference_ns=0, offset_ns=0, slope=0.0, since_ns=now_ns() - SECOND, error_s=error_s,
                drift_error=drift_error, off_s=None, stated_s=None, round_trip_s=1e-5,
            )
            for error_s, drift_error in ((0.0, 0.0), (3e-6, 0.0), (3e-6, 1e-6))
        ]  # fmt: skip
        # After a second the third may be 4 us off: with the second 5 us, since they do not err together.
        assert clock.error_s((0, 1)) == pytest.approx(3e-6 + SAME_HOST_ERROR_S, abs=1e-8)
        assert clock.error_s((1, 2)) == SAME_HOST_ERROR_S
        assert clock.error_s((0, 2, 3)) == pytest.approx(5e-6 + SAME_HOST_ERROR_S, abs=1e-7)

    as_ranks(1, one)


# -- no need, or no way ------------------------------------------------------------------------------


def test_one_clock_needs_no_messages(as_ranks: Callable[..., list[Any]]) -> None:
    def one(control: Any) -> Any:
        return find_clocks(control, "a", LocalClock()), common_clock(None, control, "a", deadline_s=1.0)

    found = as_ranks(3, one)
    assert {clocks for clocks, _ in found} == {((0, 1, 2),)}
    assert all(isinstance(clock, OneClock) for _, clock in found)


def test_without_messages_between_hosts_there_is_no_common_clock(as_ranks: Callable[..., list[Any]]) -> None:
    assert as_ranks(2, lambda control: common_clock(None, control, "ab"[control.rank], deadline_s=1.0)) == [None, None]


def test_a_fit_takes_the_time_that_it_should(bench: Bench) -> None:
    began = time.perf_counter()
    found = bench.run(["a", "b"], lambda control, clock, network: network.sent[1, 0])
    assert clock_sync.WINDOW_S <= time.perf_counter() - began < 10
    # The first few make connections; the last says that there are no more.
    made = clock_sync.LATEST + clock_sync.OFFSETS + clock_sync.LATEST
    assert clock_sync.LEAST_EXCHANGES * made + 1 <= found[0] <= clock_sync.MOST_EXCHANGES * made + 1
