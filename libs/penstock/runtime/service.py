"""The `__main__` of every service: settings, telemetry, and a life from ready to stopped."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from cyclopts import App

from penstock.runtime.config import service_app
from penstock.runtime.lifecycle import Lifecycle, run
from penstock.runtime.metrics import Metrics, exposed
from penstock.runtime.tasks import first_of
from penstock.runtime.telemetry import telemetry
from penstock.runtime.threads import started_threads


class ServiceConfig(Protocol):
    """Settings that every service has."""

    @property
    def log_level(self) -> str: ...

    @property
    def metrics_address(self) -> str | None: ...


class OpenService(Protocol):
    """A service that is open: where it listens, and its metrics."""

    @property
    def address(self) -> str: ...

    @property
    def metrics(self) -> Metrics: ...


_SWITCH_S = 0.0005


Config = TypeVar("Config", bound=ServiceConfig)
Service = TypeVar("Service", bound=OpenService)


def its_address(service: OpenService) -> Mapping[str, str]:
    """The message of most services to their supervisor when they are ready."""
    return {"address": service.address}


def share_the_lock() -> None:
    """Makes threads that compute give way to the event loop sooner than Python's 5 ms: it asks for the interpreter lock
    after every system call, and one turn of it has many."""
    sys.setswitchinterval(_SWITCH_S)


def start_threads() -> None:
    """Starts the threads of `asyncio.to_thread`, of the loop that runs, as many as it would have."""
    asyncio.get_running_loop().set_default_executor(started_threads(min(32, (os.cpu_count() or 1) + 4), "job"))


def service_main(
    name: str,
    what: str,
    config_type: Callable[..., Config],
    open_service: Callable[[Config], AbstractAsyncContextManager[Service]],
    *,
    tells: Callable[[Service], Mapping[str, str]] = its_address,
    done: Callable[[Service], Coroutine[Any, Any, object]] | None = None,
) -> App:
    """The command line of the service `name`; `what` is its help text; `tells` makes the message to its supervisor when
    it is ready; the process also ends when what `done` gives has happened."""

    def serve(config: Config) -> None:
        share_the_lock()

        async def main(lifecycle: Lifecycle) -> None:
            async with open_service(config) as service:
                start_threads()
                service.metrics.watch_tasks(asyncio.get_running_loop())
                gc.freeze()  # else each full collection holds the loop while it walks all that imports made
                with exposed(service.metrics, config.metrics_address):
                    lifecycle.ready(**tells(service))
                    await first_of(lifecycle.stopped(), *((done(service),) if done else ()))

        with telemetry(name, config.log_level):
            run(main)

    serve.__doc__ = what
    return service_app(name, serve, config_type)
