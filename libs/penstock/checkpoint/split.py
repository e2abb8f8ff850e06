"""A model cut into parts for several processes that compute each layer together (Shoeybi et al., "Megatron-LM", 2019).

Each has some of the attention's heads and a part of the inner size of every feed-forward block: rows of the matrices
that lead there, columns of those that lead back. What comes back is summed over all. The last matrix is cut by tokens;
norms, routers and what makes the common vector of latent attention are there whole, and so is the embedding, of which
rows are read when they are needed. Experts may be divided among groups of ranks instead, whole ones to each;
some of them may be in more than one group, which take turns.

Layers may be divided as well, among stages that pass on what they have made of a step's rows (Huang et al., "GPipe",
2019): the last one has the last matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from penstock.checkpoint.directory import Checkpoint, Rank, RankPart
from penstock.checkpoint.experts import Experts, HeldExpert
from penstock.checkpoint.model_config import ModelConfig
from penstock.checkpoint.naming import layer_names
from penstock.checkpoint.tensors import EMBEDDING, HEAD

_UNITS = (16, 2)
"""Sizes are cut at multiples of these where the parts are still even: kernels compute so many columns at a time."""
_MANY = 16
"""Units for each rank, of which one more makes no difference."""


def check_split(config: ModelConfig, ranks: int) -> None:
    """Raises ValueError when the model can't be cut into so many parts; it says what would be right."""
    heads, kv_heads = config.n_heads, config.n_kv_heads
    if heads % ranks:
        raise ValueError(f"must divide the {heads} attention heads of the model")
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(f"must divide the {kv_heads} KV heads of the model, or be a multiple of them")


def check_expert_groups(config: ModelConfig, rank: Rank) -> None:
    """Raises ValueError when the experts can't be divided among so many groups; it says what would be right."""
    if rank.expert_groups == 1:
        return
    if config.experts is None:
        raise ValueError("must be 1: the model has no experts")
    if rank.ranks % rank.expert_groups or config.experts.count % rank.expert_groups:
        raise ValueError(f"must divide the {rank.ranks} ranks and the {config.experts.count} experts of the model")


def share(total: int, ranks: int, rank: int) -> range:
    """The part of `total` things that a rank has: as even as possible, in whole units."""
    unit = next((unit for unit in _UNITS if total % unit == 0 and _even(total // unit, ranks)), 1)
    units, more = divmod(total // unit, ranks)
    sizes = [units + (number < more) for number in range(ranks)]
    ends = [0, *accumulate(sizes)]
    return range(unit * ends[rank], unit * ends[rank + 1])


def _even(units: int, ranks: int) -> bool:
    return units % ranks == 0 or units >= _MANY * ranks


def heads_of_rank(heads: int, ranks: int, rank: int) -> range:
    """The heads that a rank has; several ranks have the same where there are fewer heads."""
    if heads < ranks:
        first = rank * heads // ranks
        return range(first, first + 1)
    return range(rank * heads // ranks, (rank + 1) * heads // ranks)


def part_of(checkpoint: Checkpoint, rank: Rank, fingerprint: str) -> Checkpoint:
    """What a rank has of a model that `check_split` has passed; its `config` says of what size. The fingerprint is the
    whole model's."""
    pieces = {}
    for name, cut in cuts_of(checkpoint, rank).items():
        tied = name == HEAD and checkpoint.config.tied
        tensor = checkpoint.tensors[EMBEDDING if tied else name]
        pieces[name] = tuple(tensor.cut(cut.axis, part) for part in cut.parts)
    own = config_of_rank(checkpoint.config, rank)
    return replace(checkpoint, config=own, part=RankPart(rank, pieces, fingerprint))


@dataclass(frozen=True, slots=True)
class TensorCut:
    """The part of a tensor that a rank has: these indices of one axis, one behind the other."""

    axis: int
    parts: tuple[range, ...]


def cuts_of(checkpoint: Checkpoint, rank: Rank) -> dict[str, TensorCut]:
    """What a rank has of each tensor of a whole model that is cut, by name."""
    return dict(_Cuts(checkpoint, rank).all())


def config_of_rank(config: ModelConfig, rank: Rank) -> ModelConfig:
    """Says of what size the part of a rank is."""
    ranks, number = rank.ranks, rank.number

    def size(total: int) -> int:
        return len(share(total, ranks, number))

    experts = config.experts
    if experts is not None:
        inner, shared = len(inner_of_rank(experts, rank)), size(experts.shared_size) if experts.shared_size else 0
        experts = replace(experts, intermediate_size=inner, shared_size=shared, held=_held(experts, rank))
    return replace(
        config,
        vocab_size=size(config.vocab_size),
        intermediate_size=size(config.intermediate_size),
        n_heads=len(heads_of_rank(config.n_heads, ranks, number)),
        n_kv_heads=len(heads_of_rank(config.n_kv_heads, ranks, number)),
        tied=False,
        experts=experts,
    )


def expert_owners(experts: Experts, rank: Rank, layer: int) -> list[list[int]]:
    """For each expert of a layer, the groups of ranks that have it, growing."""
    each = experts.count // rank.expert_groups
    owners = [[expert // each] for expert in range(experts.count)]
    for group, copied in enumerate(rank.copies[layer] if rank.copies else ()):
        for expert in copied:
            owners[expert].append(group)
    return [sorted(groups) for groups in owners]


def _held(experts: Experts, rank: Rank) -> tuple[tuple[HeldExpert, ...], ...]:
    """By layer, those that a rank has."""
    own = rank.number // rank.beside
    return tuple(
        tuple(
            HeldExpert(expert, groups.index(own), len(groups))
            for expert, groups in enumerate(expert_owners(experts, rank, layer))
            if own in groups
        )
        for layer in range(len(experts.layers))
    )


def inner_of_rank(experts: Experts, rank: Rank) -> range:
    """What a rank has of the inner size of each expert."""
    return share(experts.intermediate_size, rank.beside, rank.number % rank.beside)


_Named = tuple[str, TensorCut]


class _Cuts:
    """Of the tensors that are cut, with their names."""

    def __init__(self, checkpoint: Checkpoint, rank: Rank) -> None:
        self._tensors = checkpoint.tensors
        self._config = checkpoint.config
        self._names = layer_names(checkpoint.config)
        self._rank = rank

    def all(self) -> Iterator[_Named]:
        config = self._config
        yield HEAD, TensorCut(0, (self._share(config.vocab_size),))
        for layer in self._rank.layers or range(config.n_layers):
            prefix = f"model.layers.{layer}."
            yield from self._attention(prefix)
            yield from self._feed_forward(prefix, layer)

    def _share(self, total: int) -> range:
        return share(total, self._rank.ranks, self._rank.number)

    def _heads(self, total: int) -> range:
        return heads_of_rank(total, self._rank.ranks, self._rank.number)

    def _attention(self, prefix: str) -> Iterator[_Named]:
        config, names, latent = self._config, self._names, self._config.latent
        queries = _wide(self._heads(config.n_heads), config.head_dim)
        if latent is None or names.latent is None:
            kept = _wide(self._heads(config.n_kv_heads), config.head_dim)
            sizes = [heads * config.head_dim for heads in (config.n_heads, config.n_kv_heads, config.n_kv_heads)]
            yield from self._rows(prefix, names.qkv, sizes, (queries, kept, kept))
            yield from self._columns(f"{prefix}{names.out}.weight", 1, (queries,))
            return
        asked = names.qkv[0] if latent.query_rank is None else names.latent.query
        own = self._heads(config.n_heads)
        yield from self._rows(prefix, (asked,), (config.n_heads * config.head_dim,), (queries,))
        both = latent.plain_dim + latent.value_dim
        yield from self._rows(prefix, (names.latent.keys_values,), (config.n_heads * both,), (_wide(own, both),))
        yield from self._columns(f"{prefix}{names.out}.weight", 1, (_wide(own, latent.value_dim),))

    def _feed_forward(self, prefix: str, layer: int) -> Iterator[_Named]:
        names, experts = self._names, self._config.experts
        if experts is None or not experts.layers[layer]:
            inner = self._config.intermediate_size
            yield from self._block(prefix, names.gate_up, names.down, inner, self._share(inner))
            return
        if experts.shared_size:
            own = self._share(experts.shared_size)
            yield from self._block(prefix, names.shared_gate_up, names.shared_down, experts.shared_size, own)
        inner, own = experts.intermediate_size, inner_of_rank(experts, self._rank)
        if names.all_gate_up is not None and names.all_down is not None:
            ups = range(inner + own.start, inner + own.stop)
            yield from self._columns(f"{prefix}{names.all_gate_up}", 2, (own, ups))
            yield from self._columns(f"{prefix}{names.all_down}", 1, (own,))
            return
        for expert, _, _ in _held(experts, self._rank)[layer]:
            gate_up = [name.format(expert) for name in names.expert_gate_up]
            yield from self._block(prefix, gate_up, names.expert_down.format(expert), inner, own)

    def _block(self, prefix: str, gate_up: Sequence[str], down: str, inner: int, own: range) -> Iterator[_Named]:
        yield from self._rows(prefix, gate_up, (inner, inner), (own, own))
        yield from self._columns(f"{prefix}{down}.weight", 1, (own,))

    def _rows(
        self, prefix: str, names: Sequence[str], sizes: Sequence[int], parts: Sequence[range]
    ) -> Iterator[_Named]:
        """Of matrices one above the other, and of their biases: each has a name of its own, or all have one."""
        if len(names) < len(parts):
            begins = [0, *accumulate(sizes)]
            moved = [range(at + part.start, at + part.stop) for at, part in zip(begins, parts, strict=False)]
            named = [(names[0], moved)]
        else:
            named = [(name, [part]) for name, part in zip(names, parts, strict=True)]
        for name, own in named:
            for whole in (f"{prefix}{name}.weight", f"{prefix}{name}.bias"):
                if whole in self._tensors:
                    yield from self._columns(whole, 0, own)

    def _columns(self, name: str, axis: int, parts: Sequence[range]) -> Iterator[_Named]:
        yield name, TensorCut(axis, tuple(parts))


def _wide(heads: range, width: int) -> range:
    return range(heads.start * width, heads.stop * width)
