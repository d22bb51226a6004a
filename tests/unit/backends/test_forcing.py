"""What libraries can be told, and that what they are then said to do is what their sources say, message by message."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest

from commbench.backends.forcing import (
    OPEN_MPI,
    Chosen,
    check_forced,
    model_of,
    names,
    nccl_environment,
    note_of,
    open_mpi_settings,
    read_back,
    why_not,
)
from commbench.cases import Case
from commbench.collectives import COLLECTIVES
from commbench.schedules import ALGORITHMS
from commbench.schedules.matching import match

Sent = Counter[tuple[int, int, int, Fraction]]  # (round, source, target, share of the message)


def case(collective: str, algorithm: str = "library", *, ranks: int, backend: str = "mpi", **fields: Any) -> Case:
    size = fields.pop("bytes", 960 * ranks) if COLLECTIVES[collective].sized else 0
    op = "sum" if COLLECTIVES[collective].reduces else None
    return Case(
        collective=collective, algorithm=algorithm, backend=backend, bytes=size, requested_bytes=size, ranks=ranks,
        nodes=1, reduce_op=op, **fields,
    )  # fmt: skip


def sent(one: Case, settings: dict[str, str] | None = None) -> Sent | None:
    """The messages that a case is said to be, named by the ranks that send them; None where it is not known."""
    known = model_of(one.backend, one, settings or {})
    if known is None:
        return None
    schedule, players = known.played(tuple(range(one.ranks)), one.root)
    return Counter(
        (m.round, players[m.source], players[m.target], schedule.share * len(m.blocks))
        for m in match(schedule).messages
    )


# -- the same, written from the libraries' sources ------------------------------------------------


def rabenseifner(n: int) -> Sent:
    """Step k: the partner differs in bit k; half of the window goes; the all-gather takes the steps backwards."""
    bits = n.bit_length() - 1
    halving = [(k, r, r ^ 1 << k, Fraction(1, 2 << k)) for k in range(bits) for r in range(n)]
    return Counter(halving + [(2 * bits - 1 - k, r, peer, share) for k, r, peer, share in halving])


def gloo_ring(n: int) -> Sent:
    """Everything goes to the rank before, in 2(n-1) turns."""
    return Counter((turn, r, (r - 1) % n, Fraction(1, n)) for turn in range(2 * (n - 1)) for r in range(n))


def reduce_chain(n: int, root: int) -> Sent:
    """From the rank before the root backwards round to the root."""
    return Counter((turn, (root - 1 - turn) % n, (root - 2 - turn) % n, Fraction(1)) for turn in range(n - 1))


def halving(n: int, power: int) -> Sent:
    """The first 2r ranks pair up: even ones hand everything over and get their block in the end. Without rounds."""
    rest = n - power
    real = [2 * v + 1 if v < rest else v + rest for v in range(power)]
    found = [(2 * v, 2 * v + 1, Fraction(1)) for v in range(rest)]
    found += [(2 * v + 1, 2 * v, Fraction(1, n)) for v in range(rest)]
    distance = power // 2
    while distance:
        for v in range(power):
            start = (v ^ distance) // distance * distance
            blocks = sum(2 if w < rest else 1 for w in range(start, start + distance))
            found.append((real[v], real[v ^ distance], Fraction(blocks, n)))
        distance //= 2
    return Counter((-1, *message) for message in found)


def without_rounds(messages: Sent | None) -> Sent:
    assert messages is not None
    return Counter((-1, source, target, share) for _, source, target, share in messages.elements())


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_rabenseifner_exchanges_halves_between_neighbours_first(n: int) -> None:
    assert sent(case("all_reduce", "rabenseifner", ranks=n)) == rabenseifner(n)


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_gloo_sends_to_the_rank_before(n: int) -> None:
    assert sent(case("all_reduce", ranks=n, backend="gloo")) == gloo_ring(n)
    assert sent(case("reduce_scatter", ranks=n, backend="gloo")) == gloo_ring(n)


@pytest.mark.parametrize(("n", "root"), [(2, 0), (5, 0), (5, 3)])
def test_a_reducing_pipeline_goes_backwards_to_the_root(n: int, root: int) -> None:
    assert sent(case("reduce", "pipeline", ranks=n, root=root)) == reduce_chain(n, root)


@pytest.mark.parametrize(("n", "power"), [(4, 4), (3, 2), (6, 4), (7, 4)])
def test_recursive_halving_serves_the_ranks_that_sit_out(n: int, power: int) -> None:
    assert without_rounds(sent(case("reduce_scatter", "recursive_halving", ranks=n))) == halving(n, power)


# -- when a name means something else --------------------------------------------------------------


def algorithm(*args: Any, settings: dict[str, str] | None = None, **fields: Any) -> str | None:
    one = case(*args, **fields)
    known = model_of(one.backend, one, settings or {})
    return known and (known.algorithm if known.pieces == 1 else f"{known.algorithm}/{known.pieces}")


def test_what_depends_on_ranks_and_elements() -> None:
    assert algorithm("all_reduce", "ring", ranks=4, bytes=16) == "ring"
    assert algorithm("all_reduce", "ring", ranks=4, bytes=12) == "recursive_doubling"
    assert algorithm("all_reduce", "rabenseifner", ranks=6) is None
    assert algorithm("all_gather", "recursive_doubling", ranks=8) == "recursive_doubling"
    assert algorithm("all_gather", "recursive_doubling", ranks=6) == "bruck"
    assert [algorithm("all_gather", "neighbor", ranks=n) for n in (4, 5)] == [None, "ring"]
    assert [algorithm("all_to_all", "two_proc", ranks=n) for n in (2, 3)] == ["pairwise", None]
    assert [algorithm("broadcast", "binomial", ranks=n) for n in (2, 4)] == ["binomial_tree", None]
    assert algorithm("all_reduce", ranks=4, backend="gloo", bytes=28) is None
    assert algorithm("send_recv", ranks=4) == algorithm("send_recv", ranks=4, backend="nccl") == "ring"
    assert algorithm("all_reduce", ranks=4) is None


def test_segments_are_pieces_where_they_are_equal() -> None:
    size = "coll_tuned_bcast_algorithm_segmentsize"
    for segment, expected in (("0", "ring"), ("1024", "ring/4"), ("4096", "ring"), ("3000", None), ("2", "ring")):
        assert algorithm("broadcast", "pipeline", ranks=4, bytes=4096, settings={size: segment}) == expected
    size = "coll_tuned_allreduce_algorithm_segmentsize"
    # A ring of four sends parts of 1024 B: cut into segments only if those are no longer.
    for segment, expected in (("0", "ring"), ("1024", None), ("1028", "ring")):
        one = case("all_reduce", "segmented_ring", ranks=4, bytes=4096)
        assert algorithm("all_reduce", "segmented_ring", ranks=4, bytes=4096, settings={size: segment}) == expected
        assert (note_of("mpi", one, {size: segment}) is None) == (expected is None)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_every_model_can_be_built(n: int) -> None:
    found = set()
    for collective in COLLECTIVES:
        for name in ("library", *names("mpi", collective)):
            for backend in ("mpi", "gloo"):
                one = case(collective, name, ranks=n, backend=backend, root=n - 1)
                if sent(one):
                    known = model_of(backend, one, {})
                    assert known is not None
                    assert known.algorithm in ALGORITHMS[known.collective]
                    found.add((backend, collective, name))
    assert {("mpi", "all_reduce", "ring"), ("gloo", "barrier", "library"), ("mpi", "gather", "binomial")} <= found


def test_notes_say_what_is_done_instead() -> None:
    def note(*args: Any, **fields: Any) -> str | None:
        return note_of("mpi", case(*args, **fields), {})

    assert note("all_reduce", "ring", ranks=4) is None
    assert note("all_reduce", "ring", ranks=4, bytes=8) == (
        "with fewer elements than ranks Open MPI takes recursive_doubling"
    )
    assert note("all_gather", "recursive_doubling", ranks=6) == "for 6 ranks, no power of two, Open MPI takes bruck"
    assert note("broadcast", "split_binary_tree", ranks=4, bytes=4) is not None
    assert note("all_reduce", ranks=4) is None


# -- names -----------------------------------------------------------------------------------------


def test_what_libraries_are_told() -> None:
    assert open_mpi_settings({"all_reduce": "ring", "reduce_scatter": "ring"}) == {
        "coll_tuned_priority": "100", "coll_tuned_use_dynamic_rules": "true", "coll_tuned_allreduce_algorithm": "ring",
        "coll_tuned_reduce_scatter_block_algorithm": "ring",
    }  # fmt: skip
    assert nccl_environment({"all_reduce": "nvls_tree:ll128"}, False) == {
        "NCCL_ALGO": "NVLSTree",
        "NCCL_PROTO": "LL128",
    }
    assert nccl_environment({"all_gather": "pat", "reduce_scatter": "pat"}, True) == {
        "NCCL_ALGO": "allgather:PAT;reducescatter:PAT"
    }
    assert nccl_environment({"reduce": ":simple"}, False) == {"NCCL_PROTO": "Simple"}


def test_names_of_nccl() -> None:
    assert {"ring", "ring:ll", ":ll", "tree:simple", "collnet_direct"} <= set(names("nccl", "all_reduce"))
    assert set(names("nccl", "broadcast")) == {"ring"} | {
        f"{a}:{p}" for a in ("", "ring") for p in ("ll", "ll128", "simple")
    }
    assert names("nccl_raw", "all_gather") == names("nccl", "all_gather")
    assert names("nccl_raw", "gather") == names("nccl_raw", "all_to_all") == ("grouped",)
    assert names("nccl", "gather") == names("gloo", "all_reduce") == names("mpi", "send_recv") == ()
    assert set(OPEN_MPI) == set(COLLECTIVES) - {"send_recv"}


@pytest.mark.parametrize(
    ("name", "backends", "collectives", "says"),
    [
        ("rnig", ("mpi",), ("all_reduce",), "unknown algorithm 'rnig': did you mean 'ring'"),
        (
            "ring",
            ("gloo",),
            ("all_reduce",),
            "can be forced on mpi, nccl and nccl_raw only, not on gloo: add --backend mpi",
        ),
        ("tree", ("mpi", "gloo"), ("all_reduce",), "can be forced on nccl and nccl_raw only, not on mpi or gloo"),
        ("pairwise", ("mpi",), ("all_reduce",), "'pairwise' is one of all_to_all, not of all_reduce"),
    ],
)
def test_names_that_are_refused(name: str, backends: tuple[str, ...], collectives: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        check_forced(name, backends, collectives, ("library",))
    assert "\n" not in str(error.value)


def test_a_name_that_one_backend_has_is_enough() -> None:
    assert check_forced("ring", ("gloo", "mpi"), ("all_reduce", "barrier"), ()) == "ring"
    assert why_not("gloo", "all_reduce", "ring") == "gloo cannot be told which algorithm to use"
    assert why_not("mpi", "barrier", "ring") == "mpi has no 'ring' for barrier"
    assert why_not("nccl", "gather", "ring") == "nccl cannot be told by which algorithm to do gather"
    assert why_not("mpi", "all_reduce", "ring") is None


# -- what was read back ----------------------------------------------------------------------------


def test_what_nccl_took_is_held_against_what_was_asked() -> None:
    ring, simple = Chosen("ring", "ll", 2), Chosen("ring", "simple", 2)
    assert read_back("ring", [ring]) == (ring, None)
    assert read_back("ring", [ring, simple]) == (Chosen("ring", None, 2), None)
    assert read_back(":ll", [Chosen("tree", "ll", 4)]) == (Chosen("tree", "ll", 4), None)
    assert read_back("ring:ll", [simple]) == (simple, "asked for ring:ll, NCCL took ring:simple")
    assert read_back("tree", [ring, Chosen("tree", "ll", 1)]) == (
        Chosen(None, "ll", None), "asked for tree, NCCL took ring:ll"
    )  # fmt: skip
    assert read_back("ring", []) == (Chosen(), "asked for ring; NCCL's log does not say what it took")


def test_of_what_nobody_asked_for_it_is_only_told_what_was_taken() -> None:
    assert read_back("library", [Chosen("nvls", "simple", 16)]) == (Chosen("nvls", "simple", 16), None)
    assert read_back("library", []) == (Chosen(), None)


def test_what_open_mpi_took_is_held_against_what_was_asked() -> None:
    why_not_tuned = pytest.importorskip("commbench.backends.mpi").why_not_tuned
    good = {
        "coll_tuned_allreduce_algorithm": "ring", "coll_tuned_use_dynamic_rules": "true", "coll_tuned_priority": "100"
    }  # fmt: skip
    assert why_not_tuned("ring", "allreduce", good) is None
    assert why_not_tuned("ring", "bcast", {"coll": "^tuned"}) == (
        "asked for 'ring', but this Open MPI has no coll_tuned (coll is '^tuned'), or does not tell its settings"
    )
    for changed, says in (
        ({"coll_tuned_allreduce_algorithm": "ignore"}, "Open MPI took 'ignore' for allreduce"),
        ({"coll_tuned_use_dynamic_rules": "false"}, "use_dynamic_rules is off"),
        ({"coll_hcoll_priority": "120"}, "others come before coll_tuned: coll_hcoll_priority"),
    ):
        assert says in (why_not_tuned("ring", "allreduce", good | changed) or "")
