"""What clients say an answer must be: schemas, regular expressions, choices, grammars."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO

import msgspec

from penstock.errors import InvalidRequest
from penstock.grammar.helper import Bounds, Verdict, control_texts, read_frame, write_frame
from penstock.grammar.recipe import Kind, Part, Recipe, answer, build
from penstock.models import embedded

from .contract import Check, Contract

AT = "response_format.json_schema.schema"
SCHEMA_WORDS = tuple(
    f'"{word}"'.encode()
    for word in (
        "type", "object", "array", "string", "integer", "number", "null", "properties", "required", "items", "enum",
        "const", "anyOf", "oneOf", "allOf", "not", "$ref", "$defs", "#/$defs/a", "#", "#/properties/a", "pattern",
        "patternProperties", "additionalProperties", "minItems", "maxItems", "minLength", "maxLength", "minimum",
        "maximum", "exclusiveMinimum", "multipleOf", "format", "date-time", "prefixItems", "uniqueItems", "if", "then",
        "minProperties", "propertyNames", "dependentRequired", "unevaluatedProperties", "$id", "$anchor", "^a+$",
        "[a-z]{1,9999}", "(a|b)*c", "\\\\u0000", "<|im_end|>", "description", "default", "definitions",
    )
)  # fmt: skip
REGEX_WORDS = (
    b"(", b")", b"[", b"]", b"[^", b"{1,3}", b"{999999}", b"{0,}", b"*", b"+", b"?", b"|", b"\\d", b"\\w", b"\\p{L}",
    b"\\b", b"^", b"$", b"(?:", b"(?=", b"(?P<n>", b"\\1", b".", b"(?s:", b"\\x{110000}", b"\\", b"/", b"\n",
)  # fmt: skip
LARK_WORDS = (
    b"start:", b"WORD:", b"/[a-z]+/", b'"a"', b"|", b"~ 2", b"?", b"*", b"%json", b'{"type": "object"}', b"%ignore",
    b"%import common.INT", b"<|im_end|>", b"@a", b"[temperature=1]", b"[lazy]", b"&", b"%regex", b"\n", b"(", b")",
    b"//", b"#", b"->", b"start", b"{", b"}", b"/a/i", b'[stop="x", max_tokens=3]:', b"~ 1..9999",
)  # fmt: skip
GBNF_WORDS = (
    b"root", b"::=", b'"a"', b"[a-z]", b"[^", b"]", b"{1,3}", b"{1000}", b"{,2}", b"*", b"+", b"?", b"|", b"(", b")",
    b"\n", b"#", b".", b"\\x41", b"\\U0010FFFF", b"\\u0000", b'"', b"\\", b"ws", b"-", b"<|im_end|>", b"\r",
)  # fmt: skip
_BOUNDS = Bounds(cpu_s=1.0, memory_bytes=256 << 20)


class Compiler:
    """A helper process that tries grammars, started again when one was too much for it."""

    def __init__(self, errors: IO[bytes]) -> None:
        self._errors = errors
        self._start()

    def _start(self) -> None:
        tokenizer = embedded("penstock-mini") / "tokenizer.json"
        command = [sys.executable, "-W", "ignore", "-m", "penstock.grammar.helper", str(tokenizer)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        write_frame(self._to, msgspec.json.encode(_BOUNDS))
        assert read_frame(self._from) == b"{}"

    def verdict(self, recipe: Recipe) -> Verdict | None:
        """What becomes of a recipe; None when it is too much for the process."""
        write_frame(self._to, msgspec.json.encode(recipe))
        answer = read_frame(self._from)
        if answer is not None:
            return msgspec.json.decode(answer, type=Verdict)
        ended = self.close()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace")
        assert ended in (-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV) or "MemoryError" in said, said
        self._errors.truncate(0)
        self._start()
        return None

    def close(self) -> int:
        """Ends the process, and says how it ended."""
        self._to.close()
        self._from.close()
        return self._process.wait()


@contextmanager
def _constraint(kind: Kind) -> Iterator[Check]:
    control = control_texts((embedded("penstock-mini") / "tokenizer.json").read_text())

    def check(data: bytes) -> None:
        recipe = answer(Part(kind, data.decode(errors="replace"), AT))
        try:
            grammar = build(recipe, control)
        except InvalidRequest as error:
            assert (error.field or "").startswith(AT) and error.message.startswith(AT), error
            assert compiler.verdict(recipe) is not None, "what is refused at once costs nothing"
            raise
        verdict = compiler.verdict(recipe)
        assert verdict is None or verdict.grammar == grammar or (verdict.message and verdict.field)

    with tempfile.TemporaryFile() as errors:
        compiler = Compiler(errors)
        try:
            yield check
        finally:
            compiler.close()


def _contract(name: Kind, words: tuple[bytes, ...]) -> Contract:
    return Contract(name=name, opened=partial(_constraint, name), words=words, examples=100)


CONTRACTS = (
    _contract("schema", SCHEMA_WORDS),
    _contract("regex", REGEX_WORDS),
    _contract("choice", (b'"a"', b"<|im_end|>", b",", b"[", b"]", b'""', b'"\\n"')),
    _contract("tokens", (b"1", b",", b"[", b"]", b"4294967296")),
    Contract(name="lark", opened=partial(_constraint, "grammar"), words=LARK_WORDS, examples=100),
    Contract(name="gbnf", opened=partial(_constraint, "grammar"), words=GBNF_WORDS, examples=100),
)
