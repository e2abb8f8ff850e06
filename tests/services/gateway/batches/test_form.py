"""A form with a file, as it arrives."""

from __future__ import annotations

import pytest

from penstock.errors import InvalidRequest
from penstock.gateway.batches.form import FileForm

from .helpers import pieces

TYPE = 'multipart/form-data; boundary="x-x"'


def part(name: str, value: bytes, filename: str | None = None) -> bytes:
    named = f'; filename="{filename}"' if filename is not None else ""
    return f'--x-x\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode() + value + b"\r\n"


async def taken(*data: bytes, type: str = TYPE) -> tuple[FileForm, bytes]:
    form = FileForm(type)
    return form, b"".join([piece async for piece in form.pieces(pieces(*data))])


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize("first", ["purpose", "file"])
async def test_the_file_is_what_was_sent_whatever_is_in_it(step, first):
    data = b"--x-x\r\n\r\n--x-\r\n--x_x--" + bytes(range(256)) + b"\r\n--x-y\r\n\r"
    parts = {"purpose": part("purpose", b"batch"), "file": part("file", data, "a b.jsonl")}
    whole = b"".join(parts.pop(name) for name in (first, *(name for name in ("purpose", "file") if name != first)))
    whole += b"--x-x--\r\n"
    form, file = await taken(*(whole[at : at + step] for at in range(0, len(whole), step)))
    assert file == data and form.fields == {"purpose": "batch"} and form.filename == "a b.jsonl"


async def test_nothing_of_the_file_is_kept():
    form = FileForm(TYPE)
    begin = part("file", b"", "big")[:-2]

    async def body():
        yield begin
        for _ in range(50):
            yield b"x" * 100_000
        yield b"\r\n--x-x--"

    total = 0
    async for piece in form.pieces(body()):
        total += len(piece)
        assert sum(map(len, form._pieces)) <= 200_000
    assert total == 5_000_000


@pytest.mark.parametrize("type", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=x"])
def test_other_bodies_are_refused(type):
    with pytest.raises(InvalidRequest, match="content-type"):
        FileForm(type)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "no end"),
        (b"nonsense", "can't be read"),
        (part("file", b"a", "f"), "no end"),
        (part("purpose", b"batch") + b"--x-x--", "file: is required"),
        (part("file", b"a", "f") + part("file", b"b", "g") + b"--x-x--", "file: must be there once"),
        (part("purpose", b"x" * 1025) + b"--x-x--", "purpose: must have at most 1024 bytes"),
        (b"".join(part(f"f{at}", b"") for at in range(17)) + b"--x-x--", "at most 16 parts"),
        (b"--x-x\r\n" + b"A: b\r\n" * 9 + b"\r\n\r\n--x-x--", "can't be read"),
        (b"--x-x\r\nA: " + b"b" * 5000 + b"\r\n\r\n\r\n--x-x--", "can't be read"),
    ],
)
async def test_what_is_wrong_is_said(body, message):
    with pytest.raises(InvalidRequest, match=message):
        await taken(body)
    with pytest.raises(InvalidRequest):
        FileForm(f"multipart/form-data; boundary={'x' * 300}")
