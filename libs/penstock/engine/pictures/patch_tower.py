"""The vision transformer of Qwen2.5-VL: a picture's patches to embeddings of the text model. Computed by torch.

Source: the config fields and tensor names of published checkpoints; `transformers`' Qwen2_5_VL model is the oracle of
the tests. Patches are in the order of cells, and cells in that of windows, those of one size together: so every layer
attends in a few calls, whatever the picture's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from penstock.checkpoint import PatchForm, PicturePart
from penstock.checkpoint.pictures.patches import MERGER, PATCHES
from penstock.engine.pictures.weights import EncoderWeights, Parts, attention, in_heads, in_rows

if TYPE_CHECKING:
    from penstock.pictures.picture import Pixels

_EPS = 1e-6


class _Windows(NamedTuple):
    """How the cells of a picture are divided among windows."""

    order: Tensor
    """[cells] numbers of cells, row by row, in the order in which they are computed."""
    sizes: Sequence[tuple[int, int]]
    """(How many windows, cells of each), one behind the other."""


class PatchTower:
    """PictureTower. Stateless between calls; one thread at a time."""

    def __init__(self, part: PicturePart, dtype: torch.dtype, device: torch.device) -> None:
        """Loads the weights, as `dtype`. Raises CheckpointError."""
        assert isinstance(part.form, PatchForm)
        self.form = part.form
        self._weights = EncoderWeights(part, dtype, device)
        self._patches_to = self._weights[PATCHES].float().sum(2).flatten(1).to(dtype)
        """[hidden, 3 * patch * patch]: all frames are the same picture."""

    @torch.inference_mode()
    def parts(self, pixels: Pixels) -> Parts:
        """[1, height, width, 3] -> [1, cells, hidden of the text model]."""
        form = self.form
        each = form.merge**2
        rows, columns = pixels.shape[1] // form.side, pixels.shape[2] // form.side
        windows = windows_of(rows, columns, form.window)
        x = yield from in_rows(self._patches(pixels), lambda rows: functional.linear(rows, self._patches_to))
        order = windows.order.to(self._weights.device)
        x = x.view(rows * columns, each, -1)[order].flatten(0, 1)
        angles = turns(form, rows, columns).view(rows * columns, each, -1)[windows.order].flatten(0, 1)
        turn = angles.cos().to(self._weights.device), angles.sin().to(self._weights.device)
        for layer in range(form.n_layers):
            prefix = f"visual.blocks.{layer}."
            sizes = [(1, rows * columns)] if layer in form.full_layers else windows.sizes
            windows_here = [(count, size * each) for count, size in sizes]
            x = x + (yield from self._attention(x, prefix, turn, windows_here))
            x = x + (yield from in_rows(x, partial(self._feed_forward, prefix=prefix)))
        merged = yield from in_rows(self._norm(x, f"{MERGER}ln_q").view(rows * columns, -1), self._merged)
        found = torch.empty_like(merged)
        found[order] = merged
        return found.unsqueeze(0)

    def _patches(self, pixels: Pixels) -> Tensor:
        """[patches, 3 * patch * patch]: cell by cell, normalised as the checkpoint says."""
        form = self.form
        levels = self._weights.normalised(pixels, form)
        parts = levels.view(-1, form.merge, form.patch, levels.shape[1] // form.side, form.merge, form.patch, 3)
        return parts.permute(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3 * form.patch**2).to(self._weights.dtype)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self._weights[f"{name}.weight"], _EPS)

    def _feed_forward(self, x: Tensor, prefix: str) -> Tensor:
        linear, normed = self._weights.linear, self._norm(x, f"{prefix}norm2")
        gate = functional.silu(linear(normed, f"{prefix}mlp.gate_proj"))
        return linear(gate * linear(normed, f"{prefix}mlp.up_proj"), f"{prefix}mlp.down_proj")

    def _merged(self, cells: Tensor) -> Tensor:
        inner = functional.gelu(self._weights.linear(cells, f"{MERGER}mlp.0"))
        return self._weights.linear(inner, f"{MERGER}mlp.2")

    def _attention(
        self, x: Tensor, prefix: str, turn: tuple[Tensor, Tensor], sizes: Sequence[tuple[int, int]]
    ) -> Parts:
        """[patches, hidden] -> the same; `sizes` are how many windows there are of how many patches."""

        def heads(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
            normed, angles = self._norm(x[rows], f"{prefix}norm1"), (turn[0][rows], turn[1][rows])
            made = self._weights.linear(normed, f"{prefix}attn.qkv").view(len(normed), 3, self.form.n_heads, -1)
            return _turned(made[:, 0], *angles), _turned(made[:, 1], *angles), made[:, 2]

        query, key, value = yield from in_heads(x, heads)
        mixed, first = [], 0
        for count, size in sizes:
            own = slice(first, first + count * size)
            shape = (count, size, *query.shape[1:])
            asks, keys, values = (part[own].reshape(shape).transpose(1, 2) for part in (query, key, value))
            found = yield from attention(asks, keys, values)
            mixed.append(found.transpose(1, 2).flatten(0, 1).flatten(1))
            first = own.stop
        return (yield from in_rows(torch.cat(mixed), lambda rows: self._weights.linear(rows, f"{prefix}attn.proj")))


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turns dimensions i and i + head_dim / 2 of [patches, heads, head_dim] together."""
    first, second = x.float().chunk(2, -1)
    cosine, sine = cosine.unsqueeze(1), sine.unsqueeze(1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1).to(x.dtype)


def turns(form: PatchForm, rows: int, columns: int) -> Tensor:
    """float32 [patches, head_dim / 2], cell by cell: the angle of each pair; half of them by row and half by column."""
    half = form.hidden_size // form.n_heads // 2
    rates = 1.0 / form.rope_theta ** (torch.arange(0, half, 2).float() / half)
    cell = torch.arange(rows * columns).view(-1, 1)
    inner = torch.arange(form.merge**2)
    row = cell // columns * form.merge + inner // form.merge
    column = cell % columns * form.merge + inner % form.merge
    return torch.cat([axis.reshape(-1, 1) * rates for axis in (row, column)], 1)


def windows_of(rows: int, columns: int, side: int) -> _Windows:
    """Squares of `side` cells from the top left; those at the other edges are smaller."""
    cell = torch.arange(rows * columns)
    row, column = cell // columns, cell % columns
    number = row // side * -(-columns // side) + column // side
    size = torch.bincount(number)[number]
    order = torch.argsort(number + size * (rows * columns), stable=True)
    cells, counts = torch.unique_consecutive(size[order], return_counts=True)
    sizes = [(int(count) // int(own), int(own)) for own, count in zip(cells, counts, strict=True)]
    return _Windows(order, sizes)
