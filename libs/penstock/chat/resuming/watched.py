"""A conversation as a template sees it, which takes note of how far it is read.

It behaves like the list that a template expects, or not at all: everything that a list can do, and that is not written
here, raises Unwatched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import jinja2

END = sys.maxsize
"""As far as the conversation goes, wherever that is."""

Class = TypeVar("Class", bound=type[Any])


class Unwatched(jinja2.TemplateRuntimeError):
    """The template does something that cannot be watched."""


class Reads:
    """How far a conversation has been read."""

    def __init__(self, messages: Sequence[Mapping[str, Any] | str]) -> None:
        """A message that is not given is its role."""
        self.messages = [UnseenMessage(self, each) if isinstance(each, str) else each for each in messages]
        self.through = 0
        """Leading messages that were looked at; `END` when a template has asked where the conversation ends."""
        self.failed = False
        """Unwatched was raised: jinja2's own tests take some errors for an answer."""

    def has(self, at: int) -> bool:
        """Whether there is such a message, which counts as a look at it."""
        exists = at < len(self.messages)
        self.through = max(self.through, at + 1 if exists else END)
        return exists

    def fail(self) -> NoReturn:
        """Raises Unwatched."""
        self.failed = True
        raise Unwatched("this cannot be watched")


def _refusing(*names: str) -> Callable[[Class], Class]:
    """Makes a class whose methods of these names raise Unwatched."""

    def refuse(self: WatchedMessages | UnseenMessage, *_: object) -> NoReturn:
        self._reads.fail()

    def made(cls: Class) -> Class:
        for name in names:
            setattr(cls, name, refuse)
        return cls

    return made


@_refusing(
    "__contains__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__add__", "__radd__",
    "__mul__", "__rmul__", "__mod__", "__rmod__", "__str__", "__repr__", "__format__", "__call__",
)  # fmt: skip
class WatchedMessages:
    """The messages from one of them on."""

    def __init__(self, reads: Reads, start: int = 0) -> None:
        self._reads = reads
        self._start = start

    def __getattr__(self, name: str) -> Any:
        if hasattr(list, name) and not name.startswith("__"):
            self._reads.fail()
        raise AttributeError(name)

    def __len__(self) -> int:
        return len(self._rest())

    def __bool__(self) -> bool:
        return self._reads.has(self._start)

    def __iter__(self) -> Iterator[Any]:
        at = self._start
        while self._reads.has(at):
            yield self._reads.messages[at]
            at += 1

    def __reversed__(self) -> Iterator[Any]:
        return iter(self._rest()[::-1])

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int) and key >= 0 and self._reads.has(self._start + key):
            return self._reads.messages[self._start + key]
        if isinstance(key, slice) and key.stop is None and key.step is None and (key.start or 0) >= 0:
            return WatchedMessages(self._reads, self._start + (key.start or 0))
        return self._rest()[key]

    def _rest(self) -> list[Any]:
        self._reads.through = END
        return self._reads.messages[self._start :]


@_refusing(
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__or__", "__ror__", "__mod__", "__rmod__",
    "__len__", "__iter__", "__reversed__", "__str__", "__repr__", "__format__", "__call__",
)  # fmt: skip
class UnseenMessage:
    """A message of which only the role is at hand."""

    def __init__(self, reads: Reads, role: str) -> None:
        self._reads = reads
        self._role = role

    def __getattr__(self, name: str) -> Any:
        if name != "role" and not name.startswith("__"):
            self._reads.fail()
        raise AttributeError(name)

    def __bool__(self) -> bool:
        return True

    def __contains__(self, key: object) -> bool:
        return key == "role" or self._reads.fail()

    def __getitem__(self, key: object) -> str:
        return self._role if key == "role" else self._reads.fail()

    def get(self, key: object, default: object = None) -> str:
        """The role; nothing else is known."""
        return self[key]


Mapping.register(UnseenMessage)


def start_of(messages: WatchedMessages) -> int:
    """Number of the conversation's first message in `messages`."""
    return messages._start
