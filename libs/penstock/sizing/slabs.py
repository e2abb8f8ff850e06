"""The tensors of a decoder, by how ranks divide them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from penstock.checkpoint import EMBEDDING, Experts, LayerNames, ModelConfig, layer_names
from penstock.checkpoint.tensors import HEAD, needed_tensors
from penstock.sizing.devices import PlannedSplit
from penstock.sizing.forms import BITS_16, FLOAT32, GROUPS_OF_4, ROWS_OF_8, NumberForm

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
        count = self.count
        if self.owner is Owner.EXPERT:
            count = -(-self.count // split.expert) + int(self.count * split.copied)
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
    rules, kept = _rules(config), _Kept(config, dtype, _stored_int4(config, forms))
    alike: Counter[tuple[int, _Rule, tuple[int, ...], NumberForm]] = Counter()
    for name, shape in needed_tensors(config).items():
        within = _LAYER.fullmatch(name)
        layer = int(within[1]) if within else -1 if name == EMBEDDING else config.n_layers
        rule = rules.get(within[2] if within else name, _whole)
        alike[layer, rule, shape, kept.form(name, forms[name], len(shape))] += 1
    if config.tied:
        shape = (config.vocab_size, config.hidden_size)
        alike[config.n_layers, rules[HEAD], shape, kept.form(HEAD, forms[EMBEDDING], 2)] += 1
    return [
        replace(slab, count=slab.count * times)
        for (layer, rule, shape, form), times in alike.items()
        for slab in rule(layer, shape, form)
    ]


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


class _Kept:
    """How tensors are kept in memory."""

    def __init__(self, config: ModelConfig, dtype: str, stored: Mapping[str, bool]) -> None:
        """`stored`: those that are stored in 4 bits, and whether int4 keeps them; see `_stored_int4`."""
        names = layer_names(config)
        self._dtype = dtype
        self._stored = stored
        self._precise = ("e_score_correction_bias", "norm.weight") if config.norm_offset else "e_score_correction_bias"
        made = () if names.latent is None else (f"{names.latent.keys_values}.weight",)
        self._never_rounded = (EMBEDDING, f"{names.router}.weight", *made)

    def form(self, name: str, stored: NumberForm, axes: int) -> NumberForm:
        """Of a tensor of so many axes."""
        if name.endswith(self._precise) or self._dtype == "float32":
            return FLOAT32
        if self._dtype == "auto":
            return stored
        if axes == 1 or name.endswith(self._never_rounded):
            return BITS_16
        if self._dtype == "int4":
            return self._int4(name)
        return ROWS_OF_8 if self._dtype in ("int8", "float8") else BITS_16

    def _int4(self, name: str) -> NumberForm:
        """As engine/kernels/rounding.py keeps it."""
        if self._stored:
            return GROUPS_OF_4 if self._stored.get(name) else BITS_16
        return ROWS_OF_8 if name == HEAD else GROUPS_OF_4


def _stored_int4(config: ModelConfig, forms: Mapping[str, NumberForm]) -> dict[str, bool]:
    """The tensors that are stored in 4 bits, and of each whether all with which it makes one matrix are: else it is
    unpacked."""
    found = {name: True for name, form in forms.items() if form.bits == GROUPS_OF_4.bits}
    names, numbers = layer_names(config), range(config.experts.count if config.experts is not None else 0)
    together = [names.qkv, names.gate_up, names.shared_gate_up]
    together += [tuple(each.format(number) for each in names.expert_gate_up) for number in numbers]
    for layer in range(config.n_layers) if found else ():
        for parts in together:
            some = [f"model.layers.{layer}.{part}.weight" for part in parts]
            if not all(name in found for name in some):
                found |= {name: False for name in some if name in found}
    return found


_Rule = Callable[[int, tuple[int, ...], NumberForm], list[Slab]]
"""The slabs of a tensor: of its layer, shape and form."""
_Parts = tuple[tuple[int, int], ...]
"""What stands one above the other in a matrix: units, and rows of each."""


def _rules(config: ModelConfig) -> dict[str, _Rule]:
    """By what a tensor is called, in its layer if it has one. All others are whole on each rank."""
    names, vocabulary = layer_names(config), _rows(((config.vocab_size, 1),))
    found = {EMBEDDING: vocabulary, HEAD: vocabulary, **_attention(config, names)}
    found |= _block(names.gate_up, names.down, config.intermediate_size)
    if config.experts is not None:
        found |= _block(names.shared_gate_up, names.shared_down, config.experts.shared_size)
        found |= _experts(names, config.experts)
    return found


def _attention(config: ModelConfig, names: LayerNames) -> dict[str, _Rule]:
    latent, found = config.latent, {f"{names.out}.weight": _columns(config.n_heads)}
    queries, kept = (config.n_heads, config.head_dim), (config.n_kv_heads, config.head_dim)
    cuts: dict[str, _Parts]
    if latent is not None and names.latent is not None:
        asks = names.qkv[0] if latent.query_rank is None else names.latent.query
        cuts = {asks: (queries,), names.latent.keys_values: ((config.n_heads, latent.plain_dim + latent.value_dim),)}
    elif len(names.qkv) == 1:
        cuts = {names.qkv[0]: (queries, kept, kept)}
    else:
        cuts = {name: (part,) for name, part in zip(names.qkv, (queries, kept, kept), strict=True)}
    for name, parts in cuts.items():
        found |= {f"{name}.weight": _rows(parts), f"{name}.bias": _bias(parts)}
    return found


def _block(gate_up: tuple[str, ...], down: str, inner: int) -> dict[str, _Rule]:
    """A feed-forward block that all tokens go through."""
    parts = ((inner, 2 // len(gate_up)),)
    found: dict[str, _Rule] = {f"{down}.weight": _columns(inner)}
    for name in gate_up:
        found |= {f"{name}.weight": _rows(parts), f"{name}.bias": _bias(parts)}
    return found


def _experts(names: LayerNames, experts: Experts) -> dict[str, _Rule]:
    inner = experts.intermediate_size
    if names.all_gate_up is not None and names.all_down is not None:
        return {names.all_gate_up: _all_gates(inner), names.all_down: _all_downs(inner)}
    rows, columns = _rows(((inner, 1),), Owner.EXPERT), _columns(inner, Owner.EXPERT)
    found: dict[str, _Rule] = {}
    for expert in range(experts.count):
        found |= {f"{name.format(expert)}.weight": rows for name in names.expert_gate_up}
        found[f"{names.expert_down.format(expert)}.weight"] = columns
    return found


def _rows(parts: _Parts, owner: Owner = Owner.TENSOR) -> _Rule:
    return lambda layer, shape, form: [
        Slab(layer, units * height, shape[1], form, owner=owner, row_units=units) for units, height in parts
    ]


def _bias(parts: _Parts) -> _Rule:
    return lambda layer, shape, form: [
        Slab(layer, 1, units * height, form, owner=Owner.TENSOR, column_units=units) for units, height in parts
    ]


def _columns(units: int, owner: Owner = Owner.TENSOR) -> _Rule:
    return lambda layer, shape, form: [Slab(layer, shape[0], shape[1], form, owner=owner, column_units=units)]


def _whole(layer: int, shape: tuple[int, ...], form: NumberForm) -> list[Slab]:
    rows, columns = shape if len(shape) == 2 else (1, shape[0])
    return [Slab(layer, rows, columns, form)]


def _all_gates(inner: int) -> _Rule:
    """Of the tensor [experts, in, out] that has all gates and ups: each expert's as [out, in]."""
    return lambda layer, shape, form: [
        Slab(layer, shape[2], shape[1], form, count=shape[0], owner=Owner.EXPERT, row_units=inner)
    ]


def _all_downs(inner: int) -> _Rule:
    """Of the one that has all downs."""
    return lambda layer, shape, form: [
        Slab(layer, shape[2], shape[1], form, count=shape[0], owner=Owner.EXPERT, column_units=inner)
    ]
