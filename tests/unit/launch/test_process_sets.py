"""Which processes are started for which cases, and what a launcher's ranks can be asked for."""

from __future__ import annotations

from typing import Any

import pytest

from commbench.cases import Layout, Sweep
from commbench.launch.runnable import NotRunnable, forced_alone
from commbench.launch.sets import ProcessSet, process_sets
from commbench.launch.variants import Variant

LAYOUT = Layout(hosts=("here", "here"))


def sets(**fields: Any) -> list[tuple[tuple[str, ...], str | None, set[str]]]:
    """(backends, forced, algorithms) of each set; every case is in exactly one."""
    sweep = Sweep(**{"collectives": ("all_reduce", "barrier"), "sizes": (64,), "timings": ("isolated",), **fields})
    cases = sweep.expand(LAYOUT)
    found = process_sets(sweep.backends, cases)
    assert sorted(c.case_id for one in found for c in one.cases) == sorted(c.case_id for c in cases)
    return [(one.backends, one.forced, {case.algorithm for case in one.cases}) for one in found]


def test_backends_that_start_alike_share_processes() -> None:
    assert sets(backends=("gloo", "mpi", "nccl")) == [
        (("gloo", "nccl"), None, {"library"}), (("mpi",), None, {"library"})
    ]  # fmt: skip


def test_every_forced_algorithm_has_processes_of_its_own() -> None:
    found = sets(backends=("gloo", "mpi"), algorithms=("library", "ring", "own:ring", "bruck"))
    assert found == [
        (("gloo",), None, {"library", "own:ring", "ring", "bruck"}),  # the last two to be skipped
        (("mpi",), None, {"library", "own:ring", "ring", "bruck"}),  # barrier has no ring, all_reduce no bruck
        (("mpi",), "ring", {"ring"}),
        (("mpi",), "bruck", {"bruck"}),
    ]


def test_every_variant_has_processes_of_its_own_and_one_of_a_backend_no_others() -> None:
    sweep = Sweep(collectives=("all_reduce",), sizes=(64,), timings=("isolated",), backends=("gloo", "nccl", "mpi"))
    cases = sweep.expand(LAYOUT)
    plain, tcp = Variant(name="default"), Variant(name="tcp", settings={"OMPI_MCA_btl": "self,tcp"})
    found = process_sets(sweep.backends, cases, (plain, tcp))
    assert [(one.backends, one.variant.name) for one in found] == [
        (("gloo", "nccl"), "default"), (("mpi",), "default"), (("gloo", "nccl"), "tcp"), (("mpi",), "tcp"),
    ]  # fmt: skip
    assert [one.title for one in found[1:3]] == ["mpi, variant default", "gloo, nccl, variant tcp"]
    ring = Variant(name="ring", settings={"NCCL_ALGO": "Ring"}, backends=("nccl",))
    found = process_sets(sweep.backends, cases, (plain, ring))
    assert [(one.backends, one.variant.name) for one in found] == [
        (("gloo", "nccl"), "default"), (("mpi",), "default"), (("nccl",), "ring"),
    ]  # fmt: skip
    assert {case.backend for case in found[2].cases} == {"nccl"}


def test_nothing_is_started_for_nothing() -> None:
    found = sets(backends=("mpi", "nccl"), algorithms=("ring",), collectives=("all_reduce",))
    assert found == [(("mpi",), "ring", {"ring"}), (("nccl",), "ring", {"ring"})]


def test_without_cases_there_are_links_to_measure() -> None:
    assert process_sets(("gloo", "mpi"), ()) == [
        ProcessSet(backends=("gloo",), cases=()), ProcessSet(backends=("mpi",), cases=())
    ]  # fmt: skip


def test_a_launchers_ranks_can_be_told_once() -> None:
    assert forced_alone(Sweep(algorithms=("ring",))) == "ring"
    assert forced_alone(Sweep(algorithms=("library", "own:ring"))) is None
    for others in (("library", "ring"), ("ring", "bruck"), ("own:ring", "ring")):
        with pytest.raises(NotRunnable, match=r"^algorithm 'ring' needs ranks of its own.* run once per forced algo"):
            forced_alone(Sweep(algorithms=others))
