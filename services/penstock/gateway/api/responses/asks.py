"""Translates a body of Responses into the gateway's own request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.chat.messages import Rendering, Tool
from penstock.errors import InvalidRequest
from penstock.gateway.api.constraints import text_format
from penstock.gateway.api.extension import Extension, keeps_of
from penstock.gateway.api.metadata import check_metadata
from penstock.gateway.api.nodes import Nodes
from penstock.gateway.api.openai.tools import tool_choice
from penstock.gateway.api.responses.bodies import FunctionToolBody, InputItem, ResponseBody, read_body
from penstock.gateway.api.responses.items import Dialogue
from penstock.gateway.request import bounds
from penstock.gateway.request.ask import Ask, Conversation, Sampling
from penstock.gateway.request.bounds import check, check_count
from penstock.gateway.request.calling import calling, check_tools
from penstock.gateway.request.rendering import effort
from penstock.kv.hint import ReturnHint

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_INCLUDED = (
    LOGPROBS, ENCRYPTED, "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResponseOrder:
    """A body, read as far as that needs nothing else."""

    body: ResponseBody
    items: Sequence[InputItem]
    """The input, in its full form."""
    nodes: Nodes

    @property
    def stored(self) -> bool:
        """Whether the response is to be kept."""
        return self.body.store is not False

    def includes(self, what: str) -> bool:
        """Whether the client wants a part of the output that is left out otherwise."""
        return what in (self.body.include or ())


def read_order(raw: bytes, ignored: list[str] | None = None) -> ResponseOrder:
    """Reads a body. Raises InvalidRequest naming the field; see `BodyReader.read` for `ignored`."""
    nodes = Nodes()
    nodes.add(raw)
    body = read_body(raw, ignored)
    if body.input is None and body.previous_response_id is None:
        raise InvalidRequest("input: is required", field="input")
    items = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input or []
    if not items and body.previous_response_id is None:
        raise InvalidRequest("input: must not be empty", field="input")
    check_count("input", len(items), bounds.MAX_MESSAGES)
    check_metadata(body.metadata or {})
    for name in body.include or ():
        if name not in _INCLUDED:
            raise InvalidRequest(f"include: {name[:64]!r} is not known", field="include")
    return ResponseOrder(body, items, nodes)


def response_ask(order: ResponseOrder, earlier: Sequence[InputItem], items: Sequence[InputItem]) -> Ask:
    """The ask of an order whose input is `items`, after the `earlier` ones. Raises InvalidRequest naming the field."""
    body = order.body
    dialogue = Dialogue(body.instructions, order.nodes)
    dialogue.add(earlier)
    dialogue.add(items, "input")
    if not dialogue.messages:
        raise InvalidRequest("input: must not be empty", field="input")
    check_count("input", len(dialogue.messages), bounds.MAX_MESSAGES)
    tools = tuple(_tool(tool, at) for at, tool in enumerate(body.tools or ()))
    check_tools(tools, "tools[{at}].name")
    mode, only = tool_choice(bytes(body.tool_choice))
    calls = calling(tools, mode, only, parallel=body.parallel_tool_calls is not False)
    keeps = tuple(keeps_of(dialogue.messages, dialogue.marks))
    extension = body.penstock or Extension()
    ask = Ask(
        model=body.model,
        prompts=[
            Conversation(
                dialogue.messages,
                tools,
                calls,
                keeps,
                _rendering(body),
                shorten=body.truncation == "auto",
                field="input",
            )
        ],
        sampling=Sampling(
            max_tokens=body.max_output_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            logprobs=_logprobs(order),
            drafts=extension.drafts is not False,
        ),
        stream=bool(body.stream),
        cache_key=body.prompt_cache_key,
        retain_s=extension.retain_s(),
        outlook=extension.session.outlook("penstock.session") if extension.session else ReturnHint(),
        urgency=extension.urgency(),
        max_tokens_field="max_output_tokens",
        constraint=text_format(bytes(body.text.format)) if body.text else None,
    )
    ask.check(1)
    return ask


def _rendering(body: ResponseBody) -> Rendering:
    return Rendering(variables=effort(body.reasoning.effort, "reasoning.effort") if body.reasoning else ())


def _logprobs(order: ResponseOrder) -> int | None:
    check("top_logprobs", order.body.top_logprobs)
    if order.body.top_logprobs is None and not order.includes(LOGPROBS):
        return None
    if order.body.tools:  # a call has no place for them
        raise InvalidRequest("top_logprobs: is not supported together with tools", field="top_logprobs")
    return order.body.top_logprobs or 0


def is_reference(item: InputItem) -> bool:
    """Whether an item only names one of a stored response."""
    return item.type == "item_reference" or (item.type is None and item.role is None and item.id is not None)


def _tool(body: FunctionToolBody, at: int) -> Tool:
    if body.type != "function":
        what = f"tools[{at}].type: {body.type[:40]!r} is not supported; only function is"
        raise InvalidRequest(what, field=f"tools[{at}].type", code="unsupported_parameter")
    schema = f"tools[{at}].parameters"
    return Tool(body.name, body.description or "", body.parameters or {}, bool(body.strict), schema)
