"""Tables of rotary position embeddings.

Frequencies follow the published definitions: linear position interpolation (Chen et al., 2023), Llama 3.1's
wavelength-dependent scaling, YaRN (Peng et al., 2023) and LongRoPE (Ding et al., 2024).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.checkpoint import Rope


def rope_tables(rope: Rope, dim: int, positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cosine, signed sine), each [positions, dim], for the `dim` dimensions of a head that turn.

    With x = (a, b) split in halves, the rotation is (a cos - b sin, b cos + a sin). The sine's first half is
    negated here, so that it reads x * cosine + roll(x, dim / 2) * sine. Where the rope is interleaved, a is the even
    and b the odd dimensions, and so are the signs.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies(rope, dim))
    cosine = angles.cos() * rope.attention_factor
    sine = angles.sin() * rope.attention_factor
    if rope.interleaved:
        cosine, sine = (torch.stack(pair, -1).flatten(1) for pair in ((cosine, cosine), (-sine, sine)))
    else:
        cosine, sine = torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)
    return cosine.to(dtype), sine.to(dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, *, interleaved: bool = False) -> Tensor:
    """`x` is [tokens, heads, head_dim]; the tables' rows for these tokens are [tokens, 1, dim].

    Dimensions beyond the tables' stay as they are.
    """
    turned = cosine.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat((rotate(x[..., :turned], cosine, sine, interleaved=interleaved), x[..., turned:]), -1)
    partners = x.view(*x.shape[:-1], -1, 2).flip(-1).view_as(x) if interleaved else x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cosine, partners, sine)


def frequencies(rope: Rope, dim: int) -> Tensor:
    """Radians per position of each pair of dimensions: float32 [dim / 2]."""
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    plain = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, dim)
    if rope.kind == "longrope":
        return plain / torch.tensor(rope.factors)
    return plain


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended; where the two factors are
    one (Llama 4 Scout), there is nothing between."""
    wavelength = 2 * math.pi / plain
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = ((rope.original_max_positions / wavelength - low) / (high - low or 1e-9)).clamp(0.0, 1.0)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn(rope: Rope, plain: Tensor, dim: int) -> Tensor:
    """Dimensions that turn more than beta_fast times in the original context are kept, those that turn less than
    beta_slow times are stretched, and a ramp joins the two."""

    def dimension(turns: float) -> float:
        return dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    stretched = ramp.clamp(0.0, 1.0)
    return plain / rope.factor * stretched + plain * (1 - stretched)
