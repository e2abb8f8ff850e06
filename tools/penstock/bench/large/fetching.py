"""What a worker fetches of a long prefix of a model of which five layers in six look at a window alone.

The windows are Gemma 3's: 1,024 tokens, and every sixth layer looks at everything. The share of bytes that are read
depends on nothing else but the prefix's length, so the rest of the model is small. The store has blocks of random
numbers. A worker's own code reads them into pages, the far parts where these are enough, and in turns all of each
block: out of the store's memory, and as a stream on this machine.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from penstock.bench.harness import Figure, figure, interleave
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.request import Request, SamplingParams
from penstock.kv.client.client import BlockPut, StoreClient, open_store
from penstock.kv.identity import Chain
from penstock.kv.parts import parted
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.service import open_kvstore
from penstock.rpc.channels import open_channels
from penstock.runtime.metrics import WorkerMetrics
from penstock.testing.checkpoints import TinyModel, write_checkpoint
from penstock.worker.fetching import Fetcher, StoredPrefix
from penstock.worker.stored import StoredKeys

_ROOT, _HOST = bytes(32), "bench"
_GEMMA = TinyModel(
    "Gemma3ForCausalLM",
    layers=12,
    kv_heads=4,
    head_dim=64,
    max_positions=32768,
    extra={"sliding_window": 1024, "query_pre_attn_scalar": 64, "sliding_window_pattern": 6},
)
_WAYS = {"mapped": _HOST, "streamed": "elsewhere"}


@dataclass(frozen=True)
class Fetched:
    """Of one prefix."""

    size: int
    """Bytes that were read from the store."""
    seconds: float
    """Until the first token, of which there is one to compute."""


async def fetch_figures(quick: bool) -> Sequence[Figure]:
    """Runs the part."""
    tokens, rounds = (4096, 1) if quick else (16384, 5)
    with TemporaryDirectory() as directory:
        model = await asyncio.to_thread(write_checkpoint, Path(directory) / "model", _GEMMA)
        found = {way: await _in_turns(model, host, tokens, rounds) for way, host in _WAYS.items()}
    shares = [far.size / whole.size for pairs in found.values() for far, whole in pairs]
    return [
        figure("sliding_fetch_bytes", shares, "x", f"all of a prefix of {tokens} tokens", 0.5, lower_is_better=True),
        *(
            figure(f"sliding_fetch_s_{way}", [far.seconds / whole.seconds for far, whole in pairs], "x", "all of it")
            for way, pairs in found.items()
        ),
    ]


async def _in_turns(model: Path, host: str, tokens: int, rounds: int) -> list[tuple[Fetched, Fetched]]:
    """(The far parts where they are enough, all), for each round."""
    async with _reader(model, host, tokens) as reader:
        samples = await interleave({"far": lambda _: reader.read(True), "whole": lambda _: reader.read(False)}, rounds)
    return list(zip(samples["far"], samples["whole"], strict=True))


@dataclass
class PrefixReader:
    """A worker's engine and its client of a store that has a prefix."""

    engine: Engine
    client: StoreClient
    prompt: tuple[int, ...]
    asked: int = field(default=0)

    async def read(self, far: bool) -> Fetched:
        """Fetches the prefix, of which nothing is in the pages."""
        self.engine.pool.forget(range(1, self.engine.pool.total + 1))
        self.asked += 1
        parts, metrics, size = self.engine.parts, WorkerMetrics(), self.engine.config.block_size
        assert parts is not None
        chain = Chain(_ROOT, size, self.prompt)
        fetcher = Fetcher(
            store=self.client,
            metrics=metrics,
            keys=list(chain.keys),
            known=StoredKeys(self.client, self.engine.pool, metrics),
            block_size=size,
            reach=parts.reach if far else None,
        )
        source = StoredPrefix(fetcher, len(chain.keys), lambda _: None)
        request = Request(str(self.asked), self.prompt, SamplingParams(max_tokens=1, temperature=0.0))
        before, begin = self.client.stats.bytes_in, time.perf_counter()
        async with aclosing(self.engine.generate(request, source, chain=chain)) as updates:
            async for update in updates:
                assert update.cached_tokens == len(self.prompt) - 1
        return Fetched(self.client.stats.bytes_in - before, time.perf_counter() - begin)


@asynccontextmanager
async def _reader(model: Path, host: str, tokens: int) -> AsyncIterator[PrefixReader]:
    """`host` is that of the reader; the store's is `_HOST`."""
    prompt = tuple(random.Random(1).choices(range(256), k=tokens + 1))
    config = EngineConfig(model, dtype="bfloat16", kv_pool_tokens=2 * tokens, draft_tokens=0)
    async with Engine.open(config) as engine, open_channels() as channels:
        parts, spec = engine.parts, parted(engine.spec)
        assert parts is not None
        room = 2 * spec.block_bytes * (tokens // config.block_size)
        async with (
            open_kvstore(KvStoreConfig(host_bytes=room, host_id=_HOST)) as store,
            open_store(channels.to(store.address, "store"), "bench", spec, host, parts=parts, timeout_s=60.0) as client,
        ):
            blocks = _blocks(Chain(_ROOT, config.block_size, prompt), engine.spec.block_bytes)
            assert await client.put(blocks) == len(blocks)
            yield PrefixReader(engine, client, prompt)


def _blocks(chain: Chain, block_bytes: int) -> list[BlockPut]:
    """Random numbers of bfloat16 from 1 to 2."""
    source = np.random.default_rng(1)
    return [
        BlockPut(
            key,
            chain.parent(number),
            number * chain.block_size,
            memoryview(source.integers(0x3F80, 0x4000, block_bytes // 2, np.uint16).tobytes()),
        )
        for number, key in enumerate(chain.keys)
    ]
