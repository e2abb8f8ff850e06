"""Recorded requests through the router's own line, planner, index and ledger, before modelled workers and stores."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from penstock.errors import PenstockError
from penstock.kv.spec import KvSpec
from penstock.router.baselines import PolicyName
from penstock.router.config import RouterConfig
from penstock.router.line import TICK_S, TURN_S, HeldAsk, WaitingLine
from penstock.router.planner import Planner
from penstock.router.plans import PlanAsk, Planned
from penstock.router.registry import Measured, Member, Report, Seat
from penstock.router.workers import Role
from penstock.simulator.workers import ModelledStore, ModelledWorker, Prompt, Stream, WorkerModel
from penstock.traces.reading import RecordedAsk, Trace

_REPORT_S = 0.5
"""A worker that computes prompts tells how far it is at least so often."""
_FIRST_TOLD_S, _LAST_TOLD_S = 1.0, 8.0
"""Between two times that the router is told how long an answer is; twice as long each time, as the gateway does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMesh:
    """What is simulated."""

    prefill: int = 0
    decode: int = 0
    both: int = 0
    per_host: int = 1
    """Workers that share a store."""
    store_blocks: int = 6_250
    """Blocks that the store of a host holds."""
    token_bytes: int = 23_040
    handoff_s: float = 0.01
    max_queue_s: float = 120.0
    """A request that would wait longer is refused."""
    policy: PolicyName = "seconds"
    seed: int = 1
    names: bool = True
    """The router is told of which session a request is, where that is known."""
    in_turn: bool = False
    """A session sends nothing before it has the answer to what it sent before, whatever was recorded."""
    compares: bool = True
    """Workers fetch from the store of their host what they do not compute sooner; False: all that it has."""
    model: WorkerModel = field(default_factory=WorkerModel)


@dataclass(slots=True)
class Served:
    """One request, in seconds and tokens."""

    at: float
    tokens: int
    ttft_s: float = 0.0
    itl_s: float = 0.0
    """In the mean."""
    queue_s: float = 0.0
    """Until its prompt began: held back by the router, behind the prompts before it, and for room for its context."""
    held_s: float = 0.0
    """Of that in the router's line."""
    room_s: float = 0.0
    """Behind the prompt, for room or a place in the batch where its answer is generated."""
    cached: int = 0
    refused: bool = False
    counts: bool = True
    """It came late enough to be a part of the result."""
    back_s: float = 0.0
    """What a token takes from the site that serves it, if that is another."""

    @property
    def waited_s(self) -> float:
        """In all, wherever that was."""
        return self.queue_s + self.room_s

    @property
    def started_s(self) -> float:
        """Until tokens follow each other: TTFT, the wait behind it that TTFT does not see, and the way back."""
        return self.ttft_s + self.room_s + self.back_s


def not_computed(requests: Sequence[Served]) -> float:
    """The part of the prompt tokens of those that were served."""
    served = [one for one in requests if not one.refused]
    return sum(one.cached for one in served) / max(1, sum(one.tokens for one in served))


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What became of a trace."""

    requests: Sequence[Served]
    computed: Sequence[float]
    """Tokens of prompts, by worker whose work that is."""
    computed_beside: float
    """Those that decode workers computed beside prefill workers."""
    decision_s: Sequence[float]
    """Of each decision, by the clock of this machine."""
    reusable: float
    """The part of all prompt tokens that one cache without end would have had."""

    @property
    def hit(self) -> float:
        """The part of all prompt tokens that was not computed."""
        return not_computed(self.requests)

    @property
    def busiest_over_mean(self) -> float:
        """Most computed tokens of one worker."""
        total = sum(self.computed)
        return max(self.computed) * len(self.computed) / total if total else 1.0

    def percentile(self, what: Callable[[Served], float], part: float) -> float:
        """Of the requests that were served."""
        values = sorted(what(one) for one in self.requests if not one.refused)
        return values[min(len(values) - 1, int(part * len(values)))] if values else 0.0


class Simulation:
    """One run."""

    def __init__(self, mesh: SimulatedMesh, trace: Trace, since: float = 0.0) -> None:
        """Requests that come before `since` are served, but are no part of the result."""
        self._mesh = mesh
        self._since = since
        self._trace = trace
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        config = RouterConfig(
            seed=mesh.seed,
            policy=mesh.policy,
            max_members=1 << 20,
            max_live_plans=1 << 30,
            max_held=1 << 30,
            max_held_bytes=1 << 50,
            max_indexed_blocks=10_000_000,
            max_queue_s=mesh.max_queue_s,
            handoff_s=mesh.handoff_s,
            silent_s=1e12,
        )
        self.planner = Planner(config, lambda: self._now)
        self.line = WaitingLine(self.planner, config, lambda: self._now)
        self._turned_at = -inf
        self._turn_at = inf
        """When the line has its next turn."""
        self._workers: dict[str, ModelledWorker] = {}
        self._seats: dict[str, Seat] = {}
        self._stores: dict[str, ModelledStore] = {}
        """By host."""
        self._pages: dict[str, ModelledStore] = {}
        """What each worker has in its own pages."""
        self._due: dict[str, float] = {}
        """When something of a worker ends, as far as that is known."""
        self._reports: dict[str, float] = {}
        """When it tells how far it is, whatever happens."""
        self._later: dict[str, deque[Callable[[], None]]] = {}
        """Requests of sessions that wait for an answer."""
        self._computed: Counter[str] = Counter()
        """Tokens of prompts, by worker."""
        roles = [Role.PREFILL] * mesh.prefill + [Role.DECODE] * mesh.decode + [Role.BOTH] * mesh.both
        hosts = -(-len(roles) // mesh.per_host)
        for number, role in enumerate(roles):
            self._join(f"{role.value}-{number}", role, f"host-{number % hosts}")
        for host in range(hosts):
            name = f"host-{host}"
            self._stores[name] = ModelledStore(mesh.store_blocks)
            store = Member(id=f"store-{name}", role=None, address=name, host_id=name)
            self.planner.registry.join(store, 0.0)

    def _join(self, name: str, role: Role, host: str) -> None:
        mesh, model, block = self._mesh, self._mesh.model, self._trace.block_tokens
        member = Member(
            id=name,
            role=role,
            address=name,
            host_id=host,
            model="m",
            spec=KvSpec(
                model="m",
                tokenizer="t",
                layout="v1",
                dtype="bfloat16",
                block_size=block,
                block_bytes=block * mesh.token_bytes,
            ),
            max_model_len=model.max_model_len,
            max_running=model.max_running,
            kv_capacity_tokens=model.kv_tokens,
        )
        seat = self._seats[name] = self.planner.registry.join(member, 0.0)
        step = model.step
        rates = Measured(model.prefill_rate, model.fetch_rate, model.remote_rate, step.base_s, step.sequence_s)
        rates = rates._replace(token_s=step.token_s, prompt_s=1 / model.prefill_rate)
        seat.measure(rates._replace(prompt_context_s=model.prefill_context_s), 0.0)
        self._workers[name] = ModelledWorker(model)
        self._pages[name] = ModelledStore(model.kv_tokens // block)

    def run(self, progress: Callable[[], None] = lambda: None) -> SimulationResult:
        """Serves the whole trace; `progress` is called for each request that comes."""
        requests = [Served(ask.at, ask.tokens, counts=ask.at >= self._since) for ask in self._trace.asks]
        decisions: list[float] = []
        known: set[bytes] = set()
        reusable = 0
        for ask, served in zip(self._trace.asks, requests, strict=True):
            self.until(ask.at)
            reusable += self._reusable(ask, known) * served.counts
            self._in_turn(ask, partial(self._arrive, ask, served, decisions))
            progress()
        self.until(inf)
        idle = Role.DECODE if self._mesh.prefill else Role.PREFILL
        computed = [self._computed[name] for name, seat in self._seats.items() if seat.member.role is not idle]
        requests = [served for served in requests if served.counts]
        total = sum(served.tokens for served in requests)
        beside = self._computed.total() - sum(computed)
        return SimulationResult(requests, computed, beside, decisions, reusable / max(1, total))

    def _reusable(self, ask: RecordedAsk, known: set[bytes]) -> int:
        depth = next((number for number, key in enumerate(ask.keys) if key not in known), len(ask.keys))
        known.update(ask.keys)
        return min(depth * self._trace.block_tokens, ask.tokens - 1)

    # -- time

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def until(self, when: float) -> None:
        """Lets everything happen that is due by then."""
        while self._events and self._events[0][0] <= when:
            self._now, _, what = heapq.heappop(self._events)
            what()
        self._now = max(self._now, when) if when < inf else self._now

    def _change(self, name: str, change: Callable[[ModelledWorker], None]) -> None:
        """Something comes to a worker."""
        self._advance(name)
        change(self._workers[name])
        self._advance(name)

    def _advance(self, name: str) -> None:
        worker = self._workers[name]
        while ended := worker.advance(self._now):  # what is next begins when these are over
            for tell in ended:
                tell()
        self._tell(name)
        due = worker.due()
        if due < inf and self._due.get(name) != due:
            self._due[name] = due
            self._at(due, partial(self._wake, name, due))
        if worker.prompts and self._reports.get(name, -inf) <= self._now:
            self._reports[name] = self._now + _REPORT_S
            self._at(self._now + _REPORT_S, partial(self._advance, name))

    def _wake(self, name: str, due: float) -> None:
        if self._due.get(name) == due:  # else something has changed since
            del self._due[name]
            self._advance(name)

    def _tell(self, name: str) -> None:
        worker, seat = self._workers[name], self._seats[name]
        free = max(0, worker.model.kv_tokens - worker.held)
        report = Report(len(worker.streams), len(worker.waiting) + len(worker.prompts), round(worker.queued), free)
        if report != seat.report:
            seat.hear(report, self._now)
            self._stir()

    # -- the line

    def _stir(self) -> None:
        """There may be room for those that are held back."""
        if len(self.line):
            self._turn_by(max(self._now, self._turned_at + TURN_S))

    def _turn_by(self, when: float) -> None:
        if when < self._turn_at:
            self._turn_at = when
            self._at(when, partial(self._turn, when))

    def _turn(self, when: float) -> None:
        if self._turn_at != when:
            return  # an earlier one came between
        self._turn_at = inf
        more = self.line.turn()
        self._turned_at = self._now
        if len(self.line):
            self._turn_by(self._now + TURN_S + (0.0 if more else TICK_S))

    # -- one request

    def _in_turn(self, ask: RecordedAsk, arrive: Callable[[], None]) -> None:
        if not (self._mesh.in_turn and ask.session):
            arrive()
        elif (later := self._later.get(ask.session)) is not None:
            later.append(arrive)
        else:
            self._later[ask.session] = deque()
            arrive()

    def _answered(self, ask: RecordedAsk) -> None:
        """Its session sends the next one, if that is due."""
        later = self._later.get(ask.session)
        if later:
            self._at(self._now, later.popleft())
        elif later is not None:
            del self._later[ask.session]

    def _arrive(self, ask: RecordedAsk, served: Served, decisions: list[float]) -> None:
        started = time.perf_counter()
        found = self.enter(ask, served)
        decisions.append(time.perf_counter() - started)
        self.accept(ask, served, found)

    def enter(self, ask: RecordedAsk, served: Served) -> Planned | HeldAsk | PenstockError:
        """Asks the router for a plan. The caller accepts what it says, or withdraws."""
        served.at = self._now
        found: Planned | HeldAsk | PenstockError
        try:
            found = self.line.enter(
                self._ask(ask), lambda: self._at(self._now, partial(self._leave, ask, served, found))
            )
        except PenstockError as error:
            found = error
        return found

    def accept(self, ask: RecordedAsk, served: Served, found: Planned | HeldAsk | PenstockError) -> None:
        """Its prompt comes to a worker, now or when the line is done with it."""
        if isinstance(found, HeldAsk):
            self._stir()
        else:
            self.place(ask, served, found)

    def withdraw(self, found: Planned | HeldAsk | PenstockError) -> None:
        """The request is served elsewhere."""
        if isinstance(found, HeldAsk):
            self.line.leave(found)
        elif isinstance(found, Planned):
            self.planner.release(found.number)
        self._stir()

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Does something so many seconds from now."""
        self._at(self._now + seconds, what)

    def _leave(self, ask: RecordedAsk, served: Served, held: Planned | HeldAsk | PenstockError) -> None:
        """The line is done with it."""
        assert isinstance(held, HeldAsk) and held.outcome is not None, "who is held back is told when that is over"
        self.place(ask, served, held.outcome)

    def place(self, ask: RecordedAsk, served: Served, planned: Planned | PenstockError) -> None:
        """Its prompt comes to a worker, if it is not refused."""
        if isinstance(planned, PenstockError):
            served.refused = True
            self._answered(ask)
            return
        served.held_s = planned.held_s
        computes = planned.prefill or planned.decode
        prompt = Prompt(
            planned.uncached_tokens,
            begin=partial(self._begin, ask, served, planned, self._now),
            done=partial(self._prefilled, ask, served, planned),
            context=ask.tokens + (0 if planned.prefill else ask.output),
            keeps_room=planned.prefill is None and ask.output > 1,
        )
        self._change(computes.id, lambda worker: worker.add_prompt(prompt))

    def _begin(self, ask: RecordedAsk, served: Served, planned: Planned, came_at: float) -> float:
        """The prompt, which came to its worker at `came_at`, is next: what is stored by now need not be computed."""
        model, size, keys = self._mesh.model, self._trace.block_tokens, self._keys(ask)
        computes = planned.prefill or planned.decode
        sources = planned.prefill_sources if planned.prefill else planned.decode_sources
        most = ask.tokens - 1
        own = min(self._pages[computes.id].depth(keys) * size, most)
        near = max(own, min(self._stores[computes.host_id].depth(keys) * size, most))
        far = max((min(self._stores[host].depth(keys) * size, most) for host in sources), default=0)
        served.queue_s, beside_s = self._now - served.at, self._now - came_at
        bytes_ = self._mesh.token_bytes
        ways = {depth: (depth - own) * bytes_ / model.fetch_rate for depth in (own, near)}
        if far > near:
            ways[far] = ways[near] + (far - near) * bytes_ / model.remote_rate

        def left_s(depth: int) -> float:
            """Of what is fetched there is only left what others' prompts there took less long than."""
            return max(0.0, ways[depth] - beside_s) + model.prefill_s(depth, ask.tokens)

        served.cached = min(ways, key=left_s) if self._mesh.compares else max(near, far)
        self._computed[computes.id] += (ask.tokens - served.cached) * served.counts
        return left_s(served.cached) * model.prefill_rate

    def _keys(self, ask: RecordedAsk) -> Sequence[bytes]:
        return ask.keys[: ask.tokens // self._trace.block_tokens]

    def _prefilled(self, ask: RecordedAsk, served: Served, planned: Planned) -> None:
        """The first token is there, and the prompt's blocks are stored."""
        computes, decode = planned.prefill or planned.decode, planned.decode
        served.ttft_s = self._now - served.at
        self.planner.prefilled(planned.number)
        self.planner.generated(planned.number, 1)
        self._hold(f"store-{computes.host_id}", self._stores[computes.host_id], ask)
        for worker in {computes.id, decode.id}:
            self._hold(worker, self._pages[worker], ask)
        if ask.output <= 1:
            self._ended(ask, served, planned)
            return
        stream = Stream(
            ask.output - 1,
            ask.tokens + ask.output,
            joined=partial(setattr, served, "room_s"),
            done=partial(self._ended, ask, served, planned),
            has_room=planned.prefill is None,
        )
        self._at(self._now + _FIRST_TOLD_S, partial(self._tell_length, ask, planned, stream, _FIRST_TOLD_S))
        if planned.prefill is None:
            self._workers[decode.id].add_stream(stream)  # which has just told that the prompt is computed
            return
        rate = self._mesh.model.fetch_rate if computes.host_id == decode.host_id else self._mesh.model.remote_rate
        wait_s = self._mesh.handoff_s + ask.tokens * self._mesh.token_bytes / rate
        self._at(self._now + wait_s, partial(self._change, decode.id, lambda worker: worker.add_stream(stream)))
        self._stir()

    def _tell_length(self, ask: RecordedAsk, planned: Planned, stream: Stream, pause_s: float) -> None:
        """The router hears now and then how long an answer is."""
        if self.planner.ledger.live(planned.number) is None:
            return
        self.planner.generated(planned.number, max(1, round(ask.output - stream.left)))
        self._stir()
        pause_s = min(2 * pause_s, _LAST_TOLD_S)
        self._at(self._now + pause_s, partial(self._tell_length, ask, planned, stream, pause_s))

    def _ended(self, ask: RecordedAsk, served: Served, planned: Planned) -> None:
        served.itl_s = (self._now - served.at - served.ttft_s) / max(1, ask.output - 1)
        self.planner.generated(planned.number, ask.output)
        self.planner.learn(self._ask(ask), ask.output)
        self.planner.release(planned.number)
        self._stir()
        self._answered(ask)

    def _hold(self, member: str, cache: ModelledStore, ask: RecordedAsk) -> None:
        came, went = cache.store(self._keys(ask))
        self.planner.index.stored(member, came)
        self.planner.index.removed(member, went)

    def _ask(self, ask: RecordedAsk) -> PlanAsk:
        return PlanAsk(
            model="m",
            prompt_tokens=ask.tokens,
            max_tokens=1 << 16,
            session=ask.session if self._mesh.names else "",
            block_keys=self._keys(ask),
        )
