"""Which models the kernels of a CPU compute, and in which kinds of weights: asked before anything is loaded."""

from __future__ import annotations

from penstock.checkpoint import ModelConfig


def misfit(config: ModelConfig) -> str | None:
    """Why packed matrices can't compute this model, so that torch has to; None when they can."""
    if config.experts is not None:
        return "there are no kernels for experts"
    for name, size in (("hidden_size", config.hidden_size), ("intermediate_size", config.intermediate_size)):
        if size % 2:
            return f"the kernels read inputs in pairs, and {name} is {size}"
    return None


def refusal(config: ModelConfig, dtype: str, *, lossless: bool) -> str | None:
    """Why a CPU can't keep this model's weights so, with the kinds that it can; None when it can.

    float32 and bfloat16 always work: where the kernels don't fit, torch computes.
    """
    if dtype == "int8" and config.experts is not None:
        return "dtype int8 does not work on a CPU for a model with experts: use bfloat16 or float32"
    reason = misfit(config)
    if lossless and reason is not None:
        return f"weights can't be lossless for this model, because {reason}: use plain"
    return None
