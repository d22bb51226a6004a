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
