"""Grammars in the engine: valid by construction, and the same tokens however they are computed."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace

import jsonschema
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from penstock.chat.formats.grammar import CallRules, call_recipe
from penstock.chat.messages import Tool
from penstock.chat.model import load_chat_model
from penstock.checkpoint import inspect
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.errors import GrammarFailed, RequestRefused
from penstock.engine.grammars import RequestRules
from penstock.engine.hooks import DraftTerms
from penstock.engine.request import Request, SamplingParams
from penstock.engine.speculation.draft_model import DraftModel
from penstock.engine.speculation.leads import DraftTold
from penstock.grammar.compiled import Grammars
from penstock.grammar.recipe import Part, build
from penstock.models import embedded
from penstock.runtime.drafts import MODEL, PROPOSERS
from penstock.testing import schemas
from penstock.testing.drafters import model_drafter

MINI = embedded("penstock-mini")
TOKENIZER = Tokenizer.from_file(str(MINI / "tokenizer.json"))
[EOS] = inspect(MINI).eos_token_ids
SCHEMAS = [*schemas.HAND_WRITTEN, *map(schemas.schema, range(304))]
ASKS = (
    "Give me JSON.",
    "What is the weather in Paris? Answer as an object.",
    "Count the files in /tmp, list their names and tags.",
    "Translate to data: Ada, 36, London, likes tea.",
)


@pytest.fixture(scope="module")
def mini() -> EngineConfig:
    return EngineConfig(
        model=MINI,
        dtype="float32",
        kv_pool_tokens=16384,
        max_running=32,
        threads=1,
        draft_timeout_s=30,
        draft_always=True,
        lookup_tokens=0,
    )


def prompt_of(number: int) -> tuple[int, ...]:
    text = f"<|im_start|>user\n{ASKS[number % len(ASKS)]}<|im_end|>\n<|im_start|>assistant\n"
    return tuple(TOKENIZER.encode(text, add_special_tokens=False).ids)


def request_of(number: int, schema, **fields) -> Request:
    """Greedy, or seeded, or with penalties, bans and biases: by the number."""
    kind = number % 5
    if kind == 1:
        fields = {"temperature": 1.3, "seed": number, **fields}
    elif kind == 2:
        fields = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": number, "logprobs": 2, **fields}
    elif kind == 3:
        fields = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {100: -3.0}, **fields}
    elif kind == 4:
        fields = {"min_tokens": 12, "ignore_eos": number % 2 == 0, **fields}
    sampling = {"max_tokens": 90, "temperature": 0.0, "grammar": schemas.grammar(schema), **fields}
    return Request(f"r{number}", prompt_of(number), SamplingParams(**sampling))


def requests() -> list[Request]:
    return [request_of(number, schema) for number, schema in enumerate(SCHEMAS)]


def text_of(answer) -> str:
    return TOKENIZER.decode([token for token in answer.ids if token != EOS], skip_special_tokens=False)


async def read_all(kit, engine, asked):
    """At most as many at a time as the engine lets wait."""
    turn = asyncio.Semaphore(100)

    async def read(request):
        async with turn:
            return await kit.read(engine, request)

    return await asyncio.gather(*[read(request) for request in asked])


@pytest.fixture(scope="module")
def plain():
    """Answers without drafts; kept by `plainly`."""
    return []


@pytest.fixture
async def plainly(kit, mini, plain):
    if not plain:
        async with Engine.open(replace(mini, draft_tokens=0)) as engine:
            plain += await read_all(kit, engine, requests())
            assert engine.stats().drafted == 0
    return plain


async def test_every_answer_is_an_instance_of_its_schema(plainly):
    ends = []
    for schema, answer in zip(SCHEMAS, plainly, strict=True):
        ends.append(answer.last.finish)
        if answer.last.finish == "stop":
            assert answer.ids[-1] == EOS
            jsonschema.validate(json.loads(text_of(answer)), dict(schema))
        else:
            assert len(answer.ids) == 90 and EOS not in answer.ids
    assert ends.count("stop") > 250  # else nothing was shown
    for request, answer in zip(requests(), plainly, strict=True):
        if request.sampling.logprobs is not None:
            assert all(token.logprob is not None and len(token.top) == 2 for token in answer.tokens)


@pytest.mark.parametrize("kind", ["forced", "right", "illegal", "model"])
async def test_drafts_change_no_token(kit, mini, plainly, kind):
    """Over a few hundred schemas: a state that is wrong after refused drafts shows up in one of some hundred texts."""
    source = random.Random(kind)
    asked, plainly = (requests(), plainly) if kind == "illegal" else (requests()[::2], plainly[::2])
    known = {one.id: [*one.prompt, *answer.ids] for one, answer in zip(asked, plainly, strict=True)}

    def right(ask):
        return known[ask.id][len(ask.tokens) : len(ask.tokens) + ask.k]

    def illegal(ask):
        tokens = list(right(ask))
        if tokens:
            tokens[source.randrange(len(tokens))] = source.choice([EOS, 3, source.randrange(4096)])
        return tokens

    if kind == "model":
        async with (
            model_drafter(DraftModel(EngineConfig(model=embedded("penstock-mini-draft"), threads=1))) as drafter,
            Engine.open(mini, drafter) as engine,
        ):
            answers = await read_all(kit, engine, asked)
            stats = engine.stats()
    else:
        drafters = {"right": kit.Drafts(right), "illegal": kit.Drafts(illegal)}
        async with Engine.open(mini, drafters.get(kind)) as engine:
            answers = await read_all(kit, engine, asked)
            stats = engine.stats()
    for one, other in zip(plainly, answers, strict=True):
        assert one.ids == other.ids and one.last.finish == other.last.finish
    assert stats.accepted > sum(len(answer.ids) for answer in answers) / 4  # the grammar's own drafts alone
    assert stats.failed_steps == 0
    if kind == "right":
        assert stats.accepted == stats.drafted
    if kind == "model":
        assert stats.drafts.verified[PROPOSERS.index(MODEL)] > 100


async def test_no_step_verifies_more_drafts_than_the_setting_allows(kit, mini, plainly):
    """Forced ones neither, of which a grammar knows more at a time."""
    most = []
    async with Engine.open(replace(mini, draft_tokens=2)) as engine:
        real = engine._runner.step
        engine._runner.step = lambda runs: most.extend(run.tokens - run.known for run in runs) or real(runs)
        answers = await read_all(kit, engine, requests())
    assert [answer.ids for answer in answers] == [answer.ids for answer in plainly]
    assert max(most) == 2


async def test_a_guided_drafter_proposes_what_is_legal_and_what_is_forced_costs_it_no_step(plainly):
    """From every place of a text; as many tokens as are wanted, unless the text ends before."""
    model = DraftModel(EngineConfig(model=embedded("penstock-mini-draft"), threads=1))
    request, answer = requests()[20], plainly[20]
    begin, sampling, most_forced = len(request.prompt), request.sampling, 0
    rules = await RequestRules(model.checkpoint, drafting=True).of(sampling, begin)
    terms, judge = DraftTerms(sampling, begin, frozenset({EOS})), rules.guide.copy()
    for count in range(len(answer.ids)):
        tokens, steps, guesses = [*request.prompt, *answer.ids[:count]], 0, []
        if count == 0:
            model.tell(DraftTold((1, 1), 1, 0, tokens, 6, terms, ruled=True))
            while model.step().worked:
                assert not model._sequences[1, 1].given > begin, "none before its rules are there"
            model.rule((1, 1), rules)
        else:  # the text so far again, so that everything is guessed anew
            model.tell(DraftTold((1, 1), 2 * count, len(tokens) - 1, [(tokens[-1] + 1) % 256], 0))
            model.tell(DraftTold((1, 1), 2 * count + 1, len(tokens) - 1, tokens[-1:], 6))
        while (made := model.step()).worked:
            steps += 1
            guesses += [token for lead in made.leads for token in lead.tokens]
        judge.follow(tokens)
        text = guesses[: guesses.index(EOS)] if EOS in guesses else guesses
        assert judge.legal(text) == tuple(text) and (len(guesses) == 6 or guesses[-1] == EOS)
        forced = judge.forced[:5]
        assert tuple(guesses[: len(forced)]) == forced
        assert steps <= 6 - len(forced)
        most_forced = max(most_forced, len(forced))
    assert most_forced > 2


async def test_a_request_goes_on_from_any_place(kit, mini, plainly):
    """As after a fail-over: on another engine, with the tokens so far."""
    source = random.Random(7)
    async with Engine.open(mini) as engine:
        cut = []
        for request, answer in list(zip(requests(), plainly, strict=True))[::3]:
            cut.append(replace(request, output=tuple(answer.ids[: source.randrange(len(answer.ids))])))
        answers = await read_all(kit, engine, cut)
    for request, one, other in zip(cut, plainly[::3], answers, strict=True):
        assert one.ids == [*request.output, *other.ids] and one.last.finish == other.last.finish


async def test_a_first_token_that_another_worker_sampled(kit, mini, plainly):
    """As after a hand-off from prefill."""
    async with Engine.open(mini) as engine:
        for number in (0, 20, 40):
            request, answer = requests()[number], plainly[number]
            first = answer.tokens[0]
            source = kit.Source([], kit.LoadResult(0, (first,)))
            found = await kit.read(engine, request, source)
            assert [first.token, *found.ids] == answer.ids


async def test_without_kernels_the_same(kit, mini, plainly):
    """The sampler's masks are those of the C++ way."""
    chosen = list(range(0, len(SCHEMAS), 16))
    async with Engine.open(replace(mini, kernels=False)) as engine:
        answers = await read_all(kit, engine, [requests()[number] for number in chosen])
    for number, answer in zip(chosen, answers, strict=True):
        assert plainly[number].ids == answer.ids


async def test_preempted_requests_keep_their_text(kit, mini, plainly):
    """In the fewest pages that an engine of this length has."""
    chosen = list(range(0, 120, 2))
    async with Engine.open(replace(mini, kv_pool_tokens=256, max_model_len=256)) as engine:
        answers = await read_all(kit, engine, [requests()[number] for number in chosen])
        assert engine.stats().preemptions > 0
    for number, answer in zip(chosen, answers, strict=True):
        assert plainly[number].ids == answer.ids


async def test_plain_requests_beside_guided_ones_are_as_alone(kit, mini, plainly):
    free = [Request(f"free{at}", prompt_of(at), SamplingParams(max_tokens=40, temperature=0.0)) for at in range(4)]
    async with Engine.open(mini) as engine:
        alone = await read_all(kit, engine, free)
        mixed = await read_all(kit, engine, [*requests()[:40], *[kit.renamed(one, one.id + "b") for one in free]])
    assert [answer.ids for answer in mixed[:40]] == [answer.ids for answer in plainly[:40]]
    assert [answer.ids for answer in mixed[40:]] == [answer.ids for answer in alone]


async def test_a_broken_grammar_fails_its_own_request(kit, mini, plainly):
    broken = replace(requests()[0], id="broken", sampling=SamplingParams(9, grammar="no grammar"))
    async with Engine.open(mini) as engine:
        good, bad = await asyncio.gather(
            kit.read(engine, requests()[0]), kit.read(engine, broken), return_exceptions=True
        )
        assert isinstance(bad, GrammarFailed) and isinstance(bad, RequestRefused)
        assert bad.field == "grammar" and str(bad).startswith("grammar: ")
        assert good.ids == plainly[0].ids


async def test_a_text_that_leaves_its_grammar_fails_its_own_request(kit, mini, plainly):
    """Its output came from elsewhere, for example from another grammar."""
    first, other = requests()[20], replace(requests()[21], output=(500, 501))
    async with Engine.open(mini) as engine:
        good, bad = await asyncio.gather(kit.read(engine, first), kit.read(engine, other), return_exceptions=True)
        assert isinstance(bad, GrammarFailed) and good.ids == plainly[20].ids
        assert engine.stats().failed_steps == 1 and engine.stats().running == 0


async def test_a_text_that_is_cut_is_cut_for_its_length(kit, mini):
    request = request_of(0, {"type": "string", "minLength": 400, "maxLength": 500}, max_tokens=17)
    async with Engine.open(mini) as engine:
        answer = await kit.read(engine, request)
    assert answer.last.finish == "length" and len(answer.ids) == 17


async def test_stop_tokens_end_a_complete_text_too(kit, mini):
    """The model's end token would be legal as well; the bias decides."""
    request = request_of(0, {"const": "x"}, stop_token_ids=frozenset({77}), logit_bias={77: 100.0})
    async with Engine.open(mini) as engine:
        answer = await kit.read(engine, request)
    assert answer.ids[-1] == 77 and answer.last.finish == "stop"


async def test_a_grammar_of_any_text_lets_the_model_end_it(kit, mini):
    """With min_tokens it can't before; with ignore_eos never."""
    anything = LLMatcher.grammar_from_regex("(?s:.*)")
    fields = {"max_tokens": 30, "temperature": 0.0, "logit_bias": {EOS: 100.0}, "grammar": anything}
    async with Engine.open(mini) as engine:

        async def ids(**more):
            return (await kit.read(engine, Request("a", prompt_of(0), SamplingParams(**fields, **more)))).ids

        assert await ids() == [EOS]
        assert (await ids(min_tokens=5)).index(EOS) == 5
        assert EOS not in await ids(ignore_eos=True)


async def test_compiling_holds_no_other_request(kit, mini, monkeypatch):
    """A grammar that takes long to compile: the others get their tokens meanwhile."""
    gate, real = asyncio.Event(), Grammars.guide

    async def guide(self, *arguments):
        await gate.wait()
        return await real(self, *arguments)

    monkeypatch.setattr(Grammars, "guide", guide)
    async with Engine.open(mini) as engine:
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(kit.read(engine, requests()[20]))
            free = await kit.read(engine, Request("free", prompt_of(0), SamplingParams(max_tokens=5, temperature=0.0)))
            assert len(free.ids) == 5 and not waiting.done()
            gate.set()


TOOLS = [
    Tool("get_weather", "", {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}}),
    Tool("add", "", {"properties": {"a": {"type": "integer"}, "b": {"enum": [1, 2]}}, "required": ["a", "b"]}),
]
FORM = Part("schema", json.dumps(schemas.HAND_WRITTEN[0]), "response_format")
RULES = {
    "auto": {},
    "required": {"required": True},
    "one": {"required": True, "parallel": False},
    "or a form": {"content": FORM},
    "reasoning first": {"thinks": True, "required": True},
}


@pytest.mark.parametrize("options", RULES.values(), ids=RULES)
async def test_drafts_of_an_adversary_change_no_call(kit, mini, options):
    """It proposes the right tokens and a wrong one: an end, a marker of calls, a token of another place, any token."""
    model = load_chat_model(MINI)
    rules = CallRules(tools=[("t", tool) for tool in TOOLS], **options)
    grammar = build(call_recipe(model.family, rules, model.added), ())
    asked = [
        Request(f"t{number}", prompt_of(number), SamplingParams(
            max_tokens=60, temperature=number % 3 * 0.8, seed=number, grammar=grammar,
        ))
        for number in range(24)
    ]  # fmt: skip
    async with Engine.open(replace(mini, draft_tokens=0)) as engine:
        plain = await read_all(kit, engine, asked)
    known = {one.id: [*one.prompt, *answer.ids] for one, answer in zip(asked, plain, strict=True)}
    source, wrong = random.Random(5), [EOS, *model.added.values()]
    elsewhere = [token for answer in plain for token in answer.ids]
    lies = 0

    def adversary(ask):
        nonlocal lies
        right = known[ask.id][len(ask.tokens) : len(ask.tokens) + ask.k]
        at = source.randrange(len(right) + 1)
        told = [*right[:at], source.choice([*wrong, *source.sample(elsewhere, 9), source.randrange(4096)]), *right[at:]]
        lies += told[: len(right)] != right
        return told[: ask.k]

    async with Engine.open(mini, kit.Drafts(adversary)) as engine:
        drafted = await read_all(kit, engine, asked)
        assert engine.stats().drafted >= engine.stats().accepted > 0 and engine.stats().failed_steps == 0
    assert lies > 50
    assert [(one.ids, one.last.finish) for one in plain] == [(one.ids, one.last.finish) for one in drafted]
    assert any(model.call_tokens.intersection(answer.ids) for answer in plain) or not options
