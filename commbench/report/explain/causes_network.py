"""Causes that lie between ranks: slow hosts, a shared NIC, TCP where there is something faster, half duplex."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from commbench.backends.forcing import NCCL_BACKENDS
from commbench.models.links import Link, Links
from commbench.report.explain.evidence import (
    FACTOR,
    HIGH,
    IN_A_ROW,
    MEDIUM,
    RESOLUTION_S,
    Curve,
    Finding,
    Setup,
    Spot,
    sizes_of,
)
from commbench.report.explain.expected import shares_leaving
from commbench.report.explain.settings import no_rdma, no_shared_memory
from commbench.units import format_bandwidth, format_size, format_time

Rates = tuple[tuple[float, float], ...]

SURE_FACTOR = 2.0  # rates of the same host, measured again on a busy machine, differ by up to FACTOR
NIC_PART = 0.5  # of the time: below, something else holds the operation up
TCP_PART = 0.25  # of the port's rate: one TCP connection reaches 10 to 40 Gbit/s, RDMA over 80 % of any port
UNSET_TCP_PART = 0.1  # the same, where no setting says so
MEMORY_PART = 0.25  # of the rate at which a processor adds what is in memory, which shared memory comes near to
SHARED_LATENCY_S = 5e-6  # the kernel's TCP takes longer, a message through shared memory does not
PEER_BPS = 20e9  # bytes a second between GPUs of one host; PCIe 4.0 x16 has 25
HALF_DUPLEX = 1.8  # both directions over one: 2 for a link that has one at a time


def slow_host(curve: Curve) -> Finding | None:
    """A host of the group whose own rate was low before or after the sweep, and times that show it."""
    setups = [setup for setup in curve.setups if setup.links.other_host] if curve.several_hosts else []
    found = [finding for setup in setups if (finding := _slow_host(curve, setup)) is not None]
    return max(found, key=lambda finding: (finding.level == HIGH, finding.factor), default=None)


def _slow_host(curve: Curve, setup: Setup) -> Finding | None:
    links, usual = setup.links, setup.links.of(crossing=True).seconds_per_byte
    after_rates = setup.rates_after or ()
    before = _slow(links.host_rates, usual, curve)
    after = _slow(after_rates, max(usual, _middle(after_rates, usual)), curve)
    late = {host: ratio for host, ratio in after.items() if host not in before}
    alike = replace(links, host_rates=())
    for slow, rates, when in (
        (before, links.host_rates, "measured before the sweep"),
        (late, after_rates, "measured after the sweep; before it, it was as fast as the others"),
    ):
        if slow and (spots := _showing(curve, replace(links, host_rates=_only(rates, slow, usual)), alike)):
            names = [setup.names[host] for host in slow]
            sure = max(slow.values()) >= SURE_FACTOR and len(spots) >= IN_A_ROW
            speeds = [
                f"{setup.names[host]} {_rate(rates[host][0])} GB/s out and {_rate(rates[host][1])} in" for host in slow
            ]
            return Finding(
                kind="slow_host",
                cause=f"slow host{'s' * (len(slow) > 1)} {', '.join(names)}",
                level=HIGH if sure else MEDIUM,
                factor=_most(curve, spots, alike),
                sizes=sizes_of(spots),
                judged_by=(
                    *speeds,
                    f"others {_rate(usual)}, {when}",
                    _comparison(curve, spots[-1], alike, "what it would take without"),
                ),
            )
    return None


def slower_network(curve: Curve) -> Finding | None:
    """After the sweep most hosts were slower than the calibrated link, and times show it."""
    for setup in curve.setups if curve.several_hosts else ():
        if setup.links.other_host is None or not setup.rates_after:
            continue
        usual = setup.links.other_host.seconds_per_byte
        now = _middle(setup.rates_after, usual)
        slower = replace(setup.links, host_rates=tuple((now, now) for _ in setup.names))
        spots = _showing(curve, slower, setup.links) if now >= FACTOR * usual else ()
        if spots:
            return Finding(
                kind="slower_network",
                cause="network slower than when it was calibrated",
                level=MEDIUM,
                factor=_most(curve, spots, setup.links),
                sizes=sizes_of(spots),
                judged_by=(
                    f"{_rate(usual)} GB/s before the sweep, {_rate(now)} at most hosts after it",
                    _comparison(curve, spots[-1], setup.links, "its model"),
                ),
            )
    return None


def shared_nic(curve: Curve) -> Finding | None:
    """Several ranks of a host behind one NIC, which is busy for most of the time, and a flat algorithm."""
    if not (curve.several_hosts and curve.shares_hosts) or "hierarchical" in curve.case.algorithm:
        return None
    sharing = max(Counter(curve.hosts).values())

    def busy_s(spot: Spot) -> float:
        setup = curve.setup_of(spot)
        shares = shares_leaving(spot.case, spot.hosts, known=spot.known_s is not None)
        if setup is None or shares is None or setup.links.other_host is None or _looks_hierarchical(spot):
            return 0.0
        alone = setup.links.other_host.seconds_per_byte
        together = setup.links.nic_seconds_per_byte or alone
        return shares[1] * spot.size * together if sharing * together >= FACTOR * alone else 0.0

    spots = curve.in_a_row(lambda spot: busy_s(spot) >= NIC_PART * spot.seconds)
    if not spots:
        return None
    last = spots[-1]
    setup = curve.setup_of(last)
    assert setup is not None
    links, busy = setup.links, min(busy_s(last), last.seconds)
    alone = links.of(crossing=True).seconds_per_byte
    together = links.nic_seconds_per_byte or alone
    return Finding(
        kind="shared_nic",
        cause="shared NIC",
        level=HIGH if links.nic and len(spots) >= IN_A_ROW else MEDIUM,
        factor=last.seconds / (last.seconds - busy * (1 - alone / (together * sharing))),
        sizes=sizes_of(spots),
        judged_by=(
            f"{sharing} ranks of a host reach {_rate(together)} GB/s together, one alone {_rate(alone)}",
            f"at {format_size(last.size)} the NIC is busy for {format_time(busy)} of {format_time(last.seconds)}",
        ),
    )


def _looks_hierarchical(spot: Spot) -> bool:
    """Whether only the hierarchical algorithm explains the time."""
    times = dict(spot.predictions)
    own = times.pop("hierarchical", 0.0)
    if spot.known_s is not None or not own:
        return False
    return spot.seconds <= own * 1.3 and spot.seconds * 1.15 < min(times.values(), default=float("inf"))


def tcp_instead_of_rdma(curve: Curve) -> Finding | None:
    """An active InfiniBand or RoCE port, and a rate between hosts that only TCP explains. gloo has nothing else."""
    for setup in curve.setups if curve.several_hosts and curve.case.backend != "gloo" else ():
        ports = [max((port.rate_bps, port.name) for port in host.ports) for host in setup.facts if host.ports]
        if len(ports) < len(setup.facts) or not ports or setup.links.other_host is None:
            continue
        rate_bps, name = min(ports)
        bits = 8 / setup.links.other_host.seconds_per_byte if setup.links.other_host.seconds_per_byte else rate_bps
        said = no_rdma(curve.case.backend, setup.settings)
        if bits > rate_bps * (TCP_PART if said else UNSET_TCP_PART):
            continue
        faster = _faster(setup.links, 8 / (0.8 * rate_bps))
        spots = _showing(curve, setup.links, faster)
        if spots:
            return Finding(
                kind="tcp_instead_of_rdma",
                cause="TCP instead of RDMA",
                level=HIGH if said else MEDIUM,
                factor=_most(curve, spots, faster),
                sizes=sizes_of(spots),
                judged_by=(
                    f"{bits / 1e9:.3g} Gbit/s between hosts, where port {name} has {rate_bps / 1e9:.3g}",
                    said or "no setting explains it",
                ),
            )
    return None


def tcp_instead_of_shared_memory(curve: Curve) -> Finding | None:
    """Ranks of one host that talk as slowly as over TCP, and a setting that makes them. gloo has nothing else."""
    for setup in curve.setups if curve.shares_hosts else ():
        link = setup.links.same_host
        said = no_shared_memory(curve.case.backend, setup.settings)
        if link is None or said is None:
            continue
        added = setup.links.reduce_seconds_per_byte
        on_gpus = curve.case.backend in NCCL_BACKENDS
        memory = 1 / PEER_BPS if on_gpus else added / MEMORY_PART
        latency = 0.0 if on_gpus else SHARED_LATENCY_S
        if link.seconds_per_byte < memory and (not latency or link.latency_s < latency):
            continue
        shared = Link(
            latency_s=min(link.latency_s, SHARED_LATENCY_S / 2), seconds_per_byte=min(memory, link.seconds_per_byte)
        )
        faster = replace(setup.links, same_host=shared, host_seconds_per_message=0.0, host_seconds_per_byte=0.0)
        spots = _showing(curve, setup.links, faster)
        if spots:
            return Finding(
                kind="tcp_instead_of_shared_memory",
                cause="TCP instead of shared memory",
                level=HIGH,
                factor=_most(curve, spots, faster),
                sizes=sizes_of(spots),
                judged_by=(
                    said,
                    f"{format_time(link.latency_s)} and {_rate(link.seconds_per_byte)} GB/s inside a host",
                    f"memory is added at {_rate(added)} GB/s",
                ),
            )
    return None


def half_duplex(curve: Curve) -> Finding | None:
    """Hosts that send no faster than half the rate while they receive, from whomever."""
    for setup in curve.setups if curve.several_hosts else ():
        link = setup.links.other_host
        if link is None or not link.exchange or (len(setup.names) > 2 and not link.shift):
            continue
        large = [size for size, _ in link.table][-IN_A_ROW:]
        tables = [dict(table) for table in (link.exchange, link.shift) if table]
        ratios = [table[size] / link.message_s(size) for table in tables for size in large if size in table]
        if not ratios or min(ratios) < HALF_DUPLEX:
            continue
        full = replace(setup.links, other_host=replace(link, exchange=(), shift=(), exchange_factor=1.0), nic=())
        spots = _showing(curve, setup.links, full)
        if spots:
            return Finding(
                kind="half_duplex",
                cause="half duplex link",
                level=MEDIUM,
                factor=_most(curve, spots, full),
                sizes=sizes_of(spots),
                judged_by=(
                    f"both directions at once take {min(ratios):.1f} to {max(ratios):.1f} times as long as one",
                ),
            )
    return None


# -- what they share -----------------------------------------------------------------------------------


def _showing(curve: Curve, slow: Links, usual: Links) -> tuple[Spot, ...]:
    """Sizes in a row at which the fault matters by its model, and which surely take longer than without it."""

    def shows(spot: Spot) -> bool:
        without = curve.expected(spot, usual)
        matters = curve.expected(spot, slow) - RESOLUTION_S >= FACTOR * without
        return matters and spot.times(without) >= FACTOR

    return curve.in_a_row(shows)


def _most(curve: Curve, spots: Sequence[Spot], usual: Links) -> float:
    return max(spot.seconds / curve.expected(spot, usual) for spot in spots)


def _comparison(curve: Curve, spot: Spot, usual: Links, what: str) -> str:
    without = curve.expected(spot, usual)
    return f"{format_time(spot.seconds)} at {format_size(spot.size)}, {spot.seconds / without:.1f} x {what}"


def _slow(rates: Rates, usual: float, curve: Curve) -> dict[int, float]:
    """Hosts of the group at FACTOR times the usual seconds a byte or more; none where most are."""
    found = {host: max(pair) / usual for host, pair in enumerate(rates) if usual and max(pair) >= FACTOR * usual}
    return {host: ratio for host, ratio in found.items() if host in curve.hosts} if 2 * len(found) <= len(rates) else {}


def _middle(rates: Rates, usual: float) -> float:
    return median(max(pair) for pair in rates) if rates else usual


def _only(rates: Rates, slow: dict[int, float], usual: float) -> Rates:
    return tuple(pair if host in slow else (usual, usual) for host, pair in enumerate(rates))


def _faster(links: Links, seconds_per_byte: float) -> Links:
    link = links.of(crossing=True)
    fast = Link(latency_s=link.latency_s, seconds_per_byte=min(seconds_per_byte, link.seconds_per_byte))
    return replace(links, other_host=fast, nic=(), nic_seconds_per_byte=0.0, host_rates=())


def _rate(seconds_per_byte: float) -> str:
    return format_bandwidth(1 / seconds_per_byte) if seconds_per_byte else "-"
