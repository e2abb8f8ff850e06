"""The adapters of an engine: named ones, and those of them that are in memory.

A name stands for a directory; what is in memory goes by its fingerprint, so that two names of one adapter share it. Few
are in memory at a time: when another is wanted, the one that nobody has used for longest leaves, and is read again from
its directory when it is wanted again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from penstock.checkpoint import AdapterCheckpoint, CheckpointError, ModelConfig, inspect_adapter
from penstock.engine.errors import EngineError, RequestRefused
from penstock.engine.layers.adapters import AdapterWeights

MOST_NAMED = 1024
"""Adapters of one engine."""


@runtime_checkable
class ComputesAdapters(Protocol):
    """What steps can have adapters in; a Runner."""

    def load_adapter(self, found: AdapterCheckpoint) -> AdapterWeights:
        """Brings an adapter to where the model is. Callable from any thread. Raises CheckpointError."""
        ...

    def forget_adapter(self, fingerprint: str) -> None:
        """No step will have it until it is loaded again. Callable from any thread."""
        ...


class AdapterRefused(ValueError):
    """An adapter cannot be named so, or at all; the message is for the operator."""


@dataclass(slots=True, eq=False)
class _Held:
    """An adapter in memory."""

    weights: AdapterWeights
    users: int = 0


class AdapterShelf:
    """Owner of an engine's adapters. Belongs to the event loop."""

    def __init__(
        self, place: ComputesAdapters | None, model: ModelConfig, threads: Executor, *, most: int, most_bytes: int
    ) -> None:
        """`place` is None where nothing can have adapters. At most `most` are in memory, with `most_bytes` in all."""
        self._place = place
        self._model = model
        self._threads = threads
        self._most, self._most_bytes = most, most_bytes
        self._names: dict[str, str] = {}
        self._known: dict[str, AdapterCheckpoint] = {}
        """By fingerprint."""
        self._held: dict[str, _Held] = {}
        """By fingerprint, the one that was used last at the end."""
        self._turn = asyncio.Lock()
        """Whoever has it brings an adapter into memory."""
        self._leaving = ""
        """The adapter that nobody may begin to use, because another waits for its place."""
        self._left = asyncio.Event()
        """Set when a use has ended."""
        self.loads = 0
        """Since the start."""

    @property
    def names(self) -> Mapping[str, str]:
        """The fingerprint of each, by name."""
        return MappingProxyType(self._names)

    def directory(self, name: str) -> Path:
        """Where the adapter of this name is read from."""
        return self._known[self._names[name]].path

    @property
    def in_memory(self) -> int:
        """How many are."""
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Of those in memory."""
        return sum(held.weights.nbytes for held in self._held.values())

    async def add(self, name: str, directory: Path) -> str:
        """Gives the adapter in `directory` a name, after it was loaded once, and returns its fingerprint; a name that
        is there already gets the new one. Raises CheckpointError for what is no adapter of this model, and
        AdapterRefused."""
        if self._place is None:
            raise AdapterRefused(f"adapter {name!r}: this engine computes no adapters")
        if name not in self._names and len(self._names) >= MOST_NAMED:
            raise AdapterRefused(f"adapter {name!r}: there are {MOST_NAMED} already, which is the most")
        found = await asyncio.get_running_loop().run_in_executor(self._threads, inspect_adapter, directory, self._model)
        fresh = found.fingerprint not in self._known
        self._known.setdefault(found.fingerprint, found)
        try:
            async with self.using(found.fingerprint):
                pass
        except BaseException:
            if fresh and found.fingerprint not in self._names.values():
                del self._known[found.fingerprint]
            raise
        self.remove(name)
        self._names[name] = found.fingerprint
        self._known[found.fingerprint] = found
        return found.fingerprint

    def remove(self, name: str) -> bool:
        """Takes a name away; whether it was there. What runs with its adapter ends as it would have."""
        fingerprint = self._names.pop(name, None)
        if fingerprint is None:
            return False
        if fingerprint not in self._names.values():
            del self._known[fingerprint]
            self._tidy(fingerprint)
        return True

    @asynccontextmanager
    async def using(self, fingerprint: str) -> AsyncIterator[AdapterWeights | None]:
        """The adapter stays in memory for the length of the block; an empty fingerprint is none. Waits for a place.

        Raises RequestRefused for an adapter that is not named, and EngineError when it cannot be read any more."""
        if not fingerprint:
            yield None
            return
        held = await self._take(fingerprint)
        try:
            yield held.weights
        finally:
            self.release((fingerprint,))

    def hold(self, fingerprints: Iterable[str]) -> None:
        """These adapters, which are in use, stay in memory until they are released as well: for steps, which may go on
        when the request has left."""
        for fingerprint in fingerprints:
            self._held[fingerprint].users += 1

    def release(self, fingerprints: Iterable[str]) -> None:
        """Ends one use of each."""
        for fingerprint in fingerprints:
            self._held[fingerprint].users -= 1
            self._left.set()
            self._tidy(fingerprint)

    async def _take(self, fingerprint: str) -> _Held:
        held = self._find(fingerprint)
        if held is None:
            async with self._turn:
                held = self._find(fingerprint) or await self._bring(fingerprint)
        held.users += 1
        return held

    def _find(self, fingerprint: str) -> _Held | None:
        """The adapter, if it is in memory and may be used; it is the last to leave then."""
        if fingerprint not in self._known:
            raise RequestRefused("adapter", f"adapter {fingerprint[:16]!r} is not loaded")
        if fingerprint == self._leaving or fingerprint not in self._held:
            return None
        held = self._held[fingerprint] = self._held.pop(fingerprint)
        return held

    async def _bring(self, fingerprint: str) -> _Held:
        """Reads an adapter from its directory when there is a place for it."""
        assert self._place is not None, "nothing is named"
        found, loop = self._known[fingerprint], asyncio.get_running_loop()
        try:
            while self._held and not self._fits(found):
                self._leaving = next(iter(self._held))
                if self._held[self._leaving].users:
                    self._left.clear()
                    await self._left.wait()
                else:
                    self._let_go(self._leaving)
        finally:
            self._leaving = ""
        try:
            weights = await loop.run_in_executor(self._threads, _read, found, self._model, self._place)
        except CheckpointError as error:
            if fingerprint not in self._names.values():
                raise
            raise EngineError(f"an adapter cannot be read again: {error}") from error
        self.loads += 1
        held = self._held[fingerprint] = _Held(weights)
        return held

    def _fits(self, found: AdapterCheckpoint) -> bool:
        size = sum(part.nbytes for part in found.parts)
        return len(self._held) < self._most and self.nbytes + size <= self._most_bytes

    def _tidy(self, fingerprint: str) -> None:
        """Forgets an adapter without a name, unless somebody uses it."""
        held = self._held.get(fingerprint)
        if held is not None and not held.users and fingerprint not in self._known:
            self._let_go(fingerprint)

    def _let_go(self, fingerprint: str) -> None:
        assert self._place is not None, "something is in memory"
        del self._held[fingerprint]
        self._place.forget_adapter(fingerprint)


def _read(found: AdapterCheckpoint, model: ModelConfig, place: ComputesAdapters) -> AdapterWeights:
    now = inspect_adapter(found.path, model)
    if now.fingerprint != found.fingerprint:
        raise CheckpointError(found.file, "has changed since it got its name: load it anew")
    return place.load_adapter(now)
