"""Whether a request can run at all."""

from __future__ import annotations

import math
from collections.abc import Iterable

from penstock.engine.errors import RequestRefused, RequestTooLong
from penstock.engine.request import Request, SamplingParams

MAX_LOGPROBS = 1000


def check_request(request: Request, vocab_size: int, max_model_len: int) -> None:
    """Raises RequestRefused, naming the field, or RequestTooLong."""
    if not request.prompt:
        raise RequestRefused("prompt is empty")
    _check_ids("prompt", request.prompt, vocab_size)
    _check_ids("output", request.output, vocab_size)
    check_sampling(request.sampling, vocab_size)
    total = len(request.prompt) + request.sampling.max_tokens
    if total > max_model_len:
        raise RequestTooLong(
            f"prompt of {len(request.prompt)} tokens and max_tokens {request.sampling.max_tokens} "
            f"exceed the context of {max_model_len} tokens"
        )


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestRefused, naming the field."""
    logprobs = params.logprobs or 0
    sound = {
        "max_tokens": params.max_tokens >= 1,
        "min_tokens": params.min_tokens >= 0,
        "temperature": 0 <= params.temperature < math.inf,
        "top_k": params.top_k >= 0,
        "top_p": 0 <= params.top_p <= 1,
        "min_p": 0 <= params.min_p <= 1,
        "repetition_penalty": 0 < params.repetition_penalty < math.inf,
        "presence_penalty": math.isfinite(params.presence_penalty),
        "frequency_penalty": math.isfinite(params.frequency_penalty),
        "logit_bias": all(map(math.isfinite, params.logit_bias.values())),
        "logprobs": 0 <= logprobs <= MAX_LOGPROBS,
        "stop_token_ids": len(params.stop_token_ids) < vocab_size,
    }
    for name, fine in sound.items():
        if not fine:
            raise RequestRefused(f"{name} is out of range: {getattr(params, name)}")
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestRefused(f"{name} holds token {token}, the vocabulary has {vocab_size}")
