"""One other router, as this one reads it: its lease, its bookings, and its log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from penstock.router.shared.commons import Commons
from penstock.router.shared.journal import Journal
from penstock.router.shared.records import ForeignState, unpack_booking, unpack_facts
from penstock.router.shared.scripts import SNAPSHOT, owner_keys

_ENTRIES = 64
"""That are read at once."""

Ask = Callable[[str, Sequence[str]], Awaitable[Any]]


class OwnerReader:
    """Reads one owner."""

    def __init__(self, owner: str, commons: Commons, ask: Ask, refuse: Callable[[str], None]) -> None:
        """`ask` evaluates a script, and `refuse` is told what is not ours."""
        self._owner = owner
        self._commons = commons
        self._ask = ask
        self._refuse = refuse
        _, self._lease, self._bookings, self._log = owner_keys(owner)
        self._journal: Journal | None = None
        """None: a snapshot is needed."""

    @property
    def lives(self) -> bool:
        """Whether it has a lease, and all that it has booked is known."""
        return self._journal is not None

    def lost(self) -> None:
        """Something may have been missed."""
        self._journal = None

    async def begin(self) -> None:
        """Takes a snapshot. Raises OSError."""
        try:
            lease, bookings, last = await self._ask(SNAPSHOT, (self._lease, self._bookings, self._log))
        except OSError as error:
            if "WRONGTYPE" not in str(error):
                raise
            self._refuse(f"{self._owner}: {error}")
            self._commons.forget(self._owner)
            return
        self._commons.forget(self._owner)
        if not lease.isdigit():
            return  # it has no bookings
        last_id, fields = (last[0], _fields(last[1])) if last else (b"0", {})
        epoch = _number(fields.get(b"e"))
        self._journal = Journal(int(lease), _number(fields.get(b"n")) if epoch == int(lease) else 0, last_id)
        for number, data in zip(bookings[::2], bookings[1::2], strict=True):
            try:
                booking = unpack_booking(data)
                if str(booking.number).encode() != number:
                    raise ForeignState("under another's number")
            except ForeignState as error:
                self._refuse(f"{self._bookings} {number!r}: {error}")
                continue
            self._commons.hear(self._owner, [booking])

    def ask(self, pipe: Any) -> None:
        """Adds its two questions to a round trip."""
        pipe.get(self._lease)
        pipe.xread({self._log: self._journal.last_id if self._journal else b"0"}, count=_ENTRIES)

    async def answered(self, lease: object, read: object) -> bool:
        """Takes the answers. Returns whether what is not in a snapshot was missed: sessions and answers. Raises
        OSError."""
        if not isinstance(lease, bytes) or not lease.isdigit():
            self._commons.forget(self._owner)  # all at once
            self._journal = None
            return False
        journal = self._journal
        if journal is None or journal.epoch != int(lease):
            missed = journal is not None
            await self.begin()
            return missed
        if isinstance(read, Exception):
            self._refuse(f"{self._log}: {read}")
            self._journal = None
            return False
        for id, data in _entries(read):
            journal.last_id = id
            if not await self._entry(journal, id, _fields(data)):
                await self.begin()
                return True
        return False

    async def _entry(self, journal: Journal, id: bytes, fields: dict[bytes, bytes]) -> bool:
        """Whether it was in its place and understood."""
        try:
            facts = unpack_facts(fields.get(b"d"))
        except ForeignState as error:
            self._refuse(f"{self._log} {id.decode(errors='replace')}: {error}")
            return False
        match journal.judge(_number(fields.get(b"e")), _number(fields.get(b"n"))):
            case "apply":
                self._commons.hear(self._owner, facts)
            case "gap":
                return False
        return True


def _entries(read: object) -> list[tuple[bytes, Any]]:
    """Of one stream, as either protocol gives them."""
    if isinstance(read, dict):
        return [entry for entries in read.values() for part in entries for entry in part]
    return [(id, data) for _, entries in read or () for id, data in entries]  # type: ignore[attr-defined]


def _fields(data: Any) -> dict[bytes, bytes]:
    if isinstance(data, dict):
        return data
    return dict(zip(data[::2], data[1::2], strict=False))


def _number(text: object) -> int:
    """0 for what is none."""
    return int(text) if isinstance(text, bytes) and text.isdigit() and len(text) < 16 else 0
