"""What a worker reads from the wire."""

from __future__ import annotations

from penstock.kv.identity import KEY_BYTES
from penstock.v1 import common_pb2
from penstock.worker.convert import order_from_message
from penstock.worker.pictures import HeldPictures


def test_the_engine_learns_whose_a_request_is_and_to_which_session_it_belongs():
    message = common_pb2.Request(
        request_id="r", prompt_ids=[1], cache_root=bytes(KEY_BYTES), namespace=b"n" * 16, session="talk"
    )
    request = order_from_message(message, HeldPictures(0)).request
    assert (request.owner, request.session) == (b"n" * 16, b"talk")
    message.ClearField("session")
    assert order_from_message(message, HeldPictures(0)).request.session == b""
