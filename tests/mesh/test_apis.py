"""Responses and Messages through a running mesh: the next turn of a conversation is found in the cache, and usage says
so in each API's own words."""

from __future__ import annotations

from pathlib import Path

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from penstock.testing.mesh import MeshSetup

from .support import BLOCK

MODELS = Path(__file__).parents[2] / "libs/penstock/models"
LONG = "You are a careful assistant who answers in one short sentence and never guesses. " * 4
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["capital", "port"]}, "founded": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["kind", "founded"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
async def mesh(meshes):
    async with meshes(MeshSetup(model=MODELS / "penstock-mini", model_name="mini")) as mesh:
        yield mesh


async def test_a_chain_of_responses_computes_only_what_is_new(mesh):
    async with AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", timeout=60) as client:
        options = {"model": "mini", "temperature": 0, "max_output_tokens": 40}
        first = await client.responses.create(input=f"{LONG} Say hello.", **options)
        known = (first.usage.input_tokens + first.usage.output_tokens) // BLOCK * BLOCK

        async def second():
            return await client.responses.create(input="Again.", previous_response_id=first.id, **options)

        usage = (await second()).usage
        # The last block of an answer, and what a template writes after it, may be computed again.
        assert usage.input_tokens_details.cached_tokens >= known - 2 * BLOCK
        own = usage.model_dump()["penstock"]
        assert own["computed_tokens"] + usage.input_tokens_details.cached_tokens == usage.input_tokens
        stream = await client.responses.create(
            input="Once more.", previous_response_id=first.id, stream=True, **options
        )
        last = [event async for event in stream][-1]
        assert last.type in ("response.completed", "response.incomplete")
        assert last.response.usage.input_tokens_details.cached_tokens >= known - 2 * BLOCK


async def test_a_form_of_the_text_holds(mesh):
    async with AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", timeout=60) as client:
        form = {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}
        response = await client.responses.create(model="mini", input="A city.", text={"format": form})
        assert response.output_text.startswith('{"kind": ') and response.status == "completed"


async def test_messages_of_a_session_are_read_from_the_cache(mesh):
    async with AsyncAnthropic(base_url=mesh.url, api_key="none", timeout=60) as client:
        system = [{"type": "text", "text": LONG + "Be kind.", "cache_control": {"type": "ephemeral"}}]
        options = {"model": "mini", "max_tokens": 30, "system": system}
        turns = [{"role": "user", "content": "Say hello."}]
        first = await client.messages.create(messages=turns, **options)
        told = first.usage
        assert told.cache_creation_input_tokens + told.cache_read_input_tokens >= 4 * BLOCK
        counted = await client.messages.count_tokens(model="mini", system=system, messages=turns)
        every = told.input_tokens + told.cache_creation_input_tokens + told.cache_read_input_tokens
        assert counted.input_tokens == every
        turns += [first.to_param(), {"role": "user", "content": "Again."}]
        async with client.messages.stream(messages=turns, **options) as stream:
            second = await stream.get_final_message()
        assert second.usage.cache_read_input_tokens >= every // BLOCK * BLOCK - BLOCK
