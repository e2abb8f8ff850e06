"""How the chat template shows a request's messages: vLLM's fields, and those that name the effort of reasoning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from penstock.chat.messages import Rendering, Variable
from penstock.gateway.api.openai.bodies import ChatBody
from penstock.gateway.request.rendering import effort, rendering, template_variables, thinking


class TemplateFields(Protocol):
    """A body with vLLM's fields for the chat template."""

    chat_template_kwargs: dict[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


def rendering_of(body: TemplateFields) -> Rendering:
    """The rendering that a body asks for. Raises InvalidRequest naming the field."""
    continued = bool(body.continue_final_message)
    return rendering(_variables(body), opened=body.add_generation_prompt, continued=continued)


def _variables(body: TemplateFields) -> Iterator[Variable]:
    """More special ones last."""
    if isinstance(body, ChatBody):
        if body.reasoning is not None:
            yield from effort(body.reasoning.effort, "reasoning.effort")
        yield from effort(body.reasoning_effort, "reasoning_effort")
        yield from thinking(body.enable_thinking)
    yield from template_variables(body.chat_template_kwargs or {})
