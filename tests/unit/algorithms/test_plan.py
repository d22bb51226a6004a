"""What a rank does for a schedule, written out by hand for small ones."""

from __future__ import annotations

from commbench.algorithms.plan import Copy, Exchange, Mail, Plan, Reduce, Span, make_plan
from commbench.schedules import build


def exchange(send: Span | None, to: int, receive: Span | None, source: int, tag: int = 1) -> Exchange:
    sends = (Mail(send, to, tag),) if send else ()
    receives = (Mail(receive, source, tag),) if receive else ()
    return Exchange(sends, receives)


def test_a_ring_reads_its_input_once_and_never_writes_it() -> None:
    """Two ranks, five elements in halves of two and three; rank 0 adds the second half and passes the sum on.

    The sum goes straight to the output and the input is not copied first; the other half arrives where it is to be.
    """
    assert make_plan(build("all_reduce", "ring", 2), 0, 5) == Plan(
        actions=(
            exchange(Span("input", 2, 5), 1, Span("staging", 0, 2), 1),
            Reduce(Span("output", 0, 2), Span("input", 0, 2), Span("staging", 0, 2)),
            exchange(Span("output", 0, 2), 1, Span("output", 2, 5), 1, tag=2),
        ),
        sizes={"input": 5, "output": 5, "scratch": 0, "staging": 64},
        given=Span("input", 0, 5),
        taken=Span("output", 0, 5),
    )


def test_in_place_there_is_one_buffer() -> None:
    plan = make_plan(build("all_reduce", "ring", 2), 0, 5, (5, slice(0, 5), slice(0, 5)))
    assert plan.given == plan.taken == Span("output", 0, 5)
    assert plan.sizes == {"input": 0, "output": 5, "scratch": 0, "staging": 64}
    assert plan.actions[1] == Reduce(Span("output", 0, 2), Span("output", 0, 2), Span("staging", 0, 2))


def test_own_block_is_copied_before_it_is_needed() -> None:
    """Three ranks; Bruck's second round sends rank 1's block and, from round one, rank 2's: side by side by then."""
    plan = make_plan(build("all_gather", "bruck", 3), 1, 4)
    assert plan.actions == (
        Copy(Span("output", 4, 8), Span("input", 0, 4)),
        exchange(Span("output", 4, 8), 0, Span("output", 8, 12), 2),
        exchange(Span("output", 4, 8), 2, Span("output", 0, 4), 0),
    )


def test_what_does_not_lie_side_by_side_is_packed_and_unpacked_as_one_message() -> None:
    """Four ranks: in round two rank 3 passes on its own block and rank 0's, and gets those of 1 and 2."""
    plan = make_plan(build("all_gather", "bruck", 4), 3, 10)
    assert plan.actions[2:] == (
        Copy(Span("staging", 0, 10), Span("output", 30, 40)),
        Copy(Span("staging", 10, 20), Span("output", 0, 10)),
        exchange(Span("staging", 0, 20), 1, Span("output", 10, 30), 1),
    )
    # What comes in pieces that are apart is received beyond what is being sent.
    plan = make_plan(build("all_gather", "bruck", 4), 1, 10)
    assert plan.actions[2:] == (
        exchange(Span("output", 10, 30), 3, Span("staging", 0, 20), 3),
        Copy(Span("output", 30, 40), Span("staging", 0, 10)),
        Copy(Span("output", 0, 10), Span("staging", 10, 20)),
    )


def test_what_is_only_passed_on_lives_in_scratch_memory() -> None:
    """A chain of three ends at rank 0: rank 2, in the middle, adds its input to what comes and keeps no result."""
    plan = make_plan(build("reduce", "ring", 3), 2, 4)
    assert plan.actions == (
        Exchange((), (Mail(Span("staging", 0, 4), 1, 1),)),
        Reduce(Span("scratch", 0, 4), Span("input", 0, 4), Span("staging", 0, 4)),
        Exchange((Mail(Span("scratch", 0, 4), 0, 1),), ()),
    )
    assert plan.sizes == {"input": 4, "output": 0, "scratch": 4, "staging": 64}


def test_in_place_what_a_rank_adds_up_for_others_stays_in_its_input() -> None:
    plan = make_plan(build("reduce_scatter", "ring", 3), 0, 2, (6, slice(0, 6), slice(0, 2)))
    # Block 2 leaves first; block 1 is added to and leaves; block 0 is added to and stays.
    staging = Span("staging", 0, 2)
    assert plan.actions == (
        exchange(Span("output", 4, 6), 1, staging, 2),
        Reduce(Span("output", 2, 4), Span("output", 2, 4), staging),
        exchange(Span("output", 2, 4), 1, staging, 2, tag=2),
        Reduce(Span("output", 0, 2), Span("output", 0, 2), staging),
    )
    assert plan.sizes["scratch"] == 0


def test_pieces_without_elements_are_not_sent() -> None:
    """One element is the last of four pieces: rank 0 sends its own, later the sum comes and is passed on."""
    plan = make_plan(build("all_reduce", "ring", 4), 0, 1)
    assert plan.actions == (
        exchange(Span("input", 0, 1), 1, None, 3),
        exchange(None, 1, Span("output", 0, 1), 3),
        exchange(Span("output", 0, 1), 1, None, 3, tag=2),
    )


def test_a_barrier_has_empty_messages() -> None:
    plan = make_plan(build("barrier", "dissemination", 3), 0, 0)
    empty = Span("staging", 0, 0)
    assert plan.actions == (exchange(empty, 1, empty, 2), exchange(empty, 2, empty, 1))
    assert set(plan.sizes.values()) == {0}
