"""The names of commbench's own algorithms, the pieces they use, and several channels made one."""

from __future__ import annotations

import pytest

from commbench.collectives import COLLECTIVES
from commbench.schedules import ALGORITHMS, HIERARCHICAL, PIPELINED, Block, Transfer, build, count
from commbench.schedules.catalogue import pieces_for
from commbench.schedules.own import check_own, own_names, own_pieces, own_schedule, parse_own, why_not_own
from commbench.schedules.simulation import Verdict, simulate

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("size", "pieces"), [(0, 1), (8, 1), (255 * KIB, 1), (256 * KIB, 2), (MIB, 8), (8 * MIB, 64), (1 << 30, 64)]
)
def test_pieces_are_of_128_kib_but_no_more_than_64(size: int, pieces: int) -> None:
    assert {pieces_for(*pair, size) for pair in PIPELINED} == {pieces}
    assert pieces_for("all_reduce", "ring", size) == 1


def test_the_name_may_say_how_many_pieces() -> None:
    assert parse_own("own:ring") == ("ring", None)
    assert parse_own("own:double_binary_tree/1024") == ("double_binary_tree", 1024)
    assert own_pieces("broadcast", "own:ring", MIB) == 8
    assert own_pieces("broadcast", "own:ring/3", MIB) == 3
    assert own_schedule("broadcast", "own:ring/3", MIB, (0, 0, 0), 1) is build("broadcast", "ring", 3, 1, 3)
    assert own_schedule("broadcast", "own:ring", MIB, (0, 0, 0)) is build("broadcast", "ring", 3, 0, 8)


@pytest.mark.parametrize(
    "name", ["own:", "own:ring/", "own:ring/0", "own:ring/x", "own:ring/08", "own:Ring", "own:a b"]
)
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="is not an algorithm: write own:NAME"):
        parse_own(name)


def test_too_many_pieces() -> None:
    with pytest.raises(ValueError, match="'own:ring/1025' has too many pieces: 1024 at most"):
        parse_own("own:ring/1025")


def test_names_are_checked_against_the_collectives() -> None:
    assert own_names(("barrier", "send_recv")) == ("own:dissemination", "own:ring")
    assert check_own("own:bruck/2", ("all_reduce", "all_gather")) == "own:bruck/2"
    with pytest.raises(ValueError, match="unknown algorithm 'own:brook': did you mean 'own:bruck'"):
        check_own("own:brook", ("all_gather",))
    with pytest.raises(
        ValueError, match="no own:ring for barrier, it is for all_reduce, all_gather.*: known are own:dissemination$"
    ):
        check_own("own:ring", ("barrier",))


def test_why_a_collective_has_no_such_algorithm() -> None:
    assert why_not_own("barrier", "own:ring", (0, 0)) == "barrier has no ring: known are own:dissemination"
    assert why_not_own("reduce", "own:hierarchical", (0, 0)) == "a hierarchical algorithm needs two hosts or more"
    assert why_not_own("reduce", "own:hierarchical/4", (0, 0, 1, 1)) is None


@pytest.mark.parametrize("pieces", [1, 2, 5])
@pytest.mark.parametrize(("collective", "algorithm"), sorted({pair for pair in PIPELINED if pair not in HIERARCHICAL}))
def test_channels_made_one_compute_the_same_with_the_same_messages(
    collective: str, algorithm: str, pieces: int
) -> None:
    for ranks in range(2, 20):
        root = ranks - 1 if COLLECTIVES[collective].rooted else 0
        schedule = build(collective, algorithm, ranks, root, pieces)
        one = schedule.merged()
        assert one.channels == 1
        assert simulate(one) == Verdict(correct=True)
        assert count(one) == count(schedule)  # as many rounds, too: the trees do not wait for each other


def test_one_channel_is_left_as_it_is() -> None:
    ring = build("all_reduce", "ring", 5)
    assert ring.merged() is ring


def test_a_round_of_two_channels_is_one_step() -> None:
    """Two ranks, two trees: both halves go up at once, and then both come down."""
    merged = build("all_reduce", "double_binary_tree", 2).merged()
    left, right = (Block(-1, -1, 0),), (Block(-1, -1, 1),)
    assert merged.programs[1] == (
        (
            (Transfer("send", 0, left), Transfer("send", 0, right)),
            (Transfer("recv", 0, left), Transfer("recv", 0, right)),
        ),
    )


def test_every_own_schedule_has_one_channel() -> None:
    for collective, known in ALGORITHMS.items():
        for algorithm in known:
            schedule = own_schedule(collective, f"own:{algorithm}", MIB, (0, 0, 1, 1))
            assert (schedule.collective, schedule.algorithm, schedule.channels) == (collective, algorithm, 1)
