"""The algorithms that a command may name."""

from __future__ import annotations

import pytest

from commbench.algorithms.names import check_algorithms, expand_algorithms


def test_names_are_kept_once_and_in_order() -> None:
    names = ["own:ring/2", "library", "own:ring/2", "pipeline"]
    assert check_algorithms(names, ("broadcast",), ("mpi",)) == ("own:ring/2", "library", "pipeline")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("librari", "did you mean 'library'"),
        ("rings", "unknown algorithm 'rings': did you mean 'own:ring'"),
        ("ring", "'ring' can be forced on mpi, nccl and nccl_raw only, not on gloo"),
        ("own:rings", "did you mean 'own:ring'"),
        ("own:bruck", "known are own:binomial_tree, own:double_binary_tree, own:halving_doubling, own:hierarchical, "),
        ("own:ring/many", "write own:NAME"),
    ],
)
def test_others_are_refused(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_algorithms([name], ("all_reduce",), ("gloo",))


def test_all_means_what_each_collective_has() -> None:
    names, left_out = expand_algorithms(("library", "own:all"), ("gather", "barrier"))
    assert names == ("library", "own:binomial_tree", "own:dissemination")
    assert left_out == (("gather", "own:dissemination"), ("barrier", "own:binomial_tree"))


def test_what_is_named_besides_is_not_left_out() -> None:
    """Then its case is made, and says why it cannot be run."""
    _, left_out = expand_algorithms(("own:all", "own:binomial_tree"), ("gather", "barrier"))
    assert left_out == (("gather", "own:dissemination"),)


def test_without_all_nothing_is_left_out() -> None:
    assert expand_algorithms(("own:binomial_tree",), ("gather", "barrier")) == (("own:binomial_tree",), ())
