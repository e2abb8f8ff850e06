"""Weights to start training from: a network that already copies.

The first two layers are induction heads. In layer 0 two heads look one and two positions back, by a constant embedding
dimension and the rotary phase, and write what they see to two reserved parts of the residual stream. In layer 1 two
heads match the current token and the one before it against those parts, over the slowly turning rotary pairs so that
distance hardly counts, and copy the token that was found to the output. Everything else is small noise, so that
training can use it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .net import Attention, Net, NetLayer, NetShape


@torch.no_grad()
def initialise(net: Net, seed: int, std: float = 0.04) -> None:
    """Start the weights of `net` as induction heads. Needs two layers and two key-value heads, one per head."""
    assert net.shape.kv_heads == net.shape.heads >= 2 and net.shape.layers >= 2
    draw = _Draw(seed)
    first, second = _spread_noise(net, draw, std)
    parts = _Parts(net.shape)
    _embed(net, draw, parts, std)
    see = draw.orthogonal(min(net.shape.head, parts.reserved), parts.size)
    for index in range(2):
        _look_back(first, net.shape, parts, index, see=see, std=std)
    copy = draw.orthogonal(min(2 * net.shape.head, parts.size), parts.size)
    for index in range(2):
        _find_and_copy(second, net.shape, parts, index, see=see, copy=copy, draw=draw, std=std)


class _Draw:
    """A seeded source of random matrices."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, size: Sequence[int], scale: float) -> Tensor:
        return torch.randn(tuple(size), generator=self.generator) * scale

    def orthogonal(self, rows: int, columns: int) -> Tensor:
        """`rows` orthonormal rows of length `columns`."""
        q, _ = torch.linalg.qr(self.normal((columns, rows), 1.0))
        transposed: Tensor = q.T.contiguous()
        return transposed


class _Parts:
    """How the residual stream is divided: one constant dimension, the token itself, and two earlier tokens."""

    def __init__(self, shape: NetShape) -> None:
        self.reserved = shape.width // 4
        self.size = shape.width - 2 * self.reserved - 1
        self.content = slice(1, 1 + self.size)
        self.earlier = (slice(1 + self.size, shape.width - self.reserved), slice(shape.width - self.reserved, None))
        self.scale = math.sqrt(shape.width / (self.size + 16))  # the norm makes a content dimension about this large


def _spread_noise(net: Net, draw: _Draw, std: float) -> tuple[Attention, Attention]:
    """Noise for every matrix, the output projections' as small as the embeddings; returns the first two attentions."""
    shape = net.shape
    attentions = []
    for layer in net.model.layers:
        assert isinstance(layer, NetLayer)
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            linear.weight.copy_(draw.normal(linear.weight.shape, 0.6 / math.sqrt(shape.width)))
        for linear in (attention.o_proj, mlp.down_proj):
            linear.weight.copy_(draw.normal(linear.weight.shape, std * 0.25 / math.sqrt(2 * shape.layers)))
        attentions.append(attention)
    return attentions[0], attentions[1]


def _embed(net: Net, draw: _Draw, parts: _Parts, std: float) -> None:
    """Random embeddings that leave the reserved parts nearly free and hold a constant."""
    embedding = draw.normal((net.shape.vocabulary, net.shape.width), std)
    embedding[:, parts.earlier[0].start :] *= 0.1
    embedding[:, 0] = 4 * std
    net.model.embed_tokens.weight.copy_(embedding)


def _rows(shape: NetShape, index: int) -> slice:
    return slice(index * shape.head, (index + 1) * shape.head)


def _look_back(attention: Attention, shape: NetShape, parts: _Parts, index: int, *, see: Tensor, std: float) -> None:
    """Head `index` sees the token `index` + 1 positions back and writes it, as `see` does, to its reserved part."""
    width, head = shape.width, shape.head
    pairs = min(10, head // 2)
    frequency = shape.theta ** -(torch.arange(pairs) / (head / 2))
    strength = math.sqrt(90.0) / (4 * parts.scale)
    query = torch.zeros(head, width)
    # q rotated back by index + 1 positions meets an unrotated k at exactly that distance
    query[:pairs, 0] = strength * torch.cos(frequency * (index + 1))
    query[head // 2 : head // 2 + pairs, 0] = -strength * torch.sin(frequency * (index + 1))
    key = torch.zeros(head, width)
    key[:pairs, 0] = strength
    rows = _rows(shape, index)
    attention.q_proj.weight[rows] = query
    attention.k_proj.weight[rows] = key
    seen = slice(rows.start, rows.start + see.shape[0])
    attention.v_proj.weight[rows] = 0.0
    attention.v_proj.weight[seen, parts.content] = see
    attention.o_proj.weight[:, rows] = 0.0
    written = 1.3 * std / parts.scale * torch.eye(parts.reserved)[:, : see.shape[0]]
    attention.o_proj.weight[parts.earlier[index], seen] = written


def _find_and_copy(
    attention: Attention,
    shape: NetShape,
    parts: _Parts,
    index: int,
    *,
    see: Tensor,
    copy: Tensor,
    draw: _Draw,
    std: float,
    gain: float = 2.5,
) -> None:
    """Head `index` finds where this token and the one before it stood, and copies half of what followed there."""
    head = shape.head
    slow = torch.arange(head // 4 + 1, head // 2)
    slow = torch.cat((slow, slow + head // 2))
    mix = [draw.orthogonal(len(slow), parts.reserved) for _ in range(2)]
    query, key = torch.zeros(head, shape.width), torch.zeros(head, shape.width)
    query[slow, parts.content] = gain * mix[0] @ see
    query[slow, parts.earlier[0]] = gain * mix[1]
    key[slow, parts.earlier[0]] = gain * mix[0]
    key[slow, parts.earlier[1]] = gain * mix[1]
    rows = _rows(shape, index)
    attention.q_proj.weight[rows] = query
    attention.k_proj.weight[rows] = key
    half = copy[rows]
    copied = slice(rows.start, rows.start + half.shape[0])
    attention.v_proj.weight[rows] = 0.0
    attention.v_proj.weight[copied, parts.content] = half
    attention.o_proj.weight[:, rows] = 0.0
    attention.o_proj.weight[parts.content, copied] = 5 * std * half.T
