"""The attention of a layer: what it makes of hidden states, what it keeps, and how rows look at what is kept.

One of two kinds for all layers of a model: keys and values of their own for each head or group of heads, or keys and
values of all heads made from one vector.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from penstock.checkpoint import ModelConfig
from penstock.engine.layers.attention import attend
from penstock.engine.layers.latent import LATENT_EPS, absorb, expand, expands, release
from penstock.engine.layers.linear import linear
from penstock.engine.layers.norm import rms_norm
from penstock.engine.layers.rope import rotate
from penstock.engine.layers.weights import LayerWeights
from penstock.engine.step.batch import Context

Turn = tuple[Tensor, Tensor]
"""Rows of the rotation tables, cosine and sine; see rope_tables."""


class LayerHeads(Protocol):
    """The attention of one model's layers; without state between calls.

    `made` is what a layer's `qkv` has made of N rows: `asks` columns from which queries come, and behind them those of
    what is kept.
    """

    asks: int

    def queries(self, number: int, layer: LayerWeights, made: Tensor, turn: Turn, positions: Tensor) -> Tensor:
        """[N, asks] -> [N, heads, width] as `attend` takes them."""
        ...

    def kept(self, number: int, layer: LayerWeights, made: Tensor, turn: Turn) -> tuple[Tensor, ...]:
        """[N, rest] -> a row of each plane, [N, heads * width]."""
        ...

    def both(
        self, number: int, layer: LayerWeights, made: Tensor, turn: Turn, positions: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As `queries` and `kept`, of all columns."""
        ...

    def attend(self, layer: LayerWeights, query: Tensor, planes: tuple[Tensor, ...], context: Context) -> Tensor:
        """query [batch, rows, heads, width], each plane [batch, tokens, its heads, width] -> [batch * rows, what `out`
        reads]."""
        ...


def heads_of(config: ModelConfig, eps: Tensor) -> LayerHeads:
    """The kind that the model has; `eps` is that of its norms."""
    return GroupedHeads(config, eps) if config.latent is None else LatentHeads(config, eps)


class GroupedHeads:
    """Keys and values of their own for each head, or for groups of heads (Ainslie et al., 2023)."""

    def __init__(self, config: ModelConfig, eps: Tensor) -> None:
        self._config = config
        self._eps = eps
        self._heads, self._dim = config.n_heads, config.head_dim
        self.asks = self._heads * self._dim
        self._width = config.n_kv_heads * self._dim
        self._unrotated = frozenset(config.unrotated)
        if config.key_norm:
            self._ones = torch.ones(self._dim, device=eps.device)

    def queries(self, number: int, layer: LayerWeights, made: Tensor, turn: Turn, positions: Tensor) -> Tensor:
        norm = None if layer.qk_norm is None else layer.qk_norm[: self._heads]
        return self._warm(number, self._turn(number, made, norm, turn), positions)

    def kept(self, number: int, layer: LayerWeights, made: Tensor, turn: Turn) -> tuple[Tensor, ...]:
        norm = None if layer.qk_norm is None else layer.qk_norm[self._heads :]
        keys = self._turn(number, made[:, : self._width], norm, turn)
        return keys.flatten(1), made[:, self._width :]

    def both(
        self, number: int, layer: LayerWeights, made: Tensor, turn: Turn, positions: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        turned = self._turn(number, made[:, : -self._width], layer.qk_norm, turn)  # one call for queries and keys
        query, keys = turned[:, : self._heads], turned[:, self._heads :]
        return self._warm(number, query, positions), (keys.reshape(-1, self._width), made[:, -self._width :])

    def attend(self, layer: LayerWeights, query: Tensor, planes: tuple[Tensor, ...], context: Context) -> Tensor:
        config, (keys, values) = self._config, planes
        return attend(
            query,
            keys.to(query.dtype),
            values.to(query.dtype),
            context.mask,
            causal=context.causal,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
        )

    def _turn(self, number: int, made: Tensor, norm: Tensor | None, turn: Turn) -> Tensor:
        """[N, n * head_dim] -> [N, n, head_dim], normalised where the model asks for it, and rotated."""
        heads = made.reshape(made.shape[0], -1, self._dim)
        if norm is not None:
            heads = rms_norm(heads, norm, self._eps)
        if number in self._unrotated:
            return heads
        heads = rotate(heads, *turn, interleaved=self._config.rope.interleaved)
        return rms_norm(heads, self._ones, self._eps) if self._config.key_norm else heads

    def _warm(self, number: int, query: Tensor, positions: Tensor) -> Tensor:
        temperature = self._config.temperature
        if temperature is None or number not in self._unrotated:
            return query
        factor = ((positions + 1) // temperature.tokens).float().log1p() * temperature.strength + 1
        return (query * factor.view(-1, 1, 1)).to(query.dtype)


class LatentHeads:
    """Keys and values of all heads made from one vector, see Latent: the vector and the rotated key are one plane."""

    def __init__(self, config: ModelConfig, eps: Tensor) -> None:
        assert config.latent is not None
        self._config, self._latent = config, config.latent
        self._eps = torch.full_like(eps, LATENT_EPS)
        self._turned = config.rotary_dim
        self.asks = config.latent.query_rank or config.n_heads * config.head_dim

    def queries(self, number: int, layer: LayerWeights, made: Tensor, turn: Turn, positions: Tensor) -> Tensor:
        weights = layer.latent
        assert weights is not None
        if weights.query is not None and weights.query_norm is not None:
            made = linear(rms_norm(made, weights.query_norm, self._eps), weights.query)
        heads = made.reshape(len(made), -1, self._config.head_dim)
        plain, turned = heads[..., : self._latent.plain_dim], heads[..., self._latent.plain_dim :]
        return torch.cat((plain, self._rotated(turned, turn)), -1)

    def kept(self, number: int, layer: LayerWeights, made: Tensor, turn: Turn) -> tuple[Tensor, ...]:
        weights = layer.latent
        assert weights is not None
        common, key = made[:, : -self._turned], made[:, -self._turned :]
        key = self._rotated(key.unsqueeze(1), turn).squeeze(1)
        return (torch.cat((rms_norm(common, weights.norm, self._eps), key), -1),)

    def both(
        self, number: int, layer: LayerWeights, made: Tensor, turn: Turn, positions: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        query = self.queries(number, layer, made[:, : self.asks], turn, positions)
        return query, self.kept(number, layer, made[:, self.asks :], turn)

    def attend(self, layer: LayerWeights, query: Tensor, planes: tuple[Tensor, ...], context: Context) -> Tensor:
        """For few rows queries are brought to the common vectors; for many, keys and values of all heads are made from
        these: that is less to compute then."""
        weights, scale = layer.latent, self._config.attention_scale
        assert weights is not None
        plane, rank = planes[0].to(query.dtype), self._latent.rank
        if expands(query.shape[1], self._latent, self._turned):
            keys, values = expand(plane, weights, rank)
            return attend(query, keys, values, context.mask, causal=context.causal, scale=scale)
        asked = absorb(query, weights, self._latent.plain_dim)
        mixed = attend(asked, plane, plane, context.mask, causal=context.causal, scale=scale)
        return release(mixed.view(len(mixed), self._config.n_heads, -1)[..., :rank], weights)

    def _rotated(self, x: Tensor, turn: Turn) -> Tensor:
        return rotate(x, *turn, interleaved=self._config.rope.interleaved)
