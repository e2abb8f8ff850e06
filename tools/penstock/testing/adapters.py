"""Random LoRA adapters in the format of PEFT, and checkpoints into which they are merged."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.checkpoint import ModelConfig, inspect, inspect_adapter, layer_names
from penstock.checkpoint.tensors import layer_matrices

USUAL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PREFIX = "base_model.model."


def write_adapter(
    directory: Path,
    model: Path,
    *,
    targets: tuple[str, ...] = USUAL,
    parameters: tuple[str, ...] = (),
    experts: bool = False,
    rank: int = 4,
    seed: int = 0,
    strength: float = 1.0,
    **settings: Any,
) -> Path:
    """An adapter of `model` in `directory`, which is made; `settings` go into adapter_config.json, as they are. What it
    adds to a matrix is `strength` as large as that. `experts`: targets name their matrices too, as modules.
    `parameters` are target_parameters: experts.gate_up_proj, experts.down_proj or gate.weight."""
    directory.mkdir(parents=True)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": 2 * rank,
        "bias": "none",
        "target_modules": list(targets),
        "target_parameters": list(parameters),
        "task_type": "CAUSAL_LM",
        **settings,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    checkpoint, tensors = inspect(model).config, dict[str, Tensor]()

    def add(module: str, name: str, shape: tuple[int, int], count: int = 1) -> None:
        """`name` is that by which patterns know it."""
        own, (rows, columns) = _by_pattern(config.get("rank_pattern", {}), name, rank), shape
        down = torch.randn(count * own, columns, generator=generator) / columns**0.5
        up = torch.randn(rows, count * own, generator=generator) * (strength / own**0.5)
        tensors[f"{_PREFIX}{module}.lora_A.weight"], tensors[f"{_PREFIX}{module}.lora_B.weight"] = down, up

    for layer in range(checkpoint.n_layers):
        for name, shape in layer_matrices(checkpoint, layer).items():
            if name.rsplit(".", 1)[-1] in targets and (experts or ".experts." not in name):
                add(module := f"model.layers.{layer}.{name}", module, shape)
        for parameter, (module, shape, count) in _parameters(checkpoint, layer, parameters).items():
            add(module, parameter, shape, count)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def _parameters(
    config: ModelConfig, layer: int, targets: tuple[str, ...]
) -> Mapping[str, tuple[str, tuple[int, int], int]]:
    """(the module that adapts it, its (rows, columns), how many of these it has) of each parameter, by its name: PEFT
    takes rows and columns as it finds them, and puts the module of the second around that of the first."""
    experts, hidden, found = config.experts, config.hidden_size, {}
    if experts is None or not experts.layers[layer]:
        return {}
    names, inner, prefix = layer_names(config), experts.intermediate_size, f"model.layers.{layer}."
    module = f"{prefix}{names.experts_module}"
    shapes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
    if names.all_gate_up is not None:
        shapes = {name: (columns, rows) for name, (rows, columns) in shapes.items()}
    chosen = [name for name in shapes if f"experts.{name}" in targets]
    for name in chosen:
        around = module if name == chosen[-1] else f"{module}.base_layer"
        found[f"{module}.{name}"] = around, shapes[name], experts.count
    if "gate.weight" in targets:
        router = f"{prefix}{names.router_module}"
        found[f"{router}.weight"] = router, (experts.count, hidden), 1
    return found


def _by_pattern(patterns: Mapping[str, Any], name: str, usual: Any) -> Any:
    return next((own for end, own in patterns.items() if re.fullmatch(rf"(.*\.)?({end})", name)), usual)


def write_merged(directory: Path, model: Path, adapter: Path) -> Path:
    """A copy of `model`, of one file, whose matrices are W + scale * B A: computed with the scale that the
    configuration of PEFT means, by module."""
    shutil.copytree(model, directory)
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors, checkpoint = load_file(directory / "model.safetensors"), inspect(model).config
    added = {
        name.removeprefix(_PREFIX): tensor for name, tensor in load_file(adapter / "adapter_model.safetensors").items()
    }

    def merge(module: str, name: str, matrix: str | None, count: int = 1) -> Tensor:
        """The difference [count, rows, columns]; without experts it is added to the `matrix`."""
        down, up = (added[f"{module}.lora_{which}.weight"].double() for which in "AB")
        rank = len(down) // count
        alpha = _by_pattern(config.get("alpha_pattern", {}), name, config["lora_alpha"])
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        by_expert = up.view(len(up), rank, count), down.view(count, rank, -1)
        more: Tensor = torch.einsum("o r e, e r i -> e o i", *by_expert) * scale
        if matrix is not None:
            _add(tensors, matrix, more[0])
        return more

    parameters = tuple(config.get("target_parameters") or ())
    for layer in range(checkpoint.n_layers):
        names, wrapped = layer_names(checkpoint), _parameters(checkpoint, layer, parameters)
        for name, (module, _, count) in wrapped.items():
            if count == 1:
                merge(module, name, f"model.layers.{layer}.{names.router}.weight")
                continue
            more, prefix = merge(module, name, None, count), f"model.layers.{layer}."
            if names.all_gate_up is not None:
                _add(tensors, name, more)
                continue
            own = names.expert_gate_up if name.endswith("gate_up_proj") else (names.expert_down,)
            for expert, both in enumerate(more):
                for part, of_one in zip(own, both.chunk(len(own)), strict=True):
                    _add(tensors, f"{prefix}{part.format(expert)}.weight", of_one)
        done = {module for module, _, _ in wrapped.values()}
        for name in list(added):
            module = name.removesuffix(".lora_A.weight")
            if module != name and module.startswith(f"model.layers.{layer}.") and module not in done:
                merge(module, module, f"{module}.weight")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _add(tensors: dict[str, Tensor], name: str, more: Tensor) -> None:
    whole = tensors[name]
    tensors[name] = (whole.double() + more).to(whole.dtype)


def fingerprint_of(adapter: Path, model: Path) -> str:
    """By which requests name it."""
    return inspect_adapter(adapter, inspect(model).config).fingerprint
