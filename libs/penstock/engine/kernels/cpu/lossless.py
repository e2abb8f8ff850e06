"""bfloat16 matrices in 12 bits a weight, bit-exact.

A trained matrix has few exponents: the 16 most frequent ones cover more than 99 % of its weights. So a weight becomes a
byte of sign and mantissa, and a 4-bit index into the matrix's palette of exponents. A group of weights that holds any
other exponent is kept verbatim, as bfloat16. A step then reads less memory, and decodes the weights in registers. The
idea is that of Unweight (Cloudflare, 2026), DFloat11 (Zhang et al., 2025) and ZipNN (Hershcovitch et al., 2024).

A panel of 16 columns (see pack.py) begins with one bit for each group of 32 inputs, which is set if the group is
verbatim; these bits are padded to 16 bytes. Then the groups follow; the last one has the inputs that are left. For each
pair of inputs a group has 32 bytes of sign and mantissa and 16 bytes of indices, or 64 bytes of bfloat16. The order
within a pair is that in which 128-bit registers interleave bytes: byte b belongs to weight `ORDER[b]`, and so does the
index in the lower (b < 16) or upper half of byte 32 + b % 16. Weight 2 * column belongs to the first input of the pair,
weight 2 * column + 1 to the second.
"""

from __future__ import annotations

from ctypes import CDLL
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.kernels.cpu.packed import LANES, Packed

GROUP = 32
"""The number of inputs in a group."""
PALETTE = 16
ORDER = [word for half in (0, 1) for part in (0, 1) for word in range(part * 16 + half * 8, part * 16 + half * 8 + 8)]


@dataclass(frozen=True, slots=True)
class Plan:
    """How a matrix will be compressed."""

    index: Tensor
    """uint8 [256]: the place of each exponent in the palette; 255: it has none."""
    start: Tensor
    """int64 [panels]: where each panel begins."""
    size: int
    """Bytes of all panels."""

    @property
    def parts(self) -> Tensor:
        """uint8 [2, 16]: the bits of the palette's exponents in the upper and in the lower byte of a bfloat16."""
        palette = torch.zeros(PALETTE, dtype=torch.int64)
        used = (self.index != 255).nonzero().flatten()
        palette[self.index[used].long()] = used
        return torch.stack((palette >> 1, (palette & 1) << 7)).to(torch.uint8)


def plan(library: CDLL, packed: Packed) -> Plan:
    """Plans how a bfloat16 matrix is compressed."""
    words = _words(packed)
    counts = torch.zeros(256, dtype=torch.int64)
    library.penstock_count_exponents(words.data_ptr(), words.numel(), counts.data_ptr())
    index = torch.full((256,), 255, dtype=torch.uint8)
    index[counts.topk(PALETTE).indices.sort().values] = torch.arange(PALETTE, dtype=torch.uint8)
    sizes = torch.empty(len(words), dtype=torch.int64)
    panels, pairs, _ = words.shape
    library.penstock_lossless_sizes(words.data_ptr(), panels, pairs, index.data_ptr(), sizes.data_ptr())
    return Plan(index, sizes.cumsum(0) - sizes, int(sizes.sum()))


def compressed(library: CDLL, packed: Packed) -> Packed:
    """Compresses a bfloat16 matrix to the format that the module's docstring describes."""
    how = plan(library, packed)
    words, data = _words(packed), torch.empty(how.size, dtype=torch.uint8)
    panels, pairs, _ = words.shape
    addresses = (tensor.data_ptr() for tensor in (how.index, how.start, data))
    library.penstock_compress(words.data_ptr(), panels, pairs, *addresses)
    return Packed("lossless", packed.inputs, packed.outputs, data, None, how.start, how.parts)


def verbatim_share(packed: Packed) -> float:
    """The share of groups that are verbatim."""
    assert packed.start is not None
    groups, panels, pairs = -(-packed.inputs // GROUP), packed.start.shape[0], packed.inputs // 2
    least = panels * (-(-groups // 128) * 16 + pairs * 48)
    return (packed.data.numel() - least) / (panels * pairs * 16)


def naive_restore(packed: Packed, columns: int) -> Tensor:
    """Restores the matrix, bfloat16 [in, columns], one pair at a time, just as the description of the format says."""
    assert packed.start is not None and packed.parts is not None
    groups, pairs = -(-packed.inputs // GROUP), packed.inputs // 2
    exponents = packed.parts[0].int() << 8 | packed.parts[1].int()
    matrix = torch.empty(packed.inputs, packed.outputs, dtype=torch.int16)
    order = torch.tensor(ORDER)
    for panel, start in enumerate(packed.start.tolist()):
        at = start + -(-groups // 128) * 16
        for pair in range(pairs):
            group = pair // (GROUP // 2)
            verbatim = int(packed.data[start + group // 8]) >> group % 8 & 1
            piece = packed.data[at : at + (64 if verbatim else 48)]
            at += piece.numel()
            if verbatim:
                words = piece.clone().view(torch.int16)
            else:
                own, halves = piece[:32].int(), piece[32:].int()
                mixed = (own & 0x80) << 8 | own & 0x7F | exponents[torch.cat((halves & 15, halves >> 4)).long()]
                words = torch.empty(32, dtype=torch.int16)
                words[order] = mixed.to(torch.int16)
            matrix[2 * pair : 2 * pair + 2, panel * LANES : (panel + 1) * LANES] = words.view(LANES, 2).t()
    return matrix.view(torch.bfloat16)[:, :columns]


def _words(packed: Packed) -> Tensor:
    if packed.kind != "bfloat16":
        raise ValueError(f"only bfloat16 weights can be compressed, not {packed.kind}")
    return packed.data.view(torch.int16).view(packed.outputs // LANES, packed.inputs // 2, 2 * LANES)
