"""The lines of a batch: as they come in, what may be wrong with them, and as they go out."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.gateway.batches.records import LineFault, LinesUsage, StoredBatch

MOST_FAULTS = 100
"""Of one batch that are told."""
_MOST_NAME = 512
_ENVELOPE_BYTES = 4096
"""That a line may have around its body."""
ANY_LENGTH = 1 << 40
"""Of a line that was looked at before."""
_BOM = b"\xef\xbb\xbf"
_SHOWN = 100


class LineTooLong(Exception):
    """A line of an input is longer than any may be."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class BatchLine(msgspec.Struct, frozen=True):
    """One request of a batch."""

    number: int
    """In its file, from 1."""
    custom_id: str
    body: bytes
    model: str

    def id(self, batch: StoredBatch) -> str:
        """Its name among the requests of all batches: the same each time that it is run."""
        return f"batch_req_{batch.id.removeprefix('batch_')}_{self.number}"


class _Envelope(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Model(msgspec.Struct):
    model: str
    stream: bool | None = None


_ENVELOPES = msgspec.json.Decoder(_Envelope)
_MODELS = msgspec.json.Decoder(_Model)
_AT = re.compile(r" - at `\$\.?(?P<field>[^`]*)`\Z")
_MISSING = re.compile(r"missing required field `(?P<field>\w+)`")


async def split(pieces: AsyncGenerator[bytes, None], most: int) -> AsyncGenerator[list[tuple[int, bytes]], None]:
    """The lines of a file with their numbers, as many at once as come together, those without any text left out. Raises
    LineTooLong for one whose body could not have `most` bytes or fewer."""
    rest, number, most = b"", 0, most + _ENVELOPE_BYTES
    async with aclosing(pieces):
        async for piece in pieces:
            *lines, rest = (rest + piece).split(b"\n")
            found = []
            for line in lines:
                number += 1
                if len(line) > most:
                    raise LineTooLong(number)
                if text := _text(line, number):
                    found.append((number, text))
            if found:
                yield found
            if len(rest) > most:
                raise LineTooLong(number + 1)
    if text := _text(rest, number + 1):
        yield [(number + 1, text)]


def _text(line: bytes, number: int) -> bytes:
    return (line.removeprefix(_BOM) if number == 1 else line).strip()


class LineReader:
    """Reads the lines of one batch, in order."""

    def __init__(self, endpoint: str, served: Callable[[str], str | None]) -> None:
        """`served` says why no request for a model of that name can be served; None: it can."""
        self._endpoint = endpoint
        self._served = served
        self._seen: dict[str, int] = {}
        self._models: dict[str, str | None] = {}

    def read(self, number: int, line: bytes) -> BatchLine | LineFault:
        """A line, or what is wrong with it."""
        try:
            envelope = _ENVELOPES.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _not_read(number, error)
        found = self._fault(number, envelope)
        if found is not None:
            return found
        try:
            body = _MODELS.decode(envelope.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _not_read(number, error, "body")
        if body.stream:
            what = "body.stream: must not be true: an answer of a batch is given whole"
            return LineFault("invalid_request", what, number, "body.stream")
        if body.model not in self._models:
            self._models[body.model] = self._served(body.model)
        if (reason := self._models[body.model]) is not None:
            return LineFault("model_not_found", f"body.model: {reason}", number, "body.model")
        return BatchLine(number, envelope.custom_id, bytes(envelope.body), body.model)

    @property
    def model(self) -> str | None:
        """That of all lines so far; None where they have several."""
        return next(iter(self._models)) if len(self._models) == 1 else None

    def _fault(self, number: int, envelope: _Envelope) -> LineFault | None:
        name = envelope.custom_id
        if not 0 < len(name) <= _MOST_NAME:
            what = f"custom_id: must have 1 to {_MOST_NAME} characters, not {len(name)}"
            return LineFault("invalid_custom_id", what, number, "custom_id")
        if (first := self._seen.setdefault(name, number)) != number:
            what = f"custom_id: {name[:_SHOWN]!r} is that of line {first} too; each line needs one of its own"
            return LineFault("duplicate_custom_id", what, number, "custom_id")
        if envelope.method != "POST":
            what = f"method: must be POST, not {envelope.method[:_SHOWN]!r}"
            return LineFault("invalid_method", what, number, "method")
        if envelope.url != self._endpoint:
            what = f"url: must be {self._endpoint}, the endpoint of the batch, not {envelope.url[:_SHOWN]!r}"
            return LineFault("invalid_url", what, number, "url")
        return None


def _not_read(number: int, error: Exception, inside: str = "") -> LineFault:
    """What is wrong with the JSON of a line, or of the part `inside` of it."""
    if not isinstance(error, msgspec.ValidationError):
        return LineFault("invalid_json_line", f"the line is not valid JSON: {error}", number, inside or None)
    text = str(error)
    place, missing = _AT.search(text), _MISSING.search(text)
    field = ".".join(filter(None, (inside, place and place["field"], missing and missing["field"])))
    what = "is required" if missing else _AT.sub("", text)
    return LineFault("invalid_request", f"{field}: {what}" if field else what, number, field or None)


@dataclass(frozen=True, slots=True)
class LineResult:
    """What became of a line."""

    custom_id: str
    ok: bool
    """It has an answer; else it has an error."""
    written: bytes
    """Its line among the results."""
    usage: LinesUsage


def answered(batch: StoredBatch, line: BatchLine, status: int, body: Any) -> LineResult:
    """A line that the gateway has answered, with an error or without."""
    id = line.id(batch)
    response = {"status_code": status, "request_id": id, "body": body}
    written = _written(id, line.custom_id, response, None)
    return LineResult(line.custom_id, status == 200, written, _USAGES.decode(written).usage)


def expired(batch: StoredBatch, line: BatchLine) -> LineResult:
    """A line for which there was no time."""
    what = "This request could not be executed before the completion window expired."
    error = {"code": "batch_expired", "message": what}
    return LineResult(line.custom_id, False, _written(line.id(batch), line.custom_id, None, error), LinesUsage())


def recorded(written: bytes, ok: bool) -> LineResult:
    """A line of the results, as it was written earlier."""
    found = _USAGES.decode(written)
    return LineResult(found.custom_id, ok, written, found.usage)


def _written(id: str, custom_id: str, response: Any, error: Any) -> bytes:
    return msgspec.json.encode({"id": id, "custom_id": custom_id, "response": response, "error": error}) + b"\n"


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    """As any of the APIs has it."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    body: _Body | None = None


class _Result(msgspec.Struct):
    custom_id: str
    response: _Response | None = None

    @property
    def usage(self) -> LinesUsage:
        """Tokens of the answer."""
        body = self.response.body if self.response is not None else None
        said = body.usage if body is not None else None
        if said is None:
            return LinesUsage()
        given = said.prompt_tokens_details or said.input_tokens_details or _Details()
        made = said.completion_tokens_details or said.output_tokens_details or _Details()
        return LinesUsage(
            said.prompt_tokens + said.input_tokens,
            given.cached_tokens,
            said.completion_tokens + said.output_tokens,
            made.reasoning_tokens,
        )


_USAGES = msgspec.json.Decoder(_Result)
