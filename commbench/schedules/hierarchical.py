"""Hierarchical algorithms: one part inside every host, one part between hosts, so that each byte leaves a host once.

A node is the ranks of one host, a rail the ranks with the same place on every host. ``hosts[rank]`` numbers the host
of a rank; every host has the same number of ranks, at least two, and there are at least two hosts. Rings inside, and
direct exchanges for all_to_all. Where a message crosses hosts, all rails work at once, except in broadcast and reduce,
where the root's rail speaks for all (a leader a host).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from commbench.schedules import exchange, ring
from commbench.schedules.schedule import NONE, Block, Schedule

Groups = list[tuple[int, ...]]


def why_not(hosts: tuple[int, ...]) -> str | None:
    """One line on why there is no hierarchy in this layout, or None."""
    counts = {host: hosts.count(host) for host in dict.fromkeys(hosts)}
    if len(counts) < 2:
        return "a hierarchical algorithm needs two hosts or more"
    if len(set(counts.values())) > 1:
        return f"a hierarchical algorithm needs equal hosts, not {min(counts.values())} to {max(counts.values())} ranks"
    if len(counts) == len(hosts):
        return "a hierarchical algorithm needs two ranks or more on each host"
    return None


def _nodes(hosts: tuple[int, ...]) -> Groups:
    return [tuple(rank for rank, on in enumerate(hosts) if on == host) for host in dict.fromkeys(hosts)]


def _rails(nodes: Groups) -> Groups:
    return list(zip(*nodes, strict=True))


def all_reduce(hosts: tuple[int, ...], root: int = 0) -> Schedule:
    """Reduce-scatter in the node, all_reduce of each part on its rail, all-gather in the node.

    2(k-1)/k of the message leaves each of k hosts.
    """
    nodes, n = _nodes(hosts), len(hosts)
    rails = _rails(nodes)
    k, local = len(nodes), len(rails)
    scatter = ring.reduce_scatter(local).within(
        nodes, ranks=n, collective="all_reduce", cut=local, block=lambda _, b: Block(NONE, NONE, b.destination)
    )
    between = ring.all_reduce(k).within(
        rails, ranks=n, collective="all_reduce", cut=n, block=lambda rail, b: Block(NONE, NONE, rail * k + b.piece)
    )
    gather = ring.all_gather(local).within(
        nodes, ranks=n, collective="all_reduce", cut=local, block=lambda _, b: Block(NONE, NONE, b.origin)
    )
    return _named(scatter.then(between).then(gather))


def all_gather(hosts: tuple[int, ...], root: int = 0) -> Schedule:
    """All-gather on each rail, then of a rail's blocks at a time in the node. (k-1)/k of the message leaves each host."""
    nodes, n = _nodes(hosts), len(hosts)
    rails = _rails(nodes)
    between = ring.all_gather(len(nodes)).within(
        rails, ranks=n, collective="all_gather", cut=1, block=lambda rail, b: Block(rails[rail][b.origin], NONE, 0)
    )
    inside = (
        ring.all_gather(len(rails))
        .refine(len(nodes))
        .within(
            nodes, ranks=n, collective="all_gather", cut=1, block=lambda _, b: Block(rails[b.origin][b.piece], NONE, 0)
        )
    )
    return _named(between.then(inside))


def reduce_scatter(hosts: tuple[int, ...], root: int = 0) -> Schedule:
    """Reduce-scatter of a rail's blocks at a time in the node, then on each rail: the all_gather backwards."""
    nodes, n = _nodes(hosts), len(hosts)
    rails = _rails(nodes)
    inside = (
        ring.reduce_scatter(len(rails))
        .refine(len(nodes))
        .within(
            nodes, ranks=n, collective="reduce_scatter", cut=1,
            block=lambda _, b: Block(NONE, rails[b.destination][b.piece], 0),
        )
    )  # fmt: skip
    between = ring.reduce_scatter(len(nodes)).within(
        rails, ranks=n, collective="reduce_scatter", cut=1,
        block=lambda rail, b: Block(NONE, rails[rail][b.destination], 0),
    )  # fmt: skip
    return _named(inside.then(between))


def all_to_all(hosts: tuple[int, ...], root: int = 0) -> Schedule:
    """On each rail all that is for one host in one message, then in the node all that is for one rank.

    As many bytes leave a host as in a direct exchange, in k-1 messages a rank instead of n - n/k.
    """
    nodes, n = _nodes(hosts), len(hosts)
    rails = _rails(nodes)
    between = (
        exchange.pairwise_all_to_all(len(nodes))
        .refine(len(rails))
        .within(
            rails, ranks=n, collective="all_to_all", cut=1,
            block=lambda rail, b: Block(rails[rail][b.origin], nodes[b.destination][b.piece], 0),
        )
    )  # fmt: skip
    inside = (
        exchange.pairwise_all_to_all(len(rails))
        .refine(len(nodes))
        .within(
            nodes, ranks=n, collective="all_to_all", cut=1,
            block=lambda node, b: Block(rails[b.origin][b.piece], nodes[node][b.destination], 0),
        )
    )  # fmt: skip
    return _named(between.then(inside))


def broadcast(hosts: tuple[int, ...], root: int = 0) -> Schedule:
    """A chain of the hosts' leaders, which are the root's rail, then a chain in each node: made for many pieces."""
    between, inside = _led(ring.broadcast, "broadcast", hosts, root, Block(root, NONE, 0))
    return _named(between.then(inside), root)


def reduce(hosts: tuple[int, ...], root: int = 0) -> Schedule:
    """The broadcast backwards."""
    between, inside = _led(ring.reduce, "reduce", hosts, root, Block(NONE, NONE, 0))
    return _named(inside.then(between), root)


def _led(
    chain: Callable[[int, int], Schedule], collective: str, hosts: tuple[int, ...], root: int, whole: Block
) -> tuple[Schedule, Schedule]:
    """The chain among the leaders, and the chains inside the hosts."""
    nodes, n = _nodes(hosts), len(hosts)
    rails = _rails(nodes)
    leaders = next(index for index, rail in enumerate(rails) if root in rail)
    between = chain(len(nodes), rails[leaders].index(root))
    inside = chain(len(rails), leaders)
    return (
        between.within([rails[leaders]], ranks=n, collective=collective, cut=1, block=lambda _, b: whole),
        inside.within(nodes, ranks=n, collective=collective, cut=1, block=lambda _, b: whole),
    )


def _named(schedule: Schedule, root: int = 0) -> Schedule:
    return replace(schedule, algorithm="hierarchical", root=root)
