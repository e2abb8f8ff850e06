"""Usage is exact in the whole mesh: streamed or not, cut short or not, whole or moved.

That it adds up, by the counts of those who did the work, `conftest.usage_adds_up` checks after every test here."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import pairwise

import pytest

from penstock.engine.request import SamplingParams
from penstock.errors import NotFound
from penstock.load.options import LoadOptions
from penstock.load.processes import ClientProcesses
from penstock.load.report import report as load_report
from penstock.load.running import run as run_load
from penstock.testing.mesh import MeshSetup
from penstock.worker.serving.offering import Handoffs

from .support import BLOCK, ask, body_of, idle, in_pages, prompt, settled, until

PLAIN = SamplingParams(
    max_tokens=30, temperature=0.0, ignore_eos=True, logit_bias=dict.fromkeys(range(256, 260), -100.0)
)


@pytest.fixture(scope="module", params=[False, True], ids=["disaggregated", "aggregated"])
async def mesh(request, tiny, meshes):
    async with meshes(MeshSetup(model=tiny, aggregated=request.param)) as mesh:
        yield mesh


async def streamed(http, mesh, body):
    """The text, the ids and the usage of a streamed completion."""
    text, ids, usage = "", [], None
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", f"{mesh.url}/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                usage = chunk["usage"] or usage
                for choice in chunk["choices"]:
                    text += choice["text"]
                    ids += choice.get("token_ids", [])
    return text, ids, usage


async def test_a_stop_string_ends_the_answer_and_not_the_account(mesh, http):
    """The worker is cut off in the middle; what it reported so far is what is charged."""
    tokens = prompt(f"stop/{mesh.url}", 100)
    whole = await ask(http, mesh, tokens, PLAIN)
    await settled(mesh, tokens[: len(tokens) // BLOCK * BLOCK])
    text, ids, usage = await streamed(http, mesh, body_of(tokens, PLAIN))
    assert ids == whole.ids
    letter = next(letter for letter in text[5:] if letter.isascii() and letter.isprintable())
    _, ids, usage = await streamed(http, mesh, body_of(tokens, PLAIN) | {"stop": [letter]})
    assert 0 < len(ids) < len(whole.ids)
    assert usage["completion_tokens"] == len(ids)
    assert usage["prompt_tokens_details"]["cached_tokens"] == len(tokens) // BLOCK * BLOCK
    assert usage["penstock"]["computed_tokens"] == len(tokens) % BLOCK


async def test_one_token(mesh, http, oracle):
    """max_tokens = 1: prefill alone, or a worker that stops at once."""
    one = SamplingParams(max_tokens=1, temperature=0.0)
    tokens = prompt(f"one/{mesh.url}", 90)
    answer = await ask(http, mesh, tokens, one)
    expected = await oracle(tokens, one)
    assert answer.ids == expected.ids
    assert answer.finish == expected.finish
    assert (answer.cached, answer.computed) == (0, 90)


async def test_end_of_text_as_the_first_token(mesh, http, oracle):
    ending = SamplingParams(max_tokens=20, temperature=0.0, logit_bias={257: 100.0})
    tokens = prompt(f"eos/{mesh.url}", 90)
    answer = await ask(http, mesh, tokens, ending)
    assert (answer.ids, answer.finish) == ([257], "stop")
    assert (await oracle(tokens, ending)).finish == "stop"


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 96, 160])
async def test_prompts_at_block_borders(mesh, http, oracle, length):
    """The router knows where blocks are, and of less than one nothing: that goes to any worker, so one answer more than
    there are workers meets one of them twice."""
    tokens = prompt(f"border/{length}/{mesh.url}", length)
    expected = await oracle(tokens, PLAIN)
    cached = []
    for _ in range(2 if length >= BLOCK else len(mesh.workers) + 1):
        answer = await ask(http, mesh, tokens, PLAIN)
        assert answer.ids == expected.ids
        cached.append(answer.cached)
        await settled(mesh, tokens[: length // BLOCK * BLOCK])
        await idle(mesh)
    assert cached[0] == 0 and max(cached) == in_pages(length - 1)


async def test_streamed_and_whole_agree(mesh, http):
    body = body_of(prompt(f"agree/{mesh.url}", 70), PLAIN)
    whole = (await http.post(f"{mesh.url}/v1/completions", json=body)).json()
    text, ids, usage = await streamed(http, mesh, body)
    assert text == whole["choices"][0]["text"]
    assert ids == whole["choices"][0]["token_ids"]
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]


async def test_several_choices_of_one_prompt(mesh, http, oracle):
    """Choice i is what seed + i gives; the prompt is charged once."""
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
    tokens = prompt(f"n/{mesh.url}", 80)
    body = body_of(tokens, sampling) | {"n": 3}
    found = (await http.post(f"{mesh.url}/v1/completions", json=body)).json()
    for choice in found["choices"]:
        seeded = SamplingParams(max_tokens=12, temperature=1.0, seed=5 + choice["index"], ignore_eos=True)
        assert choice["token_ids"] == (await oracle(tokens, seeded)).ids
    assert found["usage"]["prompt_tokens"] == 80
    assert found["usage"]["completion_tokens"] == 36
    assert found["usage"]["penstock"]["computed_tokens"] == 80, "the other choices fetch what the first has computed"


async def test_the_seed_that_was_drawn_gives_the_answer_again(mesh, http):
    body = body_of(prompt(f"again/{mesh.url}", 40), PLAIN) | {"temperature": 1.5, "n": 2, "seed": None}
    first = (await http.post(f"{mesh.url}/v1/completions", json=body)).json()
    again = body | {"seed": first["usage"]["penstock"]["seed"]}
    second = (await http.post(f"{mesh.url}/v1/completions", json=again)).json()
    other = (await http.post(f"{mesh.url}/v1/completions", json=body)).json()
    assert first["choices"] == second["choices"] != other["choices"]
    assert first["system_fingerprint"] == second["system_fingerprint"]


async def test_several_prompts_are_charged_each(mesh, http):
    prompts = [prompt(f"several/{number}/{mesh.url}", 40 + 30 * number) for number in range(3)]
    body = body_of(prompts[0], PLAIN) | {"prompt": prompts, "n": 2}
    usage = (await http.post(f"{mesh.url}/v1/completions", json=body)).json()["usage"]
    assert usage["prompt_tokens"] == usage["penstock"]["computed_tokens"] == sum(map(len, prompts))
    assert usage["completion_tokens"] == 6 * PLAIN.max_tokens


async def test_a_handoff_that_fails_charges_the_prompt_once(mesh, http, oracle, monkeypatch):
    """Decode computes the prompt again, with what it finds in the store: the mesh's cost, not the client's."""

    async def fails(handoffs, name):
        raise NotFound("no such hand-off")

    monkeypatch.setattr(Handoffs, "take", fails)
    tokens = prompt(f"fault/{mesh.url}", 100)
    answer = await ask(http, mesh, tokens, PLAIN)
    assert answer.ids == (await oracle(tokens, PLAIN)).ids
    assert (answer.cached, answer.computed) == (0, 100)
    faults = [served.metrics.registry.get_sample_value("penstock_handoff_faults_total") for served in mesh.decode]
    assert faults == [1 if mesh.prefill else 0]


async def test_a_request_that_moves_is_charged_once(mesh, http, oracle):
    """Its second worker fetches or computes the prompt again, and the answer so far: both of its counts add up."""
    tokens = prompt(f"moves/{mesh.url}", 100)
    long = replace(PLAIN, max_tokens=600)
    running = asyncio.create_task(ask(http, mesh, tokens, long))
    engine = mesh.decode[0].worker.engine
    start = engine.stats().generated_tokens
    await until(lambda: engine.stats().generated_tokens > start + 50, "it runs")
    await mesh.gateway.reception.models.first._workers._channels.forget(mesh.decode[0].address)
    answer = await running
    assert answer.ids == (await oracle(tokens, long)).ids
    assert (answer.cached, answer.computed) == (0, 100)


async def test_sessions_that_start_together_compute_their_common_prefix_once(mesh, http, oracle):
    """The first one is charged for it; the others find it in the worker's pages, or in the store."""
    common = prompt(f"common/{mesh.url}", 40 * BLOCK)
    prompts = [common + prompt(f"own/{number}", 20 + number) for number in range(8)]

    def rows():
        return sum(worker.engine.stats().computed_tokens for worker in mesh.workers)

    before = rows()
    one = replace(PLAIN, max_tokens=1)
    answers = await asyncio.gather(*[ask(http, mesh, tokens, one) for tokens in prompts])
    for tokens, answer in zip(prompts, answers, strict=True):
        assert answer.ids == (await oracle(tokens, one)).ids
    own = sum(map(len, prompts)) - 8 * len(common)
    assert sorted(answer.cached for answer in answers) == [0, *[len(common)] * 7]
    assert sum(answer.computed for answer in answers) == len(common) + own
    assert rows() - before == len(common) + own, "in fact too"


async def test_the_next_turn_on_the_same_worker_moves_nothing(mesh, http):
    """Its blocks and its tail are in the worker's pages: no store gives any, and none is stored again."""
    tokens = prompt(f"turn/{mesh.url}", 10 * BLOCK + 9)
    first = await ask(http, mesh, tokens, PLAIN, session="turn")
    full = [*tokens, *first.ids]
    await settled(mesh, full[: (len(full) - 1) // BLOCK * BLOCK])
    await idle(mesh)

    def moved():
        metrics = [served.metrics for served in (*mesh.prefill, *mesh.decode)]
        return [metric._value.get() for one in metrics for metric in (one.fetched, one.published)]

    def prefilled():
        return sum(served.worker.engine.stats().computed_tokens for served in mesh.prefill)

    before, prefilled_before = moved(), prefilled()
    again = await ask(http, mesh, [*full, 1, 2, 3], replace(PLAIN, max_tokens=1), session="turn")
    resident = again.usage["penstock"]["cached_tokens"]["worker"]
    if prefilled() > prefilled_before:  # the turn began on the prefill worker, which never had the answer
        assert again.cached == (len(full) - 1) // BLOCK * BLOCK and resident >= 10 * BLOCK
    else:
        assert again.cached == in_pages(len(full) - 1) == len(full) - 1
    if not mesh.prefill:
        assert resident == again.cached and moved() == before


async def test_a_load_reports_what_the_mesh_counted(mesh):
    """Two sessions of three turns, from two processes of the client: what each turn sends again was there before."""
    options = LoadOptions(url=mesh.url, mix=("turns=3,system=64,new=96,output=6",), limit=2, processes=2, slo_ttft=60.0)
    done = await run_load(options, None, ClientProcesses())
    found = load_report(done)
    assert found["error_summary"] == []
    assert [found[name]["avg"] for name in ("request_count", "session_count", "good_request_fraction")] == [6, 2, 1]
    assert found["output_sequence_length"]["min"] == found["output_sequence_length"]["max"] == 6
    for record in done.records:
        assert record.tiers is not None and sum(record.tiers.values()) == record.cached_tokens
        assert record.prompt_tokens == pytest.approx(record.planned_tokens, rel=0.5)
    sessions = {record.session: [] for record in done.records}
    for record in sorted(done.records, key=lambda record: record.turn):
        sessions[record.session].append(record)
    for turns in sessions.values():
        for before, after in pairwise(turns):
            assert after.cached_tokens >= before.prompt_tokens // BLOCK * BLOCK - BLOCK
    assert sum(tier["tokens"] for tier in found["cached_tokens_by_tier"].values()) == sum(
        record.cached_tokens for record in done.records
    )
