"""Refuses models, settings and requests that can never run here, before they begin, and names the wrong field."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from penstock.checkpoint import Checkpoint, Experts, ModelConfig, Rank, check_expert_groups, check_split
from penstock.engine.config import EngineSettings
from penstock.engine.errors import RequestRefused, RequestTooLong
from penstock.engine.kernels.cpu.shapes import misfit
from penstock.engine.kernels.groups import NOT_KEPT, keeps_stored
from penstock.engine.request import Request, SamplingParams
from penstock.runtime.config import ConfigError
from penstock.runtime.cores import available_cores

AnySettings = TypeVar("AnySettings", bound=EngineSettings)

MOST_BIASED = 1024
"""Tokens in one logit_bias."""
MOST_BAD_WORDS = 256
LONGEST_BAD_WORD = 256
"""Characters."""
MOST_BAD_CHARACTERS = 8192
"""Of all bad words together."""


@dataclass(frozen=True, slots=True)
class SamplingBound:
    """A range of a sampling parameter; both ends are allowed."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high  # false for a NaN


SAMPLING_BOUNDS = {
    "max_tokens": SamplingBound(1, 2**31 - 1),
    "min_tokens": SamplingBound(0, 2**31 - 1),
    "temperature": SamplingBound(0, 100),
    "top_k": SamplingBound(0, 2**31 - 1),
    "top_p": SamplingBound(0, 1),
    "min_p": SamplingBound(0, 1),
    "repetition_penalty": SamplingBound(0.01, 100),
    "presence_penalty": SamplingBound(-2, 2),
    "frequency_penalty": SamplingBound(-2, 2),
    "logit_bias": SamplingBound(-100, 100),
    "logprobs": SamplingBound(0, 20),
}
"""The gateway's bounds (it turns a client's top_k of -1 into 0). Values beyond them overflow and fail a step."""


def settled(settings: AnySettings, checkpoint: Checkpoint) -> AnySettings:
    """The settings with the checkpoint's own dtype in place of `auto`. Raises ConfigError when this engine cannot
    compute the model with them.

    float32 and bfloat16 always work: where the kernels of a CPU do not fit, torch computes.
    """
    if settings.dtype == "auto":
        own = "float32" if checkpoint.dtype == "F32" else "bfloat16"
        settings = replace(settings, dtype=own)
    if settings.dtype == "int4" and not keeps_stored(checkpoint.tensors.values()):
        raise ConfigError("dtype", settings.dtype, NOT_KEPT)
    _check_model(settings, checkpoint.config)
    if max(settings.tp, settings.pp, settings.ep) > 1 and checkpoint.part is None:
        _check_ranks(settings, checkpoint.config)
        here = settings.tp * (1 if settings.stages_apart else settings.pp)
        each = max(1, available_cores() // here)
        settings = replace(settings, threads=settings.threads or each)
    return settings


def _check_model(settings: EngineSettings, model: ModelConfig) -> None:
    if model.experts is not None and settings.dtype in ("int8", "float8") and settings.device != "cpu":
        right = f"is not possible for a model with experts on {settings.device}: use bfloat16"
        raise ConfigError("dtype", settings.dtype, right)
    if settings.weights == "lossless":
        reason = misfit(model) if settings.kernels else "the kernels are switched off"
        if reason is not None:
            raise ConfigError("weights", settings.weights, f"is not possible here, because {reason}: use plain")


def _check_ranks(settings: EngineSettings, model: ModelConfig) -> None:
    try:
        check_split(model, settings.tp)
    except ValueError as error:
        raise ConfigError("tp", settings.tp, str(error)) from error
    try:
        check_expert_groups(model, Rank(0, settings.tp, settings.ep))
    except ValueError as error:
        raise ConfigError("ep", settings.ep, str(error)) from error
    if model.experts is not None and settings.redundant_experts > (most := _others(model.experts, settings.ep)):
        right = f"must be at most {most}, the experts of a layer that a group does not have anyway"
        raise ConfigError("redundant_experts", settings.redundant_experts, right)
    if settings.pp > model.n_layers:
        raise ConfigError("pp", settings.pp, f"must be at most the {model.n_layers} layers of the model")


def _others(experts: Experts, groups: int) -> int:
    return experts.count - experts.count // groups


def check_request(request: Request, vocab_size: int, max_model_len: int) -> None:
    """Raises RequestRefused, naming the field, or RequestTooLong."""
    if not request.prompt:
        raise RequestRefused("prompt", "prompt is empty")
    _check_ids("prompt", request.prompt, vocab_size)
    _check_ids("output", request.output, vocab_size)
    check_sampling(request.sampling, vocab_size)
    total = len(request.prompt) + request.sampling.max_tokens
    if total > max_model_len:
        raise RequestTooLong(
            "prompt",
            f"prompt of {len(request.prompt)} tokens and max_tokens {request.sampling.max_tokens} "
            f"exceed the context of {max_model_len} tokens",
        )


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestRefused, naming the field."""
    for name, bound in SAMPLING_BOUNDS.items():
        value = getattr(params, name)
        values = value.values() if name == "logit_bias" else (value or 0,)
        if not all(map(bound.holds, values)):
            raise RequestRefused(name, f"{name} must be between {bound.low:g} and {bound.high:g}, not {value}")
    if len(params.logit_bias) > MOST_BIASED:
        reason = f"logit_bias has {len(params.logit_bias)} entries; at most {MOST_BIASED} are possible"
        raise RequestRefused("logit_bias", reason)
    if len(params.stop_token_ids) >= vocab_size:
        raise RequestRefused("stop_token_ids", f"stop_token_ids holds all {vocab_size} tokens of the vocabulary")
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    if len(params.banned_token_ids) >= vocab_size:
        raise RequestRefused("banned_token_ids", f"banned_token_ids holds all {vocab_size} tokens of the vocabulary")
    _check_ids("banned_token_ids", params.banned_token_ids, vocab_size)
    if len(params.bad_words) > MOST_BAD_WORDS:
        reason = f"bad_words has {len(params.bad_words)} entries; at most {MOST_BAD_WORDS} are possible"
        raise RequestRefused("bad_words", reason)
    if sum(map(len, params.bad_words)) > MOST_BAD_CHARACTERS:
        reason = f"bad_words: the strings must have at most {MOST_BAD_CHARACTERS} characters together"
        raise RequestRefused("bad_words", reason)
    if not all(0 < len(word) <= LONGEST_BAD_WORD for word in params.bad_words):
        raise RequestRefused("bad_words", f"bad_words: each string must have 1 to {LONGEST_BAD_WORD} characters")


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestRefused(name, f"{name} holds token {token}, the vocabulary has {vocab_size}")
