"""What tokens hold, and the exact check of where they went and of what came back for them.

A token's values are whole numbers that are exact in bfloat16 and stay so in FP8 with its scales: they code the rank, the
token and the iteration, and differ along the token. The reference is worked out from the router alone, token after token,
with none of the data path's code.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from commbench.backends.experts import Place
from commbench.moe.placement import choose_slots
from commbench.moe.routing import Router
from commbench.workloads import SCALE_BLOCK

# bfloat16 has 8 bits of mantissa: a sum that was rounded at each of a few steps is within this part of the exact one.
TOLERANCE = 2.0**-6
STRETCH_ROWS = 64  # that are compared at a time
LARGEST = 7  # e4m3 holds all whole numbers up to 16, whatever its scale: multiples of a power of two


@dataclass(kw_only=True)
class Expected:
    """What a rank must get in one iteration. ``slots[slot]``: (source rank, token) of every row of its slots, in any
    order; ``factors``: [T] what a combine makes of each of its own tokens, in multiples, when all experts multiply by a
    factor of their own."""

    slots: dict[int, list[tuple[int, int]]]
    factors: NDArray[np.float64]


def expert_factor(expert: int) -> float:
    """What an expert of the check multiplies by: a small power of two that differs from its neighbours', so that products
    are exact and a wrong expert shows."""
    return float(2.0 ** ((expert * 5 + 3) % 7 - 3))


def token_words(rank: int, tokens: int, hidden: int, iteration: int) -> NDArray[np.uint16]:
    """[tokens, hidden] the bits of bfloat16 values from -7 to 7, 7 at least once in each 128.

    They are read from one long sequence, each token's from a place of its own.
    """
    sequence = _sequence(hidden)
    period = len(sequence) - hidden
    at = (np.arange(tokens, dtype=np.int64) * 7919 + rank * 104729 + iteration * 15485863) % period
    windows = np.lib.stride_tricks.sliding_window_view(sequence, hidden)
    words = windows[at]
    words[:, ::SCALE_BLOCK] = _bits(np.array([float(LARGEST)]))[0]
    # The place in the sequence may repeat: rank, token and iteration are written out as well, three digits of a block.
    numbers = (np.full(tokens, rank), np.arange(tokens), np.full(tokens, iteration))
    for block, number in enumerate(numbers):
        column = 1 + block * 16
        for digit in range(5):
            if column + digit < hidden:
                words[:, column + digit] = _bits(((number // 15**digit) % 15 - LARGEST).astype(np.float64))
    return words


_SEQUENCES: dict[int, NDArray[np.uint16]] = {}


def _sequence(hidden: int) -> NDArray[np.uint16]:
    if hidden not in _SEQUENCES:
        values = np.random.default_rng(hidden).integers(-LARGEST, LARGEST + 1, hidden + 65521).astype(np.float64)
        _SEQUENCES[hidden] = _bits(values)
    return _SEQUENCES[hidden]


def _bits(values: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Of bfloat16 numbers that hold the values exactly."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def values_of(words: NDArray[np.uint16]) -> NDArray[np.float32]:
    """What bfloat16 numbers are."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def expected(router: Router, where: Place, rank: int, iteration: int) -> Expected:
    """What ``rank`` must get and give back."""
    slots: dict[int, list[tuple[int, int]]] = defaultdict(list)
    mine = set(where.slots_of(rank))
    for source in range(router.ranks):
        ids, _ = router.selections(source, iteration)
        chosen = choose_slots(where, ids, source)
        for token, row in enumerate(chosen.tolist()):
            for slot in row:
                if slot in mine:
                    slots[slot].append((source, token))
    ids, weights = router.selections(rank, iteration)
    factor = np.array([expert_factor(expert) for expert in range(router.workload.experts)])
    factors = (np.where(ids >= 0, factor[np.maximum(ids, 0)], 0.0) * weights).sum(axis=1)
    return Expected(slots=dict(slots), factors=factors)


def wrong_rows(
    want: Expected, router: Router, where: Place, rank: int, iteration: int, *, values: NDArray[np.float32],
    counts: NDArray[np.int64], source_rank: NDArray[np.int64] | None, source_token: NDArray[np.int64] | None,
) -> int:  # fmt: skip
    """How many elements of what a dispatch gave are wrong; each row that is missing or too many counts as one of hidden.

    ``values``: the valid rows of this rank's slots, one slot's after the other's, ``counts`` of each. Where the library does
    not tell where rows come from, their content does.
    """
    hidden, wrong, begin = router.workload.hidden, 0, 0
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by source: rows, and the tokens that they should be
    for slot, count in zip(where.slots_of(rank), counts.tolist(), strict=True):
        left = set(want.slots.get(slot, []))
        wrong += abs(count - len(left)) * hidden
        mine = slice(begin, begin + count)
        if source_rank is not None and source_token is not None:
            names = list(zip(source_rank[mine].tolist(), source_token[mine].tolist(), strict=True))
        else:
            names = [_named(row) for row in values[mine]]
        for at, name in enumerate(names, begin):
            if name not in left:
                wrong += hidden
                continue
            left.remove(name)
            found[name[0]].append((at, name[1]))
        begin += count
    # One source's tokens at a time: all of them may be more than all that was received.
    for source, pairs in found.items():
        words = token_words(source, router.tokens(source), hidden, iteration)
        for first in range(0, len(pairs), STRETCH_ROWS):
            rows, tokens = zip(*pairs[first : first + STRETCH_ROWS], strict=True)
            wrong += int(np.count_nonzero(values[list(rows)] != values_of(words[list(tokens)])))
    return wrong


def _named(row: NDArray[np.float32]) -> tuple[int, int]:
    """The rank and token that a row's content says it is of."""
    found = []
    for block in range(2):
        digits = row[1 + block * 16 : 6 + block * 16].astype(np.int64) + LARGEST
        found.append(int(sum(digit * 15**place for place, digit in enumerate(digits.tolist()))))
    return found[0], found[1]


def wrong_sums(want: Expected, router: Router, rank: int, iteration: int, sums: NDArray[np.float32]) -> int:
    """How many elements of a combine's result are further from the exact sum than bfloat16 allows."""
    exact = values_of(token_words(rank, len(want.factors), sums.shape[1], iteration)) * want.factors[:, None]
    off = np.abs(sums - exact) > TOLERANCE * np.abs(exact)
    return int(np.count_nonzero(off | ~np.isfinite(sums)))
