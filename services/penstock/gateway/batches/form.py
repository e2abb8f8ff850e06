"""A multipart/form-data body with one file in it, read as it arrives: nothing of the file stays in memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from penstock.errors import InvalidRequest

_MOST_PARTS = 16
_MOST_VALUE = 1024
_MOST_NAME = 255
_FILE = "file"


class FileForm:
    """One form. Take all of `pieces`, then ask for the rest."""

    def __init__(self, content_type: str) -> None:
        """Raises InvalidRequest for a body of another kind."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            right = "content-type: must be multipart/form-data with a boundary: a form with the fields purpose and file"
            raise InvalidRequest(right, field="content-type")
        self.fields: dict[str, str] = {}
        """All but the file, as far as they have arrived."""
        self.filename: str | None = None
        """The file's; None: it has not begun."""
        self._pieces: list[bytes] = []
        self._part = _FormPart()
        self._parts = 0
        self._ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begins,
                    "on_header_field": self._part.header_name,
                    "on_header_value": self._part.header_value,
                    "on_header_end": self._part.header_ends,
                    "on_headers_finished": self._headers_end,
                    "on_part_data": self._data,
                    "on_part_end": self._part_ends,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _broken(error) from None

    async def pieces(self, body: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """The bytes of the file, out of those of the body; ends with the form. Raises InvalidRequest."""
        async for chunk in body:
            try:
                self._parser.write(chunk)
            except FormParserError as error:
                raise _broken(error) from None
            for piece in self._pieces:
                yield piece
            self._pieces.clear()
        if not self._ended:
            raise InvalidRequest("the form has no end", code="invalid_form")
        if self.filename is None:
            raise InvalidRequest(f"{_FILE}: is required, as a part of the form with a file name", field=_FILE)

    # The parser's side

    def _part_begins(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise InvalidRequest(f"the form must have at most {_MOST_PARTS} parts", code="invalid_form")
        self._part.begin()

    def _headers_end(self) -> None:
        if self._part.name != _FILE:
            return
        if self.filename is not None:
            raise InvalidRequest(f"{_FILE}: must be there once", field=_FILE)
        self.filename = self._part.filename[:_MOST_NAME]

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._part.name == _FILE:
            self._pieces.append(data[start:end])
        else:
            self._part.value += data[start:end]
            if len(self._part.value) > _MOST_VALUE:
                name = self._part.name[:64]
                raise InvalidRequest(f"{name}: must have at most {_MOST_VALUE} bytes", field=name)

    def _part_ends(self) -> None:
        if self._part.name != _FILE:
            self.fields[self._part.name] = self._part.value.decode(errors="replace")

    def _end(self) -> None:
        self._ended = True


class _FormPart:
    """The part that arrives now."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.name = self.filename = ""
        self.value = b""
        self._header = self._said = b""

    def header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._said += data[start:end]

    def header_ends(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._said)
            self.name = options.get(b"name", b"").decode(errors="replace")
            self.filename = options.get(b"filename", b"").decode(errors="replace")
        self._header = self._said = b""


def _broken(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"the form can't be read: {str(error)[:200]}", code="invalid_form")
