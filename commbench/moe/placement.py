"""Which rank holds which expert, and which copy of an expert a token goes to.

``contiguous``: rank r holds the r-th stretch of expert ids (what DeepEP and most frameworks assume). ``round_robin``:
expert e is on rank e mod n. ``eplb[:N]``: as DeepSeek's expert-parallel load balancer in its greedy form: N redundant
copies go to the experts that are heaviest per copy, then the heaviest copy is placed first, on the least loaded rank.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from commbench.backends.experts import Place
from commbench.registry import unknown_name
from commbench.workloads import Workload

PLACEMENTS = ("contiguous", "round_robin", "eplb", "eplb:N")
_EPLB = re.compile(r"^eplb(?::(\d+))?$")


def parse_placement(text: str) -> tuple[str, int]:
    """The kind of placement and its number of redundant copies, 0 but for ``eplb:N``. Raises ValueError."""
    body = text.strip()
    if body in ("contiguous", "round_robin"):
        return body, 0
    match = _EPLB.match(body)
    if match:
        return "eplb", int(match[1] or 0)
    if body.startswith("eplb:"):
        raise ValueError(f"placement {text!r} has no whole number of redundant experts: write for example eplb:32")
    raise ValueError(unknown_name("placement of experts", text, PLACEMENTS))


def canonical_placement(text: str) -> str:
    """One way to write each placement. Raises ValueError."""
    kind, redundant = parse_placement(text)
    return f"{kind}:{redundant}" if redundant else kind


def homes(workload: Workload, ranks: int) -> NDArray[np.int64]:
    """[experts] the rank that an expert is on before any balancing: what routings that speak of ranks mean by them.

    Raises ValueError where the experts do not divide and may not be uneven.
    """
    kind, redundant = parse_placement(workload.experts_on)
    share_out(workload, ranks, redundant)
    if kind == "round_robin":
        return np.arange(workload.experts, dtype=np.int64) % ranks
    return np.repeat(np.arange(ranks, dtype=np.int64), _sizes(workload.experts, ranks))


def share_out(workload: Workload, ranks: int, redundant: int) -> list[int]:
    """How many expert slots every rank has; the first ones have one more where they do not divide.

    Raises ValueError where they do not divide and the workload does not ask for uneven ones, where a rank would have
    none, and where an expert would have more copies than there are ranks.
    """
    slots = workload.experts + redundant
    if slots < ranks:
        raise ValueError(f"{slots} experts leave some of {ranks} ranks without one: use at least {ranks} experts")
    if redundant > workload.experts * (ranks - 1):
        raise ValueError(
            f"{redundant} redundant experts are more than {workload.experts} experts can have on {ranks} ranks: "
            f"use at most {workload.experts * (ranks - 1)}"
        )
    if slots % ranks and not workload.uneven_experts:
        what = f"{workload.experts} experts" + (f" and {redundant} redundant" if redundant else "")
        raise ValueError(
            f"{what} do not divide over {ranks} ranks: change one of the numbers, ask for uneven experts, "
            f"or use eplb:{redundant + -slots % ranks}, which fills up with copies"
        )
    return _sizes(slots, ranks)


def place(workload: Workload, ranks: int, host_of: Sequence[int], load: NDArray[np.float64] | None) -> Place:
    """Where every expert slot is. ``load``: [experts] expected selections, which eplb balances; None means equal ones.

    Raises ValueError for a placement that is none, or that the numbers do not allow.
    """
    kind, redundant = parse_placement(workload.experts_on)
    room = share_out(workload, ranks, redundant)
    if kind == "eplb":
        held = _balance(np.ones(workload.experts) if load is None else load, redundant, room)
    else:
        home = homes(workload, ranks).tolist()
        held = [[e for e, rank in enumerate(home) if rank == r] for r in range(ranks)]
    expert_of = tuple(expert for experts in held for expert in experts)
    copies: list[list[int]] = [[] for _ in range(workload.experts)]
    for slot, expert in enumerate(expert_of):
        copies[expert].append(slot)
    return Place(
        rank_of=tuple(rank for rank, experts in enumerate(held) for _ in experts),
        expert_of=expert_of,
        copies=tuple(tuple(slots) for slots in copies),
        host_of=tuple(host_of),
    )


def choose_slots(place: Place, ids: NDArray[np.int64], rank: int) -> NDArray[np.int64]:
    """[T, K] the slot that each selection of ``rank`` goes to, -1 for none. ``ids``: [T, K] experts.

    A copy on the own rank, else one on the own host, else any; several of a kind take turns by the token's index, from
    another beginning on every rank, so that ranks with one token do not all choose the first.
    """
    choice, several = _choices(place, rank)
    index = np.maximum(ids, 0)
    if choice.shape[1] == 1:
        slots = choice[index, 0]
    else:
        turn = np.arange(rank, rank + len(ids), dtype=np.int64)[:, None] % several[index]
        slots = choice[index, turn]
    return np.where(ids < 0, np.int64(-1), slots)


@lru_cache(maxsize=4096)
def _choices(place: Place, rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[experts, most] the slots between which a rank takes turns, and [experts] how many they are."""
    found = [_nearest(place, slots, rank) for slots in place.copies]
    several = np.array([len(slots) for slots in found], dtype=np.int64)
    table = np.zeros((len(found), int(several.max())), dtype=np.int64)
    for expert, slots in enumerate(found):
        table[expert, : len(slots)] = slots
    return table, several


def _nearest(place: Place, slots: tuple[int, ...], rank: int) -> list[int]:
    own = [slot for slot in slots if place.rank_of[slot] == rank]
    near = [slot for slot in slots if place.host_of[place.rank_of[slot]] == place.host_of[rank]]
    return own[:1] or near or list(slots)


def _sizes(items: int, ranks: int) -> list[int]:
    return [items // ranks + (rank < items % ranks) for rank in range(ranks)]


def _balance(load: NDArray[np.float64], redundant: int, room: list[int]) -> list[list[int]]:
    """The experts of each rank, ascending: ``room[r]`` of them, none twice on a rank."""
    copies = _replicate(load, redundant, len(room))
    weight = {expert: float(load[expert]) / count for expert, count in enumerate(copies)}
    heaviest_first = sorted(range(len(copies)), key=lambda expert: (-weight[expert], expert))
    held: list[set[int]] = [set() for _ in room]
    total = [0.0] * len(room)
    for expert in heaviest_first:
        for _ in range(copies[expert]):
            open_ranks = [rank for rank, size in enumerate(room) if len(held[rank]) < size]
            fits = [rank for rank in open_ranks if expert not in held[rank]]
            rank = _least(fits, total) if fits else _make_room(expert, _least(open_ranks, total), held, total, weight)
            held[rank].add(expert)
            total[rank] += weight[expert]
    return [sorted(experts) for experts in held]


def _replicate(load: NDArray[np.float64], redundant: int, ranks: int) -> list[int]:
    """How many copies each expert has: each further one goes to the heaviest per copy that some rank has not yet."""
    copies = [1] * len(load)
    heap = [(-float(value), expert) for expert, value in enumerate(load)] if ranks > 1 else []
    heapq.heapify(heap)
    for _ in range(redundant):
        _, expert = heapq.heappop(heap)
        copies[expert] += 1
        if copies[expert] < ranks:
            heapq.heappush(heap, (-float(load[expert]) / copies[expert], expert))
    return copies


def _least(ranks: Iterable[int], total: list[float]) -> int:
    return min(ranks, key=lambda rank: (total[rank], rank))


def _make_room(expert: int, open_rank: int, held: list[set[int]], total: list[float], weight: dict[int, float]) -> int:
    """A full rank without ``expert`` that has given its lightest possible expert to ``open_rank``, which has one.

    There is one: an expert has at most as many copies as there are ranks, so some rank is without it; and that rank
    is full, so it has more different experts than ``open_rank``, at least one of which the latter lacks.
    """
    without = [rank for rank in range(len(held)) if expert not in held[rank] and held[rank] - held[open_rank]]
    rank = _least(without, total)
    moved = min(held[rank] - held[open_rank], key=lambda e: (weight[e], e))
    held[rank].remove(moved)
    held[open_rank].add(moved)
    total[rank] -= weight[moved]
    total[open_rank] += weight[moved]
    return rank
