from __future__ import annotations

import numpy as np
import pytest
import torch

from commbench.cases import DTYPES, Dtype
from commbench.measure.encoding import decode, encode, smallest_normal, word_type

FLOATS = [dtype for dtype in DTYPES.values() if dtype.kind == "float"]
TORCH_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def torch_words(values: torch.Tensor, dtype: Dtype) -> np.ndarray:
    """What torch stores for float values of a type."""
    stored = values.to(getattr(torch, dtype.name)).view(TORCH_INTEGER[dtype.itemsize])
    return stored.numpy().view(word_type(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_floats_round_as_torch_does(dtype: Dtype) -> None:
    rng = np.random.default_rng(1)
    scale = 2.0 ** rng.integers(-20, 8, size=50_000)
    quarters = np.arange(-1700, 1700) / 4  # the middles between neighbours, where ties go to even
    values = np.concatenate([rng.standard_normal(50_000) * scale, quarters, [0.0, -0.0, 448.0, 2.0**-9, 2.0**-10]])
    values = values[np.abs(values) <= 448].astype(np.float32)
    np.testing.assert_array_equal(encode(values, dtype), torch_words(torch.from_numpy(values), dtype))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_every_word_decodes_as_torch_reads_it(name: str) -> None:
    dtype = DTYPES[name]
    words = np.arange(2 ** (8 * dtype.itemsize)).astype(word_type(dtype))
    signed = torch.from_numpy(words.view(np.int16 if dtype.itemsize == 2 else np.uint8))
    np.testing.assert_array_equal(decode(words, dtype), signed.view(getattr(torch, name)).float().numpy())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_every_whole_number_up_to_the_exact_one_survives(dtype: Dtype) -> None:
    top = dtype.exact_integer
    near = {k for k in range(300) if k <= top} | {top - k for k in range(300) if k <= top}
    values = np.array(sorted(near), dtype=np.uint64 if top > 2**63 else np.int64)
    for numbers in [values] if dtype.kind == "uint" else [values, -values]:
        assert decode(encode(numbers, dtype), dtype).astype(numbers.dtype).tolist() == numbers.tolist()
    if dtype.kind == "float":
        assert int(decode(encode(np.array([top + 1]), dtype), dtype)[0]) != top + 1


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_the_smallest_normal_number_is_torchs(dtype: Dtype) -> None:
    assert smallest_normal(dtype) == torch.finfo(getattr(torch, dtype.name)).smallest_normal


def test_bfloat16_keeps_nan_and_infinity() -> None:
    dtype = DTYPES["bfloat16"]
    nan = np.array([0x7F800001, 0xFFFFFFFF], dtype=np.uint32).view(np.float32)
    assert np.isnan(decode(encode(nan, dtype), dtype)).all()
    assert decode(encode(np.array([np.inf, -np.inf, 3.4e38]), dtype), dtype).tolist() == [np.inf, -np.inf, np.inf]


@pytest.mark.parametrize(("name", "largest"), [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)])
def test_float8_refuses_what_it_cannot_hold(name: str, largest: float) -> None:
    dtype = DTYPES[name]
    assert decode(encode(np.array([largest, -largest]), dtype), dtype).tolist() == [largest, -largest]
    for beyond in (largest * 1.01, np.inf, np.nan):
        with pytest.raises(ValueError, match=name):
            encode(np.array([beyond]), dtype)
