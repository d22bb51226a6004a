"""The time of one exchange in which every pair of ranks has its own number of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from commbench.models.links import Links
from commbench.models.pricing import price_exchange

MOST_SIMULATED = 64  # ranks: 4032 messages


def exchange_s(sizes: NDArray[np.float64], host_of: Sequence[int], links: Links) -> float:
    """Seconds until the last rank has all of its messages, when all ranks post all of theirs at once.

    ``sizes[source, target]`` bytes, ``host_of[rank]`` the hosts. Up to 64 ranks the messages are simulated; beyond, the
    busiest side of a rank or NIC stands for the whole, and the start of each of its messages. Raises ValueError for a link
    that is needed but not calibrated.
    """
    hosts = tuple(int(host) for host in host_of)
    if len(hosts) <= MOST_SIMULATED:
        return price_exchange(np.rint(sizes).astype(np.int64).tolist(), hosts, links)
    return max((side.seconds for side in busy_sides(sizes, hosts, links)), default=0.0)


class Side:
    """One side of a rank or host: what has to pass it, and how long that takes it at least."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds


def busy_sides(sizes: NDArray[np.float64], hosts: tuple[int, ...], links: Links) -> list[Side]:
    """Every side with its time: bytes at the streaming rate, and the overhead of each message and one latency."""
    number = np.asarray(hosts)
    away = np.where(number[:, None] != number[None, :], sizes, 0.0)
    near = np.where(number[:, None] == number[None, :], sizes, 0.0)
    np.fill_diagonal(near, 0.0)
    found = []
    for rank in range(len(hosts)):
        for way, axis in (("sends", 1), ("receives", 0)):
            seconds = 0.0
            for volume, crossing in ((away, True), (near, False)):
                part = volume[rank] if axis else volume[:, rank]
                if part.any():
                    link = links.of(crossing=crossing)
                    rate = links.rate(hosts[rank], out=axis == 1) if crossing else link.seconds_per_byte
                    seconds += float(part.sum()) * rate + np.count_nonzero(part) * link.overhead_s + link.latency_s
            found.append(Side(f"rank {rank} {way}", seconds))
    for host in dict.fromkeys(hosts):
        mine = number == host
        for way, part in (("sends", away[mine]), ("receives", away[:, mine])):
            if part.any():
                rate = links.nic_rate(host, out=way == "sends")
                found.append(
                    Side(f"the NIC of host {host} {way}", float(part.sum()) * rate + links.of(crossing=True).latency_s)
                )
    return found


def limit(sizes: NDArray[np.float64], host_of: Sequence[int], links: Links) -> str | None:
    """Which side has most to do, in words; None where nothing is sent."""
    sides = busy_sides(sizes, tuple(int(host) for host in host_of), links)
    busiest = max(sides, key=lambda side: side.seconds, default=None)
    return busiest.name if busiest is not None and busiest.seconds > 0 else None
