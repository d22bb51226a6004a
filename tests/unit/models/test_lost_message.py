"""A schedule that has lost one message is found out by the simulation, by the counts and by the price."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commbench.models import Link, Links, price
from commbench.schedules import Schedule, ScheduleError, Transfer, build, count
from commbench.schedules.matching import Pair, match
from commbench.schedules.simulation import simulate

SIZE = 1 << 20
ONE_HOST = Links(
    same_host=Link(latency_s=1e-6, seconds_per_byte=1e-10),
    host_seconds_per_message=1e-6,
    host_seconds_per_byte=1e-10,
)
ONE_WAY_AT_A_TIME = Links(other_host=Link(latency_s=1e-5, seconds_per_byte=1e-9, exchange_factor=1.5))


def without(schedule: Schedule, lost: Pair, *, receive: bool = True) -> Schedule:
    """The schedule without the send of a message, and without its receive."""
    number = 0
    programs = []
    for program in schedule.programs:
        channels = []
        for steps in program:
            kept = []
            for step in steps:
                removed: list[Transfer] = []
                if number == lost.send_step:
                    removed += [t for t in step if t.outgoing and (t.peer, t.blocks) == (lost.target, lost.blocks)]
                if number == lost.recv_step and receive:
                    removed += [t for t in step if not t.outgoing and (t.peer, t.blocks) == (lost.source, lost.blocks)]
                kept.append(tuple(t for t in step if t not in removed))
                number += 1
            channels.append(tuple(kept))
        programs.append(tuple(channels))
    return replace(schedule, programs=tuple(programs))


@pytest.mark.parametrize(("ranks", "hosts", "links"), [(4, (0, 0, 0, 0), ONE_HOST), (2, (0, 1), ONE_WAY_AT_A_TIME)])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_any_one_message_lost(collective: str, ranks: int, hosts: tuple[int, ...], links: Links) -> None:
    ring = build(collective, "ring", ranks)
    counts, ring_s = count(ring), price(ring, SIZE, hosts, links)
    assert simulate(ring).correct
    for lost in match(ring).messages:
        broken = without(ring, lost)
        assert not simulate(broken).correct, lost
        fewer = count(broken)
        assert fewer.messages == counts.messages - 1
        assert fewer.sent[lost.source] == counts.sent[lost.source] - ring.share
        assert price(broken, SIZE, hosts, links) < ring_s * 0.99, lost


def test_send_without_its_receive() -> None:
    ring = build("all_reduce", "ring", 4)
    for lost in match(ring).messages:
        broken = without(ring, lost, receive=False)
        assert not simulate(broken).correct
        with pytest.raises(ScheduleError, match="sends 5 messages"):
            price(broken, SIZE, (0, 0, 0, 0), ONE_HOST)
        with pytest.raises(ScheduleError):
            count(broken)
