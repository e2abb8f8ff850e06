"""The life of a process: start, report readiness, serve until told to stop, stop in order.

A supervisor hands its child one end of a socket pair in `PENSTOCK_SUPERVISOR_FD`. The child writes one JSON
line when it is ready, such as `{"address": "127.0.0.1:41234"}`. When the supervisor ends, however it ends,
the child reads end-of-file there and stops; a child that hangs and cannot stop in order is ended after a grace period.
systemd is told in its own way (sd_notify), where it has set NOTIFY_SOCKET: ready, stopping, and with WATCHDOG_USEC that
the event loop turns.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
import uvloop

from penstock.runtime.config import ConfigError
from penstock.runtime.ports import remove_sockets

SUPERVISOR_FD = "PENSTOCK_SUPERVISOR_FD"
_ORPHAN_GRACE_S = 10.0


class Lifecycle:
    """Given to a service's main coroutine: report readiness once, then wait for the end."""

    def __init__(self, orphan_grace_s: float = _ORPHAN_GRACE_S) -> None:
        """When the supervisor has ended, an ordered stop may take `orphan_grace_s` seconds."""
        self._orphan_grace_s = orphan_grace_s
        self._stop = asyncio.Event()
        self._starting = asyncio.current_task()
        self._supervisor = _supervisor()
        self._notified = os.environ.pop("NOTIFY_SOCKET", "")
        self._watchdog_s = int(os.environ.pop("WATCHDOG_USEC", "0")) / 1e6

    @property
    def stopping(self) -> bool:
        """Whether the process was asked to stop."""
        return self._stop.is_set()

    def ready(self, **values: object) -> None:
        """Tells the supervisor and the log that the service works, and at which address."""
        self._starting = None
        structlog.get_logger("penstock").info("ready", **values)
        if self._supervisor is not None:
            try:
                self._supervisor.sendall(json.dumps(values).encode() + b"\n")
            except OSError:
                self.stop()  # it has ended in the meantime
        self._notify("READY=1")
        if self._watchdog_s:
            self._turn()

    async def stopped(self) -> None:
        """Returns when the process was asked to stop."""
        await self._stop.wait()

    def stop(self) -> None:
        """Asks the process to stop; cancels a start that is not finished."""
        self._stop.set()
        self._notify("STOPPING=1")
        if self._starting is not None:
            self._starting.cancel()

    def _turn(self) -> None:
        self._notify("WATCHDOG=1")
        asyncio.get_running_loop().call_later(self._watchdog_s / 3, self._turn)

    def _notify(self, state: str) -> None:
        if not self._notified:
            return
        address = "\0" + self._notified[1:] if self._notified.startswith("@") else self._notified
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as outlet:
            outlet.setblocking(False)
            try:
                outlet.sendto(state.encode(), address)
            except OSError as error:  # nobody's work depends on it: systemd ends who says nothing
                structlog.get_logger("penstock").warning("systemd is not told", state=state, reason=str(error))

    def watch(self) -> None:
        """From now on SIGINT, SIGTERM and the supervisor's end ask for the stop; a second signal ends the process."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number)
        if self._supervisor is not None:
            # A thread, because it has to notice the end, and to act, also when the event loop hangs.
            threading.Thread(target=self._outlive, args=(self._supervisor, loop), daemon=True).start()

    def _signalled(self, number: int) -> None:
        if self._stop.is_set():
            os._exit(128 + number)
        self.stop()

    def _outlive(self, supervisor: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        _wait_for_end(supervisor)
        _silence()
        remove_sockets()
        try:
            loop.call_soon_threadsafe(self.stop)
        except RuntimeError:
            return  # the loop is closed: this process ends anyway
        # Not a sleep: nothing ever sets this event, and it ends with the process.
        threading.Event().wait(self._orphan_grace_s)
        os._exit(1)


def run(main: Callable[[Lifecycle], Coroutine[Any, Any, None]], orphan_grace_s: float = _ORPHAN_GRACE_S) -> None:
    """Runs `main` on uvloop until it returns; cancels it when it is asked to stop before it is ready. A ConfigError
    comes out bare, however many task groups it went through."""

    async def body() -> None:
        lifecycle = Lifecycle(orphan_grace_s)
        lifecycle.watch()
        try:
            await main(lifecycle)
        except asyncio.CancelledError:
            if not lifecycle.stopping:
                raise

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(body())
    except BaseExceptionGroup as group:
        raise _config_error(group) or group from None


def _supervisor() -> socket.socket | None:
    fd = os.environ.pop(SUPERVISOR_FD, None)
    if fd is None:
        return None
    supervisor = socket.socket(fileno=int(fd))
    supervisor.set_inheritable(False)  # a child of ours must not keep it open
    supervisor.setblocking(True)
    return supervisor


def _wait_for_end(supervisor: socket.socket) -> None:
    try:
        while supervisor.recv(256):
            pass
    except OSError:
        pass


def _silence() -> None:
    """Output goes nowhere from now on: its reader has gone, and a log line must not fail the ordered stop."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(nowhere, fd)
    os.close(nowhere)


def _config_error(group: BaseExceptionGroup[BaseException]) -> ConfigError | None:
    found = group.subgroup(ConfigError)
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]  # type: ignore[assignment]
    return found if isinstance(found, ConfigError) else None
