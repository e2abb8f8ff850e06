"""What the draft service remembers of one decode worker's sequences."""

import pytest

from penstock.draft.config import DraftConfig
from penstock.draft.stream import DraftStream
from penstock.errors import InvalidRequest
from penstock.v1 import draft_pb2

CONFIG = DraftConfig(model="ngram", max_stream_sequences=3, max_stream_tokens=100)


def stream_of():
    return DraftStream(1, lambda id: None, CONFIG)


def ask(*sequences, forget=()):
    return draft_pb2.DraftAsk(
        number=1,
        sequences=[draft_pb2.DraftSequence(id=id, keep=keep, tokens=tokens, k=4) for id, keep, tokens in sequences],
        forget=forget,
    )


def test_differences_add_up_to_the_whole_sequence():
    stream = stream_of()
    stream.apply(ask((7, 0, [1, 2, 3])))
    message = ask((7, 2, [9, 9]))
    stream.apply(message)
    [(id, asked)] = stream.asks(message)
    assert (id, list(asked.tokens), asked.id) == (7, [1, 2, 9, 9], "1/7")


def test_a_difference_to_nothing_makes_the_sequence_unknown():
    stream = stream_of()
    message = ask((7, 5, [1]), (8, 0, [1]))
    stream.apply(message)
    assert stream.unknown(message) == [7]
    assert [id for id, _ in stream.asks(message)] == [8]


def test_forgotten_sequences_and_a_closed_stream_leave_the_proposer():
    gone = []
    stream = DraftStream(3, gone.append, CONFIG)
    stream.apply(ask((1, 0, [1]), (2, 0, [2])))
    stream.apply(ask(forget=[1]))
    assert gone == ["3/1"]
    stream.close()
    assert gone == ["3/1", "3/2"]


def test_more_sequences_than_a_stream_may_have_are_refused():
    stream = stream_of()
    stream.apply(ask((1, 0, [1]), (2, 0, [2]), (3, 0, [3])))
    with pytest.raises(InvalidRequest, match="may have 3 at a time") as caught:
        stream.apply(ask((4, 0, [4])))
    assert caught.value.field == "sequences"
    stream.apply(ask((1, 1, [5]), (2, 0, [2])))
    stream.apply(ask((4, 0, [4]), forget=[3]))


def test_more_tokens_than_a_stream_may_have_are_refused():
    stream = stream_of()
    stream.apply(ask((1, 0, [0] * 60), (2, 0, [0] * 40)))
    for more in ((1, 60, [0]), (2, 39, [0] * 2), (3, 0, [0])):
        with pytest.raises(InvalidRequest, match="may have 100 together") as caught:
            stream.apply(ask(more))
        assert caught.value.field == "tokens"
    stream.apply(ask((1, 10, [7] * 50), (2, 0, [8] * 40)))
    stream.apply(ask((3, 0, [0] * 60), forget=[1]))
    stream.apply(ask((2, 50, [1])))  # not to be continued: forgotten, so that there is room again
    stream.apply(ask((2, 0, [0] * 40)))


def guided(id, keep, tokens, text=""):
    message = ask((id, keep, tokens))
    if text:
        message.sequences[0].grammar.CopyFrom(draft_pb2.DraftGrammar(text=text, prompt=1, ends=[2]))
    return message


def test_a_guide_belongs_to_the_tokens_that_it_has_followed():
    made = []

    def guide(asked):
        made.append(asked)
        return f"guide {len(made)}"

    stream = DraftStream(1, lambda id: None, CONFIG, guide)

    def given(message):
        stream.apply(message)
        [(_, asked)] = stream.asks(message)
        return asked.guide

    assert given(guided(7, 0, [1, 5], "text")) == "guide 1"
    assert given(guided(7, 2, [6])) == "guide 1"
    assert given(guided(7, 1, [8])) == "guide 2", "other tokens now"
    assert given(guided(7, 0, [1], "another text")) == "guide 3"
    assert given(guided(8, 0, [1])) is None
    assert [asked.text for asked in made] == ["text", "text", "another text"]
    assert made[0].prompt == 1 and made[0].ends == {2}


def test_letters_of_grammars_count_as_tokens():
    stream = stream_of()
    stream.apply(guided(1, 0, [0] * 40, "x" * 60))
    with pytest.raises(InvalidRequest, match="may have 100 together"):
        stream.apply(guided(2, 0, [0]))
    stream.apply(guided(1, 0, [0] * 80, "x" * 20))
    with pytest.raises(InvalidRequest, match="may have 100 together"):
        stream.apply(guided(2, 0, [0], "x"))
    stream.apply(ask(forget=[1]))
    stream.apply(guided(2, 0, [0] * 50, "x" * 50))
