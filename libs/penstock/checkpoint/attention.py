"""What the attention of a model keeps of each token, and what tells a family's attention from the usual one."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.checkpoint.reading import Reader


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024): a token's keys and values of all heads are made from one vector
    of `rank` numbers, and one rotated key is common to all heads. Only these two are kept."""

    rank: int
    query_rank: int | None
    """Queries are made from a vector of so many numbers; None: from the hidden state."""
    plain_dim: int
    """Dimensions of a head's query and key that say nothing about position; the rotated ones follow."""
    value_dim: int
    """Of a head's value."""


@dataclass(frozen=True, slots=True)
class KvForm:
    """What a layer keeps of a token: `planes` rows of [heads, width] numbers.

    Two planes are keys and values of `heads` heads. One plane is what both are made from: see Latent.
    """

    planes: int
    heads: int
    width: int


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries at position p are multiplied by 1 + strength * ln(1 + floor((p + 1) / tokens)) in layers that rotate
    nothing, so that attention stays sharp in long texts (Llama 4; Nakanishi, 2025)."""

    strength: float
    tokens: int


def parse_latent(read: Reader) -> tuple[Latent, int]:
    """(the latent form, the dimensions that turn). Raises CheckpointError."""
    # Absent means the class's default; null means that queries are not made from a vector of their own.
    query = None if read.values.get("q_lora_rank", 1536) is None else read.integer("q_lora_rank", 1536)
    turned = read.integer("qk_rope_head_dim", 64)
    if turned % 2:
        raise read.fail(f"qk_rope_head_dim {turned} is odd; the rotation needs pairs")
    latent = Latent(
        rank=read.integer("kv_lora_rank", 512),
        query_rank=query,
        plain_dim=read.integer("qk_nope_head_dim", 128),
        value_dim=read.integer("v_head_dim", 128),
    )
    return latent, turned
