"""Tiny random checkpoints: real directories of every supported family, made in milliseconds and without torch.

The weights are drawn wide enough that the next token depends on all earlier ones and is rarely close to a tie: a
single wrong byte of KV shows up as another text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.checkpoint.model_config import parse_config
from penstock.checkpoint.tensors import needed_tensors

SPECIALS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
"""Ids 256..259: the 256 byte tokens come first."""
EOS, END_OF_TURN = 257, 259
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyModel:
    """Describes the model to make. `extra` goes into config.json as it is."""

    architecture: str = "LlamaForCausalLM"
    vocab_size: int = 320
    hidden_size: int = 64
    intermediate_size: int = 96
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    max_positions: int = 1024
    tied: bool = False
    seed: int = 0
    shards: int = 1
    extra: dict[str, Any] = field(default_factory=dict)


TINY_DEEPSEEK = TinyModel(
    architecture="DeepseekV3ForCausalLM",
    vocab_size=260,
    seed=6,
    extra={
        "q_lora_rank": 32,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
)
IN_VECTORS = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 64,
}
DEEPSEEK_IN_VECTORS = replace(TINY_DEEPSEEK, intermediate_size=128, extra={**TINY_DEEPSEEK.extra, **IN_VECTORS})
"""The same in sizes that the C++ step takes."""
TINY_LLAMA_4 = TinyModel(
    architecture="Llama4ForCausalLM",
    vocab_size=260,
    layers=4,
    seed=7,
    extra={"intermediate_size_mlp": 96, "num_local_experts": 4, "attention_chunk_size": 40, "floor_scale": 32},
)


def write_checkpoint(directory: Path, tiny: TinyModel | None = None) -> Path:
    """Fills `directory` (made if missing) and returns it."""
    tiny = tiny or TinyModel()
    directory.mkdir(parents=True, exist_ok=True)
    config = _config(tiny)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, END_OF_TURN]}))
    (directory / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config()))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    write_tokenizer(directory / "tokenizer.json")
    _write_weights(directory, _weights(directory, tiny, config), tiny.shards)
    return directory


def _config(tiny: TinyModel) -> dict[str, Any]:
    return {
        "architectures": [tiny.architecture],
        "model_type": tiny.architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": tiny.vocab_size,
        "hidden_size": tiny.hidden_size,
        "intermediate_size": tiny.intermediate_size,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "head_dim": tiny.head_dim,
        "max_position_embeddings": tiny.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tiny.tied,
        "hidden_act": "silu",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": None,
        "bos_token_id": 256,
        "eos_token_id": EOS,
        **({"rope_scaling": _sections(tiny.head_dim)} if tiny.architecture.startswith("Qwen2_5_VL") else {}),
        **tiny.extra,
    }


def _sections(head_dim: int) -> dict[str, Any]:
    """Of a rotation by three places."""
    pairs = head_dim // 2
    time, rows = pairs // 4, (pairs - pairs // 4) // 2
    return {"type": "mrope", "mrope_section": [time, rows, pairs - time - rows]}


def _tokenizer_config() -> dict[str, Any]:
    return {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "tokenizer_class": "PreTrainedTokenizerFast"}


def write_tokenizer(file: Path) -> None:
    """One token per byte, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.save(str(file))


def _weights(
    directory: Path, tiny: TinyModel, config: dict[str, Any]
) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    random = np.random.default_rng(tiny.seed)
    needed = needed_tensors(parse_config(directory / "config.json", config))

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
        noise = random.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            return (1 + noise / 10).astype(np.float32)
        wide = "embed_tokens" in name and not tiny.tied
        scale = 0.2 if name.endswith(".bias") else 1.0 if wide else 2.0 / float(np.sqrt(shape[-1]))
        return (noise * scale).astype(np.float32)

    return {name: draw(name, shape) for name, shape in needed.items()}


def _write_weights(directory: Path, tensors: dict[str, np.ndarray[Any, np.dtype[np.float32]]], shards: int) -> None:
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    placement = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensor for at, (name, tensor) in enumerate(tensors.items()) if at % shards == shard}
        save_file(part, directory / file)
        placement.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": placement}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
