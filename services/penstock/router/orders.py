"""Orders that members carry out: each is told, and answers on its own stream."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from penstock.errors import Overloaded
from penstock.router.hints import Mailbox
from penstock.router.registry import Seat
from penstock.v1 import router_pb2

Answer = TypeVar("Answer")


class _Order(Generic[Answer]):
    """One that goes on."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        self._waited = set(seats)
        self.answers: dict[Seat, Answer] = {}
        self.over = asyncio.Event()
        self._look()

    def answer(self, seat: Seat, answer: Answer) -> None:
        if seat in self._waited:
            self.answers[seat] = answer
            self.leave(seat)

    def leave(self, seat: Seat) -> None:
        """This one is not waited for."""
        self._waited.discard(seat)
        self._look()

    def _look(self) -> None:
        if not self._waited:
            self.over.set()


class MemberOrders(Generic[Answer]):
    """All orders of one kind that go on."""

    def __init__(self, mailboxes: Mapping[Seat, Mailbox], *, most: int, busy: str) -> None:
        """`mailboxes` has those of the joined members. At most `most` go on at a time; `busy` says so."""
        self._mailboxes = mailboxes
        self._most, self._busy = most, busy
        self._numbers = itertools.count(1)
        self._running: dict[int, _Order[Answer]] = {}

    def __len__(self) -> int:
        return len(self._running)

    async def give(
        self,
        seats: Sequence[Seat],
        order: Callable[[int], tuple[Hashable, router_pb2.JoinResponse]],
        *,
        patience_s: float,
    ) -> Mapping[Seat, Answer]:
        """Tells the members; `order` makes the subject and the message of an order with that number. Returns the
        answers when all have answered or left, or when the time is over. Raises Overloaded."""
        if len(self._running) >= self._most:
            raise Overloaded(self._busy, retry_after=1.0)
        number = next(self._numbers)
        running = self._running[number] = _Order(seats)
        try:
            subject, message = order(number)
            for seat in seats:
                self._mailboxes[seat].put(subject, message)
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await running.over.wait()
        finally:
            del self._running[number]
        return running.answers

    def heard(self, seat: Seat, number: int, answer: Answer) -> None:
        """A member's answer; one that comes too late is dropped."""
        if number in self._running:
            self._running[number].answer(seat, answer)

    def left(self, seat: Seat) -> None:
        """A member has gone."""
        for running in self._running.values():
            running.leave(seat)
