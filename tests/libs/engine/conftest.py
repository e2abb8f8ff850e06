"""Models, engines, readers, sources, sinks and drafters that the engine's tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.hooks import DraftAsk, KvSink, KvSource, LoadResult, PageRef, PageWriter
from penstock.engine.request import Request, SamplingParams, TokenOut, Update
from penstock.kv.identity import Chain
from penstock.testing.checkpoints import write_checkpoint
from penstock.testing.drafters import InlineDrafter


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny models gain nothing from a second thread, and test machines are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A Llama of three layers."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture
def config(tiny) -> EngineConfig:
    return EngineConfig(
        model=tiny,
        kv_pool_tokens=4096,
        max_batch_tokens=128,
        max_running=16,
        threads=1,
        draft_timeout_s=30,
        lookup_tokens=0,
        draft_always=True,
    )


@dataclass
class Answer:
    """Everything one reader saw."""

    updates: list[Update] = field(default_factory=list)

    @property
    def tokens(self) -> list[TokenOut]:
        return [token for update in self.updates for token in update.tokens]

    @property
    def ids(self) -> list[int]:
        return [token.token for token in self.tokens]

    @property
    def last(self) -> Update:
        return self.updates[-1]


class Kit:
    """Helpers as one fixture: test modules cannot import each other."""

    Answer = Answer
    LoadResult = LoadResult
    TokenOut = TokenOut

    async def read(
        self,
        engine: Engine,
        request: Request,
        source: KvSource | None = None,
        sink: KvSink | None = None,
        chain: Chain | None = None,
    ) -> Answer:
        answer = Answer()
        async with aclosing(engine.generate(request, source, sink, chain=chain)) as updates:
            async for update in updates:
                answer.updates.append(update)
        return answer

    async def read_all(self, engine: Engine, requests: Sequence[Request]) -> list[Answer]:
        return await asyncio.gather(*[self.read(engine, request) for request in requests])

    def greedy(self, max_tokens: int = 24, **fields) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, temperature=0.0, **{"ignore_eos": True, **fields})

    def seeded(self, seed: int, max_tokens: int = 24, **fields) -> SamplingParams:
        fields = {"ignore_eos": True, "temperature": 0.9, "top_p": 0.95, **fields}
        return SamplingParams(max_tokens=max_tokens, seed=seed, **fields)

    def request(self, id: str, length: int, sampling: SamplingParams) -> Request:
        """A prompt of `length` tokens that depends on the id."""
        generator = torch.Generator().manual_seed(sum(map(ord, id)))
        prompt = torch.randint(0, 256, (length,), generator=generator).tolist()
        return Request(id, tuple(prompt), sampling)

    def mixed(self, **fields) -> list[Request]:
        """Greedy and seeded requests of many lengths, some with penalties, all with logprobs."""
        fields = {"logprobs": 3, **fields}
        return [
            self.request("a", 1, self.greedy(**fields)),
            self.request("b", 15, self.seeded(1, **fields)),
            self.request("c", 16, self.greedy(repetition_penalty=1.3, **fields)),
            self.request("d", 17, self.seeded(2, presence_penalty=0.7, frequency_penalty=0.4, **fields)),
            self.request("e", 90, self.greedy(min_tokens=9, **{**fields, "ignore_eos": False})),
            self.request("f", 150, self.seeded(3, top_k=20, logit_bias={5: 3.0, 9: -4.0}, **fields)),
            self.request("g", 300, self.seeded(4, min_p=0.05, **fields)),
        ]

    def assert_same(self, one: Answer, other: Answer) -> None:
        """Same tokens, same indices, logprobs to 1e-4, same end."""
        assert [(token.index, token.token) for token in one.tokens] == [
            (token.index, token.token) for token in other.tokens
        ]
        for a, b in zip(one.tokens, other.tokens, strict=True):
            assert (a.logprob is None) == (b.logprob is None)
            if a.logprob is not None:
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
                assert dict(a.top) == pytest.approx(dict(b.top), abs=1e-4)
        assert one.last.finish == other.last.finish

    Sink: Callable[..., Sink]
    Source: Callable[..., Source]
    Drafts: Callable[..., Drafts]
    renamed = staticmethod(lambda request, id: replace(request, id=id))


class Sink:
    """Keeps copies of all that is reported; with `hold` the pages too, until `release`."""

    def __init__(self, hold: bool = False) -> None:
        self.blocks: dict[int, bytes] = {}
        self.tokens: dict[int, tuple[int, ...]] = {}
        self.valid_tokens: int | None = None
        self.tail: bytes | None = None
        self.held: list[PageRef] = []
        self.set_backs = 0
        self._hold = hold

    def filled(self, first_block: int, pages: Sequence[PageRef], tokens: Sequence[int]) -> None:
        assert not self.blocks or first_block == max(self.blocks) + 1, "blocks come in order, each once"
        for number, page in enumerate(pages, start=first_block):
            self.blocks[number] = self._take(page)
            self.tokens[number] = tuple(tokens[number * 16 : number * 16 + 16])

    def set_back(self) -> None:
        self.set_backs += 1

    def finished(self, valid_tokens: int, tail: PageRef | None) -> None:
        assert self.valid_tokens is None
        self.valid_tokens = valid_tokens
        self.tail = None if tail is None else self._take(tail)

    def _take(self, page: PageRef) -> bytes:
        content = bytearray(page.view().nbytes)
        page.read_into(memoryview(content))
        assert page.view().readonly and bytes(page.view()) == bytes(content)
        if self._hold:
            self.held.append(page)
        else:
            page.release()
            page.release()
        return bytes(content)

    def release(self) -> None:
        for page in self.held:
            page.release()


class Source:
    """Writes given blocks, `step` at a time, and answers `result` (default: what was written)."""

    def __init__(
        self,
        blocks: Sequence[bytes],
        result: int | LoadResult | BaseException | None = None,
        step: int = 1000,
        gate: asyncio.Event | None = None,
    ) -> None:
        self.blocks = blocks
        self.result = result
        self.step = step
        self.gate = gate
        self.writer: PageWriter | None = None
        self.written = 0
        self.started = asyncio.Event()

    async def load(self, pages: PageWriter) -> int | LoadResult:
        self.writer = pages
        while self.written < len(self.blocks):
            part = [memoryview(block) for block in self.blocks[self.written : self.written + self.step]]
            count = await pages.write(self.written, part)
            self.written += count
            if count < len(part):
                break
        self.started.set()
        if self.gate is not None:
            await self.gate.wait()
        if isinstance(self.result, BaseException):
            raise self.result
        return self.written * pages.block_size if self.result is None else self.result


class Drafts(InlineDrafter):
    """Answers by a function of the ask; remembers what it was asked and told to forget."""

    def __init__(self, propose: Callable[[DraftAsk], Sequence[int]]) -> None:
        super().__init__(propose)
        self.asked: list[str] = []
        self.forgotten: list[str] = []

    def tell(self, asks: Sequence[DraftAsk]) -> None:
        self.asked.extend(ask.id for ask in asks if ask.k)
        super().tell(asks)

    def forget(self, id: str) -> None:
        self.forgotten.append(id)
        super().forget(id)


Kit.Sink, Kit.Source, Kit.Drafts = Sink, Source, Drafts


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()
