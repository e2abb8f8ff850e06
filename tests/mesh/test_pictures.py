"""Pictures through the whole mesh, by the client library: the same one is found again, and another one is not."""

from __future__ import annotations

import grpc
import openai
import pytest

from penstock.chat.messages import Message, PictureLink
from penstock.chat.model import load_chat_model
from penstock.chat.prompt import common_prefix
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.request import Request, SamplingParams
from penstock.gateway.completing.prompts import Naming, prepare, without_links
from penstock.gateway.request.ask import Conversation, Keep
from penstock.testing.mesh import MeshSetup
from penstock.testing.seeing import picture_url, write_seeing, write_seeing_whole
from penstock.v1 import gateway_pb2, gateway_pb2_grpc

from .support import fail_once

BLOCK = 16
ONE, OTHER, WIDE = picture_url(1, 50, 60), picture_url(2, 50, 60), picture_url(3, 130, 60)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_seeing(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture(scope="module", params=["disaggregated", "aggregated", "sealed"])
async def mesh(request, model, meshes):
    options = MeshSetup(model=model, aggregated=request.param == "aggregated", seal=request.param == "sealed")
    async with meshes(options) as mesh:
        yield mesh


@pytest.fixture(scope="module")
async def client(mesh):
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
async def alone(model):
    async with Engine.open(EngineConfig(model=model, kv_pool_tokens=8192)) as engine:
        yield engine


def parts(*given):
    return [
        {"type": "image_url", "image_url": {"url": part}}
        if part.startswith("data:")
        else {"type": "text", "text": part}
        for part in given
    ]


async def ask(client, *given, **more):
    """The answer's tokens, and how many of the prompt's were cached, of how many."""
    message = {"role": "user", "content": parts(*given)}
    extra = {"ignore_eos": True, "return_token_ids": True, **more}
    answer = await client.chat.completions.create(
        model="tiny", messages=[message], max_tokens=8, temperature=0, extra_body=extra
    )
    usage = answer.usage
    return answer.choices[0].token_ids, usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens


async def said_alone(engine, model, *given):
    """What one engine says of the same prompt, without the mesh."""
    links = tuple(PictureLink(part, "x") if part.startswith("data:") else part for part in given)
    text = "".join(part for part in given if not part.startswith("data:"))
    naming = Naming(b"r" * 32, BLOCK, 1024)
    made = prepare(load_chat_model(model), Conversation([Message("user", text, parts=links)]), naming)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    request = Request("alone", tuple(made.ids), sampling, pictures=tuple(made.pictures))
    ids = []
    async for update in engine.generate(request):
        ids += [token.token for token in update.tokens]
    return ids


async def test_the_same_picture_is_found_and_another_one_is_not(client, alone, model):
    before, behind = "what is in this picture? ", " say it in a few words, please"
    said, cached, tokens = await ask(client, before, ONE, behind)
    assert cached == 0 and said == await said_alone(alone, model, before, ONE, behind)
    whole = (tokens - 1) // BLOCK * BLOCK
    for _ in range(50):
        again, cached, _ = await ask(client, before, ONE, behind)
        assert again == said
        if cached >= whole:
            break
    assert cached >= whole, "also what comes behind it"
    other, cached, _ = await ask(client, before, OTHER, behind)
    assert other == await said_alone(alone, model, before, OTHER, behind) != said
    assert cached <= len("<|im_start|>user\n" + before), "no token of the picture"


async def test_another_file_of_the_same_picture_is_found(client):
    """Lossless, and so the same to the model."""
    first, second = (picture_url(9, 50, 60, kind) for kind in ("PNG", "WEBP"))
    said, _, tokens = await ask(client, "which file? ", first)
    again, cached = [], 0
    for _ in range(50):
        again, cached, _ = await ask(client, "which file? ", second)
        if cached >= (tokens - 1) // BLOCK * BLOCK:
            break
    assert again == said and cached >= (tokens - 1) // BLOCK * BLOCK


async def test_metrics_say_what_was_computed(mesh, client):
    """A wide picture has three tiles and one of all of it; what has its KV in the cache is not computed again."""

    def told(name):
        values = [worker.metrics.registry.get_sample_value(f"penstock_picture{name}", {}) for worker in mesh.workers]
        return sum(values)

    before, given = told("_tiles_computed_total"), ("metrics ", picture_url(17, 130, 60), " end")
    for _ in range(3):
        await ask(client, *given)
    computed = told("_tiles_computed_total") - before
    assert computed % 4 == 0 and 4 <= computed <= 4 * len(mesh.workers)
    assert told("_tile_seconds_total") > 0 and told("s") >= 1 and told("_bytes") > 0


async def test_several_pictures_of_many_tiles(client, alone, model):
    given = ("first ", WIDE, " then ", ONE, WIDE, " end")
    said, _, tokens = await ask(client, *given)
    assert said == await said_alone(alone, model, *given)
    assert tokens > 2 * 4 * BLOCK + BLOCK, "a wide one has three tiles and one of all of it"


async def test_a_model_that_does_not_cut_pictures(tmp_path, meshes):
    """Its embeddings are turned by their places in the picture, and what is behind it by less than by its position."""
    model = write_seeing_whole(tmp_path / "model")
    one, other, turned = picture_url(1, 90, 40), picture_url(2, 90, 40), picture_url(1, 40, 90)
    async with (
        meshes(MeshSetup(model=model)) as mesh,
        openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client,
        Engine.open(EngineConfig(model=model, kv_pool_tokens=4096)) as alone,
    ):
        said = {}
        for picture in (one, other, turned):
            given = ("look at this picture: ", picture, " and say what it is")
            said[picture], cached, tokens = await ask(client, *given)
            assert said[picture] == await said_alone(alone, model, *given)
            assert cached <= len("<|im_start|>user\nlook at this picture: "), "no token of the picture"
            for _ in range(50):
                again, cached, _ = await ask(client, *given)
                assert again == said[picture]
                if cached >= (tokens - 1) // BLOCK * BLOCK:
                    break
            assert cached >= (tokens - 1) // BLOCK * BLOCK
        assert len(set(map(tuple, said.values()))) > 1
        both, _, _ = await ask(client, one, " or ", turned, "?")
        assert both == await said_alone(alone, model, one, " or ", turned, "?")


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF"])
async def test_other_formats(client, alone, model, kind):
    url = picture_url(4, 40, 40, kind)
    said, _, _ = await ask(client, kind, url)
    assert said == await said_alone(alone, model, kind, url)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("https://example.com/cat.png",), "must be a data: URL"),
        (("data:image/tiff;base64,AAAA",), "must be a data: URL"),
        (("data:image/png;base64,AAAA",), "is not a PNG picture that can be read"),
        (("data:image/png;base64,%%%",), "is not base64"),
        ((ONE,) * 33, "a request may have 32 pictures"),
    ],
)
async def test_what_is_refused_names_its_place(client, given, says):
    content = [{"type": "image_url", "image_url": {"url": url}} for url in given]
    with pytest.raises(openai.BadRequestError, match=says) as refused:
        await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": content}], max_tokens=1
        )
    assert refused.value.param == f"messages[0].content[{len(given) - 1}].image_url.url"


async def test_a_model_of_texts_says_so(tiny, meshes):
    async with (
        meshes(MeshSetup(model=tiny, aggregated=True)) as mesh,
        openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.BadRequestError, match=r"messages\[0\].*url: this model sees no pictures"):
            await ask(client, "look", ONE)


async def test_an_answer_goes_on_elsewhere_when_its_worker_fails(model, meshes, alone, monkeypatch):
    """The next worker has never seen the picture, nor its KV, and is shown it."""
    async with (
        meshes(MeshSetup(model=model, aggregated=True, decode=2, kvstore=False)) as mesh,
        openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client,
    ):
        fail_once(mesh, monkeypatch)
        said, _, _ = await ask(client, "what is this? ", WIDE, " and this? ", ONE)
        assert said == await said_alone(alone, model, "what is this? ", WIDE, " and this? ", ONE)
        assert all(worker.worker.pictures.used_bytes for worker in mesh.decode), "both were shown them"


async def test_a_stream_with_another_picture_is_not_gone_on_with(mesh, http):
    """Both prompts have the same tokens."""
    body = {"model": "tiny", "max_tokens": 4, "stream": True}
    key = {"idempotency-key": "one key"}

    async def asked(url, **more):
        messages = [{"role": "user", "content": parts("look at ", url)}]
        return await http.post(
            f"{mesh.url}/v1/chat/completions", json={**body, "messages": messages}, headers={**key, **more}
        )

    answer = await asked(ONE)
    last = next(line[4:] for line in answer.text.splitlines() if line.startswith("id: "))
    assert (await asked(ONE, **{"last-event-id": last})).status_code == 200
    refused = await asked(OTHER, **{"last-event-id": last})
    assert refused.status_code == 409 and "last-event-id" in refused.json()["error"]["message"]


async def test_the_other_apis_show_the_same(mesh, http, client):
    """The same tokens, of which all full blocks are known by then."""
    texts = ("one api ", " and another")
    _, _, tokens = await ask(client, texts[0], ONE, texts[1])
    media, data = ONE.removeprefix("data:").split(";base64,")
    image = {"type": "image", "source": {"type": "base64", "media_type": media, "data": data}}
    content = [{"type": "text", "text": texts[0]}, image, {"type": "text", "text": texts[1]}]
    turns = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    said = (await http.post(f"{mesh.url}/v1/messages", json={**turns, "max_tokens": 4})).json()
    usage = said["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == tokens
    counted = await http.post(f"{mesh.url}/v1/messages/count_tokens", json=turns)
    assert counted.json() == {"input_tokens": tokens}
    items = [{"type": "input_text", "text": texts[0]}, {"type": "input_image", "image_url": ONE}]
    items.append({"type": "input_text", "text": texts[1]})
    answer = await client.responses.create(
        model="tiny", input=[{"role": "user", "content": items}], max_output_tokens=16, store=False
    )
    assert answer.usage.input_tokens == tokens
    assert answer.usage.input_tokens_details.cached_tokens >= (tokens - 1) // BLOCK * BLOCK - 4 * BLOCK


async def test_results_of_tools_have_pictures(mesh, http):
    """In each API the same prompt: one screen, and what the tool says of it."""
    said = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat = [
        {"role": "user", "content": "look around"},
        {"role": "assistant", "content": None, "tool_calls": [said]},
        {"role": "tool", "tool_call_id": "c1", "content": parts("the screen: ", ONE)},
    ]
    body = {"model": "tiny", "messages": chat, "max_tokens": 4, "temperature": 0}
    answer = (await http.post(f"{mesh.url}/v1/chat/completions", json=body)).json()
    tokens = answer["usage"]["prompt_tokens"]
    media, data = ONE.removeprefix("data:").split(";base64,")
    image = {"type": "image", "source": {"type": "base64", "media_type": media, "data": data}}
    for failed, more in ((False, 0), (True, len("Error: "))):
        result = {"type": "tool_result", "tool_use_id": "c1", "is_error": failed}
        result["content"] = [{"type": "text", "text": "the screen: "}, image]
        turns = [
            {"role": "user", "content": "look around"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
            {"role": "user", "content": [result]},
        ]
        counted = await http.post(f"{mesh.url}/v1/messages/count_tokens", json={"model": "tiny", "messages": turns})
        assert counted.json() == {"input_tokens": tokens + more}
    output = [{"type": "input_text", "text": "the screen: "}, {"type": "input_image", "image_url": ONE}]
    items = [
        {"role": "user", "content": "look around"},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": output},
    ]
    told = {"model": "tiny", "input": items, "max_output_tokens": 16, "store": False}
    response = (await http.post(f"{mesh.url}/v1/responses", json=told)).json()
    assert response["usage"]["input_tokens"] == tokens


async def test_they_are_shown_by_grpc_too(client, mesh):
    given = ("by grpc ", ONE, "and ", WIDE)
    shown = [{"image_url": part} if part.startswith("data:") else {"text": part} for part in given]
    body = gateway_pb2.ChatCompletionRequest(
        model="tiny",
        messages=[gateway_pb2.ChatMessage(role="user", parts=shown)],
        max_completion_tokens=8,
        temperature=0,
        ignore_eos=True,
    )
    answer = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": parts(*given)}],
        max_tokens=8,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    text, tokens = "", 0
    async with grpc.aio.insecure_channel(mesh.gateway.grpc_address) as channel:
        async for chunk in gateway_pb2_grpc.GatewayStub(channel).ChatCompletion(body):
            text, tokens = text + chunk.content, tokens or chunk.usage.prompt_tokens
    assert (text, tokens) == (answer.choices[0].message.content, answer.usage.prompt_tokens)


async def test_who_shows_no_pictures_is_refused_by_name(http, mesh):
    for role in ("system", "assistant"):
        body = {"model": "tiny", "messages": [{"role": role, "content": parts(ONE)}], "max_tokens": 1}
        answer = await http.post(f"{mesh.url}/v1/chat/completions", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages[0].content"


@pytest.mark.parametrize(
    "source", [{"type": "url", "url": "https://example.com/cat.png"}, {"type": "base64", "data": "AAAA"}, None]
)
async def test_a_source_that_is_none(mesh, http, source):
    image = {"type": "image", **({"source": source} if source else {})}
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": [image]}]}
    answer = await http.post(f"{mesh.url}/v1/messages", json=body)
    assert answer.status_code == 400 and "messages[0].content[0].source" in answer.json()["error"]["message"]


async def test_a_stored_response_is_gone_on_with(client):
    """Its pictures too."""
    content = [{"type": "input_text", "text": "remember this "}, {"type": "input_image", "image_url": ONE}]
    first = await client.responses.create(
        model="tiny", input=[{"role": "user", "content": content}], max_output_tokens=16
    )
    listed = await client.responses.input_items.list(first.id)
    assert [part.type for part in listed.data[0].content] == ["input_text", "input_image"]
    second = await client.responses.create(
        model="tiny", input="what was it?", previous_response_id=first.id, max_output_tokens=16
    )
    assert second.usage.input_tokens > first.usage.input_tokens + 16


def test_a_mark_behind_a_picture_keeps_its_blocks(model):
    chat, naming = load_chat_model(model), Naming(b"r" * 32, BLOCK, 1024)
    marked = Message("user", " keep me ", parts=(PictureLink(WIDE, "x"), " keep me "))
    rest = Message("user", "and not me, whatever comes")
    made = prepare(chat, Conversation([marked, rest], keeps=[Keep(60.0, [marked])]), naming)
    alone = prepare(chat, Conversation([marked]), naming)
    [wish] = made.keep
    assert wish.blocks == common_prefix(made.ids, alone.ids) // BLOCK > 4


def test_the_files_of_pictures_go_when_they_are_decoded():
    marked = Message("user", "look", parts=(PictureLink(WIDE, "x"), "look"))
    left = without_links(Conversation([marked], keeps=[Keep(60.0, [marked])]))
    assert WIDE not in repr(left) and [keep.seconds for keep in left.keeps] == [60.0]
