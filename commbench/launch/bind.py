"""``--bind``: which processors each rank of a host may run on, and pinning it there before any library starts.

Standard library only: ranks load it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from commbench.provenance.sources import ROOT, names, read

BINDINGS = ("none", "core", "numa")
CORES = "COMMBENCH_CORES"


class BindError(ValueError):
    """Ranks cannot be bound as asked: one line."""


def assign(bind: str, ranks: int, allowed: Collection[int], root: Path = ROOT) -> tuple[tuple[int, ...], ...]:
    """Per rank the processors that it is to be bound to, out of those this process may use; nothing for ``none``.

    ``core``: one processor each, in the order of NUMA nodes; the first hardware thread of every core comes before any
    second one. ``numa``: all allowed processors of a node, and neighbouring ranks share nodes. Raises BindError where
    ``core`` has too few processors.
    """
    if bind == "none":
        return ()
    nodes = _nodes(allowed, root)
    if bind == "numa":
        return tuple(nodes[rank * len(nodes) // ranks] for rank in range(ranks))
    if ranks > len(allowed):
        raise BindError(
            f"--bind core needs a core for each of {ranks} ranks and this command may use {len(allowed)}: "
            "ask for fewer ranks, or for --bind numa"
        )
    processors = sorted((_thread(number, root), place, number) for place, node in enumerate(nodes) for number in node)
    return tuple((number,) for _, _, number in processors[:ranks])


def to_environment(cores: Sequence[Sequence[int]]) -> dict[str, str]:
    """How the ranks of a launch are told; nothing where none is bound."""
    return {CORES: ";".join(",".join(map(str, one)) for one in cores)} if cores else {}


def bind_rank(local_rank: int, told: str | None) -> None:
    """Pin this process, and the threads that it starts from now on. Raises BindError where the system refuses."""
    if not told:
        return
    mine = told.split(";")[local_rank]
    try:
        os.sched_setaffinity(0, map(int, mine.split(",")))
    except OSError as error:
        raise BindError(f"rank {local_rank} cannot be bound to processor {mine} ({error.strerror})") from None


def why_not_bound(cores: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> str | None:
    """Which rank may run elsewhere than it was bound to, by its own account; None where all are bound as asked."""
    for rank, (asked, has) in enumerate(zip(cores, found, strict=False)):
        if sorted(asked) != sorted(has):
            return f"rank {rank} was to be bound to processors {short(asked)} and may run on {short(has)}"
    return None


def short(numbers: Collection[int]) -> str:
    """``0-3,8``, as the kernel writes sets of processors."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def parse_processors(text: str) -> tuple[int, ...]:
    """The numbers of ``0-3,8``."""
    found: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _nodes(allowed: Collection[int], root: Path) -> list[tuple[int, ...]]:
    """The allowed processors of every NUMA node that has any; one node where the system tells of none."""
    base = "sys/devices/system/node"
    numbers = sorted(int(name[4:]) for name in names(root, base) if re.fullmatch(r"node\d+", name))
    lists = [parse_processors(read(root, f"{base}/node{number}/cpulist") or "") for number in numbers]
    nodes = [tuple(processor for processor in one if processor in allowed) for one in lists]
    known = {processor for one in nodes for processor in one}
    return [one for one in (*nodes, tuple(sorted(set(allowed) - known))) if one]


def _thread(processor: int, root: Path) -> int:
    """Which of its core's hardware threads a processor is, from 0."""
    siblings = read(root, f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list") or ""
    found = parse_processors(siblings)
    return found.index(processor) if processor in found else 0
