"""Counters that tell whether a measurement was disturbed: cheap enough to read before and after each case."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

from commbench.provenance.sources import ROOT, attempt, read

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# /proc/net/dev: eight receive columns, then eight transmit columns.
TX_BYTES_COLUMN = 8
_NETDEV = {"rx_bytes": 0, "rx_packets": 1, "rx_errors": 2, "rx_dropped": 3,
           "tx_bytes": TX_BYTES_COLUMN, "tx_packets": 9, "tx_errors": 10, "tx_dropped": 11}  # fmt: skip
_TCP = {"RetransSegs": "retransmitted", "InErrs": "in_errors"}


def snapshot(root: Path = ROOT) -> dict[str, Any]:
    """Counters since boot, and this process's own. Three small file reads. Never raises.

    ``steal_s`` is the time that a hypervisor gave to others, summed over the processors; ``switches`` are the whole
    machine's context switches; ``process`` are those of this process.
    """
    return {
        "monotonic_s": time.monotonic(),
        "machine": attempt(_machine, root),
        "process": attempt(_process),
        "interfaces": attempt(_interfaces, root),
        "tcp": attempt(_tcp, root),
    }


def disturbances(*, of_host: bool, root: Path = ROOT) -> dict[str, Any]:
    """Of a snapshot what disturbs a rank: ``preemptions``, how often any thread of this process was put off its core,
    and, ``of_host``, ``steal_s``. What is not known is left out. Never raises."""
    found = {"preemptions": attempt(_process).get("involuntary_switches")}
    if of_host:
        found["steal_s"] = attempt(_machine, root).get("steal_s")
    return {name: value for name, value in found.items() if value is not None}


def since(before: dict[str, Any], root: Path = ROOT) -> dict[str, Any]:
    """What has come to the ``disturbances`` since ``before``; None for a counter that went backwards."""
    return _subtract(before, disturbances(of_host="steal_s" in before, root=root))


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """``after`` − ``before``, for every number that both have, in the same shape.

    A counter that went backwards was reset or wrapped: its difference is None. ``monotonic_s`` becomes
    ``elapsed_s``; a part with an error in either is ``{"error": ...}``.
    """
    result = _subtract(before, after)
    result["elapsed_s"] = result.pop("monotonic_s", None)
    return result


def _subtract(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, old in before.items():
        new = after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            failed = [side for side in (old, new) if "error" in side]
            result[key] = failed[0] if failed else _subtract(old, new)
        elif isinstance(old, (int, float)) and isinstance(new, (int, float)):
            result[key] = new - old if new >= old else None
    return result


def _machine(root: Path) -> dict[str, float]:
    lines = dict(line.split(maxsplit=1) for line in (read(root, "proc/stat") or "").splitlines() if " " in line)
    # user nice system idle iowait irq softirq steal guest guest_nice, in ticks.
    ticks = [int(value) for value in lines["cpu"].split()]
    return {
        "busy_s": (ticks[0] + ticks[1] + ticks[2] + ticks[5] + ticks[6]) / _TICKS_PER_S,
        "idle_s": (ticks[3] + ticks[4]) / _TICKS_PER_S,
        "steal_s": ticks[7] / _TICKS_PER_S,
        "switches": int(lines["ctxt"]),
    }


def _process() -> dict[str, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "voluntary_switches": usage.ru_nvcsw,
        "involuntary_switches": usage.ru_nivcsw,
        "major_faults": usage.ru_majflt,
        "cpu_s": usage.ru_utime + usage.ru_stime,
    }


def _interfaces(root: Path) -> dict[str, dict[str, int]]:
    found = {}
    for line in (read(root, "proc/net/dev") or "").splitlines()[2:]:
        name, _, rest = line.partition(":")
        values = rest.split()
        found[name.strip()] = {key: int(values[column]) for key, column in _NETDEV.items()}
    return found


def _tcp(root: Path) -> dict[str, int]:
    rows = [line.split()[1:] for line in (read(root, "proc/net/snmp") or "").splitlines() if line.startswith("Tcp:")]
    columns = dict(zip(rows[0], rows[1]))
    return {name: int(columns[column]) for column, name in _TCP.items()}
