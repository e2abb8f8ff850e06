"""Translates OpenAI's request bodies into the gateway's own requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from penstock.chat.messages import Call, Message, PictureLink
from penstock.errors import InvalidRequest
from penstock.gateway.api.extension import CacheControl, OpenAIExtension, check_marks, keeps_of
from penstock.gateway.api.nodes import Nodes
from penstock.gateway.api.openai.bodies import (
    ChatBody,
    CompletionBody,
    ContentPart,
    HintBody,
    MessageBody,
    read_chat,
    read_completion,
    read_hint,
)
from penstock.gateway.api.openai.constraints import constraint_of
from penstock.gateway.api.openai.rendering import rendering_of
from penstock.gateway.api.openai.tools import tools_of
from penstock.gateway.request import bounds
from penstock.gateway.request.ask import Ask, Conversation, Prompt, Sampling
from penstock.gateway.request.bounds import check, check_count
from penstock.kv.hint import ReturnHint


def chat_ask(raw: bytes, max_choices: int, ignored: list[str] | None = None) -> Ask:
    """Reads a chat request. Raises InvalidRequest naming the field; see `BodyReader.read` for `ignored`."""
    nodes = Nodes()
    nodes.add(raw)
    body = read_chat(raw, ignored)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest("max_tokens and max_completion_tokens differ; send one of them", field="max_tokens")
    check_count("messages", len(body.messages), bounds.MAX_MESSAGES)
    if not body.messages:
        raise InvalidRequest("messages: must not be empty", field="messages")
    messages = [message_of(item, at, nodes) for at, item in enumerate(body.messages)]
    keeps = tuple(keeps_of(messages, list(_marks(body.messages))))
    prompt = Conversation(messages, *tools_of(body), keeps, rendering_of(body))
    logprobs = _chat_logprobs(body)
    if body.max_completion_tokens is None:
        return _ask(body, [prompt], max_choices, logprobs=logprobs, max_tokens=body.max_tokens)
    most, field = body.max_completion_tokens, "max_completion_tokens"
    return _ask(body, [prompt], max_choices, logprobs=logprobs, max_tokens=most, max_tokens_field=field)


def completion_ask(raw: bytes, max_choices: int, ignored: list[str] | None = None) -> Ask:
    """Reads a legacy completion. Raises InvalidRequest naming the field; see `BodyReader.read` for `ignored`."""
    Nodes().add(raw)
    body = read_completion(raw, ignored)
    if body.best_of is not None and body.best_of != (body.n or 1):
        check("best_of", body.best_of)
        raise _unserved("best_of", "must be equal to n")
    check("logprobs", body.logprobs)
    prompts = _prompts(body.prompt)
    check_count("prompt", len(prompts), bounds.MAX_PROMPTS)
    return _ask(body, prompts, max_choices, logprobs=body.logprobs, max_tokens=body.max_tokens)


def session_hint(raw: bytes) -> HintBody:
    """Reads a hint without a request. Raises InvalidRequest naming the field."""
    body = read_hint(raw)
    if not body.ended and body.returns_in is None:
        raise InvalidRequest('ended: send {"ended": true} or {"returns_in": "30s"}', field="ended")
    return body


def _unserved(field: str, why: str = "is not supported") -> InvalidRequest:
    return InvalidRequest(f"{field}: {why}", field=field, code="unsupported_parameter")


def _ask(
    body: ChatBody | CompletionBody,
    prompts: Sequence[Prompt],
    max_choices: int,
    *,
    logprobs: int | None,
    max_tokens: int | None,
    max_tokens_field: str = "max_tokens",
) -> Ask:
    extension = body.penstock or OpenAIExtension()
    sampling = Sampling(
        max_tokens=max_tokens,
        min_tokens=_or(body.min_tokens, 0),
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=_or(body.top_k, 0),
        min_p=_or(body.min_p, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=_logit_bias(body.logit_bias or {}),
        seed=body.seed,
        logprobs=logprobs,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        bad_words=tuple(body.bad_words or ()),
        drafts=extension.drafts is not False,
        proposers=bool(extension.proposers),
    )
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options: requires stream to be true", field="stream_options")
    ask = Ask(
        model=body.model,
        prompts=prompts,
        sampling=sampling,
        constraint=constraint_of(body),
        keep_last=body.truncate_prompt_tokens,
        stops=stops,
        show_stop=bool(body.include_stop_str_in_output or body.no_stop_trim),
        n=_or(body.n, 1),
        stream=bool(body.stream),
        chat=isinstance(body, ChatBody),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        return_token_ids=bool(body.return_token_ids),
        cache_key=body.prompt_cache_key,
        retain_s=extension.retain_s(),
        outlook=extension.session.outlook("penstock.session") if extension.session else ReturnHint(),
        urgency=extension.urgency(body.priority),
        max_tokens_field=max_tokens_field,
    )
    ask.check(max_choices)
    return ask


Value = TypeVar("Value")


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise InvalidRequest("logit_bias: every key must be a token id", field="logit_bias") from None


def _chat_logprobs(body: ChatBody) -> int | None:
    check("top_logprobs", body.top_logprobs)
    if not body.logprobs:
        if body.top_logprobs:
            raise InvalidRequest("top_logprobs: requires logprobs to be true", field="top_logprobs")
        return None
    return body.top_logprobs or 0


def message_of(body: MessageBody, at: int, nodes: Nodes) -> Message:
    """The message of number `at`. Raises InvalidRequest naming the field."""
    field = f"messages[{at}]"
    if body.role == "tool" and body.tool_call_id is None:
        raise InvalidRequest(f"{field}.tool_call_id: is required for the role tool", field=f"{field}.tool_call_id")
    if body.tool_calls and body.role != "assistant":
        raise InvalidRequest(f"{field}.tool_calls: requires the role assistant", field=f"{field}.tool_calls")
    content = _content(body.content, field)
    reasoning = body.reasoning_content or body.reasoning or ""
    if body.role == "assistant" and body.content is None:
        content = body.refusal or ""
    if body.content is None and not (body.role == "assistant" and (body.tool_calls or reasoning or content)):
        raise InvalidRequest(f"{field}.content: is required", field=f"{field}.content")
    for number, call in enumerate(body.tool_calls or ()):
        nodes.add(call.function.arguments.encode(), f"{field}.tool_calls[{number}].function.arguments")
    calls = tuple(Call(call.id, call.function.name, call.function.arguments) for call in body.tool_calls or ())
    return Message(
        role="system" if body.role == "developer" else body.role,
        content=content,
        calls=calls,
        call_id=body.tool_call_id or "",
        name=body.name or "",
        reasoning=reasoning,
        parts=_parts(body.content, body.role, field),
    )


def _marks(messages: Sequence[MessageBody]) -> Iterator[tuple[int, str | None, str, CacheControl]]:
    """Every cache_control, in order; see `keeps_of`. Raises InvalidRequest where there are too many."""
    found = 0
    for at, message in enumerate(messages):
        texts = []
        for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
            texts.append(_part(part))
            if part.cache_control is not None:
                found += 1
                check_marks(found)
                text = "".join(texts)
                yield at, text, f"messages[{at}].content[{number}].cache_control", part.cache_control
        if message.cache_control is not None:
            found += 1
            check_marks(found)
            yield at, None, f"messages[{at}].cache_control", message.cache_control


def _content(content: str | list[ContentPart] | None, field: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for at, part in enumerate(content):
        where = f"{field}.content[{at}]"
        if part.type not in ("text", "refusal", "image_url"):
            what = f"{part.type[:40]!r} is not supported; send parts of type text or image_url"
            raise _unserved(f"{where}.type", what)
        if getattr(part, part.type) is None:
            raise InvalidRequest(f"{where}.{part.type}: is required", field=f"{where}.{part.type}")
    return "".join(map(_part, content))


def _parts(content: str | list[ContentPart] | None, role: str, field: str) -> tuple[str | PictureLink, ...]:
    """The parts of a message that has pictures; none of other messages."""
    if not isinstance(content, list) or all(part.type != "image_url" for part in content):
        return ()
    if role not in ("user", "tool"):
        raise _unserved(f"{field}.content", "pictures are possible in messages of the user and of tools")
    found: list[str | PictureLink] = []
    for at, part in enumerate(content):
        picture = part.image_url if part.type == "image_url" else None
        where = f"{field}.content[{at}].image_url.url"
        found.append(_part(part) if picture is None else PictureLink(picture.url, where))
    return tuple(found)


def _part(part: ContentPart) -> str:
    return (part.refusal if part.type == "refusal" else part.text) or ""


def _prompts(given: str | list[str | int | list[int]]) -> list[Prompt]:
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest("prompt: must not be empty", field="prompt")
    ids = [item for item in given if isinstance(item, int)]
    if len(ids) == len(given):
        return [ids]
    if ids or len({type(item) for item in given}) > 1 or [] in given:
        raise InvalidRequest("prompt: must be a string, strings, token ids, or lists of token ids", field="prompt")
    return [item for item in given if not isinstance(item, int)]
