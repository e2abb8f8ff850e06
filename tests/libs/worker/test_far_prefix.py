"""A worker of a model that forgets, its store and what befalls them: no step looks at a near part that is not there,
and the tokens are those of an engine that computes everything."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.services.kvstore.helpers import HOST, settings

from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.hooks import PageWriter, PartedWriter
from penstock.engine.request import Request, SamplingParams, TokenOut
from penstock.engine.scheduling.live import Live
from penstock.kv.client.client import Origin, StoreClient, open_store
from penstock.kv.identity import Chain
from penstock.kv.parts import BlockParts, far_key, parted
from penstock.kv.sealing import sealed
from penstock.kvstore.service import KvStore, open_kvstore
from penstock.rpc.channels import open_channels
from penstock.runtime.metrics import WorkerMetrics
from penstock.testing.checkpoints import TINY_LLAMA_4, TinyModel, write_checkpoint
from penstock.worker import fetching
from penstock.worker.fetching import Fetcher, StoredPrefix
from penstock.worker.lending import PageLending
from penstock.worker.publishing import BlockPublisher, BlockSink, open_publisher
from penstock.worker.stored import StoredKeys

SIZE = 16
ROOT = b"r" * 32
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
SLIDING = {"sliding_window": 40, "query_pre_attn_scalar": 16}
KINDS = {
    "gemma 3": TinyModel(
        "Gemma3ForCausalLM", vocab_size=260, layers=6, seed=5, extra={**SLIDING, "sliding_window_pattern": 3}
    ),
    "llama 4": TINY_LLAMA_4,
    "every layer slides": TinyModel("MistralForCausalLM", vocab_size=260, seed=3, extra={"sliding_window": 40}),
}


@pytest.fixture(scope="module", params=KINDS)
def model(request: Any, tmp_path_factory: Any) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("forgets") / "model", KINDS[request.param])


def config_of(model: Path, pages: int = 300) -> EngineConfig:
    return EngineConfig(model=model, kv_pool_tokens=pages * SIZE, max_batch_tokens=128, threads=1, lookup_tokens=0)


async def read(engine: Engine, request: Request, **how: Any) -> list[TokenOut]:
    found: list[TokenOut] = []
    async with aclosing(engine.generate(request, **how)) as updates:
        async for update in updates:
            found += update.tokens
    return found


@pytest.fixture(scope="module")
async def alone(model: Path) -> AsyncIterator[Engine]:
    async with Engine.open(config_of(model)) as engine:
        yield engine


@dataclass
class Bench:
    """An engine, its store and its client, as a worker has them."""

    engine: Engine
    alone: Engine
    store: KvStore
    client: StoreClient
    publisher: BlockPublisher
    parts: BlockParts
    seal: bytes = b""
    asked: int = 0
    expected: dict[tuple[int, ...], list[TokenOut]] = field(default_factory=dict)
    tiers: Counter[str] = field(default_factory=Counter)

    async def says(self, *prompts: tuple[int, ...]) -> None:
        """Asks for all of them at a time; the tokens are those of the engine that computes everything."""
        found = await asyncio.gather(*[self._answer(prompt) for prompt in prompts])
        for prompt, tokens in zip(prompts, found, strict=True):
            if prompt not in self.expected:
                self.expected[prompt] = await read(self.alone, Request("alone", prompt, GREEDY))
            expected = self.expected[prompt]
            assert [one.token for one in tokens] == [one.token for one in expected]
            for one, other in zip(tokens, expected, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)

    async def _answer(self, prompt: tuple[int, ...]) -> list[TokenOut]:
        self.asked += 1
        chain = Chain(ROOT, SIZE, prompt)
        fetcher = Fetcher(
            store=self.client,
            metrics=WorkerMetrics(),
            keys=list(chain.keys),
            known=self.publisher.known,
            block_size=SIZE,
            reach=self.parts.reach,
            origin=Origin(namespace=bytes(16), seal=self.seal),
        )
        sink = BlockSink(self.publisher, chain, origin=fetcher.origin)
        source = StoredPrefix(fetcher, (len(prompt) - 1) // SIZE, sink.loaded)
        tokens = await read(
            self.engine, Request(str(self.asked), prompt, GREEDY), source=source, sink=sink, chain=chain
        )
        async with asyncio.timeout(10):
            while not sink.settled:
                sink.changed.clear()
                await sink.changed.wait()
        self.tiers.update(fetcher.tiers)
        return tokens

    async def lose_pages(self, share: float, luck: random.Random) -> None:
        """As if others had needed them: what is lent is saved before."""
        pool, lending = self.engine.pool, self.publisher.lending
        if lending is not None:
            await self.client.lending.save(list(lending._loans))
        pool.forget(page for page in range(1, pool.total + 1) if luck.random() < share)

    def damage(self, key: bytes, at: int) -> None:
        block = self.store.host.table.find(key)
        if block is not None:
            self.store.host.view(block)[at] ^= 1

    def lose(self, key: bytes) -> None:
        block = self.store.host.table.find(key)
        if block is not None:
            attachment = self.client.attachment
            assert self.store.host.table.quarantine(attachment, key, block.epoch, self.store.store.now())


@asynccontextmanager
async def bench(
    model: Path,
    alone: Engine,
    *,
    pages: int = 300,
    blocks: int = 400,
    host: str = HOST,
    seal: bytes = b"",
    **other: bool,
) -> AsyncIterator[Bench]:
    """`other` are settings of the engine."""
    settings_of = replace(config_of(model, pages), **other)
    metrics = WorkerMetrics()
    async with Engine.open(settings_of) as engine, open_channels() as channels:
        parts = engine.parts
        assert parts is not None
        _watch(engine, parts)
        spec = sealed(engine.spec, parts) if seal else parted(engine.spec)
        stride = -(-spec.block_bytes // 64) * 64
        async with (
            open_kvstore(settings(blocks, stride)) as store,
            open_store(channels.to(store.address, "store"), "test", spec, host, parts=parts) as client,
        ):
            known = StoredKeys(client, engine.pool, metrics)
            lending = None
            if engine.arena is not None:
                lending = PageLending(client, engine.pool, engine.arena, known=known, metrics=metrics)
            async with open_publisher(
                client, metrics, 200, known=known, finite=engine.finite, lending=lending
            ) as publisher:
                yield Bench(engine, alone, store, client, publisher, parts, seal)
            assert client.stats.late_commits == 0


def _watch(engine: Engine, parts: BlockParts) -> None:
    """Every step is looked at: its rows see whole blocks only, in layers that forget."""
    scheduler: Any = engine._scheduler
    planned = scheduler.next_step

    def next_step(*how: Any, **more: Any) -> list[Live]:
        step: list[Live] = planned(*how, **more)
        for live in step:
            first = parts.reach.first(live.run.start) // SIZE
            seen = live.pages[first : -(-live.run.end // SIZE)]
            assert not any(map(engine.pool.far, seen)), f"{live.id} looks at a near part that is not there"
        return step

    scheduler.next_step = next_step


def text(name: str, length: int) -> tuple[int, ...]:
    return tuple(random.Random(name).choices(range(256), k=length))


BASE = text("base", 40 * SIZE + 3)
WAYS: dict[str, dict[str, Any]] = {
    "copies": {},
    "lends": {"shared_pages": True},
    "streams": {"host": "elsewhere"},
    "seals": {"seal": b"s" * 32},
    "seals and streams": {"seal": b"s" * 32, "host": "elsewhere"},
}


@pytest.mark.parametrize("host", [HOST, "elsewhere"], ids=["mapped", "streamed"])
async def test_little_is_fetched_of_a_long_prefix(model: Path, alone: Engine, host: str) -> None:
    async with bench(model, alone, host=host) as one:
        await one.says(BASE)
        one.engine.pool.forget(range(1, 301))
        await one.says(BASE + text("more", 40))
        stats, far = one.client.stats, one.parts.reach.far(40, SIZE)
        assert (stats.fetched, stats.far) == (40, far) and far >= 36
        assert stats.bytes_in == far * one.parts.far_bytes + (40 - far) * (one.parts.block_bytes + 16)
        keys = Chain(ROOT, SIZE, BASE).keys
        assert all(one.engine.pool.find(key) is None for key in keys[:far])
        assert all(one.engine.pool.find(far_key(key)) for key in keys[:far])


async def test_far_parts_are_shared_and_not_fetched_again(model: Path, alone: Engine) -> None:
    async with bench(model, alone) as one:
        await one.says(BASE)
        one.engine.pool.forget(range(1, 301))
        await one.says(*[BASE + text(f"agent {number}", 30 + number) for number in range(4)])
        assert one.client.stats.fetched == 40, "once for all"
        await one.says(BASE + text("later", 50))
        assert one.client.stats.fetched == 40
        assert one.publisher.known.leading(Chain(ROOT, SIZE, BASE).keys) == 40, "the store is known to have them"


async def test_a_shorter_prefix_has_its_near_parts_fetched(model: Path, alone: Engine) -> None:
    async with bench(model, alone) as one:
        await one.says(BASE)
        one.engine.pool.forget(range(1, 301))
        await one.says(BASE + text("more", 40))
        before, far = one.client.stats.fetched, one.parts.reach.far(20, SIZE)
        await one.says(BASE[: 20 * SIZE] + text("another end", 40))
        assert 20 - far <= one.client.stats.fetched - before <= 20 - far + 2
        pool, keys = one.engine.pool, Chain(ROOT, SIZE, BASE).keys
        assert all(pool.find(key) for key in keys[far:20]), "whole ones are here now"


@pytest.mark.parametrize("host", [HOST, "elsewhere"], ids=["mapped", "streamed"])
@pytest.mark.parametrize("at", range(4, 40, 7))
@pytest.mark.parametrize("part", ["far", "near"])
async def test_a_block_that_is_wrong_ends_the_prefix_where_it_can_end(
    model: Path, alone: Engine, host: str, at: int, part: str
) -> None:
    """A near part is looked at where it is needed, and else stays what it is."""
    async with bench(model, alone, host=host) as one:
        keys, far = Chain(ROOT, SIZE, BASE).keys, one.parts.reach.far(40, SIZE)
        if part == "far" and not one.parts.far:
            pytest.skip("there is none")
        await one.says(BASE)
        one.engine.pool.forget(range(1, 301))
        one.damage(keys[at], one.parts.far[0][0] if part == "far" else one.parts.near[0][0])
        await one.says(BASE + text("more", 40))
        seen = part == "far" or at >= far
        assert one.client.stats.mismatches == seen
        assert sum(one.tiers.values()) == (at if seen else 40), "everything up to there is used"


async def test_a_far_part_is_not_published_as_a_block(model: Path, alone: Engine) -> None:
    """The store has lost what the worker still uses: it gets what is whole, and the rest when it is computed again."""
    async with bench(model, alone) as one:
        keys, far = Chain(ROOT, SIZE, BASE).keys, one.parts.reach.far(40, SIZE)
        await one.says(BASE)
        one.engine.pool.forget(range(1, 301))
        await one.says(BASE + text("more", 40))
        for key in keys:
            one.lose(key)
        await one.publisher.known.confirm(keys, "")
        await one.says(BASE + text("more of it", 40))
        assert [await one.client.lookup([key]) for key in keys] == [0] * far + [1] * (40 - far)
        one.engine.pool.forget(range(1, 301))
        await one.says(BASE)
        assert await one.client.lookup(keys) == 40


@pytest.mark.parametrize("lost", [False, True])
async def test_a_hand_off_goes_on_behind_far_parts(model: Path, alone: Engine, lost: bool) -> None:
    """A sequence without a source shares pages that have nothing else. Who takes its KV over hears of all blocks, and
    asks the store."""
    async with bench(model, alone) as one:
        keys, prompt = Chain(ROOT, SIZE, BASE).keys, BASE + text("handed over", 40)
        await one.says(BASE)
        one.engine.pool.forget(range(1, 301))
        await one.says(BASE + text("more", 40))
        if lost:
            one.lose(keys[3])
            await one.publisher.known.confirm(keys, "")
        gave_up: list[None] = []
        chain = Chain(ROOT, SIZE, prompt)
        sink = BlockSink(one.publisher, chain, origin=Origin(namespace=bytes(16)), gave_up=lambda: gave_up.append(None))
        await read(one.engine, Request("hands over", prompt, GREEDY), sink=sink, chain=chain)
        async with asyncio.timeout(10):
            while not sink.settled:
                sink.changed.clear()
                await sink.changed.wait()
        assert sink.stored == (sink.valid_tokens or 0) // SIZE > 40
        assert bool(gave_up) == lost, "nobody waits for what will not come"
        assert await one.client.lookup(chain.keys) == (3 if lost else sink.stored)


async def test_what_is_passed_counts_behind_what_is_stored(model: Path, alone: Engine) -> None:
    async with bench(model, alone) as one:
        chain = Chain(ROOT, SIZE, BASE)
        sink = BlockSink(one.publisher, chain)
        sink.passed(3, 4, BASE)
        sink.passed(9, 2, BASE)
        assert sink.stored == 0
        sink.loaded(2)
        assert sink.stored == 2
        sink.loaded(3)
        assert sink.stored == 7
        sink.loaded(9)
        assert sink.stored == 11


class Careless:
    """A source that has the far parts of all blocks, and believes that this is enough."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks

    async def load(self, pages: PageWriter) -> int:
        assert isinstance(pages, PartedWriter)
        contents = [memoryview(bytes(pages.block_bytes))] * self.blocks
        written = await pages.write(0, contents, lambda index, into: True, far=self.blocks)
        pages.settled(written)
        return written * SIZE


async def test_an_engine_takes_no_source_s_word_for_it(model: Path, alone: Engine) -> None:
    async with bench(model, alone) as one:
        request = Request("careless", BASE, GREEDY)
        expected = await read(one.alone, Request("alone", BASE, GREEDY))
        found = await read(one.engine, request, source=Careless(40), chain=Chain(b"o" * 32, SIZE, BASE))
        assert [token.token for token in found] == [token.token for token in expected]


async def test_torch_looks_at_no_more_than_the_kernels(model: Path, alone: Engine) -> None:
    async with bench(model, alone, kernels=False) as one:
        await one.says(BASE)
        one.engine.pool.forget(range(1, 301))
        await one.says(BASE + text("more", 40), BASE + text("and more", 140))
        assert one.client.stats.far == one.parts.reach.far(40, SIZE)


async def test_a_prefix_whose_end_the_store_has_lost(
    model: Path, alone: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there when the load began, and leases are short: the near parts are fetched after all."""
    monkeypatch.setattr(fetching, "_LEASE_BLOCKS", 8)
    async with bench(model, alone) as one:
        keys = Chain(ROOT, SIZE, BASE).keys
        await one.says(BASE)
        one.engine.pool.forget(range(1, 301))
        lookup, leases = one.client.lookup, one.client.lease

        async def lookup_and_lose(names: Any) -> int:
            found = await lookup(names)
            for key in keys[21:]:
                one.lose(key)
            return found

        one.client.lookup = lookup_and_lose  # type: ignore[method-assign]
        await one.says(BASE + text("more", 40))
        assert one.client.lease == leases
        far = one.parts.reach.far(21, SIZE)
        assert sum(one.tiers.values()) == 21
        assert one.client.stats.fetched == 21 + 21 - far, "the last ones twice"


async def test_without_a_store_what_lacks_its_near_part_is_computed(model: Path, alone: Engine) -> None:
    async with bench(model, alone) as one:
        await one.says(BASE)
        one.engine.pool.forget(range(1, 301))
        await one.says(BASE + text("more", 40))
        for key in Chain(ROOT, SIZE, BASE).keys:
            one.lose(key)
        await one.says(BASE[: 20 * SIZE] + text("another end", 40))
        await one.says(BASE + text("one more", 40))


async def test_a_store_that_lacks_near_parts_is_asked_once(model: Path, alone: Engine) -> None:
    """The prefix ends far before them, where none is needed that is not there."""
    async with bench(model, alone, pages=600) as one:
        prompt = text("long", 55 * SIZE + 3)
        await one.says(prompt)
        one.engine.pool.forget(range(1, 601))
        await one.says(prompt + text("more", 40))
        for key in Chain(ROOT, SIZE, prompt).keys:
            one.lose(key)
        leases, asked, patience = one.client.lease, list[int](), list[bool]()
        upto = Fetcher.upto

        def lease(keys: Any, *how: Any, **more: Any) -> Any:
            asked.append(len(keys))
            return leases(keys, *how, **more)

        async def looked_at(*how: Any, compares: bool = False, **more: Any) -> bool:
            patience.append(compares)
            return await upto(*how, compares=compares, **more)

        one.client.lease = lease  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Fetcher, "upto", looked_at)
            await one.says(prompt[: 50 * SIZE] + text("another end", 40))
        assert len(asked) == 2, "for what comes behind, and for near parts"
        assert patience == [True, True]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(3))
async def test_whatever_befalls(model: Path, alone: Engine, seed: int, way: str) -> None:
    """Prompts that part anywhere, several at a time, in a pool that is too small, with blocks that get lost or are
    damaged, in pages and in the store."""
    luck = random.Random(seed)
    async with bench(model, alone, pages=130, blocks=300, **WAYS[way]) as one:
        keys = Chain(ROOT, SIZE, BASE).keys
        for turn in range(12):
            prompts = {
                BASE[: luck.randrange(1, len(BASE))] + text(f"{seed} {turn} {number}", luck.randrange(1, 60))
                for number in range(luck.choice([1, 1, 2, 3]))
            }
            await one.says(*prompts)
            what = luck.random()
            if what < 0.4:
                await one.lose_pages(luck.choice([0.1, 0.5, 1.0]), luck)
            if luck.random() < 0.5:
                one.damage(luck.choice(keys), luck.randrange(one.parts.block_bytes + 16))
            if luck.random() < 0.3:
                one.lose(luck.choice(keys))
        assert one.client.stats.far > 0
        assert one.engine.stats().load_failures == 0
