"""What models write: calls and reasoning, of every family, in pieces of any size."""

from __future__ import annotations

from itertools import pairwise

from tests.libs.chat.formats.reading import Parsed, parse

from penstock.chat.formats.families import FORMATS
from penstock.chat.formats.format import ToolFormat
from penstock.chat.stops import StopAutomaton

from .contract import LOOP_S, Contract, plain

_MOST = 2000
"""Characters that each family reads three times."""
WORDS = tuple(
    {
        word.encode()
        for family in FORMATS.values()
        for word in (*family.control, *(str(piece) for pattern in (*family.heads, *family.tails) for piece in pattern))
    }
) + tuple(word.encode() for word in ("f", "get_weather", "\n", " ", "\\", '"', "'", "{}", "functions.f:0", "\t" * 70))


def _calls(data: bytes) -> None:
    """The first byte says how the answer begins; the rest is its text."""
    text = data[1:].decode(errors="replace")[:_MOST]
    thinking, think = bool(data[:1] and data[0] & 1), bool(data[:1] and data[0] & 2)
    for family in FORMATS.values():
        whole = parse(family, text, think=think, thinking=thinking)
        assert parse(family, *text, think=think, thinking=thinking) == whole
        assert parse(family, *_pieces(text), think=think, thinking=thinking) == whole
        _check(family, text, whole, plain_text=not (think or thinking))


def _pieces(text: str) -> list[str]:
    cuts = sorted({at for at in range(0, len(text), 3) if ord(text[at]) % 3 == 0} | {0, len(text)})
    return [text[begin:end] for begin, end in pairwise(cuts)]


def _check(family: ToolFormat, text: str, parsed: Parsed, *, plain_text: bool) -> None:
    """Text that is no call is content as it is, and nothing is made up."""
    if plain_text and not parsed.calls:
        assert parsed.content == text
    if family.values == "json":
        assert all(arguments in text for _, arguments in parsed.calls), "arguments are given on as generated"
    assert {name for name, _ in parsed.calls} <= {"f", "get_weather"}


def _stops(data: bytes) -> None:
    """The first line is the stop strings, the others are the text: against a search for the first of them."""
    line, _, rest = data.partition(b"\n")
    stops = [stop for stop in line.decode(errors="replace").split(" ")[:8] if stop]
    text, automaton, state = rest.decode(errors="replace")[:_MOST], StopAutomaton(stops), 0
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    for at, letter in enumerate(text, 1):
        state = automaton.step(state, letter)
        if automaton.match[state]:
            assert at == min(ends) and text[at - automaton.match[state] : at] in stops
            return
    assert not ends


CONTRACTS = (
    Contract(name="calls", opened=plain(_calls), refusals=(), words=WORDS, examples=80, seconds=2.0),
    Contract(name="stops", opened=plain(_stops), refusals=(), words=(b" ", b"ab", b"aba", b"\n"), seconds=10 * LOOP_S),
)
