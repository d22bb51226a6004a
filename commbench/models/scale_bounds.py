"""The bound of :mod:`commbench.models.bounds` in closed form: the same definition, without a list of all outputs.

What must pass a rank or a host follows from how many ranks it, and the root's host, have; only send_recv asks which
ranks are neighbours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from commbench.collectives import COLLECTIVES
from commbench.models.bounds import ISOLATED, STREAMED
from commbench.models.links import Links
from commbench.models.rounds import World


class HostKind(NamedTuple):
    """``hosts`` hosts alike: ``number`` is one of them, ``ranks`` on each, ``leaving`` and ``reaching`` messages of a
    shift by one rank, ``root`` whether the root is there."""

    number: int
    hosts: int
    ranks: int
    leaving: int
    reaching: int
    root: bool


def kinds_of_world(world: World, links: Links, root: int = 0) -> tuple[HostKind, ...]:
    """The kinds of hosts of an even world: those whose rates are known each, the root's, and all others."""
    at_root = root // world.per_host
    single = sorted({at_root, *range(min(world.hosts, len(links.host_rates)))})
    border = int(world.hosts > 1)
    kinds = [HostKind(host, 1, world.per_host, border, border, host == at_root) for host in single]
    if len(single) < world.hosts:
        other = next(host for host in range(world.hosts) if host not in single)
        kinds.append(HostKind(other, world.hosts - len(single), world.per_host, border, border, False))
    return tuple(kinds)


def kinds_of_hosts(hosts: Sequence[int], root: int = 0) -> tuple[HostKind, ...]:
    """Every host of any layout; ``hosts[rank]`` is the host of a rank."""
    ranks = Counter(hosts)
    leaving: Counter[int] = Counter()
    reaching: Counter[int] = Counter()
    for rank, host in enumerate(hosts):
        if hosts[rank - 1] != host:
            leaving[hosts[rank - 1]] += 1
            reaching[host] += 1
    return tuple(
        HostKind(host, 1, count, leaving[host], reaching[host], host == hosts[root]) for host, count in ranks.items()
    )


def bound_of_world(
    collective: str, message_bytes: float, world: World, links: Links, timing: str, root: int = 0
) -> float:
    """Seconds; the bound on an even world of any size."""
    return bound_of_kinds(collective, message_bytes, kinds_of_world(world, links, root), links, timing)


def bound_of_kinds(
    collective: str, message_bytes: float, kinds: tuple[HostKind, ...], links: Links, timing: str
) -> float:
    """Seconds, as :func:`commbench.models.bounds.bound` on the layout that the kinds describe. Raises as it does."""
    if timing not in (ISOLATED, STREAMED):
        raise ValueError(f"timing is isolated or streamed, not {timing!r}")
    n, k = sum(kind.hosts * kind.ranks for kind in kinds), sum(kind.hosts for kind in kinds)
    share = message_bytes / (n if COLLECTIVES[collective].split else 1)
    per_byte = [0.0]
    rank_rates = {kind: _rank_rates(kind, k, links) for kind in kinds}
    for kind, (out, into) in rank_rates.items():
        for at_root in {kind.root, *([False] if kind.ranks > 1 else [])}:
            leaves, enters = _rank_flow(collective, n, at_root)
            per_byte += [leaves * out, enters * into]
    per_byte.append(_rank_mean(collective, n) * min(min(rates) for rates in rank_rates.values()))
    if k > 1:
        nics = {kind: _nic_rates(kind, links) for kind in kinds}
        for kind, (out, into) in nics.items():
            leaves, enters = _host_flow(collective, n, kind)
            per_byte += [leaves * out, enters * into]
        per_byte.append(_host_mean(collective, n, k, kinds) * min(min(rates) for rates in nics.values()))
    latency = 0.0
    if timing == ISOLATED:
        reached = 2 if collective == "send_recv" else n
        classes = [c for c, has in ((False, k < n), (True, k > 1)) if has]
        latency = (reached - 1).bit_length() * min(links.of(crossing=c).latency_s for c in classes)
    return max(latency, share * max(per_byte))


def _rank_rates(kind: HostKind, hosts: int, links: Links) -> tuple[float, float]:
    """Seconds a byte out and in over the fastest class of links that a rank has."""
    found = [(links.of(crossing=False).seconds_per_byte,) * 2] if kind.ranks > 1 else []
    if hosts > 1:
        found.append((links.rate(kind.number, out=True), links.rate(kind.number, out=False)))
    return min(out for out, _ in found), min(into for _, into in found)


def _nic_rates(kind: HostKind, links: Links) -> tuple[float, float]:
    rate = links.nic_rate if kind.ranks > 1 else links.rate
    return rate(kind.number, out=True), rate(kind.number, out=False)


def _rank_flow(collective: str, n: int, root: bool) -> tuple[int, int]:
    """Blocks that must leave a rank and reach it."""
    return {
        "all_reduce": (1, 1),
        "all_gather": (1, n - 1),
        "reduce_scatter": (n - 1, 1),
        "all_to_all": (n - 1, n - 1),
        "broadcast": (1, 0) if root else (0, 1),
        "reduce": (0, 1) if root else (1, 0),
        "gather": (0, n - 1) if root else (1, 0),
        "scatter": (n - 1, 0) if root else (0, 1),
        "send_recv": (1, 1),
        "barrier": (0, 0),
    }[collective]


def _rank_mean(collective: str, n: int) -> float:
    """Blocks that ranks send in the mean, to combine and hand out every piece."""
    rooted = (n - 1) / n
    return {
        "all_reduce": (2 * n - 2) / n, "all_gather": n - 1, "reduce_scatter": n - 1, "all_to_all": n - 1,
        "broadcast": rooted, "reduce": rooted, "gather": rooted, "scatter": rooted, "send_recv": 1, "barrier": 0,
    }[collective]  # fmt: skip


def _host_flow(collective: str, n: int, kind: HostKind) -> tuple[int, int]:
    """Blocks that must leave a host and reach it."""
    here, elsewhere = kind.ranks, n - kind.ranks
    return {
        "all_reduce": (1, 1),
        "all_gather": (here, elsewhere),
        "reduce_scatter": (elsewhere, here),
        "all_to_all": (here * elsewhere, here * elsewhere),
        "broadcast": (1, 0) if kind.root else (0, 1),
        "reduce": (0, 1) if kind.root else (1, 0),
        "gather": (0, elsewhere) if kind.root else (here, 0),
        "scatter": (elsewhere, 0) if kind.root else (0, here),
        "send_recv": (kind.leaving, kind.reaching),
        "barrier": (0, 0),
    }[collective]


def _host_mean(collective: str, n: int, k: int, kinds: tuple[HostKind, ...]) -> float:
    """Blocks that hosts send in the mean."""
    at_root = next(kind.ranks for kind in kinds if kind.root)
    pairs = sum(kind.hosts * kind.ranks * (n - kind.ranks) for kind in kinds)
    crossing = sum(kind.hosts * kind.leaving for kind in kinds)
    return {
        "all_reduce": 2 * (k - 1), "all_gather": n * (k - 1), "reduce_scatter": n * (k - 1), "all_to_all": pairs,
        "broadcast": k - 1, "reduce": k - 1, "gather": n - at_root, "scatter": n - at_root, "send_recv": crossing,
        "barrier": 0,
    }[collective] / k  # fmt: skip
