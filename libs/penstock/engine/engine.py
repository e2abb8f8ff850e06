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
from penstock.engine.batch import Run
from penstock.engine.cancellation import cancelled
from penstock.engine.checks import check_request
from penstock.engine.chunking import chunk_tokens
from penstock.engine.config import EngineConfig
from penstock.engine.errors import EngineBusy, EngineClosed, EngineError
from penstock.engine.hooks import Drafter, KvSink, KvSource, LoadResult
from penstock.engine.lane import Lane
from penstock.engine.models.packed import PackedWeights
from penstock.engine.pool import KvPool
from penstock.engine.request import FinishReason, Request, TokenOut, Update
from penstock.engine.runner import Runner
from penstock.engine.sampler import Choice, Chosen
from penstock.engine.scheduler import Limits, Row, Scheduler
from penstock.engine.sequence import Sequence as Live
from penstock.engine.sequence import new_sequence
from penstock.engine.speculation import Speculation
from penstock.engine.stats import Counters, EngineStats
from penstock.engine.transfer import LentPage, Writer
from penstock.kv.identity import KvSpec
from penstock.kv.pages import PagePool
from penstock.runtime.cores import available_cores

Load = Callable[[EngineConfig, Checkpoint], tuple["Computes", KvSpec]]
_LENT = "lent to sinks"
_log = logging.getLogger(__name__)


class Computes(Protocol):
    """What carries out steps: a Runner, or what stands in for one."""

    @property
    def pool(self) -> KvPool: ...

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
        limits = Limits(config.max_batch_tokens, config.max_running, config.block_size)
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
        one = self._accept(request, source, sink)
        slot = one.slot
        try:
            finish: FinishReason | None = None
            while finish is None:
                while not (slot.tokens or slot.finish or slot.error):
                    await slot.news()
                tokens, finish = slot.take(), slot.finish
                yield _update(one, tokens, finish)
        finally:
            self._drop(one)

    @property
    def packed(self) -> PackedWeights | None:
        """The weights as the kernels read them; None where torch has them."""
        return self._runner.packed

    def stats(self) -> EngineStats:
        scheduler, counters, packed = self._scheduler, self._counters, self._runner.packed
        behind = [one.remaining for one in scheduler.waiting]
        behind += [one.remaining for one in scheduler.running if one.remaining > 1]
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            loading=len(self._loading),
            queued_tokens=sum(behind),
            free_pages=scheduler.pool.free,
            total_pages=scheduler.pool.total,
            prefill_tokens_per_s=counters.prefill_tokens_per_s,
            decode_step_s=counters.decode_step_s,
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
        one = new_sequence(request, self._tickets, eos, source, sink, time.monotonic())
        choice = Choice(request.sampling, one.stops, one.tokens, len(request.prompt), (), one.memory)
        one.run = Run(choice, 0, 0, one.pages, (one.owner, one.version))
        self._live[request.id] = one
        if source is None:
            self._enter(one)
        else:
            load = self._tasks.create_task(self._load(one, source), name=f"load {one.owner}")
            self._scheduler.load(one)
            load.add_done_callback(lambda _: self._load_over(one))
            self._loading[one.ticket] = load
        return one

    def _enter(self, one: Live) -> None:
        """Into the line, or straight to the end when its given output ends it."""
        one.timeline.load_over(time.monotonic())
        verdict = one.verdict(self.max_model_len)
        if verdict is None:
            self._scheduler.add(one)
        else:
            one.slot.finish = verdict
            one.slot.wake()
            self._finish(one)
        self._wake.set()

    def _drop(self, one: Live) -> None:
        """The one way out: after a finish, an error or a reader's farewell, once or more often."""
        if self._live.get(one.id) is one:
            del self._live[one.id]
            self._speculation.forget(one.id)
        if one.gone:
            return
        load = self._loading.get(one.ticket)
        if load is None:
            self._scheduler.drop(one)
        else:
            one.gone = True
            load.cancel()  # its pages go when it has ended
        self._wake.set()

    def _fail(self, one: Live, error: Exception) -> None:
        one.slot.fail(error)
        self._drop(one)

    def _close(self) -> None:
        """No new requests; live ones fail; `_serve` and the loads end by themselves."""
        self._closing = True
        self._hand_out()
        for one in list(self._live.values()):
            self._fail(one, EngineClosed("the engine is shutting down"))
        self._wake.set()

    # Loading

    async def _load(self, one: Live, source: KvSource) -> None:
        writer = Writer(self._runner.pool, self._scheduler, one, self._wake.set)
        try:
            result = await self._ask_source(one, source, writer)
        finally:
            writer.close()
        await writer.drain()
        if not one.gone:
            del self._loading[one.ticket]
            self._use_loaded(one, writer.written, result)
            self._enter(one)

    def _load_over(self, one: Live) -> None:
        """The load has ended; when it did not end in `_enter` (dropped, perhaps before it began), so does its claim."""
        if self._loading.pop(one.ticket, None) is not None:
            self._scheduler.drop(one)
            self._wake.set()

    async def _ask_source(self, one: Live, source: KvSource, writer: Writer) -> LoadResult:
        """What the source found; nothing when it raised or talks nonsense."""
        try:
            found = await source.load(writer)
            result = LoadResult(found, (), found) if isinstance(found, int) else found
            if min(result.valid_tokens, result.cached_tokens) < 0:
                raise ValueError(f"negative counts: {result}")
            vocab_size = self.checkpoint.config.vocab_size
            for index, token in enumerate(result.output, start=one.generated):
                if token.index != index or not 0 <= token.token < vocab_size:
                    raise ValueError(f"token {token} cannot follow {index} generated tokens")
            return result
        except (Exception, asyncio.CancelledError):
            if cancelled():
                raise
            self._counters.load_failures += 1
            _log.warning("loading KV of %s failed; computing it", one.id, exc_info=True)
            return LoadResult(0)

    def _use_loaded(self, one: Live, written: int, result: LoadResult) -> None:
        """The last token is always computed, for its logits; everything else may come from the source."""
        one.tokens.extend(token.token for token in result.output)
        size = self.config.block_size
        valid = min(result.valid_tokens, written * size, one.given)
        one.reported = valid // size
        one.computed = min(valid, one.length - 1)
        one.loaded = one.reached = min(one.computed, one.given)
        plain = result.cached_tokens == result.valid_tokens and not result.output
        one.cached_tokens = one.loaded if plain else min(result.cached_tokens, one.given)

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

    async def _step(self, step: list[tuple[Live, Row]], drafts: Mapping[int, tuple[int, ...]]) -> None:
        """Carries a step out; what came of the one before is handed out meanwhile, so that no model waits for it."""
        started = time.monotonic()
        runs, rows, prefill = [], 0, 0
        for one, row in step:
            run = one.run
            run.aim(one.computed, row.count, drafts[one.ticket][: row.drafts] if row.drafts else ())
            if run.table[1] != one.version:
                run.table = (one.owner, one.version)
            if one.timeline.started is None:
                one.timeline.step_begins(started)
            rows += run.rows
            prefill += run.rows if row.count > 1 else 0
            runs.append(run)
        try:
            answers = await self._lane.call(self._runner.step, runs, begun=self._hand_out)
        except Exception as error:
            self._counters.failed_steps += 1
            _log.exception("a step of %d sequences failed", len(step))
            for one, _ in step:
                self._fail(one, EngineError(f"the step failed: {error}"))
                self._scheduler.settle(one)
            return
        now = time.monotonic()
        self._counters.step(now - started, prefill, rows)
        for (one, _), answer in zip(step, answers, strict=True):
            if not one.gone:
                self._commit(one, answer, now)
            one.busy = False
            if one.gone:
                self._scheduler.settle(one)

    def _commit(self, one: Live, answer: Sequence[Chosen], now: float) -> None:
        """Takes a step's result into the sequence."""
        verdict = None
        tokens, run = one.tokens, one.run
        known, prompt = len(tokens), run.choice.prompt_length
        for chosen in answer:
            token = chosen.token
            one.slot.tokens.append(TokenOut(len(tokens) - prompt, token, chosen.logprob, chosen.top))
            tokens.append(token)
            if token in one.stops or len(tokens) >= one.ends_at or len(tokens) >= self.max_model_len:
                verdict = one.verdict(self.max_model_len)
                if verdict is not None:
                    break
        count = len(tokens) - known
        computed = run.start + run.count
        if count:
            computed += count - 1
            self._counters.generated_tokens += count
            times = one.timeline
            if times.first_token is None:
                times.first(now)
            times.last_token = now
        one.computed = computed
        if one.reached < one.given:
            reached = min(run.start + run.count, one.given)
            one.computed_tokens += max(0, reached - max(run.start, one.reached))
            one.reached = max(one.reached, reached)
        if run.choice.drafts:
            self._speculation.learn(one, len(run.choice.drafts), count - 1)
        if verdict is not None:
            self._report_filled(one)
            one.slot.finish = verdict
            self._finish(one)
        self._news.append(one)

    def _hand_out(self) -> None:
        """Tells sinks and readers what there is since the last step."""
        news, self._news = self._news, []
        for one in news:
            if one.sink is not None and not one.gone:
                self._report_filled(one)
            slot = one.slot
            if slot.tokens:
                slot.wake()

    def _finish(self, one: Live) -> None:
        """The sequence ended normally; its slot has the verdict."""
        if one.sink is not None:
            whole, rest = divmod(one.computed, self.config.block_size)
            tail = self._lend(one.pages[whole : whole + 1]) if rest else []
            try:
                one.sink.finished(one.computed, tail[0] if tail else None)
            except Exception:
                self._sink_failed(one, tail)
        self._scheduler.drop(one)

    # Sinks

    def _report_filled(self, one: Live) -> None:
        whole = one.computed // self.config.block_size
        first, one.reported = one.reported, max(one.reported, whole)
        if one.sink is None or whole <= first:
            return
        lent = self._lend(one.pages[first:whole])
        try:
            one.sink.filled(first, lent, one.tokens)
        except Exception:
            self._sink_failed(one, lent)

    def _lend(self, pages: Sequence[int]) -> list[LentPage]:
        self._scheduler.pool.hold(_LENT, pages)
        return [LentPage(self._runner.pool, page, self._take_back) for page in pages]

    def _take_back(self, page: int) -> None:
        self._scheduler.pool.release(_LENT, (page,))
        self._wake.set()

    def _sink_failed(self, one: Live, lent: Sequence[LentPage]) -> None:
        self._counters.sink_failures += 1
        _log.warning("the sink of %s failed", one.id, exc_info=True)
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
    token, tokens = runner.pool.block_bytes // config.block_size, _pages(config) * config.block_size
    _log.info("KV of %d tokens fits: %d bytes each in %s, %.0f MiB", tokens, token, config.kv, tokens * token / 2**20)
    spec = KvSpec(
        model=remembered_fingerprint(checkpoint),
        tokenizer=tokenizer_fingerprint(checkpoint),
        layout=runner.pool.layout,
        dtype=config.identity,
        block_size=config.block_size,
        block_bytes=runner.pool.block_bytes,
    )
    return runner, spec


def _update(one: Live, tokens: tuple[TokenOut, ...], finish: FinishReason | None) -> Update:
    times = one.timeline
    return Update(
        tokens,
        finish,
        one.cached_tokens,
        one.computed_tokens,
        one.drafted,
        one.accepted,
        one.preemptions,
        times.load_s,
        times.queue_s,
        times.prefill_s,
        times.last_token - times.first_token if times.first_token is not None else 0.0,
    )
