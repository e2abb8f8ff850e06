"""config.json as the engine understands it.

All families share one decoder; what tells them apart is a handful of switches, which `ModelConfig` spells out.
A switch that this engine does not implement is refused by name rather than ignored: a model that runs with one
feature missing answers with confident nonsense.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint.families import FAMILIES, SUPPORTED, AttentionBias, Family, Routing
from penstock.checkpoint.files import Json
from penstock.checkpoint.reading import Reader
from penstock.checkpoint.rope import Rope, parse_rotation
from penstock.checkpoint.windows import parse_windows

_MAX_LAYERS = 10_000


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


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the decoder needs to know about a model, and nothing else."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: Rope
    max_positions: int
    tied: bool
    """The output projection is the embedding."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Queries and keys are RMS-normalised per head before the rotation (Qwen3, Gemma 3)."""
    rotary_dim: int
    """Leading dimensions of a head that the rotation turns."""
    windows: tuple[int | None, ...]
    """By layer: the tokens that a row looks at, its own included; None: all up to its own."""
    attention_scale: float
    """Scores are products of queries and keys, times this."""
    local_rope: Rope | None = None
    """Of layers with a window, where it is another one (Gemma 3)."""
    attention_softcap: float | None = None
    """Scores s become cap * tanh(s / cap)."""
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    activation: str = "silu"
    """Of the feed-forward gate: silu or gelu_tanh."""
    norm_offset: bool = False
    """Norms multiply by 1 + weight (Gemma)."""
    post_norms: bool = False
    """What attention and feed-forward add is normalised first (Gemma)."""
    experts: Experts | None = None


def text_values(file: Path, values: Json) -> Json:
    """`values` (the content of config.json), for a model of text and more with those of its text part on top."""
    read = Reader(file, values)
    family = FAMILIES[_architecture(read)]
    if not family.text_part:
        return values
    text = values.get("text_config", {})
    if not isinstance(text, dict):
        raise read.fail(f"text_config must be an object, not {text!r}")
    return {**family.absent, **text, **values}


def parse_config(file: Path, values: Json, context: int | None = None) -> ModelConfig:
    """`values` (from `text_values`) as a ModelConfig, or CheckpointError; `context`: see `inspect`."""
    read = Reader(file, values)
    architecture = _architecture(read)
    family = FAMILIES[architecture]
    _refuse_unsupported(read, family)
    heads, hidden = read.integer("num_attention_heads"), read.integer("hidden_size")
    kv_heads = read.integer("num_key_value_heads", heads)
    head_dim = read.integer("head_dim", family.head_dim or max(1, hidden // heads))
    if heads % kv_heads:
        raise read.fail(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise read.fail(f"head_dim {head_dim} is odd; the rotation needs pairs")
    layers = read.integer("num_hidden_layers")
    if layers > _MAX_LAYERS:
        raise read.fail(f"num_hidden_layers must be at most {_MAX_LAYERS}, not {layers}")
    rotation = parse_rotation(read, family, head_dim, context)
    biased = family.attention_bias is AttentionBias.CONFIGURED and read.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=read.number("rms_norm_eps", family.rms_eps),
        rope=rotation.rope,
        max_positions=rotation.max_positions,
        tied=read.flag("tie_word_embeddings", family.tied),
        qkv_bias=biased or family.attention_bias is AttentionBias.INPUTS,
        o_bias=biased,
        mlp_bias=family.mlp_bias and read.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        rotary_dim=rotation.rotary_dim,
        windows=parse_windows(read, family, layers),
        attention_scale=(read.number("query_pre_attn_scalar", 256) if family.gemma else head_dim) ** -0.5,
        local_rope=rotation.local_rope,
        attention_softcap=_attention_softcap(read, family),
        logit_softcap=read.number_or_null("final_logit_softcapping", family.logit_softcap) if family.gemma else None,
        embedding_scale=hidden**0.5 if family.gemma else 1.0,
        activation="gelu_tanh" if family.gemma else "silu",
        norm_offset=family.gemma,
        post_norms=family.gemma,
        experts=_experts(read, family, layers),
    )


def _architecture(read: Reader) -> str:
    names = read.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise read.fail(f"architectures must name one architecture, not {names!r}")
    if names[0] not in SUPPORTED:
        raise read.fail(f"{names[0]} is not supported; supported are {', '.join(SUPPORTED)}")
    return names[0]


def _refuse_unsupported(read: Reader, family: Family) -> None:
    if read.values.get("quantization_config"):
        raise read.fail("quantization_config: quantised weights are not supported")
    if family.gemma:
        read.only("hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh")
        read.only("use_bidirectional_attention", None, False, None)
    else:
        read.only("hidden_act", "silu", "silu", "swish")


def _attention_softcap(read: Reader, family: Family) -> float | None:
    if family.attention_softcaps:
        return read.number_or_null("attn_logit_softcapping", family.attention_softcap)
    if family.gemma:
        read.only("attn_logit_softcapping", None, None)
    return None


def _experts(read: Reader, family: Family, layers: int) -> Experts | None:
    if family.routing is Routing.NONE:
        return None
    mixtral = family.routing is Routing.MIXTRAL
    count = _expert_count(read, 8 if mixtral else 128)
    per_token = read.integer("num_experts_per_tok", 2 if mixtral else 8)
    if per_token > count:
        raise read.fail(f"num_experts_per_tok {per_token} must not be more than the {count} experts")
    return Experts(
        count=count,
        per_token=per_token,
        intermediate_size=read.integer("intermediate_size" if mixtral else "moe_intermediate_size"),
        normalised=mixtral or read.flag("norm_topk_prob", False),
        layers=(True,) * layers if mixtral else _sparse_layers(read, layers),
    )


def _expert_count(read: Reader, usual: int) -> int:
    """Both names are in use, for either family."""
    counts = {read.integer(key) for key in ("num_experts", "num_local_experts") if read.values.get(key) is not None}
    if len(counts) > 1:
        raise read.fail(f"num_experts and num_local_experts must be the same number, not {sorted(counts)}")
    return counts.pop() if counts else usual


def _sparse_layers(read: Reader, layers: int) -> tuple[bool, ...]:
    dense = read.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < layers for layer in dense):
        raise read.fail(f"mlp_only_layers must be a list of layer numbers below {layers}, not {dense!r}")
    step = read.integer("decoder_sparse_step", 1)
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
