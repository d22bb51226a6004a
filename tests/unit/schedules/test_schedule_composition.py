"""then, beside, within and pieces: what is made from smaller schedules computes what it should."""

from __future__ import annotations

from fractions import Fraction

import pytest

from commbench.schedules import Block, Message, Schedule, ScheduleError, Transfer, build, count, from_rounds, leaving
from commbench.schedules.matching import match
from commbench.schedules.simulation import simulate


def hierarchical_all_reduce(hosts: int, local: int) -> Schedule:
    """Reduce-scatter in each host, all_reduce of each shard over the rail of its owner, all-gather in each host."""
    ranks = hosts * local
    nodes = [[host * local + r for r in range(local)] for host in range(hosts)]
    rails = [[host * local + r for host in range(hosts)] for r in range(local)]
    scatter = build("reduce_scatter", "ring", local).within(
        nodes, ranks=ranks, collective="all_reduce", cut=local, block=lambda _, b: Block(-1, -1, b.destination)
    )
    over_rails = build("all_reduce", "ring", hosts).within(
        rails, ranks=ranks, collective="all_reduce", cut=ranks, block=lambda i, b: Block(-1, -1, i * hosts + b.piece)
    )
    gather = build("all_gather", "bruck", local).within(
        nodes, ranks=ranks, collective="all_reduce", cut=local, block=lambda _, b: Block(-1, -1, b.origin)
    )
    return scatter.then(over_rails).then(gather)


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (2, 4), (4, 3), (3, 8)])
def test_hierarchical_all_reduce(hosts: int, local: int) -> None:
    schedule = hierarchical_all_reduce(hosts, local)
    assert simulate(schedule).correct
    counts = count(schedule)
    assert counts.rounds == (local - 1) + 2 * (hosts - 1) + (local - 1).bit_length()
    assert set(counts.sent) == {Fraction(2 * (local - 1), local) + Fraction(2 * (hosts - 1), hosts * local)}
    host_of = [rank // local for rank in range(hosts * local)]
    assert leaving(schedule, host_of) == dict.fromkeys(range(hosts), Fraction(2 * (hosts - 1), hosts))


def test_flat_ring_sends_more_out_of_a_host_than_the_hierarchical_one() -> None:
    n = 8
    assert leaving(build("all_reduce", "ring", n), [0] * 4 + [1] * 4) == dict.fromkeys((0, 1), Fraction(2 * (n - 1), n))


def test_refine_names_smaller_blocks_in_the_same_messages() -> None:
    ring, finer = build("all_reduce", "ring", 3), build("all_reduce", "ring", 3).refine(2)
    assert (ring.share, finer.share) == (Fraction(1, 3), Fraction(1, 6))
    assert simulate(finer).correct
    assert count(finer) == count(ring)


def test_pieces_follow_one_round_behind_another() -> None:
    counts = count(build("broadcast", "ring", 6, 0, 10))
    assert (counts.rounds, counts.messages) == (5 + 9, 5 * 10)
    assert counts.sent == (*[Fraction(1)] * 5, Fraction(0))


def test_beside_halves_the_message() -> None:
    backward = from_rounds(
        "all_gather", "hand-made", 3,
        [[Message(r, (r - 1) % 3, (Block((r + s) % 3, -1, 0),)) for r in range(3)] for s in range(2)],
    )  # fmt: skip
    both_ways = build("all_gather", "ring", 3).beside(backward)
    assert simulate(both_ways).correct
    assert (both_ways.channels, both_ways.share) == (2, Fraction(1, 6))
    assert count(both_ways).rounds == 2
    assert count(both_ways).sent == (Fraction(2, 3),) * 3
    finer = build("all_gather", "ring", 3).beside(backward.pieces(3))
    assert simulate(finer).correct
    assert finer.share == Fraction(1, 18)


def test_double_tree_uses_every_rank_alike() -> None:
    """No rank has children in both trees, so none sends or adds more than once the message a way."""
    for ranks in range(3, 34):
        counts = count(build("all_reduce", "double_binary_tree", ranks))
        assert max(counts.sent) == (2 if ranks > 3 else Fraction(3, 2))
        assert max(counts.reduced) == 1
        schedule = build("broadcast", "double_binary_tree", ranks)
        for rank in range(1, ranks):
            senders = [any(t.outgoing for step in steps for t in step) for steps in schedule.programs[rank]]
            assert sum(senders) <= 1


def test_compositions_that_make_no_sense() -> None:
    ring = build("all_reduce", "ring", 4)
    with pytest.raises(ScheduleError, match="do not compose"):
        ring.then(build("all_reduce", "ring", 3))
    with pytest.raises(ScheduleError, match="do not compose"):
        ring.beside(build("all_gather", "ring", 4))
    with pytest.raises(ScheduleError, match="1 channels cannot be followed by one of 2"):
        ring.then(build("all_reduce", "double_binary_tree", 4))
    for groups in ([[0, 1, 2, 3], [3, 4, 5, 6]], [[0, 1, 2]]):
        with pytest.raises(ScheduleError, match="disjoint"):
            ring.within(groups, ranks=8, collective="all_reduce", cut=4, block=lambda _, b: b)


def test_pieces_refuse_a_step_whose_sends_would_come_after_its_receives() -> None:
    """Rank 1 posts a send that rank 2 is not ready for beside an addition that takes place a round earlier."""
    whole = (Block(-1, -1, 0),)
    empty: tuple[Block, ...] = ()
    schedule = Schedule(
        collective="all_reduce", algorithm="hand-made", ranks=4, root=0, cut=1,
        programs=(
            (((Transfer("send", 1, whole),),),),
            (((Transfer("recv", 0, whole, True), Transfer("send", 2, whole)),),),
            (((Transfer("recv", 3, empty),), (Transfer("recv", 1, whole, True),)),),
            (((Transfer("send", 2, empty),),),),
        ),
    )  # fmt: skip
    assert [m.round for m in match(schedule).messages] == [0, 0, 1]
    with pytest.raises(ScheduleError, match="cannot be pipelined"):
        schedule.pieces(2)
