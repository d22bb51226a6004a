"""Which algorithms there are for each collective, and how to build one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from commbench.collectives import COLLECTIVES
from commbench.registry import unknown_name
from commbench.schedules import doubling, exchange, hierarchical, ring, trees
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

_HIERARCHICAL: dict[str, dict[str, Callable[[tuple[int, ...], int], Schedule]]] = {
    "all_reduce": {"hierarchical": hierarchical.all_reduce},
    "all_gather": {"hierarchical": hierarchical.all_gather},
    "reduce_scatter": {"hierarchical": hierarchical.reduce_scatter},
    "all_to_all": {"hierarchical": hierarchical.all_to_all},
    "broadcast": {"hierarchical": hierarchical.broadcast},
    "reduce": {"hierarchical": hierarchical.reduce},
}
HIERARCHICAL = frozenset((collective, algorithm) for collective, known in _HIERARCHICAL.items() for algorithm in known)
"""The (collective, algorithm) pairs that need to know the ranks' hosts; see :func:`buildable`."""

PIPELINED = frozenset(
    (collective, algorithm)
    for collective, algorithm in (
        ("all_reduce", "double_binary_tree"),
        ("broadcast", "double_binary_tree"),
        ("reduce", "double_binary_tree"),
        ("broadcast", "ring"),
        ("reduce", "ring"),
        ("broadcast", "hierarchical"),
        ("reduce", "hierarchical"),
    )
)
"""The (collective, algorithm) pairs that are meant to be used with several pieces."""

PIECE_BYTES = 128 << 10
MOST_PIECES = 64


def pieces_for(collective: str, algorithm: str, message_bytes: float) -> int:
    """In how many pieces commbench itself sends a message: of 128 KiB, but no more than 64, where pieces pay at all.

    A fixed rule, as libraries have one, that needs no constants of the links: what is executed can be predicted.
    """
    if (collective, algorithm) not in PIPELINED:
        return 1
    return max(1, min(MOST_PIECES, int(message_bytes) // PIECE_BYTES))


def build(
    collective: str, algorithm: str, ranks: int, root: int = 0, pieces: int = 1, hosts: Sequence[int] | None = None
) -> Schedule:
    """The schedule of an algorithm for ranks 0..ranks-1 (at least 2), the message in ``pieces`` pieces.

    ``root`` counts only where the collective has one, ``hosts`` (the number of each rank's host) only for hierarchical
    algorithms. Raises ValueError for a name that is not known and ScheduleError for numbers that make no sense.
    """
    for kind, name, known in (
        ("collective", collective, tuple(ALGORITHMS)),
        ("algorithm", algorithm, tuple(ALGORITHMS.get(collective, ()))),
    ):
        if name not in known:
            raise ValueError(unknown_name(kind, name, known))
    if ranks < 2 or not 0 <= root < ranks or pieces < 1:
        raise ScheduleError(f"no schedule for {ranks} ranks, root {root}, {pieces} pieces")
    root = root if COLLECTIVES[collective].rooted else 0
    if (collective, algorithm) not in HIERARCHICAL:
        return _built(collective, algorithm, ranks, root, pieces)
    if hosts is None or len(hosts) != ranks:
        raise ScheduleError(f"{algorithm} {collective} needs the hosts of all {ranks} ranks")
    if reason := hierarchical.why_not(tuple(hosts)):
        raise ScheduleError(reason)
    # Only which ranks share a host counts, not what the hosts are called.
    number = {host: index for index, host in enumerate(dict.fromkeys(hosts))}
    return _built_for(collective, algorithm, tuple(number[host] for host in hosts), root, pieces)


def buildable(collective: str, algorithm: str, hosts: Sequence[int]) -> str | None:
    """One line on why a known algorithm has no schedule for ranks on these hosts, or None where it has."""
    if (collective, algorithm) not in HIERARCHICAL:
        return None
    return hierarchical.why_not(tuple(hosts))


@lru_cache(maxsize=128)
def _built(collective: str, algorithm: str, ranks: int, root: int, pieces: int) -> Schedule:
    return _BASES[collective][algorithm](ranks, root).pieces(pieces)


@lru_cache(maxsize=64)
def _built_for(collective: str, algorithm: str, hosts: tuple[int, ...], root: int, pieces: int) -> Schedule:
    return _HIERARCHICAL[collective][algorithm](hosts, root).pieces(pieces)


ALGORITHMS: dict[str, dict[str, Callable[..., Schedule]]] = {
    collective: {
        algorithm: partial(build, collective, algorithm) for algorithm in (*known, *_HIERARCHICAL.get(collective, ()))
    }
    for collective, known in _BASES.items()
}
"""Per collective and algorithm a builder: ``(ranks, root=0, pieces=1, hosts=None) -> Schedule``; see :func:`build`."""
