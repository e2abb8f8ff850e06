"""`python -m penstock.grammar.helper TOKENIZER`: tries grammars for a gateway, one at a time; may be killed any time.

A recipe comes in on standard input, what became of it goes out on standard output, each as four bytes of length and
JSON. Compiling is native code that can't be interrupted and has no bound of its own, so the kernel sets them: a grammar
that needs more processor time or memory than it may ends this process, and its gateway starts another.
"""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock.errors import InvalidRequest
from penstock.grammar.complaints import complaint, locate
from penstock.grammar.recipe import MAX_TEXT, Recipe, build

_HEADER = 4
_STEPS = 32
"""Tokens of a text that are tried: what a grammar costs shows where its text branches, not at its beginning."""


class Bounds(msgspec.Struct):
    """The first message: what each grammar may use."""

    cpu_s: float
    memory_bytes: int


class Verdict(msgspec.Struct, omit_defaults=True):
    """The answer to a recipe: the grammar's text, or what is wrong with it."""

    grammar: str = ""
    message: str = ""
    field: str | None = None
    code: str | None = None


def write_frame(out: BinaryIO, message: bytes) -> None:
    """Sends one message."""
    out.write(len(message).to_bytes(_HEADER, "big") + message)
    out.flush()


def read_frame(source: BinaryIO) -> bytes | None:
    """The next message; None at the end."""
    header = source.read(_HEADER)
    return source.read(int.from_bytes(header, "big")) if len(header) == _HEADER else None


class Trial:
    """Tries recipes with one model's tokenizer."""

    def __init__(self, tokenizer: str, control: Collection[str]) -> None:
        """`tokenizer` is the content of tokenizer.json."""
        self._tokenizer = LLTokenizer(tokenizer)
        self._control = control
        self._ends = sum(1 << token for token in self._tokenizer.eos_tokens)
        self._limits = LLParserLimits(verbose_errors=False)

    def verdict(self, recipe: Recipe) -> Verdict:
        """The grammar of a recipe, compiled and followed for a few tokens."""
        try:
            grammar = build(recipe, self._control)
        except InvalidRequest as error:
            return Verdict(message=error.message, field=error.field, code=error.code)
        if len(grammar) > MAX_TEXT:
            at = recipe.at
            return Verdict(message=f"{at}: is too large with all that it refers to", field=at, code="schema_too_large")
        if not (wrong := self._wrong(grammar)):
            return Verdict(grammar=grammar)
        at, what = locate(recipe, grammar, self._wrong, wrong)
        return Verdict(message=f"{at}: {complaint(what)}", field=at, code="invalid_schema")

    def _wrong(self, grammar: str) -> str:
        """What the compiler says against a grammar, empty when nothing."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            return str(matcher.get_error()) or "it can't be compiled"
        return self._followed(matcher.deep_copy(), first=True) or self._followed(matcher, first=False)

    def _followed(self, matcher: LLMatcher, *, first: bool) -> str:
        """What goes wrong on the way that always takes the first of the possible tokens, or always the last."""
        for _ in range(_STEPS):
            possible = int.from_bytes(matcher.compute_bitmask(), "little")
            if matcher.is_error():
                break
            if not possible or (matcher.is_stopped() and not matcher.is_accepting()):
                return "no text satisfies it"
            onward = possible & ~self._ends
            token = (onward & -onward if first else onward).bit_length() - 1
            if matcher.is_stopped() or not onward or not matcher.consume_token(token):
                break
        return str(matcher.get_error())


def control_texts(tokenizer: str) -> tuple[str, ...]:
    """The texts of the tokens that a tokenizer was given besides its vocabulary."""
    added: list[dict[str, Any]] = msgspec.json.decode(tokenizer).get("added_tokens") or []
    return tuple(str(token["content"]) for token in added if str(token["content"]).strip())


def _bound_memory(more: int) -> None:
    """Limits this process to its present size and `more` bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(tokenizer_file: str) -> None:
    """Serves until the input ends."""
    source, out = sys.stdin.buffer, sys.stdout.buffer
    first = read_frame(source)
    if first is None:
        return
    bounds = msgspec.json.decode(first, type=Bounds)
    content = Path(tokenizer_file).read_text(encoding="utf-8")
    trial = Trial(content, control_texts(content))
    decoder = msgspec.json.Decoder(Recipe)
    _bound_memory(bounds.memory_bytes)
    write_frame(out, b"{}")
    while (message := read_frame(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, bounds.cpu_s)  # SIGPROF ends the process
        verdict = trial.verdict(decoder.decode(message))
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(out, msgspec.json.encode(verdict))


if __name__ == "__main__":
    main(sys.argv[1])
