"""The router's memory of sessions: where they ran."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

import msgspec

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """A bounded map whose entries expire: at most `size` of them, each for `ttl` seconds after it was last set."""

    def __init__(self, size: int, ttl: float) -> None:
        self._size = size
        self._ttl = ttl
        self._entries: OrderedDict[Key, tuple[float, Value]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key, now: float) -> Value | None:
        """The value, if it was set within the last `ttl` seconds."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if now - entry[0] > self._ttl:
            del self._entries[key]
            return None
        return entry[1]

    def entry(self, key: Key) -> tuple[float, Value] | None:
        """When a value was set, and the value; it may be about to expire."""
        return self._entries.get(key)

    def items(self) -> Iterator[tuple[Key, float, Value]]:
        """All of them, the one longest untouched first."""
        return ((key, at, value) for key, (at, value) in self._entries.items())

    def expire(self, now: float) -> None:
        """Forgets those that have expired, as far as they are the ones longest untouched."""
        while self._entries and now - next(iter(self._entries.values()))[0] > self._ttl:
            self._entries.popitem(last=False)

    def merge(self, key: Key, value: Value, at: float) -> None:
        """Remembers what somebody else set at that time, unless something newer is known."""
        entry = self._entries.get(key)
        if entry is None or entry[0] < at:
            self.set(key, value, at)

    def set(self, key: Key, value: Value, now: float) -> None:
        """Remembers; the entry longest untouched makes room."""
        self._entries[key] = (now, value)
        self._entries.move_to_end(key)
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)


class SessionHome(msgspec.Struct):
    """The workers of a session's last request; and for people, unless another router has planned it, what it was."""

    prefill: str
    decode: str
    tenant: str = ""
    prompt_tokens: int = 0
    last_key: bytes = b""
    """Of the prompt's full blocks; it names their chain."""
    requests: int = 0
    """Of the session, that were planned here."""
    answer_tokens: int = 0
    """0 until the answer has ended."""
