"""The master test: the same request gives the same tokens, however the mesh serves it.

{cold, cached} x {aggregated, disaggregated} x {no draft, wrong, right, adversarial draft} x {alone, batched}
x {greedy, seeded}, in float32, over real sockets, against one engine in one process that caches nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from penstock.engine.request import SamplingParams
from penstock.testing.heads import write_head
from penstock.testing.mesh import MeshSetup

from .support import BLOCK, adversarial_draft, ask, body_of, drafting, in_pages, prompt, settled

DRAFTS = ("none", "lookup", "model", "same", "adversarial", "head", "served head")
NO_SPECIALS = dict.fromkeys(range(256, 260), -100.0)
"""Special tokens have no text, and so no place among the logprobs of a text."""
PLAIN = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=0, logit_bias=NO_SPECIALS)
GREEDY = PLAIN
SEEDED = replace(PLAIN, temperature=0.9, top_p=0.95, top_k=80, seed=11)
PENALISED = SamplingParams(
    max_tokens=24,
    temperature=0.7,
    min_p=0.02,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias={65: 4.0, 66: -100.0, **NO_SPECIALS},
    min_tokens=4,
    seed=2**40 + 7,
    logprobs=0,
)


@pytest.fixture(scope="module", params=["disaggregated", "aggregated"])
def placement(request):
    return request.param


@pytest.fixture(scope="module", params=DRAFTS)
async def mesh(request, placement, tiny, other, meshes, http, tmp_path_factory):
    """One running mesh for each placement and kind of draft."""
    async with draft_for(request.param, tiny, other) as draft:
        engine = {"draft_always": True, "lookup_tokens": (1 << 16) * (request.param == "lookup")}
        if "head" in request.param:
            engine["draft_head"] = head = str(write_head(tmp_path_factory.mktemp("head"), vocabulary=260))
            if request.param == "served head":
                engine["draft_head_in"], draft = "service", f"head:{head}"
        options = MeshSetup(model=tiny, draft=draft, aggregated=placement == "aggregated", engine=engine)
        async with meshes(options) as mesh:
            if request.param in ("model", "same", "served head"):
                await drafting(http, mesh)
            yield mesh
            stats = mesh.decode[0].worker.engine.stats()
            assert (stats.drafted > 50) == (request.param != "none"), "drafts were verified where this tests them"
            assert request.param != "same" or stats.accepted > 50


@asynccontextmanager
async def draft_for(kind, tiny, other) -> AsyncIterator[str]:
    if kind == "adversarial":
        async with adversarial_draft(tiny) as (address, _):
            yield f"address:{address}"
    else:
        yield {"model": str(other), "same": str(tiny)}.get(kind, "none")


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
@pytest.mark.parametrize("together", [1, 4], ids=["alone", "batched"])
async def test_cold_then_cached(mesh, oracle, http, sampling, together, request):
    name = request.node.callspec.id
    before = mesh.decode[0].worker.engine.stats()
    await asyncio.gather(*(two_turns(mesh, oracle, http, f"{name}/{number}", sampling) for number in range(together)))
    after = mesh.decode[0].worker.engine.stats()
    drafted, accepted = after.drafted - before.drafted, after.accepted - before.accepted
    if name.startswith("same-"):  # the draft is the target, and knows all that the target samples by
        assert accepted >= 0.9 * drafted
    if name.startswith("adversarial-"):
        assert accepted <= 0.1 * drafted


async def two_turns(mesh, oracle, http, name, sampling):
    """A cold prompt; then the same with its answer and more text, of which all full blocks are fetched; a worker that
    has computed all of it has its tail too."""
    first = prompt(name, 150)
    cold = await ask(http, mesh, first, sampling, session=name)
    expected = await oracle(first, sampling)
    same(cold, expected)
    assert cold.cached == 0
    assert cold.computed == len(first)

    known = len(first) + len(expected.ids) - 1
    await settled(mesh, [*first, *expected.ids][: known // BLOCK * BLOCK])
    second = [*first, *expected.ids, *prompt(name + "/more", 100)]
    warm = await ask(http, mesh, second, sampling, session=name)
    same(warm, await oracle(second, sampling))
    assert warm.cached == (known // BLOCK * BLOCK if mesh.prefill else in_pages(known))
    assert warm.computed == len(second) - warm.cached

    # All but the end is stored now: the decode worker prefills the rest itself.
    third = [*second, *prompt(name + "/end", 5)]
    await settled(mesh, second[: len(second) // BLOCK * BLOCK])
    short = await ask(http, mesh, third, sampling, session=name)
    same(short, await oracle(third, sampling))
    assert short.cached >= len(second) // BLOCK * BLOCK


async def test_what_else_a_body_may_ask_for(mesh, oracle, http, request):
    """Words that it bans, tokens and texts that end it, likely other tokens, and a second choice."""
    before = mesh.decode[0].worker.engine.stats()
    tokens = prompt("what else", 90)
    free, body = await oracle(tokens, SEEDED), body_of(tokens, SEEDED)
    text = (await http.post(f"{mesh.url}/v1/completions", json=body)).json()["choices"][0]["text"]
    letters = [letter for letter in text if "!" <= letter <= "~"]
    assert letters, "the text has some that can be typed"
    banned = replace(SEEDED, bad_words=(letters[0],), stop_token_ids=frozenset(free.ids[-3:]), logprobs=3)
    same(await ask(http, mesh, tokens, banned), await oracle(tokens, banned))

    cut = (await http.post(f"{mesh.url}/v1/completions", json=body | {"stop": letters[-1]})).json()["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (text[: text.index(letters[-1])], "stop")

    two = (await http.post(f"{mesh.url}/v1/completions", json=body | {"n": 2})).json()["choices"]
    other = await oracle(tokens, replace(SEEDED, seed=SEEDED.seed + 1))
    assert [choice["token_ids"] for choice in two] == [free.ids, other.ids]
    drafted = mesh.decode[0].worker.engine.stats().drafted - before.drafted
    assert (drafted > 0) == (not request.node.callspec.id.startswith("none")), "also here"


def same(answer, expected):
    assert answer.ids == expected.ids
    assert answer.finish == expected.finish
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
