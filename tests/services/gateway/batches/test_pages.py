"""Files and batches through the official client, before a mesh of fakes."""

from __future__ import annotations

import asyncio
import json

import httpx2
import msgspec
import openai
import pytest
from jsonschema import Draft202012Validator
from openai import AsyncOpenAI

from penstock.gateway.api.openapi.document import document
from penstock.testing.keys import key_file

from ..fakes import MODEL
from .helpers import ENDPOINT, line, written

DOCUMENT = msgspec.json.decode(document())


@pytest.fixture(scope="module")
async def served(opened, tmp_path_factory):
    store = str(tmp_path_factory.mktemp("batches") / "store")
    settings = {"max_file_bytes": 50_000, "max_tenant_file_bytes": 10_000_000}
    async with opened(batch_store=store, **settings) as made:
        yield made


@pytest.fixture(scope="module")
async def http():
    async with httpx2.AsyncClient() as made:
        yield made


async def uploaded(client: AsyncOpenAI, *lines: object, **fields):
    return await client.files.create(file=("my lines.jsonl", written(*lines)), purpose="batch", **fields)


async def over(client: AsyncOpenAI, id: str):
    async with asyncio.timeout(30):
        while True:
            found = await client.batches.retrieve(id)
            if found.status in ("completed", "failed", "expired", "cancelled"):
                return found
            await asyncio.sleep(0.01)


async def ran(client: AsyncOpenAI, *lines: object, endpoint: str = ENDPOINT, **fields):
    file = await uploaded(client, *lines)
    made = await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)
    assert made.status == "validating"
    return await over(client, made.id)


async def results(client: AsyncOpenAI, id: str):
    text = (await client.files.content(id)).text
    return {one["custom_id"]: one for one in map(json.loads, text.splitlines())}


async def test_a_file(served):
    client, lines = served.client, [line("a"), line("ü")]
    made = await uploaded(client, *lines, expires_after={"anchor": "created_at", "seconds": 7200})
    assert (made.object, made.purpose, made.filename, made.bytes) == (
        "file",
        "batch",
        "my lines.jsonl",
        len(written(*lines)),
    )
    assert made.expires_at == made.created_at + 7200
    assert await client.files.retrieve(made.id) == made
    content = await client.files.content(made.id)
    assert content.content == written(*lines) and content.response.headers["content-length"] == str(made.bytes)
    assert (await client.files.delete(made.id)).deleted
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match=made.id):
            await ask(made.id)


async def test_lists_a_page_at_a_time(opened, tmp_path):
    async with opened(batch_store=str(tmp_path)) as served:
        client = served.client
        made = [(await uploaded(client, line(str(at)))).id for at in range(5)]
        assert [file.id async for file in client.files.list()] == made[::-1], "the newest first"
        assert [file.id async for file in client.files.list(order="asc", limit=2)] == made
        page = await client.files.list(limit=2, after=made[3])
        assert [file.id for file in page.data] == made[1:3][::-1] and page.has_more
        assert not (await client.files.list(after=made[1])).has_more
        assert [file.id async for file in client.files.list(purpose="batch_output")] == []
        for wrong in ({"limit": 0}, {"limit": 10_001}, {"order": "up"}, {"after": "file-none"}):
            with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
                await client.files.list(**wrong)
        batches = [
            (await client.batches.create(input_file_id=id, endpoint=ENDPOINT, completion_window="24h")).id
            for id in made
        ]
        assert [batch.id async for batch in client.batches.list(limit=2)] == batches[::-1]
        with pytest.raises(openai.BadRequestError, match="limit"):
            await client.batches.list(limit=101)


async def test_every_endpoint_and_its_answers(served, http):
    served.says("A fox.")
    client, mini = served.client, {"model": MODEL, "temperature": 0}
    messages = [{"role": "user", "content": "hi"}]
    cases = [
        ("/v1/completions", {"prompt": "hi"}, lambda body: body["choices"][0]["text"]),
        ("/v1/chat/completions", {"messages": messages}, lambda body: body["choices"][0]["message"]["content"]),
        ("/v1/responses", {"input": "hi"}, lambda body: body["output"][0]["content"][0]["text"]),
    ]
    for endpoint, body, text in cases:
        one = {"custom_id": "one", "method": "POST", "url": endpoint, "body": {**mini, **body}}
        found = await ran(client, one, endpoint=endpoint, metadata={"a": "b"})
        assert (found.status, found.metadata, found.model) == ("completed", {"a": "b"}, MODEL), found
        assert (found.request_counts.total, found.request_counts.completed, found.request_counts.failed) == (1, 1, 0)
        answer = (await results(client, found.output_file_id))["one"]
        assert answer["error"] is None and answer["response"]["status_code"] == 200
        assert text(answer["response"]["body"]) == "A fox."
        assert found.usage.output_tokens > 0 and found.usage.input_tokens > 0
        assert answer["id"] == answer["response"]["request_id"]
        told = await http.get(f"{served.url}/v1/requests/{answer['id']}")
        assert told.json()["status"] == "completed", "like any other request"


async def test_lines_go_to_workers_as_those_that_yield(served):
    served.mesh.router.asks.clear()
    await ran(served.client, line("a", body={"penstock": {"priority": 3, "slo": {"ttft": 0.001}, "retain": "5m"}}))
    [ask] = served.mesh.router.asks
    assert ask.yields and not ask.HasField("first_token_s") and not ask.session
    request = served.mesh.decodes[0].requests[-1]
    assert request.yields and not request.retain
    assert not served.mesh.decodes[0].listened[-1], "where calls are given up that have no token for seconds"
    await served.client.completions.create(model=MODEL, prompt="hi", max_tokens=2)
    assert not served.mesh.router.asks[-1].yields
    assert served.mesh.decodes[0].listened[-1]


async def test_a_line_that_fails_is_an_error_of_its_own(served):
    bad = line("bad", body={"temperature": -1})
    unknown = line("unknown", body={"made_up": 1})
    found = await ran(served.client, line("good"), bad, unknown)
    assert (found.status, found.request_counts.completed, found.request_counts.failed) == ("completed", 1, 2)
    assert {*await results(served.client, found.output_file_id)} == {"good"}
    errors = await results(served.client, found.error_file_id)
    assert errors["bad"]["response"]["status_code"] == 400
    assert errors["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert errors["unknown"]["response"]["body"]["error"]["code"] == "unknown_parameter"


async def test_mistakes_have_their_lines(served):
    found = await ran(served.client, line("a"), line("a"), "no json\n", line("b", url="/v1/responses"))
    assert found.status == "failed" and found.errors.object == "list"
    assert [(error.line, error.code, error.param) for error in found.errors.data] == [
        (2, "duplicate_custom_id", "custom_id"),
        (3, "invalid_json_line", None),
        (4, "invalid_url", "url"),
    ]
    assert found.output_file_id is None and found.failed_at


async def test_cancel(served):
    served.script.hang = True
    client = served.client
    file = await uploaded(client, *(line(str(at)) for at in range(5)))
    batch = await client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    await served.mesh.until(lambda: any(worker.live for worker in served.mesh.decodes))
    with pytest.raises(openai.ConflictError, match=batch.id):
        await client.files.delete(file.id)
    told = await client.batches.cancel(batch.id)
    assert told.status == "cancelling" and told.cancelling_at
    found = await over(client, batch.id)
    assert found.status == "cancelled" and found.cancelled_at
    await served.mesh.until(lambda: not any(worker.live for worker in served.mesh.decodes))
    with pytest.raises(openai.ConflictError, match="cancelled"):
        await client.batches.cancel(batch.id)
    assert (await client.files.delete(file.id)).deleted
    served.script.hang = False


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"completion_window": "1s"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"metadata": {str(at): "" for at in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
        ({"extra_body": {"made_up": 1}}, "made_up"),
    ],
)
async def test_a_batch_that_can_not_be(served, changes, param):
    file = await uploaded(served.client, line("a"))
    asked = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError) as caught:
        await served.client.batches.create(**asked | changes)
    assert caught.value.param == param


async def test_the_input_has_to_be_one(served):
    asked = {"endpoint": ENDPOINT, "completion_window": "24h"}
    for id in ("file-" + "0" * 24, "../../etc/passwd", ""):
        with pytest.raises(openai.NotFoundError):
            await served.client.batches.create(input_file_id=id, **asked)
    found = await ran(served.client, line("a"))
    with pytest.raises(openai.BadRequestError, match="batch_output"):
        await served.client.batches.create(input_file_id=found.output_file_id, **asked)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": "assistants"}, "purpose"),
        ({"expires_after": {"anchor": "created_at", "seconds": 60}}, "expires_after[seconds]"),
        ({"expires_after": {"anchor": "last_used", "seconds": 7200}}, "expires_after[anchor]"),
        ({"file": ("empty", b"")}, "file"),
    ],
)
async def test_a_file_that_can_not_be(served, fields, param):
    made = {"file": ("x", b"{}"), "purpose": "batch"}
    with pytest.raises(openai.BadRequestError) as caught:
        await served.client.files.create(**made | fields)
    assert caught.value.param == param


async def test_files_are_bounded(opened, tmp_path):
    settings = {"max_file_bytes": 1000, "max_tenant_file_bytes": 2500, "max_tenant_files": 4}
    async with opened(batch_store=str(tmp_path), **settings) as served:
        client = served.client

        async def send(size: int):
            return await client.files.create(file=("x", b"x" * size), purpose="batch")

        with pytest.raises(openai.APIStatusError, match="1000B") as caught:
            await send(1001)
        assert caught.value.status_code == 413
        first, _ = await send(1000), await send(1000)
        with pytest.raises(openai.APIStatusError, match="together"):
            await send(501)
        assert len([file async for file in client.files.list()]) == 2 and not [*tmp_path.rglob("*.part")]
        await client.files.delete(first.id)
        await send(501)
        await send(1), await send(1)
        with pytest.raises(openai.ConflictError, match="delete some"):
            await send(1)


async def test_results_count_among_the_files_and_batches_are_bounded(opened, tmp_path, monkeypatch):
    from penstock.gateway.batches import desk

    monkeypatch.setattr(desk, "_MOST_KEPT", 2)
    async with opened(batch_store=str(tmp_path), max_tenant_files=1, max_tenant_batches=1) as served:
        client = served.client
        done = await ran(client, line("a"))
        asked = {"input_file_id": done.input_file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
        with pytest.raises(openai.ConflictError, match="2 files are kept for this account, which may have 1"):
            await client.batches.create(**asked)
        await client.files.delete(done.output_file_id)
        served.script.hang = True
        running = await client.batches.create(**asked)
        with pytest.raises(openai.ConflictError, match="1 batches of this account are not over"):
            await client.batches.create(**asked)
        await client.batches.cancel(running.id)
        assert (await over(client, running.id)).status == "cancelled"
        with pytest.raises(openai.ConflictError, match="2 batches of this account are kept"):
            await client.batches.create(**asked)


async def test_a_file_that_is_too_long_is_refused_whatever_its_head_says(served):
    async def body():
        yield b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
        for _ in range(100):
            yield b"x" * 65_536

    form = {"content-type": "multipart/form-data; boundary=x"}
    async with httpx2.AsyncClient() as http:
        answer = await http.post(f"{served.url}/v1/files", content=body(), headers=form)
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "file_too_large"


async def test_an_upload_that_its_client_leaves_is_gone(served):
    before = [file.id async for file in served.client.files.list()]

    async def body():
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\nhalf'
        raise RuntimeError("leaves")

    async with httpx2.AsyncClient() as http:
        with pytest.raises(RuntimeError, match="leaves"):
            await http.post(
                f"{served.url}/v1/files", content=body(), headers={"content-type": "multipart/form-data; boundary=x"}
            )
    assert [file.id async for file in served.client.files.list()] == before


async def test_tenants_see_their_own_alone(opened, tmp_path, http):
    keys = key_file(tmp_path / "keys.json", {"key-one": "one", "key-two": "two"})
    settings = {"api_keys": keys, "server_key": "00" * 16, "batch_store": str(tmp_path / "store")}
    async with opened(api_key="key-one", **settings) as served:
        one, two = served.client, served.client.with_options(api_key="key-two")
        found = await ran(one, line("a"))
        files, batches = (found.input_file_id, found.output_file_id), (found.id,)
        assert len([file async for file in one.files.list()]) == 2
        assert [file async for file in two.files.list()] == [] == [batch async for batch in two.batches.list()]
        for id in files:
            for ask in (two.files.retrieve, two.files.content, two.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await ask(id)
        for id in batches:
            for ask in (two.batches.retrieve, two.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    await ask(id)
        with pytest.raises(openai.NotFoundError):
            await two.batches.create(input_file_id=files[0], endpoint=ENDPOINT, completion_window="24h")
        with pytest.raises(openai.AuthenticationError):
            await one.with_options(api_key="none").files.list()
        usage = (await http.get(f"{served.url}/v1/usage", headers={"x-api-key": "key-one"})).json()
        assert [(row["tenant"], row["requests"]) for row in usage["data"]] == [("one", 1)]


async def test_limits_of_requests_are_for_those_who_wait_and_money_is_for_all(opened, tmp_path):
    terms = tmp_path / "terms.toml"
    terms.write_text(
        "[price.default]\ninput = 1000.0\noutput = 1000.0\n"
        "[limits.default]\nrequests_per_minute = 2\ntokens_per_minute = 5\nconcurrency = 1\nspend_per_day = 0.05\n"
    )
    async with opened(batch_store=str(tmp_path / "store"), terms=terms) as served:
        found = await ran(served.client, *(line(str(at)) for at in range(6)))
        assert found.request_counts.completed == 6, "though they are more than the limits of a minute"
        limited = await served.client.completions.with_raw_response.create(model=MODEL, prompt="hi", max_tokens=1)
        assert limited.headers["x-ratelimit-remaining-requests"] == "1", "nothing of it was taken"
        file = await uploaded(served.client, *(line(str(at)) for at in range(40)))
        batch = await served.client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
        spent = served.gateway.reception.ledger.spent_today
        async with asyncio.timeout(20):
            while spent("default") < 0.05:
                await asyncio.sleep(0.01)
        assert (await served.client.batches.retrieve(batch.id)).status == "in_progress", "the rest waits for tomorrow"
        await served.client.batches.cancel(batch.id)
        found = await over(served.client, batch.id)
        assert 0 < found.request_counts.completed < 40 and found.request_counts.failed == 0


async def test_lines_are_no_part_of_what_is_said_of_live_requests(served):
    sample = served.gateway.metrics.registry.get_sample_value
    names = ("vllm:time_to_first_token_seconds_count", "vllm:e2e_request_latency_seconds_count")
    before = [sample(name, {"model_name": MODEL}) for name in names]
    tokens, lines = (
        sample("vllm:generation_tokens_total", {"model_name": MODEL}),
        sample("penstock_batch_lines_total", {"outcome": "answered"}),
    )
    remembered = len(served.gateway.reception.models.first.sessions)
    await ran(served.client, line("a"), line("b"))
    assert [sample(name, {"model_name": MODEL}) for name in names] == before
    assert sample("vllm:generation_tokens_total", {"model_name": MODEL}) > (tokens or 0)
    assert sample("penstock_batch_lines_total", {"outcome": "answered"}) == (lines or 0) + 2
    assert len(served.gateway.reception.models.first.sessions) == remembered


async def test_without_a_store_the_api_says_how_it_is_switched_on(setup):
    for ask in (setup.client.files.list(), setup.client.batches.list(), uploaded(setup.client, line("a"))):
        with pytest.raises(openai.NotFoundError, match="--batch-store"):
            await ask


async def test_a_gateway_that_stops_leaves_its_batches_to_the_next(opened, tmp_path):
    store = str(tmp_path / "store")
    async with opened(batch_store=store) as first:
        first.script.hang = True
        file = await uploaded(first.client, *(line(str(at)) for at in range(3)))
        batch = await first.client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
        await first.mesh.until(lambda: any(worker.live for worker in first.mesh.decodes))
    async with opened(batch_store=store) as second:
        found = await over(second.client, batch.id)
        assert (found.status, found.request_counts.completed) == ("completed", 3)


async def test_answers_are_as_the_document_says(served):
    def check(name: str, answer: httpx2.Response) -> None:
        assert answer.status_code == 200, answer.text
        schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
        Draft202012Validator(schema).validate(answer.json())

    found = await ran(served.client, line("a"))
    async with httpx2.AsyncClient(base_url=served.url) as http:
        check("FileAnswer", await http.get(f"/v1/files/{found.input_file_id}"))
        check("FilesAnswer", await http.get("/v1/files"))
        check("BatchAnswer", await http.get(f"/v1/batches/{found.id}"))
        check("BatchesAnswer", await http.get("/v1/batches"))
        check("DeletedFileAnswer", await http.delete(f"/v1/files/{found.input_file_id}"))
        content = await http.get(f"/v1/files/{found.output_file_id}/content")
        assert content.headers["content-type"].startswith("application/jsonl")
