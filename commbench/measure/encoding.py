"""Numbers to the bits of an element type and back, for every type of ``cases.DTYPES``.

numpy has no bfloat16 or float8, so buffers are handled as words: unsigned integers of the item size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from commbench.cases import Dtype

Words = npt.NDArray[Any]  # unsigned, one per element
Numbers = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Float8:
    """Bits of a float8: sign, exponent, fraction. ``largest`` is the word of the greatest finite number."""

    exponent_bits: int
    largest: int
    infinity: bool

    @property
    def fraction_bits(self) -> int:
        return 7 - self.exponent_bits

    @property
    def bias(self) -> int:
        return int(2 ** (self.exponent_bits - 1)) - 1


# Micikevicius et al., "FP8 formats for deep learning" (arXiv 2209.05433), table 1; the "fn" of E4M3 is "no infinity".
_FLOAT8 = {
    "float8_e4m3fn": _Float8(exponent_bits=4, largest=0x7E, infinity=False),
    "float8_e5m2": _Float8(exponent_bits=5, largest=0x7B, infinity=True),
}
_SMALLEST_NORMAL_EXPONENT = {
    "float64": -1022, "float32": -126, "float16": -14, "bfloat16": -126, "float8_e4m3fn": -6, "float8_e5m2": -14,
}  # fmt: skip


def word_type(dtype: Dtype) -> np.dtype[Any]:
    """The unsigned integer that holds the bits of one element."""
    return np.dtype(f"u{dtype.itemsize}")


def smallest_normal(dtype: Dtype) -> float:
    """The smallest positive number of a float type that has its full precision."""
    return float(2.0 ** _SMALLEST_NORMAL_EXPONENT[dtype.name])


def encode(values: Numbers, dtype: Dtype) -> Words:
    """The words of ``values`` (integers or floats), floats rounded to the nearest with ties to even.

    Every whole number up to ``dtype.exact_integer`` is exact. Integers must fit. ValueError for what is beyond the
    finite numbers of a float8, where libraries differ.
    """
    if dtype.name in _FLOAT8:
        return _encode_float8(values.astype(np.float64), dtype.name)
    if dtype.name == "bfloat16":
        return _encode_bfloat16(values.astype(np.float32))
    return values.astype(np.dtype(dtype.name)).view(word_type(dtype))


def decode(words: Words, dtype: Dtype) -> Numbers:
    """The numbers behind ``words``: the numpy type of the same name where there is one, else float32."""
    if dtype.name in _FLOAT8:
        return _float8_numbers(dtype.name)[words]
    if dtype.name == "bfloat16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return words.view(np.dtype(dtype.name))


def _encode_bfloat16(values: npt.NDArray[np.float32]) -> Words:
    bits = values.view(np.uint32)
    # Adding just under half of the last kept bit, or half of it when that bit is odd, rounds ties to even.
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    quiet = bits | np.uint32(0x400000)  # a NaN must not be carried into infinity or zero
    return (np.where(np.isnan(values), quiet, rounded) >> np.uint32(16)).astype(np.uint16)


@lru_cache(maxsize=len(_FLOAT8))
def _float8_numbers(name: str) -> npt.NDArray[np.float32]:
    """The number of each of the 256 words."""
    form = _FLOAT8[name]
    word = np.arange(128)
    exponent, fraction = word >> form.fraction_bits, word & (2**form.fraction_bits - 1)
    significand = fraction + np.where(exponent > 0, 2**form.fraction_bits, 0)
    scale = np.maximum(exponent, 1) - form.bias - form.fraction_bits
    positive = np.ldexp(significand.astype(np.float32), scale)
    positive[form.largest + 1 :] = np.nan
    if form.infinity:
        positive[form.largest + 1] = np.inf
    return np.concatenate([positive, -positive])


def _encode_float8(values: npt.NDArray[np.float64], name: str) -> Words:
    form = _FLOAT8[name]
    largest = float(_float8_numbers(name)[form.largest])
    size = np.abs(values)
    if not np.all(size <= largest):
        raise ValueError(f"{name} holds finite numbers up to {largest:g} only")
    # Below the smallest normal number the exponent stays, and the fraction loses its leading one.
    exponent = np.frexp(np.maximum(size, 2.0 ** _SMALLEST_NORMAL_EXPONENT[name]))[1] - 1
    significand = np.rint(np.ldexp(size, form.fraction_bits - exponent)).astype(np.int64)
    # A significand that was rounded up to the next power of two carries into the exponent, as it should.
    words: Words = ((exponent + form.bias - 1) << form.fraction_bits) + significand
    words[np.signbit(values)] |= 0x80
    return words.astype(np.uint8)
