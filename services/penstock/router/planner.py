"""Makes plans: joins what is known of members, live plans, stored blocks and sessions, asks the policy, and counts the
answer before the next request can be planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from penstock.errors import NotFound, Overloaded, TooLarge, Unavailable
from penstock.router.chains import Chains
from penstock.router.config import RouterConfig
from penstock.router.index import BlockIndex
from penstock.router.ledger import Charge, Ledger
from penstock.router.policy import (
    Decision,
    Demand,
    Knobs,
    NoWorker,
    QueueFull,
    TooLong,
    WorkerFacts,
    decide,
    worth_pulling,
)
from penstock.router.registry import Means, Member, Registry, Report, Seat, means
from penstock.router.sessions import OutputLengths, Recent, SessionHome

_MOST_SOURCES = 3
"""Stores named to one worker."""
_UNSEEN_S = 0.1
"""A load report may not yet hold what was planned less than this before it came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAsk:
    """One request."""

    model: str
    prompt_tokens: int
    max_tokens: int
    tenant: str = ""
    session: str = ""
    block_keys: Sequence[bytes] = ()
    """Of the whole prompt, or those behind `after`."""
    after: bytes = b""
    """The key before them; empty: there is none."""
    avoid: frozenset[str] = frozenset()
    output_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The answer."""

    number: int
    """Names the charge; the caller owes one `Planner.release`."""
    prefill: Member | None
    decode: Member
    cached_tokens: int
    uncached_tokens: int
    prefill_sources: Sequence[str] = ()
    """Addresses of other hosts' stores that hold what the prefill worker's store lacks, the deepest first."""
    decode_sources: Sequence[str] = ()
    decision: Decision
    expected_output: int
    home: bool
    """The session was at this decode worker before."""


@dataclass(frozen=True, slots=True)
class _Holdings:
    """How much of one prompt each member and host holds, in leading blocks."""

    keys: Sequence[bytes]
    """Of the blocks that others may share: all but the one of the last token, which is always computed."""
    block_size: int
    depths: dict[str, int]
    """Leading blocks by member, for those that hold some."""
    stores: Sequence[tuple[Member, int]]
    """Those that hold some, the deepest first."""
    hosts: dict[str, int]
    """Leading blocks by host, for hosts that have a store."""

    def here(self, host: str) -> int:
        """Leading blocks in the store that workers of `host` use; a host without a store uses any."""
        return self.hosts.get(host, self.deepest)

    @property
    def deepest(self) -> int:
        """Leading blocks in the store that holds most."""
        return max(self.hosts.values(), default=0)

    def sources(self, host: str) -> list[str]:
        """Stores that hold more than the one of `host`, which has one."""
        if host not in self.hosts:
            return []
        return [store.address for store, depth in self.stores if depth > self.hosts[host]][:_MOST_SOURCES]


class Planner:
    """All state of one router. Every method is synchronous: a decision and its charge are one step."""

    def __init__(self, config: RouterConfig, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._max_live = config.max_live_plans
        self._pull_s = config.pull_s
        self._random = Random(config.seed or None)
        self._knobs = Knobs(config.local_prefill_tokens, config.handoff_s, config.max_queue_s)
        self._homes: Recent[tuple[str, str], SessionHome] = Recent(config.max_sessions, config.session_ttl_s)
        self._lengths = OutputLengths(config.max_sessions, config.session_ttl_s)
        self.registry = Registry(config.max_members, config.silent_s)
        self.ledger = Ledger(config.max_indexed_blocks)
        self.index = BlockIndex(config.max_indexed_blocks)
        self._chains = Chains(config.max_indexed_blocks)

    def recall(self, ask: PlanAsk) -> PlanAsk | None:
        """The ask with all keys of its prompt; None when those up to `after` are not known. Raises InvalidRequest."""
        keys = self._chains.extend(ask.tenant, ask.after, ask.block_keys)
        return None if keys is None else replace(ask, block_keys=keys, after=b"")

    def plan(self, ask: PlanAsk) -> Planned:
        """Places a request, given all of its keys, and charges it. Raises NotFound, TooLarge, Overloaded or
        Unavailable."""
        now = self._clock()
        if len(self.ledger) >= self._max_live:
            raise Overloaded(f"{self._max_live} requests are in flight", code="too_many_requests", retry_after=1.0)
        self._suspect(ask.avoid, now)
        seats = self.registry.candidates(ask.model, now)
        if not seats:
            self._refuse_without_seats(ask.model)
        home = self._homes.get((ask.model, ask.session), now) if ask.session else None
        asked = Demand(
            prompt_tokens=ask.prompt_tokens + ask.output_tokens,
            expected_output=self._expected(ask, now),
            home_prefill=home.prefill if home else "",
            home_decode=home.decode if home else "",
            avoid=ask.avoid,
        )
        holdings = self._holdings(ask.block_keys, asked.prompt_tokens, seats[0])
        answer = decide(asked, self._workers(seats, holdings, now), self._random, self._knobs)
        match answer:
            case NoWorker():
                raise Unavailable(f"no worker decodes {ask.model!r} now", retry_after=1.0)
            case TooLong(limit):
                raise TooLarge(
                    f"{asked.prompt_tokens} tokens and an answer do not fit into the {limit} that a worker holds",
                    field="messages",
                    code="context_length_exceeded",
                )
            case QueueFull(wait_s):
                raise Overloaded(
                    f"the queue is {wait_s:.0f} s long",
                    code="queue_full",
                    retry_after=wait_s - self._knobs.max_queue_s + 1,
                )
            case Decision():
                return self._charge(ask, asked, answer, holdings, now)

    def prefilled(self, number: int) -> None:
        """The prompt is computed."""
        self.ledger.prefilled(number)

    def generated(self, number: int, tokens: int) -> None:
        """So many output tokens exist now."""
        self.ledger.generated(number, tokens)

    def release(self, number: int) -> None:
        """Gives the plan's charge back."""
        self.ledger.release(number)

    def learn(self, ask: PlanAsk, generated: int) -> None:
        """An answer ended after `generated` tokens."""
        if generated:
            self._lengths.learn(ask.model, ask.tenant, ask.session, generated, self._clock())

    def _suspect(self, members: frozenset[str], now: float) -> None:
        for member in members:
            seat = self.registry.get(member)
            if seat is not None:
                seat.suspect(now)

    def _refuse_without_seats(self, model: str) -> None:
        if any(seat.member.model == model for seat in self.registry):
            raise Unavailable(f"every worker of {model!r} is silent or draining", retry_after=1.0)
        if any(seat.member.role is not None for seat in self.registry):
            raise NotFound(f"the model {model!r} is not served here", field="model", code="model_not_found")
        raise Unavailable("no worker has joined", retry_after=1.0)

    def _expected(self, ask: PlanAsk, now: float) -> int:
        whole = self._lengths.expect(ask.model, ask.tenant, ask.session, ask.max_tokens, now)
        return max(1, whole - ask.output_tokens)

    def _holdings(self, keys: Sequence[bytes], tokens: int, seat: Seat) -> _Holdings:
        depths = self.index.match(keys) if keys else {}
        hosts: dict[str, int] = {}
        stores = [(store, depths.get(store.id, 0)) for store in self.registry.stores()]
        for store, depth in stores:
            hosts[store.host_id] = max(hosts.get(store.host_id, 0), depth)
        assert seat.member.spec is not None, "only workers are candidates"
        size = seat.member.spec.block_size
        return _Holdings(
            keys=keys[: (tokens - 1) // size],
            block_size=size,
            depths=depths,
            stores=sorted(stores, key=lambda one: -one[1]),
            hosts=hosts,
        )

    def _workers(self, seats: list[Seat], holdings: _Holdings, now: float) -> list[WorkerFacts]:
        average = means(seats)
        return [self._worker(seat, holdings, average, now) for seat in seats]

    def _worker(self, seat: Seat, holdings: _Holdings, average: Means, now: float) -> WorkerFacts:
        member, report = seat.member, seat.report
        spec, role = member.spec, member.role
        assert spec is not None and role is not None, "only workers are candidates"
        queued, sequences, context = self._ahead(member, report, seat.reported_at)
        here, resident = holdings.here(member.host_id), holdings.depths.get(member.id, 0)
        token_bytes, size = spec.block_bytes / spec.block_size, spec.block_size
        account = self.ledger.of(member.id)
        return WorkerFacts(
            id=member.id,
            role=role,
            max_model_len=member.max_model_len,
            max_running=member.max_running,
            kv_capacity_tokens=member.kv_capacity_tokens,
            queued_tokens=queued,
            sequences=sequences,
            context_tokens=context,
            prefill_rate=seat.prefill.believed(average.prefill_rate, now),
            step_s=seat.step.believed(average.step_s, now),
            fetch_s=token_bytes / seat.fetch.believed(average.fetch_rate, now),
            cached_tokens=here * size,
            resident_tokens=resident * size,
            awaited_tokens=account.computing.run(holdings.keys, max(here, resident)) * size,
            held_tokens=account.held_tokens(holdings.keys),
            store=member.host_id if member.host_id in holdings.hosts else "",
            remote_tokens=(holdings.deepest - here) * size,
            remote_fetch_s=token_bytes / seat.remote.believed(average.remote_rate, now),
            remote_s=self._pull_s,
            penalty_s=seat.penalty_s(now),
        )

    def _ahead(self, member: Member, report: Report, reported_at: float) -> tuple[int, int, int]:
        """Tokens to prefill, sequences and context ahead of a new request on `member`.

        The ledger knows every plan but not how far its work is; the report knows the work but not the plans still on
        their way. So: the report and what it cannot have seen, at most what the ledger says, at least the report.
        """
        account = self.ledger.of(member.id)
        tokens, sequences = account.prefill_tokens, 0
        for charge in account.pending.values():
            if charge.made_at >= reported_at - _UNSEEN_S:
                break
            tokens = max(0, tokens - charge.prefill_tokens)
        for charge in reversed(account.decoding.values()):
            if charge.made_at < reported_at - _UNSEEN_S:
                break
            sequences += 1
        busy = report.running + report.waiting
        held = max(0, member.kv_capacity_tokens - report.free_kv_tokens)
        return (
            _between(report.queued_tokens, account.prefill_tokens, tokens),
            _between(busy, account.sequences, sequences),
            max(account.context_tokens, held),
        )

    def _charge(self, ask: PlanAsk, asked: Demand, decision: Decision, holdings: _Holdings, now: float) -> Planned:
        computes = decision.prefill or decision.decode
        size, known = holdings.block_size, decision.prompt
        near = (known.resident + known.fetched) // size
        soon = near + known.awaited // size
        new = holdings.keys[soon + known.remote // size :]
        number = self.ledger.charge(
            Charge(
                prefill=computes.id,
                decode=decision.decode.id,
                own_tokens=max(0, decision.uncached_tokens - len(new) * size),
                context_tokens=asked.prompt_tokens + asked.expected_output,
                prompt_tokens=ask.prompt_tokens,
                made_at=now,
                block_size=size,
                block_keys=holdings.keys,
                uncached_keys=[*holdings.keys[near:soon], *new],
            )
        )
        if ask.session:
            self._homes.set((ask.model, ask.session), SessionHome(computes.id, decision.decode.id), now)
        prefill = self._member(decision.prefill.id) if decision.prefill else None
        decode = self._member(decision.decode.id)
        host = (prefill or decode).host_id
        computing = holdings.sources(host) if decision.remote_tokens else []
        computing = list(dict.fromkeys([*computing, *self._computing_too(decision, host, holdings)]))[:_MOST_SOURCES]
        return Planned(
            number=number,
            prefill=prefill,
            decode=decode,
            cached_tokens=decision.cached_tokens,
            uncached_tokens=decision.uncached_tokens,
            prefill_sources=computing if prefill else (),
            decode_sources=self._handing_over(prefill, decode, holdings) if prefill else computing,
            decision=decision,
            expected_output=asked.expected_output,
            home=asked.home_decode == decode.id,
        )

    def _computing_too(self, decision: Decision, host: str, holdings: _Holdings) -> list[str]:
        """Stores of other hosts that are going to have more of the prompt than there is on this one, because workers
        there compute it for others, as far as it is quicker to fetch than to compute."""
        computes, size = decision.prefill or decision.decode, holdings.block_size
        here = decision.prompt.tokens // size
        deepest: dict[str, int] = {}
        for seat in self.registry:
            there = seat.member.host_id
            if seat.member.role is not None and there != host and there in holdings.hosts and host in holdings.hosts:
                depth = holdings.hosts[there]
                depth += self.ledger.of(seat.member.id).computing.run(holdings.keys, depth)
                deepest[there] = max(depth, deepest.get(there, 0))
        worth = {there for there, depth in deepest.items() if worth_pulling(computes, (depth - here) * size)}
        return [store.address for store, _ in holdings.stores if store.host_id in worth]

    @staticmethod
    def _handing_over(prefill: Member, decode: Member, holdings: _Holdings) -> list[str]:
        """Where the decode worker's store gets the prompt's KV: what the prefill worker computes lies with its own."""
        if prefill.host_id == decode.host_id or decode.host_id not in holdings.hosts:
            return []
        beside = [store.address for store, _ in holdings.stores if store.host_id == prefill.host_id]
        return list(dict.fromkeys([*beside, *holdings.sources(decode.host_id)]))[:_MOST_SOURCES]

    def _member(self, member_id: str) -> Member:
        seat = self.registry.get(member_id)
        assert seat is not None, "only joined members are candidates"
        return seat.member


def _between(reported: int, charged: int, unseen: int) -> int:
    return max(reported, min(charged, reported + unseen))
