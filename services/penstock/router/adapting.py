"""An operator's wish that a model's workers load or unload an adapter; and what a worker that joins is told of those
that the others have."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import structlog

from penstock.errors import InvalidRequest, NotFound
from penstock.router.hints import Mailbox
from penstock.router.messages import role_message
from penstock.router.orders import MemberOrders
from penstock.router.registry import Registry, Seat
from penstock.rpc.bounds import check_name
from penstock.v1 import router_pb2

_ANSWER_S = 60.0
"""A worker reads the whole adapter, twice."""
_AT_ONCE = 16
_LONGEST_PATH = 4096
_LOG = structlog.get_logger("penstock.router")


class AdapterOrders:
    """All changes that go on."""

    def __init__(self, registry: Registry, mailboxes: Mapping[Seat, Mailbox]) -> None:
        """`mailboxes` has those of the joined members."""
        self._registry = registry
        self._mailboxes = mailboxes
        self.orders = MemberOrders[Seat, str](most=_AT_ONCE, busy=f"{_AT_ONCE} adapters are loaded or unloaded already")
        """The answers say why it could not be done; empty: it was."""

    async def change(self, request: router_pb2.AdapterRequest) -> router_pb2.AdapterResponse:
        """Tells every worker of the model; returns when all have answered or left, or when the time is over. Raises
        InvalidRequest, NotFound and Overloaded."""
        check_name("model_name", request.model_name)
        check_name("name", request.name, least=1)
        check_name("directory", request.directory, most=_LONGEST_PATH)
        model = self._model(request.model_name)
        seats = {
            seat: mailbox
            for seat, mailbox in self._mailboxes.items()
            if seat.member.role is not None and seat.member.model == model
        }

        def order(number: int) -> tuple[Hashable, router_pb2.JoinResponse]:
            return _message(router_pb2.AdapterOrder(number=number, name=request.name, directory=request.directory))

        answers = await self.orders.give(seats, order, patience_s=_ANSWER_S)
        what = "an adapter is loaded" if request.directory else "an adapter is unloaded"
        failed = [error for error in answers.values() if error]
        _LOG.info(what, model=model, adapter=request.name, told=len(seats), failed=len(failed))
        return router_pb2.AdapterResponse(
            model_name=model,
            workers=[
                router_pb2.WorkerAdapter(
                    member_id=seat.member.id,
                    address=seat.member.address,
                    role=role_message(seat.member.role),
                    answered=seat in answers,
                    error=answers.get(seat, ""),
                )
                for seat in seats
            ],
        )

    def _model(self, name: str) -> str:
        models = sorted({seat.member.model for seat in self._registry if seat.member.role is not None})
        if not name and len(models) == 1:
            return models[0]
        if name in models:
            return name
        there = ", ".join(map(repr, models)) or "none"
        if not name and models:
            raise InvalidRequest(f"model_name: must be one of {there}", field="model_name")
        raise NotFound(f"model_name: no worker of {name[:100]!r} has joined; there is {there}", field="model_name")

    def heard(self, seat: Seat, done: router_pb2.AdapterDone) -> None:
        """A worker's answer; one that comes too late is dropped."""
        self.orders.heard(seat, done.number, done.error[:1000])

    def welcome(self, seat: Seat) -> None:
        """A member has joined: a worker loads what the others of its model have."""
        if seat.member.role is None:
            return
        for own in self._registry.adapted().values():
            name = own.name
            if own.base == seat.member.model and name not in seat.adapters:
                order = router_pb2.AdapterOrder(name=name, directory=own.adapter.directory)
                self._mailboxes[seat].put(*_message(order))

    def left(self, seat: Seat) -> None:
        """A member has gone, and is not waited for."""
        self.orders.left(seat)


def _message(order: router_pb2.AdapterOrder) -> tuple[Hashable, router_pb2.JoinResponse]:
    """With its subject: only the newest order of a name counts."""
    return ("adapter", order.name), router_pb2.JoinResponse(adapter=order)
