"""Chat templates: whole renderings, and those that go on from an earlier one (see `resuming`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import jinja2

from penstock.chat.resuming.loops import watching
from penstock.chat.resuming.run import WatchedRun
from penstock.chat.resuming.waypoint import Rest, Waypoint
from penstock.chat.sandbox import MAX_RENDERED, generated_arguments, names_read, sandbox
from penstock.errors import InvalidRequest

_GIVEN = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables that every template is given."""
Shown = Mapping[str, Any]
"""A message or a tool as templates expect it."""


class Renders(Protocol):
    """What makes the prompt of messages."""

    @property
    def source(self) -> str:
        """The template's text."""

    @property
    def variables(self) -> frozenset[str]:
        """What a client may set besides messages and tools, because the template reads it."""

    def render(
        self,
        messages: Sequence[Shown],
        tools: Sequence[Shown] | None,
        *,
        generate: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text; `generate`: it opens an answer. Raises InvalidRequest."""

    def resume(
        self,
        messages: Sequence[Shown | str],
        tools: Sequence[Shown] | None,
        waypoint: Waypoint | None,
        *,
        generate: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> Rest | None:
        """The text from `waypoint` on, or of the whole conversation when there is none.

        For a message before the waypoint its role can stand alone. None: it cannot be resumed there, as with other
        tools or `variables` where they may matter, so render the whole. Raises InvalidRequest.
        """


class ChatTemplate:
    """One template: checked when it is made, and compiled when it first renders, unless `compile` was called."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens` are variables such as `bos_token`. Raises ValueError when the template is malformed."""
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        try:
            sandbox().compile(source)
        except RecursionError:
            raise ValueError("the chat template cannot be used: it is nested too deeply") from None
        except (jinja2.TemplateError, SyntaxError, MemoryError, ValueError) as error:
            raise ValueError(f"the chat template cannot be used: {error}") from None

    def compile(self) -> None:
        """Does now what the first rendering would do."""
        _ = self._template, self._watched

    @cached_property
    def _template(self) -> jinja2.Template:
        return sandbox().from_string(self.source)

    @cached_property
    def _watched(self) -> jinja2.Template | None:
        """What `resume` runs; None for a template that cannot be watched."""
        environment = sandbox()
        try:
            watched = watching(environment.parse(self.source))
            return None if watched is None else environment.from_string(watched)
        except (SyntaxError, RecursionError):  # what watches takes it beyond what may be nested
            return None

    @cached_property
    def variables(self) -> frozenset[str]:
        """What a client may set besides messages and tools, because the template reads it."""
        return names_read(self.source).difference(_GIVEN, self.special_tokens, sandbox().globals)

    def render(
        self,
        messages: Sequence[Shown],
        tools: Sequence[Shown] | None,
        *,
        generate: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Arguments of calls that are plain text become what `generated_arguments` makes of it.

        Raises InvalidRequest with the template's own words when it refuses the messages.
        """
        try:
            pieces: list[str] = []
            size = 0
            given = {
                **self._given(tools, generate, variables),
                "messages": [_with_arguments(message) for message in messages],
            }
            for piece in self._template.generate(given):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED:
                    raise InvalidRequest("messages: their rendered form is too long", field="messages")
            return "".join(pieces)
        except InvalidRequest:
            raise
        except Exception as error:  # a template is a program, and what it raises a fault of its own
            # Only what the template itself says, by raise_exception, is meant for the client.
            said = f"refuses these messages: {error}" if type(error) is jinja2.TemplateError else "cannot render these"
            raise InvalidRequest(f"the chat template {said}", field="messages") from None

    def resume(
        self,
        messages: Sequence[Shown | str],
        tools: Sequence[Shown] | None,
        waypoint: Waypoint | None,
        *,
        generate: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> Rest | None:
        """See `Renders.resume`."""
        rest = self._watch(messages, self._given(tools, generate, variables), waypoint)
        if rest is not None or waypoint is not None:
            return rest
        whole = [message for message in messages if not isinstance(message, str)]
        return Rest(self.render(whole, tools, generate=generate, variables=variables))

    def _watch(
        self, messages: Sequence[Shown | str], given: Mapping[str, Any], waypoint: Waypoint | None
    ) -> Rest | None:
        """The rest of the text; None where the template does what cannot be watched, and for whatever is wrong."""
        if self._watched is None:
            return None
        shown = [message if isinstance(message, str) else _with_arguments(message) for message in messages]
        run = WatchedRun(shown, given, waypoint)
        try:
            for piece in self._watched.generate({**given, **run.variables()}):
                run.add(piece)
                if run.chars > MAX_RENDERED:
                    return None
        except Exception:
            return None
        return run.rest()

    def _given(
        self, tools: Sequence[Shown] | None, generate: bool, variables: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """All variables but the messages; the client's take the place of none of the others."""
        return {
            **(variables or {}),
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": generate,
            **self.special_tokens,
        }


def _with_arguments(message: Shown) -> Shown:
    """A message whose calls have their arguments as a template wants them."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [call["function"] for call in calls]
    shown = [
        {**call, "function": {**function, "arguments": generated_arguments(function["arguments"])}}
        if type(function.get("arguments")) is str
        else call
        for call, function in zip(calls, functions, strict=True)
    ]
    return {**message, "tool_calls": shown}
