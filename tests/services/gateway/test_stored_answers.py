"""What another gateway had of an answer is read in Redis: nothing of it is generated again, and nothing is believed
that this request's gateways have not written."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx2
import pytest
from redis.asyncio import Redis

from penstock.gateway.completing import stored_answers
from penstock.gateway.completing.stored_answers import TOKEN_BYTES, open_answer_store
from penstock.gateway.completing.threads import open_threads
from penstock.gateway.config import GatewayConfig
from penstock.gateway.request.work import PromptUse
from penstock.gateway.service import open_gateway
from penstock.runtime.config import ConfigError
from penstock.testing.redis_server import redis_server

from .conftest import plain_script
from .fakes import MODEL
from .test_repeating import BODIES, BUILDING, CHAT, KEY, SAID, TEXT, TOOLS, data, finishes, ids, said, stream

ROOT = "penstock:answers"
SECRET = b"of one request, and its key"


@pytest.fixture(scope="module")
async def redis_url(tmp_path_factory):
    async with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
async def redis(redis_url, monkeypatch):
    """A client; what a test writes has names of its own."""
    monkeypatch.setattr("penstock.gateway.completing.stored_answers._ROOT", f"{ROOT}:{secrets.token_hex(4)}")
    async with Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture(scope="module")
async def gateways(opened, redis_url, model_dir):
    """Two before one mesh that share a store of answers."""
    async with opened(answer_store=redis_url) as setup:
        own = {"http_address": "127.0.0.1:0", "drain_s": 0.2, "answer_store": redis_url}
        async with open_gateway(GatewayConfig(router=setup.mesh.address, model_dir=model_dir, **own)) as other:
            await other.ready()
            async with (
                httpx2.AsyncClient(base_url=setup.url) as one,
                httpx2.AsyncClient(base_url=f"http://{other.address}") as two,
            ):
                yield SimpleNamespace(setup=setup, one=one, two=two)


@pytest.fixture
async def pair(gateways, redis):
    """The gateways and their mesh, as new."""
    await gateways.setup.mesh.reset(plain_script(gateways.setup.tokenizer))
    return SimpleNamespace(**vars(gateways), redis=redis)


async def written(redis: Redis, tokens: int) -> None:
    """Returns when so many tokens are in the store."""
    async with asyncio.timeout(10):
        while True:
            sizes = [await redis.strlen(name) for name in await redis.keys(f"{stored_answers._ROOT}:*[0-9]")]
            if sum(sizes) == tokens * TOKEN_BYTES:
                return


def given(setup) -> list[int]:
    """How many tokens of its answer each worker was given, call by call."""
    workers = [*setup.mesh.prefills, *setup.mesh.decodes]
    return [len(request.output_ids) for worker in workers for request in worker.requests]


def forget(setup) -> None:
    for worker in [*setup.mesh.prefills, *setup.mesh.decodes]:
        worker.requests.clear()


@pytest.mark.parametrize(("path", "choices"), [(CHAT, 1), (CHAT, 2), (TEXT, 2)])
async def test_the_rest_follows_and_one_token_is_generated(pair, path, choices):
    setup = pair.setup
    setup.says(SAID)
    body = BODIES[path] | ({"n": choices} if choices > 1 else {}) | ({"tools": TOOLS} if path == CHAT else {})
    whole = await stream(pair.one, path, body)
    tokens = len(setup.ids(SAID)) + 1
    await written(pair.redis, choices * tokens)
    places = [number for number, id in enumerate(ids(whole)) if id]
    for place in (None, places[0], places[len(places) // 2], places[-1]):
        forget(setup)
        last = {} if place is None else {"last-event-id": ids(whole)[place]}
        both = ([] if place is None else whole[: place + 1]) + await stream(pair.two, path, body, **last)
        assert (said(both), finishes(both)) == (said(whole), finishes(whole)), f"after event {place}"
        assert {*given(setup)} == {tokens - 1}


@pytest.mark.parametrize("kind", BUILDING)
async def test_events_that_build_on_each_other_come_of_recalled_tokens(pair, kind):
    path, text, fields = BUILDING[kind]
    pair.setup.says(text)
    body = BODIES[path] | fields
    whole = await stream(pair.one, path, body)
    told = min([len(pair.setup.ids(text)) + 1, *([4] if kind == "a part" else [])])
    if kind == "a message's stop":  # what follows the text that ends the answer is not taken
        told = len(pair.setup.ids("The quick brown fox"))
    await written(pair.redis, 0 if kind == "logprobs" else told)
    for place in (0, len(whole) // 2, len(whole) - 1):
        forget(pair.setup)
        rest = await stream(pair.two, path, body, **{"last-event-id": ids(whole)[place]})
        assert [data(event) for event in rest] == [data(event) for event in whole[place + 1 :]]
        assert {*given(pair.setup)} == {0 if kind == "logprobs" else told - 1}, "logprobs are not kept"


async def test_the_account_adds_up(pair):
    """The client pays for its prompt and its answer; what workers compute again of the answer is the mesh's cost."""
    pair.setup.script.cached = {"host": 2}
    before = await metrics(pair.two)
    body = BODIES[CHAT] | {"stream": False}
    first = (await pair.one.post(CHAT, json=body, headers=KEY)).json()
    await written(pair.redis, first["usage"]["completion_tokens"])
    second = (await pair.two.post(CHAT, json=body, headers=KEY)).json()
    assert second["choices"] == first["choices"]
    for usage in (first["usage"], second["usage"]):
        own = usage["penstock"]
        assert own["computed_tokens"] + sum(own["cached_tokens"].values()) == usage["prompt_tokens"], usage
        assert usage["completion_tokens"] == first["usage"]["completion_tokens"]
    record = (await pair.two.get(f"/v1/requests/{second['id']}")).json()
    assert record["tokens"]["recalled"] == first["usage"]["completion_tokens"] - 1
    more = {name: value - before.get(name, 0) for name, value in (await metrics(pair.two)).items()}
    again = [n for name, n in more.items() if name.startswith("penstock_prompt_tokens_again_total")]
    assert sum(again) == record["tokens"]["recalled"]
    assert more["penstock_usage_defects_total"] == 0
    recalled, told = (
        more[f'penstock_{name}_total{{model_name="{MODEL}"}}'] for name in ("recalled_tokens", "generated_tokens_again")
    )
    generated = 1
    assert second["usage"]["completion_tokens"] + told == generated + recalled


async def metrics(http: httpx2.AsyncClient) -> dict[str, float]:
    """All that a gateway counts."""
    lines = (await http.get("/metrics")).text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


@pytest.mark.parametrize(
    ("use", "last", "rest", "behind"),
    [
        (PromptUse(10, {"host": 6}), 4, PromptUse(6, {"host": 6}), {"computed": 4}),
        (PromptUse(1, {"worker": 9, "host": 6}), 4, PromptUse(0, {"worker": 9, "host": 3}), {"computed": 1, "host": 3}),
        (PromptUse(0, {"gpu": 2, "nvme": 1}), 2, PromptUse(0, {"gpu": 1, "nvme": 0}), {"gpu": 1, "nvme": 1}),
        (PromptUse(5, {}), 0, PromptUse(5, {}), {}),
    ],
)
def test_what_is_computed_or_far_is_of_the_last_tokens(use, last, rest, behind):
    first, second = use.parted(last)
    assert first == rest and first.total + second.total == use.total
    assert {name: n for name, n in {"computed": second.computed, **second.cached}.items() if n} == behind


@asynccontextmanager
async def opened_store(url: str):
    failures: list[str] = []
    async with open_answer_store(url, failures.append) as store:
        with open_threads() as threads:
            yield store, threads
    assert not failures


async def test_tokens_are_kept_by_choice(redis_url, redis):
    async with opened_store(redis_url) as (store, threads):
        answer = store.of(SECRET, 3)
        assert [*map(list, await answer.read(threads, "a"))] == [[], [], []]
        long = [index * 7919 % (1 << 32) for index in range(5000)]
        for index, token in enumerate(long):
            answer.add(0, index, token)
            if index % 1000 == 0:
                await asyncio.sleep(0.001)  # others write meanwhile
        answer.add(2, 0, 5)
        answer.close()
        await written(redis, len(long) + 1)
        again = store.of(SECRET, 3)
        assert [*map(list, await again.read(threads, "a"))] == [long, [], [5]]
        assert all([0 < await redis.ttl(name) <= 600 for name in (again.names[0], again.names[2])])
        assert [*map(list, await store.of(SECRET + b"!", 3).read(threads, "a"))] == [[], [], []]


@pytest.mark.parametrize("end", ["whole", "left", "died"])
async def test_only_what_a_gateway_did_not_end_was_interrupted(pair, end):
    """Who has the whole answer, or has left it, and asks again comes before nobody else's prompts."""
    setup = pair.setup
    setup.says(SAID)
    async with pair.one.stream("POST", CHAT, json=BODIES[CHAT] | {"stream": True}, headers=KEY) as answer:
        async for line in answer.aiter_lines():
            if end == "left" and "content" in line:
                break
    over = await noted(pair.redis)
    assert 0 < await pair.redis.ttl(over) <= 600
    if end == "died":
        await pair.redis.delete(over)  # as if it had not been there to write it
    forget(setup)
    await stream(pair.two, CHAT, BODIES[CHAT])
    workers = [*setup.mesh.prefills, *setup.mesh.decodes]
    assert {request.resumed for worker in workers for request in worker.requests} == {end == "died"}


async def noted(redis: Redis) -> bytes:
    """The note that the answer is over, once it and some of its tokens are there."""
    async with asyncio.timeout(10):
        while True:
            names = await redis.keys(f"{stored_answers._ROOT}:*")
            for name in names:
                if name.endswith(b":over") and len(names) > 1:
                    return name


@pytest.mark.parametrize("what", ["a bit", "swapped", "of another choice", "a part", "longer", "another kind"])
async def test_what_was_not_written_by_these_gateways_ends_what_is_known(redis_url, redis, what):
    async with opened_store(redis_url) as (store, threads):
        answer = store.of(SECRET, 2)
        for choice in range(2):
            for index in range(10):
                answer.add(choice, index, 100 + index)
        await written(redis, 20)
        name, other = answer.names
        data, size = await redis.get(name), TOKEN_BYTES
        if what == "a bit":
            data = data[: 4 * size] + bytes([data[4 * size] ^ 1]) + data[4 * size + 1 :]
        elif what == "swapped":
            data = data[: 4 * size] + data[5 * size : 6 * size] + data[4 * size : 5 * size] + data[6 * size :]
        elif what == "of another choice":
            data = data[: 4 * size] + (await redis.get(other))[4 * size :]
        elif what == "a part":
            data = data[: 4 * size + 5]
        elif what == "longer":
            data = data[: 4 * size] + bytes(7 * size)
        await redis.delete(name)
        await (redis.rpush(name, "x") if what == "another kind" else redis.set(name, data))
        known, rest = await answer.read(threads, "a")
        assert [*known] == ([] if what == "another kind" else [100, 101, 102, 103])
        assert [*rest] == ([*range(100, 110)])


async def test_without_its_redis_answers_are_generated_again(opened, tmp_path):
    async with redis_server(tmp_path) as server:
        port = int(server.plain.rsplit(":", 1)[1].partition("/")[0])
        async with opened(answer_store=server.url) as setup, httpx2.AsyncClient(base_url=setup.url) as http:
            whole = await stream(http, CHAT, BODIES[CHAT])
            async with Redis.from_url(server.url) as redis:
                await written(redis, len(setup.ids("The quick brown fox.")) + 1)
            await server.kill()
            forget(setup)
            again = await stream(http, CHAT, BODIES[CHAT])
            assert said(again) == said(whole) and {*given(setup)} == {0}
            async with redis_server(tmp_path, port=port), Redis.from_url(server.url) as redis:
                await stream(http, CHAT, BODIES[CHAT], **{"idempotency-key": "k-2"})
                async with asyncio.timeout(20):
                    while not await redis.keys(f"{ROOT}:*"):
                        await stream(http, CHAT, BODIES[CHAT], **{"idempotency-key": "k-3"})


def test_an_address_of_another_kind_is_refused_by_name(model_dir):
    with pytest.raises(ConfigError, match="answer_store = 'http': must be redis://HOST:PORT/DATABASE"):
        GatewayConfig(router="127.0.0.1:1", model_dir=model_dir, answer_store="http://me:hush@x")
