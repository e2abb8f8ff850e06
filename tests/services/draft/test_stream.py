"""What the draft service remembers of one decode worker's sequences."""

import pytest

from penstock.draft.service import Stream
from penstock.errors import InvalidRequest
from penstock.v1 import draft_pb2


def ask(*sequences, forget=()):
    return draft_pb2.DraftAsk(
        number=1,
        sequences=[draft_pb2.DraftSequence(id=id, keep=keep, tokens=tokens, k=4) for id, keep, tokens in sequences],
        forget=forget,
    )


def test_differences_add_up_to_the_whole_sequence():
    stream = Stream(1, lambda id: None)
    stream.apply(ask((7, 0, [1, 2, 3])))
    message = ask((7, 2, [9, 9]))
    stream.apply(message)
    [(id, asked)] = stream.asks(message)
    assert (id, list(asked.tokens), asked.id) == (7, [1, 2, 9, 9], "1/7")


def test_a_difference_to_nothing_makes_the_sequence_unknown():
    stream = Stream(1, lambda id: None)
    message = ask((7, 5, [1]), (8, 0, [1]))
    stream.apply(message)
    assert stream.unknown(message) == [7]
    assert [id for id, _ in stream.asks(message)] == [8]


def test_forgotten_sequences_and_a_closed_stream_leave_the_proposer():
    gone = []
    stream = Stream(3, gone.append)
    stream.apply(ask((1, 0, [1]), (2, 0, [2])))
    stream.apply(ask(forget=[1]))
    assert gone == ["3/1"]
    stream.close()
    assert gone == ["3/1", "3/2"]


def test_an_endless_sequence_is_refused():
    stream = Stream(1, lambda id: None)
    with pytest.raises(InvalidRequest, match="tokens"):
        stream.apply(ask((1, 0, [0] * ((1 << 20) + 1))))
