"""The time that no algorithm can beat on given links, worked out from what the collective itself must move.

Every piece of an output (:class:`commbench.collectives.Part`) is an item: made from the inputs of its sources and
needed by the ranks that put it out. For any set of ranks, here each rank and each host, an item with a source outside
and a need inside must come in, and one with a source inside and a need outside must go out, contributions of the same
side combined. Besides, an item that a sides have sources of and b sides need takes a - 1 transfers to combine and
b - 1 to hand out (one more if no side does both), so some side sends at least the mean: this is what gives
all_reduce 2(k-1)/k·m (Chan, Heimlich, Purkayastha and van de Geijn, Concurrency Computat. 19, 2007; Patarasuk and Yuan,
J. Parallel Distrib. Comput. 69, 2009).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from commbench.collectives import COLLECTIVES
from commbench.models.links import Links

ISOLATED, STREAMED = "isolated", "streamed"


def bound(
    collective: str, message_bytes: float, hosts: tuple[int, ...], links: Links, timing: str, root: int = 0
) -> float:
    """Seconds: the greatest of the latency bound and, per rank and per host, bytes that must pass over that side's rate.

    ``hosts[rank]`` is the host of a rank of the group, ``timing`` isolated or streamed; streamed operations hide
    latency behind one another and have no latency bound. A rank is granted the fastest class of links that it has.
    The latency bound holds for ranks that send one message at a time: what a rank knows can at most double per
    latency, so ⌈log2 n⌉ latencies where a rank must hear from, or be heard by, all n. Raises ValueError for an unknown
    timing and for a link that is needed but not calibrated.
    """
    if timing not in (ISOLATED, STREAMED):
        raise ValueError(f"timing is isolated or streamed, not {timing!r}")
    share = message_bytes / (len(hosts) if COLLECTIVES[collective].split else 1)
    demand = _demand(collective, hosts, root)
    rates = _rank_rates(hosts, links)
    seconds = [*_needed(demand.ranks, rates), demand.ranks.mean * min(min(pair) for pair in rates)]
    if len(demand.hosts.sides) > 1:
        nics = [_nic_rates(host, hosts, links) for host in demand.hosts.sides]
        seconds += [*_needed(demand.hosts, nics), demand.hosts.mean * min(min(pair) for pair in nics)]
    latency = 0.0
    if timing == ISOLATED:
        latency = demand.latencies * min(links.of(crossing=c).latency_s for c in classes_of(hosts))
    return max(latency, share * max(seconds))


def classes_of(hosts: tuple[int, ...]) -> list[bool]:
    """Which classes of links a group has: inside a host (False), between hosts (True)."""
    different = len(set(hosts))
    return [crossing for crossing, has in ((False, different < len(hosts)), (True, different > 1)) if has]


_Rates = tuple[float, float]  # seconds a byte out and in


def _rank_rates(hosts: tuple[int, ...], links: Links) -> list[_Rates]:
    """Per rank those of the fastest class of links that it has."""
    ranks_on = Counter(hosts)
    rates = {}
    for host, ranks in ranks_on.items():
        found = [(links.of(crossing=False).seconds_per_byte,) * 2] if ranks > 1 else []
        if len(ranks_on) > 1:
            found.append((links.rate(host, out=True), links.rate(host, out=False)))
        rates[host] = (min(out for out, _ in found), min(into for _, into in found))
    return [rates[host] for host in hosts]


def _nic_rates(host: int, hosts: tuple[int, ...], links: Links) -> _Rates:
    rate = links.nic_rate if hosts.count(host) > 1 else links.rate
    return rate(host, out=True), rate(host, out=False)


def _needed(flow: _Flow, rates: list[_Rates]) -> list[float]:
    """Per side the greater of what must go out and come in, each over its rate."""
    return [max(o * out, i * into) for o, i, (out, into) in zip(flow.out, flow.into, rates, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flow:
    """In blocks: per side what must come in and go out, and the mean over the sides of what is sent."""

    sides: tuple[int, ...]
    into: tuple[int, ...]
    out: tuple[int, ...]
    mean: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Demand:
    """What must pass each rank and each host; ``latencies``: ⌈log2⌉ of the most ranks that one must hear from or reach."""

    ranks: _Flow
    hosts: _Flow
    latencies: int


@lru_cache(maxsize=128)
def _demand(collective: str, hosts: tuple[int, ...], root: int) -> _Demand:
    n = len(hosts)
    items: dict[tuple[tuple[int, ...], int], list[int]] = {}  # (sources, block) -> the ranks that put it out
    for rank in range(n):
        for part in COLLECTIVES[collective].output(rank, n, root):
            items.setdefault((part.sources, part.block), []).append(rank)
    needs = [(sources, needers) for (sources, _), needers in items.items()]
    ranks = tuple(range(n))
    reached = n if not COLLECTIVES[collective].sized else _reached(needs, n)
    return _Demand(ranks=_flow(needs, ranks), hosts=_flow(needs, hosts), latencies=(reached - 1).bit_length())


_Needs = list[tuple[tuple[int, ...], list[int]]]


def _flow(needs: _Needs, side_of: tuple[int, ...]) -> _Flow:
    """What must pass the sides that the ranks are grouped into: ``side_of[rank]``."""
    into, out = dict.fromkeys(side_of, 0), dict.fromkeys(side_of, 0)
    transfers = 0
    for sources, needers in needs:
        have, need = {side_of[rank] for rank in sources}, {side_of[rank] for rank in needers}
        for side in need:
            into[side] += have != {side}
        for side in have:
            out[side] += need != {side}
        transfers += len(have) + len(need) - (2 if have & need else 1)
    return _Flow(sides=tuple(into), into=tuple(into.values()), out=tuple(out.values()), mean=transfers / len(into))


def _reached(needs: _Needs, n: int) -> int:
    """The most ranks that one must hear from, or that must hear from one, itself included."""
    hears: list[set[int]] = [{rank} for rank in range(n)]
    heard: list[set[int]] = [{rank} for rank in range(n)]
    for sources, needers in needs:
        for rank in needers:
            hears[rank].update(sources)
        for source in sources:
            heard[source].update(needers)
    return max(map(len, (*hears, *heard)))
