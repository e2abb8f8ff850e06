"""The charges of live plans on each member: tokens to prefill, sequences and context to decode."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Charge:
    """The charge of one plan. Lives exactly as long as the plan's stream; `Ledger.release` gives it back."""

    prefill: str
    """The member that computes the prompt; the decode member itself when there was no hand-off."""
    decode: str
    prefill_tokens: int
    """Uncached tokens that are not yet computed; 0 once prefill is done."""
    context_tokens: int
    """Prompt and expected output on the decode member."""
    prompt_tokens: int
    made_at: float


@dataclass(slots=True)
class Account:
    """The sum of all charges on one member."""

    prefill_tokens: int = 0
    sequences: int = 0
    context_tokens: int = 0
    pending: dict[int, Charge] = field(default_factory=dict)
    """Charges whose prefill is not done, oldest first."""
    decoding: dict[int, Charge] = field(default_factory=dict)
    """Charges that decode here, oldest first."""


class Ledger:
    """Owner of all charges. With no live plan it is exactly empty."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._live: dict[int, Charge] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def empty(self) -> bool:
        """Whether no member is charged with anything."""
        return not self._live and not self._accounts

    def of(self, member: str) -> Account:
        """The charges on `member`; to be read, not changed."""
        return self._accounts.get(member) or Account()

    def charge(self, charge: Charge) -> int:
        """Counts `charge` and names it. The caller owes one `release`."""
        self._next += 1
        number = self._next
        self._live[number] = charge
        prefill = self._accounts.setdefault(charge.prefill, Account())
        prefill.prefill_tokens += charge.prefill_tokens
        prefill.pending[number] = charge
        decode = self._accounts.setdefault(charge.decode, Account())
        decode.sequences += 1
        decode.context_tokens += charge.context_tokens
        decode.decoding[number] = charge
        return number

    def prefilled(self, number: int) -> None:
        """The prompt of `number` is computed. More than once is fine."""
        charge = self._live[number]
        account = self._accounts.get(charge.prefill)
        if account is not None and number in account.pending:
            del account.pending[number]
            account.prefill_tokens -= charge.prefill_tokens
            charge.prefill_tokens = 0
            self._close_if_zero(charge.prefill)

    def generated(self, number: int, tokens: int) -> None:
        """`number` has generated `tokens` in all: the charge grows when that is more than was expected."""
        charge = self._live[number]
        more = charge.prompt_tokens + tokens - charge.context_tokens
        if more > 0:
            charge.context_tokens += more
            self._accounts[charge.decode].context_tokens += more

    def release(self, number: int) -> None:
        """Gives everything back."""
        self.prefilled(number)
        charge = self._live.pop(number)
        account = self._accounts[charge.decode]
        del account.decoding[number]
        account.sequences -= 1
        account.context_tokens -= charge.context_tokens
        self._close_if_zero(charge.decode)

    def _close_if_zero(self, member: str) -> None:
        account = self._accounts[member]
        if not account.pending and not account.decoding:
            del self._accounts[member]
