"""A decode worker and its listeners over real sockets: what is generated together travels together."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from contextlib import asynccontextmanager

import grpc
import pytest

from penstock.engine.request import SamplingParams
from penstock.testing.mesh import MeshSetup
from penstock.v1 import common_pb2, decode_pb2, decode_pb2_grpc

from .support import ask, capability, prompt, until

TOKENS = 24
GREEDY = SamplingParams(
    max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logit_bias=dict.fromkeys(range(256, 260), -100.0)
)


@pytest.fixture(scope="module")
async def mesh(tiny, meshes):
    async with meshes(MeshSetup(model=tiny)) as mesh:
        yield mesh


class Gateway:
    """A connection with one listener."""

    def __init__(self, channel, name: str, worker) -> None:
        self.name = name
        self.batches: list[decode_pb2.TokenBatch] = []
        self.tokens: defaultdict[int, list[int]] = defaultdict(list)
        self.finished: set[int] = set()
        self.stands = asyncio.Event()
        self.worker = worker
        self.stub = decode_pb2_grpc.DecodeStub(channel)
        self.listening = self.stub.Listen(decode_pb2.ListenRequest(listener=name))

    def generate(self, number: int, tokens: list[int], max_tokens: int = TOKENS):
        sampling = common_pb2.Sampling(
            max_tokens=max_tokens, top_p=1.0, repetition_penalty=1.0, ignore_eos=True, logit_bias=GREEDY.logit_bias
        )
        request = common_pb2.Request(
            request_id=f"{self.name}.{number}", prompt_ids=tokens, cache_root=bytes(32), sampling=sampling
        )
        to = decode_pb2.Destination(listener=self.name, number=number)
        proof = capability(self.worker, request)
        return self.stub.Generate(decode_pb2.GenerateRequest(request=request, to=to, capability=proof))

    async def read(self) -> None:
        async for batch in self.listening:
            self.batches.append(batch)
            self.stands.set()
            for number, index, id in zip(batch.calls, batch.indices, batch.ids, strict=True):
                self.add(number, index, id)
            for sent in batch.events:
                for token in sent.event.tokens:
                    self.add(sent.call, token.index, token.id)
                if sent.event.finish:
                    self.finished.add(sent.call)

    def add(self, number: int, index: int, id: int) -> None:
        assert number not in self.finished, "nothing comes after the end"
        assert index == len(self.tokens[number]), "in order, each once"
        self.tokens[number].append(id)


@asynccontextmanager
async def gateway(mesh, name: str):
    async with grpc.aio.insecure_channel(mesh.decode[0].address) as channel:
        made = Gateway(channel, name, mesh.decode[0].worker)
        reading = asyncio.ensure_future(made.read())
        try:
            await made.stands.wait()
            [first] = made.batches
            assert not (first.calls or first.events), "it says that the listener stands"
            yield made
        finally:
            made.listening.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def ended(call) -> grpc.StatusCode:
    """How the call ended; it had nothing to say on its own stream."""
    try:
        assert await call.read() is grpc.aio.EOF
    except grpc.aio.AioRpcError as error:
        return error.code()
    return await call.code()


@pytest.fixture
def held(mesh, monkeypatch):
    """The decode worker's steps wait until it is set."""
    runner, gate = mesh.decode[0].worker.engine._runner, threading.Event()
    step = runner.step

    def later(runs):
        assert gate.wait(20)
        return step(runs)

    monkeypatch.setattr(runner, "step", later)
    yield gate
    gate.set()


async def test_many_sequences_share_messages_and_two_gateways_do_not(mesh, oracle, held):
    engine = mesh.decode[0].worker.engine
    requests = {number: prompt(f"shared {number}", 20 + number) for number in range(1, 9)}
    async with gateway(mesh, "one") as one, gateway(mesh, "other") as other:
        both = (one, other)
        calls = [each.generate(number, tokens) for each in both for number, tokens in requests.items()]
        await until(lambda: engine.stats().running + engine.stats().waiting == len(calls), "all are there")
        held.set()
        assert {await ended(call) for call in calls} == {grpc.StatusCode.OK}
        await until(lambda: all(each.finished == set(requests) for each in both), "the ends have come")
    for number, tokens in requests.items():
        expected = (await oracle(tokens, GREEDY)).ids
        assert [each.tokens[number] for each in both] == [expected, expected]
    for each in both:
        assert max(len(set(batch.calls)) for batch in each.batches) == len(requests)
        assert len(each.batches) < TOKENS * len(requests) / 2


async def test_a_gateway_that_leaves_frees_everything(mesh, oracle, http):
    worker = mesh.decode[0].worker
    async with gateway(mesh, "stays") as stays:
        async with gateway(mesh, "leaves") as leaves:
            calls = [leaves.generate(number, prompt(f"leaves {number}", 30), 1500) for number in range(1, 5)]
            await until(lambda: len(leaves.tokens) == 4, "all have begun")
            staying = stays.generate(1, prompt("stays", 30))
            leaves.listening.cancel()
            assert {await ended(call) for call in calls} == {grpc.StatusCode.UNAVAILABLE}
        assert await ended(staying) is grpc.StatusCode.OK
        await until(lambda: stays.finished == {1}, "the other gateway is served")
        assert stays.tokens[1] == (await oracle(prompt("stays", 30), GREEDY)).ids
    await until(lambda: worker.engine.stats().running == 0, "no sequence is left")
    await until(lambda: worker.engine.stats().free_pages == worker.engine.stats().total_pages, "no page is held")
    assert (await ask(http, mesh, prompt("after", 20), GREEDY)).finish == "length"
