"""Recursive doubling and halving: partners at distances that are powers of two.

Thakur, Rabenseifner and Gropp, Int. J. High Perform. Comput. Appl. 19 (2005); all_reduce by halving and doubling is
Rabenseifner's. For n that is no power of two, the first 2r ranks, r = n - 2^⌊log2 n⌋, pair up: the even one hands its
data to the odd one, sits out, and is given its result in a last round.
"""

from __future__ import annotations

from commbench.schedules.schedule import NONE, Block, Message, Schedule, from_rounds

Blocks = tuple[Block, ...]


class _Core:
    """The 2^⌊log2 n⌋ ranks that stay in, numbered ``v``, and the ``extra`` even ones each looked after by ``rank(v)``."""

    def __init__(self, ranks: int) -> None:
        self.size = 1 << (ranks.bit_length() - 1)
        self.extra = ranks - self.size
        self.distances = [1 << k for k in range(self.size.bit_length() - 1)]

    def rank(self, v: int) -> int:
        return 2 * v + 1 if v < self.extra else v + self.extra

    def cube(self, v: int, distance: int) -> range:
        """The aligned ``distance`` core ranks among which v is."""
        start = v - v % distance
        return range(start, start + distance)

    def served(self, cube: range) -> list[int]:
        """All ranks of a cube, those that sit out included."""
        return [r for v in cube for r in ((2 * v, 2 * v + 1) if v < self.extra else (v + self.extra,))]

    def pairs(self) -> list[tuple[int, int]]:
        """Each rank that sits out with the one that looks after it."""
        return [(2 * v, 2 * v + 1) for v in range(self.extra)]


def doubling_all_reduce(ranks: int, root: int = 0) -> Schedule:
    """⌊log2 n⌋ rounds of m, and 2 more where n is no power of two."""
    core, whole = _Core(ranks), (Block(NONE, NONE, 0),)
    rounds = [[Message(even, odd, whole, reduce=True) for even, odd in core.pairs()]]
    for d in core.distances:
        rounds.append([Message(core.rank(v), core.rank(v ^ d), whole, reduce=True) for v in range(core.size)])
    rounds.append([Message(odd, even, whole) for even, odd in core.pairs()])
    return from_rounds("all_reduce", "recursive_doubling", ranks, rounds)


def doubling_all_gather(ranks: int, root: int = 0) -> Schedule:
    """⌊log2 n⌋ rounds in which what a rank holds doubles, and 2 more where n is no power of two."""
    core = _Core(ranks)

    def held(v: int, distance: int) -> Blocks:
        return tuple(Block(r, NONE, 0) for r in core.served(core.cube(v, distance)))

    rounds = [[Message(even, odd, (Block(even, NONE, 0),)) for even, odd in core.pairs()]]
    for d in core.distances:
        rounds.append([Message(core.rank(v), core.rank(v ^ d), held(v, d)) for v in range(core.size)])
    rounds.append(
        [Message(odd, even, tuple(Block(r, NONE, 0) for r in range(ranks) if r != even)) for even, odd in core.pairs()]
    )
    return from_rounds("all_gather", "recursive_doubling", ranks, rounds)


def halving_reduce_scatter(ranks: int, root: int = 0) -> Schedule:
    """⌊log2 n⌋ rounds: of what a rank still has, the half that its partner's side wants goes there to be added."""
    core = _Core(ranks)

    def wanted(v: int, distance: int) -> Blocks:
        return tuple(Block(NONE, r, 0) for r in core.served(core.cube(v, distance)))

    everything = wanted(0, core.size)
    rounds = [[Message(even, odd, everything, reduce=True) for even, odd in core.pairs()]]
    for d in reversed(core.distances):
        rounds.append(
            [Message(core.rank(v), core.rank(v ^ d), wanted(v ^ d, d), reduce=True) for v in range(core.size)]
        )
    rounds.append([Message(odd, even, (Block(NONE, even, 0),)) for even, odd in core.pairs()])
    return from_rounds("reduce_scatter", "halving_doubling", ranks, rounds)


def halving_doubling_all_reduce(ranks: int, root: int = 0) -> Schedule:
    """Rabenseifner: reduce-scatter by halving, then all-gather by doubling, the message in 2^⌊log2 n⌋ pieces."""
    core = _Core(ranks)

    def pieces(v: int, distance: int) -> Blocks:
        return tuple(Block(NONE, NONE, piece) for piece in core.cube(v, distance))

    everything = pieces(0, core.size)
    rounds = [[Message(even, odd, everything, reduce=True) for even, odd in core.pairs()]]
    for d in reversed(core.distances):
        rounds.append(
            [Message(core.rank(v), core.rank(v ^ d), pieces(v ^ d, d), reduce=True) for v in range(core.size)]
        )
    for d in core.distances:
        rounds.append([Message(core.rank(v), core.rank(v ^ d), pieces(v, d)) for v in range(core.size)])
    rounds.append([Message(odd, even, everything) for even, odd in core.pairs()])
    return from_rounds("all_reduce", "halving_doubling", ranks, rounds, cut=core.size)
