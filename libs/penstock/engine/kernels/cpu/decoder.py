"""Steps computed by step.cpp: the same decoder as models/decoder.py, in one pass over packed weights.

A decode step on a CPU spends its time reading weights. Torch spends as much again on a hundred small calls and on
gathering keys and values. Here one call computes the step, reads each weight once, and reads keys and values on their
pages. For a prompt, everything between two products is done while rows are written and read anyway; and a row's result
does not depend on how the prompt is cut into chunks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, addressof, c_void_p, cast
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.checkpoint import Experts, ModelConfig
from penstock.engine.errors import NotFinite, RankLost
from penstock.engine.kernels.cpu.adapting import step_adapters
from penstock.engine.kernels.cpu.layout import (
    ExpertPlaceArgs,
    Kind,
    LayerArgs,
    LinearArgs,
    ModelArgs,
    RanksArgs,
    StepArgs,
)
from penstock.engine.kernels.cpu.legality import Legality
from penstock.engine.kernels.cpu.machine import Machine
from penstock.engine.kernels.cpu.matrix import PackedMatrix
from penstock.engine.kernels.cpu.packed import LANES
from penstock.engine.layers.feedforward import Dense, Routed
from penstock.engine.layers.latent import LATENT_EPS, expands
from penstock.engine.layers.linear import Matrix
from penstock.engine.layers.weights import LatentWeights, LayerWeights, SideBySide, Weights
from penstock.engine.step.batch import Rows, sampled_rows, turned_apart, turned_rows
from penstock.engine.step.features import Features
from penstock.engine.step.memory import PageMemory

_TABLES = (torch.float32, torch.bfloat16)
"""The types in which step.cpp reads embeddings."""
_PROCEDURE = CFUNCTYPE(None)
_FAR, _FAR_IN_FLOATS = 1024, 256
"""From a chunk of a prompt on that begins behind so many tokens, torch is faster with expanded vectors than the kernels
with absorbed ones: where attention multiplies pairs of bfloat16, and elsewhere. Where a chunk begins says it, not how
long it is: a first chunk is the kernels', whatever is beside it in its step."""
_AT_ONCE = 32
"""kQueries of head.h."""
_ROUTED = 4
"""Experts whose scores step.cpp computes together."""


class CompiledDecoder:
    """Computes the steps of one model over one page memory."""

    def __init__(
        self,
        machine: Machine,
        config: ModelConfig,
        weights: Weights,
        tables: tuple[Tensor, Tensor],
        memory: PageMemory,
        *,
        first_head: int = 0,
        ranks: RanksArgs | None = None,
    ) -> None:
        """`weights` are packed; `tables` are the rotation's cosine and sine, float32 [positions, 1, head_dim]. `ranks`
        compute the model together; this one has the KV heads of the memory from `first_head` on."""
        self._machine = machine
        self._ends, self._first = weights.head is not None, weights.first
        head = weights.layers[0].qkv if weights.head is None else weights.head
        assert isinstance(head, PackedMatrix), "steps need packed weights"
        self._head = head
        self._embedding = weights.embedding
        table = None if weights.first else weights.embedding.plain
        self._table = table if table is not None and table.dtype in _TABLES and table.is_contiguous() else None
        self._hidden, self._vocab = config.hidden_size, config.vocab_size
        self._latent_form = config.latent, config.rotary_dim
        pairs = memory.data.dtype == torch.bfloat16 and machine.rounds("bfloat16")
        self._far = _FAR if pairs else _FAR_IN_FLOATS
        self._keep: list[Any] = [weights, memory, ranks]
        own = range(weights.first, weights.first + len(weights.layers))
        layers = (LayerArgs * len(own))(
            *(self._layer(config, at, layer) for at, layer in zip(own, weights.layers, strict=True))
        )
        cosine, sine = (self._floats(table.flatten(1)) for table in tables)
        self._model = ModelArgs(
            layers=len(own),
            hidden=config.hidden_size,
            **_heads(config),
            intermediate=max(config.intermediate_size, 0 if config.experts is None else config.experts.shared_size),
            **({} if config.experts is None else _experts(config.experts, weights)),
            eps=config.rms_eps,
            scale=config.attention_scale,
            kv_kind=Kind.of(memory.data.dtype),
            block_size=memory.block_size,
            chunked=config.chunked,
            interleaved=config.rope.interleaved,
            key_norm=config.key_norm,
            warm_tokens=0 if config.temperature is None else config.temperature.tokens,
            warm_strength=0 if config.temperature is None else config.temperature.strength,
            vocab=self._vocab,
            cosine=cosine,
            sine=sine,
            norm=self._floats(weights.norm),
            layer=addressof(layers),
            head=_args(head),
            table=None if self._table is None else self._table.data_ptr(),
            table_kind=0 if self._table is None else Kind.of(self._table.dtype),
            memory=memory.data.data_ptr(),
            page_layers=memory.n_layers,
            first_layer=own.start,
            row_heads=memory.heads[0],
            first_head=0 if config.latent is not None else first_head,
            ranks=None if ranks is None else addressof(ranks),
        )
        self._keep.append(layers)
        self._names: list[tuple[str, int, int]] = []
        self._known: dict[tuple[str, int, int], npt.NDArray[np.int32]] = {}
        """The block tables of the last step, by sequence, version and length."""
        self._end_to_end = np.zeros(0, dtype=np.int32)
        self._room = np.empty((0, self._vocab), dtype=np.float32)
        """Room for logits of which only the largest is read."""
        self._between: Any = None

    @staticmethod
    def fits(config: ModelConfig) -> bool:
        """Whether step.cpp computes such models: all but Gemma's, and Phi's where only a part of a head turns, in sizes
        that are whole vectors."""
        experts, latent = config.experts, config.latent
        inner = () if experts is None else (experts.intermediate_size, experts.shared_size)
        sizes = (config.hidden_size, config.intermediate_size, *inner, *_head_sizes(config))
        return (
            all(size % LANES == 0 for size in sizes)
            and (latent is not None or config.rotary_dim == config.head_dim)
            and config.activation == "silu"
            and not config.post_norms
            and config.local_rope is None
            and config.attention_softcap is None
            and config.logit_softcap is None
        )

    def between_layers(self, call: Callable[[], object] | None) -> None:
        """From the next step on, `call` is called after each layer. It must not raise."""
        self._between = None if call is None else _PROCEDURE(call)

    def takes(self, runs: Sequence[Rows]) -> bool:
        """Whether it computes steps of these rows: not if torch multiplies so many faster, or if some have adapters of
        experts, or if a run's rows look far at the vectors of latent attention and it is less to expand these, which
        torch does."""
        if self._head.by_torch(sum(run.tokens for run in runs)):
            return False
        if any(run.adapter is not None and run.adapter.by_torch for run in runs):
            return False
        latent, turned = self._latent_form
        return latent is None or not any(run.start >= self._far and expands(run.tokens, latent, turned) for run in runs)

    def forward(self, runs: Sequence[Rows], features: Features | None = None, states: Tensor | None = None) -> Tensor:
        """float32 [samples, vocab]; leaves every row's keys and values in the page memory, and fills `features`. Of
        some of the model's layers: as Decoder.forward."""
        if not self._ends:
            rows = list(range(sum(run.tokens for run in runs)))
            return torch.from_numpy(self._step(runs, rows, None, features=features, states=states))
        sampled = sampled_rows(runs)
        logits = np.empty((len(sampled), self._vocab), dtype=np.float32)
        self._step(runs, sampled, logits, features=features, states=states)
        return torch.from_numpy(logits)

    def best(
        self, runs: Sequence[Rows], legality: Legality | None = None, features: Features | None = None
    ) -> list[int]:
        """As `forward`, but only the most probable token of each sample, the first of several, that is legal. Raises
        NotFinite."""
        sampled = sampled_rows(runs)
        if len(self._room) < len(sampled):
            self._room = np.empty((len(sampled), self._vocab), dtype=np.float32)
        best = np.empty(len(sampled), dtype=np.int32)
        self._step(runs, sampled, self._room, best, legality=legality, features=features)
        found: list[int] = best.tolist()
        if -1 in found:
            raise NotFinite
        return found

    def _step(
        self,
        runs: Sequence[Rows],
        sampled: list[int],
        logits: npt.NDArray[np.float32] | None,
        best: npt.NDArray[np.int32] | None = None,
        *,
        legality: Legality | None = None,
        features: Features | None = None,
        states: Tensor | None = None,
    ) -> npt.NDArray[np.float32]:
        """Returns the memory of the residual stream, [rows, hidden]."""
        ids: list[int] = []
        positions: list[int] = []
        first, at, table_at = [0], 0, []
        for run in runs:
            ids += run.ids
            positions += range(run.start, run.end)
            first.append(len(ids))
            table_at.append(at)
            at += len(run.pages)
        taps: list[int] = [] if features is None else [count - self._first for count in features.layers]
        featured = [] if features is None else list(features.rows)
        apart = turned_apart(runs)
        numbers = _Numbers(
            ids=ids,
            first=first,
            position=positions,
            turned=turned_rows(runs)[:, 0].tolist() if apart else [],
            table_at=table_at,
            sampled=sampled,
            taps=taps,
            featured=featured,
        )
        addresses = numbers.addresses if apart else {**numbers.addresses, "turned": numbers.addresses["position"]}
        tables = self._tables(runs)
        x: npt.NDArray[np.float32]
        if states is not None:
            x = states.float().numpy().copy()
        elif self._table is not None:
            x = np.empty((len(ids), self._hidden), dtype=np.float32)
        else:
            x = self._embedding.rows(torch.tensor(ids)).float().numpy()
        adapters, thin = step_adapters(runs)
        step = StepArgs(
            rows=len(ids),
            sequences=len(runs),
            samples=len(sampled),
            **addresses,
            table=tables.ctypes.data,
            x=x.ctypes.data,
            logits=None if logits is None else logits.ctypes.data,
            best=None if best is None else best.ctypes.data,
            legal=None if legality is None else addressof(legality.args),
            tap_count=len(taps),
            features=len(featured),
            states=None if features is None else features.values.data_ptr(),
            between=None if self._between is None else cast(self._between, c_void_p).value,
            adapter=None if adapters is None else addressof(adapters),
            thin=thin,
        )
        if not self._machine.forward(self._model, step):
            raise RankLost("a process that computes a part of the model has ended, or does not answer")
        return x

    def _tables(self, runs: Sequence[Rows]) -> npt.NDArray[np.int32]:
        """The runs' block tables end to end. They are those of the last step if nothing has changed."""
        names = [(*run.table, len(run.pages)) for run in runs]
        if names != self._names:
            known = self._known
            found = [
                known[name] if name in known else np.array(run.pages, dtype=np.int32)
                for name, run in zip(names, runs, strict=True)
            ]
            self._names, self._known = names, dict(zip(names, found, strict=True))
            self._end_to_end = np.concatenate(found)
        return self._end_to_end

    def _layer(self, config: ModelConfig, number: int, layer: LayerWeights) -> LayerArgs:
        block = layer.mlp
        return LayerArgs(
            input_norm=self._floats(layer.input_norm),
            qk_norm=None if layer.qk_norm is None else self._floats(layer.qk_norm),
            mlp_norm=self._floats(layer.mlp_norm),
            qkv=_args(layer.qkv),
            output=_args(layer.out),
            window=config.windows[number] or 0,
            unturned=number in config.unrotated or layer.latent is not None,
            **({} if layer.latent is None else self._latent(layer.latent)),
            **(self._routed(block) if isinstance(block, Routed) else self._dense(block)),
        )

    def _latent(self, weights: LatentWeights) -> dict[str, Any]:
        """Queries and vectors have turned when attention gets them."""
        absorb, release = (self._each_head(own, weights.heads) for own in (weights.keys, weights.values))
        found = {"latent_norm": self._floats(weights.norm), "absorb": addressof(absorb), "release": addressof(release)}
        if weights.query is None or weights.query_norm is None:
            return found
        return {"query": _args(weights.query), "query_norm": self._floats(weights.query_norm), **found}

    def _each_head(self, matrices: Tensor | SideBySide, heads: int) -> Any:
        """The arguments for the matrix of each head, in memory that this object keeps."""
        assert isinstance(matrices, PackedMatrix), "steps need packed weights"
        columns = matrices.shape[1] // heads
        parts = [matrices.columns(head * columns, (head + 1) * columns).args for head in range(heads)]
        args = (LinearArgs * heads)(*parts)
        self._keep.append(args)
        return args

    def _dense(self, block: Dense | None) -> dict[str, Any]:
        return {} if block is None else {"gate_up": _args(block.gate_up), "down": _args(block.down)}

    def _routed(self, block: Routed) -> dict[str, Any]:
        router = torch.nn.functional.pad(block.router.float().t(), (0, 0, 0, -block.rule.count % _ROUTED))
        gate_ups, downs = [
            (LinearArgs * len(matrices))(*(_args(matrix) for matrix in matrices))
            for matrices in (block.gate_up, block.down)
        ]
        places = (ExpertPlaceArgs * block.rule.count)(*[ExpertPlaceArgs(-1, 0, 1)] * block.rule.count)
        for number, held in enumerate(block.held or ()):
            places[held.number] = ExpertPlaceArgs(number, held.turn, held.copies)
        self._keep += [gate_ups, downs, places]
        tables = {"gate_ups": addressof(gate_ups), "downs": addressof(downs), "places": addressof(places)}
        correction = None if block.correction is None else self._floats(block.correction)
        return {"router": self._floats(router), "correction": correction, **tables, **self._dense(block.shared)}

    def _floats(self, values: Tensor) -> int:
        kept = values.float().contiguous()
        self._keep.append(kept)
        return kept.data_ptr()


def _head_sizes(config: ModelConfig) -> tuple[int, ...]:
    """Those that must be whole vectors."""
    latent = config.latent
    if latent is None:
        return (config.head_dim,)
    return latent.rank, latent.query_rank or 0, latent.plain_dim, config.rotary_dim, latent.value_dim


def _heads(config: ModelConfig) -> dict[str, Any]:
    latent = config.latent
    if latent is None:
        return {"heads": config.n_heads, "kv_heads": config.n_kv_heads, "head_dim": config.head_dim}
    return {
        "heads": config.n_heads,
        "kv_heads": _parts(config.n_heads),
        "head_dim": latent.rank + config.rotary_dim,
        "rank": latent.rank,
        "query_rank": latent.query_rank or 0,
        "plain_dim": latent.plain_dim,
        "turned_dim": config.rotary_dim,
        "value_dim": latent.value_dim,
        "latent_eps": LATENT_EPS,
    }


def _parts(heads: int) -> int:
    """Into how many parts the heads of latent attention are divided, which all look at the same vectors: each part is
    as many queries of a row as step.cpp takes at once, and more than look together with those of other parts."""
    sizes = [size for size in range(_AT_ONCE, _AT_ONCE // 2, -1) if heads % size == 0]
    return heads // sizes[0] if sizes else 1


def _experts(rule: Experts, weights: Weights) -> dict[str, Any]:
    return {
        "experts": rule.count,
        "expert_rows": None if weights.expert_rows is None else weights.expert_rows.ctypes.data,
        "per_token": rule.per_token,
        "normalised": rule.normalised,
        "expert_intermediate": rule.intermediate_size,
        "sigmoid": rule.sigmoid,
        "groups": rule.groups,
        "groups_used": rule.groups_used,
        "scaling": rule.scaling,
        "weighs_inputs": rule.weighs_inputs,
    }


def _args(matrix: Matrix) -> LinearArgs:
    assert isinstance(matrix, PackedMatrix), "steps need packed weights"
    return matrix.args


class _Numbers:
    """Lists of int32, end to end in one array: that is made faster than an array for each."""

    def __init__(self, **lists: list[int]) -> None:
        numbers: list[int] = []
        places: dict[str, int] = {}
        for name, values in lists.items():
            places[name] = len(numbers)
            numbers += values
        self._kept = array("i", numbers)
        begin, size = self._kept.buffer_info()[0], self._kept.itemsize
        self.addresses = {name: begin + size * place for name, place in places.items()}
        """The address of each list, by its name; valid as long as this object lives."""
