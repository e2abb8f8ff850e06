"""One run of a template over a watched conversation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jinja2.runtime import LoopContext, Macro, Undefined

from penstock.chat.resuming.loops import WALK
from penstock.chat.resuming.watched import END, Reads, WatchedMessages, start_of
from penstock.chat.resuming.waypoint import Rest, Waypoint
from penstock.chat.sandbox import GeneratedObject, TemplateNamespace, as_generated, strftime_now

_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class _State:
    """What a waypoint holds of a template."""

    walk: int
    """Loops that have begun, this one included."""
    entry: str
    """A digest of what the template knew when the loop began."""
    index: int
    """The loop's next round."""
    spaces: list[dict[str, Any]]
    """The values of the namespaces that there were then."""


class WatchedRun:
    """Watches one rendering, from the beginning or from a waypoint."""

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any] | str],
        given: Mapping[str, Any],
        waypoint: Waypoint | None,
    ) -> None:
        """`given` are the template's other variables, as JSON values: a rendering with others is another one."""
        self.chars = 0
        """Of the whole text so far."""
        self._pieces: list[str] = []
        self._reads = Reads(messages)
        self._given = given
        self._from = waypoint
        self._sought = None if waypoint is None else _State(*json.loads(waypoint.state))
        self._spaces: list[TemplateNamespace] = []
        self._lasting: Sequence[TemplateNamespace] = ()
        """Those that were made before the loop that runs."""
        self._walks = 0
        self._next: Waypoint | None = None

    def variables(self) -> dict[str, Any]:
        """The template's variables that are watched."""
        return {
            "messages": WatchedMessages(self._reads),
            "namespace": self._namespace,
            "strftime_now": self._now,
            WALK: self.walk,
        }

    def add(self, piece: str) -> None:
        """Takes a piece of the text."""
        self._pieces.append(piece)
        self.chars += len(piece)

    def rest(self) -> Rest | None:
        """The text from the waypoint on; None when the run has not come by there, or could not be watched."""
        if self._reads.failed or self._sought is not None:
            return None
        return Rest("".join(self._pieces), self._next)

    def walk(self, number: int, items: Any, names: Mapping[str, Any]) -> LoopContext:
        """The rounds of the template's loop `number` over `items`; `names` are the template's own variables."""
        self._walks += 1
        if not isinstance(items, WatchedMessages):
            return LoopContext(items, Undefined)
        entry = self._entry([number, items, names])
        self._lasting = list(self._spaces)
        self._reads.through, self._next = 0, None  # what was read before is in the digest, or read again
        sought = self._sought
        if sought is None or self._from is None or sought.walk != self._walks:
            return _Rounds(self, items, entry, 0)
        if sought.entry != entry:
            self.fail()
        self._sought = None
        self._pieces, self.chars, self._reads.through = [], self._from.chars, self._from.through
        for space, values in zip(self._lasting, sought.spaces, strict=True):
            _values(space).update(values)
        return _Rounds(self, items, entry, sought.index)

    def passed(self, entry: str, index: int, at: int) -> None:
        """A loop is about to begin a round, with message `at`."""
        spaces = [_values(space) for space in self._lasting]
        kept = all(type(value) in _PLAIN for values in spaces for value in values.values())
        if self._reads.through != END and kept:
            state = json.dumps([self._walks, entry, index, spaces])
            self._next = Waypoint(self.chars, at, max(at, self._reads.through), state)

    def rendered(self, at: int) -> Any:
        """Message `at`, which a round has had before."""
        return self._reads.messages[at]

    def fail(self) -> NoReturn:
        """Raises Unwatched."""
        self._reads.fail()

    def _namespace(self, *args: Any, **kwargs: Any) -> TemplateNamespace:
        space = TemplateNamespace(*args, **kwargs)
        self._spaces.append(space)
        return space

    def _now(self, form: str) -> str:
        self._reads.through = END  # nobody knows how long it stays
        return strftime_now(form)

    def _entry(self, known: Sequence[Any]) -> str:
        text = "".join(self._pieces)
        given = json.dumps(self._given)
        spaces = [_values(space) for space in self._spaces]
        said = json.dumps([self._walks, text, given, self._said(known), self._said(spaces)])
        return hashlib.blake2b(said.encode(), digest_size=32).hexdigest()

    def _said(self, value: Any) -> Any:
        """A value as JSON that no other value has."""
        if type(value) in _PLAIN:
            return value
        if value is self._given["tools"]:
            return ["tools"]
        if isinstance(value, WatchedMessages):
            return ["messages", start_of(value)]
        if isinstance(value, Undefined):
            return ["undefined"]
        if isinstance(value, Macro):
            return ["macro", value.name, value._func.__code__.co_firstlineno]
        if isinstance(value, TemplateNamespace):
            return ["namespace", [space is value for space in self._spaces].index(True)]
        if isinstance(value, GeneratedObject):
            return ["arguments", as_generated(value)]
        if type(value) in (list, tuple):
            return [type(value).__name__, [self._said(item) for item in value]]
        if type(value) is dict:
            return ["dict", [[self._said(key), self._said(item)] for key, item in value.items()]]
        self.fail()


class _Rounds(LoopContext):
    """A loop over messages, which may begin with a later one."""

    def __init__(self, run: WatchedRun, items: WatchedMessages, entry: str, index: int) -> None:
        super().__init__(items, Undefined)
        self._run = run
        self._entry = entry
        self._start = start_of(items)
        if index:
            self.index0 = index - 1
            self._iterator = iter(items[index:])
            self._current = run.rendered(self._start + self.index0)

    def __next__(self) -> tuple[Any, LoopContext]:
        following = self.index0 + 1
        self._run.passed(self._entry, following, self._start + following)
        return super().__next__()

    def changed(self, *value: Any) -> bool:
        """Depends on earlier rounds in a way that is not watched."""
        self._run.fail()

    def __repr__(self) -> str:
        self._run.fail()


def _values(space: TemplateNamespace) -> dict[str, Any]:
    values: dict[str, Any] = space._Namespace__attrs
    return values
