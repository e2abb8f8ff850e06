"""OpenAI's response bodies: whole, and as chunks of a stream. Folding the chunks gives the whole."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import PenstockError
from penstock.gateway.api.inquiry import Json, Style, encode
from penstock.gateway.api.template import HOLE, template
from penstock.gateway.completing.delta import Delta, TokenLogprob
from penstock.gateway.completing.prompts import SessionUse
from penstock.gateway.completing.timing import TIMES
from penstock.gateway.completing.usage import Usage
from penstock.gateway.request.ask import Ask
from penstock.gateway.request.work import TIERS
from penstock.runtime.drafts import DraftAccount, by_proposer


def error_json(error: PenstockError, _request_id: str = "") -> Json:
    """OpenAI's error object."""
    code = error.code or ("rate_limit_exceeded" if error.http_status == 429 else None)
    return {"error": {"message": error.message, "type": error.kind, "param": error.field, "code": code}}


STYLE = Style(error=error_json, last=b"data: [DONE]\n\n")


def openai_model(name: str, created: int, context: int | None, *, ready: bool, base: str = "") -> Json:
    """OpenAI's form of a model, with the fields by which vLLM says what adapters belong to. `ready`: a request for it
    would succeed; `base`: the model to which an adapter is added."""
    own = {"root": name, "parent": base or None, "max_model_len": context, "ready": ready}
    return {"id": name, "object": "model", "created": created, "owned_by": "penstock", **own}


def usage_json(usage: Usage) -> Json:
    """OpenAI's usage object, with every field, zeros included."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
            "audio_tokens": 0,
        },
        "penstock": own_usage(usage),
    }


def own_usage(usage: Usage) -> Json:
    """What Penstock counts beyond the usage of any other API."""
    return {
        "cached_tokens": {tier: usage.cached[tier] for tier in TIERS},
        "computed_tokens": usage.computed_tokens,
        "drafted_tokens": usage.drafts.drafted,
        "accepted_tokens": usage.drafts.accepted,
        "drafts": _drafts_json(usage.drafts),
        "retained_tokens": usage.retained_tokens,
        "retained_s": round(usage.retained_s, 3),
        "dropped_messages": usage.dropped_messages,
        "dropped_tokens": usage.dropped_tokens,
        "session": session_json(usage.session),
        "seed": usage.seed,
        "times": {name: round(usage.times[name], 6) for name in TIMES},
    }


def _drafts_json(account: DraftAccount) -> Json:
    """What proposers guessed, and what came of it."""
    return {
        "passes": account.passes,
        "verified": by_proposer(account.verified),
        "accepted": by_proposer(account.right),
        "verified_at": account.verified_at,
        "accepted_at": account.right_at,
        "waited_s": round(account.waited_s, 6),
    }


def session_json(use: SessionUse | None) -> Json | None:
    """What a conversation took over from its session's last turn, and where it left that turn's tokens; null for
    a prompt that isn't a conversation."""
    if use is None:
        return None
    left = use.divergence
    return {
        "known_tokens": use.known_tokens,
        "spliced_tokens": use.spliced_tokens,
        "diverged_at": None if left is None else {"token": left.token, "turn": left.turn},
    }


class _Shape:
    """What both kinds of completions share."""

    def __init__(self, ask: Ask, created: int) -> None:
        self._head: Json = {"created": created, "model": ask.model, "system_fingerprint": ""}
        self._logprobs = ask.sampling.logprobs is not None
        self._include_usage = ask.include_usage
        self._token_ids = ask.return_token_ids
        self._proposers = ask.sampling.proposers
        self._begun: set[int] = set()
        self._templates: dict[int, bytes] = {}
        """For each choice that has begun: a chunk that adds a text to it and nothing else."""

    def begin(self, usage: Usage) -> list[Json]:
        """Nothing: the first delta begins the stream."""
        self._head["system_fingerprint"] = usage.fingerprint
        return []

    def text(self, delta: Delta) -> bytes | None:
        """The chunk for a plain delta of a choice that has begun."""
        found = self._templates.get(delta.choice)
        return found % encode(delta.content) if found is not None and delta.plain else None

    def _begin(self, choice: int, chunk: Json) -> None:
        """`choice` has begun; `chunk` adds HOLE to it."""
        self._begun.add(choice)
        if not self._logprobs and not self._token_ids and not self._proposers:
            self._templates[choice] = template(STYLE.written([chunk]))

    def _told(self, delta: Delta) -> Json:
        """What a client has asked to be told of every counted token."""
        told: Json = {"token_ids": delta.token_ids} if self._token_ids else {}
        return told | {"proposers": [one or None for one in delta.proposers]} if self._proposers else told

    def end(self, usage: Usage) -> list[Json]:
        """The chunk that holds the usage, and no choices, for clients that ask for it."""
        return [{**self._head, "choices": [], "usage": usage_json(usage)}] if self._include_usage else []

    def fail(self, error: PenstockError, _usage: Usage) -> list[Json]:
        """The error object in place of a chunk."""
        return [error_json(error)]


class ChatShape(_Shape):
    """`chat.completion` and its chunks."""

    def __init__(self, ask: Ask, id: str, created: int) -> None:
        super().__init__(ask, created)
        self._head = {"id": f"chatcmpl-{id}", "object": "chat.completion.chunk", **self._head}

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Json:
        """The response to a request without stream."""
        self.begin(usage)
        found = [self._choice(delta) for delta in choices]
        return {**self._head, "object": "chat.completion", "choices": found, "usage": usage_json(usage)}

    def events(self, delta: Delta) -> list[Json]:
        """The chunks for one delta: the role first, the finish reason last and alone."""
        chunks = []
        if delta.choice not in self._begun:
            chunks.append(self._chunk(delta.choice, {"role": "assistant", "content": ""}, None, None))
            self._begin(delta.choice, self._chunk(delta.choice, {"content": HOLE}, None, None))
        gained: Json = {}
        if delta.reasoning:
            gained["reasoning_content"] = delta.reasoning
        if delta.content:
            gained["content"] = delta.content
        if delta.calls:
            gained["tool_calls"] = [_call_chunk(call.index, call.id, call.name, call.arguments) for call in delta.calls]
        if gained or delta.logprobs or delta.token_ids or delta.proposers:
            logprobs = _chat_logprobs(delta.logprobs) if self._logprobs else None
            chunk = self._chunk(delta.choice, gained, logprobs, None)
            chunks.append(chunk)
            chunk["choices"][0] |= self._told(delta)
        if delta.finish:
            chunks.append(self._chunk(delta.choice, {}, None, delta.finish))
        return chunks

    def _choice(self, delta: Delta) -> Json:
        message: Json = {
            "role": "assistant",
            "content": delta.content or (None if delta.calls else ""),
            "refusal": None,
        }
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in delta.calls
            ]
        logprobs = _chat_logprobs(delta.logprobs) if self._logprobs else None
        choice = {"index": delta.choice, "message": message, "logprobs": logprobs, "finish_reason": delta.finish}
        return choice | self._told(delta)

    def _chunk(self, choice: int, gained: Json, logprobs: Json | None, finish: str | None) -> Json:
        found = {"index": choice, "delta": gained, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self._head, "choices": [found]}
        return chunk | {"usage": None} if self._include_usage else chunk


class CompletionShape(_Shape):
    """`text_completion` and its chunks."""

    def __init__(self, ask: Ask, id: str, created: int) -> None:
        super().__init__(ask, created)
        self._head = {"id": f"cmpl-{id}", "object": "text_completion", **self._head}

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Json:
        """The response to a request without stream."""
        self.begin(usage)
        return {**self._head, "choices": [self._choice(delta) for delta in choices], "usage": usage_json(usage)}

    def events(self, delta: Delta) -> list[Json]:
        """The chunk for one delta."""
        if delta.choice not in self._begun:
            self._begin(delta.choice, self._chunk(Delta(delta.choice, HOLE)))
        return [self._chunk(delta)]

    def _chunk(self, delta: Delta) -> Json:
        chunk = {**self._head, "choices": [self._choice(delta)]}
        return chunk | {"usage": None} if self._include_usage else chunk

    def _choice(self, delta: Delta) -> Json:
        logprobs = _legacy_logprobs(delta.logprobs) if self._logprobs else None
        choice = {"index": delta.choice, "text": delta.content, "logprobs": logprobs, "finish_reason": delta.finish}
        return choice | self._told(delta)


def _call_chunk(index: int, id: str, name: str, arguments: str) -> Json:
    if not id:
        return {"index": index, "function": {"arguments": arguments}}
    return {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(token: bytes) -> str:
    return token.decode(errors="replace")


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> Json:
    return {"content": logprob_entries(tokens), "refusal": None}


def logprob_entries(tokens: Sequence[TokenLogprob]) -> list[Json]:
    """OpenAI's form of logprobs, one entry for each token."""
    entries = []
    for entry in tokens:
        top = [{"token": _text(token), "logprob": value, "bytes": list(token)} for token, value in entry.top]
        own = {"token": _text(entry.token), "logprob": entry.logprob, "bytes": list(entry.token)}
        entries.append({**own, "top_logprobs": top})
    return entries


def _legacy_logprobs(tokens: Sequence[TokenLogprob]) -> Json:
    return {
        "tokens": [_text(entry.token) for entry in tokens],
        "token_logprobs": [entry.logprob for entry in tokens],
        "top_logprobs": [{_text(token): value for token, value in entry.top} for entry in tokens],
        "text_offset": [entry.offset for entry in tokens],
    }
