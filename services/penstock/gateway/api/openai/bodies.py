"""OpenAI's request bodies, as far as they are served, and how they are decoded.

Unknown fields are ignored. Fields that would change the meaning of an answer and are not served are declared here as
raw JSON: they are refused by name, and their contents are never decoded.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Raw

from penstock.errors import InvalidRequest
from penstock.gateway.api.extension import CacheControl, Extension, SessionBody

_AT = re.compile(r"(?P<what>.*) - at `(?P<path>[^`]*)`\Z", re.DOTALL)
_SMALL = 64
"""Longest raw JSON, in bytes, that can still be a supported value."""
ABSENT = Raw()


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool = False


class _Generation(msgspec.Struct, kw_only=True):
    """Fields that both endpoints share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    n: int | None = None
    prompt_cache_key: str | None = None
    penstock: Extension | None = None
    # Not served.
    response_format: Raw = ABSENT
    guided_json: Raw = ABSENT
    guided_regex: Raw = ABSENT
    guided_choice: Raw = ABSENT
    guided_grammar: Raw = ABSENT
    structured_outputs: Raw = ABSENT
    use_beam_search: Raw = ABSENT
    prompt_logprobs: Raw = ABSENT
    logits_processors: Raw = ABSENT


class FunctionCallBody(msgspec.Struct):
    """The function of a call, as the client sends it back."""

    name: str
    arguments: str


class ToolCallBody(msgspec.Struct):
    """A call of an earlier assistant message."""

    id: str
    function: FunctionCallBody
    type: Literal["function"] = "function"


class ContentPart(msgspec.Struct):
    """A part of a message; only text is served."""

    type: str
    text: str | None = None
    cache_control: CacheControl | None = None


class MessageBody(msgspec.Struct):
    """A message of any role."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    cache_control: CacheControl | None = None
    function_call: Raw = ABSENT
    audio: Raw = ABSENT


class FunctionBody(msgspec.Struct):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema."""
    strict: bool | None = None


class ToolBody(msgspec.Struct):
    """A tool; only functions are served."""

    type: Literal["function"]
    function: FunctionBody


class ChatBody(_Generation, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[MessageBody]
    tools: list[ToolBody] | None = None
    tool_choice: Raw = ABSENT
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # Not served.
    functions: Raw = ABSENT
    function_call: Raw = ABSENT
    audio: Raw = ABSENT
    modalities: Raw = ABSENT
    prediction: Raw = ABSENT
    web_search_options: Raw = ABSENT
    chat_template: Raw = ABSENT
    chat_template_kwargs: Raw = ABSENT
    add_generation_prompt: Raw = ABSENT
    continue_final_message: Raw = ABSENT


class CompletionBody(_Generation, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class HintBody(SessionBody, forbid_unknown_fields=True):
    """POST /v1/sessions/hint."""

    prompt_cache_key: str | None = None


Body = TypeVar("Body", ChatBody, CompletionBody, HintBody)
_HINT = msgspec.json.Decoder(HintBody)
_CHAT = msgspec.json.Decoder(ChatBody)
_COMPLETION = msgspec.json.Decoder(CompletionBody)


def read_chat(raw: bytes) -> ChatBody:
    """POST /v1/chat/completions. Raises InvalidRequest naming the field."""
    return _decode(_CHAT, raw)


def read_completion(raw: bytes) -> CompletionBody:
    """POST /v1/completions. Raises InvalidRequest naming the field."""
    return _decode(_COMPLETION, raw)


def read_hint(raw: bytes) -> HintBody:
    """POST /v1/sessions/hint. Raises InvalidRequest naming the field."""
    return _decode(_HINT, raw)


def small(raw: Raw) -> object:
    """The value of a field of raw JSON; the field's text when it is too long for a supported value."""
    text = bytes(raw) or b"null"
    return msgspec.json.decode(text) if len(text) <= _SMALL else text


def _decode(decoder: msgspec.json.Decoder[Body], raw: bytes) -> Body:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid UTF-8", code="invalid_json") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None


def _named(text: str) -> InvalidRequest:
    """msgspec's message, with its path as OpenAI's `param`."""
    match = _AT.fullmatch(text)
    field = (match["path"] if match else "").removeprefix("$").removeprefix(".")
    what = match["what"] if match else text
    missing = re.search(r"missing required field `(\w+)`", text)
    if missing:
        field = f"{field}.{missing[1]}" if field else missing[1]
        what = "is required"
    return InvalidRequest(f"{field}: {what}" if field else what, field=field or None)
