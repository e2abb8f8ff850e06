"""What clients send: bodies, lines of batches, forms, headers."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import pairwise
from math import isinf

from starlette.datastructures import Headers

from penstock.errors import InvalidRequest, Refused
from penstock.gateway.accounts.auth import session_digest
from penstock.gateway.accounts.pot import TenantPot
from penstock.gateway.api.anthropic.asks import count_prompt, messages_ask
from penstock.gateway.api.openai.asks import chat_ask, completion_ask, session_hint
from penstock.gateway.api.openai.batch_bodies import read_batch
from penstock.gateway.api.openai.tokenizing import read_detokenize, read_tokenize
from penstock.gateway.api.responses.asks import read_order, response_ask
from penstock.gateway.batches.form import FileForm
from penstock.gateway.batches.lines import BatchLine, LineReader, LineTooLong, split
from penstock.gateway.batches.pages import page_of
from penstock.gateway.batches.records import LineFault
from penstock.gateway.completing.repeating import TOKENS, EventPlace, RepeatKey, TokenPlace, place_of, secret_of
from penstock.gateway.door.deadline import HEADER, patience_s
from penstock.gateway.door.uploads import Uploads

from .contract import LOOP_S, Contract, plain

JSON_WORDS = tuple(
    word.encode()
    for word in (
        '"role"', '"user"', '"assistant"', '"tool"', '"content"', '"text"', '"type"', '"function"', '"name"',
        '"parameters"', '"arguments"', '"tool_calls"', '"tool_call_id"', '"id"', '"input"', '"stream"', '"model"',
        '"n"', '"seed"', '"stop"', '"logit_bias"', '"tools"', '"tool_choice"', '"response_format"', '"json_schema"',
        '"schema"', '"penstock"', '"messages"', '"prompt"', '"max_tokens"', '"\\u0000"', '"é"', '[', '{"a":', ']', '}',
    )
)  # fmt: skip
"""Of all bodies."""
_MOST_BODY = 1 << 20


def body(read: Callable[[bytes], object]) -> Callable[[bytes], None]:
    """A reader of bodies takes nothing that is no JSON object, and an error that names a field says it."""

    def check(data: bytes) -> None:
        try:
            read(data)
        except InvalidRequest as error:
            field = (error.field or "").partition(".")[0].partition("[")[0]
            assert field in error.message
            raise
        assert is_object(data.removeprefix(b"\xef\xbb\xbf"))

    return check


def is_object(data: bytes) -> bool:
    """Whether it is a JSON object; what is in texts and numbers that nobody reads does not matter."""
    return isinstance(json.loads(data.decode(errors="replace"), parse_int=str), dict)


def _chat(data: bytes) -> None:
    chat_ask(data, 4)


def _lenient_chat(data: bytes) -> None:
    chat_ask(data, 4, [])


def _completion(data: bytes) -> None:
    completion_ask(data, 4)


def _response(data: bytes) -> None:
    order = read_order(data)
    response_ask(order, (), order.items)


def _pieces(data: bytes) -> list[bytes]:
    """Cut where the data itself says, so that the same input is always cut alike."""
    cuts = sorted({at for at in range(0, len(data), 7) if data[at] % 3 == 0} | {0, len(data)})
    return [data[begin:end] for begin, end in pairwise(cuts)]


async def _arriving(pieces: Sequence[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def _lines_of(pieces: Sequence[bytes]) -> list[tuple[int, bytes]] | int:
    try:
        return [line async for page in split(_arriving(pieces), 2000) for line in page]
    except LineTooLong as error:
        return error.number


def _batch_lines(data: bytes) -> None:
    found = asyncio.run(_lines_of([data]))
    assert asyncio.run(_lines_of(_pieces(data))) == found
    if isinstance(found, int):
        return
    lines = [line.strip() for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n")]
    assert found == [(number, line) for number, line in enumerate(lines, 1) if line]
    reader = LineReader("/v1/completions", lambda model: None if model == "tiny" else f"{model} is not here")
    for number, line in found:
        read = reader.read(number, line)
        assert isinstance(read, LineFault) or (isinstance(read, BatchLine) and is_object(line))


async def _form_of(kind: str, pieces: Sequence[bytes]) -> tuple[dict[str, str], str | None, bytes] | str:
    try:
        form = FileForm(kind)
        content = b"".join([piece async for piece in form.pieces(_arriving(pieces))])
    except InvalidRequest as error:
        return error.code or error.field or ""
    return form.fields, form.filename, content


def _form(data: bytes) -> None:
    """The first line is the content type, the others are the body."""
    kind, _, sent = data.partition(b"\n")
    whole = asyncio.run(_form_of(kind.decode("latin-1"), [sent]))
    assert asyncio.run(_form_of(kind.decode("latin-1"), _pieces(sent))) == whole


def _headers(data: bytes) -> None:
    """One header a line."""
    pairs = [line.partition(b":")[::2] for line in data.split(b"\n")]
    headers = Headers(raw=[(name.strip().lower(), value.strip()) for name, value in pairs])
    digest = session_digest("tenant", headers, None)
    assert digest == "" or len(digest) == 32
    assert 0 < patience_s(headers) <= 86_400 or (HEADER not in headers and isinf(patience_s(headers)))


def _query(data: bytes) -> None:
    text = data.decode("latin-1")
    query = dict(part.partition("=")[::2] for part in text.split("&"))
    assert page_of((), query, 100, 20)["data"] == []


def _last_event(data: bytes) -> None:
    def place_in(last_event: str, counts: str) -> TokenPlace | EventPlace:
        key = RepeatKey(bytes(32), last_event, counts)
        return place_of(key, secret_of(key, [b"part"]), 2)

    sent = data.decode("latin-1")
    place = place_in(sent, "events" if data.startswith(place_in("", "events").tag.encode()) else TOKENS)
    assert not sent or sent.startswith(f"{place.tag}-")
    if isinstance(place, TokenPlace):
        assert len(place.had) == 2 and min(place.had) >= 0
        assert place_in(place.id, TOKENS) == place
    else:
        assert place.had >= 0


def _gzip(data: bytes) -> None:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": data}

    async def read() -> bytes:
        pot = TenantPot(4 * _MOST_BODY, several=False)
        headers = Headers({"content-encoding": "gzip"})
        try:
            async with Uploads(pot).body("tenant", headers, receive, _MOST_BODY) as decoded:
                return decoded
        finally:
            assert pot.used == 0

    decoded = asyncio.run(read())
    if b"\x1f\x8b" not in data[1:]:  # of several members, which gzip takes for one text, only the first is read
        assert decoded == _gunzipped(data)


def _gunzipped(data: bytes) -> bytes:
    decoder = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    decoded = decoder.decompress(data)
    return decoded if decoder.unused_data else gzip.decompress(data)


CONTRACTS = (
    Contract(name="chat", opened=plain(body(_chat)), words=JSON_WORDS),
    Contract(name="lenient_chat", opened=plain(body(_lenient_chat)), words=JSON_WORDS),
    Contract(name="completion", opened=plain(body(_completion)), words=JSON_WORDS),
    Contract(name="response", opened=plain(body(_response)), words=JSON_WORDS),
    Contract(name="message", opened=plain(body(messages_ask)), words=JSON_WORDS),
    Contract(name="count_tokens", opened=plain(body(count_prompt)), words=JSON_WORDS),
    Contract(name="tokenize", opened=plain(body(read_tokenize)), words=JSON_WORDS),
    Contract(name="detokenize", opened=plain(body(read_detokenize)), words=JSON_WORDS),
    Contract(name="batch", opened=plain(body(read_batch)), words=JSON_WORDS),
    Contract(name="session_hint", opened=plain(body(session_hint)), words=JSON_WORDS),
    Contract(name="batch_lines", opened=plain(_batch_lines), words=(*JSON_WORDS, b"\n", b"\r\n", b"\xef\xbb\xbf")),
    Contract(
        name="form",
        opened=plain(_form),
        words=(b"\r\n", b"--b", b"--b--", b'name="file"', b'filename="', b"\n", b";", b"boundary=", b"\xff"),
    ),
    Contract(name="headers", opened=plain(_headers), words=(b"\n", b"nan", b"inf", b"1_0", b"\xe9"), seconds=LOOP_S),
    Contract(
        name="query", opened=plain(_query), words=(b"&", b"=", b"limit", b"order", b"after", b"\xb2"), seconds=LOOP_S
    ),
    Contract(
        name="last_event",
        opened=plain(_last_event),
        refusals=(InvalidRequest, Refused),
        words=(b".", b"-", b"0", b"\xb2"),
        seconds=LOOP_S,
    ),
    Contract(name="gzip", opened=plain(_gzip), words=(b"\x1f\x8b\x08\x00", b"\x03\x00")),
)
