"""What a parser promises whatever it is given: a right answer or an error of its own kind, soon, in little memory."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from penstock.errors import InvalidRequest, PenstockError

LOOP_S = 0.02
"""What `make loops` allows a task to hold an event loop."""
LONGEST_MESSAGE = 4096
"""Characters of an error for a client: it may quote what was sent, and not all of it."""
_TRIES = 3
_STUCK = 10
_AGAIN_S = 2.0
"""Seconds between two signals: time enough to leave what the first one has stopped."""
Check = Callable[[bytes], None]
Opened = Callable[[], AbstractContextManager[Check]]


@dataclass(frozen=True, kw_only=True)
class Contract:
    """One parser's. `opened` gives the check, which feeds it one input and looks at what comes back."""

    name: str
    opened: Opened
    refusals: tuple[type[Exception], ...] = (InvalidRequest,)
    """What it may raise; anything else is a fault of the parser."""
    words: tuple[bytes, ...] = ()
    """That mean something to it."""
    seconds: float = 1.0
    """Of a processor, for one input. Generous: many times what the longest takes."""
    mebibytes: int = 64
    """By which one input may make the process grow, for the time being."""
    examples: int = 150
    """Of an ordinary run."""


def plain(check: Check) -> Opened:
    """For a check that needs nothing opened."""
    return lambda: nullcontext(check)


def examine(contract: Contract, check: Check, data: bytes, patience: float = 1.0) -> None:
    """Raises AssertionError for a broken promise, and whatever the parser should not raise. An input that takes too
    long is tried again, because something else may have come in between; `patience` stretches the bound of time."""
    bound = contract.seconds * patience
    for _ in range(_TRIES):
        spent, grown = _tried(contract, check, data, bound)
        if spent <= bound and grown <= contract.mebibytes:
            return
    raise AssertionError(f"{contract.name}: {len(data)} bytes took {spent:.3f} s and {grown} MiB")


def _tried(contract: Contract, check: Check, data: bytes, bound: float) -> tuple[float, int]:
    before = _peak_mib(forget=True)
    begin = time.process_time()
    try:
        with stopped_after(bound * _STUCK):
            check(data)
    except contract.refusals as error:
        _check_words(error)
    except Stopped:
        raise AssertionError(f"{contract.name}: {len(data)} bytes took over {bound * _STUCK} s") from None
    return time.process_time() - begin, _peak_mib() - before


def _check_words(error: Exception) -> None:
    """An error says something, and to a client not all that it has sent."""
    said = str(error)
    assert said, repr(error)
    assert not isinstance(error, PenstockError) or len(said) <= LONGEST_MESSAGE, f"an error of {len(said)} characters"


def _peak_mib(forget: bool = False) -> int:
    """The most memory that this process had since it was last forgotten."""
    if forget:
        Path("/proc/self/clear_refs").write_text("5")
    [line] = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


class Stopped(BaseException):
    """Not an Exception, which a parser might take for one of its input."""


@contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    """Ends what takes more seconds of a processor, between two steps of the interpreter: raises Stopped."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped

    before = signal.signal(signal.SIGPROF, stop)
    outer = signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, *outer)
        signal.signal(signal.SIGPROF, before if callable(before) else signal.SIG_IGN)  # one may still be on its way
