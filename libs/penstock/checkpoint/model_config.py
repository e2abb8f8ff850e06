"""config.json as the engine understands it.

All families share one decoder; what tells them apart is a handful of switches, which `ModelConfig` spells out.
A switch that this engine does not implement is refused by name rather than ignored: a model that runs with one
feature missing answers with confident nonsense.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint.attention import KvForm, Latent, Temperature, parse_latent
from penstock.checkpoint.experts import Experts, parse_experts
from penstock.checkpoint.families import FAMILIES, SUPPORTED, AttentionBias, Family, Windows
from penstock.checkpoint.files import Json
from penstock.checkpoint.reading import Reader
from penstock.checkpoint.rope import Rope, parse_rotation
from penstock.checkpoint.windows import parse_windows, unrotated_layers

_MAX_LAYERS = 10_000


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
    """Leading dimensions of a head that the rotation turns; with `latent`, the last ones."""
    windows: tuple[int | None, ...]
    """By layer: the tokens that a row looks at, its own included; None: all up to its own. See `chunked`."""
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
    latent: Latent | None = None
    chunked: bool = False
    """Windows do not slide: texts are cut into chunks of so many tokens, and a row looks at its own chunk (Llama 4)."""
    unrotated: tuple[int, ...] = ()
    """Layers without positions."""
    key_norm: bool = False
    """Queries and keys are RMS-normalised behind the rotation, without weights, where there is one (Llama 4)."""
    temperature: Temperature | None = None
    predictors: int = 0
    """Layers behind the last that predict further tokens (DeepSeek-V3); the decoder leaves them alone."""

    @property
    def kv(self) -> KvForm:
        """What each layer keeps of a token."""
        if self.latent is not None:
            return KvForm(1, 1, self.latent.rank + self.rotary_dim)
        return KvForm(2, self.n_kv_heads, self.head_dim)


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
    latent, head_dim, turned = _heads(read, family, max(1, hidden // heads))
    kv_heads = heads if latent is not None else read.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise read.fail(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    layers = read.integer("num_hidden_layers")
    if layers > _MAX_LAYERS:
        raise read.fail(f"num_hidden_layers must be at most {_MAX_LAYERS}, not {layers}")
    rotation = parse_rotation(read, family, turned, context)
    biased = family.attention_bias is AttentionBias.CONFIGURED and read.flag("attention_bias", False)
    scale = (read.number("query_pre_attn_scalar", 256) if family.gemma else head_dim) ** -0.5
    llama_4 = family.windows is Windows.CHUNKS
    return ModelConfig(
        architecture=architecture,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer(family.dense_size, family.absent.get(family.dense_size)),
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
        attention_scale=scale * rotation.sharpness,
        local_rope=rotation.local_rope,
        attention_softcap=_attention_softcap(read, family),
        logit_softcap=read.number_or_null("final_logit_softcapping", family.logit_softcap) if family.gemma else None,
        embedding_scale=hidden**0.5 if family.gemma else 1.0,
        activation="gelu_tanh" if family.gemma else "silu",
        norm_offset=family.gemma,
        post_norms=family.gemma,
        experts=parse_experts(read, family, layers),
        latent=latent,
        chunked=llama_4,
        unrotated=unrotated_layers(read, layers) if llama_4 else (),
        key_norm=llama_4 and read.flag("use_qk_norm", True),
        temperature=_temperature(read) if llama_4 else None,
        predictors=read.count("num_nextn_predict_layers", 0) if latent is not None else 0,
    )


def _heads(read: Reader, family: Family, usual: int) -> tuple[Latent | None, int, int]:
    """(the latent form, dimensions of a query's head, how many of them turn)."""
    if family.latent:
        latent, turned = parse_latent(read)
        return latent, latent.plain_dim + turned, turned
    head_dim = read.integer("head_dim", family.head_dim or usual)
    if head_dim % 2:
        raise read.fail(f"head_dim {head_dim} is odd; the rotation needs pairs")
    return None, head_dim, head_dim


def _temperature(read: Reader) -> Temperature | None:
    if not read.flag("attn_temperature_tuning", True):
        return None
    return Temperature(read.number("attn_scale", 0.1), read.integer("floor_scale", 8192))


def _architecture(read: Reader) -> str:
    names = read.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise read.fail(f"architectures must name one architecture, not {names!r}")
    if names[0] not in SUPPORTED:
        raise read.fail(f"{names[0]} is not supported; supported are {', '.join(SUPPORTED)}")
    return names[0]


def _refuse_unsupported(read: Reader, family: Family) -> None:
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
