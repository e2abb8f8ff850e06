"""Makes plans: joins what is known of members, live plans, stored blocks and sessions, asks the policy, and counts the
answer before the next request can be planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from random import Random

from msgspec.structs import replace

from penstock.errors import NotFound, Overloaded
from penstock.router.baselines import Baseline
from penstock.router.bias import Watched
from penstock.router.chains import Chains, Keys
from penstock.router.config import RouterConfig
from penstock.router.demand import OPEN, Closed, Demand, Knobs
from penstock.router.facts import Holdings, Observer
from penstock.router.fleet import Fleet
from penstock.router.index import BlockIndex
from penstock.router.ledger import Charge, Ledger
from penstock.router.lengths import OutputLengths
from penstock.router.options import Answer, Decision, QueueFull, Waits
from penstock.router.plans import Happened, PlanAsk, Planned, Predicted
from penstock.router.refusals import refuse, refuse_without_seats
from penstock.router.registry import Registry, Seat
from penstock.router.running import RunningPlan, kept_charge
from penstock.router.sessions import Recent, SessionHome
from penstock.router.shared.commons import Commons
from penstock.router.shortlist import Shortlist
from penstock.router.sources import KvSources
from penstock.router.workers import WorkerFacts, WorkerState

_OPENING = 2
"""Blocks that prompts have in common which some policies send to the same worker."""


class Planner:
    """All state of one router. Every method is synchronous: a decision and its charge are one step."""

    def __init__(
        self,
        config: RouterConfig,
        clock: Callable[[], float],
        happened: Callable[[Happened], None] = lambda happened: None,
    ) -> None:
        """`happened` is told what became of predictions."""
        self._clock = clock
        self._max_live = config.max_live_plans
        knobs = self._knobs = Knobs(config.local_prefill_tokens, config.max_queue_s, config.hold_s)
        self.homes: Recent[tuple[str, str], SessionHome] = Recent(config.max_sessions, config.session_ttl_s)
        """By model and session."""
        self._running: dict[int, tuple[PlanAsk, Watched]] = {}
        """Live plans by number."""
        self._happened = happened
        self._lengths = OutputLengths(config.max_sessions, config.session_ttl_s)
        self.registry = Registry(config.max_members, config.silent_s, pull_s=config.pull_s, handoff_s=config.handoff_s)
        self.ledger = Ledger(config.max_indexed_blocks)
        self.index = BlockIndex(config.max_indexed_blocks)
        self.commons = Commons(
            homes=self.homes, lengths=self._lengths, registry=self.registry, ledger=self.ledger, clock=clock
        )
        self._observer = Observer(self.ledger, self.commons.others)
        self._fleet = Fleet(self.registry, self._observer, silent_s=config.silent_s)
        self.shortlist = Shortlist(
            self._fleet,
            Random(config.seed or None),
            knobs,
            None if config.policy == "seconds" else Baseline(config.policy),
        )
        self._chains = Chains(config.max_indexed_blocks)
        self._sources = KvSources(self.registry, self.ledger)

    def recall(self, ask: PlanAsk) -> PlanAsk | None:
        """The ask with all keys of its prompt; None when those up to `after` are not known. Raises InvalidRequest."""
        keys = self._chains.extend(ask.tenant, ask.after, ask.block_keys)
        return None if keys is None else replace(ask, block_keys=keys, after=b"")

    def plan(self, ask: PlanAsk) -> Planned:
        """Places a request, given all of its keys, however long it then waits at its workers, and charges it. Raises
        NotFound, TooLarge, Overloaded or Unavailable."""
        planned = self._plan(ask, waits=False)
        assert isinstance(planned, Planned), "what can't wait is not held back"
        return planned

    def try_plan(self, ask: PlanAsk, closed: Closed = OPEN) -> Planned | Waits:
        """Likewise, unless its workers have no room for it now or are `closed` to it; then nothing is charged."""
        return self._plan(ask, waits=not ask.begun, closed=closed)

    def refresh(self) -> None:
        """Makes what `state` knows what is known now."""
        self._fleet.refresh(self._clock())

    def cached_tokens(self, model: str, home: SessionHome) -> int:
        """Tokens of the last prompt of a session, in whole blocks, that some member has now."""
        keys, anyone = self._chains.known(home.tenant, home.last_key), self._fleet.anyone(model)
        if keys is None or anyone is None or anyone.member.spec is None:
            return 0
        return min(self.index.deepest(keys) * anyone.member.spec.block_size, home.prompt_tokens)

    def state(self, worker: str) -> WorkerState | None:
        """What was known of a worker at the last `refresh` or plan: the same object until something changes."""
        return self._fleet.known(worker)

    def prefill_rate(self, model: str) -> float:
        """Tokens per second that all workers of a model compute together of prompts, at the last plan."""
        return self._fleet.prefill_rate(model)

    def plan_aside(self, ask: PlanAsk) -> Planned | None:
        """Places a request that yields, with the number 0: nothing is charged for it, and nothing learned from it.
        None: all who could take it have too much to do. Raises NotFound, TooLarge or Unavailable."""
        asked, answer, holdings = self._decide(ask, waits=False, closed=OPEN)
        if isinstance(answer, Decision):
            return self._planned(asked, answer, holdings, 0)
        if isinstance(answer, QueueFull):
            return None
        refuse(ask, asked, answer, self._knobs.max_queue_s)

    @property
    def full(self) -> bool:
        """Whether as many plans are live as may be."""
        return len(self.ledger) >= self._max_live

    def _plan(self, ask: PlanAsk, *, waits: bool, closed: Closed = OPEN) -> Planned | Waits:
        if self.full:
            raise Overloaded(f"{self._max_live} requests are in flight", code="too_many_requests", retry_after=1.0)
        asked, answer, holdings = self._decide(ask, waits=waits, closed=closed)
        if isinstance(answer, Decision):
            return self._charge(ask, asked, answer, holdings)
        return answer if isinstance(answer, Waits) else refuse(ask, asked, answer, self._knobs.max_queue_s)

    def _decide(self, ask: PlanAsk, *, waits: bool, closed: Closed) -> tuple[Demand, Answer, Holdings]:
        now = self._clock()
        self._suspect(ask.avoid - ask.full - ask.blamed, now)
        self._fleet.refresh(now)
        anyone = self._fleet.anyone(ask.model)
        if anyone is None or anyone.member.spec is None:
            refuse_without_seats(self.registry, ask.model)
        home = self.homes.get((ask.model, ask.session), now) if ask.session else None
        asked = Demand(
            prompt_tokens=ask.prompt_tokens + ask.output_tokens,
            expected_output=max(1, self._expected(ask, now, ask.output_tokens) - ask.output_tokens),
            home_prefill=home.prefill if home else "",
            home_decode=home.decode if home else "",
            avoid=ask.avoid,
            opening=ask.block_keys[_OPENING - 1] if len(ask.block_keys) >= _OPENING else b"",
            waits=waits,
            closed=closed,
            first_token_s=inf if ask.begun else ask.first_token_s,
            token_s=inf if ask.begun else ask.token_s,
            begun=ask.begun,
        )
        holdings = self._holdings(ask.block_keys, asked.prompt_tokens, anyone.member.spec.block_size)

        def facts(column: int) -> WorkerFacts:
            return self._observer.worker(column, holdings, now)

        return asked, self.shortlist.decide(ask.model, asked, holdings, facts), holdings

    def keep(self, ask: PlanAsk, kept: RunningPlan) -> int:
        """Charges what another router has planned, and names it; the caller owes one `release`. Raises NotFound."""
        seat = self.registry.get(kept.decode)
        if seat is None or seat.member.spec is None:
            raise NotFound(f"no worker {kept.decode!r} has joined", field="ask.kept.decode")
        now = self._clock()
        prefill = self.registry.get(kept.prefill)
        computes = kept.prefill if prefill and prefill.member.role else kept.decode
        charge = kept_charge(
            RunningPlan(computes, kept.decode),
            prompt_tokens=ask.prompt_tokens,
            generated=ask.output_tokens,
            expected=self._expected(ask, now, ask.output_tokens),
            block_size=seat.member.spec.block_size,
            now=now,
        )
        number = self.ledger.charge(charge)
        self._running[number] = ask, Watched(now, 0.0, 0.0, 0.0)
        self.commons.drop(kept.plan)
        self._touch(number)
        self._bind(ask, SessionHome(computes, kept.decode), now)
        return number

    def prefilled(self, number: int) -> None:
        """The prompt is computed, and there is a token."""
        self._touch(number)
        self.ledger.prefilled(number)

    def generated(self, number: int, tokens: int) -> None:
        """The whole answer has so many tokens now, those of earlier plans included."""
        self._touch(number)
        (ask, watched), now = self._running[number], self._clock()
        if tokens:
            ratio = watched.saw(tokens, now)
            outcome = None if ratio is None else (watched.first_token_s, ratio)
            self._learn("first_token", self.ledger.members(number)[0], outcome, watched.prompt_factor, now)
        self.ledger.generated(number, tokens, self._expected(ask, now, tokens))

    def release(self, number: int) -> None:
        """Gives the plan's charge back."""
        self._touch(number)
        _, watched = self._running.pop(number)
        decode, ratio = self.ledger.members(number)[1], watched.ended()
        outcome = None if ratio is None else (watched.rest_s, ratio)
        self._learn("token", decode, outcome, watched.token_factor, self._clock())
        self.index.used(self.ledger.release(number).block_keys)

    def _learn(
        self, what: Predicted, member: str, outcome: tuple[float, float] | None, factor: float, now: float
    ) -> None:
        """Of so many seconds that were predicted with `factor`, something took so many times as long; None: that says
        nothing."""
        seat = self.registry.get(member)
        if outcome is not None and seat is not None:
            predicted_s, ratio = outcome
            bias = seat.prompts if what == "first_token" else seat.answers
            bias.learn(ratio, factor, now)
            seat.changed.add(member)
            self._happened(Happened(what, member, predicted_s, ratio, bias.value))
            self.commons.judged(member)

    def learn(self, ask: PlanAsk, generated: int, *, ended: bool = True) -> None:
        """An answer ended after `generated` tokens, or its client left then."""
        if generated:
            names = ask.model, ask.tenant, ask.session
            self._lengths.learn(names, generated, self._clock(), ended=ended)
            if (kept := self.homes.entry((ask.model, ask.session))) is not None:
                kept[1].answer_tokens = generated
            self.commons.answered(names, generated, ended=ended)

    def _bind(self, ask: PlanAsk, home: SessionHome, now: float) -> None:
        """The session was there last."""
        if ask.session:
            before = self.homes.entry((ask.model, ask.session))
            home.requests = 1 + (before[1].requests if before else 0)
            home.tenant, home.prompt_tokens = ask.tenant, ask.prompt_tokens
            home.last_key = ask.block_keys[-1] if ask.block_keys else b""
            self.homes.set((ask.model, ask.session), home, now)
            self.commons.placed(ask.model, ask.session)

    def _touch(self, number: int) -> None:
        """The charges of this plan's workers change."""
        self.registry.charged.update(self.ledger.members(number))
        self.commons.charged(number)

    def _suspect(self, members: frozenset[str], now: float) -> None:
        for member in members:
            seat = self.registry.get(member)
            if seat is not None:
                seat.suspect(now)
                self.commons.judged(member)

    def _expected(self, ask: PlanAsk, now: float, generated: int) -> int:
        """Tokens of the whole answer, of which `generated` exist."""
        names = ask.model, ask.tenant, ask.session
        return max(generated, self._lengths.expect(names, ask.max_tokens, now, generated=generated))

    def _holdings(self, keys: Sequence[bytes], tokens: int, size: int) -> Holdings:
        chain = keys if isinstance(keys, Keys) else Keys(list(keys))
        chain = chain.first((tokens - 1) // size)
        placed = self._fleet.place(self.index, chain)
        ends = [depth for depth in placed.depths if depth < len(chain)]
        members = ((depth, member) for depth in ends for member in self.ledger.computing(chain[depth]))
        computing = [(depth, member) for depth, member in members if self.registry.get(member)]  # charges outlive seats
        return Holdings(chain, size, placed, self._fleet, computing)

    def _charge(self, ask: PlanAsk, asked: Demand, decision: Decision, holdings: Holdings) -> Planned:
        computes, now = decision.computes, self._clock()
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
                generated=ask.output_tokens,
                made_at=now,
                block_size=size,
                block_keys=holdings.keys,
                shared_tokens=decision.decode.held_tokens,
                uncached_keys=new if near == soon else [*holdings.keys[near:soon], *new],
            )
        )
        chosen, prefills, decodes = decision.chosen, self._seat(computes.id), self._seat(decision.decode.id)
        token_s = chosen.answer_s / asked.expected_output
        moved_s = chosen.handoff_s + chosen.room_s if decision.prefill else 0.0
        factors = prefills.prompts.believed(now), decodes.answers.believed(now)
        self._running[number] = ask, Watched(now, chosen.first_token_s, moved_s, token_s, *factors)
        self._touch(number)
        prefills.prompts_given.add(chosen.prompt.compute_s, now)
        self._bind(ask, SessionHome(computes.id, decision.decode.id), now)
        return self._planned(asked, decision, holdings, number)

    def _planned(self, asked: Demand, decision: Decision, holdings: Holdings, number: int) -> Planned:
        prefill = self._seat(decision.prefill.id).member if decision.prefill else None
        decode = self._seat(decision.decode.id).member
        computing = self._sources.computing(decision, (prefill or decode).host_id, holdings)
        return Planned(
            number=number,
            prefill=prefill,
            decode=decode,
            cached_tokens=decision.cached_tokens,
            uncached_tokens=decision.uncached_tokens,
            prefill_sources=computing if prefill else (),
            decode_sources=self._sources.decoding(prefill, decode, holdings) if prefill else computing,
            decision=decision,
            expected_output=asked.expected_output,
            home=asked.home_decode == decode.id,
        )

    def _seat(self, member_id: str) -> Seat:
        seat = self.registry.get(member_id)
        assert seat is not None, "only joined members are candidates"
        return seat
