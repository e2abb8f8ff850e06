"""Stored responses: chains, listings, tenants, bounds; in memory and in Redis."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import openai
import pytest

from penstock.errors import Unavailable
from penstock.gateway.api.responses.in_redis import open_redis_responses
from penstock.gateway.api.responses.store import MemoryResponses, StoreBounds, StoredResponse
from penstock.testing.keys import key_file
from penstock.testing.redis_server import redis_server

BOUNDS = StoreBounds(tenant_count=4, tenant_bytes=2000, count=6, bytes=3000, ttl_s=60)


def kept(id: str, *ancestors: str, size: int = 10) -> StoredResponse:
    return StoredResponse(f"resp_{id}", tuple(f"resp_{name}" for name in ancestors), b"[]", b"x" * size)


@pytest.fixture(scope="module")
async def redis_url(tmp_path_factory):
    async with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(params=["memory", "redis"])
async def make(request, redis_url):
    """Opens an empty store of each kind."""

    @asynccontextmanager
    async def opened(bounds: StoreBounds = BOUNDS):
        if request.param == "memory":
            yield MemoryResponses(bounds)
            return
        import redis.asyncio

        async with redis.asyncio.Redis.from_url(redis_url) as client:
            await client.flushall()
        async with open_redis_responses(redis_url, bounds) as store:
            yield store

    return opened


async def present(store, tenant: str, names: str) -> str:
    return "".join([name for name in names if await store.get(tenant, f"resp_{name}") is not None])


async def test_a_store_gives_back_what_it_got(make):
    async with make() as store:
        response = StoredResponse("resp_a", ("resp_0",), b"[1]", '{"a": "ü"}'.encode())
        await store.put("one", response)
        assert await store.get("one", "resp_a") == response
        assert await store.get("two", "resp_a") is None and not await store.delete("two", "resp_a")
        assert await store.chain("one", "resp_a") is None, "what it continues is not there"
        await store.put("one", kept("0"))
        assert [one.id for one in await store.chain("one", "resp_a")] == ["resp_0", "resp_a"]
        assert await store.delete("one", "resp_0") and not await store.delete("one", "resp_0")
        assert await store.chain("one", "resp_a") is None and await store.chain("one", "resp_b") is None


@pytest.mark.parametrize("damage", [b"", b"\xc1", b"\x90", b"no response"])
async def test_a_damaged_response_counts_as_gone(redis_url, damage):
    import redis.asyncio

    async with redis.asyncio.Redis.from_url(redis_url) as client, open_redis_responses(redis_url, BOUNDS) as store:
        await client.flushall()
        await store.put("one", kept("a"))
        [name] = [name async for name in client.scan_iter("*:one:*")]
        await client.set(name, damage)
        assert await store.get("one", "resp_a") is None and await store.chain("one", "resp_a") is None
        await store.put("one", kept("a"))
        assert await store.get("one", "resp_a") == kept("a"), "and may be stored anew"


async def test_a_tenant_pushes_out_its_own_least_recently_used(make):
    async with make() as store:
        await store.put("two", kept("z"))
        for name in "abcd":
            await store.put("one", kept(name))
            await asyncio.sleep(0.002)  # Redis' clock counts milliseconds
        assert await store.get("one", "resp_a")
        await asyncio.sleep(0.002)
        await store.put("one", kept("e"))
        assert await present(store, "one", "abcde") == "acde" and await present(store, "two", "z") == "z"
        await store.put("one", kept("f", size=1900))
        assert await present(store, "one", "abcdef") == "f"
        await store.put("one", kept("g", size=5000))
        assert await present(store, "one", "fg") == "", "one that can never fit is not kept"


async def test_all_tenants_together_are_bounded(make):
    async with make() as store:
        for number in range(40):
            for name in "abc":
                await store.put(f"tenant {number}", kept(name))
        left = [await present(store, f"tenant {number}", "abc") for number in range(40)]
        assert len("".join(left)) == 6
        for number in range(10):
            await store.put(f"large {number}", kept("a", size=900))
        assert 2 <= sum([bool(await present(store, f"large {number}", "a")) for number in range(10)]) <= 3


async def test_a_response_that_is_not_used_expires(make):
    bounds = StoreBounds(tenant_count=9, tenant_bytes=9000, count=9, bytes=9000, ttl_s=0.05)
    async with make(bounds) as store:
        await store.put("one", kept("a"))
        async with asyncio.timeout(5):
            while await store.get("one", "resp_a") is not None:
                await asyncio.sleep(0.06)
        await store.put("one", kept("b"))
        if isinstance(store, MemoryResponses):
            assert (store.count, store.bytes) == (1, kept("b").size)


async def test_memory_counts_what_it_holds():
    store = MemoryResponses(BOUNDS)
    for name in "abcdefgh":
        await store.put("one", kept(name))
        await store.put("one", kept(name))
    assert (store.count, store.bytes) == (4, 4 * kept("a").size)
    for name in "abcdefgh":
        await store.delete("one", f"resp_{name}")
    assert (store.count, store.bytes) == (0, 0)


async def ask(setup, **options):
    return await setup.client.responses.create(**{"model": "tiny", **options})


async def test_a_chain_is_the_whole_conversation(setup):
    first = await ask(setup, input="One", instructions="Be brief.")
    second = await ask(setup, input="Two", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    stream = await ask(setup, input="Three", previous_response_id=second.id, stream=True, store=False)
    third = [event async for event in stream][-1].response
    prompt = setup.tokenizer.decode(list(setup.mesh.prefills[0].requests[-1].prompt_ids), skip_special_tokens=False)
    fox = "assistant\nThe quick brown fox."
    said = ["user\nOne", fox, "user\nTwo", fox, "user\nThree", "assistant\n"]
    assert prompt == "<|im_end|>\n".join(f"<|im_start|>{part}" for part in said), "instructions are not carried over"
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(setup, input="Four", previous_response_id=third.id)
    assert caught.value.code == "previous_response_not_found" and caught.value.param == "previous_response_id"


async def test_tool_results_alone_continue_a_chain(setup):
    setup.says('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    tools = [{"type": "function", "name": "f", "parameters": {}, "strict": False}]
    first = await ask(setup, input="Go", tools=tools)
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "done"}
    setup.says("Fine.")
    second = await ask(setup, input=[output], previous_response_id=first.id, tools=tools)
    assert second.output_text == "Fine."
    prompt = setup.tokenizer.decode(list(setup.mesh.prefills[0].requests[-1].prompt_ids), skip_special_tokens=False)
    assert '{"name": "f", "arguments": {}}' in prompt and "done" in prompt


async def test_items_may_be_named_by_their_ids(setup):
    first = await ask(setup, input="One")
    items = [{"role": "user", "content": "One"}, {"type": "item_reference", "id": first.output[0].id}]
    third = await ask(setup, input=[*items, {"role": "user", "content": "Two"}])
    prompt = setup.tokenizer.decode(list(setup.mesh.prefills[0].requests[-1].prompt_ids), skip_special_tokens=False)
    assert "assistant\nThe quick brown fox.<|im_end|>" in prompt
    listed = await setup.client.responses.input_items.list(third.id, order="asc")
    assert listed.data[1].content[0].text == "The quick brown fox."


async def test_get_list_and_delete(setup):
    items = [{"role": "user", "content": f"message {number}"} for number in range(5)]
    response = await ask(setup, input=items, metadata={"a": "b"})
    assert (await setup.client.responses.retrieve(response.id)).model_dump() == response.model_dump()
    page = await setup.client.responses.input_items.list(response.id, limit=2, order="asc")
    texts = [item.content[0].text async for item in page]
    assert texts == [f"message {number}" for number in range(5)], "the client asks for page after page"
    newest = await setup.client.responses.input_items.list(response.id, limit=1)
    assert newest.data[0].content[0].text == "message 4" and newest.has_more
    for query, field in (({"limit": 0}, "limit"), ({"order": "up"}, "order"), ({"after": "x"}, "after")):
        with pytest.raises(openai.BadRequestError) as caught:
            await setup.client.responses.input_items.list(response.id, **query)
        assert caught.value.param == field
    await setup.client.responses.delete(response.id)
    for call in (
        setup.client.responses.retrieve,
        setup.client.responses.delete,
        setup.client.responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError):
            await call(response.id)


async def test_nothing_is_stored_against_the_clients_will(setup):
    response = await ask(setup, input="One", store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        await setup.client.responses.retrieve(response.id)


@pytest.mark.parametrize("id", ["resp_", "resp_zz", "x", "resp_" + "0" * 99, "resp_0\x00"])
async def test_ids_of_other_shapes_are_unknown(setup, id):
    with pytest.raises(openai.NotFoundError):
        await setup.client.responses.retrieve(id)


async def test_tenants_see_their_own_only(opened, tmp_path):
    keys = key_file(tmp_path / "keys.json", {"key-of-one": "one", "key-of-two": "two"})
    async with opened(api_key="key-of-one", api_keys=keys, server_key="ab" * 16) as setup:
        response = await ask(setup, input="Mine")
        other = setup.client.with_options(api_key="key-of-two")
        for call in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                await call(response.id)
        with pytest.raises(openai.BadRequestError):
            await other.responses.create(model="tiny", input="Whose?", previous_response_id=response.id)
        with pytest.raises(openai.BadRequestError):
            reference = {"type": "item_reference", "id": response.output[0].id}
            await other.responses.create(model="tiny", input=[reference])
        with pytest.raises(openai.AuthenticationError):
            await setup.client.with_options(api_key="key-of-nobody").responses.retrieve(response.id)
        assert (await setup.client.responses.retrieve(response.id)).id == response.id


async def test_a_chain_outlasts_the_gateway(opened, redis_url):
    async with opened(responses_store=redis_url) as setup:
        first = await ask(setup, input="One")
    async with opened(responses_store=redis_url) as setup:
        second = await ask(setup, input="Two", previous_response_id=first.id)
        prompt = setup.tokenizer.decode(list(setup.mesh.prefills[0].requests[-1].prompt_ids))
        assert "One" in prompt and "Two" in prompt
        assert (await setup.client.responses.retrieve(second.id)).previous_response_id == first.id


async def test_without_its_redis_a_gateway_still_answers(opened, tmp_path):
    async with redis_server(tmp_path) as server:
        async with opened(responses_store=server.url) as setup:
            first = await ask(setup, input="One")
            await server.kill()
            assert (await ask(setup, input="Two")).output_text == "The quick brown fox."
            with pytest.raises(openai.InternalServerError) as caught:
                await ask(setup, input="Three", previous_response_id=first.id)
            assert caught.value.status_code == 503 and caught.value.code == "store_unavailable"
        async with open_redis_responses(server.url, BOUNDS) as store:
            with pytest.raises(Unavailable):
                await store.get("one", "resp_a")


async def test_a_count_that_has_lost_its_responses_is_mended(redis_url):
    """A Redis that is full may let the lists go and keep the count."""
    import redis.asyncio

    async with redis.asyncio.Redis.from_url(redis_url) as client, open_redis_responses(redis_url, BOUNDS) as store:
        await client.flushall()
        await client.set("penstock:responses:bytes", 10**12)
        await store.put("one", kept("a"))
        await store.put("one", kept("b"))
        assert await store.get("one", "resp_b") == kept("b")
