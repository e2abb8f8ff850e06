"""The served subset of OpenAI's request bodies.

Unknown fields are ignored, but what would change the meaning of an answer and is not served is declared here, as
`Any`, and refused by name: nobody shall believe that it was honoured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from penstock.chat.messages import Call, Message, Tool
from penstock.errors import InvalidRequest
from penstock.gateway import bounds
from penstock.gateway.ask import Ask, Conversation, Prompt, Sampling
from penstock.gateway.bounds import check, check_count
from penstock.gateway.extension import CacheControl, Extension, SessionBody, keeps_of
from penstock.kv.hint import ReturnHint

_AT = re.compile(r"(?P<what>.*) - at `(?P<path>[^`]*)`\Z", re.DOTALL)


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
    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    use_beam_search: Any = None
    prompt_logprobs: Any = None
    logits_processors: Any = None


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
    function_call: Any = None
    audio: Any = None


class FunctionBody(msgspec.Struct):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct):
    """A tool; only functions are served."""

    type: Literal["function"]
    function: FunctionBody


class ChatBody(_Generation, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[MessageBody]
    tools: list[ToolBody] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # Not served.
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None


class CompletionBody(_Generation, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class HintBody(SessionBody, forbid_unknown_fields=True):
    """POST /v1/sessions/hint."""

    prompt_cache_key: str | None = None


_HINT = msgspec.json.Decoder(HintBody)
_CHAT = msgspec.json.Decoder(ChatBody)
_COMPLETION = msgspec.json.Decoder(CompletionBody)
_REFUSED = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "use_beam_search",
    "prompt_logprobs", "logits_processors",
)  # fmt: skip
_REFUSED_CHAT = (
    "functions", "function_call", "audio", "prediction", "web_search_options", "chat_template", "chat_template_kwargs",
    "continue_final_message",
)  # fmt: skip

Body = TypeVar("Body", ChatBody, CompletionBody, HintBody)


def chat_ask(raw: bytes, max_choices: int) -> Ask:
    """Reads a chat request. Raises InvalidRequest naming the field."""
    body = _decode(_CHAT, raw)
    _refuse(body, (*_REFUSED, *_REFUSED_CHAT))
    if body.modalities not in (None, ["text"]):
        raise _unserved("modalities", 'only ["text"] is served')
    if body.add_generation_prompt not in (None, True):
        raise _unserved("add_generation_prompt")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest("give max_tokens or max_completion_tokens, not both", field="max_tokens")
    check_count("messages", len(body.messages), bounds.MAX_MESSAGES)
    if not body.messages:
        raise InvalidRequest("messages is empty", field="messages")
    messages = [_message(item, at) for at, item in enumerate(body.messages)]
    prompt = Conversation(messages, *_tools(body), tuple(keeps_of(messages, list(_marks(body.messages)))))
    field, most = "max_tokens", body.max_tokens
    if body.max_completion_tokens is not None:
        field, most = "max_completion_tokens", body.max_completion_tokens
    return _ask(body, [prompt], most, _chat_logprobs(body), max_choices, field)


def completion_ask(raw: bytes, max_choices: int) -> Ask:
    """Reads a legacy completion request. Raises InvalidRequest naming the field."""
    body = _decode(_COMPLETION, raw)
    _refuse(body, _REFUSED)
    if body.echo:
        raise _unserved("echo")
    if body.suffix:
        raise _unserved("suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        check("best_of", body.best_of)
        raise _unserved("best_of", "only best_of equal to n is served")
    check("logprobs", body.logprobs)
    prompts = _prompts(body.prompt)
    check_count("prompt", len(prompts), bounds.MAX_PROMPTS)
    return _ask(body, prompts, body.max_tokens, body.logprobs, max_choices, "max_tokens")


def session_hint(raw: bytes) -> HintBody:
    """Reads a hint without a request. Raises InvalidRequest naming the field."""
    body = _decode(_HINT, raw)
    if not body.ended and body.returns_in is None:
        raise InvalidRequest('say {"ended": true} or {"returns_in": "30s"}', field="ended")
    return body


def _decode(decoder: msgspec.json.Decoder[Body], raw: bytes) -> Body:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    except UnicodeDecodeError:
        raise InvalidRequest("the body is no UTF-8", code="invalid_json") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is no valid JSON: {error}", code="invalid_json") from None
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


def _unserved(field: str, why: str = "is not served") -> InvalidRequest:
    return InvalidRequest(f"{field}: {why}", field=field, code="unsupported_parameter")


def _refuse(body: ChatBody | CompletionBody, names: Sequence[str]) -> None:
    for name in names:
        if getattr(body, name) not in (None, False):
            raise _unserved(name)
    form = body.response_format
    if form is not None and form != {"type": "text"}:
        raise _unserved("response_format", 'only {"type": "text"} is served')


def _ask(
    body: ChatBody | CompletionBody,
    prompts: Sequence[Prompt],
    max_tokens: int | None,
    logprobs: int | None,
    max_choices: int,
    max_tokens_field: str,
) -> Ask:
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
    )
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options: only possible with stream", field="stream_options")
    extension = body.penstock or Extension()
    ask = Ask(
        model=body.model,
        prompts=prompts,
        sampling=sampling,
        stops=stops,
        n=_or(body.n, 1),
        stream=bool(body.stream),
        chat=isinstance(body, ChatBody),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        return_token_ids=bool(body.return_token_ids),
        cache_key=body.prompt_cache_key,
        retain_s=extension.retain_s(),
        outlook=extension.session.outlook("penstock.session") if extension.session else ReturnHint(),
    )
    ask.check(max_choices, max_tokens_field)
    return ask


Value = TypeVar("Value")


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise InvalidRequest("logit_bias: keys must be token ids", field="logit_bias") from None


def _chat_logprobs(body: ChatBody) -> int | None:
    check("top_logprobs", body.top_logprobs)
    if not body.logprobs:
        if body.top_logprobs:
            raise InvalidRequest("top_logprobs: only possible with logprobs", field="top_logprobs")
        return None
    return body.top_logprobs or 0


def _message(body: MessageBody, at: int) -> Message:
    field = f"messages[{at}]"
    for name in ("function_call", "audio"):
        if getattr(body, name) is not None:
            raise _unserved(f"{field}.{name}")
    if body.role == "tool" and body.tool_call_id is None:
        raise InvalidRequest(f"{field}.tool_call_id: is required for role tool", field=f"{field}.tool_call_id")
    if body.tool_calls and body.role != "assistant":
        raise InvalidRequest(f"{field}.tool_calls: only possible for role assistant", field=f"{field}.tool_calls")
    if body.content is None and not (body.role == "assistant" and (body.tool_calls or body.reasoning_content)):
        raise InvalidRequest(f"{field}.content: is required", field=f"{field}.content")
    calls = tuple(Call(call.id, call.function.name, call.function.arguments) for call in body.tool_calls or ())
    return Message(
        role="system" if body.role == "developer" else body.role,
        content=_content(body.content, field),
        calls=calls,
        call_id=body.tool_call_id or "",
        name=body.name or "",
        reasoning=body.reasoning_content or "",
    )


def _marks(messages: Sequence[MessageBody]) -> Iterator[tuple[int, str | None, str, CacheControl]]:
    """Every cache_control, in order; see `keeps_of`."""
    for at, message in enumerate(messages):
        text = ""
        for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
            text += part.text or ""
            if part.cache_control is not None:
                yield at, text, f"messages[{at}].content[{number}].cache_control", part.cache_control
        if message.cache_control is not None:
            yield at, None, f"messages[{at}].cache_control", message.cache_control


def _content(content: str | list[ContentPart] | None, field: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for at, part in enumerate(content):
        where = f"{field}.content[{at}]"
        if part.type != "text":
            raise _unserved(f"{where}.type", f"{part.type[:40]!r} is not served; only text is")
        if part.text is None:
            raise InvalidRequest(f"{where}.text: is required", field=f"{where}.text")
    return "".join(part.text or "" for part in content)


def _tools(body: ChatBody) -> tuple[tuple[Tool, ...], bool]:
    """The tools to show, and whether calls are looked for."""
    choice = body.tool_choice
    if choice not in (None, "auto", "none"):
        raise _unserved("tool_choice", 'only "auto" and "none" are served')
    if body.parallel_tool_calls is False and body.tools:
        raise _unserved("parallel_tool_calls", "false is not served")
    if not body.tools:
        if choice == "auto":
            raise InvalidRequest("tool_choice: only possible with tools", field="tool_choice")
        return (), False
    check_count("tools", len(body.tools), bounds.MAX_TOOLS)
    for at, tool in enumerate(body.tools):
        if tool.function.strict:
            raise _unserved(f"tools[{at}].function.strict")
        if not tool.function.name:
            raise InvalidRequest(f"tools[{at}].function.name: is empty", field=f"tools[{at}].function.name")
    functions = (tool.function for tool in body.tools)
    shown = tuple(Tool(item.name, item.description or "", item.parameters or {}) for item in functions)
    return shown, choice != "none"


def _prompts(given: str | list[Any]) -> list[Prompt]:
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest("prompt is empty", field="prompt")
    if all(type(item) is int for item in given):
        return [list(given)]
    if all(isinstance(item, str) for item in given):
        return list(given)
    if all(isinstance(item, list) and item and all(type(token) is int for token in item) for item in given):
        return list(given)
    raise InvalidRequest("prompt: a string, strings, token ids, or lists of token ids", field="prompt")
