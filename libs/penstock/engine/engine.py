"""The engine: requests in, tokens out.

Everything is decided on the event loop; only the forward pass runs in a thread of its own. The loop of an engine is:
ask for drafts, plan a step, have it computed, and meanwhile hand out the tokens of the step before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from operator import eq

from penstock.checkpoint import Checkpoint, inspect
from penstock.engine.adapters.shelf import AdapterShelf, ComputesAdapters
from penstock.engine.checks import check_request, settled
from penstock.engine.config import EngineConfig, named_directories
from penstock.engine.delivery.outlet import Outlet
from penstock.engine.delivery.sinks import SinkFeed, SinkPages
from penstock.engine.errors import EngineBusy, EngineClosed, EngineError, NotFinite, RequestRefused
from penstock.engine.flight import Flight
from penstock.engine.forward.accepting import credited
from penstock.engine.forward.halving import answers_of
from penstock.engine.forward.model import Computes, ComputesInStages, InRanks, Load, load_model, set_threads
from penstock.engine.forward.redundancy import note_rows
from penstock.engine.forward.runner import BegunStep
from penstock.engine.grammars import RequestRules
from penstock.engine.hooks import Drafter, KvSink, KvSource, LoadResult, Relay
from penstock.engine.lane import Lane, watching
from penstock.engine.layers.adapters import AdapterWeights
from penstock.engine.loading.loads import Loads
from penstock.engine.models.packed import PackedWeights
from penstock.engine.pace import StepPace
from penstock.engine.pages import PagePool
from penstock.engine.pictures.shown import ShownTiles
from penstock.engine.request import Request, Update
from penstock.engine.rules import FREE, TextRules
from penstock.engine.sampling.choice import Chosen
from penstock.engine.scheduling.live import Live, new_live
from penstock.engine.scheduling.scheduler import Ended, Scheduler
from penstock.engine.scheduling.situation import StepLimits
from penstock.engine.seeing import Seeing
from penstock.engine.speculation.asking import Speculation
from penstock.engine.speculation.guess import Guess
from penstock.engine.speculation.head.guessing import HeadGuesser
from penstock.engine.speculation.head.opening import open_head
from penstock.engine.speculation.heading import Heading
from penstock.engine.speculation.looking import open_lookup
from penstock.engine.speculation.lookup.lookup import Lookup
from penstock.engine.stats import Counters, EngineStats, collect
from penstock.engine.step.pictures import PictureRows
from penstock.engine.step.run import Run
from penstock.kv.bytes.arena import Arena
from penstock.kv.identity import Chain
from penstock.kv.spec import KvSpec
from penstock.runtime.threads import started_threads
from penstock.runtime.turns.baton import Baton

_LOOK_S = 0.02
"""Between two looks whether other workers on the same cores leave them to sequences that yield."""
_log = logging.getLogger(__name__)
_COPIERS = 4
"""Threads that copy loaded KV: more would not make memory faster."""


@dataclass(frozen=True, slots=True)
class Helpers:
    """Threads and tasks that work for an engine outside its own calls; they all end when the engine is closed."""

    lane: Lane
    """Computes steps."""
    tasks: asyncio.TaskGroup
    """Holds the loop of steps, and loads."""
    threads: Executor
    """Copy loaded KV."""
    baton: Baton | None
    """For the cores that other workers share."""


class Engine:
    """One model, one page pool, many requests. Made by `open`; belongs to the event loop that opened it."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        *,
        spec: KvSpec,
        runner: Computes,
        helpers: Helpers,
        drafter: Drafter | None,
        lookup: Lookup | None,
        head: HeadGuesser | None,
    ) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self.spec = spec
        self.max_model_len = config.context(checkpoint.config.max_positions)
        self._runner = runner
        self._lane = helpers.lane
        limits = StepLimits(config.max_batch_tokens, config.max_running, config.block_size, config.pp)
        self.pool = PagePool(config.pages, most_idle=config.idle_pages, tenant_share=config.tenant_share)
        """For others to ask and to watch; the scheduler alone changes it, but for `trim`."""
        self.parts = runner.memory.parts
        """Of a block of the model's KV; None where all layers look at everything."""
        self._scheduler = Scheduler(limits, self.pool, None if self.parts is None else self.parts.reach)
        self._counters = Counters()
        self._pace = StepPace(config, self._counters, self._scheduler.crowd, runner, helpers.baton)
        self._seeing = Seeing(
            self.shown,
            self._scheduler,
            self._counters,
            self._pace,
            lane=helpers.lane,
            hand_out=self._hand_out,
            failed=self._blind,
        )
        self._wake = asyncio.Event()
        vocab_size = checkpoint.config.vocab_size
        heading = None
        if head is not None:
            heading = Heading(head, self._between_steps, self._counters, always=config.draft_always)
        self._speculation = Speculation(config, vocab_size, drafter, lookup, heading, counters=self._counters)
        self._rules = RequestRules(checkpoint, config.draft_tokens > 0)
        self._sink_pages = SinkPages(self._scheduler, runner.memory, self._wake.set)
        self._loads = Loads(
            self._scheduler,
            runner.memory,
            tasks=helpers.tasks,
            threads=helpers.threads,
            vocab_size=vocab_size,
            again_s=config.again_s,
            counters=self._counters,
            loaded=self._loaded,
            changed=self._wake.set,
        )
        self.adapters = AdapterShelf(
            runner if isinstance(runner, ComputesAdapters) else None,
            checkpoint.config,
            helpers.threads,
            most=config.max_loras,
            most_bytes=config.lora_bytes,
        )
        """Those that requests may have."""
        self._outlets: dict[str, Outlet] = {}
        """The outlets of all live requests, by id."""
        self._tickets = 0
        self._flights: deque[Flight] = deque()
        """The steps that are being computed, in the order in which they have begun."""
        self._news: Sequence[Outlet] = ()
        """Outlets whose readers and sinks do not know of the last step yet."""
        self._closing = False
        self.lost = asyncio.Event()
        """Set when a process that computes a part of the model has ended: nothing can be computed any more."""
        self.leaving = asyncio.Event()
        """Set when one of them says that it will end."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: EngineConfig,
        drafter: Drafter | None = None,
        load: Load = load_model,
        *,
        baton: Baton | None = None,
        give_up: Callable[[], object] = lambda: None,
    ) -> AsyncIterator[Engine]:
        """Loads the model (in a thread) and serves until the block is left; then live requests get EngineClosed.

        Raises CheckpointError when the model cannot be served, ConfigError when it can't be with these settings.
        `drafter` proposes tokens for every request. `load` brings something else than the model to carry out the steps.
        `baton` is for the cores that others share. `give_up` ends what `load` waits for, when opening is cancelled.
        """
        checkpoint = await asyncio.to_thread(inspect, config.model, config.max_model_len or None)
        config = settled(config, checkpoint)
        with ExitStack() as stack, Lane("engine") as lane, started_threads(_COPIERS, "load") as threads:
            async with AsyncExitStack() as ending:
                await lane.call(set_threads, config.threads)
                try:
                    runner, spec = await lane.call(load, config, checkpoint)
                except asyncio.CancelledError:
                    give_up()
                    raise
                stack.callback(runner.memory.close)
                ranks = getattr(runner, "ranks", None)
                others = ranks if isinstance(ranks, InRanks) else None
                if others is not None:
                    ending.push_async_callback(lane.call, others.close)
                if config.redundant_experts:
                    ending.push_async_callback(lane.call, _note_rows, checkpoint, runner)
                lookup = await open_lookup(config, stack)
                head = await lane.call(open_head, config, checkpoint, runner)
                failure: Exception | None = None
                async with asyncio.TaskGroup() as tasks:
                    helpers = Helpers(lane, tasks, threads, baton)
                    engine = cls(
                        config,
                        checkpoint,
                        spec=spec,
                        runner=runner,
                        helpers=helpers,
                        drafter=drafter,
                        lookup=lookup,
                        head=head,
                    )
                    tasks.create_task(engine._serve(), name="engine")
                    try:
                        with (
                            watching(() if others is None else others.leaving, engine.leaving.set),
                            watching(() if others is None else others.watched, lambda: engine._lose(others)),
                        ):
                            for name, directory in named_directories("lora", config.lora).items():
                                await engine.adapters.add(name, directory)
                            yield engine
                    except Exception as error:  # the caller's own: it leaves as it is, not as a group
                        failure = error
                    finally:
                        engine._close()
                if failure is not None:
                    raise failure

    def check(self, request: Request) -> None:
        """Raises what `generate` would raise for a request that can never run here: RequestRefused."""
        self._checked(request)

    def _checked(self, request: Request) -> PictureRows | None:
        """As `check`; the rows of its pictures."""
        check_request(request, self.checkpoint.config.vocab_size, self.max_model_len)
        return self._pictures(request)

    @property
    def no_pictures(self) -> str:
        """Why requests can't show any; empty: they can."""
        return self.checkpoint.no_pictures if self.checkpoint.pictures is None else ""

    def _pictures(self, request: Request) -> PictureRows | None:
        """The rows of a request's pictures. Raises RequestRefused."""
        part, reason = self.checkpoint.pictures, self.no_pictures
        if not request.pictures:
            return None
        if part is None or reason:
            raise RequestRefused("pictures", f"pictures can't be shown to this model here: {reason}")
        return PictureRows(request.pictures, request.prompt, part.form, request.owner)

    async def generate(
        self,
        request: Request,
        source: KvSource | None = None,
        sink: KvSink | None = None,
        *,
        relay: Callable[[], Relay | None] = lambda: None,
        chain: Chain | None = None,
    ) -> AsyncGenerator[Update, None]:
        """Runs a request; yields news until one carries `finish`. After the first update it asks `relay` who takes the
        tokens between that and the last one; None: the reader.

        `chain` names the blocks of prompt and output, of which it covers those of the prompt: the request shares pages
        with others whose blocks have the same keys. Without it its pages are its own.

        The request starts with the first `anext`, which raises RequestRefused, EngineBusy or EngineClosed. Closing
        or cancelling the generator drops the request and frees its pages, those in use by a step or a sink as
        soon as these let go. Raises EngineError when this request's part of a step failed.
        """
        rules = await self._rules.of(request.sampling, len(request.prompt))
        async with self.adapters.using(request.adapter) as adapter:
            outlet = self._accept(request, source, sink, rules, chain=chain, adapter=adapter)
            try:
                if outlet.empty:
                    await outlet.news()
                update = outlet.take()
                yield update
                taker = relay()
                while update.finish is None:
                    if taker is not None:
                        await outlet.end(taker)
                    elif outlet.empty:
                        await outlet.news()
                    update = outlet.take()
                    yield update
            finally:
                self._drop(outlet)

    @property
    def packed(self) -> PackedWeights | None:
        """The weights in the kernels' layout; None when torch holds the weights."""
        return self._runner.packed

    @property
    def arena(self) -> Arena | None:
        """The pages as the store of this host can map them; None when it can't."""
        return self._runner.memory.arena if self.config.shared_pages else None  # ranks share theirs always

    def finite(self, block: memoryview) -> bool:
        """Whether a block of this engine's KV holds finite numbers only. Callable from any thread."""
        return self._runner.memory.finite(block)

    @property
    def expert_imbalance(self) -> float:
        """See Runner."""
        return getattr(self._runner, "expert_imbalance", 0.0)

    @property
    def shown(self) -> ShownTiles | None:
        """The tiles of pictures that steps had; None where the model sees none here."""
        shown = getattr(self._runner, "shown", None)
        return shown if isinstance(shown, ShownTiles) else None

    @property
    def prefill_tokens_per_s(self) -> float:
        """As in the statistics."""
        return self._counters.prefill_tokens_per_s

    def stats(self) -> EngineStats:
        """Now."""
        return collect(
            self._scheduler.stats(),
            self._counters,
            len(self._loads),
            self._runner.packed,
            turns=self._pace.turns,
            lookup_defects=self._speculation.lookup_defects,
        )

    # A request's way in and out

    def _accept(
        self,
        request: Request,
        source: KvSource | None,
        sink: KvSink | None,
        rules: TextRules = FREE,
        *,
        chain: Chain | None = None,
        adapter: AdapterWeights | None = None,
    ) -> Outlet:
        if self._closing:
            raise EngineClosed("the engine is shutting down")
        pictures = self._checked(request)
        if request.id in self._outlets:
            raise EngineBusy(f"a request named {request.id!r} is live already")
        queued = self._scheduler.queued(request.yields) + len(self._loads)
        if queued >= self.config.max_waiting:
            raise EngineBusy(f"{queued} requests are waiting already")
        self._tickets += 1
        assert chain is None or chain.block_size == self.config.block_size, "a block fills a page"
        eos = self.checkpoint.eos_token_ids
        live = new_live(
            request, self._tickets, eos, rules, chain, now=time.monotonic(), adapter=adapter, pictures=pictures
        )
        feed = None if sink is None else SinkFeed(live, sink, self._sink_pages, self._counters)
        self._outlets[live.id] = outlet = Outlet(live, feed, self._speculation.begin(live))
        if source is None:
            self._enter(outlet, self._scheduler.add(live))
        else:
            self._loads.begin(live, source)
        return outlet

    def _loaded(self, live: Live, blocks: int, result: LoadResult) -> None:
        self._enter(self._outlets[live.id], self._scheduler.loaded(live, blocks, result))

    def _enter(self, outlet: Outlet, ended: Ended | None) -> None:
        """The sequence is in the line, or at its end already."""
        outlet.enter()
        if ended is not None:
            self._finish(ended)
            outlet.wake()
        self._wake.set()

    def _finish(self, ended: Ended) -> None:
        outlet = self._outlets[ended.live.id]
        outlet.finish = ended.finish
        if outlet.feed is not None:
            outlet.feed.finish()
        self._scheduler.drop(ended.live)

    def _fail(self, outlet: Outlet, error: Exception) -> None:
        outlet.fail(error)
        if isinstance(error, NotFinite):
            self._scheduler.distrust(outlet.live)
        self._drop(outlet)

    def _drop(self, outlet: Outlet) -> None:
        """Removes a request after its finish, an error or its reader's departure; may be called more than once."""
        live = outlet.live
        if self._outlets.get(live.id) is outlet:
            del self._outlets[live.id]
            self._speculation.forget(live)
        self._loads.cancel(live)
        self._scheduler.drop(live)
        self._wake.set()

    def _close(self) -> None:
        """No new requests; live ones fail; `_serve` and the loads end by themselves."""
        self._closing = True
        self._hand_out()
        for outlet in list(self._outlets.values()):
            self._fail(outlet, EngineClosed("the engine is shutting down"))
        self._wake.set()

    def _lose(self, others: InRanks | None) -> None:
        """A rank has ended: live requests fail, and so do new ones."""
        if others is not None and not self._closing:
            _log.error("a process that computes a part of the model has ended: this worker can't go on")
            others.abandon()
            self._close()
            self.lost.set()

    # Steps

    async def _serve(self) -> None:
        stalled = False
        while not self._closing:
            self._wake.clear()
            drafts = await self._speculation.ask(self._scheduler.decoding(), self._hand_out)
            self._loads.look_again(self._scheduler.next_in_line())
            leftover = self._pace.leftover(self._scheduler.yielding)
            step = self._scheduler.next_step(drafts, stalled, self._pace.room(), leftover)
            stalled = False
            if step:
                self._begin(step, bool(drafts))
                if len(self._flights) < self.config.pp:
                    continue
            if self._flights:
                await self._finish_first()
                await self._seeing.go_on(between=not self._flights)
                continue
            self._hand_out()
            if await self._seeing.go_on(between=True):
                continue
            if not self._closing:
                stalled = not await self._woken()
        while self._flights:
            await self._finish_first()

    async def _woken(self) -> bool:
        """Waits for news; False when sequences have been waiting in vain for pages for `stall_s`."""
        self._counters.resting = True
        yielding = self._scheduler.yielding
        away = yielding and not self._pace.leftover(yielding).alone_s  # nobody says when the cores are free
        try:
            async with asyncio.timeout(_LOOK_S if away else self.config.stall_s if self._scheduler.waiting else None):
                return await self._wake.wait()
        except TimeoutError:
            return away
        finally:
            self._counters.resting = False

    def _begin(self, step: Sequence[Live], drafted: bool) -> None:
        """A step begins. Where the model has several stages, the first one begins to compute it, and takes up the next
        before this one is finished."""
        outlets = [self._outlets[live.id] for live in step]
        flight = Flight(step, outlets, drafted, self._pace.turns.waited_s, self._speculation.asked_for)
        self._flights.append(flight)
        for outlet in flight.outlets:
            outlet.timeline.step_begins(flight.began)
        if self.config.pp > 1:
            flight.begun = self._lane.call(self._begin_computing, flight.runs, begun=self._hand_out)
        self.adapters.hold(flight.adapters)
        if len(self._flights) == 1:
            self._counters.begin(self._expected_s(flight))

    async def _finish_first(self) -> None:
        """Has the step that began first computed, and takes its tokens in. Tokens of the step before are handed out
        meanwhile, so that the model never waits for readers."""
        flight = self._flights[0]
        step, runs, outlets = flight.step, flight.runs, flight.outlets
        rows, prefill = sum(run.tokens for run in runs), sum(run.tokens for run in runs if run.known > 1)
        answers = await answers_of(partial(self._computed, flight), runs)
        self._flights.popleft()
        self.adapters.release(flight.adapters)
        now = time.monotonic()
        took = now - max(flight.began, self._counters.step_ended) - (self._pace.turns.waited_s - flight.waited_s)
        self._counters.end(now)
        if self._flights:
            self._counters.begin(self._expected_s(self._flights[0]))
        ended = self._scheduler.commit(step, answers)
        self._speculation.computed(step)
        failed = generated = 0
        for outlet, answer in zip(outlets, answers, strict=True):
            if not isinstance(answer, list):
                failed += 1
                self._fail(outlet, answer)
            elif answer:
                proposers: Sequence[str] = ()
                if flight.drafted and (drafts := outlet.live.run.choice.drafts):
                    accepted = sum(takewhile(bool, map(eq, drafts, (one.token for one in answer))))
                    proposers = self._speculation.learn(outlet.live, len(drafts), accepted)
                if outlet.live.request.sampling.proposers:
                    answer = credited(answer, proposers)
                generated += len(answer)
                outlet.add(answer, now)
        self._counters.failed_steps += failed
        if not failed:
            aside = all(live.request.yields for live in step)
            self._counters.step(took, prefill, rows, runs, aside=aside)
            self._counters.step_tokens.observe(prefill + generated)
            if not (prefill or aside):
                self._speculation.timed(took, runs, flight.asked)
        for end in ended:
            self._finish(end)
        self._hand_out()
        self._news = outlets

    def _blind(self, live: Live, error: Exception) -> None:
        """The pictures of a sequence can't be computed."""
        _log.error("the pictures of %s can't be computed", live.owner, exc_info=error)
        outlet = self._outlets.get(live.id)
        if outlet is not None and outlet.live is live:
            self._fail(outlet, EngineError(f"a picture can't be computed: {error}"))

    def _expected_s(self, flight: Flight) -> float:
        """Of a step that is not alone in the lane; else the lane says it, when the step has its turn."""
        return self._predicted(flight.runs) if self.config.pp > 1 else 0.0

    def _predicted(self, runs: Sequence[Run]) -> float:
        return self._counters.predict(runs, self.checkpoint.config.hidden_size)

    async def _computed(self, flight: Flight, runs: Sequence[Run]) -> Sequence[list[Chosen] | EngineError]:
        """The answers to some of its runs; what has begun is that of all."""
        begun, flight.begun = flight.begun, None
        if begun is None:
            return await self._lane.call(self._carry_out, runs, begun=self._hand_out)
        return await self._lane.call(self._finish_computing, await begun, begun=self._hand_out)

    def _between_steps(
        self, lives: Sequence[Live], work: Callable[[], list[Guess]], begun: Callable[[], object]
    ) -> asyncio.Future[list[Guess]]:
        """Has `work` done in the lane, in the turn that steps of these sequences have."""

        def in_turn() -> list[Guess]:
            with self._pace.turn([live.run for live in lives]):
                return work()

        return self._lane.call(in_turn, begun=begun)

    def _begin_computing(self, runs: Sequence[Run]) -> BegunStep:
        """In the lane."""
        assert isinstance(self._runner, ComputesInStages)
        return self._runner.begin(runs)

    def _finish_computing(self, begun: BegunStep) -> Sequence[list[Chosen] | EngineError]:
        """In the lane."""
        assert isinstance(self._runner, ComputesInStages)
        return self._examined(begun.runs, self._runner.finish(begun))

    def _carry_out(self, runs: Sequence[Run]) -> Sequence[list[Chosen] | EngineError]:
        """In the lane: computes a step."""
        with self._pace.turn(runs):
            self._counters.begin(self._predicted(runs))
            answers = self._runner.step(runs)
        return self._examined(runs, answers)

    def _examined(
        self, runs: Sequence[Run], answers: Sequence[list[Chosen] | EngineError]
    ) -> Sequence[list[Chosen] | EngineError]:
        """In the lane, after a step: finds out whether others may use the blocks that it has filled, and the tails that
        it has left."""
        size, memory = self.config.block_size, self._runner.memory
        for run, answer in zip(runs, answers, strict=True):
            if not run.shared:
                continue
            first, last = run.start // size, run.end // size
            if first < last:
                run.sound = memory.sound(run.pages[first:last])
            if run.concludes(answer) and run.sound:
                run.tail_sound = not run.end % size or memory.sound_rows(run.pages[last], run.end % size)
        return answers

    def _hand_out(self) -> None:
        """Lets sinks and readers know of the last step."""
        news, self._news = self._news, ()
        for outlet in news:
            outlet.tell()


def _note_rows(checkpoint: Checkpoint, runner: Computes) -> None:
    note_rows(checkpoint, getattr(runner, "expert_rows", ()))
