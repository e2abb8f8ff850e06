"""The settings of rotary position embeddings, in both spellings: `rope_parameters` (newer), and `rope_theta` with
`rope_scaling` (older)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from penstock.checkpoint.families import Family
from penstock.checkpoint.reading import Reader
from penstock.checkpoint.windows import FULL, SLIDING

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
"""Supported for every family; only Phi has longrope."""


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
    """Multiplies cosine and sine (yarn, longrope)."""
    truncate: bool = True
    factors: tuple[float, ...] = ()
    """Each pair's frequency is divided by its own (longrope)."""
    interleaved: bool = False
    """Dimensions 2 i and 2 i + 1 turn together, instead of i and i + dim / 2."""
    sections: tuple[int, ...] = ()
    """So many pairs turn by the place in time, the next ones by that among the rows of a picture, the rest by that
    among its columns (Qwen2-VL, Wang et al., 2024); empty: all by one position."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """How a model encodes positions."""

    rope: Rope
    local_rope: Rope | None
    """Of layers with a window, where it is another one (Gemma 3)."""
    rotary_dim: int
    """Dimensions of a head that turn; the rest say nothing about position."""
    max_positions: int
    sharpness: float = 1.0
    """Scores are multiplied by it (DeepSeek)."""


def parse_rotation(read: Reader, family: Family, head_dim: int, context: int | None) -> Rotation:
    """`context`: the tokens that the caller wants to serve, see `inspect`."""
    longest = read.integer("max_position_embeddings")
    if family.local_rope:
        rope, local = _by_layer_type(read, family, longest)
        return Rotation(rope, local, head_dim, longest)
    settings = _settings(read)
    rotary_dim = _rotary_dim(read, settings, head_dim) if family.partial_rotary else head_dim
    if not family.partial_rotary:
        _whole_heads(read, settings)
    theta = settings.number("rope_theta", read.number("rope_theta", family.rope_theta))
    kind = _kind(settings)
    if family.spatial and kind == "mrope":  # the name of the sections, not of a rotation
        kind = "default"
    if family.partial_rotary and kind != "default":
        return _longrope(read, settings, kind, theta, rotary_dim=rotary_dim, context=context)
    original = _original(read, _original(settings, longest))  # outside of the settings it has the last word
    rope = _rope(settings, kind, theta, original)
    if family.spatial:
        rope = replace(rope, sections=_sections(settings, rotary_dim))
    if family.interleaved and read.flag("rope_interleave", True):
        rope = replace(rope, interleaved=True)
    return Rotation(rope, None, rotary_dim, longest, _sharpness(settings, kind) if family.latent else 1.0)


def _settings(read: Reader) -> Reader:
    found = read.values.get("rope_scaling") or read.values.get("rope_parameters") or {}  # in this order
    settings = read.inner(_object(read, found))
    if FULL in settings.values or SLIDING in settings.values:
        raise read.fail(f"rope_parameters by layer type ({FULL}, {SLIDING}) are not supported with this family")
    return settings


def _by_layer_type(read: Reader, family: Family, longest: int) -> tuple[Rope, Rope]:
    """Newer: rope_parameters holds one object for each kind of layer. Older: rope_scaling is of the full layers."""
    both = _object(read, read.values.get("rope_parameters") or {})
    if both and not {FULL, SLIDING} >= both.keys():
        raise read.fail(f"rope_parameters must hold {FULL} and {SLIDING} and nothing else, not {sorted(both)}")
    scaling = _object(read, read.values.get("rope_scaling") or {})
    full = read.inner({**_object(read, both.get(FULL) or {}), **scaling})
    local = read.inner(_object(read, both.get(SLIDING) or {}))
    full_theta = full.number("rope_theta", read.number("rope_theta", family.rope_theta))
    local_theta = local.number("rope_theta", read.number("rope_local_base_freq", 10000.0))
    _whole_heads(read, full, local)
    return (
        _rope(full, _kind(full), full_theta, _original(full, longest)),
        _rope(local, _kind(local), local_theta, _original(local, longest)),
    )


def _object(read: Reader, found: object) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise read.fail(f"the rope settings must be an object, not {found!r}")
    return found


def _original(settings: Reader, default: int) -> int:
    return settings.integer("original_max_position_embeddings", default)


def _kind(settings: Reader) -> Any:
    return settings.values.get("rope_type", settings.values.get("type", "default"))


def _sections(settings: Reader, rotary_dim: int) -> tuple[int, ...]:
    found = settings.values.get("mrope_section", [16, 24, 24])
    whole = isinstance(found, list) and len(found) == 3 and all(type(one) is int and one >= 0 for one in found)
    if not whole or 2 * sum(found) != rotary_dim:
        what = f"mrope_section {found!r} must be three numbers of pairs, {rotary_dim // 2} together"
        raise settings.fail(what)
    return tuple(found)


def _whole_heads(*places: Reader) -> None:
    for place in places:
        place.only("partial_rotary_factor", 1.0, 1.0, None)


def _rotary_dim(read: Reader, settings: Reader, head_dim: int) -> int:
    share = settings.number("partial_rotary_factor", read.number("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * share)
    if share > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise read.fail(
            f"partial_rotary_factor {share} turns {rotary_dim} of {head_dim} dimensions: "
            f"it must be an even number, 2 to {head_dim}"
        )
    return rotary_dim


def _rope(settings: Reader, kind: Any, theta: float, original: int) -> Rope:
    if kind == "dynamic":
        reason = "it rotates by the length of the whole text, so that no block could be reused"
        raise settings.fail(f"rope type 'dynamic' is not supported: {reason}")
    if kind not in ROPE_KINDS:
        raise settings.fail(f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}")
    if kind == "default":
        return Rope(theta=theta)
    factor = settings.number("factor")
    if kind == "linear":
        return Rope(kind, theta, factor)
    if kind == "llama3":
        low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
        if low > high:
            raise settings.fail(f"low_freq_factor {low} must not be above high_freq_factor {high}")
        return Rope(kind, theta, factor, original, low, high)
    return Rope(
        kind,
        theta,
        factor,
        original,
        beta_fast=settings.number("beta_fast", 32.0),
        beta_slow=settings.number("beta_slow", 1.0),
        attention_factor=_yarn_attention(settings, factor),
        truncate=settings.flag("truncate", True),
    )


def _yarn_attention(settings: Reader, factor: float) -> float:
    """How much longer contexts sharpen attention; equation 22 of the YaRN paper (Peng et al., 2023)."""

    if settings.values.get("attention_factor") is not None:
        return settings.number("attention_factor")
    if settings.values.get("mscale") and settings.values.get("mscale_all_dim"):
        all_dim = settings.number("mscale_all_dim")
        return _temperature(factor, settings.number("mscale")) / _temperature(factor, all_dim)
    return _temperature(factor, 1.0)


def _temperature(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _sharpness(settings: Reader, kind: Any) -> float:
    """DeepSeek's models sharpen all dimensions of queries and keys, those that do not turn too."""
    if kind == "default" or not settings.values.get("mscale_all_dim"):
        return 1.0
    return _temperature(settings.number("factor"), settings.number("mscale_all_dim")) ** 2


def _longrope(
    read: Reader, settings: Reader, kind: Any, theta: float, *, rotary_dim: int, context: int | None
) -> Rotation:
    """LongRoPE (Ding et al., 2024): one set of factors for texts up to the original context, one for longer ones.

    Taken by the length of each text, as published, KV of a prefix would change when the text outgrows the original
    context. So an engine takes one set for all: the short one and the original context, unless the caller asks for
    a longer one.
    """
    if kind not in ("longrope", "su", "yarn"):  # the two other names are those of early releases
        raise read.fail(f"rope type {kind!r} is not supported with this family; supported are default, longrope")
    longest, original = read.integer("max_position_embeddings"), read.integer("original_max_position_embeddings", 4096)
    short = settings.numbers("short_factor", rotary_dim // 2)
    long = settings.numbers("long_factor", rotary_dim // 2)
    stretched = context is not None and min(context, longest) > original
    factor = settings.number("factor", longest / original)
    recommended = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(max(2, original)))
    rope = Rope(
        "longrope",
        theta,
        factor,
        original,
        attention_factor=settings.number("attention_factor", recommended),
        factors=long if stretched else short,
    )
    return Rotation(rope, None, rotary_dim, longest if stretched else min(longest, original))
