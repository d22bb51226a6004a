"""The simulation finds what is wrong with a schedule, and says it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commbench.schedules import Block, Message, Schedule, ScheduleError, Transfer, build, count, from_rounds
from commbench.schedules.matching import match
from commbench.schedules.simulation import simulate

WHOLE = (Block(-1, -1, 0),)
OWN = [(Block(rank, -1, 0),) for rank in range(4)]


def all_reduce(ranks: int, rounds: list[list[Message]]) -> Schedule:
    return from_rounds("all_reduce", "hand-made", ranks, rounds)


def programs(collective: str, *steps_of_rank: list[list[Transfer]]) -> Schedule:
    """One channel a rank, given as its steps."""
    return Schedule(
        collective=collective,
        algorithm="hand-made",
        ranks=len(steps_of_rank),
        root=0,
        cut=1,
        programs=tuple((tuple(tuple(step) for step in steps),) for steps in steps_of_rank),
    )


def test_exchange_of_two_is_correct() -> None:
    assert simulate(all_reduce(2, [[Message(0, 1, WHOLE, True), Message(1, 0, WHOLE, True)]])).correct


def test_missing_contribution() -> None:
    rounds = [[Message(0, 1, WHOLE, True)], [Message(1, 0, WHOLE), Message(1, 2, WHOLE)]]
    verdict = simulate(all_reduce(3, rounds))
    assert not verdict.correct
    assert "rank 0 ends with a wrong or missing" in verdict.reason


def test_doubled_contribution() -> None:
    rounds = [[Message(0, 1, WHOLE, True)], [Message(0, 1, WHOLE, True)], [Message(1, 0, WHOLE)]]
    assert "rank 0 ends with a wrong" in simulate(all_reduce(2, rounds)).reason


def test_missing_output() -> None:
    assert "rank 1 ends with a wrong or missing" in simulate(
        from_rounds("all_gather", "hand-made", 2, [[Message(1, 0, OWN[1])]])
    ).reason  # fmt: skip


def test_block_sent_before_it_is_held() -> None:
    rounds = [[Message(1, 2, OWN[0])], [Message(0, 1, OWN[0])]]
    assert simulate(from_rounds("all_gather", "hand-made", 3, rounds)).reason == (
        "rank 1 sends rank 2 a block that it does not hold yet"
    )


def test_block_added_to_before_it_is_held() -> None:
    schedule = from_rounds("broadcast", "hand-made", 2, [[Message(0, 1, OWN[0], True)]])
    assert "to a block that it does not hold" in simulate(schedule).reason


def test_message_without_partner() -> None:
    schedule = programs("barrier", [[Transfer("send", 1, ())]], [])
    assert simulate(schedule).reason == ("rank 0 sends 1 messages to rank 1 on channel 0, which receives 0")
    with pytest.raises(ScheduleError, match="which receives 0"):
        count(schedule)


def test_sides_that_name_different_blocks() -> None:
    schedule = programs("broadcast", [[Transfer("send", 1, OWN[0])]], [[Transfer("recv", 0, OWN[1])]])
    assert "expects" in simulate(schedule).reason


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_peer_that_is_not_another_rank(peer: int) -> None:
    schedule = programs("barrier", [[Transfer("send", peer, ())]], [])
    assert simulate(schedule).reason == f"rank 0 of 2 has no peer {peer}"


def test_deadlock_of_sends_that_nobody_buffers() -> None:
    first = [[Transfer("send", 1, ())], [Transfer("recv", 1, ())]]
    second = [[Transfer("send", 0, ())], [Transfer("recv", 0, ())]]
    assert "deadlock" in simulate(programs("barrier", first, second)).reason
    together = [[*first[0], *first[1]]], [[*second[0], *second[1]]]
    assert simulate(programs("barrier", *together)).correct


def test_race_within_a_step() -> None:
    exchange = [[Message(0, 1, WHOLE), Message(1, 0, WHOLE)]]
    assert "uses a block in the step that overwrites it" in simulate(all_reduce(2, exchange)).reason


def test_race_between_channels() -> None:
    reduce, broadcast = build("reduce", "ring", 2), build("broadcast", "ring", 2)
    both = replace(reduce, programs=tuple(a + b for a, b in zip(reduce.programs, broadcast.programs, strict=True)))
    same_block = both.relabel(collective="all_reduce", cut=1, block=lambda b: WHOLE[0])
    assert "in one channel and uses it in another" in simulate(same_block).reason


def test_barrier_that_one_rank_leaves_early() -> None:
    gather_only = from_rounds("barrier", "hand-made", 3, [[Message(1, 0, ()), Message(2, 0, ())]])
    assert simulate(gather_only).reason == "rank 1 leaves the barrier before every rank has entered it"


def test_put_meets_recv_and_get_meets_send() -> None:
    ring = build("all_reduce", "ring", 4)
    for old, new in (("send", "put"), ("recv", "get")):
        one_sided = replace(
            ring,
            programs=tuple(
                tuple(
                    tuple(tuple(t._replace(kind=new if t.kind == old else t.kind) for t in step) for step in steps)
                    for steps in program
                )
                for program in ring.programs
            ),
        )
        assert simulate(one_sided).correct
        assert count(one_sided) == count(ring)


def test_messages_are_matched_in_order_and_placed_in_rounds() -> None:
    chain = build("broadcast", "ring", 4, 0, 2)
    found = [(m.round, m.source, m.target, m.blocks[0].piece) for m in match(chain).messages]
    assert found == [(0, 0, 1, 0), (1, 0, 1, 1), (1, 1, 2, 0), (2, 1, 2, 1), (2, 2, 3, 0), (3, 2, 3, 1)]
