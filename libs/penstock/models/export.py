"""Writing a trained network as an ordinary Hugging Face model directory, and reading one back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from . import tokenizer as tokenizers_
from .net import Net, NetShape


def export(net: Net, tokenizer: Tokenizer, directory: Path) -> None:
    """Write weights in bfloat16, configuration, tokenizer and chat template into `directory`."""
    shape = net.shape
    tokenizers_.save(tokenizer, directory, shape.context)
    eos, pad = tokenizers_.IM_END, tokenizers_.END_OF_TEXT
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.epsilon,
        "rope_theta": shape.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "use_cache": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": eos, "pad_token_id": pad, "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    write_weights(directory, dict(net.named_parameters()))


def write_weights(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes the tensors to model.safetensors, whole or not at all; numbers in bfloat16."""
    stored = {n: t.detach().to("cpu", torch.bfloat16 if t.is_floating_point() else t.dtype) for n, t in tensors.items()}
    partial = directory / "model.safetensors.part"
    save_file({n: t.contiguous() for n, t in stored.items()}, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    os.replace(partial, directory / "model.safetensors")


def shape_of(config: Mapping[str, Any]) -> NetShape:
    """The shape that a config.json names."""
    return NetShape(
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        inner=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        vocabulary=config["vocab_size"],
        head=config["head_dim"],
        theta=config["rope_theta"],
        context=config["max_position_embeddings"],
        epsilon=config["rms_norm_eps"],
    )


def load(directory: Path) -> tuple[Net, Tokenizer]:
    """The network of a model directory, in float32, and its tokenizer."""
    config = json.loads((directory / "config.json").read_text())
    net = Net(shape_of(config))
    net.load_state_dict({n: t.float() for n, t in load_file(directory / "model.safetensors").items()})
    return net, tokenizers_.load(directory)
