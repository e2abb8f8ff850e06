"""The supervisor's side of a zygote: starts it when it is first needed, and anew when it has died."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

from penstock.cli.zygote import LONGEST_ORDER, ZYGOTE_FD

UNKNOWN_CODE = 255
"""Of a process that ended after its zygote: nobody knows how."""
_PATIENCE_S = 60.0
"""Seconds for the imports and a fork; a zygote that takes longer is killed."""


class NoZygote(Exception):
    """No process could be forked. A program can still be started as usual."""


class Forked:
    """A process that a zygote has forked, with what the supervisor uses of an `asyncio.subprocess.Process`."""

    def __init__(self, pid: int, code: asyncio.Future[int]) -> None:
        self.pid = pid
        self._code = code

    async def wait(self) -> int:
        """Its exit code; negative: the signal that ended it."""
        return await asyncio.shield(self._code)

    def terminate(self) -> None:
        """Sends SIGTERM. Raises ProcessLookupError when it has ended."""
        if self._code.done():
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, signal.SIGTERM)


class Zygote:
    """Forks processes that have imported `modules` already. Made by `prepared`; one fork at a time."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._modules = modules
        self._environment = environment
        self._turn = asyncio.Lock()
        self._line: _Line | None = None

    @property
    def pid(self) -> int | None:
        """Of the zygote itself; None when there is none at the moment."""
        return None if self._line is None or self._line.over else self._line.pid

    @property
    def forking(self) -> bool:
        """Whether it has an order that it has not answered."""
        return self._line is not None and self._line.ordered

    async def fork(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]
    ) -> Forked:
        """Runs a module as if it were started with `python -m`. `environment` is set in addition to the zygote's; `fds`
        are two, as in `penstock.cli.zygote`. Raises NoZygote."""
        order = json.dumps({"module": module, "arguments": arguments, "environment": environment}).encode()
        if len(order) > LONGEST_ORDER:
            raise NoZygote(f"its settings take {len(order)} bytes, more than the {LONGEST_ORDER} of a message")
        async with self._turn:
            if self._line is None or self._line.over:
                await self.close()
                self._line = await _started(self._modules, self._environment)
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    return await self._line.fork(order, fds)
            except TimeoutError:
                await self.close()
                raise NoZygote(f"the zygote did not answer for {_PATIENCE_S:.0f} s") from None

    async def close(self) -> None:
        """Ends the zygote; processes that it has forked go on."""
        line, self._line = self._line, None
        if line is not None:
            await line.close()


@asynccontextmanager
async def prepared(modules: Sequence[str], environment: Mapping[str, str]) -> AsyncIterator[Zygote]:
    """A zygote for the length of the block; it starts with the first fork."""
    zygote = Zygote(modules, environment)
    try:
        yield zygote
    finally:
        await zygote.close()


class _Line:
    """One running zygote, and the line to it."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self.pid = process.pid
        self.over = False
        self._process = process
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._born: asyncio.Future[Forked] | None = None
        self._unwanted = 0
        """Processes to come that nobody waits for any more; answers come in order."""
        self._codes: dict[int, asyncio.Future[int]] = {}
        """Of those that have not ended, by pid."""
        self._loop.add_reader(control, self._hear)

    @property
    def ordered(self) -> bool:
        """Whether an answer is waited for."""
        return self._born is not None

    async def fork(self, order: bytes, fds: Sequence[int]) -> Forked:
        try:
            socket.send_fds(self._control, [order], list(fds))
        except OSError as error:
            raise NoZygote(f"the zygote has ended: {error}") from error
        born: asyncio.Future[Forked] = self._loop.create_future()
        self._born = born
        try:
            return await born
        except asyncio.CancelledError:
            if born.cancelled():
                self._unwanted += 1
            elif born.done() and born.exception() is None:
                _kill(born.result().pid)
            raise
        finally:
            self._born = None

    async def close(self) -> None:
        self._end()
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    def _hear(self) -> None:
        try:
            message = self._control.recv(LONGEST_ORDER)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._end()
            return
        said = json.loads(message)
        if "code" not in said:
            code = self._codes[said["pid"]] = self._loop.create_future()
            if self._unwanted:
                self._unwanted -= 1
                _kill(said["pid"])
            else:
                assert self._born is not None, "there is one answer for each order"
                self._born.set_result(Forked(said["pid"], code))
        elif (ended := self._codes.pop(said["pid"], None)) is not None:
            ended.set_result(said["code"])

    def _end(self) -> None:
        """From now on the ends of those that were forked are watched from here."""
        if self.over:
            return
        self.over = True
        self._loop.remove_reader(self._control)
        self._control.close()
        if self._born is not None and not self._born.done():
            self._born.set_exception(NoZygote("the zygote has ended"))
        for pid, code in self._codes.items():
            self._watch(pid, code)

    def _watch(self, pid: int, code: asyncio.Future[int]) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            code.set_result(UNKNOWN_CODE)
        else:
            self._loop.add_reader(fd, partial(self._gone, fd, code))

    def _gone(self, fd: int, code: asyncio.Future[int]) -> None:
        self._loop.remove_reader(fd)
        os.close(fd)
        code.set_result(UNKNOWN_CODE)


def _kill(pid: int) -> None:
    """The process and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


async def _started(modules: Sequence[str], environment: Mapping[str, str]) -> _Line:
    """Raises NoZygote."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    nowhere = asyncio.subprocess.DEVNULL  # what fails here fails again in a program that is started as usual
    with theirs:
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock.cli.zygote", *modules),
                stdin=nowhere,
                stdout=nowhere,
                stderr=nowhere,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, **environment, ZYGOTE_FD: str(theirs.fileno())},
            )
        except OSError as error:
            ours.close()
            raise NoZygote(f"it could not be started: {error}") from error
    ours.setblocking(False)
    return _Line(process, ours)
