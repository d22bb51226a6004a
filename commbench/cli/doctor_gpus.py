"""What ``commbench doctor`` says of a machine's GPUs, from what provenance collects of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from commbench.provenance.gpu_taint import taint

_NEAREST_FIRST = ("X", "PIX", "PXB", "PHB", "NODE", "SYS")


def gpu_lines(gpus: dict[str, Any], topology: dict[str, Any]) -> Iterator[tuple[str, bool | None]]:
    """Lines, and False for what is wrong. ``gpus`` and ``topology`` as ``collect_gpus`` and ``collect_topology`` have
    them, with at least one device."""
    names = [str(gpu.get("name") or gpu.get("error", "unknown")) for gpu in gpus["devices"]]
    kinds = "; ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    yield f"{kinds}, driver {gpus['driver']}", None
    for gpu in gpus["devices"]:
        # A state compared with itself: what holds now.
        if "state" in gpu and (reason := taint(gpu["state"], gpu["state"])):
            yield f"number {gpu['index']}: {reason}: its times are not to be compared with others", False
    if "error" in topology:
        yield f"how they are connected is unknown: {topology['error']}", None
        return
    if len(gpus["devices"]) > 1:
        yield f"peer access {_peer_access(topology)}; {_nvlinks(topology)}", None
    if topology.get("nics"):
        nearest = "; ".join(
            _nearest(n, topology["nic_distance"].get(pci) or {}) for n, pci in enumerate(topology["pci"])
        )
        yield f"nearest adapters {nearest}", None


def _peer_access(topology: dict[str, Any]) -> str:
    reasons: dict[str, int] = {}
    pairs = 0
    for reads, writes in zip(topology["peer_access"]["read"], topology["peer_access"]["write"], strict=True):
        for read, write in zip(reads, writes, strict=True):
            if read is None and write is None:
                continue
            pairs += 1
            worst = read if read != "ok" else write
            if worst != "ok":
                reasons[_words(worst)] = reasons.get(_words(worst), 0) + 1
    if not reasons:
        return "between all" if pairs else "unknown"
    return "missing: " + ", ".join(f"{reason} for {count} of {pairs} pairs" for reason, count in reasons.items())


def _words(status: Any) -> str:
    return str(status["error"]) if isinstance(status, dict) else str(status or "unknown")


def _nvlinks(topology: dict[str, Any]) -> str:
    links = {
        sum(row) + switches for row, switches in zip(topology["nvlinks"], topology["nvlinks_to_switches"], strict=True)
    }
    if links == {0}:
        return "no NVLinks"
    where = " to switches" if any(topology["nvlinks_to_switches"]) else ""
    return f"{' or '.join(map(str, sorted(links)))} NVLinks each{where}"


def _nearest(number: int, distances: dict[str, str | None]) -> str:
    known = {name: word for name, word in distances.items() if word in _NEAREST_FIRST}
    if not known:
        return f"{number}: unknown"
    least = min(known.values(), key=_NEAREST_FIRST.index)
    return f"{number}: {', '.join(name for name, word in known.items() if word == least)} ({least})"
