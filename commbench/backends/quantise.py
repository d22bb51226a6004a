"""FP8 tokens: e4m3 values, with one float32 scale for each 128 of them (DeepEP's per_token_cast_to_fp8)."""

from __future__ import annotations

import torch

from commbench.workloads import SCALE_BLOCK

LARGEST = 448.0  # of float8_e4m3fn
LEAST = 1e-4  # an all but empty block is scaled as if its largest were this


def quantise(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, H] bfloat16 to [N, H] float8_e4m3fn and its scales, [N, H/128] float32; a value is its 8 bits times its scale."""
    blocks = tokens.view(len(tokens), tokens.shape[1] // SCALE_BLOCK, SCALE_BLOCK).float()
    scales = blocks.abs().amax(dim=2).clamp_(min=LEAST).div_(LARGEST)
    return blocks.div_(scales.unsqueeze(2)).to(torch.float8_e4m3fn).view(tokens.shape), scales


def dequantise(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[N, H] bfloat16 of what ``quantise`` gave."""
    blocks = values.float().view(len(values), values.shape[1] // SCALE_BLOCK, SCALE_BLOCK)
    return blocks.mul_(scales.unsqueeze(2)).view(values.shape).to(torch.bfloat16)


def relative_error(tokens: torch.Tensor) -> float:
    """What quantising does to tokens: the root mean square of the difference, over that of the tokens."""
    exact = tokens.float()
    off = dequantise(*quantise(tokens)).float() - exact
    size = float(exact.square().mean())
    return float(off.square().mean() / size) ** 0.5 if size else 0.0
