"""Orders that members carry out: each is told, and answers on its own stream."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from typing import Generic, TypeVar

from penstock.errors import Overloaded
from penstock.router.hints import Mailbox
from penstock.v1 import router_pb2

Who = TypeVar("Who", bound=Hashable)
Answer = TypeVar("Answer")


class _Order(Generic[Who, Answer]):
    """One that goes on."""

    def __init__(self, members: Iterable[Who]) -> None:
        self._waited = set(members)
        self.answers: dict[Who, Answer] = {}
        self.over = asyncio.Event()
        self._look()

    def answer(self, member: Who, answer: Answer) -> None:
        if member in self._waited:
            self.answers[member] = answer
            self.leave(member)

    def leave(self, member: Who) -> None:
        """This one is not waited for."""
        self._waited.discard(member)
        self._look()

    def _look(self) -> None:
        if not self._waited:
            self.over.set()


class MemberOrders(Generic[Who, Answer]):
    """All orders of one kind that go on."""

    def __init__(self, *, most: int, busy: str) -> None:
        """At most `most` go on at a time; `busy` says so."""
        self._most, self._busy = most, busy
        self._numbers = itertools.count(1)
        self._running: dict[int, _Order[Who, Answer]] = {}

    def __len__(self) -> int:
        return len(self._running)

    async def give(
        self,
        members: Mapping[Who, Mailbox],
        order: Callable[[int], tuple[Hashable, router_pb2.JoinResponse]],
        *,
        patience_s: float,
    ) -> Mapping[Who, Answer]:
        """Tells the members; `order` makes the subject and the message of an order with that number. Returns the
        answers when all have answered or left, or when the time is over. Raises Overloaded."""
        if len(self._running) >= self._most:
            raise Overloaded(self._busy, retry_after=1.0)
        number = next(self._numbers)
        running = self._running[number] = _Order(members)
        try:
            subject, message = order(number)
            for mailbox in members.values():
                mailbox.put(subject, message)
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await running.over.wait()
        finally:
            del self._running[number]
        return running.answers

    def heard(self, member: Who, number: int, answer: Answer) -> None:
        """A member's answer; one that comes too late is dropped."""
        if number in self._running:
            self._running[number].answer(member, answer)

    def left(self, member: Who) -> None:
        """A member has gone."""
        for running in self._running.values():
            running.leave(member)
