"""The sandbox in which chat templates run, and the values that they see.

The environment offers what Hugging Face templates expect (`tojson` without HTML escapes, `raise_exception`,
`strftime_now`, loop controls, `generation` blocks); `tests/libs/chat/test_template.py` holds its output to that of
transformers. transformers itself is not used: importing its renderer costs 0.8 s of a 1.5 s start and 55 MB, and
its filters re-serialize the arguments of a call, which would change bytes that the model has already seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import TrackingCodeGenerator
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_RENDERED = 64 * 1024 * 1024
"""Characters of a rendered prompt, and of what one operation in a template may make."""
_MAX_POWER = 64


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


def as_generated(value: GeneratedObject) -> str:
    """The text of arguments. Not an attribute: a template would find it in the place of an argument of that name."""
    return value._text


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


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class TemplateNamespace(Namespace):
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


class _AsWritten(CodeGenerator):
    """Computes nothing before the template runs: that is where its time and its memory are bounded."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData | nodes.Const):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_EvalContextModifier(self, node: nodes.EvalContextModifier, frame: Frame) -> None:
        """Of `{% autoescape %}`."""
        if not all(isinstance(option.value, nodes.Const) for option in node.options):
            self.fail("autoescape must be true or false", node.lineno)
        super().visit_EvalContextModifier(node, frame)


class _Names(_AsWritten, TrackingCodeGenerator):
    """Finds the names that a template reads."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.optimizer = None


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, in which no single operation makes a value that is longer than a prompt may be."""

    code_generator_class = _AsWritten

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> Any:
        """`left operator right`. Raises TemplateRuntimeError when the result would be too long."""
        if operator == "*":
            for whole, times in ((left, right), (right, left)):
                if (
                    isinstance(whole, str | list | tuple)
                    and isinstance(times, int)
                    and len(whole) * times > MAX_RENDERED
                ):
                    raise jinja2.TemplateRuntimeError("a template repeats something too often")
        elif isinstance(right, int) and abs(right) > _MAX_POWER:
            raise jinja2.TemplateRuntimeError("a template computes too high a power")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """`obj(...)`. Raises TemplateRuntimeError for a text that is padded beyond all measure."""
        if isinstance(getattr(obj, "__self__", None), str):
            for value in (*args, *kwargs.values()):
                if isinstance(value, int) and value > MAX_RENDERED:
                    raise jinja2.TemplateRuntimeError("a template makes too long a text")
        return super().call(context, obj, *args, **kwargs)


def sandbox() -> ImmutableSandboxedEnvironment:
    """An environment for one template."""
    made = _Sandbox(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _raise, "strftime_now": strftime_now, "namespace": TemplateNamespace}
    for name in ("lipsum", "cycler", "joiner"):
        made.globals.pop(name, None)
    return made


def names_read(source: str) -> frozenset[str]:
    """The names that a template looks for outside of itself, those of its environment included."""
    environment = sandbox()
    finder = _Names(environment)
    finder.visit(environment.parse(source))
    return frozenset(finder.undeclared_identifiers)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if isinstance(value, GeneratedObject):
        return as_generated(value)
    if isinstance(value, GeneratedText):
        return str(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def strftime_now(form: str) -> str:
    """The time now, in a template's own form."""
    return datetime.now().strftime(form)
