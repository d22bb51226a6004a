"""Which links a path from the root of a binomial tree takes, without building the tree."""

from __future__ import annotations

from functools import lru_cache

Path = tuple[int, int]
"""The rounds in which the path waits for a message, and those of them whose message crosses hosts, as bit masks: bit j
is the round of distance 2^j."""


@lru_cache(maxsize=64)
def binomial_paths(ranks: int, hosts: int, per_host: int, root: int = 0) -> tuple[Path, ...]:
    """The paths through a binomial tree that can take longest: none has all the waits and crossings of another.

    A rank waits for its messages one after another, so a path has a round for each message of a rank on it until it
    turns to a child. ``root`` counts by its place within its host.
    """
    shift = root % per_host
    known: dict[tuple[int, int, bool], frozenset[Path]] = {}

    def below(v: int, j: int) -> frozenset[Path]:
        """The paths below v, of which the 2^j ranks from v on are left."""
        while j and v + (1 << j - 1) >= ranks:
            j -= 1
        place, whole = (v + shift) % per_host, v + (1 << j) <= ranks
        if j == 0 or hosts == 1 or (whole and place + (1 << j) <= per_host):
            return frozenset([((1 << j) - 1, 0)])
        key = (place if whole else v, j, whole)
        if key not in known:
            distance = 1 << j - 1
            crosses = distance if place + distance >= per_host else 0
            further = below(v, j - 1) | below(v + distance, j - 1)
            known[key] = _longest({(waits | distance, crossings | crosses) for waits, crossings in further})
        return known[key]

    return tuple(sorted(below(0, (ranks - 1).bit_length())))


def _longest(paths: set[Path]) -> frozenset[Path]:
    kept: list[Path] = []
    for waits, crossings in sorted(paths, key=lambda p: -(p[0].bit_count() + p[1].bit_count())):
        if not any(waits & w == waits and crossings & c == crossings for w, c in kept):
            kept.append((waits, crossings))
    return frozenset(kept)


_HOSTS_LOOKED_AT = 16


@lru_cache(maxsize=64)
def double_tree_edges(ranks: int, hosts: int, per_host: int) -> int:
    """How many messages leave the busiest host, and how many reach it, when each edge of both trees carries one.

    The trees are those of :mod:`commbench.schedules.trees`: an in-order tree of ranks 1 to n-1, and its mirror image or,
    for an even number of ranks, the tree moved on by one. What crosses a border lies on the way to it from the root.
    Hosts repeat one another but for powers of two, so the first and last few stand for all.
    """
    if hosts == 1:
        return 0
    near = range(min(hosts, _HOSTS_LOOKED_AT))
    most = 0
    for host in {*near, *(hosts - 1 - index for index in near)}:
        first, stop = host * per_host, min((host + 1) * per_host, ranks)
        second = (ranks - stop + 1, ranks - first + 1) if ranks % 2 else (first - 1, stop - 1)
        flows = [_in_and_out(ranks, *interval, host == 0) for interval in ((first, stop), second)]
        most = max(most, sum(leaves for leaves, _ in flows), sum(enters for _, enters in flows))
    return most


def _in_and_out(ranks: int, first: int, stop: int, with_root: bool) -> tuple[int, int]:
    """The edges down out of the nodes first..stop-1 of the in-order tree, and those into them."""

    def here(v: int) -> bool:
        return with_root if v == 0 else first <= v < stop

    edges = {*_way_to(first, ranks), *_way_to(stop, ranks)}
    leaves = sum(here(parent) and not here(child) for parent, child in edges)
    return leaves, sum(here(child) and not here(parent) for parent, child in edges)


def _way_to(border: int, ranks: int) -> list[tuple[int, int]]:
    """The edges from the root, rank 0, to the gap below ``border``."""
    low, high, parent = 1, ranks - 1, 0
    edges = []
    while low <= high:
        top = low - 1 + (1 << ((high - low + 1).bit_length() - 1))
        edges.append((parent, top))
        parent = top
        if top >= border:
            high = top - 1
        else:
            low = top + 1
    return edges
