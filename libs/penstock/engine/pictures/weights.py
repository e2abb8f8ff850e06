"""The weights of a vision encoder, and what all encoders do with them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from penstock.checkpoint import PicturePart
from penstock.checkpoint.pictures.cells import CellForm
from penstock.engine.layers.stored import read_tensor

if TYPE_CHECKING:
    from penstock.pictures.picture import Pixels


Parts = Generator[None, None, Tensor]
"""Work that stops between its parts, and gives a tensor at its end. A part is no larger for a larger picture: what
multiplies matrices does so for some of the rows."""
_PRODUCTS = 1 << 29
"""Of a part, by a square matrix as wide as its rows: in a wide encoder 300 rows, in a narrow one all of a picture,
which is quicker."""
_SCORES = 1 << 20
"""Of attention, in a part: pairs of rows."""


def _stretches(x: Tensor) -> Iterator[slice]:
    """Rows of [rows, width], those of a part each."""
    count, width = x.shape
    each = max(1, _PRODUCTS // width**2)
    return (slice(first, first + each) for first in range(0, count, each))


def in_rows(x: Tensor, work: Callable[[Tensor], Tensor]) -> Parts:
    """What `work` makes of [rows, width], of which each row is for itself."""
    found = []
    for own in _stretches(x):
        found.append(work(x[own]))
        yield
    return torch.cat(found) if len(found) > 1 else found[0]


def in_heads(
    x: Tensor, work: Callable[[slice], tuple[Tensor, Tensor, Tensor]]
) -> Generator[None, None, tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values, [rows, heads, head_dim] each, which `work` makes of these rows of [rows, width]."""
    found = []
    for own in _stretches(x):
        found.append(work(own))
        yield
    query, key, value = (torch.cat(part) for part in zip(*found, strict=True))
    return query, key, value


def attention(query: Tensor, key: Tensor, value: Tensor) -> Parts:
    """[windows, heads, rows, head_dim] each -> the same: the rows of a window look at all of it."""
    windows, _, size, _ = query.shape
    together, rows = max(1, _SCORES // size**2), max(1, min(size, _SCORES // size))
    found = []
    for first in range(0, windows, together):
        own = slice(first, first + together)
        for at in range(0, size, rows):
            asks = query[own, :, at : at + rows]
            found.append(functional.scaled_dot_product_attention(asks, key[own], value[own]))
            yield
    if rows < size:  # a window at a time
        each = -(-size // rows)
        found = [torch.cat(found[first : first + each], 2) for first in range(0, len(found), each)]
    return torch.cat(found) if len(found) > 1 else found[0]


class EncoderWeights:
    """By the names of the checkpoint."""

    def __init__(self, part: PicturePart, dtype: torch.dtype, device: torch.device) -> None:
        """Loads them, as `dtype`. Raises CheckpointError."""
        self.dtype, self.device = dtype, device
        self._found = {name: read_tensor(info).to(device, dtype) for name, info in part.tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._found[name]

    def linear(self, x: Tensor, name: str) -> Tensor:
        """With its bias."""
        return functional.linear(x, self[f"{name}.weight"].flatten(1), self[f"{name}.bias"])

    def norm(self, x: Tensor, name: str, eps: float = 1e-5) -> Tensor:
        """LayerNorm with its bias."""
        return functional.layer_norm(x, x.shape[-1:], self[f"{name}.weight"], self[f"{name}.bias"], eps)

    def normalised(self, pixels: Pixels, form: CellForm) -> Tensor:
        """[1, height, width, 3] -> float32 [height, width, 3], as the checkpoint says."""
        levels = torch.from_numpy(pixels[0]).to(self.device).float() / 255
        return (levels - levels.new_tensor(form.mean)) / levels.new_tensor(form.deviation)


def turned_pairs(x: Tensor, turn: Tensor) -> Tensor:
    """Turns neighbouring dimensions of [..., heads, head_dim] together; `turn` is complex, [..., 1, head_dim / 2]."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)
