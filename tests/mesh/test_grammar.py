"""Structured output through the whole mesh: prefill gives the first token, decode the others, a draft service proposes,
workers die; the text is the one of an engine alone, and an instance of its schema."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace

import jsonschema
import pytest
from tokenizers import Tokenizer

from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.request import Request, SamplingParams
from penstock.errors import InvalidRequest
from penstock.gateway.completing.completion import Caller
from penstock.gateway.request.ask import Ask, Sampling
from penstock.models import embedded
from penstock.testing import schemas
from penstock.testing.mesh import Mesh, MeshSetup

from .support import process, until

MINI, NAME = embedded("penstock-mini"), "penstock-mini"
TOKENIZER = Tokenizer.from_file(str(MINI / "tokenizer.json"))
PROMPT = tuple(TOKENIZER.encode("<|im_start|>user\nList files, with tags and counts.<|im_end|>\n" * 8).ids)
FILE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "tags", "count"],
    "additionalProperties": False,
}
FILES = {"type": "array", "items": FILE, "minItems": 40, "maxItems": 40}
GREEDY = SamplingParams(max_tokens=2500, temperature=0.0, grammar=schemas.grammar(FILES))
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=5)


@dataclass
class Answer:
    """What the tests compare."""

    ids: list[int]
    finish: str | None

    def check(self) -> None:
        """It ended by itself, as an instance of its schema."""
        assert self.finish == "stop"
        jsonschema.validate(json.loads(TOKENIZER.decode(self.ids)), FILES)


@pytest.fixture(scope="module")
async def alone() -> list[Answer]:
    """Greedy and seeded, of an engine without drafts."""
    found = []
    async with Engine.open(EngineConfig(model=MINI, draft_tokens=0)) as engine:
        for sampling in (GREEDY, SEEDED):
            ids, finish = [], None
            async with aclosing(engine.generate(Request(f"{len(found)}", PROMPT, sampling))) as updates:
                async for update in updates:
                    ids += [token.token for token in update.tokens]
                    finish = update.finish
            found.append(Answer(ids, finish))
            found[-1].check()
    return found


@pytest.fixture(scope="module")
async def mesh(meshes) -> AsyncIterator[Mesh]:
    always = {"draft_always": True, "draft_timeout_s": 10.0}
    setup = MeshSetup(model=MINI, draft=str(embedded("penstock-mini-draft")), model_name=NAME, engine=always)
    async with meshes(setup) as mesh:
        yield mesh


async def answer_of(mesh: Mesh, sampling: SamplingParams, seen: asyncio.Event | None = None) -> Answer:
    """Through the gateway; sets `seen` after 50 tokens."""
    wanted = Sampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        grammar=sampling.grammar,
    )
    ask = Ask(NAME, [PROMPT], wanted, return_token_ids=True, chat=False)
    found = Answer([], None)
    async with mesh.gateway.reception.models.open(
        ask, Caller(tenant="default", session="", request_id=f"grammar-{id(found)}", began=time.perf_counter())
    ) as completion:
        while deltas := await completion.outbox.next():
            for delta in deltas:
                found.ids += delta.token_ids
                found.finish = delta.finish or found.finish
            if seen is not None and len(found.ids) >= 50:
                seen.set()
    return found


async def test_the_mesh_gives_the_tokens_of_an_engine_alone(mesh, alone):
    stats = mesh.decode[0].worker.engine.stats
    before, proposed = stats(), mesh.draft.metrics.tokens._value.get()
    answers = await asyncio.gather(*[answer_of(mesh, sampling) for sampling in (GREEDY, SEEDED, GREEDY, SEEDED)])
    for answer, expected in zip(answers, [*alone, *alone], strict=True):
        answer.check()
        assert answer.ids == expected.ids
    assert mesh.prefill[0].worker.engine.stats().generated_tokens > 0, "prefill gave first tokens"
    assert stats().accepted - before.accepted > 1000
    assert mesh.draft.metrics.tokens._value.get() > proposed


async def test_a_decode_worker_that_dies_leaves_no_torn_text(mesh, alone):
    """The answer goes on in another worker, which knows the grammar's state from the tokens so far alone."""
    arguments = ["--kvstore", mesh.kvstore.address, "--host-id", "test", "--router", mesh.router.address]
    arguments += ["--model", str(MINI), "--model-name", NAME, "--draft", mesh.draft.address]
    async with process("decode", *arguments) as (address, pid):
        seats = [seat for seat in mesh.router.planner.registry if seat.member.role]
        [dies] = [seat for seat in seats if seat.member.address == address]
        [healthy] = [seat for seat in seats if seat.member.role == dies.member.role and seat is not dies]
        healthy.drain()
        seen = [asyncio.Event() for _ in alone]
        running = asyncio.gather(
            *[answer_of(mesh, sampling, event) for sampling, event in zip((GREEDY, SEEDED), seen, strict=True)]
        )
        await asyncio.gather(*[event.wait() for event in seen])
        assert not running.done()
        healthy.drain(False)
        before = mesh.decode[0].worker.engine.stats().generated_tokens
        os.kill(pid, signal.SIGKILL)
        answers = await running
    for answer, expected in zip(answers, alone, strict=True):
        answer.check()
        assert answer.ids == expected.ids
    assert mesh.decode[0].worker.engine.stats().generated_tokens > before
    assert mesh.gateway.metrics.registry.get_sample_value("penstock_replans_total", {"model_name": NAME}) >= 1


async def test_a_text_that_is_cut_is_cut_for_its_length(mesh, alone):
    answer = await answer_of(mesh, replace(GREEDY, max_tokens=70))
    assert answer.ids == alone[0].ids[:70] and answer.finish == "length"


async def test_a_broken_grammar_is_named_and_fails_alone(mesh, alone):
    good, bad = await asyncio.gather(
        answer_of(mesh, GREEDY), answer_of(mesh, replace(GREEDY, grammar="no grammar")), return_exceptions=True
    )
    assert isinstance(bad, InvalidRequest) and bad.field == "grammar" and "Expected" in str(bad)
    assert good.ids == alone[0].ids
    await until(lambda: mesh.decode[0].worker.engine.stats().running == 0, "nothing is left of it")
