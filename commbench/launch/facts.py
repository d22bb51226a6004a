"""Facts of a launch that may set its times apart from those of other launches: a name each, a number or a text.

Cheap to read, before the first case and after the last. Standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commbench.cases import Layout
from commbench.launch.bind import short
from commbench.launch.client import Client
from commbench.launch.place import LaunchError
from commbench.provenance.counters import since
from commbench.provenance.host import collect_load
from commbench.provenance.sources import ROOT, attempt, names, read, read_int

Facts = dict[str, float | str]
_PROCESSOR_FIELD = 38  # of /proc/PID/stat, from 0: the processor that the main thread last ran on (proc_pid_stat(5))


def rank_facts(root: Path = ROOT) -> dict[str, Any]:
    """What this rank may run on, where its main thread is now, and the most memory that it has had so far.

    What the system does not tell is left out.
    """
    found: dict[str, Any] = {"cores": short(os.sched_getaffinity(0))}
    if peak := re.search(r"^VmHWM:\s+(\d+) kB", read(root, "proc/self/status") or "", re.MULTILINE):
        found["peak_bytes"] = int(peak[1]) * 1024
    stat = (read(root, "proc/self/stat") or "").rpartition(")")[2].split()
    # The name, which may hold spaces, and the number before it are gone.
    if len(stat) > _PROCESSOR_FIELD - 2:
        core = int(stat[_PROCESSOR_FIELD - 2])
        base = f"sys/devices/system/cpu/cpu{core}"
        nodes = [name for name in names(root, base) if re.fullmatch(r"node\d+", name)]
        khz = read_int(root, f"{base}/cpufreq/scaling_cur_freq")
        found |= {
            "core": core,
            "numa_node": int(nodes[0][4:]) if nodes else None,
            "frequency_Hz": khz * 1000 if khz else None,
        }
    return {name: value for name, value in found.items() if value is not None}


def host_facts(root: Path = ROOT) -> dict[str, Any]:
    """What this host's load and memory are; None for what it does not tell."""
    load = attempt(collect_load, root)
    averages = load.get("loadavg_1_5_15")
    pages = re.search(r"\[(\w+)\]", read(root, "sys/kernel/mm/transparent_hugepage/enabled") or "")
    return {
        "load1": averages[0] if averages else None,
        "available_bytes": load.get("available_bytes"),
        "transparent_hugepages": pages[1] if pages else None,
    }


def flatten(ranks: list[dict[str, Any]], hosts: list[dict[str, Any]], layout: Layout, suffix: str = "") -> Facts:
    """``rank0.core``, ... of every rank, and of all hosts the greatest load, the least memory and every kind of pages.

    ``distinct_cores`` is how many processors the ranks' main threads are on, ``distinct_numa_nodes`` how many nodes.
    """
    found: Facts = {f"rank{rank}.{name}": value for rank, facts in enumerate(ranks) for name, value in facts.items()}
    for name, key in (("distinct_cores", "core"), ("distinct_numa_nodes", "numa_node")):
        places = {(layout.hosts[rank], facts[key]) for rank, facts in enumerate(ranks) if key in facts}
        if places:
            found[name] = len(places)

    def known(key: str) -> list[Any]:
        return [facts[key] for facts in hosts if facts.get(key) is not None]

    if known("load1"):
        found["load1"] = max(known("load1"))
    if known("available_bytes"):
        found["available_bytes"] = min(known("available_bytes"))
    if known("transparent_hugepages"):
        found["transparent_hugepages"] = ", ".join(sorted(set(known("transparent_hugepages"))))
    return {name + suffix: value for name, value in found.items()}


# -- of all ranks, at rank 0 ---------------------------------------------------------------------------


def gather_facts(client: Client, layout: Layout, suffix: str = "") -> Facts:
    """``flatten`` of what every rank and, on each host, its first rank finds; nothing at other ranks than 0."""
    speaks = client.rank in {ranks[0] for ranks in layout.by_host()}
    gathered = [value for value, _ in client.gather([rank_facts(), host_facts() if speaks else None]) or []]
    return flatten([rank for rank, _ in gathered], [host for _, host in gathered if host is not None], layout, suffix)


def gather_disturbances(client: Client, before: dict[str, Any], tainted: str | None = None) -> dict[str, Any]:
    """What has come to every rank's ``disturbances`` since ``before``: ``steal_s`` of the host that lost most, and
    ``preemptions`` of all ranks together; None where nobody knows. ``tainted``: by rank what each found itself."""
    gathered = [value for value, _ in client.gather({**since(before), "tainted": tainted}) or []]
    steal = [value["steal_s"] for value in gathered if value.get("steal_s") is not None]
    preemptions = [value["preemptions"] for value in gathered if value.get("preemptions") is not None]
    return {
        "steal_s": max(steal, default=None),
        "preemptions": sum(preemptions) if preemptions else None,
        "tainted": [value.get("tainted") for value in gathered],
    }


def see_settings(client: Client, settings: Mapping[str, str], variant: str) -> None:
    """Every rank must have the variables of its variant. Raises LaunchError at rank 0."""
    wrong = [name for name, value in settings.items() if os.environ.get(name) != value]
    for rank, (names_there, _) in enumerate(client.gather(wrong) or []):
        if names_there:
            raise LaunchError(
                f"rank {rank} does not see what variant {variant!r} sets {names_there[0]} to: "
                "the launcher does not pass it on"
            )
