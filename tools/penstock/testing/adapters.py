"""Random LoRA adapters in the format of PEFT, and checkpoints into which they are merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from penstock.checkpoint import inspect, inspect_adapter
from penstock.checkpoint.tensors import layer_matrices

USUAL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: Path,
    model: Path,
    *,
    targets: tuple[str, ...] = USUAL,
    rank: int = 4,
    seed: int = 0,
    strength: float = 1.0,
    **settings: Any,
) -> Path:
    """An adapter of `model` in `directory`, which is made; `settings` go into adapter_config.json, as they are. What it
    adds to a matrix is `strength` as large as that."""
    directory.mkdir(parents=True)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": 2 * rank,
        "bias": "none",
        "target_modules": list(targets),
        "task_type": "CAUSAL_LM",
        **settings,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    checkpoint, tensors = inspect(model).config, {}
    for layer in range(checkpoint.n_layers):
        for name, (rows, columns) in layer_matrices(checkpoint, layer).items():
            if name.rsplit(".", 1)[-1] not in targets or ".experts." in name:
                continue
            module, own = f"base_model.model.model.layers.{layer}.{name}", _rank(config, f"layers.{layer}.{name}", rank)
            down = torch.randn(own, columns, generator=generator) / columns**0.5
            up = torch.randn(rows, own, generator=generator) * (strength / own**0.5)
            tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = down, up
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def _rank(config: dict[str, Any], name: str, usual: int) -> int:
    return next((own for end, own in config.get("rank_pattern", {}).items() if name.endswith(end)), usual)


def write_merged(directory: Path, model: Path, adapter: Path) -> Path:
    """A copy of `model`, of one file, whose matrices are W + scale * B A: computed with the scale that the
    configuration of PEFT means, by module."""
    shutil.copytree(model, directory)
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    added = load_file(adapter / "adapter_model.safetensors")
    for name, down in added.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        up, rank = added[name.replace("lora_A", "lora_B")], len(down)
        alphas = config.get("alpha_pattern", {}).items()
        alpha = next((own for end, own in alphas if module.endswith(end)), config["lora_alpha"])
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        whole = tensors[f"{module}.weight"]
        tensors[f"{module}.weight"] = (whole.double() + scale * (up.double() @ down.double())).to(whole.dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def fingerprint_of(adapter: Path, model: Path) -> str:
    """By which requests name it."""
    return inspect_adapter(adapter, inspect(model).config).fingerprint
