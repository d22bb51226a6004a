"""Operations and their check: what is sound passes, and each kind of flaw shows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from commbench.backends.experts import Batch, Received
from commbench.backends.quantise import dequantise, quantise, relative_error
from commbench.cases import Layout
from commbench.moe.check import _named, expert_factor, token_words, values_of
from commbench.moe.exchange import Channel, local_s, make_exchange
from commbench.moe.library import RoutedLibrary, plain_all_to_all
from commbench.moe.low_latency import LowLatency
from commbench.moe.operations import OPERATIONS, Numbers, Setup
from commbench.moe.placement import place
from commbench.moe.routing import Router
from commbench.moe.straggler import find_straggler
from commbench.workloads import Workload

from .conftest import MemoryAllToAllV, routed_case

LAYOUT = Layout(hosts=("a", "a", "b", "b"))
WORKLOAD = Workload(tokens=9, hidden=256, experts=8, topk=3)


def run_case(
    as_threads: Callable[..., list[Any]], collective: str, *, algorithm: str = "own:flat", dtype: str = "float8_e4m3fn",
    spoil: Callable[[int, Any], None] | None = None, workload: Workload = WORKLOAD, iteration: int = 5,
) -> list[int]:  # fmt: skip
    """How many elements each rank finds wrong in one iteration; ``spoil(rank, operation)`` comes after the run."""
    router = Router(workload, 4, LAYOUT.host_of, 3)
    where = place(workload, 4, LAYOUT.host_of, router.expected_load())

    def act(rank: int, backend: Any) -> int:
        case = routed_case(workload, 4, collective=collective, algorithm=algorithm, dtype=dtype)
        exchange = make_exchange(case, where, LAYOUT, rank, workload.tokens, backend)
        setup = Setup(router=router, where=where, rank=rank, device=torch.device("cpu"))
        routed = OPERATIONS[collective](setup=setup, exchange=exchange)
        operation = routed.operation()
        data = Numbers()
        data.poison(operation.output)
        data.fill(operation.input, iteration)
        operation.upload()
        operation.run()
        if spoil is not None:
            spoil(rank, routed)
        operation.download()
        phases = operation.phases
        assert phases is not None
        assert (phases() >= 0).all()
        return data.wrong(operation.output, iteration)

    return as_threads(LAYOUT, act)


@pytest.mark.parametrize("collective", ["moe_dispatch", "moe_combine"])
@pytest.mark.parametrize("algorithm", ["own:flat", "own:hierarchical"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
def test_what_is_sound_passes(
    as_threads: Callable[..., list[Any]], collective: str, algorithm: str, dtype: str
) -> None:
    assert run_case(as_threads, collective, algorithm=algorithm, dtype=dtype) == [0, 0, 0, 0]
    low = replace(WORKLOAD, mode="low_latency", masked=0.2)
    assert run_case(as_threads, collective, dtype=dtype, workload=low) == [0, 0, 0, 0]


def changed(received: Received, **changes: Any) -> Received:
    return replace(received, **changes)


def one_element(rank: int, routed: Any) -> None:
    if rank == 1:
        rows = routed.received.rows.clone()
        rows.view(torch.uint8)[0, 3] ^= 0x40
        routed.received = changed(routed.received, rows=rows)


def two_experts_swapped(rank: int, routed: Any) -> None:
    # Both have rows, and the counts stay what they were where they are alike; sources tell.
    if rank == 1:
        routed.received = changed(
            routed.received, begins=routed.received.begins.flip(0), counts=routed.received.counts.flip(0)
        )


def a_row_lost(rank: int, routed: Any) -> None:
    if rank == 1:
        counts = routed.received.counts.clone()
        counts[int(counts.argmax())] -= 1
        routed.received = changed(routed.received, counts=counts)


def a_wrong_source(rank: int, routed: Any) -> None:
    if rank == 1:
        sources = routed.received.source_token.clone()
        sources[0] += 1
        routed.received = changed(routed.received, source_token=sources)


def nothing_was_done(rank: int, routed: Any) -> None:
    if rank == 1:
        routed.received = None


@pytest.mark.parametrize(
    "spoil",
    [one_element, two_experts_swapped, a_row_lost, a_wrong_source, nothing_was_done],
    ids=lambda one: one.__name__,
)
def test_a_flaw_of_a_dispatch_shows_on_its_rank_alone(as_threads: Callable[..., list[Any]], spoil: Any) -> None:
    found = run_case(as_threads, "moe_dispatch", spoil=spoil)
    assert found[1] > 0
    assert found[0] == found[2] == found[3] == 0
    if spoil is one_element:
        assert found[1] == 1
    if spoil is a_row_lost:
        assert found[1] == WORKLOAD.hidden


def test_a_combine_of_the_wrong_expert_shows(as_threads: Callable[..., list[Any]]) -> None:
    def shift(rank: int, routed: Any) -> None:
        """As if rank 1's sums had come from experts that multiply by something else."""
        if rank == 1:
            routed.sums = routed.sums * 2

    found = run_case(as_threads, "moe_combine", spoil=shift)
    assert found[1] > 0
    assert found[0] == found[2] == found[3] == 0

    def bad(rank: int, routed: Any) -> None:
        if rank == 2:
            routed.sums[0, 0] = float("nan")

    assert run_case(as_threads, "moe_combine", spoil=bad) == [0, 0, 1, 0]


def test_neighbouring_experts_multiply_by_different_factors() -> None:
    factors = [expert_factor(expert) for expert in range(64)]
    assert all(first != second for first, second in itertools.pairwise(factors))
    assert all(np.log2(factor).is_integer() for factor in factors)


def test_tokens_code_where_they_come_from_and_survive_fp8_exactly() -> None:
    words = token_words(3, 500, 256, 77)
    values = values_of(words)
    assert _named(values[123]) == (3, 123)
    tensor = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(dequantise(*quantise(tensor)), tensor)
    assert len(np.unique(values, axis=0)) == 500
    assert not np.array_equal(values, values_of(token_words(3, 500, 256, 78)))
    assert not np.array_equal(values, values_of(token_words(4, 500, 256, 77)))


def test_quantising_by_hand() -> None:
    tokens = torch.zeros(1, 256, dtype=torch.bfloat16)
    tokens[0, 0], tokens[0, 1], tokens[0, 128] = 448.0, 100.0, 0.5
    values, scales = quantise(tokens)
    # The first block's scale is 448 / 448; 100 has 4 bits of mantissa in e4m3: 96 or 104, the even one at the half.
    assert scales.tolist() == [[1.0, pytest.approx(0.5 / 448)]]
    assert values.float()[0, :2].tolist() == [448.0, 96.0]
    assert float(dequantise(values, scales)[0, 128]) == pytest.approx(0.5, rel=1e-2)
    assert relative_error(torch.zeros(2, 128, dtype=torch.bfloat16)) == 0.0
    # Uniform rounding to 3 bits of mantissa has a relative error of at most 1/16, and in the mean well below.
    assert 0.01 < relative_error(torch.randn(64, 1024).to(torch.bfloat16)) < 1 / 16


class NoHostReads(TorchDispatchMode):
    """Fails where data would have to come to the host: a device's graph could not be captured."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not any(
            word in name for word in ("nonzero", "_local_scalar_dense", "unique", "masked_select", "item")
        ), name
        return func(*args, **(kwargs or {}))


def test_low_latency_decides_nothing_by_what_the_data_are(as_threads: Callable[..., list[Any]]) -> None:
    workload = replace(WORKLOAD, mode="low_latency", masked=0.2)
    router = Router(workload, 4, LAYOUT.host_of, 3)
    where = place(workload, 4, LAYOUT.host_of, None)
    from commbench.moe.placement import choose_slots

    def act(rank: int, backend: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = []
        for static in (True, False):
            calls = backend.all_to_all_v((0, 1, 2, 3))
            channel = Channel(calls=calls, members=(0, 1, 2, 3), sent=np.zeros(4, dtype=np.int64))
            exchange = LowLatency(workload, "float8_e4m3fn", where, rank, 9, channel, static=static)
            ids, weights = router.selections(rank, 0)
            words = token_words(rank, 9, 256, 0)
            batch = Batch(
                tokens=torch.from_numpy(words.view(np.int16)).view(torch.bfloat16),
                slots=torch.from_numpy(np.array(choose_slots(where, ids, rank))), weights=torch.from_numpy(np.array(weights)),
            )  # fmt: skip
            with NoHostReads() if static else torch.no_grad():
                received = exchange.dispatch(batch)
                rows = (received.rows.float().view(-1, 2, 128) * received.scales[:, :, None]).view(-1, 256)
                rows[:] = torch.nan_to_num(rows)
                sums = exchange.combine(rows.to(torch.bfloat16), received)
            found.append((received.counts.clone(), sums))
        (counts, sums), (other_counts, other_sums) = found
        assert torch.equal(counts, other_counts)
        torch.testing.assert_close(sums, other_sums, rtol=2**-6, atol=0.05)
        return counts, sums

    found = as_threads(LAYOUT, act)
    # Every valid selection of every rank arrives somewhere.
    valid = sum(int((router.selections(rank, 0)[0] >= 0).sum()) for rank in range(4))
    assert sum(int(counts.sum()) for counts, _ in found) == valid


def test_the_work_around_messages_is_timed_without_them(as_threads: Callable[..., list[Any]]) -> None:
    router = Router(WORKLOAD, 4, LAYOUT.host_of, 3)
    where = place(WORKLOAD, 4, LAYOUT.host_of, None)

    def act(rank: int, backend: Any) -> int:
        case = routed_case(WORKLOAD, 4, algorithm="own:hierarchical")
        exchange = make_exchange(case, where, LAYOUT, rank, 9, backend)
        setup = Setup(router=router, where=where, rank=rank, device=torch.device("cpu"))
        routed = OPERATIONS["moe_dispatch"](setup=setup, exchange=exchange)
        routed.operation().upload()
        posts = []
        real = MemoryAllToAllV.post

        def counted(self: Any, *args: Any) -> Any:
            posts.append(1)
            return real(self, *args)

        for channel in exchange.channels:  # type: ignore[attr-defined]
            channel.calls.post = counted.__get__(channel.calls)
        took = local_s(exchange.channels, routed.run)  # type: ignore[attr-defined]
        assert took > 0
        routed.download()
        assert int(routed.taken.view(np.int64)[0]) == 0  # what was replayed is what came
        return len(posts)

    # Counts and records over the rail, and the same inside the host: once, and never in the repetitions.
    assert as_threads(LAYOUT, act) == [4, 4, 4, 4]


def test_a_straggler_and_its_load() -> None:
    loads = np.tile([1.0, 1.0, 1.0, 3.0], (20, 1))
    ends = np.tile([1.0, 1.1, 1.2, 2.0], (20, 1))
    found = find_straggler(ends, loads, np.full(20, 3))
    assert found["rank"] == 3
    assert found["share"] == 1.0
    assert found["load_over_mean"] == pytest.approx(2.0)
    assert found["explained"] == "its load, 2.00 times the mean"
    # The same rank, loaded as the others are.
    even = find_straggler(ends, np.ones((20, 4)), np.full(20, 3))
    assert even["load_correlation"] is None
    assert even["explained"].startswith("not its load")
    # Another one is loaded, and yet rank 3 is last.
    other = find_straggler(ends, np.tile([3.0, 1.0, 1.0, 1.0], (20, 1)), np.full(20, 3))
    assert other["explained"].startswith("not its load")
    # Nobody in particular, and too few to say.
    assert find_straggler(ends, loads, np.arange(20) % 4)["explained"].startswith("no rank")
    assert find_straggler(ends[:3], loads[:3], np.full(3, 3))["explained"].startswith("too few")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"execution": "graph"}, "gloo works on the host, and only a device launches graphs"),
        ({"backend": "nccl", "execution": "graph"}, "only low latency can be captured in a graph"),
        (
            {"algorithm": "library"},
            "gloo has no dispatch and combine of its own: ask for --dispatch flat or hierarchical",
        ),
        ({"workload": replace(WORKLOAD, topk=9)}, "topk 9 is more than 8 experts"),
        ({}, None),
    ],
)
def test_what_cannot_be_is_said_before_it_is_tried(changes: dict[str, Any], says: str | None) -> None:
    class Backend:
        def expert_library(self, members: tuple[int, ...]) -> None:
            return None

        def all_to_all_v(self, members: tuple[int, ...]) -> object:
            return object()

    case = routed_case(WORKLOAD, 4)
    case = replace(case, **changes)
    library = RoutedLibrary(case=case, backend=Backend(), control=None, layout=LAYOUT, seed=0)  # type: ignore[arg-type]
    reason = library.why_not(case, ((0, 1, 2, 3),))
    assert (reason is None) == (says is None)
    assert says is None or says in (reason or "")


def test_a_plain_all_to_all_of_as_many_bytes() -> None:
    plain = plain_all_to_all(routed_case(WORKLOAD, 4), 3000.0)
    # Of an all_to_all's bytes a rank keeps a quarter to itself: 4000 in all, in shares of whole multiples of 16 bytes.
    assert (plain.collective, plain.algorithm, plain.dtype, plain.workload) == ("all_to_all", "library", "uint8", None)
    assert (plain.requested_bytes, plain.bytes) == (4000, 4 * 992)
    assert plain_all_to_all(routed_case(WORKLOAD, 4), 0.0).bytes == 0
