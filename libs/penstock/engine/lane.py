"""A thread for calls that would block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread
from typing import Any, Self, TypeVar, TypeVarTuple

_T = TypeVar("_T")
_Arguments = TypeVarTuple("_Arguments")
_Call = tuple["asyncio.Future[Any]", Callable[[], object] | None, Callable[..., Any], tuple[Any, ...]]


class Lane:
    """Carries out one call after the other in a thread of its own. Belongs to the event loop that made it.

    A call costs a third of the time that an executor adds, which matters for a small model.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def call(
        self, function: Callable[[*_Arguments], _T], *arguments: *_Arguments, begun: Callable[[], object] | None = None
    ) -> asyncio.Future[_T]:
        """The function's result or exception. Cancelling the future does not stop a call that has begun.

        `begun` is called on the event loop once the thread has begun the call, and before its result is there: so work
        that `begun` does cannot hold the interpreter lock while the thread needs it to begin.
        """
        future: asyncio.Future[_T] = self._loop.create_future()
        self._calls.put((future, begun, function, arguments))
        return future

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for the calls made so far."""
        self._calls.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, begun, function, arguments = call
            result, error = None, None
            if begun is not None:
                self._loop.call_soon_threadsafe(begun)
            try:
                result = function(*arguments)
            except BaseException as raised:
                error = raised
            self._loop.call_soon_threadsafe(_answer, future, result, error)
            del call, future, begun, function, arguments, result, error  # the waiting thread keeps no object alive


def _answer(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


@contextmanager
def watching(files: Sequence[int], news: Callable[[], object]) -> Iterator[None]:
    """For the length of the block, calls `news` on the event loop as soon as one of the files can be read, and then no
    more for this file."""
    loop = asyncio.get_running_loop()

    def heard(file: int) -> None:
        loop.remove_reader(file)
        news()

    for file in files:
        loop.add_reader(file, heard, file)
    try:
        yield
    finally:
        for file in files:
            loop.remove_reader(file)
