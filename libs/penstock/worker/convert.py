"""Protobuf stays at the door: requests, tokens and accounts to and from the engine's dataclasses."""

from __future__ import annotations

from penstock.engine.request import FinishReason, Request, SamplingParams, TokenOut, Update
from penstock.errors import InvalidRequest
from penstock.kv.identity import NAMESPACE_BYTES
from penstock.v1 import common_pb2

_FINISH = {
    None: common_pb2.FINISH_UNSPECIFIED,
    "stop": common_pb2.FINISH_STOP,
    "length": common_pb2.FINISH_LENGTH,
}
ROOT_BYTES = 32
MAX_MARKS = 5
"""Wishes to keep blocks, of one request."""


def request_from_message(message: common_pb2.Request, max_tokens: int | None = None) -> Request:
    """The engine's request; `max_tokens` replaces the message's. Raises InvalidRequest naming the field."""
    if not message.request_id:
        raise InvalidRequest("request_id is empty", field="request_id")
    if not message.prompt_ids:
        raise InvalidRequest("prompt_ids is empty; a prompt has at least one token", field="prompt_ids")
    if len(message.cache_root) != ROOT_BYTES:
        raise InvalidRequest(
            f"cache_root has {len(message.cache_root)} bytes; it must have {ROOT_BYTES}", field="cache_root"
        )
    if len(message.namespace) not in (0, NAMESPACE_BYTES):
        raise InvalidRequest(
            f"namespace has {len(message.namespace)} bytes; it must have {NAMESPACE_BYTES}", field="namespace"
        )
    check_retain(message)
    return Request(
        id=message.request_id,
        prompt=tuple(message.prompt_ids),
        output=tuple(message.output_ids),
        sampling=_sampling(message.sampling, max_tokens),
    )


def check_retain(message: common_pb2.Request) -> None:
    """Raises InvalidRequest for wishes that can't be."""
    if len(message.retain) > MAX_MARKS:
        raise InvalidRequest(f"retain has {len(message.retain)} entries, at most {MAX_MARKS}", field="retain")
    if message.retain and not message.namespace:
        raise InvalidRequest("retain needs a namespace: a promise is made to a tenant", field="namespace")
    if not all(0 < wish.ttl_s < float("inf") for wish in message.retain):
        raise InvalidRequest("retain.ttl_s must be a number of seconds, more than 0", field="retain")


def _sampling(message: common_pb2.Sampling, max_tokens: int | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=message.max_tokens if max_tokens is None else max_tokens,
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
    )


def token_to_message(token: TokenOut) -> common_pb2.Token:
    """One token for the wire."""
    return common_pb2.Token(
        index=token.index,
        id=token.token,
        logprob=token.logprob,
        top=[common_pb2.TopLogprob(id=id, logprob=logprob) for id, logprob in token.top],
    )


def token_from_message(message: common_pb2.Token) -> TokenOut:
    """One token from the wire."""
    return TokenOut(
        index=message.index,
        token=message.id,
        logprob=message.logprob if message.HasField("logprob") else None,
        top=tuple((top.id, top.logprob) for top in message.top),
    )


def finish_to_message(finish: FinishReason | None) -> common_pb2.Finish.ValueType:
    """Why a sequence ended, for the wire."""
    return _FINISH[finish]


def times_to_message(update: Update) -> common_pb2.StageTimes:
    """Seconds by stage, for the wire."""
    return common_pb2.StageTimes(
        queue=update.queue_s, fetch=update.load_s, prefill=update.prefill_s, decode=update.decode_s
    )
