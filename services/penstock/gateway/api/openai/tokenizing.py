"""/tokenize and /detokenize, in vLLM's shapes."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Raw

from penstock.errors import InvalidRequest
from penstock.gateway.api.fields import ABSENT, honoured, refused
from penstock.gateway.api.long_numbers import LongNumbers
from penstock.gateway.api.nodes import Nodes
from penstock.gateway.api.openai.asks import message_of
from penstock.gateway.api.openai.bodies import (
    CONTINUED,
    GENERATION_PROMPT,
    TEMPLATE_VARIABLES,
    MessageBody,
    ToolBody,
)
from penstock.gateway.api.openai.rendering import rendering_of
from penstock.gateway.api.openai.tools import shown_tools
from penstock.gateway.api.reader import BodyReader
from penstock.gateway.request import bounds
from penstock.gateway.request.ask import Conversation
from penstock.gateway.request.bounds import check_count

_TEMPLATE = "the model's own chat template is used"


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /tokenize: a raw prompt, or messages."""

    model: Annotated[str | None, honoured("the first of the served models, if left out")] = None
    prompt: str | None = None
    messages: list[MessageBody] | None = None
    tools: Annotated[list[ToolBody] | None, honoured("shown with the messages")] = None
    add_special_tokens: Annotated[bool | None, honoured("of a raw prompt; default true")] = None
    return_token_strs: bool | None = None
    add_generation_prompt: Annotated[bool | None, honoured(GENERATION_PROMPT)] = None
    continue_final_message: Annotated[bool | None, honoured(CONTINUED)] = None
    chat_template: Annotated[Raw, refused(_TEMPLATE)] = ABSENT
    chat_template_kwargs: Annotated[dict[str, Any] | None, honoured(TEMPLATE_VARIABLES)] = None
    mm_processor_kwargs: Annotated[Raw, refused("", {})] = ABSENT


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[int]
    model: Annotated[str | None, honoured("the first of the served models, if left out")] = None


_TOKENIZE = BodyReader(TokenizeBody)
_DETOKENIZE = BodyReader(DetokenizeBody)


def read_tokenize(raw: bytes, ignored: list[str] | None = None) -> tuple[TokenizeBody, Conversation | str]:
    """The body, and the prompt that it asks for. Raises InvalidRequest naming the field."""
    nodes = Nodes()
    nodes.add(raw)
    body = _TOKENIZE.read(raw, ignored)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt: send either a prompt or messages", field="prompt")
    if body.prompt is not None:
        return body, body.prompt
    return body, _conversation(body, body.messages or (), nodes)


def read_detokenize(raw: bytes, ignored: list[str] | None = None) -> DetokenizeBody:
    """The body. Raises InvalidRequest naming the field."""
    Nodes(bounds.MAX_SHOWN).add(raw)
    ids = LongNumbers(raw)
    body = _DETOKENIZE.read(ids.rest, ignored)
    try:
        body.tokens = ids.put_back(body.tokens)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"tokens: must be whole numbers: {error}", field="tokens") from None
    return body


def _conversation(body: TokenizeBody, messages: Sequence[MessageBody], nodes: Nodes) -> Conversation:
    check_count("messages", len(messages), bounds.MAX_MESSAGES)
    if not messages:
        raise InvalidRequest("messages: must not be empty", field="messages")
    shown = [message_of(item, at, nodes) for at, item in enumerate(messages)]
    return Conversation(shown, shown_tools(body.tools or ()), rendering=rendering_of(body))
