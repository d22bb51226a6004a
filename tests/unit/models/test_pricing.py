"""Prices of schedules small enough to be worked out by hand."""

from __future__ import annotations

import pytest

from commbench.models import Link, Links, price
from commbench.schedules import Block, Message, ScheduleError, build, from_rounds

ALPHA, BETA, GAMMA, SIZE = 1e-5, 1e-9, 2e-10, 1e6
MOVE, ADD = SIZE * BETA, SIZE * GAMMA
NETWORK = Links(other_host=Link(latency_s=ALPHA, seconds_per_byte=BETA), reduce_seconds_per_byte=GAMMA)
HALF_DUPLEX = Links(other_host=Link(latency_s=ALPHA, seconds_per_byte=BETA, exchange_factor=2.0))
FAST = Link(latency_s=ALPHA / 10, seconds_per_byte=BETA / 10)


def both(exchange_factor: float = 1.0, **host: float) -> Links:
    slow = Link(latency_s=ALPHA, seconds_per_byte=BETA, exchange_factor=exchange_factor)
    return Links(same_host=FAST, other_host=slow, **host)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("collective", "algorithm", "ranks", "pieces", "seconds"),
    [
        ("broadcast", "ring", 2, 1, ALPHA + MOVE),
        ("broadcast", "ring", 4, 1, 3 * (ALPHA + MOVE)),
        ("broadcast", "ring", 4, 5, 7 * (ALPHA + MOVE / 5)),
        ("reduce", "ring", 3, 1, 2 * (ALPHA + MOVE + ADD)),
        ("all_reduce", "recursive_doubling", 2, 1, ALPHA + MOVE + ADD),
        ("gather", "binomial_tree", 4, 1, 2 * ALPHA + MOVE * 3 / 4),
        ("send_recv", "ring", 5, 1, ALPHA + MOVE),
        ("barrier", "dissemination", 5, 1, 3 * ALPHA),
        ("broadcast", "double_binary_tree", 2, 1, ALPHA + MOVE),  # both halves over the only link
    ],
)
def test_one_rank_a_host(collective: str, algorithm: str, ranks: int, pieces: int, seconds: float) -> None:
    schedule = build(collective, algorithm, ranks, 0, pieces)
    assert price(schedule, SIZE, tuple(range(ranks)), NETWORK) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.4, 2.0])
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_exchange_factor(factor: float, ranks: int) -> None:
    """Each rank sends and receives the message at once: a factor times the bytes, nothing where less than 1."""
    links = Links(other_host=Link(latency_s=ALPHA, seconds_per_byte=BETA, exchange_factor=factor))
    shift = price(build("send_recv", "ring", ranks), SIZE, tuple(range(ranks)), links)
    assert shift == pytest.approx(ALPHA + max(factor, 1.0) * MOVE, rel=1e-12)


def test_exchange_of_unequal_sizes_is_slow_only_while_both_move() -> None:
    """3 blocks one way and 1 the other: half duplex they share the side until the shorter is through."""
    blocks = tuple(Block(rank, -1, piece) for rank in (0, 1) for piece in range(3))
    exchange = from_rounds(
        "all_gather", "hand-made", 2, [[Message(1, 0, blocks[3:4]), Message(0, 1, blocks[:3])]], cut=3
    )
    assert price(exchange, 6e5, (0, 1), HALF_DUPLEX) == pytest.approx(ALPHA + 3e5 * BETA + 1e5 * BETA, rel=1e-12)


def test_ranks_of_a_host_share_its_nic() -> None:
    """A shift over ranks that alternate between two hosts: each NIC sends and receives two messages."""
    shift = build("send_recv", "ring", 4)
    assert price(shift, SIZE, (0, 1, 0, 1), both()) == pytest.approx(ALPHA + 2 * MOVE, rel=1e-12)
    assert price(shift, SIZE, (0, 0, 1, 1), both()) == pytest.approx(ALPHA + MOVE, rel=1e-12)
    assert price(shift, SIZE, (0, 1, 0, 1), both(2.0)) == pytest.approx(ALPHA + 4 * MOVE, rel=1e-12)


def test_ranks_of_a_host_share_the_host() -> None:
    """Messages inside a host take turns on what its cores can do; a message alone takes what it takes alone."""
    links = both(host_seconds_per_message=2e-6, host_seconds_per_byte=BETA)
    assert price(build("send_recv", "ring", 4), SIZE, (0, 0, 0, 0), links) == pytest.approx(
        4 * (2e-6 + MOVE), rel=1e-12
    )
    assert price(build("broadcast", "ring", 2), 10, (0, 0), links) == pytest.approx(2e-6 + 10 * BETA, rel=1e-12)
    cheap = both(host_seconds_per_message=1e-9)
    assert price(build("broadcast", "ring", 2), 10, (0, 0), cheap) == pytest.approx(ALPHA / 10 + BETA, rel=1e-12)


def test_a_shift_and_an_exchange_each_take_what_was_measured_of_them() -> None:
    link = Link(
        latency_s=ALPHA, seconds_per_byte=BETA, table=((SIZE, ALPHA + MOVE),), exchange=((SIZE, 1.9 * MOVE),),
        shift=((SIZE, 1.3 * MOVE),),
    )  # fmt: skip
    links = Links(other_host=link)
    for ranks, factor in ((2, 1.9), (3, 1.3), (5, 1.3)):
        shift = build("send_recv", "ring", ranks)
        assert price(shift, SIZE, tuple(range(ranks)), links) == pytest.approx(factor * MOVE, rel=1e-12)


def test_messages_that_meet_at_one_rank() -> None:
    """Three senders to one: the first message as if alone, each further one as was measured."""
    blocks = [(Block(rank, -1, 0),) for rank in range(4)]
    gather = from_rounds("gather", "linear", 4, [[Message(rank, 0, blocks[rank]) for rank in (1, 2, 3)]])
    link = Link(latency_s=ALPHA, seconds_per_byte=BETA, fan_in=((SIZE, 1.5 * MOVE),))
    assert price(gather, 4 * SIZE, (0, 1, 2, 3), Links(other_host=link)) == pytest.approx(ALPHA + 4 * MOVE, rel=1e-12)


def test_a_slow_host_slows_its_own_links() -> None:
    """A chain over four hosts of which the third takes four times as long to send and twice as long to receive."""
    links = Links(other_host=NETWORK.other_host, host_rates=((BETA, BETA), (BETA, BETA), (4 * BETA, 2 * BETA)))
    chain = build("broadcast", "ring", 4)
    assert price(chain, SIZE, (0, 1, 2, 3), links) == pytest.approx(3 * ALPHA + (1 + 2 + 4) * MOVE, rel=1e-12)
    half = Links(other_host=HALF_DUPLEX.other_host, host_rates=links.host_rates)
    # Hop 1 -> 2 goes at half the usual rate, 2 -> 3 at a quarter; at host 2 both wait for one another.
    shift = price(build("send_recv", "ring", 4), SIZE, (0, 1, 2, 3), half)
    assert 4 * MOVE + ALPHA < shift <= 8 * MOVE + ALPHA


def test_a_nic_with_several_ranks_behind_it() -> None:
    """Two ranks a host, each to its counterpart: both messages take their turn at what was measured of such a NIC."""
    links = Links(same_host=FAST, other_host=NETWORK.other_host, nic=((SIZE, 1.25 * MOVE),))
    shift = build("send_recv", "ring", 4)
    assert price(shift, SIZE, (0, 1, 0, 1), links) == pytest.approx(ALPHA + 2 * 1.25 * MOVE, rel=1e-12)
    wide = Links(
        same_host=FAST, other_host=NETWORK.other_host, nic=((SIZE, 0.5 * MOVE),), nic_seconds_per_byte=BETA / 2
    )
    assert price(shift, SIZE, (0, 1, 0, 1), wide) == pytest.approx(ALPHA + MOVE, rel=1e-12)


def test_overheads_of_small_messages_take_turns() -> None:
    link = Link(latency_s=ALPHA, overhead_s=ALPHA / 4, seconds_per_byte=0.0)
    scatter = from_rounds("scatter", "linear", 4, [[Message(0, rank, (Block(0, rank, 0),)) for rank in (1, 2, 3)]])
    assert price(scatter, 32, (0, 1, 2, 3), Links(other_host=link)) == pytest.approx(ALPHA * 1.5, rel=1e-12)


def test_latency_does_not_occupy() -> None:
    """Two messages posted together to different ranks: the bytes take turns, the latencies do not."""
    blocks = [(Block(0, rank, 0),) for rank in range(3)]
    scatter = from_rounds("scatter", "linear", 3, [[Message(0, 1, blocks[1]), Message(0, 2, blocks[2])]])
    assert price(scatter, 3 * SIZE, (0, 1, 2), NETWORK) == pytest.approx(ALPHA + 2 * MOVE, rel=1e-12)


def test_additions_of_a_rank_take_turns() -> None:
    whole = (Block(-1, -1, 0),)
    reduce = from_rounds("reduce", "linear", 3, [[Message(1, 0, whole, True), Message(2, 0, whole, True)]])
    slow_adder = Links(other_host=NETWORK.other_host, reduce_seconds_per_byte=10 * BETA)
    assert price(reduce, SIZE, (0, 1, 2), slow_adder) == pytest.approx(ALPHA + MOVE + 20 * MOVE, rel=1e-12)


def test_table_of_message_times_is_met_exactly() -> None:
    link = Link(latency_s=ALPHA, seconds_per_byte=BETA, table=((8, ALPHA), (SIZE, 5 * MOVE)))
    assert price(build("broadcast", "ring", 2), SIZE, (0, 1), Links(other_host=link)) == pytest.approx(5 * MOVE)


def test_repeated_operations() -> None:
    """A chain of three: the middle rank receives and sends each broadcast before it turns to the next."""
    chain = build("broadcast", "ring", 3)
    hop = ALPHA + MOVE
    assert price(chain, SIZE, (0, 1, 2), NETWORK, repeats=1) == pytest.approx(2 * hop)
    assert price(chain, SIZE, (0, 1, 2), NETWORK, repeats=4) == pytest.approx(4 * 2 * hop)


def test_an_operation_ends_with_the_last_channel_of_the_rank() -> None:
    """Two chains of one message each on channels of their own: the second operation waits for both."""
    tree = build("broadcast", "double_binary_tree", 2)
    assert tree.channels == 2
    assert price(tree, SIZE, (0, 1), NETWORK, repeats=3) == pytest.approx(3 * (ALPHA + MOVE))


def test_host_numbers_are_only_names() -> None:
    ring = build("all_reduce", "ring", 4)
    assert price(ring, SIZE, (7, 7, 3, 3), both()) == price(ring, SIZE, (0, 0, 1, 1), both())


def test_refuses() -> None:
    ring = build("all_reduce", "ring", 4)
    with pytest.raises(ScheduleError, match="4 ranks cannot run on 2"):
        price(ring, SIZE, (0, 1), NETWORK)
    with pytest.raises(ValueError, match="no link inside a host"):
        price(ring, SIZE, (0, 0, 1, 1), NETWORK)
