"""How the chat template shows a request's messages, as every API asks for it in fields of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penstock.chat.messages import Rendering, Variable
from penstock.errors import InvalidRequest


def rendering(variables: Iterable[Variable], *, opened: bool | None, continued: bool) -> Rendering:
    """A rendering with these variables, of which the last one of a name counts. `opened`: the template opens an answer
    (None: it does unless the last message is `continued`). Raises InvalidRequest where both are asked for."""
    if continued and opened:
        what = "continue_final_message: must not be true together with add_generation_prompt"
        raise InvalidRequest(what, field="continue_final_message")
    named = {variable.name: variable for variable in variables}
    return Rendering(generate=opened is not False, continued=continued, variables=tuple(named.values()))


def effort(value: str | None, at: str) -> tuple[Variable, ...]:
    """A wish for more or less reasoning, for templates that know such wishes."""
    return () if value is None else (Variable("reasoning_effort", value, at, wish=True),)


def thinking(value: bool | None) -> tuple[Variable, ...]:
    """Whether the model thinks, for templates that ask."""
    return () if value is None else (Variable("enable_thinking", value, "enable_thinking"),)


def template_variables(values: Mapping[str, Any]) -> Iterator[Variable]:
    """Variables that the client names itself."""
    for name, value in values.items():
        yield Variable(name, value, f"chat_template_kwargs.{name[:64]}")
