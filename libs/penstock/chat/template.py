"""Chat templates, rendered in a sandbox.

The environment offers what Hugging Face templates expect (`tojson` without HTML escapes, `raise_exception`,
`strftime_now`, loop controls, `generation` blocks); `tests/libs/chat/test_template.py` holds its output to that of
transformers. transformers itself is not used: importing its renderer costs 0.8 s of a 1.5 s start and 55 MB, and
its filters re-serialize the arguments of a call, which would change bytes that the model has already seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from penstock.errors import InvalidRequest

_MAX_RENDERED = 64 * 1024 * 1024
"""Characters of a rendered prompt, and of what one operation in a template may make."""
_MAX_POWER = 64
_FAULTS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError,
    MemoryError,
)  # fmt: skip


class GeneratedObject(dict[str, Any]):
    """Arguments of a call as a mapping that `tojson` writes back as the exact text that the model generated."""

    def __init__(self, text: str, value: Mapping[str, Any]) -> None:
        super().__init__(value)
        self._text = text

    def __add__(self, text: str) -> str:
        """Some templates join the arguments with other text, as if they were text themselves."""
        return self._text + text

    def __radd__(self, text: str) -> str:
        """See `__add__`."""
        return text + self._text


class GeneratedText(str):
    """Arguments of a call that are not a JSON object; `tojson` writes them back unquoted, as generated."""

    __slots__ = ()


def generated_arguments(text: str) -> GeneratedObject | GeneratedText:
    """Call arguments as templates want them (a mapping) that still render as `text`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return GeneratedText(text)
    return GeneratedObject(text, value) if isinstance(value, dict) else GeneratedText(text)


def _with_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
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


class Renders(Protocol):
    """What makes the prompt of messages."""

    @property
    def source(self) -> str:
        """The template's text."""

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """The prompt's text. Raises InvalidRequest."""


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens` are variables such as `bos_token`. Raises ValueError when the template is malformed."""
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template cannot be used: {error}") from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, generate: bool = True
    ) -> str:
        """The prompt's text. Arguments of calls that are plain text become what `generated_arguments` makes of it.

        Raises InvalidRequest with the template's own words when it refuses the messages.
        """
        try:
            pieces: list[str] = []
            size = 0
            for piece in self._template.generate(
                messages=[_with_arguments(message) for message in messages],
                tools=tools or None,
                documents=None,
                add_generation_prompt=generate,
                **self.special_tokens,
            ):
                pieces.append(piece)
                size += len(piece)
                if size > _MAX_RENDERED:
                    raise InvalidRequest("messages: their rendered form is too long", field="messages")
            return "".join(pieces)
        except _FAULTS as error:
            # Only what the template itself says, by raise_exception, is meant for the client.
            said = f"refuses these messages: {error}" if type(error) is jinja2.TemplateError else "cannot render these"
            raise InvalidRequest(f"the chat template {said}", field="messages") from None


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(Namespace):
    """`namespace()` whose attributes never begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_attribute(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.TemplateRuntimeError(f"a template cannot store {name!r}")


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, in which no single operation makes a value that is longer than a prompt may be."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> Any:
        """`left operator right`. Raises TemplateRuntimeError when the result would be too long."""
        if operator == "*":
            for whole, times in ((left, right), (right, left)):
                if (
                    isinstance(whole, str | list | tuple)
                    and isinstance(times, int)
                    and len(whole) * times > _MAX_RENDERED
                ):
                    raise jinja2.TemplateRuntimeError("a template repeats something too often")
        elif isinstance(right, int) and abs(right) > _MAX_POWER:
            raise jinja2.TemplateRuntimeError("a template computes too high a power")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """`obj(...)`. Raises TemplateRuntimeError for a text that is padded beyond all measure."""
        if isinstance(getattr(obj, "__self__", None), str):
            for value in (*args, *kwargs.values()):
                if isinstance(value, int) and value > _MAX_RENDERED:
                    raise jinja2.TemplateRuntimeError("a template makes too long a text")
        return super().call(context, obj, *args, **kwargs)


def _environment() -> ImmutableSandboxedEnvironment:
    made = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _raise, "strftime_now": _now, "namespace": _Namespace}
    for name in ("lipsum", "cycler", "joiner"):
        made.globals.pop(name, None)
    return made


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if isinstance(value, GeneratedObject):
        return value._text
    if isinstance(value, GeneratedText):
        return str(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)
