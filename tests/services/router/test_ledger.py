"""The ledger: whatever happens to plans, with none alive nothing is charged."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from penstock.router.ledger import Charge, Ledger

MEMBERS = st.sampled_from(["a", "b", "c"])


class Machine(RuleBasedStateMachine):
    """Plans come, progress and go in any order; sums are kept beside the ledger the obvious way."""

    plans = Bundle("plans")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.live: dict[int, Charge] = {}

    @rule(target=plans, prefill=MEMBERS, decode=MEMBERS, tokens=st.integers(1, 500), expected=st.integers(1, 200))
    def charge(self, prefill: str, decode: str, tokens: int, expected: int) -> int:
        charge = Charge(
            prefill=prefill,
            decode=decode,
            prefill_tokens=tokens,
            context_tokens=tokens + expected,
            prompt_tokens=tokens,
            made_at=0.0,
        )
        number = self.ledger.charge(charge)
        self.live[number] = charge
        return number

    @rule(number=plans)
    def prefilled(self, number: int) -> None:
        self.ledger.prefilled(number)

    @rule(number=plans, tokens=st.integers(0, 400))
    def generated(self, number: int, tokens: int) -> None:
        self.ledger.generated(number, tokens)
        charge = self.live[number]
        assert charge.context_tokens >= charge.prompt_tokens + tokens

    @rule(number=consumes(plans))
    def release(self, number: int) -> None:
        self.ledger.release(number)
        del self.live[number]

    @rule(target=plans, numbers=st.lists(consumes(plans), max_size=3, unique=True))
    def release_some(self, numbers: list[int]) -> object:
        for number in numbers:
            self.release(number)
        return multiple()

    @invariant()
    def sums_agree(self) -> None:
        for member in "abc":
            account = self.ledger.of(member)
            decoding = [charge for charge in self.live.values() if charge.decode == member]
            assert account.sequences == len(decoding) == len(account.decoding)
            assert account.context_tokens == sum(charge.context_tokens for charge in decoding)
            assert account.prefill_tokens == sum(c.prefill_tokens for c in self.live.values() if c.prefill == member)
        assert self.ledger.empty == (not self.live)
        assert len(self.ledger) == len(self.live)

    def teardown(self) -> None:
        for number in list(self.live):
            self.ledger.release(number)
        assert self.ledger.empty


TestLedger = Machine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40)
