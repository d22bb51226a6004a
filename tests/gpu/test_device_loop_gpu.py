"""The loop that times operations on a device, on a real GPU: a world of one rank, whose NCCL copies on the device.

What is compared is of the same device in the same process, so no speed of any GPU is written here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from commbench.backends.base import Context
from commbench.backends.device_loop import DeviceLoop
from commbench.backends.nccl import Nccl
from commbench.backends.torch_device import TorchDevice, capture
from commbench.cases import Case
from commbench.measure.data import Pattern
from commbench.measure.operation import Operation
from commbench.measure.timed import Round, Start

MIB = 1 << 20
START = Start(beat=lambda phase, iteration: None)


@pytest.fixture(scope="module")
def backend() -> Iterator[Nccl]:
    made = Nccl()
    made.start(
        Context(
            rank=0, world=1, local_rank=0, hosts=("here",), address="127.0.0.1", interface="lo",
            share=lambda value: value,
        )
    )  # fmt: skip
    yield made
    made.stop()  # returns only where nothing is left of the graphs that hold its communicator
    assert not torch.distributed.is_initialized()


def case(size: int, *, collective: str = "all_gather", **fields: Any) -> Case:
    op = "sum" if collective in ("all_reduce", "reduce_scatter") else None
    return Case(
        collective=collective, backend="nccl", bytes=size, requested_bytes=size, ranks=1, nodes=1, reduce_op=op, **fields
    )  # fmt: skip


def operations(backend: Nccl, of: Case, count: int) -> tuple[list[Operation], Pattern]:
    """On filled buffers, each run once."""
    pattern = Pattern(
        collective=of.spec, dtype=of.itemtype, op=of.reduce_op, ranks=1, rank=0, root=0,
        block_elements=of.block_elements, seed=1,
    )  # fmt: skip
    made = [backend.operation(of, (0,), pattern) for _ in range(count)]
    for operation in made:
        operation.run()
    for index, operation in enumerate(made):
        pattern.poison(operation.output)
        pattern.fill(operation.input, index)
        operation.upload()
    return made, pattern


def loop(backend: Nccl, of: Case) -> DeviceLoop:
    made = backend.loop(of)
    assert isinstance(made, DeviceLoop)
    return made


def seconds(found: Round) -> float:
    return float(np.median(found.stamps[:, 1] - found.stamps[:, 0])) * 1e-9


def isolated_s(backend: Nccl, of: Case) -> float:
    made, _ = operations(backend, of, 8)
    here = loop(backend, of)
    return min(seconds(here.isolated(made, 8, 0, START)) for _ in range(6))


def device(backend: Nccl) -> TorchDevice:
    return TorchDevice(backend.device, lambda: None, cold=True)


def elapsed_s(on: TorchDevice, work: Callable[[], object]) -> float:
    begin, end = on.event(), on.event()
    on.idle(1e-3)
    on.record(begin)
    work()
    on.record(end)
    on.synchronize()
    return on.elapsed_ms(begin, end) * 1e-3


# -- the clock -------------------------------------------------------------------------------------


def test_a_long_batch_takes_as_long_by_the_device_as_by_the_host(backend: Nccl) -> None:
    of = case(512 * MIB, timing="streamed")
    made, _ = operations(backend, of, 2)
    here = loop(backend, of)
    here.streamed(made, 20, 0, START)
    by_device = seconds(here.streamed(made, 20, 0, START))
    torch.cuda.synchronize()
    began = time.perf_counter()
    for index in range(20):
        made[index % 2].enqueue()
    torch.cuda.synchronize()
    by_host = time.perf_counter() - began
    assert 0.7 * by_host < by_device < 1.05 * by_host


def test_a_mark_is_passed_when_the_device_has_come_to_it(backend: Nccl) -> None:
    on = device(backend)
    mark = on.event()
    on.idle(5e-3)
    on.record(mark)
    assert not on.passed(mark)
    on.synchronize()
    assert on.passed(mark)


def test_a_pause_is_not_shorter_than_asked(backend: Nccl) -> None:
    on = device(backend)
    found = elapsed_s(on, partial(on.idle, 4e-3))
    assert 3.5e-3 < found < 40e-3


def test_marks_beside_one_another_are_microseconds_apart(backend: Nccl) -> None:
    assert 0 <= loop(backend, case(MIB)).overhead_s() < 20e-6


# -- what is in the window -------------------------------------------------------------------------


def test_the_flush_is_outside_and_does_its_work(backend: Nccl) -> None:
    on = device(backend)
    on.flush()
    on.synchronize()
    flushing = min(elapsed_s(on, on.flush) for _ in range(10))
    small = isolated_s(backend, case(4096))
    assert small < 0.7 * flushing
    # A quarter of the cache, read and written: from the cache, or from memory behind it.
    cache = torch.cuda.get_device_properties(backend.device).L2_cache_size
    size = cache // 8 // MIB * MIB
    cold, warm = isolated_s(backend, case(size)), isolated_s(backend, case(size, cache="warm"))
    assert cold > 1.02 * warm, (cold, warm, flushing)


def test_the_host_is_out_of_isolated_times_and_its_own_is_told(backend: Nccl) -> None:
    of = case(4096)
    made, _ = operations(backend, of, 16)
    here = loop(backend, of)
    found = [here.isolated(made, 16, 0, START) for _ in range(5)]
    assert [one.starved for one in found[1:]] == [0, 0, 0, 0]
    assert all(one.host_s is not None and 1e-7 < one.host_s < 1e-3 for one in found)
    assert (np.diff(found[-1].stamps[:, 0]) > 0).all()


def test_a_streamed_batch_of_tiny_operations_has_its_host_s_pace(backend: Nccl) -> None:
    of = case(4096, timing="streamed")
    made, _ = operations(backend, of, 16)
    here = loop(backend, of)
    for _ in range(3):
        found = here.streamed(made, 200, 0, START)
    assert found.host_s is not None
    assert 200 * found.host_s < 1.5 * seconds(found)
    graph = DeviceLoop(device(backend), "graph")
    for _ in range(3):
        without_host = graph.streamed(made, 200, 0, START)
    assert seconds(without_host) < 1.1 * seconds(found)


# -- graphs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", ["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast"])
@pytest.mark.parametrize("timing", ["isolated", "streamed"])
def test_graphs_leave_the_data_that_calls_leave(backend: Nccl, collective: str, timing: str) -> None:
    for execution in ("eager", "graph"):
        of = case(MIB, collective=collective, timing=timing, execution=execution)
        made, pattern = operations(backend, of, 4)
        here = loop(backend, of)
        (here.isolated if timing == "isolated" else here.streamed)(made, 4, 0, START)
        for index, operation in enumerate(made):
            operation.download()
            assert pattern.wrong(operation.output, index) == 0, (execution, index)


def test_what_cannot_be_captured_is_refused_and_leaves_the_stream_in_place(backend: Nccl) -> None:
    made, pattern = operations(backend, case(MIB), 1)
    before = torch.cuda.current_stream()

    def waits() -> None:
        made[0].enqueue()
        torch.cuda.synchronize()

    with pytest.raises(RuntimeError):
        capture(waits)
    assert torch.cuda.current_stream() == before
    launch = capture(made[0].enqueue)
    launch()
    made[0].finish()
    made[0].download()
    assert pattern.wrong(made[0].output, 0) == 0
