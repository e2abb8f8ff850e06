"""A Llama or Mixtral checkpoint as a GGUF file, for llama.cpp. Runs where the `gguf` package is.

The tokenizer is a stand-in of the right size: prompts come as token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
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
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
_KINDS = {"bfloat16": gguf.GGMLQuantizationType.BF16, "int8": gguf.GGMLQuantizationType.Q8_0}
_KINDS |= {"int4": gguf.GGMLQuantizationType.Q4_0}
_FILE_TYPES = {"bfloat16": gguf.LlamaFileType.MOSTLY_BF16, "int8": gguf.LlamaFileType.MOSTLY_Q8_0}
_FILE_TYPES |= {"int4": gguf.LlamaFileType.MOSTLY_Q4_0}


def write(checkpoint: Path, file: Path, kind: str) -> None:
    """Writes `file` whole or not at all. `kind` is bfloat16 (the same numbers), int8 (q8_0) or int4 (q4_0, and
    q8_0 for the embedding, which is the last matrix too: as our engine has it)."""
    config = json.loads((checkpoint / "config.json").read_text())
    part = file.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    _describe(writer, config, kind)
    for name, data in _named(checkpoint, config):
        exact = data.ndim == 1 or "ffn_gate_inp" in name  # llama.cpp wants routers in float32
        wanted = gguf.GGMLQuantizationType.F32 if exact else _KINDS[kind]
        if kind == "int4" and name == "token_embd.weight":
            wanted = _KINDS["int8"]
        if wanted is gguf.GGMLQuantizationType.BF16:
            writer.add_tensor(name, data.view(np.uint8), raw_dtype=wanted)
        else:
            writer.add_tensor(name, gguf.quants.quantize(_floats(data), wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(file)


def _named(checkpoint: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """llama.cpp's names and tensors; those of a layer's experts are one."""
    experts: dict[str, list[np.ndarray[Any, Any]]] = {}
    for name, bits in tensors(checkpoint / "model.safetensors"):
        if ".experts." not in name:
            yield _renamed(name), _ordered(name, bits, config)
            continue
        _, _, number, _, _, _, own, _ = name.split(".")
        whole = f"blk.{number}.{_EXPERTS[own]}.weight"
        so_far = experts.setdefault(whole, [])
        so_far.append(bits)  # they are stored in the order of their numbers
        if len(so_far) == config["num_local_experts"]:
            yield whole, np.stack(experts.pop(whole))


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
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
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
