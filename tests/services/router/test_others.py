"""Bookings of other routers, beside a plain sum over all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.router.others import Booking, OthersBookings

MEMBERS = st.sampled_from("uvw")
BOOKINGS = st.builds(
    Booking,
    prefill=MEMBERS,
    decode=MEMBERS,
    prefill_tokens=st.integers(0, 100),
    context_tokens=st.integers(0, 100),
    made_at=st.floats(0, 10),
)
NAMES = st.tuples(st.sampled_from("ab"), st.integers(1, 4))


@given(st.lists(st.tuples(NAMES, st.none() | BOOKINGS), max_size=40), st.floats(0, 10))
def test_they_add_up_in_whatever_order_they_come(changes, since):
    """Any booking is put again when it changes, and a snapshot comes in no order."""
    others = OthersBookings()
    live: dict[tuple[str, int], Booking] = {}
    for (owner, number), booking in changes:
        if booking is None:
            others.drop(owner, number)
            live.pop((owner, number), None)
        else:
            others.put(owner, number, booking)
            live[owner, number] = booking
    assert len(others) == len(live)
    for member in "uvw":
        account = others.of(member)
        prompts = [one for one in live.values() if one.prefill == member]
        answers = [one for one in live.values() if one.decode == member]
        assert account.prefill_tokens == sum(one.prefill_tokens for one in prompts)
        assert account.sequences == len(answers)
        assert account.context_tokens == sum(one.context_tokens for one in answers)
        assert account.unseen(member, since) == (
            sum(one.prefill_tokens for one in prompts if one.made_at >= since),
            sum(one.made_at >= since for one in answers),
        )


@given(st.lists(st.tuples(NAMES, BOOKINGS), max_size=20), st.sampled_from("ab"))
def test_an_owner_that_is_forgotten_leaves_nothing(puts, gone):
    others, rest = OthersBookings(), OthersBookings()
    for (owner, number), booking in puts:
        others.put(owner, number, booking)
        if owner != gone:
            rest.put(owner, number, booking)
    others.forget(gone)
    assert [others.of(member) for member in "uvw"] == [rest.of(member) for member in "uvw"]
