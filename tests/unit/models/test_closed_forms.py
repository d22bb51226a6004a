"""The textbooks' formulas, the counts of the schedules and their prices agree."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from commbench.models import Link, Links, closed_form, price
from commbench.schedules import ALGORITHMS, HIERARCHICAL, PIPELINED, build, count

ALPHA, BETA, GAMMA, SIZE = 1e-5, 1e-9, 3e-10, 1e6
LINKS = Links(other_host=Link(latency_s=ALPHA, seconds_per_byte=BETA), reduce_seconds_per_byte=GAMMA)
PAIRS = [(name, one) for name, known in ALGORITHMS.items() for one in known if (name, one) not in HIERARCHICAL]
TREES = [pair for pair in PAIRS if pair[1] == "double_binary_tree"]


@pytest.mark.parametrize("n", [2, 4, 8, 16])
@pytest.mark.parametrize(
    ("collective", "algorithm", "rounds", "moved", "reduced"),
    [
        ("all_reduce", "ring", lambda p: 2 * (p - 1), lambda p: 2 * (p - 1) / p, lambda p: (p - 1) / p),
        ("all_reduce", "recursive_doubling", math.log2, math.log2, math.log2),
        (
            "all_reduce",
            "halving_doubling",
            lambda p: 2 * math.log2(p),
            lambda p: 2 * (p - 1) / p,
            lambda p: (p - 1) / p,
        ),
        ("all_reduce", "binomial_tree", lambda p: 2 * math.log2(p), lambda p: 2 * math.log2(p), math.log2),
        ("all_gather", "ring", lambda p: p - 1, lambda p: (p - 1) / p, lambda p: 0),
        ("all_gather", "recursive_doubling", math.log2, lambda p: (p - 1) / p, lambda p: 0),
        ("all_gather", "bruck", math.log2, lambda p: (p - 1) / p, lambda p: 0),
        ("reduce_scatter", "ring", lambda p: p - 1, lambda p: (p - 1) / p, lambda p: (p - 1) / p),
        ("reduce_scatter", "pairwise", lambda p: p - 1, lambda p: (p - 1) / p, lambda p: (p - 1) / p),
        ("reduce_scatter", "halving_doubling", math.log2, lambda p: (p - 1) / p, lambda p: (p - 1) / p),
        ("all_to_all", "pairwise", lambda p: p - 1, lambda p: (p - 1) / p, lambda p: 0),
        ("all_to_all", "bruck", math.log2, lambda p: math.log2(p) / 2, lambda p: 0),
        ("broadcast", "binomial_tree", math.log2, math.log2, lambda p: 0),
        ("broadcast", "ring", lambda p: p - 1, lambda p: p - 1, lambda p: 0),
        ("reduce", "binomial_tree", math.log2, math.log2, math.log2),
        ("scatter", "binomial_tree", math.log2, lambda p: (p - 1) / p, lambda p: 0),
        ("gather", "binomial_tree", math.log2, lambda p: (p - 1) / p, lambda p: 0),
        ("send_recv", "ring", lambda p: 1, lambda p: 1, lambda p: 0),
        ("barrier", "dissemination", math.log2, lambda p: 0, lambda p: 0),
    ],
)
def test_textbook_and_price(collective, algorithm, rounds, moved, reduced, n: int) -> None:  # type: ignore[no-untyped-def]
    """The table of the literature for powers of two, against the closed form and the simulated price."""
    form = closed_form(collective, algorithm, n)
    assert (form.rounds, form.moved, form.reduced) == (rounds(n), moved(n), reduced(n))
    seconds = rounds(n) * ALPHA + moved(n) * SIZE * BETA + reduced(n) * SIZE * GAMMA
    assert form.seconds(SIZE, ALPHA, BETA, GAMMA) == pytest.approx(seconds, rel=1e-12)
    assert price(build(collective, algorithm, n), SIZE, tuple(range(n)), LINKS) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(("collective", "algorithm"), [pair for pair in PAIRS if pair not in TREES])
def test_form_is_the_price_for_any_number_of_ranks(collective: str, algorithm: str) -> None:
    for pieces in (1, 2, 7) if (collective, algorithm) in PIPELINED else (1,):
        for n in range(2, 20):
            seconds = closed_form(collective, algorithm, n, pieces).seconds(SIZE, ALPHA, BETA, GAMMA)
            schedule = build(collective, algorithm, n, 0, pieces)
            assert price(schedule, SIZE, tuple(range(n)), LINKS) == pytest.approx(seconds, rel=1e-9), (n, pieces)


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_form_counts_the_rounds(collective: str, algorithm: str) -> None:
    for pieces in (1, 4) if (collective, algorithm) in PIPELINED else (1,):
        for n in range(2, 34):
            schedule = build(collective, algorithm, n, 0, pieces)
            assert closed_form(collective, algorithm, n, pieces).rounds == count(schedule).rounds, (n, pieces)


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [
        ("all_reduce", "ring"),
        ("all_gather", "ring"),
        ("all_gather", "bruck"),
        ("reduce_scatter", "ring"),
        ("reduce_scatter", "pairwise"),
        ("all_to_all", "pairwise"),
        ("all_to_all", "bruck"),
        ("send_recv", "ring"),
    ],
)
def test_form_counts_the_bytes_where_ranks_are_alike(collective: str, algorithm: str) -> None:
    for n in range(2, 34):
        form, counts = closed_form(collective, algorithm, n), count(build(collective, algorithm, n))
        assert set(counts.sent) == {form.moved}
        assert set(counts.reduced) == {form.reduced}


@pytest.mark.parametrize("algorithm", ["recursive_doubling", "halving_doubling"])
def test_form_counts_the_bytes_of_powers_of_two(algorithm: str) -> None:
    for n in (2, 4, 8, 16, 32):
        form, counts = closed_form("all_reduce", algorithm, n), count(build("all_reduce", algorithm, n))
        assert (set(counts.sent), set(counts.reduced)) == ({form.moved}, {form.reduced})


@pytest.mark.parametrize(("collective", "algorithm"), TREES)
def test_double_tree_form_is_near_the_price_and_not_below(collective: str, algorithm: str) -> None:
    for n in (2, 3, 4, 7, 12, 16, 25, 33):
        for pieces in (1, 8, 64):
            seconds = closed_form(collective, algorithm, n, pieces).seconds(SIZE, ALPHA, BETA, GAMMA)
            ratio = price(build(collective, algorithm, n, 0, pieces), SIZE, tuple(range(n)), LINKS) / seconds
            assert 0.6 < ratio < 1 + 1e-9, (n, pieces)


def test_double_tree_all_reduce_tends_to_twice_the_message() -> None:
    """Sanders, Speck and Träff: 2mβ + O(log n) once the message is large and the pieces many."""
    free = Links(other_host=Link(latency_s=0.0, seconds_per_byte=BETA))
    schedule = build("all_reduce", "double_binary_tree", 16, 0, 256)
    assert price(schedule, SIZE, tuple(range(16)), free) == pytest.approx(2 * SIZE * BETA, rel=0.05)
    assert closed_form("all_reduce", "double_binary_tree", 16, 10**6).moved == pytest.approx(2, rel=1e-4)


def test_three_ranks_by_halving() -> None:
    """Rank 0 hands over m, the pair exchanges m/2 twice, rank 0 gets m: 4α + 3mβ + 3/2 mγ."""
    form = closed_form("all_reduce", "halving_doubling", 3)
    assert (form.rounds, form.moved, form.reduced) == (4, Fraction(3), Fraction(3, 2))


def test_unknown_form() -> None:
    with pytest.raises(ValueError, match="did you mean 'all_reduce:ring'"):
        closed_form("all_reduce", "rings", 4)
