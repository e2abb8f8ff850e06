"""The tokens of answers that clients may ask for again, in a Redis that gateways share.

A gateway that goes on with an answer reads here what another one had of it, and has workers compute its KV alone, as
after the loss of a worker. Nothing waits for what is written: it is told behind the answer, in one round trip for all
answers, and what was not told before a gateway died is generated again, as all of it is where no Redis answers.

A token takes twelve bytes: its number, and eight of a keyed hash over its choice, its place and itself. Only who knows
the request's key and the server key can make them: whoever else writes to that Redis changes no answer. Two gateways
that run one request write the same bytes to the same places.

When a request ends, however it does, its gateway notes that beside the answer. A gateway that has died leaves an answer
without that note: who asks again then was interrupted by the mesh, and passes prompts. So does who asks again while its
request still runs somewhere; anybody else passes nobody.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import structlog

from penstock.gateway.completing.threads import Threads
from penstock.runtime.redis_client import asked, in_step, open_redis
from penstock.runtime.tasks import Failed, beside

if TYPE_CHECKING:
    from redis.asyncio import Redis

_ROOT = "penstock:answers"
_KEPT_S = 600
"""Seconds after its last token; who has waited for longer gets an answer that is generated again."""
_PAUSE_S, _IDLE_S = 0.05, 60.0
"""Least and most between two round trips."""
_READ_S = 1.0
"""Most that a request waits for what is known of its answer."""
_NUMBER = struct.Struct("<I")
_PLACE = struct.Struct("<II")
_MARK_BYTES = 8
TOKEN_BYTES = _NUMBER.size + _MARK_BYTES


class StoredAnswer:
    """The tokens of one request's choices; made by `AnswerStore.of`."""

    def __init__(self, store: AnswerStore, secret: bytes, choices: int) -> None:
        self._store = store
        self._secret = hashlib.blake2b(secret, person=b"answer mark").digest()
        name = hashlib.blake2b(secret, digest_size=16, person=b"answer name").hexdigest()
        self.names = [f"{_ROOT}:{name}:{choice}" for choice in range(choices)]
        """Of the keys, by choice."""
        self.waiting = [bytearray() for _ in range(choices)]
        """What is not written yet, by choice."""
        self.offsets = [0] * choices
        """Where that belongs, in bytes."""
        self.over_name = f"{_ROOT}:{name}:over"
        self.over = False
        """Whether a request for it has ended before; known after `read`."""
        self.closed = False

    async def read(self, threads: Threads, tenant: str) -> Sequence[Sequence[int]]:
        """The tokens of each choice that are known; what cannot be read in time is not."""
        *found, over = await self._store.read([*self.names, self.over_name])
        self.over = bool(over)
        most = max(map(len, found), default=0)
        if not most:
            return [() for _ in self.names]
        return await threads.run(lambda: [self._tokens(*each) for each in enumerate(found)], most, tenant)

    def add(self, choice: int, index: int, token: int) -> None:
        """Notes the next token of a choice."""
        waiting = self.waiting[choice]
        if not waiting:
            self.offsets[choice] = index * TOKEN_BYTES
            self._store.told(self)
        waiting += _NUMBER.pack(token)
        waiting += self._mark(choice, index, token)

    def wrote(self, choice: int, size: int) -> None:
        """So many bytes of what waited are written."""
        del self.waiting[choice][:size]
        self.offsets[choice] += size

    def close(self) -> None:
        """The request has ended; that, and the tokens that wait, have one more chance to be written."""
        self.closed = True
        self._store.told(self)

    def _tokens(self, choice: int, data: bytes) -> Sequence[int]:
        """Those before the first that is missing, damaged or of another place."""
        found: list[int] = []
        for at in range(0, len(data) - TOKEN_BYTES + 1, TOKEN_BYTES):
            (token,) = _NUMBER.unpack_from(data, at)
            if data[at + _NUMBER.size : at + TOKEN_BYTES] != self._mark(choice, len(found), token):
                break
            found.append(token)
        return found

    def _mark(self, choice: int, index: int, token: int) -> bytes:
        what = _PLACE.pack(choice, index) + _NUMBER.pack(token)
        return hashlib.blake2b(what, digest_size=_MARK_BYTES, key=self._secret).digest()


class AnswerStore:
    """The answers of a gateway's requests, as Redis has them. Made by `open_answer_store`."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._untold: dict[StoredAnswer, None] = {}
        self._stirred = asyncio.Event()
        self._away = False
        self._log = structlog.get_logger("penstock.gateway")

    def of(self, secret: bytes, choices: int) -> StoredAnswer:
        """The answer to a request; `secret` stands for it, and only gateways with its server key can make that."""
        return StoredAnswer(self, secret, choices)

    def told(self, answer: StoredAnswer) -> None:
        """There is something to write."""
        self._untold[answer] = None
        self._stirred.set()

    async def read(self, names: Sequence[str]) -> Sequence[bytes]:
        """What lies at these keys; empty where nothing does, or Redis does not say so in time."""
        nothing = [b""] * len(names)
        if self._away:
            return nothing
        try:
            async with asyncio.timeout(_READ_S):
                found = cast("list[bytes | None]", await asked(self._redis.mget(names)))
                return [value or b"" for value in found]
        except OSError as error:  # a TimeoutError is one
            self._failed(error)
            return nothing

    async def keep(self) -> None:
        """Writes what is added, behind the answers. Never returns; cancel it."""
        await in_step(self.write, self._failed, self._stirred, pause_s=_PAUSE_S, idle_s=_IDLE_S)

    async def write(self) -> None:
        """Writes all that waits. Raises OSError; then it still waits, unless its request has ended."""
        self._stirred.clear()
        untold, self._untold = self._untold, {}
        pipe, sizes = self._redis.pipeline(transaction=False), []
        for answer in untold:
            if answer.closed:
                pipe.set(answer.over_name, b"1", ex=_KEPT_S)
            for choice, waiting in enumerate(answer.waiting):
                if waiting:
                    name = answer.names[choice]
                    pipe.setrange(name, answer.offsets[choice], bytes(waiting))
                    pipe.expire(name, _KEPT_S)
                    sizes.append((answer, choice, len(waiting)))
        if not len(pipe):
            return
        try:
            await asked(pipe.execute())
        except OSError:
            self._untold |= {answer: None for answer in untold if not answer.closed}
            self._stirred.set()
            raise
        for answer, choice, size in sizes:
            answer.wrote(choice, size)
            if answer.waiting[choice]:
                self.told(answer)
        if self._away:
            self._away = False
            self._log.info("the store of answers is back")

    def _failed(self, error: OSError) -> None:
        if not self._away:
            self._away = True
            what = "the store of answers is away: what a gateway's death interrupts is generated again"
            self._log.warning(what, error=str(error))


@asynccontextmanager
async def open_answer_store(url: str, failed: Failed) -> AsyncIterator[AnswerStore | None]:
    """The answers in the Redis at `url`, which need not be reachable yet; None without a url. Raises
    ConfigError."""
    if not url:
        yield None
        return
    async with open_redis("answer_store", url) as redis:
        store = AnswerStore(redis)
        async with beside(store.keep, name="answers", on_failure="restart", failed=failed):
            yield store
