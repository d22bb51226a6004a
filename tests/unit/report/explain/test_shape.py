from __future__ import annotations

from typing import Any

import pytest

from commbench.cases import Case
from commbench.report.explain.evidence import Curve, Spot
from commbench.report.explain.shape import shape_of, stretches

SIZES = tuple(64 * 4**k for k in range(8))


def spot(size: int, seconds: float, known_s: float | None = None, **predictions: float) -> Spot:
    case = Case(
        collective="all_reduce", backend="mpi", bytes=size, requested_bytes=size, ranks=4, nodes=4,
        algorithm="own:ring" if known_s else "library",
    )  # fmt: skip
    return Spot(
        case=case,
        launch=0,
        hosts=(0, 1, 2, 3),
        seconds=seconds,
        lower=seconds,
        predictions=predictions,
        known_s=known_s,
    )


def curve(*spots: Spot) -> Curve:
    return Curve(spots=spots, setups=(), expected=lambda spot, links: spot.seconds)


def ring_s(size: int) -> float:
    return 6e-4 + 6e-8 * size


def tree_s(size: int) -> float:
    return 2e-4 + 1.6e-7 * size


def looks(*spots: Spot) -> list[tuple[int, int, str | None]]:
    return [(look.first, look.last, look.algorithm) for look in shape_of(curve(*spots)).looks]


def test_a_switch_is_found_where_it_is() -> None:
    found = [
        spot(size, (tree_s if size <= 4096 else ring_s)(size), ring=ring_s(size), tree=tree_s(size)) for size in SIZES
    ]
    # The two models cross at 4 kB: there both say the same.
    assert looks(*found) in (
        [(64, 1024, "tree"), (4096, SIZES[-1], "ring")],
        [(64, 4096, "tree"), (16384, SIZES[-1], "ring")],
    )


def test_one_noisy_size_makes_no_switch() -> None:
    found = [spot(size, ring_s(size) * (1.25 if size == 4096 else 1), ring=ring_s(size), tree=ring_s(size) * 1.3)
             for size in SIZES]  # fmt: skip
    assert looks(*found) == [(64, SIZES[-1], "ring")]


def test_sizes_that_no_model_explains_are_said_to_be_so() -> None:
    found = [spot(size, ring_s(size) * (5 if size <= 1024 else 1), ring=ring_s(size)) for size in SIZES]
    assert looks(*found) == [(64, 1024, None), (4096, SIZES[-1], "ring")]


def test_models_that_say_the_same_are_named_together() -> None:
    found = [spot(size, ring_s(size), ring=ring_s(size), pairwise=1.01 * ring_s(size), bruck=2 * ring_s(size))
             for size in SIZES]  # fmt: skip
    (look,) = shape_of(curve(*found)).looks
    assert (look.algorithm, look.alike, look.error) == ("ring", ("pairwise",), 0)


def test_a_known_algorithm_is_not_guessed() -> None:
    found = [spot(size, 1.2 * ring_s(size), known_s=ring_s(size), tree=1.2 * ring_s(size)) for size in SIZES]
    (look,) = shape_of(curve(*found)).looks
    assert (look.algorithm, look.known) == ("own:ring", True)
    assert look.error == pytest.approx(0.2)


def test_a_library_that_has_no_choice_is_told_by_what_it_does() -> None:
    case = Case(collective="reduce_scatter", backend="gloo", bytes=1 << 20, requested_bytes=1 << 20, ranks=4, nodes=4)
    one = Spot(case=case, launch=0, hosts=(0, 1, 2, 3), seconds=1.0, lower=1.0, known_s=1.0)
    (look,) = shape_of(curve(one)).looks
    assert (look.algorithm, look.known) == ("ring all_reduce", True)


def test_without_models_there_is_nothing_to_say() -> None:
    shape = shape_of(curve(*(spot(size, 1e-3) for size in SIZES[:3])))
    assert (shape.looks, shape.regimes, shape.below_every) == ((), None, ())


def test_regimes_need_eight_sizes() -> None:
    def two_lines(size: int) -> float:
        return min(1e-5 + 1e-8 * size, 1e-4 + 1e-9 * size)

    regimes = shape_of(curve(*(spot(size, two_lines(size)) for size in SIZES))).regimes
    assert regimes is not None
    assert regimes.switches == pytest.approx([1e4], rel=0.05)
    assert shape_of(curve(*(spot(size, two_lines(size)) for size in SIZES[:7]))).regimes is None


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([1.0] * 8, []),
        ([2.9, 2.9, 1, 1, 1, 1.4, 1.4, 1], []),  # small sizes are predicted within a factor of two only
        ([3, 4, 1, 1, 1, 1, 1, 1], [(64, 256, 3, 4)]),
        ([1, 1, 1, 1, 1, 1, 1.5, 2], [(262144, 1048576, 1.5, 2)]),
        ([1, 1, 1, 1, 1, 1, 1, 9], []),  # alone
        ([3, 3, 1, 3, 3, 1, 2, 2], [(64, 256, 3, 3), (4096, 16384, 3, 3), (262144, 1048576, 2, 2)]),
    ],
)
def test_stretches(times: list[float], expected: list[Any]) -> None:
    spots = [spot(size, 1.0) for size in SIZES]
    found = stretches(spots, times)
    assert [(s.first, s.last, s.least, s.most) for s in found] == expected


def test_a_single_size_is_all_there_is() -> None:
    (found,) = stretches([spot(1 << 20, 1.0)], [2.0])
    assert (found.first, found.last) == (1 << 20, 1 << 20)
