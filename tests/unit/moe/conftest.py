"""Ranks as threads of one process, whose exchanges go through memory: a double of the libraries' calls, not of our code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from commbench.cases import Case, Layout, group_members
from commbench.workloads import Workload

TIMEOUT_S = 20


class Mailbox:
    """Where the ranks of one group leave what they send."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.barrier = threading.Barrier(len(members), timeout=TIMEOUT_S)
        self.parts: dict[tuple[int, int], torch.Tensor] = {}


class MemoryAllToAllV:
    """Copies at the time of waiting, as a library may, and poisons what it was not told to fill."""

    device = torch.device("cpu")

    def __init__(self, box: Mailbox, rank: int) -> None:
        self.box, self.rank = box, rank

    def post(
        self, given: torch.Tensor, give: Sequence[int], taken: torch.Tensor, take: Sequence[int]
    ) -> Callable[[], Any]:
        assert given.dtype == taken.dtype == torch.uint8
        assert given.is_contiguous()
        assert taken.is_contiguous()
        assert given.numel() == sum(give)
        assert taken.numel() == sum(take)
        box = self.box
        for member, part in zip(box.members, given.split(list(give)), strict=True):
            box.parts[self.rank, member] = part

        def wait() -> None:
            box.barrier.wait()
            for member, part in zip(box.members, taken.split(list(take)), strict=True):
                assert box.parts[member, self.rank].numel() == part.numel(), (member, self.rank)
                part.copy_(box.parts[member, self.rank])
            box.barrier.wait()

        return wait

    def finish(self) -> None:
        return None


class MemoryBackend:
    """What the data path asks of a backend, on one rank."""

    def __init__(self, boxes: dict[tuple[int, ...], Mailbox], rank: int) -> None:
        self.boxes, self.rank = boxes, rank

    def join(self, groups: tuple[tuple[int, ...], ...]) -> None:
        return None

    def all_to_all_v(self, members: tuple[int, ...]) -> MemoryAllToAllV:
        return MemoryAllToAllV(self.boxes[members], self.rank)


def routed_case(workload: Workload, ranks: int, **changes: Any) -> Case:
    values: dict[str, Any] = {
        "collective": "moe_dispatch", "backend": "gloo", "algorithm": "own:flat", "dtype": "bfloat16", "bytes": 0,
        "requested_bytes": 0, "reduce_op": None, "ranks": ranks, "nodes": 1, "workload": workload,
    }  # fmt: skip
    return Case(**(values | changes))


@pytest.fixture
def as_threads() -> Callable[..., list[Any]]:
    """Calls ``act(rank, backend)`` for every rank of a layout at once; what they return, or the first error."""

    def run(layout: Layout, act: Callable[[int, Any], Any]) -> list[Any]:
        groups = {members for kind in ("world", "node", "rail") for members in group_members(kind, layout)}
        boxes = {members: Mailbox(members) for members in groups}

        def one(rank: int) -> Any:
            try:
                return act(rank, MemoryBackend(boxes, rank))
            except BaseException:
                for box in boxes.values():
                    box.barrier.abort()
                raise

        with ThreadPoolExecutor(layout.world) as pool:
            futures = [pool.submit(one, rank) for rank in range(layout.world)]
            errors = [future.exception() for future in futures]
            for error in errors:
                if error is not None and not isinstance(error, threading.BrokenBarrierError):
                    raise error
            return [future.result() for future in futures]

    return run
