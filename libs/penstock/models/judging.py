"""What a written turn got right, whoever wrote it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from .turns import AssistantTurn, Calls, calls_in

_ALONE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"huge": ("tool_exact_huge",), "asking": ("asks_back",), "foreign": ("declines",)}
)
"""Kinds of documents that are there for these figures, and count for no other."""


@dataclass(frozen=True)
class Written:
    """What a model wrote for a turn: its text, and its calls, None where one does not parse."""

    text: str
    calls: Calls | None

    @classmethod
    def freely(cls, text: str) -> Written:
        """As a decoder writes it that knows nothing of calls."""
        return cls(text, calls_in(text))


@dataclass
class Tally:
    """Counts of right and all, by figure."""

    right: Counter[str] = field(default_factory=Counter)
    total: Counter[str] = field(default_factory=Counter)

    def add(self, found: Mapping[str, bool]) -> None:
        self.total.update(found.keys())
        self.right.update(name for name, ok in found.items() if ok)


def judge(turn: AssistantTurn, written: Written) -> dict[str, bool]:
    """The figures that a turn counts for, and whether it is right; which they are depends on the turn alone."""
    found = _JUDGES[turn.label](turn, written)
    return {name: ok for name, ok in found.items() if name in _ALONE.get(turn.kind, found)}


def right_calls(turn: AssistantTurn, written: Written) -> int:
    """How many of a turn's calls are right, name and all arguments; none where there is one too many."""
    wanted, got = turn.calls, written.calls or []
    return sum(one == other for one, other in zip(wanted, got, strict=False)) if len(got) <= len(wanted) else 0


def _call(turn: AssistantTurn, written: Written) -> dict[str, bool]:
    wanted, got = turn.calls, written.calls
    ok = got == wanted
    found = {
        "tool_exact": ok,
        f"tool_exact_{turn.kind}": ok,
        "tool_name": [name for name, _ in got or []] == [name for name, _ in wanted],
        "call_parses": bool(got),
    }
    return found | ({"tool_exact_parallel": ok} if len(wanted) > 1 else {})


def _json(turn: AssistantTurn, written: Written) -> dict[str, bool]:
    try:
        got = json.loads(written.text)
    except ValueError:
        got = None
    wanted = json.loads(turn.expected)
    return {"json_valid": _same_shape(got, wanted), "json_exact": got == wanted}


def _answer(turn: AssistantTurn, written: Written) -> dict[str, bool]:
    if turn.values:
        ok = all(value in written.text for value in turn.values)
        return {"value_exact": ok, f"value_exact_{turn.kind}": ok}
    if "?" in turn.expected:
        return {"asks_back": written.text == turn.expected}
    return {"declines": written.text == turn.expected} if "no tool" in turn.expected else {}


def _chat(turn: AssistantTurn, written: Written) -> dict[str, bool]:
    return {"chat_exact": written.text == turn.expected}


_JUDGES = MappingProxyType({"call": _call, "json": _json, "answer": _answer, "chat": _chat})


def _same_shape(got: Any, wanted: Any) -> bool:
    """Whether an object has exactly the wanted keys with values of the wanted types: valid for its schema."""
    if not isinstance(got, dict) or got.keys() != wanted.keys():
        return False
    kinds = {k: (int, float) if isinstance(v, float) else type(v) for k, v in wanted.items()}
    return all(isinstance(got[k], kind) and isinstance(got[k], bool) == (kind is bool) for k, kind in kinds.items())
