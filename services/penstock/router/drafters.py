"""Draft services that have joined. A router gives them no work: it shows them, and tells them what to drop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from penstock.errors import InvalidRequest, Overloaded, Unavailable
from penstock.router import messages
from penstock.router.hints import Mailbox
from penstock.router.registry import Member
from penstock.rpc.identity import current_caller
from penstock.v1 import router_pb2

MOST_DRAFTERS = 64
_LOG = structlog.get_logger("penstock.router")


@dataclass(slots=True, eq=False)
class DraftMember:
    """One draft service, from the first message of its stream to the stream's end."""

    member: Member
    joined_at: float
    heard_at: float
    load: router_pb2.DraftLoad | None = None
    """The newest; None: it has not said any."""


class Drafters:
    """All of them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._mailboxes: dict[DraftMember, Mailbox] = {}

    @property
    def mailboxes(self) -> Mapping[DraftMember, Mailbox]:
        """Those of the joined ones; a live view."""
        return self._mailboxes

    @contextmanager
    def joined(self, hello: router_pb2.Hello) -> Iterator[tuple[DraftMember, Mailbox]]:
        """One has joined, for the length of the block. An older stream of it ends. Raises InvalidRequest, Forbidden,
        Refused or Overloaded."""
        member = messages.drafter(hello, current_caller())
        for old, mailbox in list(self._mailboxes.items()):
            if old.member.id == member.id:
                mailbox.end(Unavailable("a newer stream of this member has taken over"))
                del self._mailboxes[old]
        if len(self._mailboxes) >= MOST_DRAFTERS:
            raise Overloaded(f"{MOST_DRAFTERS} draft services are joined already", retry_after=5.0)
        now = self._clock()
        drafter, mailbox = DraftMember(member, joined_at=now, heard_at=now), Mailbox()
        self._mailboxes[drafter] = mailbox
        _LOG.info("member joined", member=member.id, role="draft", at=member.address)
        try:
            yield drafter, mailbox
        finally:
            if self._mailboxes.pop(drafter, None) is not None:
                _LOG.info("member left", member=member.id)

    def loaded(self, drafter: DraftMember, load: router_pb2.DraftLoad) -> None:
        """One has so much to do. Raises InvalidRequest."""
        if not (math.isfinite(load.busy_s) and load.busy_s >= 0):
            raise InvalidRequest(f"draft.busy_s = {load.busy_s}: must be finite and not negative", field="draft.busy_s")
        drafter.load, drafter.heard_at = load, self._clock()

    def listed(self) -> list[router_pb2.JoinedDraft]:
        """All, in the order in which they joined, for people."""
        now = self._clock()
        return [
            router_pb2.JoinedDraft(
                member_id=one.member.id,
                address=one.member.address,
                host_id=one.member.host_id,
                model_name=one.member.model,
                version=one.member.version,
                joined_s=now - one.joined_at,
                heard_s=now - one.heard_at,
                load=one.load,
            )
            for one in self._mailboxes
        ]
