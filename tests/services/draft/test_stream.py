"""What the draft service remembers of one decode worker's sequences, and what it has to send."""

from __future__ import annotations

from contextlib import suppress

import pytest

from penstock.draft.config import DraftConfig
from penstock.draft.stream import DraftStream
from penstock.engine.speculation.leads import DraftLead
from penstock.errors import InvalidRequest
from penstock.v1 import common_pb2, draft_pb2

CONFIG = DraftConfig(model="some", max_stream_sequences=3, max_stream_tokens=100)


class FakeDrafts:
    """Remembers what it is told."""

    def __init__(self):
        self.told, self.forgotten = [], []

    def attach(self, name, reader):
        pass

    def detach(self, name, sequences):
        self.forgotten += sequences

    def forget(self, sequences):
        self.forgotten += sequences

    async def tell(self, news):
        self.told += news


class Case:
    """A stream, and its worker."""

    def __init__(self):
        self.drafts = FakeDrafts()
        self.stream = DraftStream(3, self.drafts, CONFIG)
        self.number = 0

    async def say(self, *sequences, forget=(), owner=b"", number=None, **sampling):
        self.number = number or self.number + 1
        params = common_pb2.Sampling(**{"max_tokens": 9, "repetition_penalty": 1.0, **sampling})
        terms = draft_pb2.DraftTerms(sampling=params, prompt=1, ends=[2], owner=owner)
        news = draft_pb2.DraftNews(
            number=self.number,
            sequences=[
                draft_pb2.DraftSequence(id=id, keep=keep, tokens=tokens, k=4, terms=None if keep else terms)
                for id, keep, tokens in sequences
            ],
            forget=forget,
        )

        async def one():
            yield news

        await self.stream.read(one())


async def test_sequences_are_told_on_with_the_terms_of_the_first_time():
    case = Case()
    await case.say((7, 0, [1, 2, 3]), (8, 0, [4]))
    await case.say((7, 2, [9, 9]))
    first, other, second = case.drafts.told
    assert (first.id, first.number, first.keep, list(first.tokens), first.k) == ((3, 7), 1, 0, [1, 2, 3], 4)
    assert first.terms.stops == {2} and first.terms.prompt == 1 and first.terms.sampling.max_tokens == 9
    assert (other.id, second.number, second.keep, list(second.tokens)) == ((3, 8), 2, 2, [9, 9])
    assert second.terms is None


async def test_forgotten_sequences_and_a_closed_stream_leave_the_model():
    case = Case()
    await case.say((1, 0, [1]), (2, 0, [2]))
    await case.say(forget=[1, 5])
    assert case.drafts.forgotten == [(3, 1)]
    case.stream.close()
    assert case.drafts.forgotten == [(3, 1), (3, 2)]


async def test_numbers_grow():
    case = Case()
    await case.say((1, 0, [1]), number=5)
    with pytest.raises(InvalidRequest, match="number"):
        await case.say((1, 1, [1]), number=5)


async def test_more_sequences_than_a_stream_may_have_get_no_drafts():
    case = Case()
    await case.say((1, 0, [1]), (2, 0, [2]), (3, 0, [3]))
    await case.say((4, 0, [4]))
    assert list((await next_message(case)).refused) == [4]
    await case.say((4, 1, [4]), (1, 1, [5]), (2, 0, [2]))
    assert [told.id[1] for told in case.drafts.told] == [1, 2, 3, 1, 2], "what is said of it is left out"
    await case.say((5, 0, [4]), forget=[3, 4])
    assert case.drafts.told[-1].id == (3, 5)


@pytest.mark.parametrize("last", [(1, 58, [0]), (2, 39, [0] * 2), (3, 0, [0])])
async def test_beyond_the_tokens_that_a_stream_may_have_the_youngest_gets_no_drafts(last):
    """An end token counts as one."""
    case = Case()
    await case.say((1, 0, [0] * 58), (2, 0, [0] * 40))
    await case.say(last)
    youngest = max(2, last[0])
    assert list((await next_message(case)).refused) == [youngest]
    assert case.drafts.forgotten == [(3, youngest)]
    await case.say((youngest, 40, [0]), (1, 10, [7] * 48))
    assert case.drafts.told[-1].id == (3, 1)


async def test_letters_of_grammars_count_as_tokens():
    case = Case()
    await case.say((1, 0, [0] * 39), grammar="x" * 60)
    await case.say((2, 0, [0]))
    await case.say(forget=[1, 2])
    await case.say((3, 0, [0] * 60), grammar="x" * 40)
    await case.say((4, 0, [0] * 59), grammar="x" * 40)
    assert [told.id[1] for told in case.drafts.told] == [1, 4]
    assert list((await next_message(case)).refused) == [3]


async def test_a_tenant_with_many_letters_leaves_the_others_their_drafts():
    case = Case()
    await case.say((1, 0, [0]), owner=b"n" * 16)
    await case.say((2, 0, [0]), (3, 0, [0]), owner=b"m" * 16, grammar="x" * 50)
    assert list((await next_message(case)).refused) == [3]
    await case.say((4, 0, [0] * 40), owner=b"n" * 16)
    assert [told.id[1] for told in case.drafts.told] == [1, 2, 4]

    await case.say((5, 0, [0] * 30), owner=b"o" * 16, forget=[1])
    assert list((await next_message(case)).refused) == [2], "who has most gives way"
    assert case.drafts.told[-1].id == (3, 5)


async def test_one_of_many_sequences_that_nobody_would_sample_by_gets_no_drafts():
    case = Case()
    await case.say((1, 0, [1]))
    await case.say((2, 0, [1]), temperature=float("nan"))
    await case.say((1, 1, [1]), (2, 1, [1]))
    assert [told.id[1] for told in case.drafts.told] == [1, 1]
    assert list((await next_message(case)).refused) == [2]
    await case.say((2, 0, [1]), forget=[2])
    assert case.drafts.told[-1].id == (3, 2)


async def test_sequences_without_drafts_are_counted_too():
    case = Case()
    with pytest.raises(InvalidRequest, match="65536 that get no drafts"):
        await case.say(*((id, 0, [1]) for id in range(1 << 16 | 1)), temperature=float("nan"))


async def next_message(case):
    messages = case.stream.messages()
    try:
        return await anext(messages)
    finally:
        await messages.aclose()


def columns(message):
    return [list(column) for column in (message.ids, message.after, message.lengths, message.counts, message.tokens)]


async def test_what_is_not_sent_yet_is_merged():
    case = Case()
    await case.say((1, 0, [1]), (2, 0, [2]), (3, 0, [3]))
    case.stream.take([DraftLead((3, 1), 1, 1, [10]), DraftLead((3, 2), 1, 1, [20])], [(3, 3)])
    case.stream.take([DraftLead((3, 1), 1, 2, [11, 12]), DraftLead((3, 2), 2, 5, [21])], [])
    case.stream.take([DraftLead((3, 9), 1, 2, [99])], [(3, 9)])
    message = await next_message(case)
    assert columns(message) == [[1, 2], [1, 2], [1, 5], [3, 1], [10, 11, 12, 21]]
    assert list(message.refused) == [3]
    case.stream.take([DraftLead((3, 1), 1, 4, [13]), DraftLead((3, 3), 4, 1, [30])], [(3, 1)])
    case.stream.take([], [(3, 3)])
    case.stream.take([DraftLead((3, 3), 4, 2, [31])], [])
    message = await next_message(case)
    assert columns(message) == [[1, 3], [1, 4], [4, 1], [1, 2], [13, 30, 31]]
    assert list(message.refused) == []
    case.stream.take([DraftLead((3, 2), 2, 6, [22])], [])
    await case.say(forget=[2])
    case.stream.end()
    with suppress(StopAsyncIteration):
        raise AssertionError(f"nothing is left: {await next_message(case)}")
