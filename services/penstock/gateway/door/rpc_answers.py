"""Answers as gRPC messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from penstock.gateway.completing.completion import Completion
from penstock.gateway.completing.delta import Delta, TokenLogprob
from penstock.gateway.completing.prompts import SessionUse
from penstock.gateway.completing.repeating import TokenPlace
from penstock.gateway.completing.usage import Usage
from penstock.runtime.drafts import DraftAccount, by_proposer
from penstock.v1 import gateway_pb2


async def chat_chunks(completion: Completion) -> AsyncIterator[gateway_pb2.ChatCompletionChunk]:
    """The messages of a chat completion; the last one holds the usage."""
    head = _head(completion, "chatcmpl")
    while deltas := await completion.outbox.next():
        for delta, event_id in _told(completion, deltas):
            yield _chat_chunk(head, delta, event_id)
    yield gateway_pb2.ChatCompletionChunk(**head, usage=_usage(completion.usage()))


async def text_chunks(completion: Completion) -> AsyncIterator[gateway_pb2.CompletionChunk]:
    """The messages of a legacy completion; the last one holds the usage."""
    head = _head(completion, "cmpl")
    while deltas := await completion.outbox.next():
        for delta, event_id in _told(completion, deltas):
            yield gateway_pb2.CompletionChunk(
                **head,
                choice=delta.choice,
                text=delta.content,
                token_ids=delta.token_ids,
                logprobs=[_logprob(entry) for entry in delta.logprobs],
                proposers=delta.proposers,
                finish_reason=delta.finish or "",
                event_id=event_id,
            )
    yield gateway_pb2.CompletionChunk(**head, usage=_usage(completion.usage()))


def _told(completion: Completion, deltas: Sequence[Delta]) -> Iterator[tuple[Delta, str]]:
    """The deltas that the client does not have, and their ids in a call that it can go on with."""
    place = completion.place
    for delta in deltas:
        if not isinstance(place, TokenPlace):
            yield delta, ""
        elif not place.has(delta):
            yield delta, place.passed(delta, delta.upto)


def _head(completion: Completion, prefix: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{completion.id}",
        "model": completion.ask.model,
        "created": completion.created,
        "system_fingerprint": completion.fingerprint,
    }


def _chat_chunk(head: dict[str, Any], delta: Delta, event_id: str) -> gateway_pb2.ChatCompletionChunk:
    calls = [
        gateway_pb2.FunctionCallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
        for call in delta.calls
    ]
    return gateway_pb2.ChatCompletionChunk(
        **head,
        choice=delta.choice,
        content=delta.content,
        reasoning_content=delta.reasoning,
        tool_calls=calls,
        logprobs=[_logprob(entry) for entry in delta.logprobs],
        proposers=delta.proposers,
        finish_reason=delta.finish or "",
        event_id=event_id,
    )


def _logprob(entry: TokenLogprob) -> gateway_pb2.ContentLogprob:
    def one(token: bytes, logprob: float, top: Sequence[gateway_pb2.ContentLogprob] = ()) -> gateway_pb2.ContentLogprob:
        text = token.decode(errors="replace")
        return gateway_pb2.ContentLogprob(token=text, logprob=logprob, utf8=token, top=top)

    return one(entry.token, entry.logprob, [one(token, value) for token, value in entry.top])


def _usage(usage: Usage) -> gateway_pb2.Usage:
    return gateway_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        cached_host=usage.cached["host"],
        cached_nvme=usage.cached["nvme"],
        cached_gpu=usage.cached["gpu"],
        cached_remote=usage.cached["remote"],
        cached_worker=usage.cached["worker"],
        drafted_tokens=usage.drafts.drafted,
        accepted_tokens=usage.drafts.accepted,
        drafts=_drafts(usage.drafts),
        seconds=usage.times,
        computed_tokens=usage.computed_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        retained_tokens=usage.retained_tokens,
        retained_s=usage.retained_s,
        session=_session(usage.session) if usage.session else None,
        seed=usage.seed,
        dropped_messages=usage.dropped_messages,
        dropped_tokens=usage.dropped_tokens,
    )


def _drafts(account: DraftAccount) -> gateway_pb2.DraftUse:
    return gateway_pb2.DraftUse(
        passes=account.passes,
        verified=by_proposer(account.verified),
        accepted=by_proposer(account.right),
        verified_at=account.verified_at,
        accepted_at=account.right_at,
        waited_s=account.waited_s,
    )


def _session(use: SessionUse) -> gateway_pb2.SessionUse:
    left = use.divergence
    return gateway_pb2.SessionUse(
        known_tokens=use.known_tokens,
        spliced_tokens=use.spliced_tokens,
        diverged_at_token=left.token if left else None,
        diverged_at_turn=left.turn if left else 0,
    )
