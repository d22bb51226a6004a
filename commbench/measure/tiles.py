"""The tile: the pseudo-random numbers that all ranks send, and what every reduce op makes of them.

One read-only tile serves an element type, reduce op and number of ranks. Rank q reads it at
``start + q * rank_stride``, wrapping round, so the answer of a reduction is, at any element, the reduction of one fixed
set of tile elements, moved along by ``start``: the tile of all answers is worked out once.

What the numbers promise (``exact`` is the greatest number up to which the type has every whole number):

- Every partial result, in any order, is a whole number within ``exact``. Where ``exact`` is too small for a part from
  every rank, as many ranks as fit have a part at an element, the others send zero, and who they are changes by element.
- A rank that is left out, or that comes in twice where that matters, changes the answer: of every element, or, where
  only some ranks decide an element, of at least one in any ``ranks`` consecutive elements, or of one element within
  ``ranks`` consecutive iterations. (Not so for the mean of one-byte integers over more ranks than half their greatest
  number.)
- Two ranks' inputs, the blocks of an input, and the same block of two iterations are read from different places.
- ``avg`` is exact when the number of ranks is a power of two, and for integers. Otherwise libraries round
  differently: see ``_mean_slack``.
- Moved data are any bits of an integer, and normal numbers of a float.
- A word for poisoning outputs is in no exact answer (NaN for floats).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from commbench.cases import REDUCE_OPS, Dtype
from commbench.measure.encoding import Words, encode, smallest_normal, word_type
from commbench.registry import unknown_name

TILE_ELEMENTS = 2**18  # small enough for the cache: 1 MiB of float32
MARGIN_ELEMENTS = 2**10  # the tile's beginning, repeated behind its end, so that short blocks are read in one go
CACHED_TILES = 2  # making one takes 10 ms; a hundred ranks of one host each keep their own

_BITS_64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_OWN_BITS = 0xAAAAAAAAAAAAAAAA
# Irrational steps through the tile, unrelated to one another, so that no few of them come back to the same place.
_RANK_STEP = (math.sqrt(5) - 1) / 2
_BLOCK_STEP = math.sqrt(2) - 1
_ITERATION_STEP = math.sqrt(3) - 1

Integers = npt.NDArray[Any]  # int64, or uint64 for unsigned types and bits
_Random = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Inputs and exact answers of one element type, reduce op and number of ranks; ``period`` elements and a margin.

    A word is right when ``word - outputs``, as unsigned integers, is at most ``slack``.
    """

    inputs: Words
    outputs: Words
    period: int
    rank_stride: int
    block_stride: int
    iteration_stride: int
    slack: int
    poison: int


@functools.lru_cache(maxsize=CACHED_TILES)
def moved_tile(dtype: Dtype, seed: int) -> Tile:
    """Data that are passed on unchanged: every word but all-ones, floats neither zero, subnormal, infinite nor NaN."""
    period = _next_prime(TILE_ELEMENTS)
    bits = 8 * dtype.itemsize
    words = draw(period, seed, bits) % np.uint64(2**bits - 1)
    if dtype.kind == "float":
        # The top bits of the exponent, 01: a library may add a zero or flush a subnormal on the way.
        top = np.uint64(1 << (bits - 2))
        words = words & ~top | top >> np.uint64(1)
    inputs = words.astype(word_type(dtype))
    return _tile(inputs, inputs, owners=1, slack=0)


@functools.lru_cache(maxsize=CACHED_TILES)
def reduced_tile(dtype: Dtype, op: str | None, ranks: int, seed: int) -> Tile:
    """Inputs and answers of a reduce op over ``ranks``. Raises ValueError for an op that the type does not have.

    The period is a multiple of ``ranks`` and rank strides are 1 modulo ``ranks``, so at every element the ranks read
    from tile positions that are all different modulo ``ranks``: what holds for a number of residues holds for as many
    ranks, and for each rank in turn as elements go by.
    """
    if op not in REDUCE_OPS:
        raise ValueError(unknown_name("reduce op", str(op), REDUCE_OPS))
    if dtype.kind == "float" and op in ("band", "bor", "bxor"):
        raise ValueError(f"bitwise {op} is not defined for {dtype.name}")
    period = ranks * _next_prime(max(17, TILE_ELEMENTS // ranks))
    values, combine = _PARTS[op]
    parts = values(dtype, ranks, np.arange(period) % ranks, seed)
    total = _over_ranks(parts, combine, ranks, _rank_stride(period, ranks))
    if op in ("band", "bor", "bxor"):
        word = word_type(dtype)
        return _tile(parts.astype(word), total.astype(word), owners=ranks, slack=0)
    if op == "avg":
        ulps = _mean_slack(dtype, ranks)
        mean = encode(total / ranks if dtype.kind == "float" else total // ranks, dtype)
        least = np.maximum(mean, ulps) - mean.dtype.type(ulps)
        return _tile(encode(parts, dtype), least.astype(mean.dtype), owners=ranks, slack=2 * ulps)
    return _tile(encode(parts, dtype), encode(total, dtype), owners=ranks, slack=0)


def _tile(inputs: Words, outputs: Words, *, owners: int, slack: int) -> Tile:
    period = len(inputs)
    sign = 1 << (8 * inputs.itemsize - 1)
    # NaN for floats; every op's integers leave one of the three out.
    poison = next(word for word in (2 * sign - 1, sign, 0) if not np.any(outputs == word))
    same = outputs is inputs
    inputs = np.resize(inputs, period + MARGIN_ELEMENTS)
    outputs = inputs if same else np.resize(outputs, period + MARGIN_ELEMENTS)
    inputs.flags.writeable = outputs.flags.writeable = False
    return Tile(
        inputs=inputs, outputs=outputs, period=period, rank_stride=_rank_stride(period, owners),
        block_stride=_coprime(int(period * _BLOCK_STEP), period),
        iteration_stride=_coprime(int(period * _ITERATION_STEP), period), slack=slack, poison=poison,
    )  # fmt: skip


def _rank_stride(period: int, ranks: int) -> int:
    return 1 + ranks * int(period * _RANK_STEP / ranks)


def _over_ranks(parts: Integers, combine: Callable[..., Any], ranks: int, stride: int) -> Integers:
    """At each tile position the parts of all ranks combined, by doubling the number of ranks: log2(ranks) steps."""
    total: Integers | None = None
    group, power, covered = 1, parts, 0
    while True:
        if ranks & group:
            moved = np.roll(power, -covered * stride)
            total = moved if total is None else combine(total, moved)
            covered += group
        if total is not None and covered == ranks:
            return total
        power = combine(power, np.roll(power, -group * stride))
        group *= 2


def _addends(dtype: Dtype, ranks: int, residue: Integers, seed: int) -> Integers:
    """``sum``: as many ranks as fit add something other than zero, of either sign where there is one."""
    signed = dtype.kind != "uint"
    # An unsigned type needs two different addends, and its greatest number for the poison.
    limit = dtype.exact_integer if signed else dtype.exact_integer - 1
    adding = min(ranks, limit if signed else limit // 2)
    random = draw(len(residue), seed, 1)
    size = _uniform(random >> np.uint64(1), 1, limit // adding, signed)
    size[residue >= adding] = 0
    return np.where(random & np.uint64(1), -size, size) if signed else size


def _averaged(dtype: Dtype, ranks: int, residue: Integers, seed: int) -> Integers:
    """``avg``: positive addends; multiples of ``ranks`` for integers, as long as there is one."""
    floating = dtype.kind == "float"
    unit = ranks if not floating and 2 * ranks < dtype.exact_integer else 1
    limit = dtype.exact_integer // unit
    adding = min(_mean_addends(dtype, ranks) if floating else max(1, limit // 2), ranks)
    most = limit // adding
    # Within a factor of two of one another, so that the least of them still stands out from the rounding.
    size = _uniform(draw(len(residue), seed, 2), (most + 1) // 2 if floating else 1, most, dtype.kind != "uint")
    size[residue >= adding] = 0
    size *= size.dtype.type(unit)
    return size


def _factors(dtype: Dtype, ranks: int, residue: Integers, seed: int) -> Integers:
    """``prod``: two ranks multiply by 2 or more, the others by 1, all of either sign where there is one."""
    signed = dtype.kind != "uint"
    random = draw(len(residue), seed, 3)
    size = _uniform(random >> np.uint64(1), 2, math.isqrt(dtype.exact_integer), signed)
    size[residue >= 2] = 1
    return np.where(random & np.uint64(1), -size, size) if signed else size


def _lowest(dtype: Dtype, ranks: int, residue: Integers, seed: int) -> Integers:
    """``min``: one rank is below a value that all others are not below."""
    return _split(dtype, residue != 0, seed)


def _highest(dtype: Dtype, ranks: int, residue: Integers, seed: int) -> Integers:
    """``max``: one rank is above a value that all others are not above."""
    return _split(dtype, residue == 0, seed)


def _split(dtype: Dtype, high: npt.NDArray[np.bool_], seed: int) -> Integers:
    """Numbers of the whole exact range, above a cut where ``high``, else up to it.

    For signed types the cut lies within the negative numbers: those of floats compare the other way round as bits.
    """
    signed = dtype.kind != "uint"
    least = -dtype.exact_integer if signed else 0
    cut = least // 2 - 1 if signed else dtype.exact_integer // 2
    random = draw(len(high), seed, 4)
    above = _uniform(random, cut + 1, dtype.exact_integer, signed)
    return np.where(high, above, _uniform(random, least, cut, signed))


def _ored(dtype: Dtype, ranks: int, residue: Integers, seed: int) -> Integers:
    """``bor``: one rank has bits that no other has; the remaining bits are so rare that about half come out set."""
    shared = np.full(len(residue), _BITS_64 ^ _OWN_BITS, dtype=np.uint64)
    for stream in range(max(1, (ranks - 1).bit_length())):
        np.bitwise_and(shared, draw(len(residue), seed, 5, stream), out=shared)
    own = draw(len(residue), seed, 6) & np.uint64(_OWN_BITS)
    # One bit of every byte at least: narrow types keep only the lowest bits.
    return np.where(residue == 0, shared | own | np.uint64(2), shared)


def _anded(dtype: Dtype, ranks: int, residue: Integers, seed: int) -> Integers:
    """``band``: what ``bor`` is for zeros."""
    zeros = _ored(dtype, ranks, residue, seed)
    return np.bitwise_not(zeros)


def _xored(dtype: Dtype, ranks: int, residue: Integers, seed: int) -> Integers:
    """``bxor``: any bits, but the lowest is set by exactly one rank, so that no answer is zero."""
    random = draw(len(residue), seed, 7)
    return np.where(residue == 0, random | np.uint64(1), random & ~np.uint64(1))


_PARTS: dict[str, tuple[Callable[[Dtype, int, Integers, int], Integers], Callable[..., Any]]] = {
    "sum": (_addends, np.add),
    "prod": (_factors, np.multiply),
    "min": (_lowest, np.minimum),
    "max": (_highest, np.maximum),
    "avg": (_averaged, np.add),
    "band": (_anded, np.bitwise_and),
    "bor": (_ored, np.bitwise_or),
    "bxor": (_xored, np.bitwise_xor),
}


def _power_of_two(ranks: int) -> bool:
    return ranks & (ranks - 1) == 0


def _mean_addends(dtype: Dtype, ranks: int) -> int:
    """How many ranks add to a float mean.

    Where nothing is rounded, as many as leave two different addends. Else so few (c) that one that is missing stands
    out: its share of the sum is at least 1 / 2c, what rounding and slack can hide is below 3(c + 2) / 2**p of the sum.
    """
    if _power_of_two(ranks):
        return min(ranks, dtype.exact_integer // 2)
    return max(1, math.isqrt(1 + dtype.exact_integer // 6) - 1)


def _mean_slack(dtype: Dtype, ranks: int) -> int:
    """Units in the last place by which a float mean may be off.

    None for a power of two, where 1 / ranks is exact. Otherwise a library may round 1 / ranks, each product with it,
    and each of c - 1 sums (NCCL multiplies first; others divide last): c + 1 roundings of half a unit in relative
    terms, which is up to c + 1 units of a result just below a power of two, and one for rounding the answer here.
    More where 1 / ranks itself is subnormal.
    """
    if dtype.kind != "float" or _power_of_two(ranks):
        return 0
    adding = min(_mean_addends(dtype, ranks), ranks)
    coarser = max(1, math.ceil(ranks * smallest_normal(dtype)))
    return min((adding + 1) * coarser + 1, 1 << (8 * dtype.itemsize - 3))


def _uniform(random: _Random, low: int, high: int, signed: bool) -> Integers:
    """Whole numbers of [low, high], from the random words by remainder; int64 or uint64."""
    # In arithmetic modulo 2**64 a negative ``low`` needs no care.
    numbers = random % np.uint64(high - low + 1) + np.uint64(low & _BITS_64)
    return numbers.view(np.int64) if signed else numbers


def mix(*keys: int) -> int:
    """A well-mixed 64-bit word of the keys: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    word = 0
    for key in keys:
        word = (word + key + _GOLDEN) & _BITS_64
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _BITS_64
        word = (word ^ word >> 27) * 0x94D049BB133111EB & _BITS_64
        word ^= word >> 31
    return word


def draw(count: int, *keys: int) -> _Random:
    """SplitMix64's sequence. Not numpy's generators: their numbers may differ by version, ranks' must not."""
    word = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(mix(*keys))
    word = (word ^ word >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ word >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return word ^ word >> np.uint64(31)


def _next_prime(least: int) -> int:
    number = least | 1
    while any(number % divisor == 0 for divisor in range(3, math.isqrt(number) + 1, 2)):
        number += 2
    return number


def _coprime(least: int, period: int) -> int:
    number = max(1, least)
    while math.gcd(number, period) != 1:
        number += 1
    return number
