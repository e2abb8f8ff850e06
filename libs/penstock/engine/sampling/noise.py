"""Randomness as a pure function of (seed, position, token id).

Gumbel-max sampling: token = argmax(logits / temperature + gumbel noise) is an exact sample of the softmax, and the
noise can be anything that is independent per token and position. Here it comes from SplitMix64 (Steele, Lea and
Flood, 2014) used as a counter-based generator: the (seed, position) pair chooses a stream, the token id the place
in it. 64-bit integer arithmetic gives the same bits on every device, in every process and in any order, so a
token depends neither on the batch nor on earlier draws. The draft and the target draw the same noise
for the same place, which is why a good draft is accepted when sampling as often as its distribution allows.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def mix(value: int) -> int:
    """SplitMix64's finaliser on an unsigned 64-bit integer."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def stream(seed: int, position: int) -> int:
    """The state of the stream for one place: an int64."""
    return _signed(mix(mix(seed + _GAMMA) + (position + 1) * _GAMMA))


def steps(vocab_size: int, device: torch.device) -> Tensor:
    """[vocab_size] int64: how far into a stream each token id lies."""
    return torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device) * _signed(_GAMMA)


def _shift(value: Tensor, bits: int) -> Tensor:
    """A logical right shift of int64."""
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def gumbel(places: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, in the shape of `places`: streams plus steps, int64."""
    bits = (places ^ _shift(places, 30)).mul_(_signed(_MIX_1))
    bits = bits.bitwise_xor_(_shift(bits, 27)).mul_(_signed(_MIX_2))
    bits = bits.bitwise_xor_(_shift(bits, 31))
    uniform = _shift(bits, 11).to(torch.float64).add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_().to(torch.float32)
