"""For all tests: examples have no deadline, which would measure the machine, and are the same in each run
(`--hypothesis-profile=patient` draws new ones); and the watch for blocked event loops."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings
from tests.blocked_loops import LoopWatch

from penstock.runtime.service import share_the_lock

share_the_lock()  # as each service does: here they run in the tests' process

# No test reaches another host, so no HTTP client needs to read the certificates of the whole web.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent / "no_certificates")

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("patient"), derandomize=True)
settings.load_profile("repeatable")

# structlog's own way of showing errors takes a tenth of a second each, on the event loop.
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)

_WATCH = pytest.StashKey[LoopWatch]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--blocked-loop", type=float, metavar="MS", help="fail a test in which a task holds a loop longer")


def pytest_configure(config: pytest.Config) -> None:
    limit = config.getoption("--blocked-loop")
    if limit:
        watch = config.stash[_WATCH] = LoopWatch(limit / 1e3)
        watching = watch.watching()
        watching.__enter__()
        config.add_cleanup(lambda: watching.__exit__(None, None, None))


@pytest.fixture(autouse=True)
def _loops_are_not_blocked(request: pytest.FixtureRequest) -> Iterator[None]:
    """In the debug mode `--blocked-loop`: nobody but the test itself holds an event loop."""
    yield
    watch = request.config.stash.get(_WATCH, None)
    if watch is not None and (found := watch.take()):
        pytest.fail("\n".join(map(str, found)), pytrace=False)
