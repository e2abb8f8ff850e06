"""The decoder of Llama, Mistral, Qwen2 and Qwen3: one definition, whose switches are in ModelConfig."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.checkpoint import ModelConfig
from penstock.engine.batch import Batch, Group
from penstock.engine.layers.attention import attend
from penstock.engine.layers.norm import rms_norm
from penstock.engine.layers.rope import rope_tables, rotate
from penstock.engine.pool import KvPool


@dataclass(slots=True)
class LayerWeights:
    """Matrices are [in, out] and contiguous, which for a few rows is twice as fast on a CPU as [out, in].
    Projections with a common input are side by side: query, key, value; gate, up."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim]: the norm's weight of each head, queries first."""
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(slots=True)
class Weights:
    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor
    """[hidden, vocab]; a copy of the embedding when the two are tied."""


class Decoder:
    """Computes logits for the sampled rows of a batch and leaves every row's keys and values in the pool.

    Stateless between calls. `max_positions` bounds the rotation tables.
    """

    def __init__(self, config: ModelConfig, weights: Weights, max_positions: int) -> None:
        self.config = config
        self._weights = weights
        self._q_width = config.n_heads * config.head_dim
        self._kv_width = config.n_kv_heads * config.head_dim
        dtype, device = weights.embedding.dtype, weights.embedding.device
        self._eps = torch.tensor(config.rms_eps, dtype=torch.float32, device=device)
        cosine, sine = rope_tables(config.rope, config.head_dim, max_positions, dtype)
        self._cosine, self._sine = cosine.to(device).unsqueeze(1), sine.to(device).unsqueeze(1)

    def forward(self, batch: Batch, pool: KvPool) -> Tensor:
        """float32 [S, vocab]."""
        x = F.embedding(batch.ids, self._weights.embedding)
        cosine = self._cosine.index_select(0, batch.positions)
        sine = self._sine.index_select(0, batch.positions)
        for number, layer in enumerate(self._weights.layers[:-1]):
            x = self._layer(number, layer, x, cosine, sine, batch, pool)
        x = self._last_layer(x, cosine, sine, batch, pool)
        x = self._norm(x, self._weights.norm)
        return torch.mm(x, self._weights.head).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._eps)

    def _layer(
        self, number: int, layer: LayerWeights, x: Tensor, cosine: Tensor, sine: Tensor, batch: Batch, pool: KvPool
    ) -> Tensor:
        """[N, hidden] -> [N, hidden]."""
        fused = _linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
        values = fused[:, -self._kv_width :]
        turned = self._turn(fused[:, : -self._kv_width], layer.qk_norm, cosine, sine)
        query, keys = turned[:, : self.config.n_heads], turned[:, self.config.n_heads :]
        self._store(number, keys, values, batch, pool)
        return self._finish(number, layer, x, query, batch.groups, pool)

    def _last_layer(self, x: Tensor, cosine: Tensor, sine: Tensor, batch: Batch, pool: KvPool) -> Tensor:
        """[N, hidden] -> [S, hidden]: keys and values of all rows, everything else of the sampled ones only."""
        number, layer = len(self._weights.layers) - 1, self._weights.layers[-1]
        if batch.sampled is None:
            return self._layer(number, layer, x, cosine, sine, batch, pool)
        heads, normed = self.config.n_heads, self._norm(x, layer.input_norm)
        q_bias, kv_bias = _halves(layer.qkv_bias, self._q_width)
        q_norm, k_norm = _halves(layer.qk_norm, heads)
        fused = _linear(normed, layer.qkv[:, self._q_width :], kv_bias)
        keys = self._turn(fused[:, : self._kv_width], k_norm, cosine, sine)
        self._store(number, keys, fused[:, self._kv_width :], batch, pool)
        chosen = batch.sampled
        if not batch.n_sampled:
            return x[:0]
        query = _linear(normed.index_select(0, chosen), layer.qkv[:, : self._q_width], q_bias)
        query = self._turn(query, q_norm, cosine.index_select(0, chosen), sine.index_select(0, chosen))
        return self._finish(number, layer, x.index_select(0, chosen), query, batch.last_groups, pool)

    def _turn(self, heads: Tensor, norm: Tensor | None, cosine: Tensor, sine: Tensor) -> Tensor:
        """[N, n * head_dim] -> [N, n, head_dim], normalised where the model asks for it, and rotated."""
        heads = heads.reshape(heads.shape[0], -1, self.config.head_dim)
        if norm is not None:
            heads = rms_norm(heads, norm, self._eps)
        return rotate(heads, cosine, sine)

    def _store(self, number: int, keys: Tensor, values: Tensor, batch: Batch, pool: KvPool) -> None:
        key_slots, value_slots = batch.slots[number]
        pool.slots.index_copy_(0, key_slots, keys.reshape(-1, self._kv_width))
        pool.slots.index_copy_(0, value_slots, values)

    def _finish(
        self, number: int, layer: LayerWeights, x: Tensor, query: Tensor, groups: list[Group], pool: KvPool
    ) -> Tensor:
        """Attention, its projection and the feed-forward block; `x` and `query` have the rows of `groups`."""
        mixed = [self._attend(number, query, group, pool) for group in groups]
        x = x + _linear(mixed[0] if len(mixed) == 1 else torch.cat(mixed), layer.out, layer.out_bias)
        inner = _linear(self._norm(x, layer.mlp_norm), layer.gate_up, layer.gate_up_bias)
        width = self.config.intermediate_size
        gated = F.silu(inner[:, :width]).mul_(inner[:, width:])
        return x + _linear(gated, layer.down, layer.down_bias)

    def _attend(self, number: int, query: Tensor, group: Group, pool: KvPool) -> Tensor:
        config = self.config
        own = query[group.first : group.first + group.batch * group.rows]
        own = own.reshape(group.batch, group.rows, config.n_heads, config.head_dim)
        keys, values = pool.gather(group.index[number], group.batch, group.tokens)
        return attend(own, keys, values, group.mask, group.causal)


def _halves(both: Tensor | None, at: int) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if both is None else (both[:at], both[at:])


def _linear(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, matrix) if bias is None else torch.addmm(bias, x, matrix)
