"""White space in a schema's patterns: that of ECMA-262, whose regular expressions JSON Schema has."""

from __future__ import annotations

import re

_SPACE = r"[\s\x{FEFF}--\x{85}]"
"""As the compiler's dialect has it: there U+0085 counts and U+FEFF does not."""
_CLASSES = {r"\s": _SPACE, r"\S": f"[^{_SPACE}]"}
_PARTS = re.compile(r"\[\^?(?:\\.|[^\]\\])*\]|\\.|.", re.DOTALL)
"""A class, an escape, or a character."""
_MEMBERS = re.compile(r"\[\^?|(?:\\.|[^\]\\])-(?:\\.|[^\]\\])|\\.|.", re.DOTALL)
"""Of a class: how it opens, a range, an escape, or a character."""


def whitespace_of_ecmascript(pattern: str) -> str:
    r"""The pattern with `\s` and `\S` as ECMA-262 has them, also in classes. What stands at an end of a range stays:
    the compiler refuses it."""
    if not any(name in pattern for name in _CLASSES):
        return pattern
    return _PARTS.sub(_translated, pattern)


def _translated(part: re.Match[str]) -> str:
    text = part[0]
    if len(text) > 2 and text.startswith("["):
        return "".join(_CLASSES.get(member, member) for member in _MEMBERS.findall(text))
    return _CLASSES.get(text, text)


def as_sent(pattern: str) -> str:
    """What `whitespace_of_ecmascript` made this of, for messages."""
    for name in (r"\S", r"\s"):  # the second is a part of the first
        pattern = pattern.replace(_CLASSES[name], name)
    return pattern
