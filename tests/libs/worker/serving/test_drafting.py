"""The draft client against real draft services on real sockets: honest, slow, silent, lying, and with other tokens."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from math import inf

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.checkpoint import inspect, tokenizer_fingerprint
from penstock.draft.drafts import Description
from penstock.draft.service import SERVICE
from penstock.engine.config import EngineConfig
from penstock.engine.hooks import DraftAsk, DraftStates, DraftTerms
from penstock.engine.request import SamplingParams
from penstock.engine.speculation.drafting import vocabulary
from penstock.engine.speculation.leads import DraftTold
from penstock.rpc.channels import open_channels
from penstock.rpc.server import serve
from penstock.runtime.config import ConfigError
from penstock.runtime.metrics import WorkerMetrics
from penstock.testing.checkpoints import write_checkpoint
from penstock.testing.drafters import PlainForesight, draft_client, served_drafts
from penstock.testing.heads import write_head
from penstock.v1 import draft_pb2, draft_pb2_grpc
from penstock.worker.config import WorkerConfig
from penstock.worker.serving.drafting import DraftClient, DraftDelay, open_drafter

GREEDY = SamplingParams(max_tokens=100, temperature=0.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return inspect(write_checkpoint(tmp_path_factory.mktemp("target") / "llama"))


def ask(id, tokens, k=2, **sampling):
    return DraftAsk(id, tokens, k, DraftTerms(replace(GREEDY, **sampling), 1, frozenset({2})))


def next_one(text):
    return text[-1] + 1


def service(model, target, port=0, tokenizer=None, **settings):
    description = Description(tokenizer or tokenizer_fingerprint(target), partial(vocabulary, target))
    return served_drafts(model, description, port=port, **settings)


async def ahead(client, id, length, count=1):
    """The drafts, as soon as there are so many."""
    async with asyncio.timeout(10):
        while len(drafts := client.ahead(id, length)) < count:
            await client.arrived()
        return list(drafts)[:count]


async def test_drafts_come_by_themselves_and_sequences_grow_by_differences(target):
    model = PlainForesight(next_one)
    async with service(model, target) as (server, _), draft_client(server.port, target) as client:
        tokens = [1, 2, 3]
        client.tell([ask("a", tokens, 0)])
        client.tell([ask("a", tokens, 3), ask("b", [70], 1)])
        assert await ahead(client, "a", 3, 3) == [4, 5, 6] and await ahead(client, "b", 1) == [71]
        tokens += [4, 5]
        assert client.ahead("a", 5) == (), "it was not told of that"
        client.tell([ask("a", tokens, 3)])
        assert list(client.ahead("a", 5)) == [6], "at once"
        assert client.expected("a") == 0.0
        assert await ahead(client, "a", 5, 3) == [6, 7, 8]
        tokens += [6, 50]
        client.tell([ask("a", tokens, 1)])
        assert client.ahead("a", 7) == (), "the text went another way"
        assert await ahead(client, "a", 7) == [51]
    told = [one for one in model.told if one.id == (1, 1)]
    assert [one.keep for one in told if one.tokens] == [0, 3, 5]
    assert [one.terms is not None for one in told] == [True] + [False] * (len(told) - 1)
    assert told[0].terms == ask("a", tokens).terms


async def test_tells_that_wait_to_be_sent_are_one(target):
    model = PlainForesight(next_one)
    async with service(model, target) as (server, _), draft_client(server.port, target) as client:
        await client.connected.wait()
        tokens = [1]
        for token in range(2, 50):
            client.tell([ask("a", tokens, 1)])
            tokens.append(token)
        client.tell([ask("a", tokens, 1)])
        assert await ahead(client, "a", 49) == [50]
    assert len(model.told) == 1


async def test_a_long_text_goes_in_parts_and_does_not_hold_back_another(target, monkeypatch):
    monkeypatch.setattr("penstock.worker.serving.drafting._MOST_SENT", 100)
    model = PlainForesight(next_one)
    async with service(model, target) as (server, _), draft_client(server.port, target) as client:
        client.tell([ask("long", list(range(950)), 1), ask("short", [5], 1)])
        assert await ahead(client, "long", 950) == [950]
        assert await ahead(client, "short", 1) == [6]
    assert [(one.keep, len(one.tokens), one.k) for one in model.told if one.id == (1, 1)] == [
        *[(at, 100, 0) for at in range(0, 900, 100)],
        (900, 50, 1),
    ]


async def test_a_forgotten_sequence_leaves_the_service(target):
    model = PlainForesight(next_one)
    async with service(model, target) as (server, _), draft_client(server.port, target) as client:
        client.tell([ask("a", [1])])
        await ahead(client, "a", 1)
        client.forget("a")
        assert client.ahead("a", 1) == () and client.expected("a") == inf
        client.tell([ask("a", [5])])
        assert await ahead(client, "a", 1) == [6]
        async with asyncio.timeout(10):
            while not model.forgotten:
                await asyncio.sleep(0.001)
        assert model.forgotten == [(1, 1)] and model.told[-1].id == (1, 2)


async def test_a_service_that_is_not_there_is_not_waited_for(target):
    async with draft_client(1, target) as client:
        client.tell([ask("a", [1])])
        assert client.ahead("a", 1) == () and client.expected("a") == inf
        for number in range(100):
            client.tell([ask(str(number), [1])])
            client.forget(str(number))
        assert not client._gone, "nothing is kept for it"


async def test_a_restarted_service_is_told_everything_again(target):
    model, again = PlainForesight(next_one), PlainForesight(next_one)
    async with service(model, target) as (server, _):
        port = server.port
    async with draft_client(port, target) as client:
        client.tell([ask("a", [1, 2, 3], 1, grammar="the text"), ask("b", [7], 0)])
        async with service(model, target, port=port):
            assert await ahead(client, "a", 3) == [4]
        async with asyncio.timeout(10):
            while client.connected.is_set():
                await asyncio.sleep(0.001)
        assert list(client.ahead("a", 3)) == [4] and client.expected("a") == 0, "what is at hand is as good as before"
        client.tell([ask("a", [1, 2, 3, 4], 1, grammar="the text")])
        assert not client.ahead("a", 4)
        assert client.expected("a") == inf
        async with service(again, target, port=port):
            assert await ahead(client, "a", 4) == [5], "without another word"
    told = {one.id[1]: one for one in again.told}
    assert list(told[1].tokens) == [1, 2, 3, 4] and told[1].terms.sampling.grammar == "the text"
    assert list(told[2].tokens) == [7] and told[2].k == 0


async def test_it_learns_when_drafts_come_and_does_not_wait_for_a_service_that_says_nothing(target):
    model, now = PlainForesight(next_one), [100.0]
    async with service(model, target) as (server, _), open_channels() as channels:
        client = DraftClient(channels.to(f"127.0.0.1:{server.port}", "draft"), target, clock=lambda: now[0])
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(client.run())
            tokens = [1]
            await client.connected.wait()
            for _ in range(80):
                model.gate.clear()
                client.tell([ask("a", tokens, 1)])
                now[0] += 0.02
                model.gate.set()
                await ahead(client, "a", len(tokens))
                tokens.append(99)  # not as guessed
            model.gate.clear()
            client.tell([ask("a", tokens, 1), ask("rests", [1], 0)])
            assert client.expected("a") == pytest.approx(0.02, rel=0.1)
            assert client.expected("rests") == client.expected("unknown") == inf
            now[0] += 0.015
            assert client.expected("a") == pytest.approx(0.005, rel=0.3)
            now[0] += 0.015
            assert client.expected("a") == pytest.approx(0.01, rel=0.3), "late already"
            now[0] += 1
            assert client.expected("a") == inf
            client.tell([ask("a", [*tokens, 5], 1), ask("b", [8], 1)])
            assert client.expected("a") == client.expected("b") == inf, "it owes much"
            model.gate.set()
            assert await ahead(client, "b", 1) == [9]
            client.tell([ask("c", [8], 1)])
            assert 0 < client.expected("c") < 0.1, "it has spoken again"
            running.cancel()


@asynccontextmanager
async def lying(answers, target):
    """A service that answers every message with the next of `answers`: functions of the message."""

    class Liar(draft_pb2_grpc.DraftServicer):
        async def Propose(self, request_iterator, context):
            rest = iter(answers)
            async for message in request_iterator:
                for made in next(rest)(message):
                    yield made

        async def Describe(self, request, context):
            return draft_pb2.DescribeResponse(tokenizer=tokenizer_fingerprint(target))

    add = draft_pb2_grpc.add_DraftServicer_to_server
    async with serve("127.0.0.1:0", lambda server: add(Liar(), server), [SERVICE], grace=0.1) as server:
        yield server.port


def leads(*columns, refused=()):
    """Of (id, after, length, tokens) each."""
    return draft_pb2.DraftLeads(
        ids=[column[0] for column in columns],
        after=[column[1] for column in columns],
        lengths=[column[2] for column in columns],
        counts=[len(column[3]) for column in columns],
        tokens=[token for column in columns for token in column[3]],
        refused=refused,
    )


LIES = [
    leads((77, 1, 3, [5])),
    leads((1, 0, 3, [5])),
    leads((1, 1, 4, [5])),
    leads((1, 1, 2**32 - 1, [5])),
    leads((1, 1, 0, [9, 9, 9, 5])),
    leads((1, 1, 3, [5] * 257)),
    draft_pb2.DraftLeads(ids=[1], after=[1], lengths=[3], counts=[2**32 - 1]),
    draft_pb2.DraftLeads(ids=[1, 1, 1], after=[1], lengths=[3], counts=[]),
    draft_pb2.DraftLeads(tokens=[5] * 10),
    leads(refused=[1, 5, 6]),
]


@pytest.mark.parametrize("lie", LIES)
async def test_what_does_not_fit_is_left_out(target, lie):
    right = leads((1, 9, 3, [4, 5]))
    async with lying([lambda message: [lie, right]], target) as port, draft_client(port, target) as client:
        client.tell([ask("a", [1, 2, 3])])
        assert await ahead(client, "a", 3, 2) == [4, 5]


async def test_a_sequence_that_is_refused_is_not_waited_for_until_its_drafts_come(target):
    answers = [lambda message: [leads(refused=[1])], lambda message: [leads((1, 2, 3, [4]))]]
    async with lying(answers, target) as port, draft_client(port, target) as client:
        await client.connected.wait()
        client.tell([ask("a", [1, 2, 3])])
        async with asyncio.timeout(10):
            await client.arrived()  # a step that waits for its drafts goes on
        assert client.expected("a") == inf
        assert client._sequences["a"].refused
        client.tell([ask("a", [1, 2, 3])])
        assert client.expected("a") == inf
        assert await ahead(client, "a", 3) == [4]
        client.tell([ask("a", [1, 2, 3, 9])])
        assert client.expected("a") < inf


class Wire:
    """A plain model and a client without a network: messages of both ways wait until they are let through."""

    def __init__(self, target, guess, clock=time.monotonic):
        self.client = DraftClient(grpc.insecure_channel("127.0.0.1:1"), target, clock=clock)  # never connected
        self.client.connected.set()
        self.model = PlainForesight(guess)
        self.down, self.up, self.known = [], [], {}

    def send(self):
        while self.client._unsent or self.client._gone:
            self.down.append(self.client._message())

    def hear(self):
        if self.down:
            news = self.down.pop(0)
            for id in news.forget:
                self.model.forget((1, id))
            for one in news.sequences:
                self.model.tell(DraftTold((1, one.id), news.number, one.keep, list(one.tokens), one.k))

    def step(self):
        made = self.model.step()
        if made.leads:
            self.up.append(leads(*((one.id[1], one.after, one.length, one.tokens) for one in made.leads)))

    def answer(self):
        if self.up:
            self.client._take(self.up.pop(0))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_late_draft_is_never_taken_for_one_of_another_text(target, data):
    """Messages of both ways may be late by any time. Each guess is a function of the whole text before it, so a draft
    is right for one text only."""

    def guess(text):
        return random.Random(str(list(text))).randrange(3)

    wire, texts = Wire(target, guess), {"a": [0], "b": [1]}
    steps = data.draw(st.lists(st.sampled_from(["tell", "send", "hear", "step", "answer", "forget"]), max_size=80))
    found = 0
    for step in steps:
        if step == "tell":
            id = data.draw(st.sampled_from(sorted(texts)))
            for _ in range(data.draw(st.integers(0, 4))):
                right = guess(texts[id])
                texts[id].append(right if data.draw(st.integers(0, 3)) else (right + 1) % 3)
            wire.client.tell([ask(id, list(texts[id]), data.draw(st.integers(0, 5)))])
        elif step == "forget":
            id = data.draw(st.sampled_from(sorted(texts)))
            wire.client.forget(id)
            texts[id] = [data.draw(st.integers(0, 2))]
        else:
            getattr(wire, step)()
        for id, text in texts.items():
            drafts = list(wire.client.ahead(id, len(text)))
            for count, draft in enumerate(drafts):
                assert draft == guess([*text, *drafts[:count]])
            found += len(drafts)
    for id, text in texts.items():
        wire.client.tell([ask(id, list(text), 3)])
    for _ in range(200):
        wire.send(), wire.hear(), wire.step(), wire.answer()
    assert all(len(wire.client.ahead(id, len(text))) >= 3 for id, text in texts.items()), (
        "and in the end they are there"
    )


async def test_a_draft_with_a_part_of_the_tokens_is_used(target):
    model = PlainForesight(next_one)
    part = {text: token for text, token in vocabulary(target).items() if token < 200}
    async with (
        served_drafts(model, Description("other", lambda: part)) as (server, _),
        draft_client(server.port, target) as client,
    ):
        client.tell([ask("a", [1])])
        assert await ahead(client, "a", 1) == [2]


async def test_a_draft_with_other_tokens_is_not_used(target):
    model = PlainForesight(next_one)
    async with served_drafts(model, Description("other", lambda: {"no such token": 5})) as (server, _):
        async with draft_client(server.port, target) as client:
            client.tell([ask("a", [1])])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await client.connected.wait()
    assert not model.told


async def test_a_worker_refuses_a_draft_with_other_tokens_at_its_start(target):
    def config(port):
        return WorkerConfig(engine=EngineConfig(model=target.path), draft=f"127.0.0.1:{port}")

    other = Description("other", lambda: {"no such token": 5})
    async with served_drafts(PlainForesight(next_one), other) as (server, _):
        with pytest.raises(
            ConfigError, match="'no such token' is token 5 of the draft and none of the target"
        ) as caught:
            async with open_drafter(config(server.port), WorkerMetrics()):
                pass
        assert str(caught.value).startswith("draft = ")
    async with service(PlainForesight(next_one), target) as (server, _):
        async with open_drafter(config(server.port), WorkerMetrics()) as client, asyncio.timeout(10):
            await client.connected.wait()
    async with open_drafter(config(1), WorkerMetrics()) as client:
        assert not client.connected.is_set(), "it may come later"


@pytest.mark.parametrize(
    ("layers", "hidden", "told", "reason"),
    [
        ((1, 2), 64, False, "guesses from states after the layers 1, 2, and this worker tells tokens alone"),
        ((1,), 64, True, "guesses from states after the layers 1, and this worker tells states after the layers 1, 2"),
        ((1, 2), 32, True, "guesses from states of 32 numbers, and those of the model have 64"),
        ((), 0, True, "guesses from tokens alone, and this worker tells states after the layers 1, 2"),
        ((1, 2), 64, True, ""),
    ],
)
async def test_a_worker_refuses_a_head_that_guesses_from_other_states(target, tmp_path, layers, hidden, told, reason):
    engine = EngineConfig(model=target.path)
    if told:
        engine = replace(engine, draft_head=str(write_head(tmp_path)), draft_head_in="service")
    description = Description(tokenizer_fingerprint(target), dict, layers, hidden)
    async with served_drafts(PlainForesight(next_one), description) as (server, _):
        drafter = open_drafter(WorkerConfig(engine=engine, draft=f"127.0.0.1:{server.port}"), WorkerMetrics())
        if reason:
            with pytest.raises(ConfigError, match=f"draft = .*: {reason}"):
                await drafter.__aenter__()
        else:
            async with drafter as client, asyncio.timeout(10):
                await client.connected.wait()
    if told:
        with pytest.raises(ConfigError, match=r"draft = .*must be the service in which the draft head guesses"):
            async with open_drafter(WorkerConfig(engine=engine), WorkerMetrics()):
                pass


async def test_states_are_sent_with_the_text_once_and_those_of_the_last_tokens_only(target):
    model = PlainForesight(next_one)
    description = Description(tokenizer_fingerprint(target), dict, (1,), 64)
    async with served_drafts(model, description) as (server, drafts):
        async with draft_client(server.port, target, layers=(1,)) as client:
            rows = [bytes([number]) * 128 for number in range(60)]
            for first, end in ((0, 20), (20, 40), (40, 59)):  # before there is a stream
                asked = ask("a", list(range(end + 1)))
                client.tell([replace(asked, states=DraftStates(first, rows[first:end]))])
            await ahead(client, "a", 60)
            client.tell([ask("a", list(range(61)))])
            async with asyncio.timeout(10):
                while len(model.told) < 2:
                    await asyncio.sleep(0.001)
        assert drafts.metrics.registry.get_sample_value("penstock_draft_state_bytes_total") == 32 * 128
    told = [each.states for each in model.told]
    assert [told[0].begin, *told[0].rows] == [27, *rows[27:59]] and told[1] is None


async def test_it_learns_how_fast_drafts_follow_each_other(target):
    now = [100.0]
    wire = Wire(target, next_one, lambda: now[0])
    client = wire.client
    client.tell([ask("a", [9], 60)])
    wire.send(), wire.hear(), wire.step()
    now[0] += 0.005
    wire.answer()
    for _ in range(40):
        wire.step()
        now[0] += 0.003
        wire.answer()
    assert len(client.ahead("a", 1)) == 41 and client.expected("a", 41) == 0.0
    assert client.expected("a", 45) == pytest.approx(4 * 0.003, rel=0.05)
    assert client.expected("a", 61) == inf, "nobody asked for so many"
    client.tell([ask("a", [9, 8], 8)])
    assert client.expected("a", 8) == pytest.approx(client.expected("a") + 7 * 0.003, rel=0.05)
    wire.send(), wire.hear(), wire.step(), wire.answer()
    now[0] += 1.0
    assert client.expected("a", 1) == 0.0 and client.expected("a", 2) == inf, "it is late by far"
    client.tell([ask("b", [1], 5)])  # the next two are 2, which ends a text, and 3
    wire.send(), wire.hear(), wire.step(), wire.answer()
    assert list(client.ahead("b", 1)) == [2] and client.expected("b", 2) == inf


def test_delays_that_grow_are_learned():
    delay = DraftDelay()
    for _ in range(100):
        delay.learn(0.001)
    assert delay.usual_s == pytest.approx(0.001, rel=0.1)
    for _ in range(100):
        delay.learn(0.5)
    assert delay.usual_s == pytest.approx(0.5, rel=0.1)


def test_catching_up_with_a_text_is_no_delay_of_the_link(target):
    now = [100.0]
    wire, tokens = Wire(target, next_one, lambda: now[0]), [1000]
    for _ in range(30):  # it is told of the text, guesses the token that comes next, and is heard one token too late
        wire.client.tell([ask("a", list(tokens), 1)])
        wire.send(), wire.hear(), wire.step()
        tokens.append(tokens[-1] + 1)
        wire.client.tell([ask("a", list(tokens), 1)])
        now[0] += 0.005
        wire.answer()
        assert not wire.client.ahead("a", len(tokens))
    wire.send(), wire.hear(), wire.step(), wire.answer()
    assert wire.client.ahead("a", len(tokens))
    assert wire.client.delay_s < 0.01
