"""Models that say what a small one says, and read as many weights as a large one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_DOWN = "mlp.down_proj.weight"


def bound(model: Path, parameters: int, directory: Path) -> Path:
    """A checkpoint with about `parameters` parameters under `directory`, made when it is missing: that of `model`, with
    wider feed-forward layers. What is new in them is multiplied by zero in the end, so the model's tokens are the same,
    and so is how often a draft is right; a step costs what reading that many weights costs."""
    place = directory / f"{model.name}-{parameters // 1_000_000}m"
    if (place / "config.json").exists():
        return place
    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    missing = parameters - sum(weight.numel() for weight in weights.values())
    more = max(0, missing // (3 * config["hidden_size"] * config["num_hidden_layers"]) // 32 * 32)
    draw = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if name.endswith(("mlp.gate_proj.weight", "mlp.up_proj.weight")):
            new = torch.randn(more, weight.shape[1], generator=draw) * float(weight.float().std())
            weights[name] = torch.cat([weight, new.to(weight.dtype)])
        elif name.endswith(_DOWN):
            weights[name] = torch.cat([weight, weight.new_zeros(weight.shape[0], more)], dim=1)
    shutil.copytree(model, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    config["intermediate_size"] += more
    (place / "config.json").write_text(json.dumps(config, indent=2))  # last: the checkpoint is whole
    return place
