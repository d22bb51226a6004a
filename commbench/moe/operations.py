"""A routed case as operations that can be measured, and the data that checks them.

What an operation is filled with is the number of an iteration: routing and tokens follow from it. What it gives out is how
many elements were wrong, worked out when its output is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from commbench.backends.experts import Batch, ExpertExchange, Place, Received
from commbench.backends.quantise import dequantise, relative_error
from commbench.backends.torch_device import capture
from commbench.measure.operation import Bytes, Operation
from commbench.moe.check import expected, expert_factor, token_words, wrong_rows, wrong_sums
from commbench.moe.exchange import local_s
from commbench.moe.placement import choose_slots
from commbench.moe.routing import Router

_UNCHECKED = -1


class Numbers:
    """``Pattern``'s part for routed cases, see above."""

    input_elements = output_elements = 1

    def fill(self, out: NDArray[Any], iteration: int) -> None:
        out.view(np.int64)[0] = iteration

    def poison(self, out: NDArray[Any]) -> None:
        out.view(np.int64)[:] = _UNCHECKED

    def wrong(self, output: NDArray[Any], iteration: int) -> int:
        found = int(output.view(np.int64)[0])
        assert found != _UNCHECKED, "downloaded before it is judged"
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What the operations of one case on this rank share. ``graph``: they are captured, by ``capture``, and a device launches
    them."""

    router: Router
    where: Place
    rank: int
    device: torch.device
    graph: bool = False
    capture: Callable[[Callable[[], Any]], Callable[[], Any]] = capture

    def batch(self, iteration: int) -> Batch:
        router, rank = self.router, self.rank
        ids, weights = router.selections(rank, iteration)
        slots = choose_slots(self.where, ids, rank)
        words = token_words(rank, len(ids), router.workload.hidden, iteration)
        return Batch(
            tokens=torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).to(self.device),
            slots=torch.from_numpy(np.array(slots)).to(self.device),
            weights=torch.from_numpy(np.array(weights)).to(self.device),
        )


def number() -> Bytes:
    return np.zeros(8, dtype=np.uint8)


@dataclass(kw_only=True)
class _Routed:
    """One operation on its own tokens. Where it is captured in a graph, all that the graph reads and writes stays where it
    was when it was captured."""

    setup: Setup
    exchange: ExpertExchange
    given: Bytes = field(default_factory=number)
    taken: Bytes = field(default_factory=number)
    batch: Batch | None = None
    known: Any = None
    received: Received | None = None

    @property
    def iteration(self) -> int:
        return int(self.given.view(np.int64)[0])

    def operation(self) -> Operation:
        graph = self.setup.graph
        return Operation(
            run=self.run, enqueue=self.enqueue, finish=self.exchange.finish, input=self.given, output=self.taken,
            upload=self.upload, download=self.download, repeatable=self.setup.router.workload.fixed,
            phases=None if graph else self.exchange.phases_ns, alone=None if graph else self.alone,
            capture=partial(self.setup.capture, self.enqueue) if graph else None,
        )  # fmt: skip

    def run(self) -> None:
        self.enqueue()
        self.exchange.finish()

    def alone(self) -> float | None:
        """Seconds of the work around the messages, see ``local_s``; None where the exchange is a library's."""
        channels = getattr(self.exchange, "channels", None)
        return None if channels is None else local_s(channels, self.run)

    def enqueue(self) -> None:
        raise NotImplementedError

    def upload(self) -> None:
        raise NotImplementedError

    def fill_batch(self) -> Batch:
        """This iteration's tokens, in the place of the last one's."""
        fresh = self.setup.batch(self.iteration)
        if self.batch is None or not self.setup.graph:
            self.batch = fresh
        else:
            for name in ("tokens", "slots", "weights"):
                getattr(self.batch, name).copy_(getattr(fresh, name))
        return self.batch

    def download(self) -> None:
        self.taken.view(np.int64)[0] = self.count_wrong()

    def count_wrong(self) -> int:
        raise NotImplementedError


class DispatchOperation(_Routed):
    def upload(self) -> None:
        self.known = self.exchange.learn(self.fill_batch())
        if not self.setup.graph:
            self.received = None

    def enqueue(self) -> None:
        assert self.batch is not None
        self.received = self.exchange.dispatch(self.batch, self.known)

    def count_wrong(self) -> int:
        setup, received = self.setup, self.received
        want = expected(setup.router, setup.where, setup.rank, self.iteration)
        if received is None:
            return max(1, sum(map(len, want.slots.values()))) * setup.router.workload.hidden
        there = rows_there(received)
        return wrong_rows(
            want, setup.router, setup.where, setup.rank, self.iteration,
            values=plain_rows(received, there).float().cpu().numpy(), counts=received.counts.cpu().numpy(),
            source_rank=_numpy(received.source_rank, there), source_token=_numpy(received.source_token, there),
        )  # fmt: skip


class CombineOperation(_Routed):
    rows: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    again: Callable[[], Any] | None = None  # the dispatch as a graph, what it gives is then always in the same place

    def upload(self) -> None:
        """Dispatches, which is not timed, and lets each expert multiply what it got by a factor of its own."""
        batch = self.fill_batch()
        if self.again is None:
            self.received = self.exchange.dispatch(batch, self.exchange.learn(batch))
            self.exchange.finish()
            if self.setup.graph:
                self.again = self.setup.capture(self._dispatch)
        if self.again is not None:
            self.again()
            self.exchange.finish()
        assert self.received is not None
        if self.rows is None or self.rows.shape != self.received.rows.shape:
            self.rows = torch.empty(self.received.rows.shape, dtype=torch.bfloat16, device=self.setup.device)
        self.rows.fill_(float("nan"))  # between the slots' rows, which nobody may read
        apply_experts(self.setup, self.received, self.rows)
        if not self.setup.graph:
            self.sums = None

    def _dispatch(self) -> None:
        assert self.batch is not None
        self.received = self.exchange.dispatch(self.batch)

    def enqueue(self) -> None:
        assert self.received is not None
        assert self.rows is not None
        self.sums = self.exchange.combine(self.rows, self.received)

    def count_wrong(self) -> int:
        setup = self.setup
        want = expected(setup.router, setup.where, setup.rank, self.iteration)
        if self.sums is None:
            return max(1, len(want.factors)) * setup.router.workload.hidden
        return wrong_sums(want, setup.router, setup.rank, self.iteration, self.sums.float().cpu().numpy())


OPERATIONS: dict[str, type[_Routed]] = {"moe_dispatch": DispatchOperation, "moe_combine": CombineOperation}


def rows_there(received: Received) -> torch.Tensor:
    """Which rows are valid, slot after slot."""
    slot = torch.repeat_interleave(torch.arange(len(received.counts), device=received.counts.device), received.counts)
    before = (received.counts.cumsum(0) - received.counts)[slot]
    return received.begins[slot] + torch.arange(len(slot), device=slot.device) - before


def plain_rows(received: Received, there: torch.Tensor) -> torch.Tensor:
    """[N, H] bfloat16 of these rows, whatever they were sent in."""
    if received.scales is None:
        return received.rows[there]
    # torch has no selection of FP8 values on every device; bytes do.
    values = received.rows.view(torch.uint8)[there].view(received.rows.dtype)
    return dequantise(values, received.scales[there])


def apply_experts(setup: Setup, received: Received, out: torch.Tensor) -> None:
    """What the experts of the check make of the valid rows: each multiplies by a factor of its own."""
    there = rows_there(received)
    mine = setup.where.slots_of(setup.rank)
    factors = torch.tensor([expert_factor(setup.where.expert_of[slot]) for slot in mine], device=out.device)
    out[there] = plain_rows(received, there) * torch.repeat_interleave(factors, received.counts)[:, None].to(out.dtype)


def quantise_error(hidden: int, seed: int) -> float:
    """What FP8 does to tokens of normally distributed values, which those of the check, whole numbers, do not show."""
    return relative_error(torch.randn(64, hidden, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16))


def _numpy(tensor: torch.Tensor | None, there: torch.Tensor) -> NDArray[np.int64] | None:
    return None if tensor is None else tensor[there].cpu().numpy()
