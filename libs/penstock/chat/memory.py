"""What is remembered of a session's last prompt, so that the next one costs only what is new.

A pure speed-up: with or without it, a prompt has the same ids and the same block keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.chat.prompt import Encoded
from penstock.kv.identity import extend_keys


@dataclass(frozen=True, slots=True)
class Remembered:
    """A prompt with the keys of its full blocks."""

    encoded: Encoded
    root: bytes
    keys: Sequence[bytes]


def remember(encoded: Encoded, earlier: Remembered | None, root: bytes, block_size: int) -> Remembered:
    """`encoded` with its block keys; those of a prefix that it took from `earlier` are taken over too."""
    known: Sequence[bytes] = ()
    if earlier is not None and earlier.root == root:
        known = earlier.keys[: encoded.reused // block_size]
    return Remembered(encoded, root, extend_keys(root, known, encoded.ids, block_size))


class PromptMemory:
    """Last prompts by (tenant, session), least recently used first out; bounded in sessions and in tokens."""

    def __init__(self, max_sessions: int = 1024, max_tokens: int = 4_000_000) -> None:
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self._entries: OrderedDict[tuple[str, str], Remembered] = OrderedDict()
        self.tokens = 0
        """Tokens of all remembered prompts."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, tenant: str, session: str) -> Remembered | None:
        """The session's last prompt, if it is still known."""
        found = self._entries.get((tenant, session))
        if found is not None:
            self._entries.move_to_end((tenant, session))
        return found

    def put(self, tenant: str, session: str, prompt: Remembered) -> None:
        """Replaces what was known of the session."""
        self._drop((tenant, session))
        size = len(prompt.encoded.ids)
        if size > self._max_tokens:
            return
        self._entries[tenant, session] = prompt
        self.tokens += size
        while len(self._entries) > self._max_sessions or self.tokens > self._max_tokens:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: tuple[str, str]) -> None:
        old = self._entries.pop(key, None)
        if old is not None:
            self.tokens -= len(old.encoded.ids)
