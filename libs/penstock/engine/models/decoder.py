"""The decoder of every supported family: one definition, whose switches are in ModelConfig.

Attention and feed-forward blocks in turn, each reading a normalised residual stream and adding to it. Families
differ in the reach of a layer's attention (the whole context, a sliding window, or a chunk), in how positions rotate
queries and keys, in what is kept of each token (see heads), in the places of the norms, and in whether the feed-forward
block is one network or many experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.checkpoint import ModelConfig
from penstock.engine.layers.adapters import adapted
from penstock.engine.layers.embedding import Embedding
from penstock.engine.layers.feedforward import Routed, feed_forward
from penstock.engine.layers.linear import columns, linear
from penstock.engine.layers.norm import rms_norm
from penstock.engine.layers.rope import rope_tables
from penstock.engine.layers.weights import LayerWeights, Weights
from penstock.engine.models.heads import Turn, heads_of
from penstock.engine.step.batch import Batch, Group, Leading
from penstock.engine.step.features import Features
from penstock.engine.step.memory import KvMemory


class Decoder:
    """Computes logits for the sampled rows of a batch and leaves every row's keys and values in the page memory.

    Stateless between calls. `max_positions` bounds the rotation tables, `dtype` is that of the activations: the
    weights' own, or float32 when the weights are packed.
    """

    def __init__(self, config: ModelConfig, weights: Weights, max_positions: int, dtype: torch.dtype) -> None:
        self.config = config
        self._weights = weights
        device = weights.norm.device
        self._dtype = dtype
        self._eps = torch.tensor(config.rms_eps, dtype=torch.float32, device=device)
        self._heads = heads_of(config, self._eps)
        local = config.local_rope
        self._tables: list[Turn] = []
        for rope in (config.rope,) if local is None else (config.rope, local):
            cosine, sine = rope_tables(rope, config.rotary_dim, max_positions, self._dtype)
            self._tables.append((cosine.to(device).unsqueeze(1), sine.to(device).unsqueeze(1)))
        axes = [axis for axis, pairs in enumerate(config.rope.sections) for _ in range(pairs)]
        self._axis = torch.tensor([*axes, *axes], device=device) if axes else None
        """[rotary_dim]: which of its three places turns each dimension of a row."""
        self.between: Callable[[], object] | None = None
        """Called after each layer but the last."""
        self.add: Callable[[Tensor], Tensor] = _as_it_is
        """Sums what attention, and what a feed-forward block adds over all processes that have a part of the model."""
        self._table_of = [0 if local is None or window is None else 1 for window in config.windows]

    @property
    def tables(self) -> list[Turn]:
        """The rotation tables, [positions, 1, rotary_dim]: of all layers, or of those without a window and the rest."""
        return self._tables

    @property
    def waits(self) -> bool:
        """Whether the host waits for the device in the middle of a step: for routers, where each expert has products of
        its own."""
        return any(isinstance(layer.mlp, Routed) and not layer.mlp.grouped for layer in self._weights.layers)

    @property
    def embedding(self) -> Embedding:
        """Of the model."""
        return self._weights.embedding

    @property
    def layers(self) -> range:
        """Those of the model that it computes."""
        first = self._weights.first
        return range(first, first + len(self._weights.layers))

    def forward(
        self, batch: Batch, memory: KvMemory, features: Features | None = None, states: Tensor | None = None
    ) -> Tensor:
        """float32 [S, vocab]; fills `features`. Of some of the model's layers: `states` [N, hidden] are what those
        before have made, None for the first; without the last it returns what these have made of all rows."""
        x = (self._weights.embedding.rows(batch.ids) if states is None else states).to(self._dtype)
        if batch.shown is not None:
            rows, embeddings = batch.shown
            x = x.index_copy(0, rows, embeddings.to(self._dtype))
        turns = [self._turn(table, batch) for table in self._tables]
        layers: Sequence[LayerWeights] = self._weights.layers
        if batch.adapters:
            layers = adapted(layers, batch.adapters, len(x))
        head = self._weights.head
        for number, layer in zip(self.layers, layers if head is None else layers[:-1], strict=False):
            x = self._layer(number, layer, x, turns[self._table_of[number]], batch=batch, memory=memory)
            if features is not None:
                features.keep(number + 1, x)
            if self.between is not None:
                self.between()
        if head is None:
            return x
        x = self._last_layer(layers[-1], x, turns[self._table_of[-1]], batch, memory)
        x = self._norm(x, self._weights.norm)
        logits = linear(x, head).float()
        cap = self.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _turn(self, table: Turn, batch: Batch) -> Turn:
        """[N, 1, rotary_dim] of the batch's rows."""
        if batch.turned is None:
            return _rows(table, batch.positions)
        if self._axis is None:  # of a model whose rotation has no sections, all three are the same
            return _rows(table, batch.turned[:, 0])
        places, dims = batch.turned[:, self._axis], torch.arange(len(self._axis), device=self._axis.device)
        cosine, sine = (part[:, 0][places, dims].unsqueeze(1) for part in table)
        return cosine, sine

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._eps)

    def _post_norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._norm(x, weight)

    def _layer(
        self, number: int, layer: LayerWeights, x: Tensor, turn: Turn, *, batch: Batch, memory: KvMemory
    ) -> Tensor:
        """[N, hidden] -> [N, hidden]."""
        made = linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
        query, kept = self._heads.both(number, layer, made, turn, batch.positions)
        self._store(number, kept, batch, memory)
        return self._finish(
            number,
            layer,
            x,
            query,
            batch.positions,
            groups=batch.groups,
            leading=batch.leading,
            memory=memory,
        )

    def _last_layer(self, layer: LayerWeights, x: Tensor, turn: Turn, batch: Batch, memory: KvMemory) -> Tensor:
        """[N, hidden] -> [S, hidden]: what is kept of all rows, everything else of the sampled ones only."""
        number = self.config.n_layers - 1
        if batch.sampled is None:
            return self._layer(number, layer, x, turn, batch=batch, memory=memory)
        normed, asks = self._norm(x, layer.input_norm), self._heads.asks
        ask_bias, kept_bias = _halves(layer.qkv_bias, asks)
        made = linear(normed, columns(layer.qkv, asks, layer.qkv.shape[1]), kept_bias)
        self._store(number, self._heads.kept(number, layer, made, turn), batch, memory)
        chosen = batch.sampled
        if not batch.n_sampled:
            return x[:0]
        made = linear(normed.index_select(0, chosen), columns(layer.qkv, 0, asks), ask_bias)
        positions = batch.positions.index_select(0, chosen)
        query = self._heads.queries(number, layer, made, _rows(turn, chosen), positions)
        x = x.index_select(0, chosen)
        return self._finish(
            number,
            layer,
            x,
            query,
            positions,
            groups=batch.last_groups,
            leading=batch.last_leading,
            memory=memory,
        )

    def _store(self, number: int, kept: tuple[Tensor, ...], batch: Batch, memory: KvMemory) -> None:
        for places, rows in zip(batch.places[number], kept, strict=True):
            memory.store(places, rows)

    def _finish(
        self,
        number: int,
        layer: LayerWeights,
        x: Tensor,
        query: Tensor,
        positions: Tensor,
        *,
        groups: list[Group],
        leading: Leading | None,
        memory: KvMemory,
    ) -> Tensor:
        """Attention, its projection, the feed-forward block; the rows are the leading ones and those of `groups`."""
        mixed = [] if leading is None else [leading.attend(number, query[: leading.rows])]
        mixed += [self._attend(number, layer, query, group, memory) for group in groups]
        added = self.add(linear(mixed[0] if len(mixed) == 1 else torch.cat(mixed), layer.out, layer.out_bias))
        x = x + self._post_norm(added, layer.attention_post_norm)
        added = self.add(feed_forward(self._norm(x, layer.mlp_norm), layer.mlp, self.config.activation, positions))
        return x + self._post_norm(added, layer.mlp_post_norm)

    def _attend(self, number: int, layer: LayerWeights, query: Tensor, group: Group, memory: KvMemory) -> Tensor:
        own = query[group.first : group.first + group.batch * group.rows]
        own = own.reshape(group.batch, group.rows, *own.shape[1:])
        context = group.contexts[self.config.windows[number]]
        planes = memory.gather(context.index[number], group.batch, context.tokens)
        return self._heads.attend(layer, own, planes, context)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _halves(both: Tensor | None, at: int) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if both is None else (both[:at], both[at:])


def _rows(table: Turn, rows: Tensor) -> Turn:
    return table[0].index_select(0, rows), table[1].index_select(0, rows)
