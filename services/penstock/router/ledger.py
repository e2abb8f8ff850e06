"""The charges of live plans on each member: tokens to prefill, sequences and context to decode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.router.overlap import Overlap, common

_UNKNOWN = -1


@dataclass(slots=True, kw_only=True)
class Charge:
    """The charge of one plan. Lives exactly as long as the plan's stream; `Ledger.release` gives it back."""

    prefill: str
    """The member that computes the prompt; the decode member itself when there was no hand-off."""
    decode: str
    context_tokens: int
    """Prompt and expected output on the decode member."""
    prompt_tokens: int
    generated: int = 0
    """Tokens of the answer that exist."""
    made_at: float
    block_size: int = 1
    block_keys: Sequence[bytes] = ()
    """Of the prompt's blocks that others may share, from the first on."""
    uncached_keys: Sequence[bytes] = ()
    """Those of them that have to be computed, for this plan or for an earlier one."""
    own_tokens: int
    """Uncached tokens outside of these blocks."""
    shared_tokens: int = _UNKNOWN
    """Those of its context that sequences on the decode member had already, if whoever makes the charge knows that."""
    prefill_tokens: int = field(default=0, init=False)
    """Its uncached tokens without those that were to be computed for an earlier plan; 0 once prefill is done."""

    @property
    def left_tokens(self) -> int:
        """Of the expected answer."""
        return max(0, self.context_tokens - self.prompt_tokens - self.generated)


@dataclass(slots=True)
class Account:
    """The sum of all charges on one member. What several plans have in common counts once."""

    block_size: int = 1
    plans: int = 0
    """Live, that compute or decode here."""
    sequences: int = 0
    pending: dict[int, Charge] = field(default_factory=dict)
    """Charges whose prefill is not done, oldest first."""
    decoding: dict[int, Charge] = field(default_factory=dict)
    """Charges that decode here, oldest first."""
    computing: Overlap = field(default_factory=Overlap)
    """Blocks that live plans have computed here, or will."""
    own_tokens: int = 0
    context_tokens: int = 0
    """Tokens whose KV the sequences hold, or will."""
    left_tokens: int = 0
    """Of their expected answers, all together."""

    @property
    def prefill_tokens(self) -> int:
        """Tokens to compute."""
        return self.computing.missing * self.block_size + self.own_tokens

    def held_tokens(self, keys: Sequence[bytes]) -> int:
        """Tokens of the leading blocks that a sequence here has too."""
        return common(keys, (charge.block_keys for charge in self.decoding.values())) * self.block_size


class Ledger:
    """Owner of all charges. With no live plan it is exactly empty."""

    def __init__(self, most_keys: int = 1_000_000) -> None:
        """A plan that would make it more than `most_keys` keys is charged in full."""
        self._most_keys = most_keys
        self._accounts: dict[str, Account] = {}
        self._none = Account()
        self._live: dict[int, Charge] = {}
        self._computing: dict[bytes, tuple[str, ...]] = {}
        """Members by block."""
        self._next = 0
        self._keys = 0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def empty(self) -> bool:
        """Whether no member is charged with anything."""
        return not self._live and not self._accounts and not self._computing

    def of(self, member: str) -> Account:
        """The charges on `member`; to be read, not changed."""
        return self._accounts.get(member, self._none)

    def numbers(self) -> Iterable[int]:
        """All live plans."""
        return self._live.keys()

    def live(self, number: int) -> Charge | None:
        """The charge of a plan, to be read, not changed; None: it is released."""
        return self._live.get(number)

    def members(self, number: int) -> tuple[str, str]:
        """Who is charged with a live plan."""
        charge = self._live[number]
        return charge.prefill, charge.decode

    def computing(self, key: bytes) -> Iterable[str]:
        """The members that live plans have compute the block of this key, or have computed."""
        return self._computing.get(key, ())

    def charge(self, charge: Charge) -> int:
        """Counts `charge` and names it. The caller owes one `release`."""
        self._bound(charge)
        self._next += 1
        number = self._next
        self._live[number] = charge
        prefill = self._account(charge.prefill, charge)
        before = prefill.prefill_tokens
        self._note_computing(prefill.computing.add(charge.uncached_keys), charge.prefill)
        prefill.own_tokens += charge.own_tokens
        charge.prefill_tokens = prefill.prefill_tokens - before
        prefill.pending[number] = charge
        decode = self._account(charge.decode, charge)
        decode.sequences += 1
        if charge.shared_tokens == _UNKNOWN:
            charge.shared_tokens = decode.held_tokens(charge.block_keys)
        decode.context_tokens += charge.context_tokens - charge.shared_tokens
        decode.left_tokens += charge.left_tokens
        decode.decoding[number] = charge
        return number

    def prefilled(self, number: int) -> None:
        """The prompt of `number` is computed. More than once is fine."""
        charge = self._live[number]
        if self._close(number):
            self._accounts[charge.prefill].computing.compute(charge.uncached_keys)

    def generated(self, number: int, tokens: int, expected: int) -> None:
        """The answer of `number` has so many tokens, and will have `expected` in all."""
        charge = self._live[number]
        context, left, decode = charge.prompt_tokens + expected, charge.left_tokens, self._accounts[charge.decode]
        decode.context_tokens += context - charge.context_tokens
        charge.context_tokens, charge.generated = context, tokens
        decode.left_tokens += charge.left_tokens - left

    def release(self, number: int) -> Charge:
        """Gives everything back. What it was to compute is left to those that wait for it too."""
        self._close(number)
        charge = self._live.pop(number)
        self._keys -= len(charge.block_keys) + len(charge.uncached_keys)
        for key in self._accounts[charge.prefill].computing.remove(charge.uncached_keys):
            members = self._computing.pop(key)
            if len(members) > 1:
                self._computing[key] = tuple(member for member in members if member != charge.prefill)
        decode = self._accounts[charge.decode]
        del decode.decoding[number]
        decode.sequences -= 1
        decode.context_tokens -= charge.context_tokens - charge.shared_tokens
        decode.left_tokens -= charge.left_tokens
        for member in (charge.prefill, charge.decode):
            self._leave(member)
        return charge

    def _note_computing(self, keys: Sequence[bytes], member: str) -> None:
        """The member computes blocks that it did not compute until now. Mostly nobody else does."""
        found: dict[bytes, tuple[str, ...]] = dict.fromkeys(keys, (member,))
        for key in found.keys() & self._computing.keys():
            found[key] = *self._computing[key], member
        self._computing.update(found)

    def _bound(self, charge: Charge) -> None:
        """Leaves the keys out when there is no room for them."""
        keys = len(charge.block_keys) + len(charge.uncached_keys)
        if self._keys + keys > self._most_keys:
            charge.own_tokens += len(charge.uncached_keys) * charge.block_size
            charge.block_keys = charge.uncached_keys = ()
            charge.shared_tokens = 0
        else:
            self._keys += keys

    def _close(self, number: int) -> bool:
        """The plan's prompt is not computed any more; whether it was until now."""
        charge = self._live[number]
        account = self._accounts[charge.prefill]
        if number not in account.pending:
            return False
        del account.pending[number]
        account.own_tokens -= charge.own_tokens
        charge.prefill_tokens = 0
        return True

    def _account(self, member: str, charge: Charge) -> Account:
        account = self._accounts.get(member)
        if account is None:
            account = self._accounts[member] = Account(charge.block_size)
        account.plans += 1
        return account

    def _leave(self, member: str) -> None:
        account = self._accounts[member]
        account.plans -= 1
        if not account.plans:
            del self._accounts[member]
