"""One set of tiny checkpoints, one oracle and a few running meshes for all tests here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2
import pytest

from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.request import Request, SamplingParams
from penstock.runtime.metrics import GatewayMetrics
from penstock.testing.checkpoints import TinyModel, write_checkpoint
from penstock.testing.mesh import Mesh, MeshSetup, open_mesh

TINY = TinyModel(vocab_size=260, max_positions=2048, seed=3)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target: random weights, one token per byte."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", TINY)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model with the same tokenizer: a draft that is mostly wrong."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "other", replace(TINY, layers=1, seed=4))


@dataclass(frozen=True)
class Answer:
    """What the tests compare."""

    ids: list[int]
    logprobs: list[float]
    finish: str


class Oracle:
    """The same weights in one process: no store, no hand-off, no drafts, nothing cached."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._number = 0

    async def __call__(self, prompt: list[int], sampling: SamplingParams) -> Answer:
        self._number += 1
        request = Request(id=f"oracle-{self._number}", prompt=tuple(prompt), sampling=sampling)
        tokens, finish = [], None
        async with aclosing(self._engine.generate(request)) as updates:
            async for update in updates:
                tokens += update.tokens
                finish = update.finish
        assert finish is not None
        return Answer([t.token for t in tokens], [t.logprob or 0.0 for t in tokens], finish)


@pytest.fixture(scope="session")
async def oracle(tiny: Path) -> AsyncIterator[Oracle]:
    async with Engine.open(EngineConfig(model=tiny, kv_pool_tokens=8192)) as engine:
        yield Oracle(engine)


_GATEWAYS: list[GatewayMetrics] = []
"""Of every mesh that a test or its fixtures opened and that is still of interest."""


@pytest.fixture(scope="session")
def meshes():
    """Opens a mesh for the length of a block."""

    @asynccontextmanager
    async def opened(setup: MeshSetup) -> AsyncIterator[Mesh]:
        async with open_mesh(setup) as mesh:
            _GATEWAYS.append(mesh.gateway.metrics)
            yield mesh

    return opened


@pytest.fixture(autouse=True)
def usage_adds_up() -> Iterator[None]:
    """The law of usage, for every request of every test: prompt = computed + worker + gpu + host + nvme + remote."""
    yield
    for metrics in _GATEWAYS:
        assert metrics.registry.get_sample_value("penstock_usage_defects_total") == 0, "see `usage does not add up`"


@pytest.fixture(scope="session")
async def http() -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(timeout=60) as client:
        yield client
