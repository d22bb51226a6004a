"""Which algorithms there are for each collective, and how to build one."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

from commbench.collectives import COLLECTIVES
from commbench.registry import unknown_name
from commbench.schedules import doubling, exchange, ring, trees
from commbench.schedules.schedule import Schedule, ScheduleError

_BASES: dict[str, dict[str, Callable[[int, int], Schedule]]] = {
    "all_reduce": {
        "ring": ring.all_reduce,
        "binomial_tree": trees.binomial_all_reduce,
        "double_binary_tree": trees.double_all_reduce,
        "recursive_doubling": doubling.doubling_all_reduce,
        "halving_doubling": doubling.halving_doubling_all_reduce,
    },
    "all_gather": {
        "ring": ring.all_gather,
        "recursive_doubling": doubling.doubling_all_gather,
        "bruck": exchange.bruck_all_gather,
    },
    "reduce_scatter": {
        "ring": ring.reduce_scatter,
        "halving_doubling": doubling.halving_reduce_scatter,
        "pairwise": exchange.pairwise_reduce_scatter,
    },
    # A ring would carry every block past all ranks between: n/2 times the bytes for nothing where any two can talk.
    "all_to_all": {"pairwise": exchange.pairwise_all_to_all, "bruck": exchange.bruck_all_to_all},
    "broadcast": {
        "ring": ring.broadcast,
        "binomial_tree": trees.binomial_broadcast,
        "double_binary_tree": trees.double_broadcast,
    },
    "reduce": {
        "ring": ring.reduce,
        "binomial_tree": trees.binomial_reduce,
        "double_binary_tree": trees.double_reduce,
    },
    "gather": {"binomial_tree": trees.binomial_gather},
    "scatter": {"binomial_tree": trees.binomial_scatter},
    "send_recv": {"ring": ring.send_recv},
    "barrier": {"dissemination": exchange.dissemination_barrier},
}

PIPELINED = frozenset(
    (collective, algorithm)
    for collective, algorithm in (
        ("all_reduce", "double_binary_tree"),
        ("broadcast", "double_binary_tree"),
        ("reduce", "double_binary_tree"),
        ("broadcast", "ring"),
        ("reduce", "ring"),
    )
)
"""The (collective, algorithm) pairs that are meant to be used with several pieces."""


def build(collective: str, algorithm: str, ranks: int, root: int = 0, pieces: int = 1) -> Schedule:
    """The schedule of an algorithm for ranks 0..ranks-1 (at least 2), the message in ``pieces`` pieces.

    ``root`` counts only where the collective has one. Raises ValueError for a name that is not known and ScheduleError
    for numbers that make no sense.
    """
    for kind, name, known in (("collective", collective, _BASES), ("algorithm", algorithm, _BASES.get(collective, {}))):
        if name not in known:
            raise ValueError(unknown_name(kind, name, known))
    if ranks < 2 or not 0 <= root < ranks or pieces < 1:
        raise ScheduleError(f"no schedule for {ranks} ranks, root {root}, {pieces} pieces")
    return _built(collective, algorithm, ranks, root if COLLECTIVES[collective].rooted else 0, pieces)


@lru_cache(maxsize=128)
def _built(collective: str, algorithm: str, ranks: int, root: int, pieces: int) -> Schedule:
    return _BASES[collective][algorithm](ranks, root).pieces(pieces)


ALGORITHMS: dict[str, dict[str, Callable[..., Schedule]]] = {
    collective: {algorithm: partial(build, collective, algorithm) for algorithm in known}
    for collective, known in _BASES.items()
}
"""Per collective and algorithm a builder: ``(ranks, root=0, pieces=1) -> Schedule``; see :func:`build`."""
