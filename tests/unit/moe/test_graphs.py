"""Low latency captured in a graph: a double of one, which does again what was captured, on the very memory of then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from commbench.cases import Layout
from commbench.moe.exchange import make_exchange
from commbench.moe.low_latency import LowLatency
from commbench.moe.operations import OPERATIONS, Numbers, Setup
from commbench.moe.placement import place
from commbench.moe.routing import Router
from commbench.workloads import Workload

from .conftest import MemoryAllToAllV, routed_case

LAYOUT = Layout(hosts=("a",) * 4)
WORKLOAD = Workload(tokens=7, hidden=256, experts=8, topk=3, mode="low_latency", masked=0.1)


class Tape(TorchDispatchMode):
    """Keeps what is called. A replay calls it again, and puts what comes out where it was when it was captured."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], Any]] = []
        self.pause = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.pause:
            before, _ = tree_flatten(result)
            given = {
                one.untyped_storage().data_ptr() for one in tree_flatten((args, kwargs))[0] if torch.is_tensor(one)
            }

            def step() -> None:
                after, _ = tree_flatten(func(*args, **(kwargs or {})))
                for old, new in zip(before, after, strict=True):
                    # What lies in an argument's memory, a view or itself, is there already.
                    if torch.is_tensor(old) and old.untyped_storage().data_ptr() not in given:
                        old.copy_(new)

            self.steps.append(step)
        return result

    def exchange(self, act: Callable[[], Any]) -> None:
        """Messages are no calls of torch's."""
        self.pause = True
        act()
        self.pause = False
        self.steps.append(act)

    def replay(self) -> None:
        for step in self.steps:
            step()


class Captured(MemoryAllToAllV):
    """Messages that a tape keeps, where there is one."""

    tape: Tape | None = None

    def post(self, given: Any, give: Any, taken: Any, take: Any) -> Callable[[], Any]:
        def act() -> None:
            MemoryAllToAllV.post(self, given, give, taken, take)()

        if self.tape is None:
            return act
        tape = self.tape
        return lambda: tape.exchange(act)


@pytest.mark.parametrize("collective", ["moe_dispatch", "moe_combine"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
def test_a_captured_operation_serves_every_iteration(
    as_threads: Callable[..., list[Any]], collective: str, dtype: str
) -> None:
    workload = replace(WORKLOAD)
    router = Router(workload, 4, LAYOUT.host_of, 3)
    where = place(workload, 4, LAYOUT.host_of, None)

    def act(rank: int, backend: Any) -> list[int]:
        case = routed_case(workload, 4, collective=collective, dtype=dtype)
        exchange = make_exchange(case, where, LAYOUT, rank, workload.tokens, backend)
        assert isinstance(exchange, LowLatency)
        (channel,) = exchange.channels
        calls = Captured(backend.boxes[0, 1, 2, 3], rank)
        channel.calls = calls
        exchange._static = True  # as on a device

        def capture(call: Callable[[], Any]) -> Callable[[], Any]:
            calls.tape = tape = Tape()
            with tape:
                call()
            calls.tape = None
            return tape.replay

        setup = Setup(router=router, where=where, rank=rank, device=torch.device("cpu"), graph=True, capture=capture)
        operation = OPERATIONS[collective](setup=setup, exchange=exchange).operation()
        data = Numbers()
        data.fill(operation.input, 0)
        operation.upload()
        operation.run()
        assert operation.capture is not None
        launch = operation.capture()
        found = []
        for iteration in (4, 5, 6):
            data.poison(operation.output)
            data.fill(operation.input, iteration)
            operation.upload()
            launch()
            operation.download()
            found.append(data.wrong(operation.output, iteration))
        # What nobody launches is wrong.
        data.fill(operation.input, 7)
        operation.upload()
        operation.download()
        found.append(min(1, data.wrong(operation.output, 7)))
        return found

    assert as_threads(LAYOUT, act) == [[0, 0, 0, 1]] * 4
