"""The draft model's KV and a real store: what was computed once is fetched, and a bad store costs the fetch alone."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from tests.mesh.support import process, until

from penstock.draft.config import DraftConfig
from penstock.draft.kv import open_draft_kv
from penstock.draft.service import open_draft
from penstock.engine.config import EngineConfig
from penstock.engine.hooks import DraftTerms
from penstock.engine.request import SamplingParams
from penstock.engine.speculation.draft_model import DraftModel
from penstock.engine.speculation.leads import DraftBlocks, DraftTold
from penstock.kv.identity import block_keys, root_key
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.service import KvStore, open_kvstore
from penstock.runtime.metrics import DraftMetrics
from penstock.testing.checkpoints import TinyModel, write_checkpoint
from penstock.v1 import common_pb2, draft_pb2, draft_pb2_grpc

BLOCK = 16
ONE, TWO = b"1" * 16, b"2" * 16
GREEDY = common_pb2.Sampling(max_tokens=1000, repetition_penalty=1.0, top_p=1.0, ignore_eos=True)
STORE: dict[str, Any] = {"host_bytes": 1 << 20, "draft_bytes": 16 << 20, "host_id": "test"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = TinyModel(vocab_size=260, max_positions=2048, seed=3)
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", model)


@pytest.fixture(scope="module")
def guesses(tiny: Path) -> Iterator[Callable[[Sequence[int]], list[int]]]:
    """What the model guesses behind a text, computed alone."""
    model = DraftModel(EngineConfig(model=tiny))

    sampling = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)

    def guessed(tokens: Sequence[int]) -> list[int]:
        model.clear()
        model.tell(DraftTold((1, 1), 1, 0, tokens, 3, DraftTerms(sampling, len(tokens), frozenset())))
        found: list[int] = []
        while len(found) < 3:
            found += [token for lead in model.step().leads for token in lead.tokens]
        return found

    yield guessed


def text(name: str, length: int) -> list[int]:
    source = Random(name)
    return [source.randrange(256) for _ in range(length)]


class Service:
    """A draft service, and one worker of it."""

    def __init__(self, metrics: DraftMetrics, call: Any) -> None:
        self.metrics = metrics
        self._call = call
        self._number = 0

    async def tell(self, tokens: Sequence[int], owner: bytes = ONE) -> int:
        self._number += 1
        terms = draft_pb2.DraftTerms(sampling=GREEDY, prompt=len(tokens), owner=owner, session="talk")
        sequence = draft_pb2.DraftSequence(id=self._number, tokens=tokens, k=3, terms=terms)
        await self._call.write(draft_pb2.DraftNews(number=self._number, sequences=[sequence]))
        return self._number

    async def guess(self, tokens: Sequence[int], owner: bytes = ONE) -> list[int]:
        """Three tokens behind these, of a sequence of their own."""
        id, found = await self.tell(tokens, owner), list[int]()
        async with asyncio.timeout(20):
            while len(found) < 3:
                leads = await self._call.read()
                assert set(leads.ids) == {id} and not leads.refused
                found += leads.tokens
        await self._call.write(draft_pb2.DraftNews(number=self._number + 1, forget=[id]))
        self._number += 1
        return found

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"penstock_{name}_total", labels) or 0.0

    @property
    def told(self) -> dict[str, float]:
        return {source: self.value("draft_told_tokens", source=source) for source in ("computed", "pages", "store")}


@asynccontextmanager
async def serving(model: Path, store: str, **settings: Any) -> AsyncIterator[Service]:
    config = DraftConfig(model=str(model), kvstore=store, host_id="test", kv_pool_tokens=4096, **settings)
    async with open_draft(config) as served, grpc.aio.insecure_channel(served.address) as channel:
        call = draft_pb2_grpc.DraftStub(channel).Propose()
        yield Service(served.metrics, call)
        call.cancel()


def kept(store: KvStore) -> int:
    """Blocks in the memory for drafts."""
    [part] = [part for part in store.partitions if part.draft]
    return part.store.stats().blocks


async def test_the_next_turn_is_fetched_by_a_service_that_was_started_again(tiny: Path, guesses: Any) -> None:
    first, second = text("one", 400), [*text("one", 400), *text("two", 90)]
    async with open_kvstore(KvStoreConfig(**STORE)) as store:
        async with serving(tiny, store.address) as service:
            assert await service.guess(first) == guesses(first)
            assert service.told == {"computed": 400, "pages": 0, "store": 0}
            await until(lambda: service.value("blocks_published") == 25, "its blocks are stored")
            assert kept(store) == 25
            assert await service.guess(second) == guesses(second)
            assert service.told == {"computed": 490, "pages": 400, "store": 0}
            await until(lambda: kept(store) == 30, "those of the second, too")
            await until(lambda: service.value("blocks_touched") == 25, "the store hears that the others were used")
            await until(lambda: service.value("blocks_published") == 30, "each was stored once")
        async with serving(tiny, store.address) as service:
            assert await service.guess(second) == guesses(second)
            assert service.told == {"computed": 10, "pages": 0, "store": 480}
            assert service.value("blocks_fetched") == 30
            assert await service.guess(second, TWO) == guesses(second), "another tenant's"
            assert service.told == {"computed": 500, "pages": 0, "store": 480}
            assert await service.guess(second) == guesses(second)
            assert service.told == {"computed": 510, "pages": 480, "store": 480}
            await until(lambda: service.value("blocks_published") == 30, "the other tenant's, not what the store gave")
            assert kept(store) == 60


async def test_a_text_without_a_tenant_stays_here(tiny: Path, guesses: Any) -> None:
    async with open_kvstore(KvStoreConfig(**STORE)) as store, serving(tiny, store.address) as service:
        assert await service.guess(text("none", 200), b"") == guesses(text("none", 200))
        assert await service.guess(text("some", 200)) == guesses(text("some", 200))
        await until(lambda: kept(store) == 12, "the other text is stored")


@pytest.mark.parametrize("fault", ["no memory for drafts", "nobody there"])
async def test_without_a_store_that_takes_it_everything_is_computed(tiny: Path, guesses: Any, fault: str) -> None:
    async with open_kvstore(KvStoreConfig(**{**STORE, "draft_bytes": 0})) as store:
        address = store.address if fault == "no memory for drafts" else "127.0.0.1:1"
        async with serving(tiny, address) as service:
            for _ in range(2):
                assert await service.guess(text("x", 200)) == guesses(text("x", 200))
            assert service.told == {"computed": 208, "pages": 192, "store": 0}


async def test_kill_9_of_the_store(tiny: Path, guesses: Any) -> None:
    """While a text is fetched, and before the next: both are computed. One that is started again is used again."""
    arguments = ("--host-bytes", "1MiB", "--draft-bytes", "16MiB", "--host-id", "test")
    async with process("kvstore", *arguments) as (address, pid), serving(tiny, address) as service:
        assert await service.guess(text("kill", 600)) == guesses(text("kill", 600))
        await until(lambda: service.value("blocks_published") == 37, "it is stored")
        os.kill(pid, signal.SIGSTOP)  # so that the fetch is under way for certain
        told = asyncio.ensure_future(service.guess(text("next", 600)))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        assert await told == guesses(text("next", 600))
        assert await service.guess(text("kill", 620)) == guesses(text("kill", 620))
        assert service.told["store"] == 0
        async with process("kvstore", *arguments, "--address", address):
            fresh = iter(range(1000))

            async def stored() -> None:
                while not service.value("blocks_published") > 37:
                    name = f"again{next(fresh)}"
                    assert await service.guess(text(name, 100)) == guesses(text(name, 100))

            await asyncio.wait_for(stored(), 20)


async def test_a_store_that_hangs_is_waited_for_once(tiny: Path, guesses: Any) -> None:
    """For no longer than a second while nobody knows how long computing takes; others are served meanwhile."""
    arguments = ("--host-bytes", "1MiB", "--draft-bytes", "16MiB", "--host-id", "test")
    async with process("kvstore", *arguments) as (address, pid), serving(tiny, address) as service:
        assert await service.guess(text("short", 30)) == guesses(text("short", 30))
        os.kill(pid, signal.SIGSTOP)
        try:
            long = await service.tell(text("long", 700))
            short, leads = await service.tell(text("other", 40)), list[int]()
            async with asyncio.timeout(20):
                while long not in leads:
                    leads += (await service._call.read()).ids
            assert leads[0] == short, "it did not wait for the long one"
            assert service.value("store_faults", what="fetch") == 1
            began = time.monotonic()
            for number in range(5):
                await service.tell(text(f"{number}", 300))
            seen: set[int] = set()
            async with asyncio.timeout(20):
                while len(seen) < 5:
                    seen |= set((await service._call.read()).ids) - {long, short}
            assert service.value("store_faults", what="fetch") == 1, "nobody waited again"
            assert time.monotonic() - began < 4, "less than the pause"
        finally:
            os.kill(pid, signal.SIGCONT)


async def test_blocks_that_are_damaged_are_computed(tiny: Path, guesses: Any) -> None:
    """The store says that it has them, and has others."""
    tokens = text("damaged", 200)
    async with open_kvstore(KvStoreConfig(**STORE)) as store:
        async with serving(tiny, store.address) as service:
            await service.guess(tokens)
            await until(lambda: kept(store) == 12, "its blocks are stored")
        [part] = [part for part in store.partitions if part.draft]
        arena = part.host.arena
        for slot in range(3, 6):
            arena.block(slot, part.specs[0].block_bytes)[100] ^= 1
        async with serving(tiny, store.address) as service:
            assert await service.guess(tokens) == guesses(tokens)
            assert 0 < service.told["store"] < 192 and sum(service.told.values()) == 200


async def test_blocks_have_the_names_that_the_identity_says(tiny: Path) -> None:
    tokens = text("names", 100)
    async with open_kvstore(KvStoreConfig(**STORE)) as store, serving(tiny, store.address) as service:
        await service.guess(tokens)
        await until(lambda: kept(store) == 6, "its blocks are stored")
        [part] = [part for part in store.partitions if part.draft]
        keys = block_keys(root_key(part.specs[0], ONE), tokens, BLOCK)
        assert part.store.lookup(keys) == 6


async def test_what_is_computed_sooner_is_not_fetched_but_now_and_then(tiny: Path) -> None:
    """As soon as it is known how long fetching takes."""
    model, metrics = DraftModel(EngineConfig(model=tiny, kv_pool_tokens=1024), stores=True), DraftMetrics()
    names, given_back = [bytes([number]) * 32 for number in range(1, 7)], asyncio.Event()

    def blocks(block_s: float, first_page: int) -> DraftBlocks:
        terms = DraftTerms(SamplingParams(max_tokens=9), 1, frozenset(), ONE)
        pages = range(first_page, first_page + 6)
        return DraftBlocks(
            id=(1, 1), holder="", terms=terms, first=0, parent=b"0" * 32, keys=names, pages=pages, block_s=block_s
        )

    async with open_kvstore(KvStoreConfig(**STORE)) as store:
        config = DraftConfig(model=str(tiny), kvstore=store.address, host_id="test")
        async with open_draft_kv(config, model, metrics) as kv:
            assert kv is not None
            for page in range(1, 7):
                model.memory.data[page] = page
            kv.offer(blocks(1.0, 1), given_back.set)
            await asyncio.wait_for(given_back.wait(), 10)
            assert await kv.fetch(blocks(1e-9, 11)) == 6, "nothing is known"
            assert [model.memory.view(page) == model.memory.view(page - 10) for page in range(11, 17)] == [True] * 6
            assert [await kv.fetch(blocks(1e-9, 21)) for _ in range(16)] == [0] * 15 + [6]
            assert await kv.fetch(blocks(1.0, 21)) == 6
    assert metrics.registry.get_sample_value("penstock_store_faults_total", {"what": "fetch"}) is None
