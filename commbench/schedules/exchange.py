"""Direct exchanges: pairwise, Bruck's, and the dissemination barrier. All work for any number of ranks.

Pairwise: Thakur, Rabenseifner and Gropp (2005). Bruck: Bruck, Ho, Kipnis, Upfal and Weathersby, IEEE Trans. Parallel
Distrib. Syst. 8 (1997). Dissemination: Hensgen, Finkel and Manber, Int. J. Parallel Program. 17 (1988).
"""

from __future__ import annotations

from commbench.schedules.schedule import NONE, Block, Message, Schedule, from_rounds


def pairwise_all_to_all(ranks: int, root: int = 0) -> Schedule:
    """n-1 rounds of m/n: in round s every rank sends to the rank s further on."""
    rounds = [
        [Message(r, (r + s) % ranks, (Block(r, (r + s) % ranks, 0),)) for r in range(ranks)] for s in range(1, ranks)
    ]
    return from_rounds("all_to_all", "pairwise", ranks, rounds)


def pairwise_reduce_scatter(ranks: int, root: int = 0) -> Schedule:
    """n-1 rounds of m/n: every rank sends its own contribution straight to the rank that it is for."""
    rounds = [
        [Message(r, (r + s) % ranks, (Block(NONE, (r + s) % ranks, 0),), reduce=True) for r in range(ranks)]
        for s in range(1, ranks)
    ]
    return from_rounds("reduce_scatter", "pairwise", ranks, rounds)


def bruck_all_gather(ranks: int, root: int = 0) -> Schedule:
    """⌈log2 n⌉ rounds: in the round of distance d rank r has the blocks of r..r+d-1 and passes them to r-d."""
    rounds = [
        [
            Message(r, (r - d) % ranks, tuple(Block((r + i) % ranks, NONE, 0) for i in range(min(d, ranks - d))))
            for r in range(ranks)
        ]
        for d in _distances(ranks)
    ]
    return from_rounds("all_gather", "bruck", ranks, rounds)


def bruck_all_to_all(ranks: int, root: int = 0) -> Schedule:
    """⌈log2 n⌉ rounds of about m/2: a block that must travel j ranks moves by d in each round d that j has a bit for.

    Before the round of distance d it has come j mod d ranks from its origin.
    """
    rounds = [
        [
            Message(
                r,
                (r + d) % ranks,
                tuple(Block((r - j % d) % ranks, (r - j % d + j) % ranks, 0) for j in range(ranks) if j & d),
            )
            for r in range(ranks)
        ]
        for d in _distances(ranks)
    ]
    return from_rounds("all_to_all", "bruck", ranks, rounds)


def dissemination_barrier(ranks: int, root: int = 0) -> Schedule:
    """⌈log2 n⌉ rounds of empty messages, after which every rank has heard from every other."""
    rounds = [[Message(r, (r + d) % ranks, ()) for r in range(ranks)] for d in _distances(ranks)]
    return from_rounds("barrier", "dissemination", ranks, rounds)


def _distances(ranks: int) -> list[int]:
    return [1 << k for k in range((ranks - 1).bit_length())]
