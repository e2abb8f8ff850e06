"""The network to train: a plain Llama, tied embeddings, parameters named as Hugging Face names them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
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

    def __init__(self, shape: Shape) -> None:
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
        q, k = _rotate(q, *rotary), _rotate(k, *rotary)
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

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Layer(nn.Module):
    """Attention, then the feed-forward half, each behind a norm."""

    def __init__(self, shape: Shape) -> None:
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

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width, shape.epsilon)


class Net(nn.Module):
    """The language model. Rows are padded at the right; causality keeps the padding from being seen."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)

    def hidden(self, ids: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """The last norm's output for `ids` (batch, length), continuing `cache` if there is one."""
        start = cache[0][0].shape[2] if cache else 0
        rotary = self._rotary(start, ids.shape[1], ids.device)
        x = self.model.embed_tokens(ids)
        kept: Cache = []
        for i, layer in enumerate(self.model.layers):
            x, past = layer(x, rotary, cache[i] if cache else None)
            kept.append(past)
        return self.model.norm(x), kept

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits over the vocabulary."""
        return F.linear(hidden, self.model.embed_tokens.weight).float()

    def forward(self, ids: Tensor, keep: Tensor | None = None) -> Tensor:
        """Logits for `ids`, of all positions or of the flat positions `keep` alone."""
        hidden, _ = self.hidden(ids)
        return self.logits(hidden if keep is None else hidden.flatten(0, 1)[keep])

    def _rotary(self, start: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        half = self.shape.head // 2
        steps = torch.arange(half, dtype=torch.float32, device=device) / half
        positions = torch.arange(start, start + length, dtype=torch.float32, device=device)
        angles = positions[:, None] * self.shape.theta**-steps
        return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-high, low), -1) * sin).to(x.dtype)


def parameters(shape: Shape) -> int:
    """How many parameters a model of `shape` has."""
    attention = 2 * shape.width * shape.head * (shape.heads + shape.kv_heads)
    layer = attention + 3 * shape.width * shape.inner + 2 * shape.width
    return shape.layers * layer + shape.vocabulary * shape.width + shape.width


def initialise(net: Net, seed: int, std: float = 0.04) -> None:
    """Start the weights as induction heads: the first two layers copy what followed the last two tokens.

    Layer 0: heads 0 and 1 look one and two positions back, by a constant embedding dimension and the rotary
    phase, and write what they see to two reserved parts of the residual stream. Layer 1: heads 0 and 1 match
    the current token and the one before it against those parts, over the slowly turning rotary pairs so
    that distance hardly counts, and copy the token that was found to the output. Everything else is small
    noise, so that training can use it. Needs two key-value heads and two layers.
    """
    assert net.shape.kv_heads == net.shape.heads >= 2 and net.shape.layers >= 2
    generator = torch.Generator().manual_seed(seed)
    shape = net.shape

    def normal(size: Sequence[int], scale: float) -> Tensor:
        return torch.randn(tuple(size), generator=generator) * scale

    def orthogonal(rows: int, columns: int) -> Tensor:
        """`rows` orthonormal rows of length `columns`."""
        q, _ = torch.linalg.qr(normal((columns, rows), 1.0))
        rows_: Tensor = q.T.contiguous()
        return rows_

    width, head = shape.width, shape.head
    reserved = width // 4  # each of the two parts that hold an earlier token
    content = slice(1, width - 2 * reserved)
    size = width - 2 * reserved - 1
    parts = (slice(width - 2 * reserved, width - reserved), slice(width - reserved, width))
    with torch.no_grad():
        for layer in net.model.layers:
            assert isinstance(layer, Layer)
            for linear in (
                layer.self_attn.q_proj,
                layer.self_attn.k_proj,
                layer.self_attn.v_proj,
                layer.mlp.gate_proj,
                layer.mlp.up_proj,
            ):
                linear.weight.copy_(normal(linear.weight.shape, 0.6 / math.sqrt(width)))
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight.copy_(normal(linear.weight.shape, std * 0.25 / math.sqrt(2 * shape.layers)))
        embedding = normal((shape.vocabulary, width), std)
        embedding[:, width - 2 * reserved :] *= 0.1
        embedding[:, 0] = 4 * std
        net.model.embed_tokens.weight.copy_(embedding)
        scale = math.sqrt(width / (size + 16))  # the norm makes a content dimension about this large

        first, second = net.model.layers[0].self_attn, net.model.layers[1].self_attn
        assert isinstance(first, Attention) and isinstance(second, Attention)
        pairs = min(10, head // 2)
        frequency = shape.theta ** -(torch.arange(pairs) / (head / 2))
        strength = math.sqrt(90.0) / (4 * scale)
        see = orthogonal(min(head, reserved), size)  # how an earlier token is written down, by both heads alike
        for index in range(2):
            query = torch.zeros(head, width)
            # q rotated back by index + 1 positions meets an unrotated k at exactly that distance
            query[:pairs, 0] = strength * torch.cos(frequency * (index + 1))
            query[head // 2 : head // 2 + pairs, 0] = -strength * torch.sin(frequency * (index + 1))
            key = torch.zeros(head, width)
            key[:pairs, 0] = strength
            rows = slice(index * head, (index + 1) * head)
            first.q_proj.weight[rows] = query
            first.k_proj.weight[rows] = key
            first.v_proj.weight[rows] = 0.0
            first.v_proj.weight[rows.start : rows.start + see.shape[0], content] = see
            first.o_proj.weight[:, rows] = 0.0
            first.o_proj.weight[parts[index], rows.start : rows.start + see.shape[0]] = (
                1.3 * std / scale * torch.eye(reserved)[:, : see.shape[0]]
            )

        slow = torch.arange(head // 4 + 1, head // 2)
        slow = torch.cat((slow, slow + head // 2))
        copy = orthogonal(min(2 * head, size), size)
        for index in range(2):
            rows = slice(index * head, (index + 1) * head)
            mix = [orthogonal(len(slow), reserved) for _ in range(2)]
            query, key = torch.zeros(head, width), torch.zeros(head, width)
            gain = 2.5
            query[slow, content] = gain * mix[0] @ see
            query[slow, parts[0]] = gain * mix[1]
            key[slow, parts[0]] = gain * mix[0]
            key[slow, parts[1]] = gain * mix[1]
            second.q_proj.weight[rows] = query
            second.k_proj.weight[rows] = key
            half = copy[index * head : (index + 1) * head]
            second.v_proj.weight[rows] = 0.0
            second.v_proj.weight[rows.start : rows.start + half.shape[0], content] = half
            second.o_proj.weight[:, rows] = 0.0
            second.o_proj.weight[content, rows.start : rows.start + half.shape[0]] = 5 * std * half.T
