"""How tokens are chosen, between messages and plain values."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.request import SamplingParams
from penstock.v1 import common_pb2


def sampling_from_message(message: common_pb2.Sampling, max_tokens: int | None = None) -> SamplingParams:
    """The message's fields, with another `max_tokens` if one is given."""
    params = SamplingParams(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        seed=message.seed,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        grammar=message.grammar,
        drafts=not message.no_drafts,
        proposers=message.proposers,
        banned_token_ids=frozenset(message.banned_token_ids),
        bad_words=tuple(message.bad_words),
    )
    return params if max_tokens is None else replace(params, max_tokens=max_tokens)


def sampling_to_message(params: SamplingParams) -> common_pb2.Sampling:
    """Sets every field."""
    return common_pb2.Sampling(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        seed=params.seed % 2**64,
        logprobs=params.logprobs,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        grammar=params.grammar,
        no_drafts=not params.drafts,
        proposers=params.proposers,
        banned_token_ids=params.banned_token_ids,
        bad_words=params.bad_words,
    )
