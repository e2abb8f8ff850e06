"""The ledger: whatever happens to plans, with none alive nothing is charged."""

from __future__ import annotations

from collections import defaultdict
from itertools import takewhile

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.router.ledger import Charge, Ledger

MEMBERS = st.sampled_from(["a", "b", "c"])
PICKS = st.integers(0, 39)
KEYS = [b"x", b"xy", b"xyx", b"xyxy"]


SIZE = 16
PROMPTS = st.lists(st.sampled_from("xy"), max_size=4).map(
    lambda names: [("".join(names[: at + 1])).encode() for at in range(len(names))]
)
"""Keys of prompts' blocks: each names all before it."""


class Machine(RuleBasedStateMachine):
    """Plans come, progress and go in any order; sums are kept beside the ledger the obvious way."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.live: dict[int, Charge] = {}
        self.pending: set[int] = set()
        self.computed: dict[str, set[bytes]] = defaultdict(set)

    @rule(
        prefill=MEMBERS,
        decode=MEMBERS,
        keys=PROMPTS,
        cached=st.integers(0, 4),
        own=st.integers(1, 500),
        expected=st.integers(1, 200),
    )
    def charge(self, prefill: str, decode: str, keys: list[bytes], cached: int, own: int, expected: int) -> None:
        tokens = len(keys) * SIZE + own
        charge = Charge(
            prefill=prefill,
            decode=decode,
            own_tokens=own,
            context_tokens=tokens + expected,
            prompt_tokens=tokens,
            made_at=0.0,
            block_size=SIZE,
            block_keys=keys,
            uncached_keys=keys[cached:],
        )
        before = self._to_compute(prefill)
        others = [set(one.block_keys) for one in self.live.values() if one.decode == decode]
        shared = max((len(set(keys) & other) for other in others), default=0) * SIZE
        assert self.ledger.of(decode).held_tokens(keys) == shared
        number = self.ledger.charge(charge)
        self.live[number] = charge
        self.pending.add(number)
        assert charge.shared_tokens == shared
        assert charge.prefill_tokens == self._to_compute(prefill) - before, "its new part"

    @rule(pick=PICKS)
    def prefilled(self, pick: int) -> None:
        for number in self._picked(pick):
            self.ledger.prefilled(number)
            if number in self.pending:
                self.pending.remove(number)
                self.computed[self.live[number].prefill].update(self.live[number].uncached_keys)

    @rule(pick=PICKS, tokens=st.integers(0, 200), more=st.integers(0, 200))
    def generated(self, pick: int, tokens: int, more: int) -> None:
        for number in self._picked(pick):
            self.ledger.generated(number, tokens, tokens + more)
            charge = self.live[number]
            assert charge.context_tokens == charge.prompt_tokens + tokens + more
            assert charge.left_tokens == more

    @rule(picks=st.lists(PICKS, max_size=3))
    def release(self, picks: list[int]) -> None:
        for number in self._picked(*picks):
            self.ledger.release(number)
            self.pending.discard(number)
            charge = self.live.pop(number)
            others = [one.uncached_keys for one in self.live.values() if one.prefill == charge.prefill]
            self.computed[charge.prefill].intersection_update(key for keys in others for key in keys)

    def _to_compute(self, member: str) -> int:
        """Tokens of blocks that live plans need there and none has had computed, and what each has for itself."""
        charges = [self.live[number] for number in self.pending if self.live[number].prefill == member]
        blocks = {key for charge in charges for key in charge.uncached_keys} - self.computed[member]
        return len(blocks) * SIZE + sum(charge.own_tokens for charge in charges)

    def _picked(self, *picks: int) -> set[int]:
        """Plans that are alive, at most one for each pick: whatever was drawn means something, so nothing is drawn in
        vain."""
        live = sorted(self.live)
        return {live[pick % len(live)] for pick in picks} if live else set()

    @invariant()
    def sums_agree(self) -> None:
        for member in "abc":
            account = self.ledger.of(member)
            decoding = [charge for charge in self.live.values() if charge.decode == member]
            assert account.sequences == len(decoding) == len(account.decoding)
            assert account.context_tokens == sum(one.context_tokens - one.shared_tokens for one in decoding)
            assert account.left_tokens == sum(one.left_tokens for one in decoding)
            assert account.prefill_tokens == self._to_compute(member)
            computing = {key for c in self.live.values() if c.prefill == member for key in c.uncached_keys}
            for start in range(len(KEYS)):
                run = takewhile(computing.__contains__, KEYS[start:])
                assert account.computing.run(KEYS, start) == len(list(run))
        assert self.ledger.empty == (not self.live)
        assert len(self.ledger) == len(self.live)

    def teardown(self) -> None:
        for number in list(self.live):
            self.ledger.release(number)
        assert self.ledger.empty


TestLedger = Machine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_plan_for_which_there_is_no_room_counts_in_full() -> None:
    def charge() -> Charge:
        return Charge(
            prefill="a",
            decode="a",
            own_tokens=5,
            context_tokens=40,
            prompt_tokens=37,
            made_at=0.0,
            block_size=SIZE,
            block_keys=KEYS[:2],
            uncached_keys=KEYS[1:2],
        )

    ledger = Ledger(most_keys=3)
    for _ in range(2):
        ledger.charge(charge())
    account = ledger.of("a")
    assert (account.prefill_tokens, account.context_tokens) == (2 * (5 + SIZE), 80)
    for number in (1, 2):
        ledger.release(number)
    assert ledger.empty
    later = charge()
    ledger.charge(later)
    assert later.block_keys == KEYS[:2], "there is room again"
