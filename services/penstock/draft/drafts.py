"""One draft model for all streams: loaded once, at work in a thread of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition
from typing import TYPE_CHECKING, Protocol

import structlog

from penstock.checkpoint import CheckpointError, KvForm, tokenizer_fingerprint
from penstock.draft.config import DraftConfig
from penstock.engine.config import kv_token_bytes
from penstock.engine.errors import EngineError
from penstock.engine.hooks import DraftTerms
from penstock.engine.request import SamplingParams
from penstock.engine.rules import FREE, TextRules
from penstock.engine.speculation.drafting import vocabulary
from penstock.engine.speculation.leads import (
    BlockMove,
    DraftBlockNews,
    DraftBlocks,
    DraftDropped,
    DraftLead,
    DraftStep,
    DraftTold,
    Foresight,
    SequenceId,
)
from penstock.runtime.capacity import gpu_bytes, memory_bytes
from penstock.runtime.config import ConfigError
from penstock.runtime.metrics import DraftMetrics
from penstock.runtime.tasks import beside
from penstock.runtime.threads import started_threads, to_its_end
from penstock.v1 import router_pb2

if TYPE_CHECKING:
    from penstock.engine.speculation.draft_model import DraftModel
    from penstock.engine.speculation.head.foresight import HeadForesight

_LOG = structlog.get_logger("penstock.draft")
_MOST_NEWS = 256
"""Untaken news; while there are so many, those who bring more wait."""
_AGAIN_S = 0.5
"""Seconds after which sequences that there was no room for are looked at again."""
_POOL_SHARE = 16
"""Part of the memory that the KV of all sequences may have where the settings don't say."""
_LEAST_TOKENS, _MOST_TOKENS = 1 << 15, 1 << 20


class DraftReader(Protocol):
    """A stream, as far as it hears of guesses."""

    def take(self, leads: Sequence[DraftLead], refused: Sequence[SequenceId]) -> None:
        """Guesses for some of its sequences, and sequences that get none."""
        ...

    def end(self) -> None:
        """Everything is forgotten: the stream is over."""
        ...


class KvAnswers(Protocol):
    """Answers to what steps say of blocks: a DraftKv."""

    def moved(self, moves: Sequence[BlockMove]) -> None:
        """Blocks have come into pages, or left them."""
        ...

    async def fetch(self, blocks: DraftBlocks) -> int:
        """Brings leading blocks into their pages, and returns how many."""
        ...

    def offer(self, blocks: DraftBlocks, done: Callable[[], None]) -> None:
        """Reads full blocks in their pages, and calls `done` when that is over."""
        ...


class Ruling(Protocol):
    """Makes the rules of texts: RequestRules."""

    async def of(self, sampling: SamplingParams, prompt: int) -> TextRules: ...


@dataclass(frozen=True, slots=True)
class Description:
    """A draft's vocabulary, and what it guesses from."""

    tokenizer: str
    """Fingerprint."""
    vocabulary: Callable[[], Mapping[str, int]]
    """Reads the id of each text; in a thread."""
    layers: Sequence[int] = ()
    """It guesses from the target's states after so many layers; none: from tokens alone."""
    hidden: int = 0
    """Numbers of a state."""

    @property
    def state_bytes(self) -> int:
        """Of a token's states in bfloat16."""
        return 2 * len(self.layers) * self.hidden


class Drafts:
    """One draft model and the thread it works in, shared by all streams. Made by `open_drafts`."""

    def __init__(
        self,
        model: Foresight,
        description: Description,
        ruling: Ruling | None = None,
        *,
        metrics: DraftMetrics,
        kv: KvAnswers | None = None,
    ) -> None:
        """`ruling` is that of a model that follows rules; `kv` that of a model that has a store."""
        self._model = model
        self._ruling = ruling
        self._kv = kv
        self._readers: dict[int, DraftReader] = {}
        self._news: list[Callable[[], None]] = []
        """What the thread does before its next step."""
        self._returns: list[Callable[[], None]] = []
        """The same; it is done whatever becomes of the streams, as it frees pages."""
        self._line = Condition()
        self._closing = False
        self._room = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._loop = asyncio.get_running_loop()
        self._busy_s = 0.0
        self._guessed = 0
        self.description = description
        self.metrics = metrics
        self.metrics.watch(self._figures, self._told_tokens)

    # Streams

    def attach(self, stream: int, reader: DraftReader) -> None:
        """From now on the reader hears of the stream's sequences; `detach` ends that."""
        self._readers[stream] = reader

    def detach(self, stream: int, sequences: Sequence[SequenceId]) -> None:
        """The stream is over, and so are its sequences."""
        del self._readers[stream]
        self.forget(sequences)

    async def tell(self, news: Sequence[DraftTold]) -> None:
        """Tells the model; waits while it has not taken what it was told before."""
        while len(self._news) >= _MOST_NEWS:
            self._room.clear()
            await self._room.wait()
        self._add([partial(self._model.tell, self._announced(told)) for told in news])

    def forget(self, sequences: Sequence[SequenceId]) -> None:
        """The sequences are gone."""
        self._add([partial(self._model.forget, id) for id in sequences])

    def _add(self, news: Sequence[Callable[[], None]]) -> None:
        with self._line:
            self._news += news
            self._line.notify()

    def _announced(self, told: DraftTold) -> DraftTold:
        """The same; begins with the rules of a sequence that has some."""
        sampling = None if told.terms is None else told.terms.sampling
        if sampling is None or self._ruling is None or self._tasks is None:
            return told
        if not (sampling.grammar or sampling.bad_words):
            return told
        self._tasks.create_task(self._rule(told.id, told.terms))
        return replace(told, ruled=True)

    async def _rule(self, id: SequenceId, terms: DraftTerms | None) -> None:
        assert terms is not None and self._ruling is not None
        try:
            sampling = replace(terms.sampling, stop_token_ids=terms.stops)
            rules = await self._ruling.of(sampling, terms.prompt)
        except EngineError:  # who asked knows it, too, and checks what it gets
            rules = FREE
        except Exception:  # of this sequence alone
            _LOG.exception("the rules of a sequence can't be made; it is drafted for without them")
            rules = FREE
        self._add([partial(self._model.rule, id, rules)])

    # Blocks

    def _pass_on(self, kv: KvAnswers, news: DraftBlockNews) -> None:
        """Has blocks fetched, and offered."""
        kv.moved(news.moves)
        for blocks in news.full:
            kv.offer(blocks, partial(self._return, partial(self._model.give_back, blocks)))
        for blocks in news.lacking:
            if self._tasks is None:
                self._return(partial(self._model.stored, blocks, 0))
            else:
                self._tasks.create_task(self._fetch(kv, blocks)).add_done_callback(partial(self._fetched, blocks))

    async def _fetch(self, kv: KvAnswers, blocks: DraftBlocks) -> int:
        try:
            return await kv.fetch(blocks)
        except Exception:  # of these blocks alone: they are computed
            _LOG.exception("the blocks of a sequence can't be fetched")
            return 0

    def _fetched(self, blocks: DraftBlocks, fetch: asyncio.Task[int]) -> None:
        self._return(partial(self._model.stored, blocks, 0 if fetch.cancelled() else fetch.result()))

    def _return(self, call: Callable[[], None]) -> None:
        with self._line:
            self._returns.append(call)
            self._line.notify()

    async def drop(self, owner: bytes) -> DraftDropped:
        """Has what was computed for an owner found by nobody any more; what sequences use stays until they are over."""
        dropped: asyncio.Future[DraftDropped] = self._loop.create_future()

        def drop() -> None:
            try:
                found: DraftDropped | Exception = self._model.drop(owner)
            except Exception as error:  # of this order alone
                found = error
            self._loop.call_soon_threadsafe(_settle, dropped, found)

        self._return(drop)
        return await dropped

    def load(self) -> router_pb2.DraftLoad:
        """What there is, for people."""
        stats = self._model.stats()
        return router_pb2.DraftLoad(
            workers=len(self._readers),
            sequences=stats.sequences,
            pages=stats.pages,
            free_pages=stats.free_pages,
            guessed=self._guessed,
            dropped=stats.dropped,
            computed=stats.computed,
            resident=stats.reused,
            fetched=stats.fetched,
            busy_s=self._busy_s,
        )

    # The thread

    async def run(self) -> None:
        """Works until cancelled. After a failure nothing is known any more, and all streams are over."""
        threads = started_threads(1, "draft")
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await to_its_end(threads, self._work, stop=self._close)
        finally:
            self._close()
            threads.shutdown()
            self._closing, self._tasks = False, None
            self._news.clear()
            for reader in list(self._readers.values()):
                reader.end()

    def _close(self) -> None:
        with self._line:
            self._closing = True
            self._line.notify()

    def _work(self) -> None:
        """In the thread."""
        made = DraftStep()
        self._model.begin()
        try:
            while self._wait(made.worked):
                began = time.perf_counter()
                made = self._model.step()
                self._busy_s += time.perf_counter() - began
                if made.says:
                    self._loop.call_soon_threadsafe(self._hand_out, made)
        finally:
            self._model.clear()

    def _wait(self, worked: bool) -> bool:
        """Takes the news in. Waits for them if there was nothing to do before; False when it is time to end."""
        with self._line:
            if not (worked or self._news or self._returns or self._closing):
                self._line.wait(_AGAIN_S)
            news, self._news = self._news, []
            returns, self._returns = self._returns, []
            closing = self._closing
        if len(news) >= _MOST_NEWS:
            self._loop.call_soon_threadsafe(self._room.set)
        for each in (*returns, *news):
            each()
        return not closing

    def _hand_out(self, made: DraftStep) -> None:
        if self._kv is not None:
            self._pass_on(self._kv, made.blocks)
        self.metrics.proposals.inc(len(made.leads))
        guessed = sum(len(lead.tokens) for lead in made.leads)
        self._guessed += guessed
        self.metrics.tokens.inc(guessed)
        leads: dict[int, list[DraftLead]] = {}
        refused: dict[int, list[SequenceId]] = {}
        for lead in made.leads:
            leads.setdefault(lead.id[0], []).append(lead)
        for id in made.refused:
            refused.setdefault(id[0], []).append(id)
        for stream in leads.keys() | refused.keys():
            reader = self._readers.get(stream)
            if reader is not None:
                reader.take(leads.get(stream, []), refused.get(stream, []))

    def _figures(self) -> dict[str, float]:
        stats = self._model.stats()
        return {
            DraftMetrics.BUSY_S: self._busy_s,
            DraftMetrics.SEQUENCES: stats.sequences,
            DraftMetrics.FREE_PAGES: stats.free_pages,
            DraftMetrics.DROPPED: stats.dropped,
            DraftMetrics.EVICTED: stats.evicted,
            DraftMetrics.REFUSED: stats.refused,
        }

    def _told_tokens(self) -> dict[str, int]:
        stats = self._model.stats()
        return {"computed": stats.computed, "pages": stats.reused, "store": stats.fetched}


def _settle(dropped: asyncio.Future[DraftDropped], found: DraftDropped | Exception) -> None:
    if dropped.done():
        return  # nobody waits any more
    if isinstance(found, Exception):
        dropped.set_exception(found)
    else:
        dropped.set_result(found)


@asynccontextmanager
async def open_drafts(
    model: Foresight,
    description: Description,
    ruling: Ruling | None = None,
    *,
    metrics: DraftMetrics | None = None,
    kv: KvAnswers | None = None,
) -> AsyncIterator[Drafts]:
    """A draft model at work for the length of the block."""
    drafts = Drafts(model, description, ruling, metrics=metrics or DraftMetrics(), kv=kv)
    async with beside(drafts.run, name="drafting", on_failure="restart", failed=drafts.metrics.task_failed):
        yield drafts


@dataclass(frozen=True)
class LoadedDraft:
    """What a draft service works with."""

    model: DraftModel | HeadForesight
    description: Description
    ruling: Ruling


def load_draft(config: DraftConfig) -> LoadedDraft:
    """The model that the settings name, or the head for it. Raises ConfigError for a directory that is neither."""
    from penstock.engine.forward.model import set_threads
    from penstock.engine.grammars import RequestRules
    from penstock.engine.speculation.draft_model import DraftModel

    set_threads(config.threads)  # this thread loads, and decides how many compute
    if config.head not in ("", "none"):
        return _load_head(config)
    try:
        pool = config.engine(config.kv_pool_tokens or _room(config))
        model = DraftModel(pool, stores=bool(config.kvstore), seals=config.seal)
        checkpoint = model.checkpoint
        description = Description(tokenizer_fingerprint(checkpoint), partial(vocabulary, checkpoint))
    except CheckpointError as error:
        raise ConfigError("model", config.model, str(error)) from error
    return LoadedDraft(model, description, RequestRules(checkpoint, drafting=True))


def _load_head(config: DraftConfig) -> LoadedDraft:
    from penstock.checkpoint import inspect, inspect_head
    from penstock.engine.grammars import RequestRules
    from penstock.engine.speculation.head.foresight import HeadForesight

    try:
        target = inspect(config.model)
    except CheckpointError as error:
        raise ConfigError("model", config.model, str(error)) from error
    try:
        head = inspect_head(config.head, target)
        room = _fitting(config, kv_token_bytes("float32", 1, KvForm(2, head.n_kv_heads, head.head_dim)))
        model = HeadForesight(config.engine(config.kv_pool_tokens or room), target, head)
    except CheckpointError as error:
        raise ConfigError("head", config.head, str(error)) from error
    description = Description(tokenizer_fingerprint(target), partial(vocabulary, target), head.layers, head.hidden_size)
    return LoadedDraft(model, description, RequestRules(target, drafting=True))


def _room(config: DraftConfig) -> int:
    """Tokens for whose KV there is memory."""
    from penstock.checkpoint import inspect
    from penstock.engine.checks import settled

    checkpoint = inspect(config.model)
    engine, shape = settled(config.engine(1), checkpoint), checkpoint.config
    return _fitting(config, kv_token_bytes(engine.kv, shape.n_layers, shape.kv))


def _fitting(config: DraftConfig, size: int) -> int:
    """The same of tokens of `size` bytes."""
    memory = memory_bytes() if config.device == "cpu" else gpu_bytes()
    return min(max(memory // _POOL_SHARE // size, _LEAST_TOKENS), _MOST_TOKENS)
