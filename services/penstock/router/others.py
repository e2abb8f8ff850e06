"""What other routers have planned: their bookings on each member, as far as they are known here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Booking:
    """What one plan of another router charges its members with."""

    prefill: str
    decode: str
    prefill_tokens: int
    """To compute still."""
    context_tokens: int
    made_at: float
    """When it was planned, by this router's clock."""


@dataclass(slots=True)
class OthersAccount:
    """The sum of others' bookings on one member."""

    prefill_tokens: int = 0
    sequences: int = 0
    context_tokens: int = 0
    bookings: dict[tuple[str, int], Booking] = field(default_factory=dict)
    """By owner and number."""

    def unseen(self, member: str, since: float) -> tuple[int, int]:
        """Tokens and sequences of what was planned for `member` since then."""
        new = [booking for booking in self.bookings.values() if booking.made_at >= since]
        tokens = sum(booking.prefill_tokens for booking in new if booking.prefill == member)
        return tokens, sum(booking.decode == member for booking in new)


class OthersBookings:
    """Owner of what is known of others' bookings."""

    def __init__(self) -> None:
        self.routers = 0
        """Whose plans are all known here, this one's among them; 0: nothing is known of others."""
        self._owners: dict[str, dict[int, Booking]] = {}
        self._accounts: dict[str, OthersAccount] = {}
        self._none = OthersAccount()

    def __len__(self) -> int:
        return sum(map(len, self._owners.values()))

    def of(self, member: str) -> OthersAccount:
        """What others have booked on `member`; to be read, not changed."""
        return self._accounts.get(member, self._none)

    def put(self, owner: str, number: int, booking: Booking) -> Iterable[str]:
        """A booking is made, or has changed. Returns the members whose accounts change."""
        changed = set(self.drop(owner, number))
        self._owners.setdefault(owner, {})[number] = booking
        for member in {booking.prefill, booking.decode}:
            account = self._accounts.setdefault(member, OthersAccount())
            account.bookings[owner, number] = booking
            self._add(account, member, booking, 1)
            changed.add(member)
        return changed

    def drop(self, owner: str, number: int) -> Iterable[str]:
        """A booking is over; one that is not known may be."""
        booking = self._owners.get(owner, {}).pop(number, None)
        if booking is None:
            return ()
        members = {booking.prefill, booking.decode}
        for member in members:
            account = self._accounts[member]
            del account.bookings[owner, number]
            self._add(account, member, booking, -1)
            if not account.bookings:
                del self._accounts[member]
        return members

    def forget(self, owner: str) -> Iterable[str]:
        """All bookings of an owner are over."""
        changed = {member for number in list(self._owners.get(owner, ())) for member in self.drop(owner, number)}
        self._owners.pop(owner, None)
        return changed

    @staticmethod
    def _add(account: OthersAccount, member: str, booking: Booking, sign: int) -> None:
        if booking.prefill == member:
            account.prefill_tokens += sign * booking.prefill_tokens
        if booking.decode == member:
            account.sequences += sign
            account.context_tokens += sign * booking.context_tokens
