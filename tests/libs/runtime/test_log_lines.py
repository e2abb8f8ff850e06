"""Log lines: in order and whole, and nobody waits for who should read them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator

import pytest

from penstock.runtime.log_lines import LogLines


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def taken(read: int) -> bytes:
    """All that is in a pipe."""
    os.set_blocking(read, False)
    found = b""
    while True:
        try:
            found += os.read(read, 1 << 20)
        except BlockingIOError:
            return found


def test_lines_come_out_as_they_were_written(pipe: tuple[int, int]) -> None:
    read, write = pipe
    lines = LogLines(write)
    texts = ["short\n", "x" * 10_000 + "\n", "\ud800 ü\n"]
    assert [lines.write(text) for text in texts] == [*map(len, texts)]
    assert taken(read).decode() == texts[0] + texts[1] + "\\ud800 ü\n"


def test_nobody_waits_for_a_reader_and_what_is_dropped_is_counted(pipe: tuple[int, int]) -> None:
    read, write = pipe
    lines = LogLines(write, most_bytes=50_000)
    wrote = [f"{number} {'y' * 90}\n" for number in range(5000)]
    for text in wrote:
        lines.write(text)  # it would stand still here: a pipe takes 64 KiB
    found = taken(read)
    lines.write("read again\n")
    while more := taken(read):
        found += more
        lines.flush()
    *kept, told, last = found.decode().splitlines(keepends=True)
    assert kept == wrote[: len(kept)] and last == "read again\n"
    assert json.loads(told)["lines"] == len(wrote) - len(kept)
    assert sum(map(len, kept)) > 100_000


def test_what_waits_is_passed_on_at_the_end(pipe: tuple[int, int]) -> None:
    read, write = pipe
    lines = LogLines(write)
    for _ in range(1000):
        lines.write("z" * 99 + "\n")
    os.set_blocking(read, True)
    found: list[bytes] = []

    def read_all() -> None:
        while sum(map(len, found)) < 100_000:
            found.append(os.read(read, 1 << 16))

    reader = threading.Thread(target=read_all, daemon=True)
    reader.start()
    lines.close()
    reader.join(5)
    assert b"".join(found) == (b"z" * 99 + b"\n") * 1000


def test_a_reader_that_has_gone_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    LogLines(write).write("to nobody\n")
    os.close(write)
