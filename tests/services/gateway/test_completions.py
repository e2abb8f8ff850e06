"""Legacy completions through the official client."""

from __future__ import annotations

import pytest
from openai import AsyncOpenAI
from tokenizers.processors import TemplateProcessing

from penstock.gateway.config import GatewayConfig
from penstock.gateway.service import open_gateway

from . import fakes


async def whole(client, **body):
    answer = await client.completions.create(model="tiny", **body)
    found = {choice.index: (choice.text, choice.finish_reason, dump(choice.logprobs)) for choice in answer.choices}
    return found, answer.usage


async def streamed(client, **body):
    found: dict = {}
    usage = None
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async for chunk in await client.completions.create(model="tiny", **body, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text, finish, logprobs = found.get(choice.index, ("", None, None))
            more = dump(choice.logprobs)
            if logprobs and more:
                more = {name: logprobs[name] + more[name] for name in logprobs}
            found[choice.index] = (text + choice.text, finish or choice.finish_reason, more or logprobs)
    return found, usage


def dump(logprobs) -> dict | None:
    return logprobs.model_dump() if logprobs else None


async def both(client, **body):
    first, second = await whole(client, **body), await streamed(client, **body)
    assert first[0] == second[0]
    assert first[1].total_tokens == second[1].total_tokens
    return first


async def test_text(setup):
    choices, usage = await both(setup.client, prompt="the quick")
    assert choices == {0: ("The quick brown fox.", "stop", None)}
    assert usage.prompt_tokens == len(setup.ids("the quick"))


async def test_control_tokens_are_the_clients_own(setup):
    await whole(setup.client, prompt="<|im_start|>")
    assert list(setup.mesh.prefills[0].requests[-1].prompt_ids) == [setup.tokenizer.token_to_id("<|im_start|>")]


async def test_text_begins_as_the_tokenizer_says(tmp_path):
    """Raw text gets the BOS of the tokenizer's post-processor, once; token ids and conversations are as they are."""
    directory = tmp_path / "tiny"
    tokenizer = fakes.make_model(directory)
    bos = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)])
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = tokenizer.encode("the quick", add_special_tokens=False).ids
    script = fakes.Script(say=lambda request: ids, eos=tokenizer.token_to_id("<|im_end|>"))
    async with fakes.open_mesh(script, directory / "tokenizer.json") as mesh:
        config = GatewayConfig(router=mesh.address, model_dir=directory, http_address="127.0.0.1:0")
        async with open_gateway(config) as gateway:
            await gateway.ready()
            client = AsyncOpenAI(base_url=f"http://{gateway.address}/v1", api_key="none")
            for prompt, expected in (("the quick", [bos, *ids]), ("", [bos]), (ids, ids)):
                answer = await client.completions.create(model="tiny", prompt=prompt)
                assert list(mesh.prefills[0].requests[-1].prompt_ids) == expected
                assert answer.usage.prompt_tokens == len(expected)
            await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "the quick"}])
            assert bos not in mesh.prefills[0].requests[-1].prompt_ids
            await client.close()


@pytest.mark.parametrize("prompt", [["a", "b"], [[5, 6], [7]]])
async def test_several_prompts(setup, prompt):
    setup.script.say = lambda request: [*request.prompt_ids, 40 + request.sampling.seed]
    choices, usage = await both(setup.client, prompt=prompt, n=2, seed=1)
    assert list(choices) == [0, 1, 2, 3]
    ids = [setup.ids(one) if isinstance(one, str) else one for one in prompt]
    expected = [setup.tokenizer.decode([*one, 40 + seed]) for one in ids for seed in (1, 2)]
    assert [choices[number][0] for number in range(4)] == expected
    assert usage.prompt_tokens == sum(map(len, ids))


async def test_token_ids(setup):
    await whole(setup.client, prompt=[5, 6, 7])
    assert list(setup.mesh.prefills[0].requests[-1].prompt_ids) == [5, 6, 7]


async def test_logprobs(setup):
    setup.says("fox 🎉 x")
    choices, usage = await both(setup.client, prompt="a", logprobs=2)
    logprobs = choices[0][2]
    length = len(setup.ids("fox 🎉 x")) + 1  # the token that ends the answer, which has no text in it
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == length
    assert usage.completion_tokens == length
    assert logprobs["text_offset"][0] == 0
    assert "fox 🎉 x"[logprobs["text_offset"][-2] :] == logprobs["tokens"][-2]
    assert (logprobs["text_offset"][-1], logprobs["tokens"][-1]) == (len("fox 🎉 x"), "<|im_end|>")
    assert len(logprobs["top_logprobs"][0]) == 2


async def test_stop_and_length(setup):
    assert (await both(setup.client, prompt="a", stop=" brown"))[0] == {0: ("The quick", "stop", None)}
    choices, usage = await both(setup.client, prompt="a", max_tokens=2)
    assert (choices[0][1], usage.completion_tokens) == ("length", 2)


async def test_nothing_is_parsed(setup):
    text = "<think>x</think>\n<tool_call>\n"
    setup.says(text)
    assert (await both(setup.client, prompt="a"))[0][0][0] == text


async def test_token_ids_for_those_who_ask(setup):
    setup.says("The quick brown fox")
    expected = [*setup.ids("The quick brown fox"), setup.script.eos]
    more = {"extra_body": {"return_token_ids": True}}
    answer = await setup.client.completions.create(model="tiny", prompt="a", **more)
    assert answer.choices[0].model_dump()["token_ids"] == expected
    messages = [{"role": "user", "content": "hi"}]
    chat = await setup.client.chat.completions.create(model="tiny", messages=messages, **more)
    assert chat.choices[0].model_dump()["token_ids"] == expected
    ids = []
    async for chunk in await setup.client.chat.completions.create(model="tiny", messages=messages, stream=True, **more):
        ids += chunk.choices[0].model_dump().get("token_ids") or []
    assert ids == expected
    answer = await setup.client.completions.create(model="tiny", prompt="a")
    assert "token_ids" not in answer.choices[0].model_dump()
