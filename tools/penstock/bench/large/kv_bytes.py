"""What a token's KV takes with latent attention, beside grouped heads: of the blocks that an engine makes.

The widths are published ones: DeepSeek V3's latent vector of 512 numbers and 64 rotated ones, and 8 heads of 128 keys
and values, as Llama 3 and Qwen3 have in their large models. What a layer keeps depends on nothing else, so the rest of
both models is tiny.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.bench.harness import Figure, figure
from penstock.checkpoint import inspect
from penstock.engine.config import EngineConfig
from penstock.engine.forward.runner import Runner
from penstock.testing.checkpoints import TINY_DEEPSEEK, TinyModel, write_checkpoint

_LAYERS = 4
_MODELS = {
    "latent": TinyModel(
        architecture=TINY_DEEPSEEK.architecture,
        layers=_LAYERS,
        extra={**TINY_DEEPSEEK.extra, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128},
    ),
    "grouped": TinyModel(layers=_LAYERS, heads=8, kv_heads=8, head_dim=128),
}


async def kv_figures(quick: bool) -> Sequence[Figure]:
    """Runs the part."""
    found = {name: await asyncio.to_thread(_token_bytes, tiny) for name, tiny in _MODELS.items()}
    ratio = found["latent"] / found["grouped"]
    return [
        figure("mla_kv_bytes_vs_gqa", [ratio], "x", "8 heads of 128 keys and values", 1.0, lower_is_better=True),
        *(figure(f"kv_bytes_{name}", [found[name] / _LAYERS], "B", "a token's, in a layer") for name in _MODELS),
    ]


def _token_bytes(tiny: TinyModel) -> float:
    with TemporaryDirectory() as directory:
        model = write_checkpoint(Path(directory) / "model", tiny)
        config = EngineConfig(model, dtype="bfloat16", kv_pool_tokens=64)
        return Runner(inspect(model), config).memory.block_bytes / config.block_size
