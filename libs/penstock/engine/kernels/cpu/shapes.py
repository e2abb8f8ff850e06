"""Says which models the kernels of a CPU compute, before anything is loaded."""

from __future__ import annotations

from penstock.checkpoint import ModelConfig


def misfit(config: ModelConfig) -> str | None:
    """Why the kernels can't compute this model, so that torch has to; None when they can."""
    sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
    if config.experts is not None:
        sizes["moe_intermediate_size"] = config.experts.intermediate_size
    if config.latent is not None:
        sizes["q_lora_rank"] = config.latent.query_rank or 0
        sizes["kv_lora_rank"] = config.latent.rank
        sizes["qk_nope_head_dim"] = config.latent.plain_dim
        sizes["num_attention_heads times v_head_dim"] = config.n_heads * config.latent.value_dim
    for name, size in sizes.items():
        if size % 2:
            return f"the kernels read inputs in pairs, and {name} is {size}"
    return None
