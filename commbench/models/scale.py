"""The time of every algorithm on worlds of any size: closed forms that know both classes of links and shared NICs.

Hosts are alike and a host's ranks are neighbours (:class:`commbench.models.rounds.World`). The forms count, round by
round, what the schedules of :mod:`commbench.schedules` do, and take constants from the same tables as the simulation.
docs/predict.md says how near they come to it.
"""

from __future__ import annotations

from commbench.models.bounds import STREAMED
from commbench.models.links import Links
from commbench.models.rounds import Machine, World
from commbench.models.scale_forms import FORMS, Job
from commbench.registry import unknown_name
from commbench.schedules.catalogue import ALGORITHMS, HIERARCHICAL, MOST_PIECES, PIPELINED, pieces_for


def time_at_scale(
    collective: str, algorithm: str, message_bytes: float, world: World, links: Links, timing: str = "isolated",
    root: int = 0, pieces: int = 1,
) -> float:  # fmt: skip
    """Seconds of one algorithm with the message in ``pieces`` pieces; streamed: what one more operation adds.

    Takes the same time for any number of ranks. Raises ValueError for an algorithm that has no form and for a link
    that is needed but not calibrated.
    """
    form = FORMS.get((collective, algorithm))
    if form is None:
        raise ValueError(unknown_name("closed form", f"{collective}:{algorithm}", map(":".join, FORMS)))
    machine = Machine(world=world, links=links)
    return form(Job(machine=machine, size=message_bytes, pieces=pieces, streamed=timing == STREAMED, root=root))


def times_at_scale(
    collective: str, message_bytes: float, world: World, links: Links, timing: str = "isolated", root: int = 0,
    itemsize: int = 4,
) -> dict[str, float]:  # fmt: skip
    """Seconds of every algorithm that there is for such a world; those in pieces have the best number of them.

    ``itemsize``: bytes of an element, of which a piece has at least one. Raises as :func:`time_at_scale`.
    """
    layered = 1 < world.hosts and 1 < world.per_host and world.ranks == world.hosts * world.per_host
    times = {}
    for algorithm in ALGORITHMS.get(collective, {}):
        pair = (collective, algorithm)
        if pair in HIERARCHICAL and not layered:
            continue
        if pair not in PIPELINED or pair in HIERARCHICAL:
            pieces = pieces_for(collective, algorithm, message_bytes)
        else:
            pieces = best_pieces(collective, algorithm, message_bytes, world, links, root, itemsize)
        times[algorithm] = time_at_scale(collective, algorithm, message_bytes, world, links, timing, root, pieces)
    return times


def best_pieces(
    collective: str, algorithm: str, message_bytes: float, world: World, links: Links, root: int = 0, itemsize: int = 4
) -> int:
    """The power of two pieces, :data:`MOST_PIECES` at most, with which an isolated operation takes the least time."""
    most = max(1, min(MOST_PIECES, int(message_bytes) // (2 * itemsize)))
    choices = [1 << power for power in range(most.bit_length())]
    return min(
        choices,
        key=lambda pieces: time_at_scale(
            collective, algorithm, message_bytes, world, links, root=root, pieces=pieces
        ),
    )  # fmt: skip


MULTI_RAIL_RING = "multi_rail_ring"
_RINGS = {"all_reduce": (2, 1), "all_gather": (1, 0), "reduce_scatter": (1, 1)}  # passes, of which these reduce


def multi_rail_ring_s(collective: str, message_bytes: float, world: World, links: Links) -> float | None:
    """Seconds of rings as GPU libraries make them, one for each NIC of a host; None where there is no such ring.

    A pass of n-1 hops takes n-k latencies inside hosts and k-1 between them, and (n-1)/n of the message at the slowest
    of a rank's link, all NICs of a host, and adding: slices follow one another so closely that these overlap.
    """
    passes, reducing = _RINGS.get(collective, (0, 0))
    n, k = world.ranks, world.hosts
    if not passes or k < 2 or world.per_host < 2:
        return None
    near, far = links.of(crossing=False), links.of(crossing=True)
    host = links.nic_seconds_per_byte or far.seconds_per_byte
    moving = max(near.seconds_per_byte, host)
    latency = (n - k) * near.latency_s + (k - 1) * far.latency_s
    moved = message_bytes * (n - 1) / n
    adding = max(moving, links.reduce_seconds_per_byte)
    return passes * latency + moved * (reducing * adding + (passes - reducing) * moving)
