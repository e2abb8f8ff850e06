"""The router's memory of sessions: where they ran, and how long their answers are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

_UNKNOWN_OUTPUT = 256.0
_WEIGHT = 0.3
"""Weight of the newest answer in the running mean."""

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

    def set(self, key: Key, value: Value, now: float) -> None:
        """Remembers; the entry longest untouched makes room."""
        self._entries[key] = (now, value)
        self._entries.move_to_end(key)
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)


@dataclass(frozen=True, slots=True)
class SessionHome:
    """The workers of a session's last request."""

    prefill: str
    decode: str


class OutputLengths:
    """Running means of answer lengths: of the session, else of the tenant, else of the model."""

    def __init__(self, size: int, ttl: float) -> None:
        self._means: Recent[tuple[str, ...], float] = Recent(size, ttl)

    def expect(self, model: str, tenant: str, session: str, limit: int, now: float) -> int:
        """Tokens that the next answer is likely to have, at most `limit`."""
        for key in _keys(model, tenant, session):
            mean = self._means.get(key, now)
            if mean is not None:
                return max(1, min(limit, round(mean)))
        return max(1, min(limit, round(_UNKNOWN_OUTPUT)))

    def learn(self, model: str, tenant: str, session: str, tokens: int, now: float) -> None:
        """An answer ended after `tokens`."""
        for key in _keys(model, tenant, session):
            mean = self._means.get(key, now)
            self._means.set(key, tokens if mean is None else mean + _WEIGHT * (tokens - mean), now)


def _keys(model: str, tenant: str, session: str) -> list[tuple[str, ...]]:
    keys: list[tuple[str, ...]] = [(model, tenant), (model,)]
    return [(model, tenant, session), *keys] if session else keys
