"""Causes that lie in hosts and libraries: processors that others use, settings, wasted bytes, unsteady times."""

from __future__ import annotations

from commbench.report.explain.evidence import (
    FACTOR,
    HIGH,
    IN_A_ROW,
    LOW,
    MEDIUM,
    SMALL_BYTES,
    Curve,
    Finding,
    HostFacts,
    Level,
    Spot,
    sizes_of,
)
from commbench.report.explain.expected import shares_leaving
from commbench.report.explain.settings import forced_algorithm, forced_protocol
from commbench.units import format_size, format_time

CROWDED = 0.25  # of the processors' time taken by others, while hardly any is left
MOSTLY_OTHERS = 0.5  # from here on it needs no other sign
FULL = 0.9  # of the processors' time in use: else nobody has to wait for one
STOLEN = 0.1
UNSTEADY = 1.5  # third quartile over first, of small messages
BIMODAL = 2.0  # the same for times of any size: noise of scheduling alone stays below
LONG_ROW = 3
SCHEDULING_S = 0.02  # waiting for a processor takes a few time slices of 3 or 4 ms
IDLE = 0.5  # of the processors' time in use: so far nobody waits for one
FORCED_FACTOR = 1.25  # a setting that is known to be there needs less to be believed
WASTE_BYTES = 256 << 10  # below, headers and acknowledgements count too


def host_bound(curve: Curve) -> Finding | None:
    """Small messages that wait for a processor: because others use them, or there are more ranks than processors."""
    hosts = [host for setup in curve.setups for host in setup.facts]
    crowded = max(filter(_is_crowded, hosts), key=lambda host: (host.others or 0) + (host.stolen or 0), default=None)
    small = {id(spot) for spot in _small(curve)}
    slow = curve.in_a_row(lambda spot: id(spot) in small and spot.times(spot.fastest_s) >= spot.limit)
    unsteady = curve.in_a_row(lambda spot: spot.spread >= UNSTEADY)
    said = [*_on_host(crowded)] if crowded else []
    marked = any(spot.oversubscribed or spot.host_bound for spot in curve.spots)
    if marked and slow:
        said.append("more ranks than processors" if curve.spots[0].oversubscribed else "the host could not keep up")
    level: Level
    if crowded and (slow or unsteady):
        level = HIGH if slow else MEDIUM
    elif (crowded and (crowded.others or 0) + (crowded.stolen or 0) >= MOSTLY_OTHERS) or (marked and slow):
        level = MEDIUM
    elif slow and _large_are_fine(curve) and all(spot.times(spot.slowest_s) >= spot.limit for spot in slow):
        level, said = LOW, ["small messages alone are slow; nothing else was seen on the hosts"]
    else:
        return None
    if slow:
        worst = max(slow, key=lambda spot: spot.times(spot.fastest_s))
        said.append(f"{_at(worst)}, {worst.seconds / (worst.fastest_s or 1):.1f} x what the links need")
    elif unsteady:
        said.append(f"times vary up to {max(spot.spread for spot in unsteady):.1f}-fold between quartiles")
    factor = max((spot.seconds / spot.fastest_s for spot in slow if spot.fastest_s), default=1.0)
    return Finding(
        kind="host_bound",
        cause="host-bound",
        level=level,
        factor=factor,
        sizes=sizes_of(slow or unsteady or curve.spots),
        judged_by=tuple(said),
    )


def _is_crowded(host: HostFacts) -> bool:
    taken = (host.others or 0.0) >= CROWDED and (host.busy or 0.0) >= FULL
    return taken or (host.stolen or 0.0) >= STOLEN


def _on_host(host: HostFacts) -> list[str]:
    said = []
    if host.others and host.others >= CROWDED:
        count = (
            f"{host.others * host.processors:.1f} of {host.processors}" if host.processors else f"{host.others:.0%} of"
        )
        said.append(f"other processes used {count} processors on {host.name}, which had no time to spare")
    if host.stolen and host.stolen >= STOLEN:
        said.append(f"the hypervisor gave {host.stolen:.0%} of {host.name}'s processor time to others")
    return said


def _small(curve: Curve) -> list[Spot]:
    """Sizes at which latency is most of the time."""
    first = curve.spots[0].fastest_s
    return [s for s in curve.spots if s.size <= SMALL_BYTES and first and s.fastest_s and s.fastest_s <= 2 * first]


def _large_are_fine(curve: Curve) -> bool:
    large = [spot for spot in curve.spots if spot.size > SMALL_BYTES]
    return len(large) >= IN_A_ROW and all(spot.times(spot.slowest_s) < FACTOR for spot in large)


def algorithm_forced(curve: Curve) -> Finding | None:
    """A setting took the choice from the library, and a better choice was there."""
    return _forced(curve, "algorithm_forced", [
        forced_algorithm(curve.case.backend, curve.case.collective, setup.settings) for setup in curve.setups
    ])  # fmt: skip


def protocol_forced(curve: Curve) -> Finding | None:
    """The same for the protocol that messages are sent by."""
    return _forced(
        curve, "protocol_forced", [forced_protocol(curve.case.backend, setup.settings) for setup in curve.setups]
    )


def _forced(curve: Curve, kind: str, settings: list[str | None]) -> Finding | None:
    said = next(filter(None, settings), None)
    # A name other than library was asked for, and stands beside every number.
    if said is None or curve.case.algorithm != "library":
        return None
    spots = curve.in_a_row(lambda spot: spot.times(_best(spot)) >= spot.limit / FACTOR * FORCED_FACTOR)
    if not spots:
        return None
    worst = max(spots, key=lambda spot: spot.seconds / (_best(spot) or 1))
    name = min(worst.predictions, key=worst.predictions.__getitem__)
    sure = all(spot.times(_best(spot)) >= spot.limit for spot in spots)
    return Finding(
        kind=kind,
        cause=kind.replace("_", " "),
        level=HIGH if sure else MEDIUM,
        factor=worst.seconds / worst.predictions[name],
        sizes=sizes_of(spots),
        judged_by=(said, f"{_at(worst)}, where {name} would take {format_time(worst.predictions[name])}"),
    )


def _best(spot: Spot) -> float | None:
    return min(spot.predictions.values(), default=None)


def moves_more_bytes(curve: Curve) -> Finding | None:
    """The NICs counted more than the leanest algorithm sends, and it took longer for it."""

    def waste(spot: Spot) -> float:
        shares = shares_leaving(spot.case, spot.hosts, known=False)
        if spot.wire_bytes is None or spot.size < WASTE_BYTES or not shares or not shares[0]:
            return 0.0
        return spot.wire_bytes / (shares[0] * spot.size)

    if curve.case.algorithm != "library" or not curve.several_hosts or curve.case.group != "world":
        return None
    spots = curve.in_a_row(lambda spot: waste(spot) >= FACTOR and spot.times(_best(spot)) >= FACTOR)
    if not spots:
        return None
    last = spots[-1]
    return Finding(
        kind="moves_more_bytes",
        cause="library moves more bytes than the operation needs",
        level=HIGH if len(spots) >= IN_A_ROW else MEDIUM,
        factor=last.seconds / (_best(last) or last.seconds),
        sizes=sizes_of(spots),
        of_run=False,
        judged_by=(
            f"{waste(last):.2f} times what the leanest algorithm sends left the hosts at {format_size(last.size)}",
        ),
    )


def unsteady_times(curve: Curve) -> Finding | None:
    """Quartiles far apart, or launches or passes that differ, at many sizes in a row; by more than scheduling explains."""
    facts = [host for setup in curve.setups for host in setup.facts]
    idle = bool(facts) and all(host.busy is not None and host.busy < IDLE for host in facts)

    def apart(spot: Spot, ratio: float) -> bool:
        return ratio >= BIMODAL and (idle or (ratio - 1) * (spot.p25 or spot.seconds) >= SCHEDULING_S)

    spread = curve.in_a_row(lambda spot: apart(spot, spot.spread), LONG_ROW)
    between = curve.in_a_row(lambda spot: apart(spot, spot.over_launches or 1.0), LONG_ROW)
    spots = max(spread, between, key=len)
    if not spots:
        return None
    what = "third quartile over the first" if spots == spread else "slowest over the fastest launch or pass"
    most = max((spot.spread if spots == spread else spot.over_launches or 1.0) for spot in spots)
    return Finding(
        kind="unsteady_times",
        cause="unsteady times",
        level=MEDIUM,
        factor=most,
        sizes=sizes_of(spots),
        judged_by=(f"{what}: up to {most:.1f}, at {len(spots)} sizes in a row",),
    )


def unexplained(curve: Curve) -> Finding | None:
    """Large messages slower than every model, which something must explain. Judged only where nothing else fits."""
    spots = curve.in_a_row(lambda spot: spot.size >= SMALL_BYTES and spot.times(spot.slowest_s) >= spot.limit)
    if not spots:
        return None
    worst = max(spots, key=lambda spot: spot.times(spot.slowest_s))
    return Finding(
        kind="unexplained",
        cause="unexplained: slower than every model",
        level=LOW,
        factor=worst.seconds / (worst.slowest_s or 1),
        sizes=sizes_of(spots),
        of_run=False,
        judged_by=(f"{_at(worst)}, {worst.seconds / (worst.slowest_s or 1):.1f} x the slowest model",),
    )


def _at(spot: Spot) -> str:
    return f"{format_time(spot.seconds)} at {format_size(spot.size)}"
