"""What an operation should take: the time of every algorithm that is known for it, and the bound."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

from commbench.collectives import COLLECTIVES
from commbench.models.bounds import STREAMED, bound, classes_of
from commbench.models.closed_forms import closed_form
from commbench.models.links import Links
from commbench.models.pricing import price
from commbench.models.rounds import World
from commbench.models.scale import time_at_scale, times_at_scale
from commbench.models.scale_bounds import bound_of_kinds, bound_of_world, kinds_of_hosts
from commbench.schedules.catalogue import (
    ALGORITHMS,
    HIERARCHICAL,
    MOST_PIECES,
    PIPELINED,
    build,
    buildable,
    pieces_for,
)
from commbench.schedules.schedule import Schedule

RING, TREE = "ring", "double_binary_tree"
NEAR = 0.3  # a model that is further off does not explain a measurement
MOST_SIMULATED = 32  # ranks; beyond, all would wait for seconds at every point while rank 0 simulates
STREAM = 2  # K of the growth per operation


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Seconds. ``times``: each algorithm's; ``ring_s``, ``tree_s``: two of them, None where there is no such algorithm.

    The tree is the pipelined double binary tree.
    """

    ring_s: float | None
    tree_s: float | None
    bound_s: float
    times: dict[str, float] = field(default_factory=dict)


def predict(
    collective: str,
    message_bytes: float,
    hosts: tuple[int, ...],
    links: Links,
    timing: str = "isolated",
    root: int = 0,
    itemsize: int = 4,
) -> Prediction:
    """The times of one operation by every algorithm, and the bound on it.

    ``hosts[rank]`` is the host of a rank of the group, ``itemsize`` the bytes of an element, of which a piece has at
    least one. A streamed operation takes what each further one adds, (T(2K) - T(K))/K. Up to 32 ranks are simulated;
    beyond, closed forms stand in (:mod:`commbench.models.scale`), for which every host has as many ranks as the most
    loaded one and neighbours share a host, but never less than the bound. Raises ValueError for an unknown timing and
    for a link that is needed but not calibrated, KeyError for an unknown collective.
    """
    if len(hosts) > MOST_SIMULATED:
        least = bound_of_kinds(collective, message_bytes, kinds_of_hosts(hosts, root), links, timing)
        times = times_at_scale(collective, message_bytes, World.of(hosts), links, timing, root, itemsize)
        return _prediction(times, least)
    least = bound(collective, message_bytes, hosts, links, timing, root)
    times = {}
    for algorithm in ALGORITHMS.get(collective, {}):
        if buildable(collective, algorithm, hosts):
            continue
        pieces = _best_pieces(collective, algorithm, message_bytes, hosts, links, root, itemsize)
        times[algorithm] = predict_algorithm(collective, algorithm, message_bytes, hosts, links, timing, root, pieces)
    return _prediction(times, least)


def predict_even(
    collective: str, message_bytes: float, ranks: int, nodes: int, links: Links, timing: str = "isolated",
    root: int = 0, itemsize: int = 4,
) -> Prediction:  # fmt: skip
    """As :func:`predict` for ``ranks`` shared out equally over ``nodes`` hosts; as quick for a million as for 65.

    Raises ValueError where they cannot be.
    """
    world = World.even(ranks, nodes)
    if ranks <= MOST_SIMULATED:
        hosts = tuple(rank // world.per_host for rank in range(ranks))
        return predict(collective, message_bytes, hosts, links, timing, root, itemsize)
    least = bound_of_world(collective, message_bytes, world, links, timing, root)
    return _prediction(times_at_scale(collective, message_bytes, world, links, timing, root, itemsize), least)


def _prediction(times: dict[str, float], least: float) -> Prediction:
    held = {algorithm: max(least, seconds) for algorithm, seconds in times.items()}
    return Prediction(ring_s=held.get(RING), tree_s=held.get(TREE), bound_s=least, times=held)


def predict_algorithm(
    collective: str, algorithm: str, message_bytes: float, hosts: tuple[int, ...], links: Links,
    timing: str = "isolated", root: int = 0, pieces: int = 1,
) -> float:  # fmt: skip
    """Seconds that one algorithm takes with the message in ``pieces`` pieces; the rest as in :func:`predict`."""
    if len(hosts) > MOST_SIMULATED:
        return time_at_scale(collective, algorithm, message_bytes, World.of(hosts), links, timing, root, pieces)
    return predict_schedule(
        build(collective, algorithm, len(hosts), root, pieces, hosts), message_bytes, hosts, links, timing
    )


def predict_schedule(
    schedule: Schedule, message_bytes: float, hosts: tuple[int, ...], links: Links, timing: str = "isolated"
) -> float:
    """Seconds that a schedule takes: alone, or for each further one of a stream."""
    if timing != STREAMED:
        return price(schedule, message_bytes, hosts, links)
    longer, shorter = (price(schedule, message_bytes, hosts, links, repeats) for repeats in (2 * STREAM, STREAM))
    return (longer - shorter) / STREAM


def nearest(times: dict[str, float], measured_s: float) -> tuple[str | None, float | None]:
    """The model whose time has the nearest ratio to the measured one, and measured/model - 1.

    The name is None where even that is off by more than 30 %; both are where there is no model with a time.
    """
    usable = {name: seconds for name, seconds in times.items() if seconds > 0}
    if not usable or not measured_s > 0:
        return None, None
    name = min(usable, key=lambda name: abs(math.log(measured_s / usable[name])))
    error = measured_s / usable[name] - 1
    return (name if abs(error) <= NEAR else None), error


def bus_bandwidth(collective: str, message_bytes: float, ranks: int, seconds: float) -> float:
    """Bytes a second: message over time, times the collective's bus factor."""
    return message_bytes / seconds * COLLECTIVES[collective].bus_factor(ranks)


@lru_cache(maxsize=4096)
def _best_pieces(
    collective: str,
    algorithm: str,
    message_bytes: float,
    hosts: tuple[int, ...],
    links: Links,
    root: int,
    itemsize: int,
) -> int:
    """The power of two pieces near the formula's optimum that takes the least time.

    Isolated operations decide for streamed ones too: a library chooses its pieces without knowing what comes next.
    """
    if (collective, algorithm) not in PIPELINED:
        return 1
    if (collective, algorithm) in HIERARCHICAL:
        return pieces_for(collective, algorithm, message_bytes)
    most = min(MOST_PIECES, int(message_bytes) // (2 * itemsize))

    def cost(pieces: int) -> float:
        return price(build(collective, algorithm, len(hosts), root, pieces, hosts), message_bytes, hosts, links)

    best = _formula_pieces(collective, algorithm, message_bytes, hosts, links, most)
    costs = {pieces: cost(pieces) for pieces in (best // 2, best, best * 2) if 1 <= pieces <= max(most, 1)}
    return min(costs, key=lambda pieces: (costs[pieces], pieces))


def _formula_pieces(
    collective: str, algorithm: str, message_bytes: float, hosts: tuple[int, ...], links: Links, most: int
) -> int:
    """The power of two near c* = √(R·A/α) of (R + c)(α + A/c), not above ``most``."""
    alpha, beta, gamma = _slowest(hosts, links)
    one = closed_form(collective, algorithm, len(hosts))
    waiting = one.rounds - 1
    moving = one.seconds(message_bytes, 0.0, beta, gamma) / one.rounds
    if waiting == 0 or most < 2:
        return 1
    ideal = math.sqrt(waiting * moving / alpha) if alpha > 0 else math.inf
    return 1 << max(0, min(round(math.log2(max(min(ideal, most), 1))), most.bit_length() - 1))


def _slowest(hosts: tuple[int, ...], links: Links) -> tuple[float, float, float]:
    """α, β and γ of the slowest class of links that the group has."""
    found = [links.of(crossing=crossing) for crossing in classes_of(hosts)]
    return (
        max(link.latency_s for link in found),
        max(link.seconds_per_byte for link in found),
        links.reduce_seconds_per_byte,
    )
