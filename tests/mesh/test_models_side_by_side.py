"""Several models in one mesh, with one store: each has its own cached turns, tokens and share, whatever others do."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx2
import psutil
import pytest

from penstock.decode.config import DecodeConfig
from penstock.decode.service import open_decode
from penstock.engine.config import EngineConfig
from penstock.engine.request import SamplingParams
from penstock.testing.mesh import Mesh, MeshSetup
from penstock.v1 import kvstore_pb2, kvstore_pb2_grpc

from .support import body_of, prompt, until, up

SAMPLING = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
MODELS = ("tiny", "org/other")
KEEPS_NOTHING: dict[str, Any] = {"kv_pool_tokens": 8192, "baton": "none", "resident_share": 0.0}
"""So that what is cached is in the store."""


@dataclass(frozen=True)
class Turn:
    """An answer, and the tokens of its prompt whose KV was there."""

    ids: list[int]
    cached: int
    places: dict[str, int] = field(compare=False)
    """Where it was. A page that a worker has not let go of yet is not fetched."""


async def ask(http: httpx2.AsyncClient, url: str, model: str, tokens: list[int]) -> Turn:
    answer = await http.post(f"{url}/v1/completions", json=body_of(tokens, SAMPLING) | {"model": model}, timeout=60)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    places = found["usage"]["penstock"]["cached_tokens"]
    return Turn(found["choices"][0]["token_ids"], sum(places.values()), places)


async def play(http: httpx2.AsyncClient, url: str, model: str, name: str, turns: int = 3) -> list[Turn]:
    """A session whose context grows: each turn has all before it."""
    tokens, played = prompt(name, 100), []
    for number in range(turns):
        played.append(await ask(http, url, model, tokens))
        tokens = [*tokens, *played[-1].ids, *prompt(f"{name}/{number}", 30)]
    return played


@asynccontextmanager
async def together(meshes: Any, directories: dict[str, Path], **store: Any) -> AsyncIterator[Mesh]:
    """A mesh of both models and one store."""
    first, second = MODELS
    setup = MeshSetup(
        model=directories[first],
        aggregated=True,
        engine=KEEPS_NOTHING,
        worker={"lend": False},
        store={"partitions": 2, **store},
        gateway={"also": (f"{second}={directories[second]}",)},
    )
    async with meshes(setup) as mesh:
        config = DecodeConfig(
            engine=EngineConfig(directories[second], **KEEPS_NOTHING),
            model_name=second,
            router=mesh.router.address,
            kvstore=mesh.kvstore.address,
            host_id="test",
            role="both",
            draft="none",
            lend=False,
            store_timeout_s=30.0,
        )
        async with open_decode(config):
            view = mesh.gateway.view
            async with view.changed, asyncio.timeout(30):
                await view.changed.wait_for(lambda: all(view.serves(model) for model in MODELS))
            yield mesh


@pytest.fixture(scope="module")
def directories(tiny: Path, other: Path) -> dict[str, Path]:
    return dict(zip(MODELS, (tiny, other), strict=True))


@pytest.fixture(scope="module")
async def alone(meshes: Any, directories: dict[str, Path]) -> dict[str, list[Turn]]:
    """The turns of each model in a mesh of its own, with a store of half the bytes."""
    found = {}
    for model in MODELS:
        setup = MeshSetup(
            model=directories[model],
            model_name=model,
            aggregated=True,
            engine=KEEPS_NOTHING,
            worker={"lend": False},
            kv_host_bytes=32 << 20,
        )
        async with meshes(setup) as mesh, httpx2.AsyncClient() as http:
            found[model] = await play(http, mesh.url, model, "side by side")
    return found


async def test_each_has_its_own_tokens_and_its_own_cached_turns(meshes, directories, alone, http):
    """Both at once, with the same prompts: as in a mesh of its own, to the last token and to the last block."""
    async with together(meshes, directories) as mesh:
        played = await asyncio.gather(*(play(http, mesh.url, model, "side by side") for model in MODELS))
        for model, turns in zip(MODELS, played, strict=True):
            assert turns == alone[model]
            assert all(turn.places["host"] >= 96 for turn in turns[1:])
        assert played[0][0].ids != played[1][0].ids, "they say different things"
        parts = list(mesh.kvstore.partitions)
        assert [part.store.stats().blocks > 0 for part in parts] == [True, True]
        listed = (await http.get(f"{mesh.url}/v1/models")).json()["data"]
        assert [(one["id"], one["ready"]) for one in listed] == [(model, True) for model in MODELS]
        wrong = await http.post(f"{mesh.url}/v1/completions", json={"model": "org/none", "prompt": "a"})
        assert wrong.status_code == 404
        told = wrong.json()["error"]
        assert told["message"] == "the model 'org/none' does not exist; there is 'tiny', 'org/other'"
        assert (told["param"], told["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize("floods", MODELS)
async def test_the_flood_of_one_costs_the_other_nothing(meshes, directories, alone, http, floods):
    """Of a store that it overfills many times."""
    quiet = MODELS[1 - MODELS.index(floods)]
    async with together(meshes, directories, host_bytes=2 << 20) as mesh:
        before = await play(http, mesh.url, quiet, "side by side", turns=2)
        for number in range(40):
            await ask(http, mesh.url, floods, prompt(f"flood/{number}", 400))
        by_model = {part.store.spec.model: part.store.stats() for part in mesh.kvstore.partitions}
        members = [seat.member for seat in mesh.router.planner.registry if seat.member.role]
        specs = {member.model: member.spec for member in members}
        full, kept = (by_model[specs[model].model] for model in (floods, quiet))
        assert full.evictions > full.slots > 0 == kept.evictions
        tokens = [*prompt("side by side", 100), *before[0].ids, *prompt("side by side/0", 30), *before[1].ids]
        tokens += prompt("side by side/1", 30)
        assert [*before, await ask(http, mesh.url, quiet, tokens)] == alone[quiet]


async def test_the_store_begins_again_and_both_find_their_blocks(other, tmp_path):
    """Real processes, of `penstock up` with the embedded pair and another model."""
    disk = ("--kv-nvme-dir", str(tmp_path / "kv"), "--kv-nvme-bytes", "64MiB")
    keeps = ("--resident-share", "0")
    async with up("--model", "penstock-mini", "--model", str(other), *disk, *keeps) as (process, _, url):
        async with httpx2.AsyncClient() as http:

            async def ready() -> list[str]:
                listed = (await http.get(f"{url}/v1/models")).json()["data"]
                return [one["id"] for one in listed if one["ready"]]

            names = ["penstock-mini", other.name]
            async with asyncio.timeout(30):
                while await ready() != names:
                    pass
            first = {model: await ask(http, url, model, prompt("again", 200)) for model in names}
            assert [turn.cached for turn in first.values()] == [0, 0]
            [store] = [one for one in psutil.Process(process.pid).children() if "penstock.kvstore" in one.cmdline()]
            command = store.cmdline()
            address = command[command.index("--address") + 1]
            await stats_of(address, lambda stats: all(part.blocks >= 13 for part in of(stats, drafts=False)))
            await stats_of(address, lambda stats: sum(part.attachments for part in of(stats, drafts=True)) == 1)
            store.send_signal(signal.SIGTERM)
            await until(lambda: not store.is_running() or store.status() == psutil.STATUS_ZOMBIE, "it has ended")
            stats = await stats_of(address, lambda stats: stats.attachments == len(names))
            assert [part.attachments for part in of(stats, drafts=False)] == [1, 1]
            await stats_of(address, lambda stats: sum(part.attachments for part in of(stats, drafts=True)) == 1)
            assert stats.arena_bytes == 64 << 20
            for model in names:
                turn = await ask(http, url, model, prompt("again", 200))
                assert turn.ids == first[model].ids
                assert turn.places["nvme"] >= 192, "it came from the disk"


def of(stats: kvstore_pb2.StatsResponse, drafts: bool) -> list[kvstore_pb2.PartitionStats]:
    """The partitions of draft models, or the others."""
    return [part for part in stats.partitions if part.draft == drafts]


async def stats_of(address: str, such: Callable[[kvstore_pb2.StatsResponse], bool]) -> kvstore_pb2.StatsResponse:
    """The store's figures once they are such."""
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(60):
        while True:
            try:
                stats = await kvstore_pb2_grpc.KvStoreStub(channel).Stats(kvstore_pb2.StatsRequest())
            except grpc.aio.AioRpcError:  # it begins
                continue
            if such(stats):
                return stats
