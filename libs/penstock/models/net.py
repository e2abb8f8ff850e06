"""The network to train: a plain Llama, tied embeddings, parameters named as Hugging Face names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class NetShape:
    """The sizes of a model; `head` is the width of one attention head."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int = 4096
    head: int = 64
    theta: float = 1e7
    context: int = 8192
    epsilon: float = 1e-5


Cache = list[tuple[Tensor, Tensor]]


class Norm(nn.Module):
    """RMS normalisation, computed in float32."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.epsilon).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: NetShape) -> None:
        super().__init__()
        self.shape = shape
        query, key = shape.heads * shape.head, shape.kv_heads * shape.head
        self.q_proj = nn.Linear(shape.width, query, bias=False)
        self.k_proj = nn.Linear(shape.width, key, bias=False)
        self.v_proj = nn.Linear(shape.width, key, bias=False)
        self.o_proj = nn.Linear(query, shape.width, bias=False)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, length, _ = x.shape
        q, k, v = (
            p(x).view(batch, length, -1, self.shape.head).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        groups = self.shape.heads // self.shape.kv_heads
        keys, values = (k, v) if groups == 1 else (k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
        mask = None
        if past is not None and length > 1:
            total = k.shape[2]
            mask = torch.ones(length, total, dtype=torch.bool, device=x.device).tril(total - length)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=past is None)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1)), (k, v)


class Mlp(nn.Module):
    """The gated feed-forward half of a layer."""

    def __init__(self, shape: NetShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class NetLayer(nn.Module):
    """Attention, then the feed-forward half, each behind a norm."""

    def __init__(self, shape: NetShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.width, shape.epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.width, shape.epsilon)
        self.mlp = Mlp(shape)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        attended, kept = self.self_attn(self.input_layernorm(x), rotary, past)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), kept


class Body(nn.Module):
    """Embedding, layers and last norm: what Hugging Face calls `model`."""

    def __init__(self, shape: NetShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(NetLayer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width, shape.epsilon)


class Net(nn.Module):
    """The language model. Rows are padded at the right; causality keeps the padding from being seen."""

    def __init__(self, shape: NetShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)

    def hidden(self, ids: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """The last norm's output for `ids` (batch, length), continuing `cache` if there is one."""
        start = cache[0][0].shape[2] if cache else 0
        turn = rotary(self.shape, start, ids.shape[1], ids.device)
        x = self.model.embed_tokens(ids)
        kept: Cache = []
        for i, layer in enumerate(self.model.layers):
            x, past = layer(x, turn, cache[i] if cache else None)
            kept.append(past)
        return self.model.norm(x), kept

    def features(self, ids: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The states after so many layers, side by side (batch, length, layers * width), and the last norm's output."""
        turn, x, kept = rotary(self.shape, 0, ids.shape[1], ids.device), self.model.embed_tokens(ids), []
        for number, layer in enumerate(self.model.layers, 1):
            x, _ = layer(x, turn, None)
            if number in layers:
                kept.append(x)
        return torch.cat(kept, -1), self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits over the vocabulary."""
        return F.linear(hidden, self.model.embed_tokens.weight).float()

    def forward(self, ids: Tensor, keep: Tensor | None = None) -> Tensor:
        """Logits for `ids`, of all positions or of the flat positions `keep` alone."""
        hidden, _ = self.hidden(ids)
        return self.logits(hidden if keep is None else hidden.flatten(0, 1)[keep])


def rotary(shape: NetShape, start: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(cosine, sine) of the positions from `start` on, [rows, head]."""
    half = shape.head // 2
    steps = torch.arange(half, dtype=torch.float32, device=device) / half
    angles = torch.arange(start, start + rows, dtype=torch.float32, device=device)[:, None] * (1.0 / shape.theta**steps)
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads (..., rows, head) turned by their rows' positions."""
    low, high = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-high, low), -1) * sin).to(x.dtype)


def parameters(shape: NetShape) -> int:
    """How many parameters a model of `shape` has."""
    attention = 2 * shape.width * shape.head * (shape.heads + shape.kv_heads)
    layer = attention + 3 * shape.width * shape.inner + 2 * shape.width
    return shape.layers * layer + shape.vocabulary * shape.width + shape.width
