"""What the mesh tests share: asking over HTTP, waiting for facts, and a draft service that means harm."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from penstock.checkpoint import tokenizer_fingerprint
from penstock.draft.service import SERVICE
from penstock.engine.engine import Engine
from penstock.engine.request import Request, SamplingParams, Update
from penstock.errors import Unavailable
from penstock.kv.identity import block_keys, root_key
from penstock.router.registry import Measured
from penstock.rpc.capability import plan_terms
from penstock.rpc.server import serve
from penstock.runtime.lifecycle import SUPERVISOR_FD
from penstock.testing.mesh import Mesh
from penstock.v1 import common_pb2, draft_pb2, draft_pb2_grpc, kvstore_pb2, kvstore_pb2_grpc
from penstock.worker.rates import TransferCost
from penstock.worker.worker import Work, Worker

BLOCK = 16
NO_SPECIALS = dict.fromkeys(range(256, 260), -100.0)
"""Special tokens have no text, and so no place among the logprobs of a text."""
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=0, logit_bias=NO_SPECIALS)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=11)


@dataclass(frozen=True)
class MeshAnswer:
    """What came back over HTTP."""

    ids: list[int]
    logprobs: list[float]
    finish: str
    cached: int
    computed: int
    drafted: int
    accepted: int
    usage: dict[str, Any]


async def said_alone(engine: Engine, tokens: list[int], sampling: SamplingParams) -> list[int]:
    """The answer's tokens, by one engine outside of the mesh."""
    found: list[int] = []
    async with aclosing(engine.generate(Request(str(len(tokens)), tuple(tokens), sampling))) as updates:
        async for update in updates:
            found += [token.token for token in update.tokens]
    return found


def prompt(name: str, length: int) -> list[int]:
    """Random tokens that depend on the name alone; none of them special."""
    source = random.Random(name)
    return [source.randrange(256) for _ in range(length)]


def body_of(prompt: list[int], sampling: SamplingParams) -> dict[str, Any]:
    """A completions body that asks for exactly that sampling."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
        "seed": sampling.seed,
        "ignore_eos": sampling.ignore_eos,
        "bad_words": list(sampling.bad_words),
        "stop_token_ids": sorted(sampling.stop_token_ids),
        "return_token_ids": True,
    }
    if sampling.logprobs is not None:
        body["logprobs"] = sampling.logprobs
    return body


async def ask(
    http: httpx2.AsyncClient, mesh: Mesh, prompt: list[int], sampling: SamplingParams, session: str = ""
) -> MeshAnswer:
    """One completion, not streamed."""
    headers = {"x-session-affinity": session} if session else {}
    answer = await http.post(f"{mesh.url}/v1/completions", json=body_of(prompt, sampling), headers=headers)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    [choice] = found["choices"]
    usage = found["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    extra = usage["penstock"]
    assert cached == sum(extra["cached_tokens"].values())
    assert cached + extra["computed_tokens"] == usage["prompt_tokens"] == len(prompt)
    assert usage["completion_tokens"] == len(choice["token_ids"])
    return MeshAnswer(
        ids=choice["token_ids"],
        logprobs=(choice["logprobs"] or {}).get("token_logprobs", []),
        finish=choice["finish_reason"],
        cached=cached,
        computed=extra["computed_tokens"],
        drafted=extra["drafted_tokens"],
        accepted=extra["accepted_tokens"],
        usage=usage,
    )


@asynccontextmanager
async def process(service: str, *arguments: str):
    """A service in a process of its own; yields its address and pid, kills what is left of it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"penstock.{service}", *arguments),
            pass_fds=[theirs.fileno()],
            env={**os.environ, SUPERVISOR_FD: str(theirs.fileno())},
        )
        theirs.close()
        ours.setblocking(False)
        try:
            line = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(ours, 4096), 30)
            yield json.loads(line)["address"], child.pid
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()


DRAFTING: dict[str, Any] = {"draft_timeout_s": 10.0, "draft_always": True, "lookup_tokens": 0}
"""Settings of an engine that verifies drafts of its draft service alone, however busy the machine is."""


async def drafting(http: httpx2.AsyncClient, mesh: Mesh) -> None:
    """Returns when the draft service drafts: requests do not wait for its stream. The mesh has engines with
    `draft_always`."""
    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    async with asyncio.timeout(20):
        drafted = 0
        while not drafted:
            usage = (await ask(http, mesh, prompt("warm", 20), sampling)).usage
            drafted = usage["penstock"]["drafts"]["verified"]["model"]


REDIS = "redis-server unixsocket"
"""What the command line of a mesh's Redis says, and of no service that is told where it is."""


def found(supervisor: int, what: str) -> list[psutil.Process]:
    """The processes of a mesh with these words on their command line."""
    chosen: list[psutil.Process] = []
    for child in psutil.Process(supervisor).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            chosen += [child] if what in " ".join(child.cmdline()) else []
    return chosen


async def until(fact: Callable[[], bool], what: str, seconds: float = 10) -> None:
    """Returns when `fact` holds; asks once per turn of the event loop."""
    try:
        async with asyncio.timeout(seconds):
            while not fact():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"not within {seconds} s: {what}") from None


def mesh_keys(mesh: Mesh, tokens: list[int], *, adapter: str = "") -> list[bytes]:
    """The block keys that the mesh gives these tokens, for its default tenant."""
    spec = mesh.workers[0].spec
    root = root_key(spec, mesh.gateway.reception.auth.namespace("default"), adapter)
    return block_keys(root, tokens, spec.block_size)


async def settled(mesh: Mesh, tokens: list[int], *, adapter: str = "") -> None:
    """Returns when the store, and the router's index, hold every full block of `tokens`, computed with the adapter of
    that fingerprint."""
    keys = mesh_keys(mesh, tokens, adapter=adapter)
    if not keys:
        return
    stub = kvstore_pb2_grpc.KvStoreStub(mesh.workers[0].channels.to(mesh.kvstore.address, "store"))
    async with asyncio.timeout(10):
        while (await stub.Lookup(kvstore_pb2.LookupRequest(keys=keys))).found < len(keys):
            await asyncio.sleep(0.002)
    await until(
        lambda: len(keys) in mesh.router.planner.index.match(keys).values(), "the router's index holds the blocks"
    )


async def idle(mesh: Mesh) -> None:
    """Returns when no worker holds a page for a request, a hand-off or the store: until then what an answer leaves in
    its worker's pages, above all its last, partly filled one, may not be there to be found."""
    engines = [worker.engine for worker in mesh.workers]
    await until(lambda: all(one.stats().free_pages == one.stats().total_pages for one in engines), "no page is held")


def capability(worker: Worker, request: common_pb2.Request, prefill: str = "") -> common_pb2.Capability:
    """As if a router of the worker had planned the request."""
    made = common_pb2.Capability(epoch=1, prefill=prefill)
    with worker.plan_keys.of_stream() as new_key:
        made.mac = plan_terms(request, made).mac(new_key())
    return made


def fail_once(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request that decodes loses its worker once, after its first tokens there."""
    failures = 1
    for served in mesh.decode:
        whole = served.worker.generate

        async def generate(
            request: Request, work: Work, source: Any = None, relay: Any = None, *, whole: Any = whole, **more: Any
        ) -> AsyncIterator[Update]:
            """Without the relay, so that it sees every token."""
            nonlocal failures
            async with aclosing(whole(request, work, source, **more)) as updates:
                async for update in updates:
                    yield update
                    if failures:
                        failures -= 1
                        raise Unavailable("the step failed")

        monkeypatch.setattr(served.worker, "generate", generate)


def in_pages(known: int) -> int:
    """How many of the first `known` tokens of a text a worker that has computed them all takes from its own pages: all
    full blocks, and of a block that is not full those that are worth a copy."""
    rest = known % BLOCK
    return known if rest >= BLOCK // 4 else known - rest


async def forget_pages(mesh: Mesh) -> None:
    """The workers forget the blocks in their own pages, as if others had needed the room: the tiers of the stores are
    left. Returns when the router has heard of it: else what is asked next might go where something was."""
    index = mesh.router.planner.index
    forgotten: list[tuple[str, Any, bytes]] = []
    members = {seat.member.address: seat.member.id for seat in _seats(mesh)}
    for served in (*mesh.prefill, *mesh.decode):
        worker = served.worker
        if worker.publisher.lending is not None:
            await worker.store.lending.save(list(worker.publisher.lending._loans))
        pool = worker.engine._scheduler._pool
        forgotten += [(members[served.address], pool, key) for key in list(pool.keys())]
        pool.forget(range(1, pool.total + 1))

    def heard() -> bool:
        return not any(member in index.match([key]) for member, pool, key in forgotten if pool.find(key) is None)

    await until(heard, "the router knows what the workers have forgotten")


class GivenCost(TransferCost):
    """Of a way, whatever moves there."""

    def moved(self, size: int, seconds: float) -> None:
        """Says nothing."""


async def fast_way(mesh: Mesh) -> None:
    """Returns when the stores of a mesh know each other, and the router believes that the way between them is fast:
    a tiny model computes quicker than anything moves."""
    known = [store.elsewhere.neighbours for store in mesh.kvstores]
    await until(lambda: all(one.others for one in known), "the stores know each other")
    for worker in mesh.workers:
        worker.rates.far = GivenCost(overhead_s=1e-9, bytes_per_s=1e12)
    for seat in _seats(mesh):
        seat.measure(Measured(remote_rate=1.0), 0.0)  # what it believed earlier is no sign; reports come in order
    await until(
        lambda: all(seat.measured.remote_rate == 1e12 for seat in _seats(mesh)), "the router thinks the way is fast"
    )


def on_host(mesh: Mesh, host: str) -> None:
    """Sends decoding to the workers of one host."""
    for seat in _seats(mesh):
        if seat.member.role.value != "prefill":
            seat.drain(seat.member.host_id != host)


def _seats(mesh: Mesh) -> list[Any]:
    return [seat for seat in mesh.router.planner.registry if seat.member.role is not None]


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """For the length of the block the engine's next step does not begin."""
    step, go = engine._runner.step, threading.Event()

    def waiting(runs: Any) -> Any:
        assert go.wait(30)
        return step(runs)

    engine._runner.step = waiting  # type: ignore[method-assign]
    try:
        yield
    finally:
        go.set()


class Adversary(draft_pb2_grpc.DraftServicer):
    """Proposes special tokens, tokens that do not exist and far too many, for texts that never were, places that are
    none and sequences of nobody. It says that it has the tokens of `tokenizer`."""

    def __init__(self, tokenizer: str) -> None:
        self._tokenizer = tokenizer
        self.told = 0
        """Sequences for which drafts were wanted, each time."""

    async def Propose(self, request_iterator: Any, context: Any) -> AsyncIterator[draft_pb2.DraftLeads]:
        async for message in request_iterator:
            for one in message.sequences:
                if one.k:
                    self.told += 1
                    yield self._lie(message.number, one.id, one.keep + len(one.tokens))

    def _lie(self, number: int, id: int, length: int) -> draft_pb2.DraftLeads:
        """Every other time one that could be true."""
        tokens = ([257, 257, 259, 256], [4_000_000_000, 1], [0] * 500, [], [7] * 100)[self.told % 5]
        if self.told % 2:
            return draft_pb2.DraftLeads(ids=[id], after=[number], lengths=[length], counts=[2], tokens=[257, 7])
        after = (number, number, number + 1000, max(0, number - 1))[self.told % 4] if self.told % 3 else number
        places = (length, length, length + 1, length - 1, 0, 2**32 - 1)
        return draft_pb2.DraftLeads(
            ids=[id, id + 1, 2**63],
            after=[after] * 3,
            lengths=[places[self.told % 6], length, length],
            counts=[len(tokens), 1, 2**32 - 1],
            tokens=[*tokens, 5],
            refused=[id] if self.told % 7 == 0 else [],
        )

    async def Describe(self, request: Any, context: Any) -> draft_pb2.DescribeResponse:
        return draft_pb2.DescribeResponse(tokenizer=self._tokenizer)


@asynccontextmanager
async def adversarial_draft(target: Path) -> AsyncIterator[tuple[str, Adversary]]:
    """A draft service that means harm, and its address."""
    adversary = Adversary(tokenizer_fingerprint(target))
    register = partial(draft_pb2_grpc.add_DraftServicer_to_server, adversary)
    async with serve("127.0.0.1:0", register, [SERVICE], grace=0.1) as server:
        yield f"127.0.0.1:{server.port}", adversary


@asynccontextmanager
async def up(*options: str):
    """The supervisor, its children and the URL."""
    command = (sys.executable, "-m", "penstock.cli", "up", "--port", "0", "--kv-host-bytes", "64MiB", *options)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(90):
            line = await process.stdout.readline()
        url = re.fullmatch(rb"ready (http://\S+)\n", line)[1].decode()
        yield process, psutil.Process(process.pid).children(recursive=True), url
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await process.wait()
