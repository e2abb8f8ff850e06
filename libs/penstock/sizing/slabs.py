"""The tensors of a decoder, by how ranks divide them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from penstock.checkpoint import EMBEDDING, LayerNames, ModelConfig, layer_names
from penstock.checkpoint.tensors import HEAD, needed_tensors
from penstock.sizing.devices import PlannedSplit
from penstock.sizing.forms import BITS_16, FLOAT32, ROWS_OF_8, NumberForm

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


class Owner(Enum):
    """Who divides a tensor."""

    NOBODY = "each rank has the whole"
    TENSOR = "the tensor ranks"
    EXPERT = "the expert ranks"


@dataclass(frozen=True, slots=True)
class Slab:
    """Equal matrices [rows, columns] of one layer. Vectors are matrices of one row."""

    layer: int
    """-1: the embedding; as many as there are layers: what comes behind them."""
    rows: int
    columns: int
    form: NumberForm
    count: int = 1
    owner: Owner = Owner.NOBODY
    row_units: int = 0
    """Ranks get whole ones of so many equal parts of the rows, such as heads; a part that is on several ranks where
    there are fewer parts than ranks. 0: all rows."""
    column_units: int = 0

    @property
    def numbers(self) -> int:
        """Parameters."""
        return self.count * self.rows * self.columns

    @property
    def nbytes(self) -> int:
        """Of all."""
        return self.count * self.form.nbytes(self.rows, self.columns)

    def held(self, split: PlannedSplit) -> int:
        """Bytes that a rank holds, the largest one where they differ."""
        count = -(-self.count // split.expert) if self.owner is Owner.EXPERT else self.count
        return count * self.one_held(split)

    def one_held(self, split: PlannedSplit) -> int:
        """Bytes that a rank holds of one of the matrices, if any."""
        return self.form.nbytes(*self.part(split))

    def part(self, split: PlannedSplit) -> tuple[int, int]:
        """Rows and columns that a rank has of one matrix."""
        if self.owner is Owner.NOBODY:
            return self.rows, self.columns
        ranks = split.tensor if self.owner is Owner.TENSOR else split.expert_parts
        return _share(self.rows, self.row_units, ranks), _share(self.columns, self.column_units, ranks)


def _share(extent: int, units: int, ranks: int) -> int:
    return extent if units == 0 else extent // units * -(-units // ranks)


def slabs_of(config: ModelConfig, forms: Mapping[str, NumberForm], dtype: str) -> list[Slab]:
    """What the engine holds of a decoder whose tensors are stored as `forms`, with `dtype` as in Workload. The
    embedding is there twice where it is also the last matrix: by rows, and as a matrix to multiply by."""
    rules, found = _Rules(config), Counter[Slab]()
    for name, shape in needed_tensors(config).items():
        for slab in rules.slabs(name, shape, _kept(config, name, forms[name], dtype, len(shape))):
            found[slab] += 1
    if config.tied:
        form = _kept(config, HEAD, forms[EMBEDDING], dtype, 2)
        found[_vocabulary(config, config.n_layers, form)] += 1
    return [replace(slab, count=slab.count * times) for slab, times in found.items()]


def parameters(config: ModelConfig, slabs: Sequence[Slab]) -> tuple[int, int]:
    """(of the whole decoder, of what computes one token: the experts that it uses, and not the embedding)."""
    whole, used = 0, 0
    for slab in slabs:
        whole += slab.numbers
        if slab.owner is Owner.EXPERT and config.experts is not None:
            used += slab.numbers * config.experts.per_token // config.experts.count
        elif slab.layer >= 0:
            used += slab.numbers
    return whole - (config.vocab_size * config.hidden_size if config.tied else 0), used


def _kept(config: ModelConfig, name: str, stored: NumberForm, dtype: str, axes: int) -> NumberForm:
    """In memory."""
    if name.endswith("e_score_correction_bias") or (config.norm_offset and name.endswith("norm.weight")):
        return FLOAT32
    if dtype == "auto":
        return stored
    if dtype == "float32":
        return FLOAT32
    names = layer_names(config)
    made = "" if names.latent is None else names.latent.keys_values
    rounded = axes > 1 and name != EMBEDDING and not name.endswith((f"{names.router}.weight", f"{made}.weight"))
    return ROWS_OF_8 if dtype in ("int8", "float8") and rounded else BITS_16


def _vocabulary(config: ModelConfig, layer: int, form: NumberForm) -> Slab:
    size = config.vocab_size
    return Slab(layer, size, config.hidden_size, form, owner=Owner.TENSOR, row_units=size)


_Rule = Callable[[int, tuple[int, ...], NumberForm], list[Slab]]
"""The slabs of a tensor: its layer, shape and form."""


class _Rules:
    """By names."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._of: dict[str, _Rule] = {}
        names = layer_names(config)
        self._attention(names)
        self._divide(names.gate_up, names.down, config.intermediate_size)
        if config.experts is not None:
            self._divide(names.shared_gate_up, names.shared_down, config.experts.shared_size)
            self._experts(names, config.experts.count, config.experts.intermediate_size)

    def slabs(self, name: str, shape: tuple[int, ...], form: NumberForm) -> list[Slab]:
        """Of one tensor."""
        config, within = self._config, _LAYER.fullmatch(name)
        if within is None:
            if name in (EMBEDDING, HEAD):
                return [_vocabulary(config, -1 if name == EMBEDDING else config.n_layers, form)]
            return _whole(config.n_layers, shape, form)
        return self._of.get(within[2], _whole)(int(within[1]), shape, form)

    def _attention(self, names: LayerNames) -> None:
        config, latent = self._config, self._config.latent
        queries, kept = (config.n_heads, config.head_dim), (config.n_kv_heads, config.head_dim)
        if latent is not None and names.latent is not None:
            asks = names.qkv[0] if latent.query_rank is None else names.latent.query
            self._cut_rows(asks, (queries,))
            self._cut_rows(names.latent.keys_values, ((config.n_heads, latent.plain_dim + latent.value_dim),))
        elif len(names.qkv) == 1:
            self._cut_rows(names.qkv[0], (queries, kept, kept))
        else:
            for name, units in zip(names.qkv, (queries, kept, kept), strict=True):
                self._cut_rows(name, (units,))
        self._cut_columns(names.out, config.n_heads, Owner.TENSOR)

    def _divide(self, gate_up: tuple[str, ...], down: str, inner: int) -> None:
        for name in gate_up:
            self._cut_rows(name, ((inner, 2 // len(gate_up)),))
        self._cut_columns(down, inner, Owner.TENSOR)

    def _experts(self, names: LayerNames, count: int, inner: int) -> None:
        if names.all_gate_up is not None and names.all_down is not None:
            self._of[names.all_gate_up], self._of[names.all_down] = _stacked_gates(inner), _stacked_downs(inner)
            return
        for expert in range(count):
            for name in names.expert_gate_up:
                self._cut_rows(name.format(expert), ((inner, 1),), Owner.EXPERT)
            self._cut_columns(names.expert_down.format(expert), inner, Owner.EXPERT)

    def _cut_rows(self, name: str, parts: tuple[tuple[int, int], ...], owner: Owner = Owner.TENSOR) -> None:
        """`parts`, one above the other: units, and rows of each."""

        def rows(layer: int, shape: tuple[int, ...], form: NumberForm) -> list[Slab]:
            return [
                Slab(layer, units * height, shape[1], form, owner=owner, row_units=units) for units, height in parts
            ]

        def bias(layer: int, shape: tuple[int, ...], form: NumberForm) -> list[Slab]:
            return [Slab(layer, 1, units * height, form, owner=owner, column_units=units) for units, height in parts]

        self._of[f"{name}.weight"], self._of[f"{name}.bias"] = rows, bias

    def _cut_columns(self, name: str, units: int, owner: Owner) -> None:
        def columns(layer: int, shape: tuple[int, ...], form: NumberForm) -> list[Slab]:
            return [Slab(layer, shape[0], shape[1], form, owner=owner, column_units=units)]

        self._of[f"{name}.weight"] = columns


def _whole(layer: int, shape: tuple[int, ...], form: NumberForm) -> list[Slab]:
    rows, columns = shape if len(shape) == 2 else (1, shape[0])
    return [Slab(layer, rows, columns, form)]


def _stacked_gates(inner: int) -> _Rule:
    """Of the tensor [experts, in, out] that has all gates and ups: each expert's as [out, in]."""
    return lambda layer, shape, form: [
        Slab(layer, shape[2], shape[1], form, count=shape[0], owner=Owner.EXPERT, row_units=inner)
    ]


def _stacked_downs(inner: int) -> _Rule:
    """Of the one that has all downs."""
    return lambda layer, shape, form: [
        Slab(layer, shape[2], shape[1], form, count=shape[0], owner=Owner.EXPERT, column_units=inner)
    ]
