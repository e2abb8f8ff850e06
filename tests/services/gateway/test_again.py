"""Any answer can be had again: the seed that was used, and the name of all else that its tokens depend on."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.chat.model import load_chat_model
from penstock.chat.template import ChatTemplate
from penstock.gateway.completing.fingerprint import system_fingerprint
from penstock.kv.spec import KvSpec

HELLO = [{"role": "user", "content": "hello"}]
SPEC = KvSpec(model="m", tokenizer="t", layout="l", dtype="float32", block_size=16, block_bytes=1)


async def test_whole_and_stream_have_one_fingerprint(setup):
    chat, text = setup.client.chat.completions, setup.client.completions
    name = (await chat.create(model="tiny", messages=HELLO)).system_fingerprint
    assert name.startswith("fp_")
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [chunk async for chunk in await chat.create(model="tiny", messages=HELLO, **options)]
    chunks += [chunk async for chunk in await text.create(model="tiny", prompt="a", **options)]
    chunks.append(await text.create(model="tiny", prompt="a"))
    assert {chunk.system_fingerprint for chunk in chunks} == {name}


def test_whatever_changes_tokens_changes_the_fingerprint(model_dir):
    model = load_chat_model(model_dir)
    names = [system_fingerprint(SPEC, model)]
    assert names == [system_fingerprint(dataclasses.replace(SPEC), load_chat_model(model_dir))]
    for change in ({"model": "n"}, {"tokenizer": "u"}, {"layout": "k"}, {"dtype": "bfloat16"}, {"block_size": 32}):
        names.append(system_fingerprint(dataclasses.replace(SPEC, **change), model))
    for change in ({"template": ChatTemplate("x")}, {"template": None}, {"eos_ids": frozenset((1,))}):
        names.append(system_fingerprint(SPEC, dataclasses.replace(model, **change)))
    names += [system_fingerprint(SPEC, model, settings) for settings in (("move", ""), ("", "move"))]
    assert len({*names}) == len(names)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", [None, 0, -5, 7, 2**63 + 1])
async def test_the_seed_is_given_back_and_gives_the_same_text(setup, given, stream):
    """The text is the seed that the worker got; see tests/mesh/test_usage.py for a real engine."""
    setup.script.say = lambda request: setup.ids(f"seed {request.sampling.seed}")

    async def ask(seed: int | None) -> tuple[str, int, str]:
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        create = setup.client.chat.completions.with_raw_response.create
        raw = await create(model="tiny", messages=HELLO, temperature=1.5, seed=seed, **options)
        answer = raw.parse()
        if not stream:
            return answer.choices[0].message.content, answer.usage.penstock["seed"], raw.headers["x-penstock-seed"]
        chunks = [chunk async for chunk in answer]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        return text, chunks[-1].usage.penstock["seed"], raw.headers["x-penstock-seed"]

    text, seed, header = await ask(given)
    assert header == str(seed)
    assert given is None or seed == given
    assert given is not None or 0 <= seed < 2**53, "a number that every client's JSON can hold"
    assert await ask(seed) == (text, seed, header)
    if given is None:
        assert (await ask(None))[0] != text
