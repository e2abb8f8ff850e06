"""The processes that follow rank 0 of their host, and the sockets to them."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from penstock.engine.errors import RankLost
from penstock.engine.ranks.messages import Setup, receive, send
from penstock.engine.ranks.stages import Pipes

LOAD_S = 1800.0
"""Seconds that a rank may take to load its part."""
STEP_S = 90.0
"""Seconds for which rank 0, which has computed its part of a step, waits for another one to be done with it."""
_FOLLOWER = "penstock.engine.forward.following"
_END_S = 5.0
_log = logging.getLogger(__name__)


class Follows(Protocol):
    """What follows: a RankProcess, or a stand-in in tests."""

    pid: int
    watched: int
    leaving: Sequence[int]

    def kill(self) -> None: ...

    def end(self) -> None: ...


Launch = Callable[[socket.socket], Follows]
"""Starts what follows, which reads this socket."""


class RankProcess:
    """A process that follows. Made with the socket that it reads; whoever made it closes that."""

    def __init__(self, theirs: socket.socket, module: str = _FOLLOWER, *arguments: str) -> None:
        """`module`, which is run with these `arguments`, has the socket as its standard input."""
        command = [sys.executable, "-P", "-m", module]  # without the working directory, which -m else puts first
        leaving, its_end = os.pipe()
        try:
            self._popen = subprocess.Popen([*command, *arguments], stdin=theirs.fileno(), stdout=its_end)
        except BaseException:
            os.close(leaving)
            raise
        finally:
            os.close(its_end)
        self.pid = self._popen.pid
        self.leaving: Sequence[int] = [leaving]
        """Likewise, as soon as it says on its standard output that it will end."""
        self.watched = os.pidfd_open(self.pid)
        """A file that can be read as soon as the process has ended."""

    def kill(self) -> None:
        """Ends it at once. Callable from any thread."""
        self._popen.kill()

    def end(self) -> None:
        """Waits until it has ended: its socket is closed."""
        try:
            self._popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        for file in (self.watched, *self.leaving):
            os.close(file)


class RankFollower:
    """A rank, or what speaks for all of a stage on another host, and the socket to it."""

    def __init__(self, setup: Setup, pipes: Pipes, launch: Launch) -> None:
        self.stage = setup.stage
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(LOAD_S)
        try:
            with theirs:
                self.process = launch(theirs)
        except BaseException:
            self.socket.close()
            pipes.close()
            raise
        try:
            send(self.socket, msgspec.msgpack.encode(setup))
            pipes.send(self.socket)
        except OSError as error:  # it is noticed when it should have loaded
            _log.debug("a process that computes a part of the model has ended at once: %s", error)
        finally:
            pipes.close()

    def patience(self, seconds: float) -> None:
        """How long it may take from now on."""
        self.socket.settimeout(seconds)

    def tell(self, message: bytes) -> None:
        """Raises RankLost."""
        try:
            send(self.socket, message)
        except OSError as error:
            raise _ended(error) from error

    def done(self) -> None:
        """Waits until it has loaded, or computed what it was told. Raises RankLost, also when it could not."""
        if answer := self.answer():
            raise RankLost(answer)

    def answer(self) -> str:
        """Waits until it has done what it was told: why it could not, or nothing. Raises RankLost."""
        try:
            return receive(self.socket).decode()
        except (EOFError, OSError) as error:
            raise _ended(error) from error

    def leave(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        self.process.end()
        self.socket.close()


def _ended(error: Exception) -> RankLost:
    return RankLost(f"a process that computes a part of the model has ended: {error}")
