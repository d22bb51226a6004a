"""Every algorithm computes its collective, for every number of ranks up to 33."""

from __future__ import annotations

import pytest

from commbench.collectives import COLLECTIVES
from commbench.schedules import ALGORITHMS, HIERARCHICAL, PIPELINED, ScheduleError, build
from commbench.schedules.simulation import Verdict, simulate

PAIRS = [(name, one) for name, known in ALGORITHMS.items() for one in known if (name, one) not in HIERARCHICAL]
CORRECT = Verdict(correct=True)


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_computes_for_2_to_33_ranks(collective: str, algorithm: str) -> None:
    for ranks in range(2, 34):
        roots = {0, ranks // 2 + 1 if ranks > 2 else 1} if COLLECTIVES[collective].rooted else {0}
        for root in roots:
            assert simulate(build(collective, algorithm, ranks, root), seed=ranks) == CORRECT, (ranks, root)


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
@pytest.mark.parametrize("pieces", [2, 3, 8])
def test_computes_in_pieces(collective: str, algorithm: str, pieces: int) -> None:
    for ranks in (2, 3, 4, 7, 8, 13):
        root = ranks - 1 if COLLECTIVES[collective].rooted else 0
        assert simulate(build(collective, algorithm, ranks, root, pieces)) == CORRECT, ranks


def test_every_collective_has_an_algorithm() -> None:
    assert set(ALGORITHMS) == set(COLLECTIVES)
    assert all(algorithm in ALGORITHMS[collective] for collective, algorithm in PIPELINED)


def test_builder_is_the_registered_one() -> None:
    schedule = ALGORITHMS["broadcast"]["ring"](5, 3, pieces=2)
    assert (schedule.collective, schedule.algorithm, schedule.ranks, schedule.root) == ("broadcast", "ring", 5, 3)
    assert schedule is build("broadcast", "ring", 5, 3, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (("all_reduce", "rings", 4), ValueError, "did you mean 'ring'"),
        (("all_reduced", "ring", 4), ValueError, "did you mean 'all_reduce'"),
        (("all_reduce", "ring", 1), ScheduleError, "1 ranks"),
        (("broadcast", "ring", 4, 4), ScheduleError, "root 4"),
        (("broadcast", "ring", 4, 0, 0), ScheduleError, "0 pieces"),
    ],
)
def test_build_refuses(arguments: tuple[str, str, int], error: type[ValueError], says: str) -> None:
    with pytest.raises(error, match=says):
        build(*arguments)
