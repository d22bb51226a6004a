"""What rounds of messages take on hosts that are all alike: the pricing's rules, summed instead of simulated.

In a round every rank sends one message and receives one, or some of them do. A rank goes on when its own messages are
done, so a stretch of rounds takes the longest of three: what one rank needs for its messages one after another (and
once the wait behind the others at a shared NIC), what a NIC needs for all messages of its ranks (and the last one's
latency), what a host's memory needs for those inside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from commbench.models.links import Links
from commbench.models.pricing import MessageCost, message_cost

NO, PAIR, OTHERS = "no", "pair", "others"
"""Whether ranks receive while they send: not at all, from the rank they send to, from another."""
_ANY = (10**9, 10**9 + 1)  # two hosts beyond all whose rates are known


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """``ranks`` on ``hosts`` hosts of which none has more than ``per_host``; a host's ranks are neighbours.

    Raises ValueError for numbers that no layout has.
    """

    ranks: int
    hosts: int
    per_host: int

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= self.ranks or not self.ranks <= self.hosts * self.per_host <= self.ranks * self.hosts:
            raise ValueError(f"no layout has {self.ranks} ranks on {self.hosts} hosts, {self.per_host} at most on one")

    @classmethod
    def even(cls, ranks: int, hosts: int) -> World:
        """Equal hosts. Raises ValueError where the ranks cannot be shared out equally."""
        if hosts < 1 or ranks < 1 or ranks % hosts:
            raise ValueError(f"{ranks} ranks cannot be shared out equally over {hosts} hosts")
        return cls(ranks=ranks, hosts=hosts, per_host=ranks // hosts)

    @classmethod
    def of(cls, hosts: Sequence[int]) -> World:
        """The world whose every host has as many ranks as the most loaded one of ``hosts[rank]``."""
        counts = Counter(hosts)
        return cls(ranks=len(hosts), hosts=len(counts), per_host=max(counts.values()))


class Round(NamedTuple):
    """``repeats`` rounds alike, of messages of ``size`` bytes.

    ``crossing`` messages leave the busiest host in one of them, and as many reach it; ``crossings`` and ``insides`` add
    up those that leave it and those that stay inside it over all ``repeats``. ``mixing``: a rank's next message comes from
    a rank with another place in its host, and so in another place of the queue at the NIC.
    """

    size: float
    repeats: int
    crossing: int
    crossings: int
    insides: int
    both: str
    reduces: bool = False
    mixing: bool = False


@dataclass(kw_only=True, slots=True)
class Machine:
    """Links, as the ranks of a world use them; the slowest of hosts of unequal rates counts for all."""

    world: World
    links: Links
    _known: dict[tuple[bool, float], MessageCost] = field(default_factory=dict, init=False)
    _slowest: tuple[int, int] = field(default=_ANY, init=False)

    def __post_init__(self) -> None:
        rates = self.links.host_rates[: self.world.hosts]
        if rates and self.world.hosts > 1:
            hosts = range(min(len(rates) + 1, self.world.hosts))
            self._slowest = (
                max(hosts, key=lambda host: self.links.rate(host, out=True)),
                max(hosts, key=lambda host: self.links.rate(host, out=False)),
            )

    def cost(self, size: float, *, crossing: bool) -> MessageCost:
        """One message's cost. Raises ValueError for a link that is not calibrated."""
        found = self._known.get((crossing, size))
        if found is None:
            sender, receiver = self._slowest
            if sender == receiver:
                receiver = _ANY[1]
            found = self._known[crossing, size] = message_cost(
                self.links, sender, receiver if crossing else sender, size
            )
        return found

    def message_s(
        self, size: float, *, crossing: bool, both: str = NO, mixed: bool = False, nic_both: bool | None = None
    ) -> float:
        """Seconds of one message. ``mixed``: the other way, its rank has one inside the host; ``nic_both``: whether its
        NIC receives while it sends, if not just as its rank."""
        cost = self.cost(size, crossing=crossing)
        busy = cost.occupied + both_ways(cost, both)
        if mixed and both != NO and cost.occupied:
            inside = self.cost(size, crossing=False)
            busy = cost.occupied + max(cost.shift * min(1.0, inside.occupied / cost.occupied), inside.shift)
        if crossing and self.world.per_host > 1:
            busy = max(busy, self.nic_s(size, both if nic_both is None else OTHERS if nic_both else NO))
        if not crossing:
            # A rank that sends and receives waits for its host twice.
            return max(cost.latency + busy, cost.host_busy * (1 if both == NO else 2))
        return cost.latency + busy

    def nic_s(self, size: float, both: str) -> float:
        """Seconds for which a message keeps a NIC busy that several ranks share."""
        cost = self.cost(size, crossing=True)
        busy = max(cost.nic_out, cost.nic_in)
        return busy + (cost.nic if both != NO and busy else 0.0)


def both_ways(cost: MessageCost, both: str) -> float:
    """What is added; a message that keeps nothing busy meets no other."""
    if both == NO or not cost.occupied:
        return 0.0
    return cost.exchange if both == PAIR else cost.shift


def rounds_s(machine: Machine, rounds: Iterable[Round]) -> float:
    """Seconds of rounds that follow one another."""
    path = queue = nic = last = waits = 0.0
    shared = machine.world.per_host > 1
    for r in rounds:
        longest = 0.0
        adding = r.size * machine.links.reduce_seconds_per_byte if r.reduces else 0.0
        if r.crossings:
            mixed = r.insides > 0 and 2 * r.crossing <= machine.world.per_host
            longest = machine.message_s(r.size, crossing=True, both=r.both, mixed=mixed)
            if shared:
                busy, latency = machine.nic_s(r.size, r.both), machine.cost(r.size, crossing=True).latency
                nic += r.crossings * busy
                queue = max(queue, r.crossing * busy + latency - longest)
                waits += max(0.0, r.crossings * busy + r.repeats * (latency - longest)) if r.mixing else 0.0
                last = latency + adding
        if r.insides:
            longest = max(longest, machine.message_s(r.size, crossing=False, both=r.both))
            path += max(
                0.0, r.insides * machine.cost(r.size, crossing=False).host_busy - r.repeats * (longest + adding)
            )
        path += r.repeats * (longest + adding)
    in_turn = max(path + queue, nic + last if nic else 0.0)
    # Where partners change, some ranks wait for one that was last in its queue: between none of them and all.
    return (in_turn + max(in_turn, path + waits)) / 2
