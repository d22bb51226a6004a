"""Messages of records between the ranks of a group, and which exchange of experts a case is carried out by."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from commbench.backends.experts import AllToAllV, ExpertExchange, Place
from commbench.cases import Case, Layout, group_members
from commbench.moe.wire import COUNT_BYTES

if TYPE_CHECKING:
    from commbench.backends.base import Backend

FLAT, HIERARCHICAL = "own:flat", "own:hierarchical"
ALGORITHMS = (FLAT, HIERARCHICAL)


@dataclass(kw_only=True)
class Channel:
    """Exchanges of rows within one group, counted. ``sent[r]``: bytes handed over for world rank r since it was zeroed.

    What came in the exchanges of an operation can be ``kept``, and be had once more without a message by replaying: so
    the work around the messages is timed alone.
    """

    calls: AllToAllV
    members: tuple[int, ...]
    sent: NDArray[np.int64]
    kept: list[torch.Tensor] | None = None
    replayed: int | None = None

    def announce(self, counts: torch.Tensor) -> torch.Tensor:
        """What every member announces to this rank, where this rank announces ``counts`` [members] int64 to them."""
        each = [1] * len(self.members)
        taken, wait = self.post(counts.view(torch.uint8).view(-1, COUNT_BYTES), each, each)
        wait()
        self.calls.finish()
        return taken.view(torch.int64).view(-1)

    def post(self, rows: torch.Tensor, give: list[int], take: list[int]) -> tuple[torch.Tensor, Callable[[], Any]]:
        """Start to send ``give[m]`` rows of [N, bytes] to each member and to receive ``take[m]``: where, and what waits."""
        if self.replayed is not None:
            assert self.kept is not None
            self.replayed += 1
            return self.kept[self.replayed - 1], _nothing
        size = rows.shape[1]
        taken = torch.empty(sum(take), size, dtype=torch.uint8, device=rows.device)
        sizes = [count * size for count in give]
        wait = self.calls.post(rows.reshape(-1), sizes, taken.view(-1), [count * size for count in take])
        self._count(sizes)
        if self.kept is not None:
            self.kept.append(taken)
        return taken, wait

    def _count(self, sizes: list[int]) -> None:
        for member, size in zip(self.members, sizes, strict=True):
            self.sent[member] += size


def _nothing() -> None:
    return None


def local_s(channels: Sequence[Channel], act: Callable[[], Any], times: int = 3) -> float:
    """Seconds that ``act`` takes on this rank when all messages of its exchanges are there already: the median of a few.

    It is performed once with its messages, which is a call of all ranks.
    """
    for channel in channels:
        channel.kept = []
    act()
    found = []
    for _ in range(times):
        for channel in channels:
            channel.replayed = 0
        begin = time.perf_counter()
        act()
        found.append(time.perf_counter() - begin)
    for channel in channels:
        channel.kept = channel.replayed = None
    return float(np.median(found))


def why_not(case: Case, layout: Layout) -> str | None:
    """Why commbench's own data path cannot carry a case out, or None."""
    if case.algorithm not in ALGORITHMS:
        return f"{case.backend} has no dispatch and combine of its own: ask for --dispatch flat or hierarchical"
    if case.algorithm == HIERARCHICAL:
        if case.workload is not None and case.workload.mode == "low_latency":
            return "low latency goes straight to the experts' ranks: there is no hierarchical form"
        if len({len(ranks) for ranks in layout.by_host()}) > 1:
            return "hierarchical dispatch needs as many ranks on every host"
    return None


def make_exchange(
    case: Case, where: Place, layout: Layout, rank: int, most_tokens: int, backend: Backend
) -> ExpertExchange:
    """This rank's exchange for a case, a call of all ranks. ``most_tokens``: of any rank."""
    from commbench.moe.flat import Flat
    from commbench.moe.hierarchical import Hierarchical
    from commbench.moe.low_latency import LowLatency

    assert case.workload is not None
    sent = np.zeros(layout.world, dtype=np.int64)

    def channel(kind: str) -> Channel:
        groups = group_members(kind, layout)
        backend.join(groups)
        members = next(group for group in groups if rank in group)
        calls = backend.all_to_all_v(members)
        assert calls is not None, "asked of why_not before"
        return Channel(calls=calls, members=members, sent=sent)

    world = channel("world")
    if case.workload.mode == "low_latency":
        return LowLatency(case.workload, case.dtype, where, rank, most_tokens, world)
    if case.algorithm == HIERARCHICAL:
        return Hierarchical(case.workload, case.dtype, where, rank, channel("rail"), channel("node"))
    return Flat(case.workload, case.dtype, where, rank, world)
