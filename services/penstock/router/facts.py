"""What a decision knows: where the blocks of a prompt are, and what each worker has, does and is believed to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from penstock.router.fleet import Fleet, Placed
from penstock.router.ledger import Ledger
from penstock.router.others import OthersBookings
from penstock.router.registry import Member, Seat
from penstock.router.workers import HandoffCost, PromptTokenCost, WorkerFacts, WorkerState

_UNSEEN_S = 0.1
"""A load report may not yet hold what was planned less than this before it came."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """How much of one prompt each member and host holds, in leading blocks."""

    keys: Sequence[bytes]
    """Of the blocks that others may share: all but the one of the last token, which is always computed."""
    block_size: int
    placed: Placed
    fleet: Fleet
    computing: Sequence[tuple[int, str]] = ()
    """Members that compute blocks of the prompt for others, behind those that somebody has, and how many those are."""

    @property
    def shared_tokens(self) -> int:
        """Leading tokens that any sequence may have, at most: those that somebody has, or computes."""
        return (len(self.keys) if self.computing else self.placed.depths[-1]) * self.block_size

    def stored(self, host: str) -> int:
        """Leading blocks in the store of that host; -1: none has joined."""
        return int(self.placed.hosts.item(self.fleet.host(host)))

    def here(self, host: str) -> int:
        """Leading blocks in the store that workers of `host` use; a host without a store uses any."""
        return int(self.placed.near.item(self.fleet.host(host)))

    def has_store(self, host: str) -> bool:
        """Whether a store of that host has joined."""
        return self.stored(host) >= 0

    def stores(self, deeper_than: int) -> Iterator[Member]:
        """The stores that hold more leading blocks than that, the deepest first."""
        for depth, columns in reversed(self.placed.stores):
            if depth <= deeper_than:
                return
            for column in columns:
                yield self.fleet.seat(column).member


class Observer:
    """Joins what members say with what they are charged with."""

    def __init__(self, ledger: Ledger, others: OthersBookings) -> None:
        self._ledger = ledger
        self._others = others

    def state(self, seat: Seat, now: float) -> WorkerState:
        """All that the policy asks about a worker, whatever the request."""
        member, rates = seat.member, seat.believed(now)
        assert member.role is not None and member.spec is not None, "stores get no work"
        queued, sequences, context = self.ahead(seat)
        slow = seat.prompts.believed(now)
        token_bytes = member.spec.block_bytes / member.spec.block_size
        return WorkerState(
            id=member.id,
            role=member.role,
            max_model_len=member.max_model_len,
            max_running=member.max_running,
            kv_capacity_tokens=member.kv_capacity_tokens,
            queued_tokens=queued,
            sequences=sequences,
            context_tokens=context,
            left_tokens=self._left(seat),
            recent_s=seat.prompts_given.left(now),
            prefill_rate=rates.prefill_rate / slow,
            prompt=PromptTokenCost((rates.prompt_s or 1 / rates.prefill_rate) * slow, rates.prompt_context_s * slow),
            step=rates.step.times(seat.answers.believed(now)),
            fetch_overhead_s=rates.fetch_overhead_s,
            fetch_s=token_bytes / rates.fetch_rate,
            remote_overhead_s=rates.remote_overhead_s,
            remote_fetch_s=token_bytes / rates.remote_rate,
            handoff=HandoffCost(rates.handoff_overhead_s, token_bytes / (rates.handoff_rate or rates.fetch_rate)),
            far_handoff=HandoffCost(
                rates.far_handoff_overhead_s, token_bytes / (rates.far_handoff_rate or rates.remote_rate)
            ),
            store_away=seat.report.store_away,
        )

    def charged(self, seat: Seat, state: WorkerState, now: float) -> WorkerState:
        """Likewise, when nothing but its charges has changed since `state`."""
        ahead, more = self.ahead(seat), (self._left(seat), seat.prompts_given.left(now))
        before = state.queued_tokens, state.sequences, state.context_tokens, state.left_tokens, state.recent_s
        if (*ahead, *more) == before:
            return state
        queued, sequences, context = ahead
        left, recent_s = more
        return replace(
            state,
            queued_tokens=queued,
            sequences=sequences,
            context_tokens=context,
            left_tokens=left,
            recent_s=recent_s,
        )

    def _left(self, seat: Seat) -> float:
        """Tokens that an answer there still gets, in the mean of those that are charged here."""
        account = self._ledger.of(seat.member.id)
        return account.left_tokens / account.sequences if account.sequences else 0.0

    def worker(self, column: int, holdings: Holdings, now: float) -> WorkerFacts:
        """The worker in that column of the fleet, and what it has of one prompt."""
        size, keys, placed, fleet = holdings.block_size, holdings.keys, holdings.placed, holdings.fleet
        seat, host = fleet.seat(column), fleet.host_of(column)
        member, account = seat.member, self._ledger.of(seat.member.id)
        resident, here = int(placed.held.item(column)), int(placed.near.item(host))
        return WorkerFacts(
            state=fleet.state(column),
            cached_tokens=here * size,
            resident_tokens=resident * size,
            awaited_tokens=account.computing.run(keys, max(here, resident)) * size if account.plans else 0,
            held_tokens=account.held_tokens(keys) if account.decoding else 0,
            store=member.host_id if placed.hosts.item(host) >= 0 else "",
            remote_tokens=(placed.deepest - here) * size,
            penalty_s=seat.penalty_s(now) if seat.suspect_until > now else 0.0,
        )

    def ahead(self, seat: Seat) -> tuple[int, int, int]:
        """Tokens to prefill, sequences and context ahead of a new request on a worker.

        The ledger knows every plan but not how far its work is; the report knows the work but not the plans still on
        their way. So: the report and what it cannot have seen, at most what the ledger says, at least the report. What
        other routers have booked counts as the ledger does, where it is known; where it is not, and they plan too, what
        the ledger says is no limit.
        """
        member, report, reported_at = seat.member, seat.report, seat.reported_at
        account = self._ledger.of(member.id)
        tokens, sequences = account.prefill_tokens, 0
        for charge in account.pending.values():
            if charge.made_at >= reported_at - _UNSEEN_S:
                break
            tokens = max(0, tokens - charge.prefill_tokens)
        for charge in reversed(account.decoding.values()):
            if charge.made_at < reported_at - _UNSEEN_S:
                break
            sequences += 1
        held = max(0, member.kv_capacity_tokens - report.free_kv_tokens)
        working = report.running + report.waiting
        if member.routers > max(1, self._others.routers):
            return report.queued_tokens + tokens, working + sequences, max(account.context_tokens, held)
        others = self._others.of(member.id)
        their_tokens, their_sequences = others.unseen(member.id, reported_at - _UNSEEN_S)
        return (
            _between(report.queued_tokens, account.prefill_tokens + others.prefill_tokens, tokens + their_tokens),
            _between(working, account.sequences + others.sequences, sequences + their_sequences),
            max(account.context_tokens + others.context_tokens, held),
        )


def _between(reported: int, charged: int, unseen: int) -> int:
    return max(reported, min(charged, reported + unseen))
