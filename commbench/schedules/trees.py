"""Tree algorithms: the binomial tree, and two trees at once that use every rank's both directions.

Binomial: Thakur, Rabenseifner and Gropp, Int. J. High Perform. Comput. Appl. 19 (2005). Double tree: Sanders, Speck
and Träff, Parallel Computing 35 (2009). Ranks are counted from the root.
"""

from __future__ import annotations

from commbench.schedules.schedule import NONE, Block, Message, Schedule, from_rounds


def _edges(ranks: int) -> list[list[tuple[int, int, int]]]:
    """The binomial tree from the root down, by round: parent, child, and one past the last rank below the child."""
    distances = [1 << k for k in reversed(range((ranks - 1).bit_length()))]
    return [[(v, v + d, min(v + 2 * d, ranks)) for v in range(0, ranks, 2 * d) if v + d < ranks] for d in distances]


def binomial_broadcast(ranks: int, root: int = 0) -> Schedule:
    """⌈log2 n⌉ rounds of m."""
    rounds = [
        [Message((root + v) % ranks, (root + child) % ranks, (Block(root, NONE, 0),)) for v, child, _ in edges]
        for edges in _edges(ranks)
    ]
    return from_rounds("broadcast", "binomial_tree", ranks, rounds, root=root)


def binomial_reduce(ranks: int, root: int = 0) -> Schedule:
    """⌈log2 n⌉ rounds of m."""
    rounds = [
        [
            Message((root + child) % ranks, (root + v) % ranks, (Block(NONE, NONE, 0),), reduce=True)
            for v, child, _ in edges
        ]
        for edges in reversed(_edges(ranks))
    ]
    return from_rounds("reduce", "binomial_tree", ranks, rounds, root=root)


def binomial_all_reduce(ranks: int, root: int = 0) -> Schedule:
    """Reduce to rank 0, then broadcast: 2⌈log2 n⌉ rounds of m."""
    return _reduce_then_broadcast(binomial_reduce(ranks), binomial_broadcast(ranks))


def binomial_scatter(ranks: int, root: int = 0) -> Schedule:
    """⌈log2 n⌉ rounds: a child gets the blocks of its whole subtree, and passes them on."""
    rounds = [
        [
            Message(
                (root + v) % ranks,
                (root + child) % ranks,
                tuple(Block(root, (root + below) % ranks, 0) for below in range(child, stop)),
            )
            for v, child, stop in edges
        ]
        for edges in _edges(ranks)
    ]
    return from_rounds("scatter", "binomial_tree", ranks, rounds, root=root)


def binomial_gather(ranks: int, root: int = 0) -> Schedule:
    """The scatter backwards."""
    rounds = [
        [
            Message(
                (root + child) % ranks,
                (root + v) % ranks,
                tuple(Block((root + below) % ranks, NONE, 0) for below in range(child, stop)),
            )
            for v, child, stop in edges
        ]
        for edges in reversed(_edges(ranks))
    ]
    return from_rounds("gather", "binomial_tree", ranks, rounds, root=root)


def double_broadcast(ranks: int, root: int = 0) -> Schedule:
    """Half of the message down each tree: ⌈log2 n⌉ rounds of m/2; in c pieces ⌈log2 n⌉-1+c rounds of m/2c a tree."""
    first, second = (_tree_broadcast(parents, root) for parents in _two_trees(ranks))
    return first.beside(second)


def double_reduce(ranks: int, root: int = 0) -> Schedule:
    """The broadcast backwards."""
    first, second = (_tree_reduce(parents, root) for parents in _two_trees(ranks))
    return first.beside(second)


def double_all_reduce(ranks: int, root: int = 0) -> Schedule:
    """Up and down both trees: 2⌈log2 n⌉ rounds of m/2; in c pieces 2⌈log2 n⌉-1+c rounds of m/2c a tree and direction."""
    first, second = (
        _reduce_then_broadcast(_tree_reduce(parents, 0), _tree_broadcast(parents, 0)) for parents in _two_trees(ranks)
    )
    return first.beside(second)


def _reduce_then_broadcast(up: Schedule, down: Schedule) -> Schedule:
    parts = (s.relabel(collective="all_reduce", cut=1, block=lambda b: Block(NONE, NONE, 0)) for s in (up, down))
    return next(parts).then(next(parts))


def _two_trees(ranks: int) -> tuple[list[int], list[int]]:
    """The parent of each rank in both trees, rank 0 being the root of both (its own entry is -1).

    The other ranks form a balanced in-order tree in which odd numbers are leaves. The second tree is its mirror image
    where that swaps odd and even, else the tree shifted by one rank, so that no rank has children in both.
    """
    last = ranks - 1
    first = [-1] * ranks
    _hang(first, 0, 1, last)
    if last % 2 == 0:
        to_second = [0, *(last + 1 - v for v in range(1, ranks))]
    else:
        to_second = [0, *(v % last + 1 for v in range(1, ranks))]
    second = [-1] * ranks
    for v in range(1, ranks):
        second[to_second[v]] = to_second[first[v]]
    return first, second


def _hang(parents: list[int], parent: int, low: int, high: int) -> None:
    """Hang the ranks low..high below ``parent`` as an in-order tree whose left subtrees are complete."""
    if low > high:
        return
    top = low - 1 + (1 << ((high - low + 1).bit_length() - 1))
    parents[top] = parent
    _hang(parents, top, low, top - 1)
    _hang(parents, top, top + 1, high)


def _by_depth(parents: list[int]) -> list[list[int]]:
    """The ranks at each depth below the root, the root's children first."""
    levels: list[list[int]] = []
    above = {0}
    while True:
        here = [v for v, parent in enumerate(parents) if parent in above]
        if not here:
            return levels
        levels.append(here)
        above = set(here)


def _tree_broadcast(parents: list[int], root: int) -> Schedule:
    n = len(parents)
    rounds = [
        [Message((root + parents[v]) % n, (root + v) % n, (Block(root, NONE, 0),)) for v in level]
        for level in _by_depth(parents)
    ]
    return from_rounds("broadcast", "double_binary_tree", n, rounds, root=root)


def _tree_reduce(parents: list[int], root: int) -> Schedule:
    n = len(parents)
    rounds = [
        [Message((root + v) % n, (root + parents[v]) % n, (Block(NONE, NONE, 0),), reduce=True) for v in level]
        for level in reversed(_by_depth(parents))
    ]
    return from_rounds("reduce", "double_binary_tree", n, rounds, root=root)
