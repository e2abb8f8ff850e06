"""llama.cpp's GBNF, and the EBNF of SGLang and vLLM, which is the same, as Lark.

GBNF has no tokens: it says character by character what may come. A lexer that takes the longest piece would lose
texts, so every character becomes a piece of its own; only where the whole grammar has no rule inside of itself is it
one regular expression, which means the same and is faster to follow.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from penstock.errors import InvalidRequest
from penstock.grammar.schema import check_literal

_SPACE = re.compile(r"(?:[ \t]|#[^\n]*)*")
_SPACES = re.compile(r"(?:\s|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_HEAD = re.compile(r"[A-Za-z0-9_-]+[ \t]*::=")
_REPEAT = re.compile(r"\*|\+|\?|\{\s*(\d+)\s*(?:(,)\s*(\d+)?\s*)?\}")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_PLAIN = {"n": "\n", "r": "\r", "t": "\t"}
_MOST_DEEP = 100
_MOST_REPEATS = 1_000
_EMPTY = '""'


@dataclass(frozen=True, slots=True)
class _Char:
    """One character out of a class, as a regular expression."""

    pattern: str


@dataclass(frozen=True, slots=True)
class _Ref:
    name: str


@dataclass(frozen=True, slots=True)
class _Many:
    node: _Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class _Group:
    """Alternatives, each a sequence."""

    options: tuple[tuple[_Node, ...], ...]


_Node = _Char | _Ref | _Many | _Group


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar is written in GBNF: its first rule is."""
    return _HEAD.match(grammar, _skip(_SPACES, grammar, 0)) is not None


def gbnf_to_lark(grammar: str, at: str, control: Collection[str] = ()) -> str:
    """The same grammar as Lark. Raises InvalidRequest naming the line."""
    rules = _Parser(grammar, at, control).rules()
    if "root" not in rules:
        raise InvalidRequest(f"{at}: has no rule named root", field=at, code="invalid_schema")
    for name in {name for rule in rules.values() for name in _names(rule)} - set(rules):
        raise InvalidRequest(f"{at}: there is no rule {name[:80]!r}", field=at, code="invalid_schema")
    order = _order(rules)
    letter, names = ("r", list(rules)) if order is None else ("R", order)  # capitals make it one regular expression
    numbers = {name: f"{letter}{number}" for number, name in enumerate(names)}
    lines = [f"{numbers[name]}: {_rule(rules[name], numbers)}" for name in names]
    return "\n".join([f"start: {numbers['root']}", *lines]) + "\n"


def _names(node: _Node) -> set[str]:
    if isinstance(node, _Ref):
        return {node.name}
    if isinstance(node, _Many):
        return _names(node.node)
    if isinstance(node, _Group):
        return {name for option in node.options for part in option for name in _names(part)}
    return set()


def _order(rules: dict[str, _Group]) -> list[str] | None:
    """The rules that root needs, each after those that it needs; None when one needs itself."""
    needs = {name: sorted(_names(rule)) for name, rule in rules.items()}
    order: list[str] = []
    done: dict[str, bool] = {}
    waiting: list[tuple[str, bool]] = [("root", False)]
    while waiting:
        name, leaving = waiting.pop()
        if leaving:
            done[name] = True
            order.append(name)
        elif name not in done:
            done[name] = False
            waiting.append((name, True))
            if any(done.get(other) is False for other in needs[name]):
                return None
            waiting += [(other, False) for other in needs[name] if other not in done]
        elif not done[name]:
            return None
    return order


def _rule(node: _Node, numbers: dict[str, str]) -> str:
    if isinstance(node, _Char):
        return f"/{node.pattern}/"
    if isinstance(node, _Ref):
        return numbers[node.name]
    if isinstance(node, _Many):
        most = "" if node.most is None else str(node.most)
        return f"({_rule(node.node, numbers)}){{{node.least},{most}}}"
    options = (" ".join(_rule(part, numbers) for part in option) or _EMPTY for option in node.options)
    return f"({' | '.join(options)})"


class _Parser:
    """Reads GBNF from one end to the other."""

    def __init__(self, text: str, at: str, control: Collection[str]) -> None:
        self._text = text
        self._at = at
        self._control = control
        self._here = 0

    def rules(self) -> dict[str, _Group]:
        """All rules by name."""
        found: dict[str, _Group] = {}
        self._here = _skip(_SPACES, self._text, 0)
        while self._here < len(self._text):
            name = self._match(_NAME, "a rule's name")[0]
            self._here = _skip(_SPACE, self._text, self._here)
            self._expect("::=")
            self._here = _skip(_SPACES, self._text, self._here)
            if name in found:
                raise self._bad(f"the rule {name[:80]!r} is there twice")
            found[name] = self._options(0)
            if self._here < len(self._text) and self._text[self._here] not in "\r\n":
                raise self._bad("a rule must end with its line")
            self._here = _skip(_SPACES, self._text, self._here)
        return found

    def _options(self, deep: int) -> _Group:
        if deep > _MOST_DEEP:
            raise self._bad(f"groups are nested more than {_MOST_DEEP} deep")
        options = [self._sequence(deep)]
        while self._next_is("|", deep):
            self._here = _skip(_SPACES, self._text, self._here + 1)
            options.append(self._sequence(deep))
        return _Group(tuple(options))

    def _next_is(self, letter: str, deep: int) -> bool:
        """Whether `letter` comes next; alternatives may go on in the next line."""
        there = _skip(_SPACES, self._text, self._here)
        if self._text[there : there + 1] == letter:
            self._here = there
            return True
        return False

    def _sequence(self, deep: int) -> tuple[_Node, ...]:
        space = _SPACES if deep else _SPACE
        found: list[_Node] = []
        while True:
            self._here = _skip(space, self._text, self._here)
            letter = self._text[self._here : self._here + 1]
            if letter == '"':
                parts: tuple[_Node, ...] = self._literal()
            elif letter == "[":
                parts = (self._class(),)
            elif letter == ".":
                self._here += 1
                parts = (_Char(r"(?s:.)"),)
            elif letter == "(":
                self._here += 1
                parts = (self._options(deep + 1),)
                self._here = _skip(_SPACES, self._text, self._here)
                self._expect(")")
            elif letter and _NAME.match(letter):
                parts = (_Ref(self._match(_NAME, "a rule's name")[0]),)
            else:
                return tuple(found)
            found += self._repeated(parts)

    def _repeated(self, parts: tuple[_Node, ...]) -> tuple[_Node, ...]:
        """The parts, repeated as it says behind them; a repetition means all of a literal."""
        match = _REPEAT.match(self._text, _skip(_SPACE, self._text, self._here))
        if match is None:
            return parts
        self._here = match.end()
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(match[0])
        least = simple[0] if simple else int(match[1])
        most = simple[1] if simple else None if match[2] and not match[3] else int(match[3] or match[1])
        if max(least, most or 0) > _MOST_REPEATS or (most is not None and most < least):
            raise self._bad(f"a repetition must go from few to at most {_MOST_REPEATS} times")
        return (_Many(parts[0] if len(parts) == 1 else _Group((parts,)), least, most),)

    def _literal(self) -> tuple[_Node, ...]:
        self._here += 1
        found = ""
        while (letter := self._letter('"')) is not None:
            found += letter
        check_literal(found, self._at, self._control)
        return tuple(_Char(_code(letter)) for letter in found)

    def _class(self) -> _Char:
        self._here += 1
        found = "["
        if self._text[self._here : self._here + 1] == "^":
            found, self._here = "[^", self._here + 1
        while (letter := self._letter("]")) is not None:
            found += _code(letter)
            if self._text[self._here : self._here + 1] == "-" and self._text[self._here + 1 : self._here + 2] != "]":
                self._here += 1
                last = self._letter("]")
                if last is None or last < letter:
                    raise self._bad("a range must go from a character to a later one")
                found += f"-{_code(last)}"
        if found in ("[", "[^"):
            raise self._bad("a class must have a character")
        return _Char(f"{found}]")

    def _letter(self, end: str) -> str | None:
        """The next character of a literal or a class; None at its end."""
        letter = self._text[self._here : self._here + 1]
        if not letter or letter == "\n":
            raise self._bad(f"{end} is missing")
        if letter == end:
            self._here += 1
            return None
        if letter != "\\":
            self._here += 1
            return letter
        match = self._match(_ESCAPE, "an escape")
        code = match[1] or match[2] or match[3]
        try:
            return chr(int(code, 16)) if code else _PLAIN.get(match[4], match[4])
        except (ValueError, OverflowError):
            raise self._bad("there is no such character") from None

    def _match(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        match = pattern.match(self._text, self._here)
        if match is None:
            raise self._bad(f"{what} was expected")
        self._here = match.end()
        return match

    def _expect(self, text: str) -> None:
        if not self._text.startswith(text, self._here):
            raise self._bad(f"{text} was expected")
        self._here += len(text)

    def _bad(self, what: str) -> InvalidRequest:
        line = self._text.count("\n", 0, self._here) + 1
        return InvalidRequest(f"{self._at}: line {line}: {what}", field=self._at, code="invalid_schema")


def _skip(pattern: re.Pattern[str], text: str, here: int) -> int:
    match = pattern.match(text, here)
    assert match is not None
    return match.end()


def _code(letter: str) -> str:
    """One character in a regular expression, in or outside of a class."""
    return f"\\x{{{ord(letter):X}}}"
