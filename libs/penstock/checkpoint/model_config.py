"""config.json as the engine understands it.

Four families share one decoder; what tells them apart is a handful of switches, which `ModelConfig` spells out.
A switch that this engine does not implement is refused by name rather than ignored: a model that runs with one
feature missing answers with confident nonsense.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.checkpoint.errors import CheckpointError
from penstock.checkpoint.files import Json

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding. Fields that `kind` does not use keep their defaults."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cosine and sine (yarn)."""
    truncate: bool = True


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
    """Queries and keys are RMS-normalised per head before the rotation (Qwen3)."""


class _Reader:
    """Typed access to config.json; every complaint names the file and the key."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self.file = file
        self.values = values

    def fail(self, reason: str) -> CheckpointError:
        return CheckpointError(self.file, reason)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self.fail(f"{key} must be a positive integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(f"{key} must be a number, not {value!r}")
        if not math.isfinite(value) or value <= 0:
            raise self.fail(f"{key} must be a positive number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fail(f"{key} must be true or false, not {value!r}")
        return value


def parse_config(file: Path, values: Json) -> ModelConfig:
    """`values` (the content of config.json) as a ModelConfig, or CheckpointError."""
    read = _Reader(file, values)
    architecture = _architecture(read)
    _refuse_unsupported(read, architecture)
    heads, hidden = read.integer("num_attention_heads"), read.integer("hidden_size")
    kv_heads = read.integer("num_key_value_heads", heads)
    head_dim = read.integer("head_dim", 128 if architecture == "Qwen3ForCausalLM" else max(1, hidden // heads))
    if heads % kv_heads:
        raise read.fail(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise read.fail(f"head_dim {head_dim} is odd, the rotation needs pairs")
    max_positions = read.integer("max_position_embeddings")
    biased = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and read.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        n_layers=read.integer("num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=read.number("rms_norm_eps", 1e-6),
        rope=_rope(read, max_positions),
        max_positions=max_positions,
        tied=read.flag("tie_word_embeddings", False),
        qkv_bias=biased or architecture == "Qwen2ForCausalLM",
        o_bias=biased,
        mlp_bias=architecture == "LlamaForCausalLM" and read.flag("mlp_bias", False),
        qk_norm=architecture == "Qwen3ForCausalLM",
    )


def _architecture(read: _Reader) -> str:
    names = read.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise read.fail(f"architectures must name one architecture, not {names!r}")
    if names[0] not in SUPPORTED:
        raise read.fail(f"{names[0]} is not supported; supported are {', '.join(SUPPORTED)}")
    return names[0]


def _refuse_unsupported(read: _Reader, architecture: str) -> None:
    values = read.values
    if values.get("quantization_config"):
        raise read.fail("quantization_config: quantised weights are not supported")
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise read.fail(f"hidden_act {values['hidden_act']!r} is not supported, only silu")
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise read.fail("partial_rotary_factor other than 1.0 is not supported")
    window = _window(read, architecture)
    if window is not None and window < read.integer("max_position_embeddings"):
        raise read.fail(f"sliding_window {window} is shorter than max_position_embeddings: not supported")


def _window(read: _Reader, architecture: str) -> int | None:
    """The sliding window that some layer would use, or None when every layer attends to everything."""
    layer_types = read.values.get("layer_types")
    if isinstance(layer_types, list):
        unknown = {str(kind) for kind in layer_types} - {"full_attention", "sliding_attention"}
        if unknown:
            raise read.fail(f"layer_types {', '.join(sorted(unknown))} are not supported")
        if "sliding_attention" not in layer_types:
            return None
    elif architecture == "LlamaForCausalLM":
        return None
    elif architecture != "MistralForCausalLM":
        if not read.flag("use_sliding_window", False):
            return None
    elif "sliding_window" not in read.values:
        return 4096  # what this family means by saying nothing; saying null means none
    return None if read.values.get("sliding_window") is None else read.integer("sliding_window")


def _rope(read: _Reader, max_positions: int) -> Rope:
    """Both spellings: `rope_parameters` (newer) and `rope_theta` beside `rope_scaling` (older)."""
    scaling = read.values.get("rope_parameters") or read.values.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise read.fail(f"the rope settings must be an object, not {scaling!r}")
    inner = _Reader(read.file, scaling)
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise read.fail("partial_rotary_factor other than 1.0 is not supported")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = inner.number("rope_theta", read.number("rope_theta", 10000.0))
    if kind == "dynamic":
        raise read.fail("rope type 'dynamic' rotates by the length of the whole text, so no block could be reused")
    if kind not in ROPE_KINDS:
        raise read.fail(f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}")
    if kind == "default":
        return Rope(theta=theta)
    factor = inner.number("factor")
    if kind == "linear":
        return Rope(kind, theta, factor)
    original = inner.integer(
        "original_max_position_embeddings",
        read.values.get("original_max_position_embeddings") or max_positions,
    )
    if kind == "llama3":
        low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
        if low >= high:
            raise read.fail(f"low_freq_factor {low} must be below high_freq_factor {high}")
        return Rope(kind, theta, factor, original, low, high)
    return Rope(
        kind,
        theta,
        factor,
        original,
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        attention_factor=_yarn_attention(inner, factor),
        truncate=inner.flag("truncate", True),
    )


def _yarn_attention(inner: _Reader, factor: float) -> float:
    """How much longer contexts sharpen attention; equation 22 of the YaRN paper (Peng et al., 2023)."""

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if inner.values.get("attention_factor") is not None:
        return inner.number("attention_factor")
    if inner.values.get("mscale") and inner.values.get("mscale_all_dim"):
        return temperature(inner.number("mscale")) / temperature(inner.number("mscale_all_dim"))
    return temperature(1.0)
