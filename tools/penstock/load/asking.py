"""One request and what becomes of it: of a session that is played, or of whoever has a prompt of token ids."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from penstock.load.chunks import AnswerReader
from penstock.load.client import HttpAnswer, HttpClient
from penstock.load.completions import LlamaReader, TokenReader
from penstock.load.events import Begun, CountedUsage, EventReader, nothing
from penstock.load.records import LoadRecord
from penstock.load.target import Endpoint, LoadTarget

_REFUSALS = (429, 503)
_READERS: dict[Endpoint, Callable[[Begun], EventReader]] = {
    "chat": AnswerReader,
    "completions": TokenReader,
    "llamaserver": LlamaReader,
}


class LoadClock(Protocol):
    """What time it is for a player."""

    def now(self) -> float:
        """Seconds, of `time.monotonic` unless it is a test's own."""
        ...

    async def until(self, at: float) -> None:
        """Returns when it is so late."""
        ...


class MonotonicClock:
    """The machine's clock, which all processes share."""

    def now(self) -> float:
        return time.monotonic()

    async def until(self, at: float) -> None:
        while (left := at - time.monotonic()) > 0:  # noqa: ASYNC110 - timers may be early by a part of a millisecond
            await asyncio.sleep(left)


class AskFailed(Exception):
    """A request got no whole answer; the message says which and why."""


class Asker:
    """Sends requests to a target, and notes what became of each."""

    def __init__(self, target: LoadTarget, clock: LoadClock) -> None:
        self._target = target
        self._clock = clock
        self._client = HttpClient(target)

    def reader(self, begun: Begun = nothing) -> EventReader:
        """Of one answer; calls `begun` when its first part comes."""
        return _READERS[self._target.endpoint](begun)

    def request(self, body: bytes, session: str) -> bytes:
        """The bytes of a request of a session."""
        header = (self._target.session_header, session)
        return self._client.request("POST", self._target.path, body, header if self._target.session_header else None)

    async def ask(self, request: bytes, reader: EventReader, record: LoadRecord) -> None:
        """Sends a request, and notes how it failed if it did. Where it is refused for now, it is sent again when the
        server says, as often as the target has it."""
        try:
            async with asyncio.timeout(self._target.timeout_s):
                answer = await self._sent(request, reader, record)
        except TimeoutError:
            record.error, record.message = "Timeout", f"no whole answer within {self._target.timeout_s:g} s"
        except OSError as error:
            if not reader.finish:
                record.error, record.message = type(error).__name__, str(error)
        else:
            record.status = answer.status
            if answer.status != 200:
                record.error, record.message = "Refused", answer.text()
            elif not (reader.finish or reader.error):
                record.error, record.message = "Incomplete", "the stream ended without a finish_reason"
        if reader.error and not record.error:
            record.error, record.message = "ErrorEvent", reader.error

    async def _sent(self, request: bytes, reader: EventReader, record: LoadRecord) -> HttpAnswer:
        while True:
            answer = await self._client.send(request, reader.line)
            if answer.status not in _REFUSALS or record.refusals >= self._target.retries:
                return answer
            record.refusals += 1
            await self._clock.until(self._clock.now() + answer.retry_after)


def fill(record: LoadRecord, reader: EventReader, start: float) -> None:
    """Notes what the answer's own reader knows; `start`: from when the record's times count."""
    if times := reader.times:
        record.first, record.last = times[0] - start, times[-1] - start
        record.gaps = [round(later - earlier, 6) for earlier, later in pairwise(times)]
    record.sizes = reader.sizes
    record.finish = reader.finish
    usage = reader.usage
    if usage is None:
        return
    record.prompt_tokens, record.output_tokens = usage.prompt_tokens, usage.completion_tokens
    record.cached_tokens, record.cost = usage.cached_tokens, usage.cost
    if (own := usage.penstock) is not None:
        record.tiers = own.cached_tokens
        record.drafted_tokens, record.accepted_tokens = own.drafted_tokens, own.accepted_tokens
        record.cost = record.cost if own.cost is None else own.cost


def require_whole(record: LoadRecord, tokens: int) -> None:
    """Raises AskFailed for a request that was not answered with exactly so many tokens."""
    if record.error:
        status = f"status {record.status}: " if record.error == "Refused" else ""
        raise AskFailed(f"{status}{record.message or record.error}")
    if record.tokens != tokens:
        raise AskFailed(f"{record.tokens} tokens came instead of {tokens}")


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """What came back, and when. Seconds on the clock of `time.monotonic`."""

    asked: float
    """When the request was first sent."""
    ids: list[int]
    """The tokens."""
    times: list[float]
    """When each of them came; those of one event came together."""
    usage: CountedUsage
    refusals: int = 0
    """How often the server asked to try again later."""

    @property
    def prompt_tokens(self) -> int:
        """As the server counts."""
        return self.usage.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, as the server says."""
        return self.usage.cached_tokens or 0

    @property
    def accepted_tokens(self) -> int:
        """Drafts that were accepted, of Penstock."""
        return (self.usage.penstock.accepted_tokens if self.usage.penstock else None) or 0

    @property
    def time_to_first_token(self) -> float:
        """Seconds."""
        return self.times[0] - self.asked

    @property
    def request_latency(self) -> float:
        """Seconds to the last token."""
        return self.times[-1] - self.asked

    @property
    def gaps(self) -> list[float]:
        """Seconds between each token and the one before; 0 within an event."""
        return [later - earlier for earlier, later in pairwise(self.times)]


class TokenClient:
    """Asks one server for completions of token ids, with whatever prompt, whenever it is told to."""

    def __init__(self, target: LoadTarget) -> None:
        """Of a target whose endpoint takes token ids."""
        self._target = target
        self._clock = MonotonicClock()
        self._asker = Asker(target, self._clock)

    async def ask(self, prompt: Sequence[int], tokens: int, session: str, begun: Begun = nothing) -> TimedAnswer:
        """The answer of exactly `tokens` tokens; calls `begun` at its first. Raises AskFailed."""
        request = self._asker.request(self._target.token_body(prompt, tokens), session)
        asked = self._clock.now()
        record = LoadRecord(scheduled=asked, sent=asked, session=session)
        reader = self._asker.reader(begun)
        assert isinstance(reader, TokenReader)
        await self._asker.ask(request, reader, record)
        fill(record, reader, 0.0)
        require_whole(record, tokens)
        times = [at for at, size in zip(reader.times, reader.sizes, strict=True) for _ in range(size)]
        return TimedAnswer(asked, reader.ids, times, reader.usage or CountedUsage(), record.refusals)
