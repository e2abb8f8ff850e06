"""Publishes block events over ZeroMQ: a PUB socket for all, a ROUTER socket for subscribers that missed some."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import structlog

from penstock.kv.events import Change, Subscriber
from penstock.kvstore.events.wire.format import CLEARED, END, Event, Held, payload, removed, stored
from penstock.kvstore.table.blocks import TierKind
from penstock.runtime.config import ConfigError
from penstock.runtime.tasks import Failed, beside

_SEND_QUEUE = 1_000
"""Batches that wait for one slow subscriber before it loses some; it sees the gap, and asks for a replay."""
_REPLAY_BATCHES = 10_000
_REPLAY_BYTES = 64 << 20
_HEARTBEAT_MS = 10_000
_SEQUENCE_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WireOptions:
    """How to publish. Addresses are `tcp://host:port`; port 0 picks one."""

    address: str
    replay_address: str = ""
    """Empty: no replay."""
    topic: str = ""
    style: str = "map"


class Replay:
    """The newest batches, bounded in number and bytes."""

    def __init__(self, batches: int = _REPLAY_BATCHES, size: int = _REPLAY_BYTES) -> None:
        self._batches: deque[tuple[int, bytes]] = deque()
        self._most, self._room = batches, size

    def add(self, sequence: int, batch: bytes) -> None:
        """Adds the next batch; drops the oldest when the room is used up."""
        self._batches.append((sequence, batch))
        self._room -= len(batch)
        while self._room < 0 or len(self._batches) > self._most:
            self._room += len(self._batches.popleft()[1])

    def since(self, sequence: int) -> list[tuple[int, bytes]]:
        """Returns the kept batches from `sequence` on."""
        return [one for one in self._batches if one[0] >= sequence]


class Translator:
    """Translates changes of the store to events; remembers the medium of each block, since a removal names it."""

    def __init__(self, find: Callable[[bytes], Held | None]) -> None:
        self._find = find
        self._told: dict[bytes, str] = {}

    def events(self, change: Change[TierKind]) -> list[Event]:
        """In an order in which they can be applied."""
        events: list[Event] = []
        if change.snapshot:
            events.append(CLEARED)
            self._told.clear()
        gone = [(key, self._told.pop(key)) for key in change.removed if key in self._told]
        here: list[Held] = []
        for key in change.stored:
            block = self._find(key)
            if block is None:  # gone again already: its removal follows
                continue
            before = self._told.get(key)
            if before != block.medium:
                if before is not None:
                    gone.append((key, before))
                self._told[key] = block.medium
                here.append(block)
        return [*events, *removed(gone), *stored(here)]


class Publisher:
    """Two sockets and a buffer. Made by `open_publisher`."""

    def __init__(self, zmq: Any, options: WireOptions) -> None:
        self._zmq = zmq
        self._options = options
        self._context = zmq.asyncio.Context()
        self._sequence = 0
        self._replay = Replay()
        self._log = structlog.get_logger("penstock.kvstore")
        try:
            self._pub = self._bind(zmq.PUB, "events_address", options.address)
            self._router = (
                self._bind(zmq.ROUTER, "events_replay_address", options.replay_address)
                if options.replay_address
                else None
            )
        except BaseException:
            self.close()
            raise

    def _bind(self, kind: int, field: str, address: str) -> Any:
        zmq = self._zmq
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = _SEND_QUEUE if kind == zmq.PUB else _REPLAY_BATCHES + 1
        socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.set(zmq.MAXMSGSIZE, 1 << 10)  # of what others send: subscriptions and numbers
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(field, address, f"can't listen there: {error}") from error
        return socket

    @property
    def address(self) -> str:
        """Where to subscribe."""
        return str(self._pub.get(self._zmq.LAST_ENDPOINT).decode())

    @property
    def replay_address(self) -> str:
        """Where to ask for a replay; empty without one."""
        return str(self._router.get(self._zmq.LAST_ENDPOINT).decode()) if self._router else ""

    async def publish(self, events: list[Event]) -> None:
        """Sends one batch to all; never waits for a subscriber."""
        if not events:
            return
        batch = payload(time.time(), events, self._options.style)
        sequence, self._sequence = self._sequence, self._sequence + 1
        self._replay.add(sequence, batch)
        await self._pub.send_multipart([self._options.topic.encode(), _bytes(sequence), batch])

    async def follow(self, subscriber: Subscriber[TierKind], translator: Translator) -> None:
        """Publishes all that `subscriber` hears, until it ends."""
        while (change := await subscriber.next()) is not None:
            await self.publish(translator.events(change))

    async def answer(self) -> None:
        """Serves replays until cancelled: answers a sequence number with the kept batches from there on."""
        while self._router is not None:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != _SEQUENCE_BYTES:
                self._log.warning("a replay was asked for in a form that is not understood", frames=len(frames))
                continue
            asker = frames[0]
            for sequence, batch in self._replay.since(int.from_bytes(frames[2], "big")):
                await self._router.send_multipart([asker, b"", _bytes(sequence), batch])
            await self._router.send_multipart([asker, b"", END, b""])

    def close(self) -> None:
        """Closes both sockets at once."""
        self._context.destroy(linger=0)


def _bytes(sequence: int) -> bytes:
    return sequence.to_bytes(_SEQUENCE_BYTES, "big")


@asynccontextmanager
async def open_publisher(options: WireOptions, failed: Failed) -> AsyncIterator[Publisher]:
    """A publisher whose sockets are bound. Raises ConfigError when they can't be, or pyzmq is not installed."""
    try:
        import zmq
        import zmq.asyncio  # noqa: F401  used as an attribute of zmq
    except ImportError:
        raise ConfigError("events_address", options.address, "needs pyzmq: pip install penstock[events]") from None
    publisher = Publisher(zmq, options)
    try:
        async with beside(publisher.answer, name="event replay", on_failure="restart", failed=failed):
            yield publisher
    finally:
        publisher.close()
