"""The models that are measured: shapes of real ones, with random weights."""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.checkpoint.model_config import parse_config
from penstock.checkpoint.tensors import needed_tensors
from penstock.testing.checkpoints import write_tokenizer

_DEVIATION = 0.02
"""Standard deviation of the weights, as in trained models: it spreads their exponents in the same way."""
_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(ABC):
    """A model with tied embeddings."""

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    max_positions: int = 32768

    @property
    @abstractmethod
    def own(self) -> dict[str, Any]:
        """What config.json says of the family and its sizes."""

    @property
    def config(self) -> dict[str, Any]:
        """What config.json says."""
        return {
            **self.own,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "bos_token_id": 256,
            "eos_token_id": 257,
            "torch_dtype": "bfloat16",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape(ModelShape):
    """A Llama, or, with experts, a Mixtral."""

    kv_heads: int
    head_dim: int
    intermediate: int
    experts: int = 0
    """In each layer, `intermediate` wide each; 0: one block for all tokens."""
    per_token: int = 2
    """Experts that a token uses, where there are some."""

    @property
    def kv_bytes(self) -> int:
        """One token's keys and values in bfloat16."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2

    @property
    def layer_parameters(self) -> int:
        """Weights in the matrices of one layer."""
        return self._attention_parameters + max(1, self.experts) * self._block_parameters

    @property
    def active_parameters(self) -> int:
        """Weights in the matrices that one token goes through, the last one included."""
        blocks = self.per_token if self.experts else 1
        return self.layers * (self._attention_parameters + blocks * self._block_parameters) + self.vocab * self.hidden

    @property
    def own(self) -> dict[str, Any]:
        """What config.json says of the family and its sizes."""
        family = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        experts: dict[str, Any] = {}
        if self.experts:
            family = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
            experts = {"num_local_experts": self.experts, "num_experts_per_tok": self.per_token, "sliding_window": None}
        return {
            **family,
            **experts,
            "intermediate_size": self.intermediate,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }

    @property
    def _attention_parameters(self) -> int:
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def _block_parameters(self) -> int:
        return 3 * self.hidden * self.intermediate


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekShape(ModelShape):
    """A DeepSeek V3: latent attention, and experts of which groups are chosen first, with a correction."""

    query_rank: int
    rank: int
    plain_dim: int
    turned_dim: int
    value_dim: int
    intermediate: int
    """Of the first layer, which has no experts."""
    experts: int
    """In each other layer, beside one for all tokens."""
    per_token: int
    groups: int
    groups_used: int
    expert_intermediate: int

    @property
    def own(self) -> dict[str, Any]:
        """What config.json says of the family and its sizes."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "intermediate_size": self.intermediate,
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.query_rank,
            "kv_lora_rank": self.rank,
            "qk_nope_head_dim": self.plain_dim,
            "qk_rope_head_dim": self.turned_dim,
            "v_head_dim": self.value_dim,
            "first_k_dense_replace": 1,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": self.per_token,
            "n_group": self.groups,
            "topk_group": self.groups_used,
            "moe_intermediate_size": self.expert_intermediate,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Shape(ModelShape):
    """A Llama 4: in each layer an expert of several, of whose input a sigmoid is the weight, and one for all tokens;
    three layers of four look at their own chunk of the text."""

    kv_heads: int
    head_dim: int
    experts: int
    expert_intermediate: int
    chunk: int = 8192

    @property
    def own(self) -> dict[str, Any]:
        """What config.json says of the family and its sizes."""
        return {
            "architectures": ["Llama4ForCausalLM"],
            "model_type": "llama4_text",
            "intermediate_size": self.expert_intermediate,
            "intermediate_size_mlp": self.expert_intermediate,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_local_experts": self.experts,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": self.chunk,
        }


BIG = LlamaShape(name="1b", layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocab=128256)
"""Llama-3.2-1B's."""
SMALL = LlamaShape(name="135m", layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152)

MIXED = LlamaShape(
    name="moe",
    layers=12,
    hidden=1024,
    heads=16,
    kv_heads=8,
    head_dim=64,
    intermediate=1536,
    vocab=96000,
    experts=16,
)
"""A thousand million parameters, of which a token uses a quarter; so have the next two."""
LATENT = DeepseekShape(
    name="deepseek",
    layers=12,
    hidden=1024,
    heads=32,
    query_rank=512,
    rank=512,
    plain_dim=64,
    turned_dim=64,
    value_dim=64,
    intermediate=4096,
    vocab=64000,
    experts=48,
    per_token=4,
    groups=8,
    groups_used=4,
    expert_intermediate=512,
)
"""What is kept of a token in a layer is as wide as DeepSeek V3's."""
CHUNKED = Llama4Shape(
    name="llama4",
    layers=12,
    hidden=1024,
    heads=16,
    kv_heads=4,
    head_dim=64,
    vocab=96000,
    experts=16,
    expert_intermediate=1408,
)


def checkpoint(shape: ModelShape, place: Path) -> Path:
    """A directory under `place` with the shape's weights in bfloat16, the same ones always; made when it is missing."""
    directory = place / shape.name
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / _FILE).exists():
        values = shape.config
        (directory / "config.json").write_text(json.dumps(values, indent=2))
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 257}))
        (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        write_tokenizer(directory / "tokenizer.json")
        part = directory / f"{_FILE}.{os.getpid()}"
        _write(part, needed_tensors(parse_config(directory / "config.json", values)))
        part.replace(directory / _FILE)
    return directory


def weight_bytes(directory: Path) -> int:
    """Bytes of the weights of a checkpoint made here, as they are stored."""
    return (directory / _FILE).stat().st_size


def _write(file: Path, needed: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file, one tensor after the other: the model need not fit into memory."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in needed.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in _draw(needed):
            stream.write(tensor.view(torch.uint8).numpy().data)


def _draw(needed: dict[str, tuple[int, ...]]) -> Iterator[torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    for name, shape in needed.items():
        noise = torch.empty(math.prod(shape)).normal_(0.0, _DEVIATION, generator=source)
        yield (noise + 1.0 if name.endswith("norm.weight") else noise).bfloat16()
