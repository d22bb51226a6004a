"""The data check against collectives worked out the slow way: from every rank's input, in exact arithmetic."""

from __future__ import annotations

import itertools
import math
import random
import tracemalloc
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commbench.cases import DTYPES, Dtype
from commbench.collectives import COLLECTIVES
from commbench.measure import tiles
from commbench.measure.data import Pattern
from commbench.measure.tiles import draw, mix, moved_tile, reduced_tile

Words = np.ndarray[Any, np.dtype[Any]]
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
MOVING = ("all_gather", "all_to_all", "broadcast", "gather", "scatter", "send_recv")
RANKS = (2, 3, 4, 5, 8, 33)
OPS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a + b,
    "avg": lambda a, b: a + b,
    "prod": lambda a, b: a * b,
    "min": min,
    "max": max,
    "band": lambda a, b: a & b,
    "bor": lambda a, b: a | b,
    "bxor": lambda a, b: a ^ b,
}
IDEMPOTENT = ("min", "max", "band", "bor")
BITWISE = ("band", "bor", "bxor")
FLOATS = [dtype for dtype in DTYPES.values() if dtype.kind == "float"]
TYPES_AND_OPS = [(d, op) for d in DTYPES.values() for op in OPS if not (op in BITWISE and d.kind == "float")]

each_type = pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
each_type_and_op = pytest.mark.parametrize(
    ("dtype", "op"), TYPES_AND_OPS, ids=[f"{dtype.name}-{op}" for dtype, op in TYPES_AND_OPS]
)


@pytest.fixture
def small_tile(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tile of a 64th of the usual length: quicker to make, and otherwise the same."""
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", tiles.TILE_ELEMENTS // 64)
    for cached in (moved_tile, reduced_tile):
        cached.cache_clear()
    yield
    for cached in (moved_tile, reduced_tile):
        cached.cache_clear()


quick = pytest.mark.usefixtures("small_tile")


# The slow way: Python's whole numbers and torch's rounding; of the code under test only the inputs.


def numbers(words: Words, dtype: Dtype) -> list[int]:
    """Elements as Python's integers: the inputs of a reduction have no fractions."""
    if dtype.kind != "float":
        return list(words.view(dtype.name).tolist())
    values = torch.from_numpy(words.view(np.uint8)).view(getattr(torch, dtype.name)).double()
    assert (values % 1 == 0).all()
    return [int(value) for value in values.tolist()]


def words_of(values: list[Any], dtype: Dtype) -> Words:
    """Elements from numbers; integers beyond the type wrap round, as hardware does."""
    word = f"u{dtype.itemsize}"
    if dtype.kind != "float":
        return np.array([value % 2 ** (8 * dtype.itemsize) for value in values], dtype=word)
    rounded = torch.tensor(values, dtype=torch.float64).to(getattr(torch, dtype.name))
    return rounded.view(torch.uint8).numpy().view(word)


def combined(inputs: list[list[int]], op: str, dtype: Dtype, ranks: int) -> Words:
    """The reduction of ``inputs`` in a collective of ``ranks`` (more than there are inputs where one was lost)."""
    values = [reduce(OPS[op], column) for column in zip(*inputs, strict=True)]
    if op == "avg":
        values = [value / ranks if dtype.kind == "float" else value // ranks for value in values]
    return words_of(values, dtype)


def patterns(
    collective: str, dtype: Dtype, op: str | None, ranks: int, block: int, root: int = 0, seed: int = 0
) -> list[Pattern]:
    common = {"dtype": dtype, "op": op, "ranks": ranks, "root": root, "block_elements": block, "seed": seed}
    return [Pattern(collective=COLLECTIVES[collective], rank=rank, **common) for rank in range(ranks)]  # type: ignore[arg-type]


def inputs_of(group: list[Pattern], dtype: Dtype, iteration: int) -> list[Words]:
    found = []
    for pattern in group:
        buffer = np.zeros(pattern.input_elements * dtype.itemsize, dtype=np.uint8)
        pattern.fill(buffer, iteration)
        found.append(buffer.view(f"u{dtype.itemsize}"))
    return found


def moved(collective: str, sent: list[Words], rank: int, root: int, block: int) -> Words:
    """A rank's output of a collective that passes data on."""

    def piece(source: int, index: int) -> Words:
        return sent[source][index * block : (index + 1) * block]

    none = sent[0][:0]
    outputs: dict[str, Callable[[], Words]] = {
        "all_gather": lambda: np.concatenate(sent),
        "all_to_all": lambda: np.concatenate([piece(peer, rank) for peer in range(len(sent))]),
        "broadcast": lambda: sent[root],
        "gather": lambda: np.concatenate(sent) if rank == root else none,
        "scatter": lambda: piece(root, rank),
        "send_recv": lambda: sent[(rank + len(sent) - 1) % len(sent)],
        "barrier": lambda: none,
    }
    return outputs[collective]()


def reduced(collective: str, total: Words, rank: int, root: int, block: int) -> Words:
    """A rank's output of a collective that reduces, from the reduction of the whole inputs."""
    return {
        "all_reduce": total,
        "reduce": total if rank == root else total[:0],
        "reduce_scatter": total[rank * block : (rank + 1) * block],
    }[collective]


def right_outputs(
    collective: str, group: list[Pattern], dtype: Dtype, op: str | None, root: int, block: int, iteration: int
) -> list[Words]:
    sent = inputs_of(group, dtype, iteration)
    if collective in REDUCING:
        total = combined([numbers(words, dtype) for words in sent], str(op), dtype, len(sent))
        return [reduced(collective, total, rank, root, block).copy() for rank in range(len(sent))]
    return [moved(collective, sent, rank, root, block).copy() for rank in range(len(sent))]


def assert_only_the_right_output_passes(group: list[Pattern], outputs: list[Words], iteration: int) -> None:
    for pattern, output in zip(group, outputs, strict=True):
        assert len(output) == pattern.output_elements
        assert pattern.wrong(output.view(np.uint8), iteration) == 0
        if len(output):
            at = len(output) // 2
            output[at] ^= output.dtype.type(1 << (8 * output.itemsize - 2))
            assert pattern.wrong(output, iteration) == 1
        pattern.poison(output)
        assert pattern.wrong(output, iteration) == len(output)


# Right answers are right.


@quick
@each_type_and_op
def test_reductions_match_exact_arithmetic(dtype: Dtype, op: str) -> None:
    for ranks, collective in itertools.product(RANKS, REDUCING):
        root, block, iteration = ranks // 2, 13, ranks
        group = patterns(collective, dtype, op, ranks, block, root)
        outputs = right_outputs(collective, group, dtype, op, root, block, iteration)
        assert_only_the_right_output_passes(group, outputs, iteration)


@quick
@each_type
@pytest.mark.parametrize("collective", MOVING)
def test_moved_data_arrive_unchanged(collective: str, dtype: Dtype) -> None:
    for ranks in RANKS:
        root, block, iteration = ranks - 1, 7, 3
        group = patterns(collective, dtype, None, ranks, block, root)
        outputs = right_outputs(collective, group, dtype, None, root, block, iteration)
        assert_only_the_right_output_passes(group, outputs, iteration)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_case_at_any_iteration(data: st.DataObject) -> None:
    collective = data.draw(st.sampled_from(sorted(COLLECTIVES)))
    dtype, op = data.draw(st.sampled_from(TYPES_AND_OPS))
    ranks = data.draw(st.integers(1, 20))
    root = data.draw(st.integers(0, ranks - 1))
    block = data.draw(st.integers(0, 40)) if COLLECTIVES[collective].sized else 0
    iteration, seed = data.draw(st.integers(0, 2**40)), data.draw(st.integers(0, 2**63))
    group = patterns(collective, dtype, op, ranks, block, root, seed)
    outputs = right_outputs(collective, group, dtype, op, root, block, iteration)
    assert_only_the_right_output_passes(group, outputs, iteration)


@pytest.mark.parametrize(("name", "op"), [("int32", "sum"), ("float32", "max"), ("float64", "prod")])
def test_blocks_longer_than_the_tile(name: str, op: str) -> None:
    dtype, block = DTYPES[name], 600_011
    group = patterns("reduce_scatter", dtype, op, 3, block)
    sent = [words.view(name) for words in inputs_of(group, dtype, 5)]
    total = {"sum": np.add, "max": np.maximum, "prod": np.multiply}[op].reduce(sent, dtype=name)
    for rank, pattern in enumerate(group):
        output = total[rank * block : (rank + 1) * block].copy()
        assert pattern.wrong(output, 5) == 0
        output[[0, 300_000, -1]] += 1
        assert pattern.wrong(output, 5) == 3


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float8_e5m2", "uint8"])
def test_a_thousand_ranks(name: str) -> None:
    dtype, ranks, block = DTYPES[name], 1000, 1100
    group = patterns("all_reduce", dtype, "sum", ranks, block)
    sent = np.array([numbers(words, dtype) for words in inputs_of(group, dtype, 2)])
    assert np.abs(sent).sum(axis=0).max() <= dtype.exact_integer
    total = sent.sum(axis=0)
    assert group[7].wrong(words_of(total.tolist(), dtype), 2) == 0
    for lost in range(ranks):
        assert group[7].wrong(words_of((total - sent[lost]).tolist(), dtype), 2) > 0


def test_a_thousand_ranks_of_short_blocks() -> None:
    dtype, ranks, block = DTYPES["float32"], 1024, 3
    group = patterns("all_to_all", dtype, None, ranks, block)
    sent = inputs_of(group, dtype, 4)
    output = moved("all_to_all", sent, 1000, 0, block)
    assert group[1000].wrong(output, 4) == 0
    assert len({words.tobytes() for words in output.reshape(ranks, block)}) == ranks


# Exactness in any order.


@quick
@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max"])
@each_type
def test_no_partial_result_leaves_the_exact_range(dtype: Dtype, op: str) -> None:
    for ranks in (*RANKS, 300):
        group = patterns("all_reduce", dtype, op, ranks, 40)
        columns = zip(*[numbers(words, dtype) for words in inputs_of(group, dtype, 1)], strict=True)
        for column in columns:
            sizes = [abs(value) for value in column]
            worst = {"sum": sum(sizes), "avg": sum(sizes), "prod": math.prod(sizes)}.get(op, max(sizes))
            assert worst <= dtype.exact_integer


@quick
@each_type_and_op
def test_data_differ_by_element(dtype: Dtype, op: str) -> None:
    """No collective could pass by writing one number everywhere."""
    for ranks in (*RANKS, 16, 256, 300):
        # The mean of one-byte integers is 0 over more ranks than their greatest number.
        if op == "avg" and dtype.kind != "float" and ranks > dtype.exact_integer:
            continue
        tile = reduced_tile(dtype, op, ranks, 0)
        for words in (tile.inputs, tile.outputs):
            assert words.min() < words.max()


# Wrong answers are wrong.


@quick
@each_type_and_op
def test_a_lost_rank_shows_in_as_many_elements_as_ranks(dtype: Dtype, op: str) -> None:
    for ranks, iteration in itertools.product(RANKS, (0, 9)):
        group = patterns("all_reduce", dtype, op, ranks, ranks)
        sent = [numbers(words, dtype) for words in inputs_of(group, dtype, iteration)]
        for lost in range(ranks):
            output = combined(sent[:lost] + sent[lost + 1 :], op, dtype, ranks)
            assert group[0].wrong(output, iteration) > 0, (ranks, lost)


@quick
@each_type_and_op
def test_a_lost_rank_shows_in_one_element_within_as_many_iterations(dtype: Dtype, op: str) -> None:
    ranks = 5
    group = patterns("all_reduce", dtype, op, ranks, 1)
    sent = [[numbers(words, dtype) for words in inputs_of(group, dtype, iteration)] for iteration in range(ranks)]
    for lost in range(ranks):
        outputs = [combined(own[:lost] + own[lost + 1 :], op, dtype, ranks) for own in sent]
        assert any(group[0].wrong(output, iteration) for iteration, output in enumerate(outputs)), lost


@quick
@each_type_and_op
def test_a_rank_that_comes_in_twice_shows(dtype: Dtype, op: str) -> None:
    for ranks in (2, 3, 4, 5, 8):
        group = patterns("all_reduce", dtype, op, ranks, 64)
        sent = [numbers(words, dtype) for words in inputs_of(group, dtype, 2)]
        for twice in range(ranks):
            output = combined([*sent, sent[twice]], op, dtype, ranks)
            assert (group[0].wrong(output, 2) > 0) == (op not in IDEMPOTENT)
            for lost in set(range(ranks)) - {twice}:
                output = combined([sent[twice] if r == lost else sent[r] for r in range(ranks)], op, dtype, ranks)
                assert group[0].wrong(output, 2) > 0, (ranks, twice, lost)


@quick
@each_type_and_op
def test_another_op_shift_or_iteration_shows(dtype: Dtype, op: str) -> None:
    for ranks in (2, 3, 8):
        group = patterns("all_reduce", dtype, op, ranks, 64)
        sent = [numbers(words, dtype) for words in inputs_of(group, dtype, 2)]
        right = combined(sent, op, dtype, ranks)
        for other in OPS:
            if other != op and not (other in BITWISE and dtype.kind == "float"):
                assert group[0].wrong(combined(sent, other, dtype, ranks), 2) > 0, (ranks, other)
        for by in (1, -1, 2, 8, 32):
            assert group[0].wrong(np.roll(right, by), 2) > 0
        for iteration in (0, 1, 3, 4, 5, 10, 2 + 1024):
            assert group[0].wrong(right, iteration) > 0
        for rank, own in enumerate(sent):
            assert group[0].wrong(words_of(own, dtype), 2) > 0, (ranks, rank)
            shifted = [own[1:] + own[:1] if r == rank else sent[r] for r in range(ranks)]
            assert group[0].wrong(combined(shifted, op, dtype, ranks), 2) > 0, (ranks, rank)


@quick
@pytest.mark.parametrize("name", ["uint8", "float8_e4m3fn", "bfloat16", "float32", "int64"])
@pytest.mark.parametrize("collective", MOVING)
def test_misplaced_blocks_show(collective: str, name: str) -> None:
    dtype, block = DTYPES[name], 16
    for ranks in (2, 3, 5, 8):
        group = patterns(collective, dtype, None, ranks, block)
        outputs = right_outputs(collective, group, dtype, None, 0, block, 6)
        for pattern, output in zip(group, outputs, strict=True):
            blocks = output.reshape(-1, block)
            for a, b in itertools.combinations(range(len(blocks)), 2):
                swapped = blocks.copy()
                swapped[[a, b]] = swapped[[b, a]]
                assert pattern.wrong(swapped, 6) == 2 * np.count_nonzero(blocks[a] != blocks[b]) > 0
                swapped[[a, b]] = blocks[a]
                assert pattern.wrong(swapped, 6) == np.count_nonzero(blocks[a] != blocks[b])
            if len(output):
                assert pattern.wrong(np.roll(output, 1), 6) > 0
                assert all(pattern.wrong(output, iteration) > 0 for iteration in (0, 5, 7, 1030))


@pytest.mark.parametrize(("collective", "op"), [("all_to_all", None), ("reduce_scatter", "sum")])
def test_every_block_of_every_rank_and_iteration_is_different(collective: str, op: str | None) -> None:
    dtype, ranks, block = DTYPES["float32"], 16, 8
    group = patterns(collective, dtype, op, ranks, block)
    seen = {
        words.tobytes()
        for iteration in range(20)
        for sent in inputs_of(group, dtype, iteration)
        for words in sent.reshape(ranks, block)
    }
    assert len(seen) == 20 * ranks * ranks


def test_blocks_are_not_each_other_moved_along() -> None:
    """Of 2048 elements hardly two are the same place of the tile."""
    dtype, ranks, block = DTYPES["float32"], 16, 8
    group = patterns("all_to_all", dtype, None, ranks, block)
    for iteration in range(5):
        assert len(np.unique(inputs_of(group, dtype, iteration))) > 0.95 * ranks * ranks * block
    of_one_rank = [inputs_of(group[:1], dtype, iteration)[0][:block] for iteration in range(100)]
    assert len(np.unique(of_one_rank)) > 0.95 * 100 * block


@pytest.mark.parametrize("ranks", [2, 7, 64, 1000, 1024, 4099])
def test_ranks_blocks_and_iterations_read_from_places_of_their_own(ranks: int) -> None:
    for tile in (moved_tile(DTYPES["uint8"], 0), reduced_tile(DTYPES["uint8"], "max", ranks, 0)):
        for stride in (tile.rank_stride, tile.block_stride, tile.iteration_stride):
            assert len({step * stride % tile.period for step in range(ranks)}) == ranks
        # Blocks are often powers of two: moving by one must not lead back to the same place.
        assert all(2**power % tile.period for power in range(60))


def test_seeds_and_cases_have_different_data() -> None:
    dtype = DTYPES["float32"]
    seen: set[bytes] = set()
    for seed, collective, block in itertools.product((0, 1), ("all_reduce", "reduce"), (64, 65)):
        group = patterns(collective, dtype, "sum", 4, block, seed=seed)
        seen.update(words[:64].tobytes() for words in inputs_of(group, dtype, 0))
    assert len(seen) == 8 * 4


# The mean, where libraries round differently.


def rounded(value: Any, dtype: Dtype) -> Any:
    return value.to(getattr(torch, dtype.name)).double() if dtype.itemsize < 8 else value


def means(sent: torch.Tensor, dtype: Dtype) -> dict[str, torch.Tensor]:
    """What libraries do, each step rounded to the type: ``sent`` is (ranks, elements), in double."""
    ranks = len(sent)
    inverse = rounded(torch.tensor(1 / ranks, dtype=torch.float64), dtype)
    total, scaled = sent.sum(dim=0), [rounded(row * inverse, dtype) for row in sent]
    tree = scaled
    while len(tree) > 1:
        tree = [rounded(sum(tree[i : i + 2]), dtype) for i in range(0, len(tree), 2)]
    return {
        "sum, then divide": rounded(total / ranks, dtype),
        "sum, then multiply": rounded(total * inverse, dtype),
        "multiply, then sum in a ring": reduce(lambda a, b: rounded(a + b, dtype), scaled),
        "multiply, then sum in a tree": tree[0],
        "in higher precision": rounded((sent * (1 / ranks)).sum(dim=0), dtype),
    }


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_every_way_to_take_a_mean_passes(dtype: Dtype) -> None:
    shuffled = random.Random(0)
    for ranks in (2, 3, 5, 6, 7, 8, 11, 12, 16, 33, 64, 100):
        group = patterns("all_reduce", dtype, "avg", ranks, 500)
        sent = inputs_of(group, dtype, 1)
        shuffled.shuffle(sent)
        values = torch.tensor([numbers(words, dtype) for words in sent], dtype=torch.float64)
        for how, mean in means(values, dtype).items():
            output = words_of(mean.tolist(), dtype)
            assert group[0].wrong(output, 1) == 0, (ranks, how)
            tile = reduced_tile(dtype, "avg", ranks, 0)
            assert (tile.slack == 0) == (ranks in (2, 8, 16, 64))
            assert group[0].wrong(output + output.dtype.type(tile.slack + 1), 1) == len(output)
            assert group[0].wrong(output - output.dtype.type(tile.slack + 1), 1) == len(output)


def test_the_slack_of_a_mean_is_a_few_units_in_the_last_place() -> None:
    """Ranks that add something, one unit for the product with 1/ranks, and one for the rounded answer, either way."""
    slack = {name: reduced_tile(DTYPES[name], "avg", 6, 0).slack for name in ("float64", "float32", "float16")}
    assert slack == {"float64": 2 * 8, "float32": 2 * 8, "float16": 2 * 8}
    assert reduced_tile(DTYPES["bfloat16"], "avg", 6, 0).slack == 2 * 7  # five ranks add at a time
    assert reduced_tile(DTYPES["float8_e4m3fn"], "avg", 6, 0).slack == 2 * 3  # one rank adds at a time


# Buffers.


@pytest.mark.parametrize(
    ("collective", "rank", "expected"),
    [
        ("all_reduce", 2, (10, slice(0, 10), slice(0, 10))),
        ("all_gather", 2, (40, slice(20, 30), slice(0, 40))),
        ("reduce_scatter", 2, (40, slice(0, 40), slice(20, 30))),
        ("all_to_all", 2, (40, slice(0, 40), slice(0, 40))),
        ("broadcast", 1, (10, slice(0, 10), slice(0, 10))),
        ("broadcast", 2, (10, slice(0, 0), slice(0, 10))),
        ("reduce", 1, (10, slice(0, 10), slice(0, 10))),
        ("reduce", 2, (10, slice(0, 10), slice(0, 0))),
        ("gather", 1, (40, slice(10, 20), slice(0, 40))),
        ("gather", 2, (10, slice(0, 10), slice(0, 0))),
        ("scatter", 1, (40, slice(0, 40), slice(10, 20))),
        ("scatter", 2, (10, slice(0, 0), slice(0, 10))),
        ("send_recv", 2, (10, slice(0, 10), slice(0, 10))),
        ("barrier", 2, (0, slice(0, 0), slice(0, 0))),
    ],
)
def test_in_place_buffers_are_laid_out_as_in_nccl_tests(
    collective: str, rank: int, expected: tuple[int, slice, slice]
) -> None:
    block = 10 if collective != "barrier" else 0
    op = "sum" if collective in REDUCING else None
    assert patterns(collective, DTYPES["int8"], op, 4, block, root=1)[rank].in_place_slices() == expected


def test_an_in_place_gather_leaves_the_own_block_where_it_is() -> None:
    group = patterns("all_gather", DTYPES["int32"], None, 3, 5)
    elements, source, target = group[1].in_place_slices()
    buffer = np.zeros(elements, dtype=np.int32)
    group[1].poison(buffer[target])
    group[1].fill(buffer[source], 0)
    assert group[1].wrong(buffer[target], 0) == 10


@pytest.mark.parametrize(("collective", "op"), [("barrier", None), ("all_gather", None), ("all_reduce", "max")])
def test_no_elements(collective: str, op: str | None) -> None:
    pattern = patterns(collective, DTYPES["float16"], op, 4, 0)[0]
    nothing = np.empty(0, dtype=np.uint8)
    pattern.fill(nothing, 0)
    pattern.poison(nothing)
    assert (pattern.input_elements, pattern.output_elements, pattern.wrong(nothing, 0)) == (0, 0, 0)


def test_buffers_that_do_not_fit_are_refused() -> None:
    pattern = patterns("all_reduce", DTYPES["float32"], "sum", 2, 8)[0]
    with pytest.raises(ValueError, match="8 elements of 4 B, not 9"):
        pattern.fill(np.zeros(9, dtype=np.float32), 0)
    with pytest.raises(ValueError, match="contiguous"):
        pattern.wrong(np.zeros(16, dtype=np.float32)[::2], 0)
    with pytest.raises(ValueError, match="contiguous"):
        pattern.poison(np.zeros((4, 4), dtype=np.float32).T[:2])


def test_impossible_cases_are_refused() -> None:
    with pytest.raises(ValueError, match="bitwise bor is not defined for bfloat16"):
        patterns("all_reduce", DTYPES["bfloat16"], "bor", 2, 8)
    with pytest.raises(ValueError, match="did you mean 'sum'"):
        patterns("reduce", DTYPES["int8"], "summ", 2, 8)
    with pytest.raises(ValueError, match="unknown reduce op"):
        patterns("reduce", DTYPES["int8"], None, 2, 8)
    with pytest.raises(ValueError, match="within the 2 ranks"):
        patterns("broadcast", DTYPES["int8"], None, 2, 8, root=2)


def test_work_space_does_not_grow_with_the_buffer() -> None:
    pattern = patterns("all_reduce", DTYPES["float32"], "avg", 6, 2**23)[0]
    buffer = np.zeros(2**23, dtype=np.float32)
    tracemalloc.start()
    try:
        pattern.poison(buffer)
        pattern.fill(buffer, 0)
        assert pattern.wrong(buffer, 0) > 0
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def test_a_tile_cannot_be_written_to() -> None:
    tile = reduced_tile(DTYPES["int8"], "sum", 2, 0)
    for words in (tile.inputs, tile.outputs):
        with pytest.raises(ValueError, match="read-only"):
            words[0] = 1


def test_random_words_are_splitmix64() -> None:
    """The published first outputs for seed 1234567; every rank draws the same, whatever its numpy."""
    assert mix(1234567) == 6457827717110365317
    golden = 0x9E3779B97F4A7C15
    assert mix((1234567 + golden) % 2**64) == 3203168211198807973
    assert mix((1234567 + 2 * golden) % 2**64) == 9817491932198370423
    begin = mix(5, 6)
    assert draw(3, 5, 6).tolist() == [mix((begin + k * golden) % 2**64) for k in range(3)]
