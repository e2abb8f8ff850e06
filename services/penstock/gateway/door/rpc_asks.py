"""Asks of gRPC messages: the same requests as those of HTTP, typed."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import msgspec

from penstock.chat.messages import Call, Message, PictureLink, Rendering, Tool
from penstock.errors import InvalidRequest
from penstock.gateway.api.extension import SessionBody, seconds
from penstock.gateway.api.nodes import Nodes
from penstock.gateway.request import bounds
from penstock.gateway.request.ask import Ask, Conversation, Keep, Prompt, Sampling, Urgency
from penstock.gateway.request.bounds import check, check_count
from penstock.gateway.request.calling import Calling, calling, check_tools
from penstock.gateway.request.rendering import effort, rendering, template_variables, thinking
from penstock.grammar.recipe import Kind, Part
from penstock.kv.hint import ReturnHint
from penstock.v1 import gateway_pb2

Asked = gateway_pb2.ChatCompletionRequest | gateway_pb2.CompletionRequest
_OBJECT = msgspec.json.Decoder(dict[str, Any])
_ROLES = ("system", "developer", "user", "assistant", "tool")


def read_chat(request: gateway_pb2.ChatCompletionRequest, max_choices: int) -> Ask:
    """The ask of a message. Raises InvalidRequest naming the field."""
    check_count("messages", len(request.messages), bounds.MAX_MESSAGES)
    if not request.messages:
        raise InvalidRequest("messages: must not be empty", field="messages")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs: requires logprobs to be true", field="top_logprobs")
    check("top_logprobs", request.top_logprobs)
    for name in ("tool_calls", "parts"):
        count = sum(len(getattr(message, name)) for message in request.messages)
        check_count(f"messages.{name}", count, bounds.MAX_NODES)
    nodes = Nodes()
    messages = [_message(message, at, nodes) for at, message in enumerate(request.messages)]
    tools = [_tool(tool, at, nodes) for at, tool in enumerate(request.tools)]
    check_tools(tools, "tools[{at}].name")
    conversation = Conversation(
        messages,
        tools,
        _calling(request, tools),
        _keeps(request, messages),
        _rendering(request, nodes),
        shorten=_shortened(request),
    )
    return _ask(request, [conversation], max_choices)


def read_completion(request: gateway_pb2.CompletionRequest, max_choices: int) -> Ask:
    """The ask of a message. Raises InvalidRequest naming the field."""
    if bool(request.prompts) == bool(request.token_prompts):
        raise InvalidRequest("prompts: send either prompts or token_prompts", field="prompts")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs: requires logprobs to be true", field="top_logprobs")
    check("logprobs", request.top_logprobs, "top_logprobs")
    prompts: list[Prompt] = [*request.prompts, *(prompt.ids for prompt in request.token_prompts)]
    check_count("prompts", len(prompts), bounds.MAX_PROMPTS)
    return _ask(request, prompts, max_choices)


def _ask(request: Asked, prompts: Sequence[Prompt], max_choices: int) -> Ask:
    chat = isinstance(request, gateway_pb2.ChatCompletionRequest)
    most = "max_completion_tokens" if chat else "max_tokens"
    ask = Ask(
        model=request.model,
        prompts=prompts,
        sampling=_sampling(request, most),
        constraint=_constraint(request),
        keep_last=request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None,
        stops=tuple(request.stop),
        n=request.n or 1,
        stream=True,
        chat=chat,
        include_usage=True,
        return_token_ids=isinstance(request, gateway_pb2.CompletionRequest) and request.return_token_ids,
        cache_key=request.prompt_cache_key or None,
        retain_s=seconds("penstock.retain", request.retain_s, "retain_s") if request.retain_s else 0.0,
        outlook=outlook_of(request.session) if request.HasField("session") else ReturnHint(),
        urgency=_urgency(request.urgency) if request.HasField("urgency") else Urgency(),
        max_tokens_field=most,
        prompts_field=_prompts_field(request),
    )
    ask.check(max_choices)
    return ask


def _urgency(said: gateway_pb2.Urgency) -> Urgency:
    check("priority", said.priority, "urgency.priority")
    targets = {
        name: seconds(f"penstock.slo.{name}", getattr(said, f"{name}_s"), f"urgency.{name}_s")
        if said.HasField(f"{name}_s")  # type: ignore[arg-type]
        else inf
        for name in ("ttft", "itl")
    }
    return Urgency(said.priority, targets["ttft"], targets["itl"])


def _prompts_field(request: Asked) -> str:
    raw = isinstance(request, gateway_pb2.CompletionRequest) and request.token_prompts
    return "token_prompts" if raw else "prompts"


def _keeps(request: gateway_pb2.ChatCompletionRequest, messages: Sequence[Message]) -> tuple[Keep, ...]:
    marked = [at for at, message in enumerate(request.messages) if message.retain_s]
    check_count("messages.retain_s", len(marked), bounds.MAX_MARKS)
    return tuple(
        Keep(seconds("penstock.retain", request.messages[at].retain_s, f"messages[{at}].retain_s"), messages[: at + 1])
        for at in marked
    )


def _rendering(request: gateway_pb2.ChatCompletionRequest, nodes: Nodes) -> Rendering:
    def given(name: str) -> bool | None:
        return getattr(request, name) if request.HasField(name) else None  # type: ignore[arg-type]

    variables = _object(request.chat_template_kwargs, "chat_template_kwargs", nodes)
    return rendering(
        [
            *effort(request.reasoning_effort or None, "reasoning_effort"),
            *thinking(given("enable_thinking")),
            *template_variables(variables),
        ],
        opened=given("add_generation_prompt"),
        continued=request.continue_final_message,
    )


def _shortened(request: gateway_pb2.ChatCompletionRequest) -> bool:
    """Whether old messages are left out of a conversation that is too long."""
    if request.truncation not in ("", "auto", "disabled"):
        raise InvalidRequest("truncation: must be auto or disabled", field="truncation")
    if request.truncation == "auto" and request.HasField("truncate_prompt_tokens"):
        what = "truncation: must not be auto together with truncate_prompt_tokens"
        raise InvalidRequest(what, field="truncation")
    return request.truncation == "auto"


def outlook_of(said: gateway_pb2.SessionOutlook) -> ReturnHint:
    """What the client knows of its session. Raises InvalidRequest."""
    returns_in = said.returns_in_s if said.HasField("returns_in_s") else None
    return SessionBody(said.ended, returns_in).outlook("session")


def _sampling(request: Asked, most: str) -> Sampling:
    given: dict[str, Any] = {
        name: getattr(request, name)
        for name in (
            "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty", "seed",
        )
        if request.HasField(name)
    }  # fmt: skip
    return Sampling(
        max_tokens=getattr(request, most) if request.HasField(most) else None,  # type: ignore[arg-type]
        logit_bias=dict(request.logit_bias),
        logprobs=request.top_logprobs if request.logprobs else None,
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        drafts=not request.no_drafts,
        proposers=request.proposers,
        bad_words=tuple(request.bad_words),
        **given,
    )


def _constraint(request: Asked) -> Part | None:
    given, at = request.constraint, "constraint"
    name = given.WhichOneof("kind") if request.HasField("constraint") else None
    if name is None or (name == "json_object" and not given.json_object):
        return None
    if name == "choice":
        return Part("choice", msgspec.json.encode([*given.choice.texts]).decode(), f"{at}.choice")
    kinds: dict[str, tuple[Kind, str]] = {
        "json_object": ("object", ""),
        "json_schema": ("schema", given.json_schema),
        "regex": ("regex", given.regex),
        "grammar": ("grammar", given.grammar),
    }
    kind, text = kinds[name]
    return Part(kind, text, f"{at}.{name}")


def _message(message: gateway_pb2.ChatMessage, at: int, nodes: Nodes) -> Message:
    if message.role not in _ROLES:
        raise InvalidRequest(f"messages[{at}].role: must be one of {', '.join(_ROLES)}", field=f"messages[{at}].role")
    if message.role == "tool" and not message.tool_call_id:
        field = f"messages[{at}].tool_call_id"
        raise InvalidRequest(f"{field}: is required for the role tool", field=field)
    for number, call in enumerate(message.tool_calls):
        nodes.add(call.arguments.encode(), f"messages[{at}].tool_calls[{number}].arguments")
    parts = _parts(message, f"messages[{at}]")
    return Message(
        role="system" if message.role == "developer" else message.role,
        content="".join(part for part in parts if isinstance(part, str)) if parts else message.content,
        calls=tuple(Call(call.id, call.name, call.arguments) for call in message.tool_calls),
        call_id=message.tool_call_id,
        reasoning=message.reasoning_content,
        parts=parts if any(isinstance(part, PictureLink) for part in parts) else (),
    )


def _parts(message: gateway_pb2.ChatMessage, field: str) -> tuple[str | PictureLink, ...]:
    if not message.parts:
        return ()
    if message.content:
        raise InvalidRequest(f"{field}.parts: send either content or parts", field=f"{field}.parts")
    found: list[str | PictureLink] = []
    for at, part in enumerate(message.parts):
        where, kind = f"{field}.parts[{at}]", part.WhichOneof("kind")
        if kind is None:
            raise InvalidRequest(f"{where}: must have text or image_url", field=where)
        if kind == "image_url" and message.role not in ("user", "tool"):
            what = "pictures are possible in messages of the user and of tools"
            raise InvalidRequest(f"{where}.image_url: {what}", field=f"{where}.image_url")
        found.append(part.text if kind == "text" else PictureLink(part.image_url, f"{where}.image_url"))
    return tuple(found)


def _tool(tool: gateway_pb2.FunctionTool, at: int, nodes: Nodes) -> Tool:
    field = f"tools[{at}].parameters"
    return Tool(tool.name, tool.description, _object(tool.parameters, field, nodes), tool.strict, field)


def _object(text: str, field: str, nodes: Nodes) -> dict[str, Any]:
    """The object of a JSON text; an empty one of an empty text. Raises InvalidRequest naming the field."""
    raw = text.encode() or b"{}"
    nodes.add(raw, field)
    try:
        return _OBJECT.decode(raw)
    except msgspec.ValidationError:
        raise InvalidRequest(f"{field}: must be a JSON object", field=field) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{field}: is not valid JSON: {error}", field=field) from None


def _calling(request: gateway_pb2.ChatCompletionRequest, tools: Sequence[Tool]) -> Calling | None:
    mode = request.tool_choice or "auto"
    if mode not in ("auto", "none", "required"):
        raise InvalidRequest("tool_choice: must be auto, none or required", field="tool_choice")
    only = list(request.allowed_tools) or None
    parallel = request.parallel_tool_calls or not request.HasField("parallel_tool_calls")
    return calling(tools, mode, only, parallel=parallel)
