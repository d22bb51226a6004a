"""The exchange of tokens between ranks and experts: what commbench's own data path and libraries for it have in common.

Shapes: T tokens of this rank, H hidden values, K selections a token, n ranks, L expert slots of this rank (its experts,
redundant copies counted), N rows received. All tensors are torch's, on the rank's device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from commbench.workloads import Workload

if TYPE_CHECKING:
    import torch


class AllToAllV(Protocol):
    """Exchanges of bytes of which every pair of ranks has its own number, over a library's own call."""

    device: torch.device

    def post(
        self, given: torch.Tensor, give: Sequence[int], taken: torch.Tensor, take: Sequence[int]
    ) -> Callable[[], Any]:
        """Start to send ``give[r]`` bytes to each rank r and to receive ``take[r]`` from it; what waits for all of it.

        ``given`` and ``taken`` are contiguous uint8 tensors that hold the ranks' parts back to back, in the order of
        the ranks of the group; this rank's own part is copied.
        """

    def finish(self) -> None:
        """Wait until the device is done with what was posted and waited for; nothing where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the expert slots are: ``rank_of[s]`` and ``expert_of[s]`` of each slot s of the world, slots of a rank in
    ascending order and next to one another. Selections name experts; ``copies[e]`` are the slots that hold expert e.
    ``host_of[rank]`` numbers the hosts."""

    rank_of: tuple[int, ...]
    expert_of: tuple[int, ...]
    copies: tuple[tuple[int, ...], ...]
    host_of: tuple[int, ...]

    def slots_of(self, rank: int) -> tuple[int, ...]:
        return tuple(slot for slot, owner in enumerate(self.rank_of) if owner == rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One iteration's input of a rank. ``tokens``: [T, H] bfloat16. ``slots``: [T, K] int64, the expert slot of each
    selection, -1 where there is none; a token's slots differ. ``weights``: [T, K] float32."""

    tokens: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """What a dispatch gives an expert's rank, expert slot after expert slot.

    ``rows``: [N, H] bfloat16, or float8_e4m3fn with ``scales``: what gives [M, H/128] float32 for M of them. ``begins`` and ``counts``: [L] int64,
    where each slot's rows begin and how many are valid; they may lie apart. ``source_rank`` and ``source_token``: [N]
    int64, of each valid row, or None where the library does not tell. ``handle``: what a combine needs of it.
    """

    rows: torch.Tensor
    scales: Any
    begins: torch.Tensor
    counts: torch.Tensor
    source_rank: torch.Tensor | None
    source_token: torch.Tensor | None
    handle: Any


class ExpertExchange(Protocol):
    """Dispatch and combine for one case's workload, on this rank.

    A call returns when this rank's part is complete on the host, or enqueued on the device.
    """

    dispatch_phases: tuple[str, ...]
    combine_phases: tuple[str, ...]

    def learn(self, batch: Batch) -> Any:
        """What a dispatch of this batch may know beforehand where counts are ``known``, else None; a call of all ranks,
        not timed."""

    def dispatch(self, batch: Batch, known: Any = None) -> Received:
        """``known``: of ``learn``, for the same slots."""

    def combine(self, rows: torch.Tensor, received: Received) -> torch.Tensor:
        """[T, H] bfloat16: each token's sum of its experts' rows, times its weights. ``rows``: [N, H] bfloat16, laid out
        as ``received.rows``; what lies between the slots' rows is not read."""

    def phases_ns(self) -> NDArray[np.int64]:
        """How long each phase of the last call took on this rank; they add up to the call, whose host time they
        are, or the device's where it keeps the time. Called after the device has finished."""

    def sent_bytes(self) -> NDArray[np.int64] | None:
        """[n] bytes that the last call handed over for each rank, this one's own included; counts and indices too. None
        where a library does not tell."""

    def finish(self) -> None:
        """Wait until the device is done with all that was enqueued; nothing where there is none."""


class ExpertLibrary(Protocol):
    """What a backend that has dispatch and combine itself offers."""

    def why_not(self, workload: Workload, dtype: str, algorithm: str) -> str | None:
        """Why it cannot carry a workload out, known before it is tried, or None."""

    def most_sets(self, workload: Workload) -> int | None:
        """How many operations' results can be held at once; None: as many as there is memory for."""

    def make(self, workload: Workload, dtype: str, place: Place, rank: int, most_tokens: int) -> ExpertExchange:
        """Its exchange for this rank; a call of all ranks. ``most_tokens``: of any rank."""
