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
    rank_rates = _rank_rates(hosts, links)
    ranks = tuple(range(len(hosts)))
    times = [share * blocks * rate for blocks, rate in zip(_flow(collective, ranks, root).most, rank_rates, strict=True)]
    times.append(share * _flow(collective, ranks, root).mean * min(rank_rates))
    if len(set(hosts)) > 1:
        flow = _flow(collective, hosts, root)
        rate = links.of(crossing=True).seconds_per_byte
        times.append(share * max(*flow.most, flow.mean) * rate)
    if timing == ISOLATED:
        latencies = [links.of(crossing=crossing).latency_s for crossing in _classes(hosts)]
        times.append(_latencies(collective, len(hosts), root) * min(latencies))
    return max(times)


def _classes(hosts: tuple[int, ...]) -> list[bool]:
    """Which classes of links a group has: inside a host (False), between hosts (True)."""
    different = len(set(hosts))
    return [crossing for crossing, has in ((False, different < len(hosts)), (True, different > 1)) if has]


def _rank_rates(hosts: tuple[int, ...], links: Links) -> list[float]:
    """Per rank the seconds per byte of the fastest class of links that it has."""
    rates = []
    for host in hosts:
        alone = hosts.count(host) == 1
        everywhere = len(set(hosts)) == 1
        usable = [crossing for crossing, has in ((False, not alone), (True, not everywhere)) if has]
        rates.append(min(links.of(crossing=crossing).seconds_per_byte for crossing in usable))
    return rates


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flow:
    """In blocks: per side the more of what must come in and go out, and the mean over the sides of what is sent."""

    most: tuple[int, ...]
    mean: float


@lru_cache(maxsize=128)
def _flow(collective: str, side_of: tuple[int, ...], root: int) -> _Flow:
    """What must pass the sides that the ranks are grouped into: ``side_of[rank]``."""
    sides = list(dict.fromkeys(side_of))
    into, out = dict.fromkeys(sides, 0), dict.fromkeys(sides, 0)
    transfers = 0
    for (sources, _), needers in _items(collective, len(side_of), root).items():
        have, need = {side_of[rank] for rank in sources}, {side_of[rank] for rank in needers}
        for side in need:
            into[side] += have != {side}
        for side in have:
            out[side] += need != {side}
        transfers += len(have) + len(need) - (2 if have & need else 1)
    return _Flow(most=tuple(max(into[side], out[side]) for side in sides), mean=transfers / len(sides))


def _items(collective: str, n: int, root: int) -> dict[tuple[tuple[int, ...], int], list[int]]:
    """Every different (sources, block) that some rank puts out, with the ranks that do."""
    items: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for rank in range(n):
        for part in COLLECTIVES[collective].output(rank, n, root):
            items.setdefault((part.sources, part.block), []).append(rank)
    return items


@lru_cache(maxsize=128)
def _latencies(collective: str, n: int, root: int) -> int:
    """⌈log2⌉ of the most ranks that one must hear from, or be heard by, itself included."""
    if not COLLECTIVES[collective].sized:
        return (n - 1).bit_length()
    hears: dict[int, set[int]] = {rank: {rank} for rank in range(n)}
    heard: dict[int, set[int]] = {rank: {rank} for rank in range(n)}
    for (sources, _), needers in _items(collective, n, root).items():
        for rank in needers:
            hears[rank].update(sources)
        for source in sources:
            heard[source].update(needers)
    return (max(map(len, (*hears.values(), *heard.values()))) - 1).bit_length()
