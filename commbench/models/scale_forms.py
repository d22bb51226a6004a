"""Per algorithm, round by round, what its schedule does: the forms behind :mod:`commbench.models.scale`.

For ranks that are all alike on links of one class they are the textbooks' (:mod:`commbench.models.closed_forms`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from commbench.models.rounds import NO, OTHERS, PAIR, Machine, Round, World, both_ways, rounds_s
from commbench.models.tree_paths import binomial_paths, double_tree_edges


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One operation: ``size`` is the whole message, ``block`` an n-th of it."""

    machine: Machine
    size: float
    pieces: int
    streamed: bool
    root: int

    @property
    def world(self) -> World:
        return self.machine.world

    @property
    def n(self) -> int:
        return self.world.ranks

    @property
    def block(self) -> float:
        return self.size / self.n

    def rounds(self, *rounds: Round) -> float:
        return rounds_s(self.machine, rounds)


# Rounds in which every rank sends to the rank so many further on.


def _shift(world: World, distance: int, size: float, count: int = 1, *, reduces: bool = False) -> Round:
    n, g = world.ranks, world.per_host
    crossing = min(distance, n - distance, g) if world.hosts > 1 else 0
    both = PAIR if 2 * distance == n else OTHERS
    return Round(size, count, crossing, count * crossing, count * (g - crossing), both, reduces, True)


def _every_shift(world: World, size: float, *, reduces: bool = False) -> list[Round]:
    """All distances from 1 to n-1: g messages of each host cross, fewer at the g-1 shortest ways round either way."""
    n, g = world.ranks, world.per_host
    if n == 2 or world.hosts == 1:
        return [_shift(world, 1, size, n - 1, reduces=reduces)]
    most = min(g, n // 2)  # the way round the other way is shorter where one host has most of the ranks
    few, many, all_cross = most // 2, most - 1 - most // 2, n - 1 - 2 * (most - 1)
    few_sum, many_sum = few * (few + 1), many * most
    return [
        Round(size, 2 * few, few, few_sum, 2 * few * g - few_sum, OTHERS, reduces, True),
        Round(size, 2 * many, most - 1, many_sum, 2 * many * g - many_sum, OTHERS, reduces, True),
        Round(size, all_cross, most, all_cross * most, all_cross * (g - most), OTHERS, reduces, True),
    ]


def _ring(phases: int, reducing: int) -> Callable[[Job], float]:
    def seconds(job: Job) -> float:
        return job.rounds(
            _shift(job.world, 1, job.block, reducing * (job.n - 1), reduces=True),
            _shift(job.world, 1, job.block, (phases - reducing) * (job.n - 1)),
        )

    return seconds


def _pairwise(reduces: bool) -> Callable[[Job], float]:
    return lambda job: job.rounds(*_every_shift(job.world, job.block, reduces=reduces))


def _distances(n: int) -> list[int]:
    return [1 << j for j in range((n - 1).bit_length())]


def _bruck_all_gather(job: Job) -> float:
    return job.rounds(*(_shift(job.world, d, min(d, job.n - d) * job.block) for d in _distances(job.n)))


def _bruck_all_to_all(job: Job) -> float:
    def blocks(d: int) -> int:
        """How many of the distances 1..n-1 have bit d."""
        return job.n // (2 * d) * d + max(0, job.n % (2 * d) - d)

    return job.rounds(*(_shift(job.world, d, blocks(d) * job.block) for d in _distances(job.n)))


def _dissemination(job: Job) -> float:
    return job.rounds(*(_shift(job.world, d, 0.0) for d in _distances(job.n)))


def _send_recv(job: Job) -> float:
    return job.rounds(_shift(job.world, 1, job.size))


# Exchanges over distances that are powers of two; see commbench.schedules.doubling for ranks that are no power of two.


def _core(n: int) -> int:
    return 1 << (n.bit_length() - 1)


@lru_cache(maxsize=256)
def _leaving(world: World, distance: int) -> int:
    """How many of a host's ranks exchange with another host's over a distance within the core, at most."""
    if world.hosts == 1:
        return 0
    n, g = world.ranks, world.per_host
    extra = n - _core(n)
    if g == 1 or distance >= g:
        return g

    def core_rank(rank: int) -> int:
        return rank // 2 if rank <= 2 * extra else rank - extra

    def lower(v: int) -> int:
        """The core ranks below v whose partner is above them."""
        return v // (2 * distance) * distance + min(v % (2 * distance), distance)

    most = 0
    # The pattern repeats along the hosts, once for those in which some ranks sit out and once for the others.
    period = 4 * distance
    hosts = {*range(min(world.hosts, period)), *range(max(0, world.hosts - period), world.hosts)}
    for host in hosts:
        first, stop = core_rank(min(host * g, n)), core_rank(min(host * g + g, n))
        inside = max(0, lower(stop - distance) - lower(first)) if stop - distance > first else 0
        most = max(most, stop - first - 2 * inside)
    return most


def _exchange(world: World, distance: int, size: float, *, reduces: bool) -> Round:
    crossing = _leaving(world, distance)
    return Round(size, 1, crossing, crossing, world.per_host - crossing, PAIR, reduces)


def _exchanges(
    job: Job, size_of: Callable[[int], float], *, up: bool, reduces: bool, before: float = 0.0, after: float = 0.0
) -> list[Round]:
    """Distances doubling or halving; ``before`` and ``after``: bytes between a rank that sits out and its neighbour."""
    core = _core(job.n)
    distances = _distances(core)
    rounds = [_exchange(job.world, d, size_of(d), reduces=reduces) for d in (distances if up else reversed(distances))]
    if core == job.n:
        return rounds
    g, extra = job.world.per_host, job.n - core
    # Ranks 2i and 2i+1 of the first ``extra`` pairs; the first that can be parted is at the end of the first host.
    crossing = int(job.world.hosts > 1 and g % 2 == 1 and (g - 1) // 2 < extra)
    aside = Round(0.0, 1, crossing, crossing, min(g // 2, extra), NO)
    first = aside._replace(size=before, reduces=reduces)
    return [*([first] if before else []), *rounds, *([aside._replace(size=after)] if after else [])]


def _doubling_all_reduce(job: Job) -> float:
    whole = job.size
    return job.rounds(*_exchanges(job, lambda d: whole, up=True, reduces=True, before=whole, after=whole))


def _halving_doubling_all_reduce(job: Job) -> float:
    piece = job.size / _core(job.n)
    halving = _exchanges(job, lambda d: d * piece, up=False, reduces=True, before=job.size)
    doubling = _exchanges(job, lambda d: d * piece, up=True, reduces=False, after=job.size)
    return job.rounds(*halving, *doubling)


def _cube(job: Job) -> Callable[[int], float]:
    extra = job.n - _core(job.n)
    return lambda d: (d + min(d, extra)) * job.block


def _doubling_all_gather(job: Job) -> float:
    rest = (job.n - 1) * job.block
    return job.rounds(*_exchanges(job, _cube(job), up=True, reduces=False, before=job.block, after=rest))


def _halving_reduce_scatter(job: Job) -> float:
    return job.rounds(*_exchanges(job, _cube(job), up=False, reduces=True, before=job.size, after=job.block))


# Binomial trees.


def _tree_s(job: Job, size_of: Callable[[int], float], *, reduces: bool, alone: bool = True) -> float:
    """Once up or down a binomial tree; ``size_of`` a distance: bytes of its messages.

    ``alone``: nothing else follows, so that streamed operations are held up by the root's own messages only.
    """
    machine, world = job.machine, job.world
    inside, crossing, host = {}, {}, 0.0
    place = job.root % world.per_host
    for d in _distances(job.n):
        size = size_of(d)
        adding = size * machine.links.reduce_seconds_per_byte if reduces else 0.0
        if world.per_host > 1:
            busy = max(1, world.per_host // (2 * d)) * machine.cost(size, crossing=False).host_busy
            host += busy if d < world.per_host else 0.0
            inside[d] = max(machine.message_s(size, crossing=False), 0.0 if job.streamed and alone else busy) + adding
        if world.hosts > 1:
            crossing[d] = machine.message_s(size, crossing=True) + adding
    if job.streamed and alone:
        own = sum(
            (crossing if world.hosts > 1 and place + d >= world.per_host else inside)[d] for d in _distances(job.n)
        )
        return max(own, host)
    longest = 0.0
    for waits, crosses in binomial_paths(job.n, world.hosts, world.per_host, place):
        path = sum((crossing if crosses & d else inside)[d] for d in _distances(job.n) if waits & d)
        longest = max(longest, path)
    return longest


def _binomial(down: int, up: int) -> Callable[[Job], float]:
    def seconds(job: Job) -> float:
        ways = [True] * up + [False] * down
        return sum(_tree_s(job, lambda d: job.size, reduces=way, alone=len(ways) == 1) for way in ways)

    return seconds


def _binomial_parts(job: Job) -> float:
    return _tree_s(job, lambda d: min(d, job.n - d) * job.block, reduces=False)


# Chains and double trees, in pieces.


class _Pace(NamedTuple):
    """Seconds of one piece over a link inside a host and over one between hosts."""

    inside: float
    crossing: float

    @property
    def slowest(self) -> float:
        return max(self)


def _pace(job: Job, size: float, *, reduces: bool, both: str, nic_both: bool) -> _Pace:
    """``nic_both``: a NIC takes pieces in while it sends others out."""
    machine, world = job.machine, job.world
    adding = size * machine.links.reduce_seconds_per_byte if reduces else 0.0
    inside = crossing = 0.0
    if world.per_host > 1:
        inside = machine.message_s(size, crossing=False, both=both) + adding
    if world.hosts > 1:
        mixed = world.per_host > 1
        crossing = machine.message_s(size, crossing=True, both=both, mixed=mixed, nic_both=nic_both) + adding
    return _Pace(inside, crossing)


def _chain(reduces: bool) -> Callable[[Job], float]:
    def seconds(job: Job) -> float:
        world, c = job.world, job.pieces
        n, g, k = world.ranks, world.per_host, world.hosts
        size = job.size / c
        plain = _pace(job, size, reduces=reduces, both=NO, nic_both=False)
        pace = plain if c == 1 or n == 2 else _pace(job, size, reduces=reduces, both=OTHERS, nic_both=False)
        crowded = _pace(job, size, reduces=reduces, both=OTHERS, nic_both=True) if k > 2 and c > g else pace
        # A ring but for one link: a broadcast does not need the one into the root, a reduction not the one out of it.
        missing = job.root % g == (g - 1 if reduces else 0)
        crossings = k - missing if k > 1 else 0
        host = c * (g - 1) * job.machine.cost(size, crossing=False).host_busy if g > 1 else 0.0
        if job.streamed:
            # A rank takes in the first piece before it hands it on, and hands on the last one after it took it in.
            around = min(pace) if 1 < g < n else pace.slowest
            return max(c * pace.slowest + (around if n > 2 else 0.0), host)
        path = (n - 1 - crossings) * pace.inside + crossings * pace.crossing
        path += (c - 1) * pace.slowest + max(0, c - g) * (crowded.slowest - pace.slowest)
        if c > 1 and n > 2:
            # The first piece leaves a rank that receives nothing, the last one reaches one that sends nothing.
            first = (pace.inside - plain.inside) if g > 1 else pace.crossing - plain.crossing
            path -= first + (pace.slowest - plain.slowest)
        return max(path, host)

    return seconds


def _double_tree(down: int, up: int) -> Callable[[Job], float]:
    """The first piece goes through all levels, two messages at each; the others follow at the pace of the busiest."""

    def seconds(job: Job) -> float:
        world, machine, c = job.world, job.machine, job.pieces
        n, g, k = world.ranks, world.per_host, world.hosts
        levels, ways = (n - 1).bit_length(), down + up
        size = job.size / (2 * c)
        adding = up * size * machine.links.reduce_seconds_per_byte
        # Subtrees of a quarter of a host do not cross; of how many ranks there are such depends on how hosts divide.
        inner = levels if k == 1 else max(0, (g & -g).bit_length() - 3)
        busiest = min(n, 4) if ways == 2 else 2
        at_nic = ways * double_tree_edges(n, k, g) if g > 1 else 0
        both = OTHERS if n > 2 else PAIR if ways == 2 else NO

        def level(crossing: bool) -> tuple[float, float]:
            """Seconds of the first piece at one level, and of each further one."""
            cost = machine.cost(size, crossing=crossing)
            one, more = cost.occupied, cost.occupied + both_ways(cost, both)
            first, pace = 2 * one, max(busiest * more, max(2, busiest - 1) * more + adding)
            if crossing and at_nic:
                first = max(first, 2 * machine.nic_s(size, NO))
                pace = max(pace, at_nic * machine.nic_s(size, both))
            return cost.latency + first + adding * ways / 2, cost.latency + pace

        total = pace = host = 0.0
        for crossing, hops in ((False, inner * ways), (True, (levels - inner) * ways)):
            if hops:
                first, each = level(crossing)
                total, pace = total + hops * first, max(pace, each)
        if g > 1:
            host = ways * 2 * (g - 1) * machine.cost(size, crossing=False).host_busy
            pace = max(pace, level(False)[1])
        return max(total + (c - 1) * pace, c * host)

    return seconds


# Hierarchical: see commbench.schedules.hierarchical. A rail's message crosses beside those of the host's other rails.


def _rail(job: Job, size: float, count: int, *, reduces: bool = False) -> Round:
    """Rounds over the hosts, for every rank of a host at once."""
    g = job.world.per_host
    both = PAIR if job.world.hosts == 2 else OTHERS
    return Round(size, count, g, count * g, 0, both, reduces)


def _node(job: Job, size: float, *, reduces: bool = False) -> Round:
    g = job.world.per_host
    return Round(size, g - 1, 0, 0, (g - 1) * g, PAIR if g == 2 else OTHERS, reduces)


def _hierarchical_all_reduce(job: Job) -> float:
    k, g = job.world.hosts, job.world.per_host
    part = job.size / g
    return (
        job.rounds(_node(job, part, reduces=True))
        + job.rounds(_rail(job, part / k, k - 1, reduces=True), _rail(job, part / k, k - 1))
        + job.rounds(_node(job, part))
    )


def _hierarchical_gather(reduces: bool) -> Callable[[Job], float]:
    def seconds(job: Job) -> float:
        k, g = job.world.hosts, job.world.per_host
        between = job.rounds(_rail(job, job.size / (k * g), k - 1, reduces=reduces))
        return between + job.rounds(_node(job, job.size / g, reduces=reduces))

    return seconds


def _hierarchical_all_to_all(job: Job) -> float:
    k, g = job.world.hosts, job.world.per_host
    return job.rounds(_rail(job, job.size / k, k - 1)) + job.rounds(_node(job, job.size / g))


def _hierarchical_chain(reduces: bool) -> Callable[[Job], float]:
    def seconds(job: Job) -> float:
        k, g, c = job.world.hosts, job.world.per_host, job.pieces
        both = OTHERS if c > 1 else NO
        size = job.size / c
        pace = _pace(job, size, reduces=reduces, both=both, nic_both=k > 2 and c > 1)
        inside = job.machine.cost(size, crossing=False)
        # A leader sends to the next one and into its host: the one message waits behind the other.
        waits = inside.occupied + (size * job.machine.links.reduce_seconds_per_byte if reduces else 0.0)
        slowest = max(pace.inside, pace.crossing + waits)
        host = c * (g - 1) * inside.host_busy
        if job.streamed:
            return max((2 if k > 2 else 1) * pace.crossing + pace.inside + (c - 1) * slowest, host)
        return max((k - 1) * pace.crossing + (g - 1) * pace.inside + (c - 1) * slowest, host)

    return seconds


FORMS: dict[tuple[str, str], Callable[[Job], float]] = {
    ("all_reduce", "ring"): _ring(2, 1),
    ("all_reduce", "binomial_tree"): _binomial(1, 1),
    ("all_reduce", "double_binary_tree"): _double_tree(1, 1),
    ("all_reduce", "recursive_doubling"): _doubling_all_reduce,
    ("all_reduce", "halving_doubling"): _halving_doubling_all_reduce,
    ("all_reduce", "hierarchical"): _hierarchical_all_reduce,
    ("all_gather", "ring"): _ring(1, 0),
    ("all_gather", "recursive_doubling"): _doubling_all_gather,
    ("all_gather", "bruck"): _bruck_all_gather,
    ("all_gather", "hierarchical"): _hierarchical_gather(reduces=False),
    ("reduce_scatter", "ring"): _ring(1, 1),
    ("reduce_scatter", "halving_doubling"): _halving_reduce_scatter,
    ("reduce_scatter", "pairwise"): _pairwise(reduces=True),
    ("reduce_scatter", "hierarchical"): _hierarchical_gather(reduces=True),
    ("all_to_all", "pairwise"): _pairwise(reduces=False),
    ("all_to_all", "bruck"): _bruck_all_to_all,
    ("all_to_all", "hierarchical"): _hierarchical_all_to_all,
    ("broadcast", "ring"): _chain(reduces=False),
    ("broadcast", "binomial_tree"): _binomial(1, 0),
    ("broadcast", "double_binary_tree"): _double_tree(1, 0),
    ("broadcast", "hierarchical"): _hierarchical_chain(reduces=False),
    ("reduce", "ring"): _chain(reduces=True),
    ("reduce", "binomial_tree"): _binomial(0, 1),
    ("reduce", "double_binary_tree"): _double_tree(0, 1),
    ("reduce", "hierarchical"): _hierarchical_chain(reduces=True),
    ("gather", "binomial_tree"): _binomial_parts,
    ("scatter", "binomial_tree"): _binomial_parts,
    ("send_recv", "ring"): _send_recv,
    ("barrier", "dissemination"): _dissemination,
}
