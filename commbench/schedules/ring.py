"""Ring algorithms: every rank sends to the next one only, and receives from the one before.

Bandwidth-optimal for all_reduce, all_gather and reduce_scatter (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69,
2009); broadcast and reduce pass along the ring as a chain, which pays once the message is cut into pieces.
"""

from __future__ import annotations

from commbench.schedules.schedule import NONE, Block, Message, Schedule, from_rounds


def reduce_scatter(ranks: int, root: int = 0) -> Schedule:
    """n-1 rounds of m/n: the sum for rank d starts at d+1 and collects contributions on its way round to d."""
    rounds = [
        [Message(r, (r + 1) % ranks, (Block(NONE, (r - 1 - s) % ranks, 0),), reduce=True) for r in range(ranks)]
        for s in range(ranks - 1)
    ]
    return from_rounds("reduce_scatter", "ring", ranks, rounds)


def all_gather(ranks: int, root: int = 0) -> Schedule:
    """n-1 rounds of m/n: every block goes once round the ring."""
    rounds = [
        [Message(r, (r + 1) % ranks, (Block((r - s) % ranks, NONE, 0),)) for r in range(ranks)]
        for s in range(ranks - 1)
    ]
    return from_rounds("all_gather", "ring", ranks, rounds)


def all_reduce(ranks: int, root: int = 0) -> Schedule:
    """Reduce-scatter, then all-gather of the sums: 2(n-1) rounds of m/n."""
    scatter = reduce_scatter(ranks).relabel(
        collective="all_reduce", cut=ranks, block=lambda b: Block(NONE, NONE, b.destination)
    )
    gather = all_gather(ranks).relabel(collective="all_reduce", cut=ranks, block=lambda b: Block(NONE, NONE, b.origin))
    return scatter.then(gather)


def broadcast(ranks: int, root: int = 0) -> Schedule:
    """A chain that starts at the root: n-1 rounds of m; in c pieces n-2+c rounds of m/c."""
    rounds = [[Message((root + v) % ranks, (root + v + 1) % ranks, (Block(root, NONE, 0),))] for v in range(ranks - 1)]
    return from_rounds("broadcast", "ring", ranks, rounds, root=root)


def reduce(ranks: int, root: int = 0) -> Schedule:
    """A chain that ends at the root, adding on the way: n-1 rounds of m; in c pieces n-2+c rounds of m/c."""
    rounds = [
        [Message((root + v) % ranks, (root + v + 1) % ranks, (Block(NONE, NONE, 0),), reduce=True)]
        for v in range(1, ranks)
    ]
    return from_rounds("reduce", "ring", ranks, rounds, root=root)


def send_recv(ranks: int, root: int = 0) -> Schedule:
    """One shift: every rank sends its message to the next."""
    shift = [Message(r, (r + 1) % ranks, (Block(r, NONE, 0),)) for r in range(ranks)]
    return from_rounds("send_recv", "ring", ranks, [shift])
