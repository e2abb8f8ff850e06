"""A value with many followers: each sees the newest one, none is queued for a slow reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Latest(Generic[Value]):
    """Holds one value."""

    def __init__(self, value: Value) -> None:
        self._value = value
        self._changed = asyncio.Event()

    def set(self, value: Value) -> None:
        """Wakes the followers when `value` is not what they have seen."""
        if value != self._value:
            self._value = value
            self._changed.set()
            self._changed = asyncio.Event()

    async def follow(self) -> AsyncIterator[Value]:
        """The value at once, then after each change."""
        while True:
            value, changed = self._value, self._changed
            yield value
            await changed.wait()
