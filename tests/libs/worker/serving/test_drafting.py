"""The draft client against a real draft server on a real socket, with proposers of the test's own."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from penstock.draft.config import DraftConfig
from penstock.draft.drafts import Description, Drafts
from penstock.draft.service import SERVICE, DraftService
from penstock.engine.hooks import DraftAsk, GrammarAsk
from penstock.grammar.compiled import Grammars
from penstock.rpc.channels import open_channels
from penstock.rpc.server import serve
from penstock.v1 import draft_pb2_grpc
from penstock.worker.serving.drafting import DraftClient


class Echo:
    """Proposes the last k tokens again and remembers what it was asked."""

    def __init__(self):
        self.asked = []
        self.guides = []
        self.gone = []

    def propose(self, asks):
        self.asked.append([(ask.id, list(ask.tokens)) for ask in asks])
        self.guides.append([ask.guide for ask in asks])
        return [list(ask.tokens[-ask.k :]) for ask in asks]

    def forget(self, id):
        self.gone.append(id)


def ask(id, tokens, k=2):
    return DraftAsk(id=id, tokens=tokens, k=k, seed=1, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


@asynccontextmanager
async def draft_server(proposer, port=0, tokenizer="same", grammars=None):
    drafts = Drafts(proposer, Description("model", tokenizer, 100), grammars=grammars)
    add = draft_pb2_grpc.add_DraftServicer_to_server
    try:
        service = DraftService(drafts, DraftConfig(model="ngram"))
        async with serve(f"127.0.0.1:{port}", lambda server: add(service, server), [SERVICE], grace=0.1) as server:
            yield server.port
    finally:
        drafts.close()


@asynccontextmanager
async def draft_client(port):
    async with open_channels() as channels, asyncio.TaskGroup() as tasks:
        client = DraftClient(channels.to(f"127.0.0.1:{port}"), "same")
        running = tasks.create_task(client.run())
        try:
            yield client
        finally:
            running.cancel()


async def until_answered(client, question):
    async with asyncio.timeout(10):
        while not (answer := await client.propose([question])):
            await asyncio.sleep(0)
        return answer


async def test_sequences_grow_by_differences():
    proposer = Echo()
    async with draft_server(proposer) as port, draft_client(port) as client:
        tokens = [1, 2, 3]
        assert await until_answered(client, ask("a", tokens)) == {"a": [2, 3]}
        tokens += [4]
        assert await client.propose([ask("a", tokens), ask("b", [9, 8])]) == {"a": [3, 4], "b": [9, 8]}
        assert [tokens for _, tokens in proposer.asked[-1]] == [[1, 2, 3, 4], [9, 8]]


async def test_an_ask_that_is_given_up_leaves_the_stream_as_it_is():
    """Also one that is given up while it is being written: gRPC would end its call."""
    proposer = Echo()
    async with draft_server(proposer) as port, draft_client(port) as client:
        await until_answered(client, ask("a", [1, 2, 3]))
        asking = asyncio.ensure_future(client.propose([ask("a", [1, 2, 3, 4])]))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        assert await until_answered(client, ask("a", [1, 2, 3, 4, 5])) == {"a": [4, 5]}
    assert [tokens for [(_, tokens)] in proposer.asked] == [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]]
    assert len({id for [(id, _)] in proposer.asked}) == 1  # of one stream


async def test_a_forgotten_sequence_leaves_the_service():
    proposer = Echo()
    async with draft_server(proposer) as port, draft_client(port) as client:
        await until_answered(client, ask("a", [1, 2]))
        client.forget("a")
        await client.propose([ask("b", [5, 6])])
    assert proposer.gone[0].endswith("/1")


async def test_a_service_that_is_not_there_answers_nothing_at_once():
    async with draft_client(1) as client:
        assert await client.propose([ask("a", [1])]) == {}


async def test_a_restarted_service_gets_whole_sequences():
    async with draft_server(Echo()) as port:
        pass
    proposer = Echo()
    async with draft_client(port) as client:
        async with draft_server(Echo(), port):
            await until_answered(client, ask("a", [1, 2, 3]))
        assert await client.propose([ask("a", [1, 2, 3, 4])]) == {}
        async with draft_server(proposer, port):
            assert await until_answered(client, ask("a", [1, 2, 3, 4])) == {"a": [3, 4]}
    assert proposer.asked[0][0][1] == [1, 2, 3, 4]


async def test_a_draft_with_another_tokenizer_is_not_used():
    async with draft_server(Echo(), tokenizer="other") as port, draft_client(port) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await until_answered(client, ask("a", [1, 2]))


class FakeGrammars(Grammars):
    """Has every grammar ready at the second question; a guide is what was asked for it."""

    def __init__(self):
        self.asked = []

    def guide_if_ready(self, text, endings, begin):
        self.asked.append((text, endings.ends, begin))
        return self.asked[-1] if len(self.asked) % 2 == 0 else None


async def test_a_grammar_travels_with_the_whole_sequence_and_is_followed_when_it_is_compiled():
    proposer, grammars = Echo(), FakeGrammars()
    told = ("the text", frozenset({2, 3}), 1)
    grammar = GrammarAsk(told[0], told[2], told[1])
    async with draft_server(proposer, grammars=grammars) as port, draft_client(port) as client:
        for tokens in ([1, 2], [1, 2, 3], [1, 2, 3, 4]):
            await until_answered(client, replace(ask("a", tokens), grammar=grammar))
        await client.propose([ask("b", [5, 6])])
    assert proposer.guides == [[None], [told], [told], [None]]
    assert grammars.asked == [told] * 2


async def test_a_restarted_service_gets_the_grammar_too():
    grammar = GrammarAsk("the text", 1, frozenset({2}))
    question = replace(ask("a", [1, 2, 3]), grammar=grammar)
    async with draft_server(Echo(), grammars=FakeGrammars()) as port:
        pass
    grammars = FakeGrammars()
    async with draft_client(port) as client:
        async with draft_server(Echo(), port):
            await until_answered(client, question)
        async with draft_server(Echo(), port, grammars=grammars):
            await until_answered(client, question)
    assert grammars.asked == [("the text", frozenset({2}), 1)]
