"""The network over packed rows: documents lie one behind the other, without padding, and each attends to itself alone.

What `Net` computes on one document at a time is computed here for a whole batch, with as few and as large products as
there can be: the matrices that read the same input are one, weights are narrowed once, and behind the last attention
only those positions go on whose next token counts. What stands between the products is up to `Kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .data import PackedBatch, Spans
from .net import Net, NetLayer, NetShape, Norm, rotary, rotate


class Kernels(Protocol):
    """What happens between the matrix products; every result can be differentiated. `dtype` is that of the products."""

    dtype: torch.dtype

    def norm(self, x: Tensor, change: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """`x` (rows, width), in float32, with `change` added; and the same normalised, for a product."""
        ...

    def attention(self, qkv: Tensor, spans: Spans, shape: NetShape) -> Tensor:
        """Causal attention within each document: (rows, (heads + 2 kv_heads) * head) -> (rows, heads * head)."""
        ...

    def gate(self, both: Tensor) -> Tensor:
        """silu(gate) * up of rows that hold the gate, then up: (rows, 2 inner) -> (rows, inner)."""
        ...

    def cross_entropy(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """The sum of weighted losses of `logits` (rows, vocabulary), which must not be used again."""
        ...


class TorchKernels:
    """In plain torch: everywhere, and the reference of what is compiled."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def norm(self, x: Tensor, change: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        total = x if change is None else x + change
        return total, norm(total).to(self.dtype)

    def attention(self, qkv: Tensor, spans: Spans, shape: NetShape) -> Tensor:
        turn = rotary(shape, 0, spans.longest, qkv.device)
        out = [self._attend(rows, turn, shape) for rows in torch.split(qkv, spans.lengths) if len(rows)]
        return torch.cat(out)

    @staticmethod
    def _attend(rows: Tensor, turn: tuple[Tensor, Tensor], shape: NetShape) -> Tensor:
        heads = rows.view(len(rows), -1, shape.head).transpose(0, 1)
        q, k, v = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads])
        cos, sin = (table[: len(rows)] for table in turn)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (each.repeat_interleave(shape.heads // shape.kv_heads, 0) for each in (k, v))
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        return out.transpose(0, 1).flatten(1)

    def gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up

    def cross_entropy(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return (F.cross_entropy(logits.float(), targets, reduction="none") * weights).sum()


@dataclass(frozen=True)
class PackedNet:
    """A network that computes on packed batches. Its parameters are the network's own."""

    net: Net
    kernels: Kernels

    def logits(self, batch: PackedBatch) -> Tensor:
        """What the network says comes next at the positions that count: (kept, vocabulary), in the kernels' type."""
        kernels, body, dtype = self.kernels, self.net.model, self.kernels.dtype
        layers = [cast(NetLayer, layer) for layer in body.layers]
        table = body.embed_tokens.weight
        x, change = F.embedding(batch.ids, table), None
        for layer in layers:
            attention, mlp = layer.self_attn, layer.mlp
            x, normed = kernels.norm(x, change, layer.input_layernorm)
            qkv = F.linear(normed, _joined(dtype, attention.q_proj, attention.k_proj, attention.v_proj))
            attended = kernels.attention(qkv, batch.spans, self.net.shape)
            if layer is layers[-1]:
                x, attended = x.index_select(0, batch.keep), attended.index_select(0, batch.keep)
            change = F.linear(attended, _joined(dtype, attention.o_proj))
            x, normed = kernels.norm(x, change, layer.post_attention_layernorm)
            both = F.linear(normed, _joined(dtype, mlp.gate_proj, mlp.up_proj))
            change = F.linear(kernels.gate(both), _joined(dtype, mlp.down_proj))
        _, last = kernels.norm(x, change, body.norm)
        return F.linear(last, table.to(dtype))

    def cross_entropy(self, batch: PackedBatch) -> Tensor:
        """The sum of the weighted losses of a batch."""
        return self.kernels.cross_entropy(self.logits(batch), batch.targets, batch.weights)


def _joined(dtype: torch.dtype, *linears: torch.nn.Module) -> Tensor:
    """The weights of linear layers that read the same input, as those of one."""
    weights = [cast(Tensor, linear.weight) for linear in linears]
    return (weights[0] if len(weights) == 1 else torch.cat(weights)).to(dtype)
