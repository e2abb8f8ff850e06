"""Grammars for requests: made and tried in helper processes, and remembered.

Trying a grammar means compiling it and following it for a few tokens, which is where some faults show. A hostile one
costs its sender only: helpers run beside the event loop with a low priority, each grammar has a bound of processor
time and of memory, a tenant never has all helpers, and what was refused once is refused at once the next time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Sized
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import structlog

from penstock.errors import InvalidRequest, PenstockError, Unavailable
from penstock.grammar.helper import Bounds, Verdict
from penstock.grammar.recipe import Recipe
from penstock.grammar.waiting import Turns
from penstock.runtime.tasks import Failed, beside

_HELPERS = 2
_NICE = 10
"""How much lower a helper's priority is, once it is ready; one that a grammar has made necessary has it from its start
on."""
_WAITING = 32
"""Recipes of one tenant that wait."""
_START_S = 60.0
_TRIES = 3
"""Helpers that may end for reasons of their own before a client hears of it."""
_FROM_OUTSIDE = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
"""How a helper ends that somebody else ended, such as a kernel that is short of memory. A grammar that exceeds its
bounds ends it in other ways."""
_PATIENCE = 10.0
"""A machine may be so busy that processor time takes this many times as long."""
_MOST = 1024
_MOST_CHARACTERS = 32 * 1024 * 1024


@dataclass(eq=False, slots=True)
class _Job:
    recipe: Recipe
    verdict: asyncio.Future[str | PenstockError]


@dataclass(slots=True)
class _Known:
    """Verdicts by digest, the last ones used."""

    texts: OrderedDict[bytes, str | InvalidRequest] = field(default_factory=OrderedDict)
    characters: int = 0

    def get(self, digest: bytes) -> str | InvalidRequest | None:
        if digest in self.texts:
            self.texts.move_to_end(digest)
        return self.texts.get(digest)

    def put(self, digest: bytes, verdict: str | InvalidRequest) -> None:
        self.texts[digest] = verdict
        self.characters += len(str(verdict))
        while len(self.texts) > _MOST or self.characters > _MOST_CHARACTERS:
            self.characters -= len(str(self.texts.popitem(last=False)[1]))


class GrammarCompiler:
    """Makes grammars of recipes. Made by `open_compiler`; belongs to one event loop."""

    def __init__(self, tokenizer: Path, bounds: Bounds) -> None:
        self._tokenizer = tokenizer
        self._bounds = bounds
        self._known = _Known()
        self._pending: dict[bytes, asyncio.Future[str | PenstockError]] = {}
        self._turns: Turns[_Job] = Turns(at_once=_HELPERS - 1, most=_WAITING)
        self._idle: list[_Helper] = []
        """The one that was used last is the next: no second one is started while one is enough."""
        self._exceeded = False
        """Whether a grammar has ended a helper since the last start."""
        self.started = 0
        """Helper processes that were started."""

    async def grammar(self, recipe: Recipe, tenant: str) -> str:
        """The grammar's text. Raises InvalidRequest naming what is wrong, Overloaded and Unavailable."""
        recipe.check_size()
        digest = tenant.encode() + recipe.digest()  # what others sent must not show in how long it takes
        verdict: str | PenstockError | None = self._known.get(digest)
        if verdict is None:
            pending = self._pending.get(digest)
            if pending is None:
                pending = asyncio.get_running_loop().create_future()
                self._turns.put(tenant, _Job(recipe, pending))
                self._pending[digest] = pending
                pending.add_done_callback(partial(self._learn, digest))
            verdict = await asyncio.shield(pending)
        if isinstance(verdict, PenstockError):
            raise type(verdict)(
                verdict.message, field=verdict.field, code=verdict.code, retry_after=verdict.retry_after
            )
        return verdict

    @property
    def remembered(self) -> Sized:
        """The verdicts that are known."""
        return self._known.texts

    def _learn(self, digest: bytes, ended: asyncio.Future[str | PenstockError]) -> None:
        del self._pending[digest]
        if not ended.cancelled() and isinstance(verdict := ended.result(), str | InvalidRequest):
            self._known.put(digest, verdict)

    async def serve(self) -> None:
        """Has recipes tried, one after the other, by helper processes that are started when they are needed."""
        while True:
            tenant, job = await self._turns.next()
            try:
                for _ in range(_TRIES):
                    helper = await self._ready()
                    verdict = await self._try(helper, job.recipe)
                    if not helper.has_ended:
                        self._idle.append(helper)
                    if verdict:
                        job.verdict.set_result(verdict)
                        break
            finally:
                self._turns.done(tenant)
                if not job.verdict.done():
                    job.verdict.set_result(Unavailable("grammars can't be compiled now; try again", retry_after=1))

    async def prepare(self) -> None:
        """Starts a helper before it is needed, unless none can be started now."""
        with suppress(ConnectionError, TimeoutError):
            self._idle.append(await self._start())

    async def close(self) -> None:
        """Ends the helpers that have nothing to do."""
        while self._idle:
            await self._idle.pop().end()

    async def _ready(self) -> _Helper:
        """A helper, for one recipe. Raises ConnectionError when none is there and none can be started."""
        while self._idle:
            helper = self._idle.pop()
            if not helper.has_ended:
                return helper
            await helper.end()
        return await self._start()

    async def _start(self) -> _Helper:
        """A helper that is ready. Raises ConnectionError when one after the other ends before it is."""
        for left in reversed(range(_TRIES)):
            self.started += 1
            helper = await _Helper.start(self._tokenizer)
            if self._exceeded:
                helper.recede()
            try:
                async with asyncio.timeout(_START_S):
                    await helper.ask(msgspec.json.encode(self._bounds))
            except BaseException as error:
                status = await helper.end()
                if not isinstance(error, ConnectionError):
                    raise
                structlog.get_logger("penstock.grammar").warning("a helper ended at its start", status=status)
                if not left:
                    raise
            else:
                self._exceeded = False
                helper.recede()
                return helper
        raise AssertionError("the last try returns or raises")

    async def _try(self, helper: _Helper, recipe: Recipe) -> str | PenstockError | None:
        """What becomes of the recipe; None when the helper has ended for another reason."""
        limit = self._bounds.cpu_s
        try:
            async with asyncio.timeout(limit * _PATIENCE):
                answer = await helper.ask(msgspec.json.encode(recipe))
            verdict = msgspec.json.decode(answer, type=Verdict)
        except ConnectionError:
            status = await helper.end()
            if status in _FROM_OUTSIDE:
                structlog.get_logger("penstock.grammar").warning("a helper was ended", status=status)
                return None
            self._exceeded = True
            at = recipe.at
            what = f"{at}: is too complex: it takes more than {limit:g} s or too much memory to compile"
            return InvalidRequest(what, field=at, code="schema_too_complex")
        except TimeoutError:
            await helper.end()
            return Unavailable("the machine is too busy to compile a grammar; try again", retry_after=1)
        except asyncio.CancelledError:
            await helper.end()
            raise
        if verdict.grammar:
            return verdict.grammar
        return InvalidRequest(verdict.message, field=verdict.field, code=verdict.code)


class _Helper:
    """A helper process and the stream to it. Made by `start`; its owner calls `end`."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._priority = os.getpriority(os.PRIO_PROCESS, 0) + _NICE

    @classmethod
    async def start(cls, tokenizer: Path) -> _Helper:
        """Starts one."""
        process, stream = _started(sys.executable, "-m", "penstock.grammar.helper", str(tokenizer))
        try:
            return cls(process, *await asyncio.open_unix_connection(sock=stream))
        except BaseException:
            process.kill()
            process.wait()
            raise

    def recede(self) -> None:
        """From now on others come first."""
        with suppress(ProcessLookupError):  # one that has ended says so when it is asked
            os.setpriority(os.PRIO_PROCESS, self._process.pid, self._priority)

    @property
    def has_ended(self) -> bool:
        """Whether its process has."""
        return self._process.poll() is not None

    async def ask(self, message: bytes) -> bytes:
        """Sends a message and returns the answer. ConnectionError: the helper has ended."""
        if self._writer.is_closing():
            raise ConnectionResetError("the helper has ended")
        try:
            self._writer.write(len(message).to_bytes(4, "big") + message)
            await self._writer.drain()
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            return await self._reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the helper has ended") from error

    async def end(self) -> int:
        """Ends it, and returns how it ended: by itself, if it had."""
        self._writer.close()
        self._process.kill()  # does nothing to one that has ended: its status stays what it was
        return await asyncio.to_thread(self._process.wait)


def _started(*command: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process whose input and output are the other end of the socket.

    Not by the event loop's own means: uvloop forks, and gRPC's fork handlers, which run in the child then, end it now
    and then where gRPC has threads at work. Here the child runs nothing of ours.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            return subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL
            ), ours
        except BaseException:
            ours.close()
            raise


@asynccontextmanager
async def open_compiler(
    tokenizer: Path, *, failed: Failed, cpu_s: float = 2.0, memory_bytes: int = 1 << 30, at_hand: bool = False
) -> AsyncIterator[GrammarCompiler]:
    """Compiles for the length of the block. A grammar may take `cpu_s` and `memory_bytes`; `tokenizer` is the file.
    `at_hand`: the first helper is started at once, for who may have to go on with others' answers."""
    compiler = GrammarCompiler(tokenizer, Bounds(cpu_s, memory_bytes))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(compiler.close)
        for _ in range(_HELPERS):
            await stack.enter_async_context(
                beside(compiler.serve, name="grammars", on_failure="restart", failed=failed)
            )
        if at_hand:
            await stack.enter_async_context(
                beside(compiler.prepare, name="helper", on_failure="restart", failed=failed)
            )
        yield compiler
