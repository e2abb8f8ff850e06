"""What a request may call, given the model: what can be asked of it."""

from __future__ import annotations

from penstock.chat.model import ChatModel
from penstock.errors import InvalidRequest
from penstock.gateway.request.ask import Conversation


def check_calls(model: ChatModel, prompt: Conversation) -> None:
    """Raises InvalidRequest for calls that cannot be promised."""
    calling = prompt.calling
    if calling is None:
        return
    if calling.required and not model.family.heads:
        raise InvalidRequest("tool_choice: this model's chat template has no tool calls", field="tool_choice")
    if calling.required:
        raise InvalidRequest("tool_choice: is not supported", field="tool_choice", code="unsupported_parameter")
    if not calling.parallel:
        what = "parallel_tool_calls: false is not supported"
        raise InvalidRequest(what, field="parallel_tool_calls", code="unsupported_parameter")
    for at, tool in enumerate(prompt.tools):
        if tool.strict:
            field = f"tools[{at}].function.strict"
            raise InvalidRequest(f"{field}: is not supported", field=field, code="unsupported_parameter")
