"""Feed-forward blocks of many experts, as config.json describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.checkpoint.families import Family, Routing
from penstock.checkpoint.reading import Reader


class HeldExpert(NamedTuple):
    """An expert of a layer that a process has, and which of the rows that have chosen it are computed there: those at
    positions that leave `turn` when they are divided by `copies`."""

    number: int
    turn: int = 0
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Experts:
    """Feed-forward blocks of which each token uses a few."""

    count: int
    per_token: int
    intermediate_size: int
    normalised: bool
    """The weights of a token's experts are made to sum to 1."""
    layers: tuple[bool, ...]
    """Which layers have experts; the others have one block for all tokens."""
    sigmoid: bool = False
    """Weights are sigmoids of the router's scores, each by itself, and not their softmax."""
    corrected: bool = False
    """Each expert has a bias that counts when a token chooses, and not in the weight (DeepSeek-V3)."""
    groups: int = 1
    """Experts stand in so many groups of equal size, ..."""
    groups_used: int = 1
    """... and a token chooses among those of so many groups: the ones whose two best are best together."""
    scaling: float = 1.0
    """Weights are multiplied by it."""
    shared_size: int = 0
    """Inner size of a block that all tokens go through as well; 0: there is none."""
    weighs_inputs: bool = False
    """The weight multiplies what goes into an expert instead of what comes out (Llama 4)."""
    held: tuple[tuple[HeldExpert, ...], ...] | None = None
    """By layer, those that this process has, their numbers growing; None: all."""

    def own(self, layer: int) -> Sequence[HeldExpert]:
        """Those of a layer that this process has."""
        return [HeldExpert(number) for number in range(self.count)] if self.held is None else self.held[layer]


def parse_experts(read: Reader, family: Family, layers: int) -> Experts | None:
    """None for a model without experts. Raises CheckpointError."""
    if family.routing is Routing.NONE:
        return None
    if family.routing is Routing.DEEPSEEK:
        return _deepseek(read, layers)
    if family.routing is Routing.LLAMA_4:
        return _llama_4(read, layers)
    mixtral = family.routing is Routing.MIXTRAL
    count = _count(read, 8 if mixtral else 128)
    return Experts(
        count=count,
        per_token=_per_token(read, 2 if mixtral else 8, count),
        intermediate_size=read.integer("intermediate_size" if mixtral else "moe_intermediate_size"),
        normalised=mixtral or read.flag("norm_topk_prob", False),
        layers=(True,) * layers if mixtral else _sparse_layers(read, layers),
    )


def _deepseek(read: Reader, layers: int) -> Experts | None:
    count = read.integer("n_routed_experts", 256)
    dense = read.count("first_k_dense_replace", 3)
    if dense >= layers:
        return None
    for key, usual in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        read.only(key, usual, usual)
    groups, used = read.integer("n_group", 8), read.integer("topk_group", 4)
    if count % groups or used > groups or (groups > 1 and count // groups < 2):
        raise read.fail(
            f"n_group {groups} and topk_group {used}: the {count} experts must stand in groups of one size, two or "
            "more in each, and no more groups can be used than there are"
        )
    inner = read.integer("moe_intermediate_size", 2048)
    return Experts(
        count=count,
        per_token=_per_token(read, 8, count // groups * used),
        intermediate_size=inner,
        normalised=read.flag("norm_topk_prob", True),
        layers=tuple(layer >= dense for layer in range(layers)),
        sigmoid=True,
        corrected=True,
        groups=groups,
        groups_used=used,
        scaling=read.number("routed_scaling_factor", 2.5),
        shared_size=inner * read.integer("n_shared_experts", 1),
    )


def _llama_4(read: Reader, layers: int) -> Experts | None:
    step, given = read.integer("interleave_moe_layer_step", 1), read.values.get("moe_layers")
    sparse = list(range(step - 1, layers, step)) if given is None else read.layer_numbers("moe_layers", layers)
    if not sparse:
        return None
    count, inner = read.integer("num_local_experts", 16), read.integer("intermediate_size")
    return Experts(
        count=count,
        per_token=_per_token(read, 1, count),
        intermediate_size=inner,
        normalised=False,
        layers=tuple(layer in sparse for layer in range(layers)),
        sigmoid=True,
        shared_size=inner,
        weighs_inputs=True,
    )


def _per_token(read: Reader, usual: int, most: int) -> int:
    per_token = read.integer("num_experts_per_tok", usual)
    if per_token > most:
        raise read.fail(f"num_experts_per_tok {per_token} must not be more than the {most} experts")
    return per_token


def _count(read: Reader, usual: int) -> int:
    """Both names are in use, for either family."""
    counts = {read.integer(key) for key in ("num_experts", "num_local_experts") if read.values.get(key) is not None}
    if len(counts) > 1:
        raise read.fail(f"num_experts and num_local_experts must be the same number, not {sorted(counts)}")
    return counts.pop() if counts else usual


def _sparse_layers(read: Reader, layers: int) -> tuple[bool, ...]:
    dense = read.layer_numbers("mlp_only_layers", layers)
    step = read.integer("decoder_sparse_step", 1)
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
