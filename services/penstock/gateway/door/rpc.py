"""The gRPC door: the same requests, typed."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
import msgspec

from penstock.chat.messages import Call, Message, Tool
from penstock.errors import InvalidRequest
from penstock.gateway.accounts.auth import session_digest
from penstock.gateway.api.extension import SessionBody, seconds
from penstock.gateway.api.nodes import Nodes
from penstock.gateway.completing.completion import Caller, Completion
from penstock.gateway.completing.delta import Delta, TokenLogprob
from penstock.gateway.completing.prompts import SessionUse
from penstock.gateway.completing.usage import Usage
from penstock.gateway.door.reception import Reception
from penstock.gateway.request import bounds
from penstock.gateway.request.ask import Ask, Conversation, Keep, Sampling
from penstock.gateway.request.bounds import check, check_count
from penstock.gateway.request.calling import Calling, calling, check_tools
from penstock.grammar.recipe import Kind, Part
from penstock.kv.hint import ReturnHint
from penstock.runtime.context import current_request_id, request_scope
from penstock.v1 import gateway_pb2, gateway_pb2_grpc

SERVICE = gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].full_name
_PARAMETERS = msgspec.json.Decoder(dict[str, Any])
_ROLES = ("system", "developer", "user", "assistant", "tool")


class GatewayService(gateway_pb2_grpc.GatewayServicer):
    """Translates messages and delegates to the completer."""

    def __init__(self, reception: Reception) -> None:
        self._reception = reception

    async def ChatCompletion(
        self,
        request: gateway_pb2.ChatCompletionRequest,
        context: grpc.aio.ServicerContext[gateway_pb2.ChatCompletionRequest, gateway_pb2.ChatCompletionChunk],
    ) -> AsyncIterator[gateway_pb2.ChatCompletionChunk]:
        """Streams one chat completion; its last message holds the usage."""
        began = time.perf_counter()
        async with self._reception.one():
            headers = metadata(context)
            tenant = self._reception.auth.tenant(headers)
            with self._reception.limiter.one(tenant):
                size = request.ByteSize()
                most = self._reception.config.max_n
                ask = await self._reception.threads.run(lambda: read_request(request, most), size)
                session = session_digest(tenant, headers, ask.cache_key)
                request_id = current_request_id() or f"req-{secrets.token_hex(12)}"
                with request_scope(request_id):
                    left = context.time_remaining()
                    patience = math.inf if left is None else left
                    caller = Caller(tenant, session, request_id, began, patience)
                    async with self._reception.completer.open(ask, caller) as completion:
                        async for chunk in _chunks(completion):
                            yield chunk

    async def HintSession(
        self,
        request: gateway_pb2.HintSessionRequest,
        context: grpc.aio.ServicerContext[gateway_pb2.HintSessionRequest, gateway_pb2.HintSessionResponse],
    ) -> gateway_pb2.HintSessionResponse:
        """Passes on a client's hint about its session, without a request of it. Raises InvalidRequest when the hint is
        empty."""
        headers = metadata(context)
        tenant = self._reception.auth.tenant(headers)
        outlook = _outlook(request.session)
        if outlook == ReturnHint():
            raise InvalidRequest("session: set ended or returns_in_s", field="session")
        session = session_digest(tenant, headers, request.prompt_cache_key or None)
        if not session:
            raise InvalidRequest("x-session-affinity: this metadata must name the session", field="x-session-affinity")
        await self._reception.completer.hint(session, outlook)
        return gateway_pb2.HintSessionResponse()

    async def ListModels(
        self,
        request: gateway_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext[gateway_pb2.ListModelsRequest, gateway_pb2.ListModelsResponse],
    ) -> gateway_pb2.ListModelsResponse:
        """The served models."""
        self._reception.auth.identify(metadata(context))
        known = self._reception.view.known
        model = gateway_pb2.Model(
            id=self._reception.config.served_name,
            created=self._reception.started,
            context_length=known.max_model_len if known else 0,
        )
        return gateway_pb2.ListModelsResponse(models=[model])


def metadata(context: grpc.aio.ServicerContext[Any, Any]) -> Mapping[str, str]:
    """The text entries of the call's metadata."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def read_request(request: gateway_pb2.ChatCompletionRequest, max_choices: int) -> Ask:
    """The ask of a message. Raises InvalidRequest naming the field."""
    check_count("messages", len(request.messages), bounds.MAX_MESSAGES)
    if not request.messages:
        raise InvalidRequest("messages: must not be empty", field="messages")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs: requires logprobs to be true", field="top_logprobs")
    check("top_logprobs", request.top_logprobs)
    nodes = Nodes()
    messages = [_message(message, at, nodes) for at, message in enumerate(request.messages)]
    tools = [_tool(tool, at, nodes) for at, tool in enumerate(request.tools)]
    check_tools(tools, "tools[{at}].name")
    conversation = Conversation(messages, tools, _calling(request, tools), _keeps(request, messages))
    ask = Ask(
        model=request.model,
        prompts=[conversation],
        sampling=_sampling(request),
        constraint=_constraint(request),
        stops=tuple(request.stop),
        n=request.n or 1,
        stream=True,
        include_usage=True,
        cache_key=request.prompt_cache_key or None,
        retain_s=seconds("penstock.retain", request.retain_s, "retain_s") if request.retain_s else 0.0,
        outlook=_outlook(request.session) if request.HasField("session") else ReturnHint(),
        max_tokens_field="max_completion_tokens",
    )
    ask.check(max_choices)
    return ask


def _keeps(request: gateway_pb2.ChatCompletionRequest, messages: Sequence[Message]) -> tuple[Keep, ...]:
    marked = [at for at, message in enumerate(request.messages) if message.retain_s]
    check_count("messages.retain_s", len(marked), bounds.MAX_MARKS)
    return tuple(
        Keep(seconds("penstock.retain", request.messages[at].retain_s, f"messages[{at}].retain_s"), messages[: at + 1])
        for at in marked
    )


def _outlook(said: gateway_pb2.SessionOutlook) -> ReturnHint:
    returns_in = said.returns_in_s if said.HasField("returns_in_s") else None
    return SessionBody(said.ended, returns_in).outlook("session")


def _sampling(request: gateway_pb2.ChatCompletionRequest) -> Sampling:
    given: dict[str, Any] = {
        name: getattr(request, name)
        for name in (
            "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty", "seed",
        )
        if request.HasField(name)
    }  # fmt: skip
    return Sampling(
        max_tokens=request.max_completion_tokens if request.HasField("max_completion_tokens") else None,
        logit_bias=dict(request.logit_bias),
        logprobs=request.top_logprobs if request.logprobs else None,
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        **given,
    )


def _constraint(request: gateway_pb2.ChatCompletionRequest) -> Part | None:
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
    return Message(
        role="system" if message.role == "developer" else message.role,
        content=message.content,
        calls=tuple(Call(call.id, call.name, call.arguments) for call in message.tool_calls),
        call_id=message.tool_call_id,
        reasoning=message.reasoning_content,
    )


def _tool(tool: gateway_pb2.FunctionTool, at: int, nodes: Nodes) -> Tool:
    field = f"tools[{at}].parameters"
    raw = tool.parameters.encode() or b"{}"
    nodes.add(raw, field)
    try:
        parameters = _PARAMETERS.decode(raw)
    except msgspec.ValidationError:
        raise InvalidRequest(f"{field}: must be a JSON object", field=field) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{field}: is not valid JSON: {error}", field=field) from None
    return Tool(tool.name, tool.description, parameters, tool.strict)


def _calling(request: gateway_pb2.ChatCompletionRequest, tools: Sequence[Tool]) -> Calling | None:
    mode = request.tool_choice or "auto"
    if mode not in ("auto", "none", "required"):
        raise InvalidRequest("tool_choice: must be auto, none or required", field="tool_choice")
    only = list(request.allowed_tools) or None
    parallel = request.parallel_tool_calls or not request.HasField("parallel_tool_calls")
    return calling(tools, mode, only, parallel=parallel)


async def _chunks(completion: Completion) -> AsyncIterator[gateway_pb2.ChatCompletionChunk]:
    head: dict[str, Any] = {
        "id": f"chatcmpl-{completion.id}",
        "model": completion.ask.model,
        "created": completion.created,
        "system_fingerprint": completion.fingerprint,
    }
    while deltas := await completion.outbox.next():
        for delta in deltas:
            yield _chunk(head, delta)
    yield gateway_pb2.ChatCompletionChunk(**head, usage=_usage(completion.usage()))


def _chunk(head: dict[str, Any], delta: Delta) -> gateway_pb2.ChatCompletionChunk:
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
        finish_reason=delta.finish or "",
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
        drafted_tokens=usage.drafted,
        accepted_tokens=usage.accepted,
        seconds=usage.times,
        computed_tokens=usage.computed_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        retained_tokens=usage.retained_tokens,
        retained_s=usage.retained_s,
        session=_session(usage.session) if usage.session else None,
        seed=usage.seed,
    )


def _session(use: SessionUse) -> gateway_pb2.SessionUse:
    left = use.divergence
    return gateway_pb2.SessionUse(
        known_tokens=use.known_tokens,
        spliced_tokens=use.spliced_tokens,
        diverged_at_token=left.token if left else None,
        diverged_at_turn=left.turn if left else 0,
    )
