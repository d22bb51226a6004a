"""Whether the ranks that arrived are one world: looked at once, before anything is measured."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import commbench
from commbench.cases import Layout
from commbench.launch.place import Place, WorldError

_COMPARED = ("commbench", "torch", "mpi4py", "numpy")


def hello(place: Place) -> dict[str, Any]:
    """What a rank says of itself on arrival."""
    versions = {"commbench": commbench.__version__}
    installed = _installed()
    versions.update({name: installed.get(name, "missing") for name in _COMPARED[1:]})
    return {
        "rank": place.rank, "world": place.world, "local_rank": place.local_rank, "launcher": place.launcher,
        "host": socket.gethostname(), "pid": os.getpid(), "versions": versions,
        "cores": sorted(os.sched_getaffinity(0)), "machine": _machine(),
    }  # fmt: skip


def _machine() -> str:
    """The same for hosts that are namespaces of one kernel, and so share its cores."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def _installed() -> dict[str, str]:
    """The versions of what can be imported, by the names of their folders of metadata: importlib.metadata takes as long
    to load as all that a rank needs before its backend."""
    found: dict[str, str] = {}
    for folder in sys.path:
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue
        for entry in entries:
            if entry.endswith((".dist-info", ".egg-info")):
                name, dash, version = entry.rpartition(".")[0].partition("-")
                if dash:
                    found.setdefault(name.lower(), version.partition("-")[0])
    return found


def verify(hellos: list[dict[str, Any]], nodes: int | None = None) -> Layout:
    """The layout of the world. Raises WorldError, naming the ranks, where the ranks do not fit together.

    ``hellos`` are in rank order; ``nodes`` is the number of hosts that was asked for, if any.
    """
    for key, what in (("world", "world size"), ("launcher", "launcher")):
        _same(hellos, key, {hello["rank"]: hello[key] for hello in hellos}, what)
    for name in _COMPARED:
        versions = {hello["rank"]: hello["versions"].get(name, "missing") for hello in hellos}
        _same(hellos, name, versions, f"{name} version")
    seen: dict[tuple[str, int], int] = {}
    for hello in hellos:
        place = (hello["host"], hello["local_rank"])
        if place in seen:
            raise WorldError(
                f"ranks {seen[place]} and {hello['rank']} both say they are local rank {place[1]} on {place[0]}: "
                "give every host a name of its own, and start every rank with one launcher"
            )
        seen[place] = hello["rank"]
    layout = Layout(hosts=tuple(hello["host"] for hello in hellos))
    found = len(layout.by_host())
    if nodes is not None and found != nodes:
        raise WorldError(
            f"{nodes} hosts were asked for and the ranks are on {found} ({', '.join(dict.fromkeys(layout.hosts))}): "
            "check the launcher's host list"
        )
    return layout


def _same(hellos: list[dict[str, Any]], key: str, values: dict[int, Any], what: str) -> None:
    first = values[0]
    other = next((rank for rank, value in values.items() if value != first), None)
    if other is not None:
        raise WorldError(
            f"{what} differs: {first} on rank 0 ({hellos[0]['host']}), {values[other]} on rank {other} "
            f"({hellos[other]['host']}): use the same environment on every host"
        )
