"""The engine: requests in, tokens out.

Everything is decided on the event loop; only the forward pass runs elsewhere, in one thread of its own. The loop
of an engine is: ask for drafts, plan a step, have it run, hand out meanwhile what came of the step before.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import torch

from penstock.checkpoint import Checkpoint, inspect, remembered_fingerprint, tokenizer_fingerprint
from penstock.engine.checks import check_request
from penstock.engine.config import EngineConfig
from penstock.engine.errors import EngineBusy, EngineClosed, EngineError
from penstock.engine.forward.batch import Run
from penstock.engine.forward.memory import PageMemory
from penstock.engine.forward.runner import Runner
from penstock.engine.hooks import Drafter, KvSink, KvSource, LoadResult
from penstock.engine.lane import Lane
from penstock.engine.loading.writer import LentPage, LoadWriter
from penstock.engine.models.packed import PackedWeights
from penstock.engine.pages import PagePool
from penstock.engine.request import FinishReason, Request, TokenOut, Update
from penstock.engine.sampling.sampler import Choice, Chosen
from penstock.engine.scheduling.chunking import chunk_tokens
from penstock.engine.scheduling.live import Live, new_live
from penstock.engine.scheduling.plan import Portion, StepLimits
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.speculation.asking import Speculation
from penstock.engine.stats import Counters, EngineStats
from penstock.kv.spec import KvSpec
from penstock.runtime.cores import available_cores
from penstock.runtime.tasks import being_cancelled

Load = Callable[[EngineConfig, Checkpoint], tuple["Computes", KvSpec]]
_LENT = "lent to sinks"
_log = logging.getLogger(__name__)


class Computes(Protocol):
    """What carries out steps: a Runner, or what stands in for one."""

    @property
    def memory(self) -> PageMemory: ...

    @property
    def packed(self) -> PackedWeights | None: ...

    def step(self, runs: Sequence[Run]) -> list[list[Chosen]]:
        """See Runner.step; called in the engine's thread."""
        ...


class Engine:
    """One model, one page pool, many requests. Made by `open`; belongs to the event loop that opened it."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        spec: KvSpec,
        runner: Computes,
        lane: Lane,
        tasks: asyncio.TaskGroup,
        drafter: Drafter | None,
    ) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self.spec = spec
        self.max_model_len = _context(config, checkpoint)
        self._runner = runner
        self._lane = lane
        self._tasks = tasks
        limits = StepLimits(config.max_batch_tokens, config.max_running, config.block_size)
        self._scheduler = Scheduler(limits, PagePool(_pages(config)))
        self._live: dict[str, Live] = {}
        self._loading: dict[int, asyncio.Task[None]] = {}
        self._tickets = 0
        self._counters = Counters()
        self._speculation = Speculation(config, checkpoint.config.vocab_size, drafter, self._counters)
        self._wake = asyncio.Event()
        self._news: list[Live] = []
        """Sequences whose readers and sinks were not told yet of the last step."""
        self._closing = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls, config: EngineConfig, drafter: Drafter | None = None, load: Load | None = None
    ) -> AsyncIterator[Engine]:
        """Loads the model (in a thread) and serves until the block is left; then live requests get EngineClosed.

        Raises CheckpointError when the model cannot be served. `drafter` proposes tokens for every request. `load`
        brings something else than the model to carry out the steps.
        """
        checkpoint = await asyncio.to_thread(inspect, config.model, config.max_model_len or None)
        with Lane("engine") as lane:
            await lane.call(_set_threads, config.threads)
            runner, spec = await lane.call(load or _load, config, checkpoint)
            failure: Exception | None = None
            async with asyncio.TaskGroup() as tasks:
                engine = cls(config, checkpoint, spec, runner, lane, tasks, drafter)
                tasks.create_task(engine._serve(), name="engine")
                try:
                    yield engine
                except Exception as error:  # the caller's own: it leaves as it is, not as a group
                    failure = error
                finally:
                    engine._close()
            if failure is not None:
                raise failure

    def check(self, request: Request) -> None:
        """Raises what `generate` would raise for a request that can never run here: RequestRefused."""
        check_request(request, self.checkpoint.config.vocab_size, self.max_model_len)

    async def generate(
        self, request: Request, source: KvSource | None = None, sink: KvSink | None = None
    ) -> AsyncGenerator[Update, None]:
        """Runs a request; yields news until one carries `finish`.

        Nothing happens before the first `anext`, which raises RequestRefused, EngineBusy or EngineClosed. Closing
        or cancelling the generator drops the request and frees its pages, those in use by a step or a sink as
        soon as these let go. Raises EngineError when a step with this request failed.
        """
        live = self._accept(request, source, sink)
        slot = live.slot
        try:
            finish: FinishReason | None = None
            while finish is None:
                while not (slot.tokens or slot.finish or slot.error):
                    await slot.news()
                tokens, finish = slot.take(), slot.finish
                yield _update(live, tokens, finish)
        finally:
            self._drop(live)

    @property
    def packed(self) -> PackedWeights | None:
        """The weights as the kernels read them; None where torch has them."""
        return self._runner.packed

    def stats(self) -> EngineStats:
        scheduler, counters, packed = self._scheduler, self._counters, self._runner.packed
        behind = [live.remaining for live in scheduler.waiting]
        behind += [live.remaining for live in scheduler.running if live.remaining > 1]
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            loading=len(self._loading),
            queued_tokens=sum(behind),
            free_pages=scheduler.pool.free,
            total_pages=scheduler.pool.total,
            prefill_tokens_per_s=counters.prefill_tokens_per_s,
            decode_step_s=counters.decode_step_s,
            in_step_s=counters.in_step_s,
            steps=counters.steps,
            computed_tokens=counters.computed_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=scheduler.preemptions,
            drafted=counters.drafted,
            accepted=counters.accepted,
            draft_failures=counters.draft_failures,
            load_failures=counters.load_failures,
            sink_failures=counters.sink_failures,
            failed_steps=counters.failed_steps,
            weights_bytes=0 if packed is None else packed.nbytes,
            weights_shared=packed is not None and packed.shared,
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )

    # A request's way in and out

    def _accept(self, request: Request, source: KvSource | None, sink: KvSink | None) -> Live:
        if self._closing:
            raise EngineClosed("the engine is shutting down")
        self.check(request)
        if request.id in self._live:
            raise EngineBusy(f"a request named {request.id!r} is live already")
        queued = len(self._scheduler.waiting) + len(self._loading)
        if queued >= self.config.max_waiting:
            raise EngineBusy(f"{queued} requests are waiting already")
        self._tickets += 1
        eos = self.checkpoint.eos_token_ids
        live = new_live(request, self._tickets, eos, source, sink, time.monotonic())
        choice = Choice(request.sampling, live.stops, live.tokens, len(request.prompt), (), live.memory)
        live.run = Run(choice, 0, 0, live.pages, (live.owner, live.version))
        self._live[request.id] = live
        if source is None:
            self._enter(live)
        else:
            load = self._tasks.create_task(self._load(live, source), name=f"load {live.owner}")
            self._scheduler.load(live)
            load.add_done_callback(lambda _: self._load_over(live))
            self._loading[live.ticket] = load
        return live

    def _enter(self, live: Live) -> None:
        """Into the line, or straight to the end when its given output ends it."""
        live.timeline.load_over(time.monotonic())
        verdict = live.verdict(self.max_model_len)
        if verdict is None:
            self._scheduler.add(live)
        else:
            live.slot.finish = verdict
            live.slot.wake()
            self._finish(live)
        self._wake.set()

    def _drop(self, live: Live) -> None:
        """The one way out: after a finish, an error or a reader's farewell, once or more often."""
        if self._live.get(live.id) is live:
            del self._live[live.id]
            self._speculation.forget(live.id)
        if live.gone:
            return
        load = self._loading.get(live.ticket)
        if load is None:
            self._scheduler.drop(live)
        else:
            live.gone = True
            load.cancel()  # its pages go when it has ended
        self._wake.set()

    def _fail(self, live: Live, error: Exception) -> None:
        live.slot.fail(error)
        self._drop(live)

    def _close(self) -> None:
        """No new requests; live ones fail; `_serve` and the loads end by themselves."""
        self._closing = True
        self._hand_out()
        for live in list(self._live.values()):
            self._fail(live, EngineClosed("the engine is shutting down"))
        self._wake.set()

    # Loading

    async def _load(self, live: Live, source: KvSource) -> None:
        writer = LoadWriter(self._runner.memory, self._scheduler, live, self._wake.set)
        try:
            result = await self._ask_source(live, source, writer)
        finally:
            writer.close()
        await writer.drain()
        if not live.gone:
            del self._loading[live.ticket]
            self._use_loaded(live, writer.written, result)
            self._enter(live)

    def _load_over(self, live: Live) -> None:
        """The load has ended; when it did not end in `_enter` (dropped, perhaps before it began), so does its claim."""
        if self._loading.pop(live.ticket, None) is not None:
            self._scheduler.drop(live)
            self._wake.set()

    async def _ask_source(self, live: Live, source: KvSource, writer: LoadWriter) -> LoadResult:
        """What the source found; nothing when it raised or talks nonsense."""
        try:
            found = await source.load(writer)
            result = LoadResult(found, (), found) if isinstance(found, int) else found
            if min(result.valid_tokens, result.cached_tokens) < 0:
                raise ValueError(f"negative counts: {result}")
            vocab_size = self.checkpoint.config.vocab_size
            for index, token in enumerate(result.output, start=live.generated):
                if token.index != index or not 0 <= token.token < vocab_size:
                    raise ValueError(f"token {token} cannot follow {index} generated tokens")
            return result
        except (Exception, asyncio.CancelledError):
            if being_cancelled():
                raise
            self._counters.load_failures += 1
            _log.warning("loading KV of %s failed; computing it", live.id, exc_info=True)
            return LoadResult(0)

    def _use_loaded(self, live: Live, written: int, result: LoadResult) -> None:
        """The last token is always computed, for its logits; everything else may come from the source."""
        live.tokens.extend(token.token for token in result.output)
        size = self.config.block_size
        valid = min(result.valid_tokens, written * size, live.given)
        live.reported = valid // size
        live.computed = min(valid, live.length - 1)
        live.loaded = live.reached = min(live.computed, live.given)
        plain = result.cached_tokens == result.valid_tokens and not result.output
        live.cached_tokens = live.loaded if plain else min(result.cached_tokens, live.given)

    # Steps

    async def _serve(self) -> None:
        stalled = False
        while not self._closing:
            self._wake.clear()
            drafts: Mapping[int, tuple[int, ...]] = {}
            if self._speculation.drafter is not None:
                self._hand_out()
                drafts = await self._speculation.ask(self._scheduler.decoding())
            counts = {ticket: len(tokens) for ticket, tokens in drafts.items()}
            step = self._scheduler.next_step(counts, stalled, self._chunk())
            stalled = False
            if step:
                await self._step(step, drafts)
                continue
            self._hand_out()
            if not self._closing:
                stalled = not await self._woken()

    def _chunk(self) -> int:
        """Prompt tokens beside decode rows."""
        config, counters = self.config, self._counters
        rate = counters.prefill_tokens_per_s
        return chunk_tokens(config.itl_target_s, counters.decode_step_s, rate, config.max_batch_tokens)

    async def _woken(self) -> bool:
        """Waits for news; False when sequences have been waiting in vain for pages for `stall_s`."""
        if not self._scheduler.waiting:
            return await self._wake.wait()
        try:
            async with asyncio.timeout(self.config.stall_s):
                return await self._wake.wait()
        except TimeoutError:
            return False

    async def _step(self, step: list[tuple[Live, Portion]], drafts: Mapping[int, tuple[int, ...]]) -> None:
        """Carries a step out; what came of the one before is handed out meanwhile, so that no model waits for it."""
        started = time.monotonic()
        runs, rows, prefill = [], 0, 0
        for live, row in step:
            run = live.run
            run.aim(live.computed, row.known, drafts[live.ticket][: row.drafts] if row.drafts else ())
            if run.table[1] != live.version:
                run.table = (live.owner, live.version)
            if live.timeline.started is None:
                live.timeline.step_begins(started)
            rows += run.tokens
            prefill += run.tokens if row.known > 1 else 0
            runs.append(run)
        self._counters.step_began = started
        try:
            answers = await self._lane.call(self._runner.step, runs, begun=self._hand_out)
        except Exception as error:
            self._counters.failed_steps += 1
            _log.exception("a step of %d sequences failed", len(step))
            for live, _ in step:
                self._fail(live, EngineError(f"the step failed: {error}"))
                self._scheduler.settle(live)
            return
        finally:
            self._counters.step_began = None
        now = time.monotonic()
        self._counters.step(now - started, prefill, rows)
        for (live, _), answer in zip(step, answers, strict=True):
            if not live.gone:
                self._commit(live, answer, now)
            live.busy = False
            if live.gone:
                self._scheduler.settle(live)

    def _commit(self, live: Live, answer: Sequence[Chosen], now: float) -> None:
        """Takes a step's result into the sequence."""
        verdict = None
        tokens, run = live.tokens, live.run
        known, prompt = len(tokens), run.choice.prompt_length
        for chosen in answer:
            token = chosen.token
            live.slot.tokens.append(TokenOut(len(tokens) - prompt, token, chosen.logprob, chosen.top))
            tokens.append(token)
            if token in live.stops or len(tokens) >= live.ends_at or len(tokens) >= self.max_model_len:
                verdict = live.verdict(self.max_model_len)
                if verdict is not None:
                    break
        count = len(tokens) - known
        computed = run.start + run.known
        if count:
            computed += count - 1
            self._counters.generated_tokens += count
            times = live.timeline
            if times.first_token is None:
                times.first(now)
            times.last_token = now
        live.computed = computed
        if live.reached < live.given:
            reached = min(run.start + run.known, live.given)
            live.computed_tokens += max(0, reached - max(run.start, live.reached))
            live.reached = max(live.reached, reached)
        if run.choice.drafts:
            self._speculation.learn(live, len(run.choice.drafts), count - 1)
        if verdict is not None:
            self._report_filled(live)
            live.slot.finish = verdict
            self._finish(live)
        self._news.append(live)

    def _hand_out(self) -> None:
        """Tells sinks and readers what there is since the last step."""
        news, self._news = self._news, []
        for live in news:
            if live.sink is not None and not live.gone:
                self._report_filled(live)
            slot = live.slot
            if slot.tokens:
                slot.wake()

    def _finish(self, live: Live) -> None:
        """The sequence ended normally; its slot has the verdict."""
        if live.sink is not None:
            whole, rest = divmod(live.computed, self.config.block_size)
            tail = self._lend(live.pages[whole : whole + 1]) if rest else []
            try:
                live.sink.finished(live.computed, tail[0] if tail else None)
            except Exception:
                self._sink_failed(live, tail)
        self._scheduler.drop(live)

    # Sinks

    def _report_filled(self, live: Live) -> None:
        whole = live.computed // self.config.block_size
        first, live.reported = live.reported, max(live.reported, whole)
        if live.sink is None or whole <= first:
            return
        lent = self._lend(live.pages[first:whole])
        try:
            live.sink.filled(first, lent, live.tokens)
        except Exception:
            self._sink_failed(live, lent)

    def _lend(self, pages: Sequence[int]) -> list[LentPage]:
        self._scheduler.pool.hold(_LENT, pages)
        return [LentPage(self._runner.memory, page, self._take_back) for page in pages]

    def _take_back(self, page: int) -> None:
        self._scheduler.pool.release(_LENT, (page,))
        self._wake.set()

    def _sink_failed(self, live: Live, lent: Sequence[LentPage]) -> None:
        self._counters.sink_failures += 1
        _log.warning("the sink of %s failed", live.id, exc_info=True)
        for page in lent:
            page.release()


def _set_threads(threads: int) -> None:
    torch.set_num_threads(threads or available_cores())


def _context(config: EngineConfig, checkpoint: Checkpoint) -> int:
    """Of prompt and output: what the model, the operator and the pool allow."""
    longest = min(checkpoint.config.max_positions, _pages(config) * config.block_size)
    return min(config.max_model_len or longest, longest)


def _pages(config: EngineConfig) -> int:
    return -(-config.kv_pool_tokens // config.block_size)


def _load(config: EngineConfig, checkpoint: Checkpoint) -> tuple[Runner, KvSpec]:
    runner = Runner(
        checkpoint,
        config.dtype,
        config.device,
        _pages(config),
        config.block_size,
        _context(config, checkpoint),
        config.kernels,
        config.packed_bytes,
        config.max_running,
        config.weights == "lossless",
        config.kv_dtype or None,
        config.threads or None,
    )
    token, tokens = runner.memory.block_bytes // config.block_size, _pages(config) * config.block_size
    _log.info("KV of %d tokens fits: %d bytes each in %s, %.0f MiB", tokens, token, config.kv, tokens * token / 2**20)
    spec = KvSpec(
        model=remembered_fingerprint(checkpoint),
        tokenizer=tokenizer_fingerprint(checkpoint),
        layout=runner.memory.layout,
        dtype=config.identity,
        block_size=config.block_size,
        block_bytes=runner.memory.block_bytes,
    )
    return runner, spec


def _update(live: Live, tokens: tuple[TokenOut, ...], finish: FinishReason | None) -> Update:
    times = live.timeline
    return Update(
        tokens,
        finish,
        live.cached_tokens,
        live.computed_tokens,
        live.drafted,
        live.accepted,
        live.preemptions,
        times.load_s,
        times.queue_s,
        times.prefill_s,
        times.last_token - times.first_token if times.first_token is not None else 0.0,
    )
