"""A Llama checkpoint as a GGUF file, for llama.cpp. Runs where the `gguf` package is.

The tokenizer is a stand-in of the right size: prompts come as token ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from loadtest.peers.safetensors_file import tensors

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_KINDS = {"bfloat16": gguf.GGMLQuantizationType.BF16, "int8": gguf.GGMLQuantizationType.Q8_0}
_FILE_TYPES = {"bfloat16": gguf.LlamaFileType.MOSTLY_BF16, "int8": gguf.LlamaFileType.MOSTLY_Q8_0}


def write(checkpoint: Path, file: Path, kind: str) -> None:
    """Writes `file` whole or not at all. `kind` is bfloat16 (the same numbers) or int8 (q8_0)."""
    config = json.loads((checkpoint / "config.json").read_text())
    part = file.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    _describe(writer, config, kind)
    for name, bits in tensors(checkpoint / "model.safetensors"):
        wanted = gguf.GGMLQuantizationType.F32 if bits.ndim == 1 else _KINDS[kind]
        data = _ordered(name, bits, config)
        if wanted is gguf.GGMLQuantizationType.BF16:
            writer.add_tensor(_renamed(name), data.view(np.uint8), raw_dtype=wanted)
        else:
            writer.add_tensor(_renamed(name), gguf.quants.quantize(_floats(data), wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(file)


def _describe(writer: Any, config: dict[str, Any], kind: str) -> None:
    writer.add_name(f"random {config['hidden_size']}")
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    words = [f"<{number}>" for number in range(config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_token_merges(["< 0"])
    if config["bos_token_id"] is not None:
        writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _renamed(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, number, middle = name.removesuffix(".weight").split(".", 3)
    return f"blk.{number}.{_NAMES[middle]}.weight"


def _ordered(name: str, bits: np.ndarray[Any, Any], config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """llama.cpp turns neighbouring rows of a head together, Hugging Face's rows half a head apart."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    count = next((heads[part] for part in heads if part in name), None)
    if count is None:
        return bits
    rows, columns = bits.shape
    halves = bits.reshape(count, 2, rows // count // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def _floats(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """float32 of bfloat16's bits: they are its upper half."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
