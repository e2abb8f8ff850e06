"""Looks through the input of a batch before any of it is run."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from penstock.gateway.batches.answering import LineAnswers
from penstock.gateway.batches.lines import MOST_FAULTS, BatchLine, LineReader, LineTooLong, split
from penstock.gateway.batches.records import LineFault, StoredBatch
from penstock.gateway.batches.store import BatchStore
from penstock.gateway.completing.threads import Threads

Lines = AsyncGenerator[list[BatchLine | LineFault], None]


class InputLook:
    """What is in the input of a batch. Call `through` once."""

    def __init__(self, batch: StoredBatch, answers: LineAnswers, *, most_lines: int, most_bytes: int) -> None:
        """At most so many lines may be in it, and so many bytes in the body of one."""
        self.faults: list[LineFault] = []
        """What is wrong with it, as far as that is told."""
        self.total = 0
        self._batch = batch
        self._reader = LineReader(batch.endpoint, answers.served)
        self._most_lines = most_lines
        self._most_bytes = most_bytes

    @property
    def model(self) -> str | None:
        """Of all lines; None where they have several."""
        return self._reader.model

    async def through(self, store: BatchStore, threads: Threads) -> bool:
        """Looks at all of it, or until enough is wrong; True."""
        try:
            async with aclosing(
                read_lines(self._batch, self._reader, store, threads, most_bytes=self._most_bytes)
            ) as read:
                async for lines in read:
                    if not self._go_on(lines):
                        break
        except LineTooLong as error:
            what = f"the line is longer than a body of {self._most_bytes} bytes can make it"
            self.faults.append(LineFault("line_too_long", what, error.number))
        if not self.total and not self.faults:
            self.faults.append(LineFault("empty_file", "the file has no lines"))
        del self.faults[MOST_FAULTS:]
        return True

    def _go_on(self, lines: list[BatchLine | LineFault]) -> bool:
        self.total += len(lines)
        self.faults += [line for line in lines if isinstance(line, LineFault)]
        if self.total > self._most_lines:
            what = f"the file has more than {self._most_lines} lines; divide it among several batches"
            self.faults.insert(0, LineFault("too_many_lines", what))
            return False
        return len(self.faults) < MOST_FAULTS


async def read_lines(
    batch: StoredBatch, reader: LineReader, store: BatchStore, threads: Threads, *, most_bytes: int
) -> Lines:
    """The lines of a batch's input, as many at once as come together. Raises LineTooLong."""
    async with aclosing(split(store.read(batch.tenant, batch.input_file_id), most_bytes)) as pages:
        async for page in pages:

            def read(page: list[tuple[int, bytes]] = page) -> list[BatchLine | LineFault]:
                return [reader.read(number, line) for number, line in page]

            yield await threads.run(read, sum(len(line) for _, line in page), batch.tenant)
