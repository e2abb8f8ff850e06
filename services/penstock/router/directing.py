"""Commands to workers: one that is told to drain or to take another role answers by what it says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from penstock.errors import DeadlineExceeded, InvalidRequest, NotFound, Refused, Unavailable
from penstock.router import messages
from penstock.router.hints import Mailbox
from penstock.router.registry import Registry, Seat
from penstock.router.workers import Role
from penstock.v1 import router_pb2

_ANSWER_S = 5.0
"""Seconds that a worker has to do what it is told: it only has to say so."""
_SHOWN = 80
_LOG = structlog.get_logger("penstock.router")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """What a worker is to do: one of the two."""

    role: Role | None = None
    drain: bool | None = None
    end: bool = False
    """With drain: its process ends when nothing runs there any more."""

    def done(self, seat: Seat) -> bool:
        """Whether the worker says that it is so."""
        return seat.member.role is self.role if self.role else seat.draining is self.drain

    @property
    def message(self) -> router_pb2.JoinResponse:
        """As the worker gets it."""
        return messages.order(self.role, drain=bool(self.drain), end=self.end)

    @property
    def described(self) -> dict[str, str | bool]:
        """For the log."""
        return {"role": self.role.value} if self.role else {"drain": bool(self.drain), "end": self.end}


class Director:
    """Tells workers what an operator, or the balancer, wants of them."""

    def __init__(
        self, registry: Registry, mailbox: Callable[[Seat], Mailbox | None], clock: Callable[[], float]
    ) -> None:
        """`mailbox` is that of a joined member; None: it has left."""
        self._registry = registry
        self._mailbox = mailbox
        self._clock = clock
        self._stood = asyncio.Event()

    def members(self) -> list[router_pb2.JoinedMember]:
        """All members, workers first, in the order in which they joined."""
        seats = sorted(self._registry, key=lambda seat: seat.member.role is None)
        return [self._told(seat) for seat in seats]

    def stood(self) -> None:
        """A member has said what it wants, or has left."""
        self._stood.set()
        self._stood = asyncio.Event()

    async def command(self, request: router_pb2.CommandRequest) -> router_pb2.JoinedMember:
        """Tells a worker, and returns when it has done so. Raises PenstockError."""
        seat = self._find(request.member)
        instruction = _instruction(request.command)
        if not request.force:
            self._check_left(seat, instruction)
        await self.tell(seat, instruction)
        return self._told(seat)

    async def tell(self, seat: Seat, instruction: Instruction) -> None:
        """Tells a worker, and returns when it has done so; one that is to end may have left by then. Raises Unavailable
        or DeadlineExceeded."""
        _LOG.info("a worker is told", member=seat.member.id, **instruction.described)
        try:
            async with asyncio.timeout(_ANSWER_S):
                asked = False
                while not instruction.done(seat) or (instruction.end and not asked):
                    stood, mailbox = self._stood, self._mailbox(seat)
                    if mailbox is None and instruction.end and asked:
                        seat.draining = True  # it had nothing to do, and has ended before it said that it would
                        return
                    if mailbox is None:
                        raise Unavailable(f"member: {seat.member.id} has left the router", field="member")
                    if not asked:
                        asked = True
                        mailbox.put(("command", instruction.role is None), instruction.message)
                        continue
                    await stood.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"member: {seat.member.id} has not answered within {_ANSWER_S:g} s") from None

    def _find(self, name: str) -> Seat:
        if not name:
            raise InvalidRequest("member: must be the id or the address of a worker", field="member")
        seat = self._registry.find(name)
        if seat is None:
            raise NotFound(f"member: no worker {name[:_SHOWN]!r} has joined, by id or by address", field="member")
        if seat.member.role is None:
            raise InvalidRequest(f"member: {name!r} is a kvstore; must be a worker", field="member")
        return seat

    def _check_left(self, seat: Seat, instruction: Instruction) -> None:
        """Refuses what leaves nobody to decode the model, when there is somebody now."""
        if instruction.drain is not True and instruction.role is not Role.PREFILL:
            return
        model = seat.member.model
        if self._registry.decoders(model, self._clock()) == [seat]:
            raise Refused(
                f"member: {seat.member.id} is the only worker that decodes {model!r}; give another one that role first,"
                " or force it",
                field="member",
                code="last_worker",
            )

    def _told(self, seat: Seat) -> router_pb2.JoinedMember:
        return messages.joined(seat, silent=self._registry.silent(seat, self._clock()))


def _instruction(command: router_pb2.MemberCommand) -> Instruction:
    match command.WhichOneof("kind"):
        case "drain":
            if command.exit and not command.drain:
                raise InvalidRequest("command.exit: must go with drain", field="command.exit")
            return Instruction(drain=command.drain, end=command.exit)
        case "role" if command.exit:
            raise InvalidRequest("command.exit: must go with drain", field="command.exit")
        case "role":
            return Instruction(role=messages.role(command.role, "command.role"))
        case _:
            raise InvalidRequest("command: must be drain or role", field="command")
