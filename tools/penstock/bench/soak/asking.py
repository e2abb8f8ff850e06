"""A client of a soak: asks one gateway after the other until it has its whole answer, or leaves in the middle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.bench.soak.asks import SoakAsk
from penstock.bench.soak.heard import SoakAnswer
from penstock.bench.soak.options import SoakOptions
from penstock.load.client import HttpAnswer
from penstock.runtime.addresses import HostPort

_LATER = (429, 503)
_LONGEST_PAUSE_S = 2.0
_PAUSE_S = 0.1
"""Before another gateway is asked, as clients do that find nobody."""
_WHOLE_S = 0.3
"""Who leaves before a whole answer does so within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakWish:
    """One request of one client."""

    name: str
    """Its Idempotency-Key."""
    ask: SoakAsk
    api_key: str
    gateway: int
    """Asked first."""
    streams: bool
    leaves_at: float | None = None
    """The part of the answer after which the client leaves, from 0 to 1; None: it stays."""
    tokens: int = 0
    """Of the right answer, where that is known."""

    def request(self, gateway: HostPort, last_event: str) -> bytes:
        """The bytes to send."""
        body = {**self.ask.body, "return_token_ids": True}
        if self.streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        content = json.dumps(body).encode()
        lines = [
            f"POST {self.ask.path} HTTP/1.1",
            f"host: {gateway}",
            "content-type: application/json",
            f"content-length: {len(content)}",
            "connection: close",
            f"authorization: Bearer {self.api_key}",
            f"idempotency-key: {self.name}",
        ]
        if self.ask.session:
            lines.append(f"x-session-affinity: {self.ask.session}")
        if last_event:
            lines.append(f"last-event-id: {last_event}")
        return "\r\n".join((*lines, "", "")).encode() + content


@dataclass(slots=True)
class SoakOutcome:
    """What became of a wish."""

    wish: SoakWish
    heard: SoakAnswer = field(default_factory=SoakAnswer)
    asked_at: float = 0.0
    ended_at: float = 0.0
    left: bool = False
    lost: str = ""
    """Why there is no whole answer although the client waited; empty: there is, or the client left."""
    again: int = 0
    """How often it was asked again."""
    resumed: int = 0
    """How often a part of the answer was there then, and a gateway went on after it."""
    refusals: list[int] = field(default_factory=list)
    """Statuses with which gateways said that it should ask later."""
    errors: list[str] = field(default_factory=list)
    """What gateways said that were there: errors in a stream or instead of one, but for that it should ask later."""

    @property
    def took_s(self) -> float:
        """Until the end of the answer."""
        return self.ended_at - self.asked_at


class _Broken(Exception):
    """This attempt brought no end of the answer; another one may."""

    def __init__(self, pause_s: float, told: str = "") -> None:
        super().__init__(told)
        self.pause_s = pause_s
        self.told = told


class _Listener:
    """Hears one connection."""

    def __init__(self, outcome: SoakOutcome) -> None:
        self._heard, wish = outcome.heard, outcome.wish
        self.at = asyncio.get_running_loop().time()
        """When it last heard anything."""
        self.begun = False
        """Whether it has heard anything."""
        self.enough: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the client leaves."""
        self._most = None if wish.leaves_at is None else int(wish.leaves_at * wish.tokens)
        self._look()

    def line(self, line: bytes, at: float) -> None:
        self.at, self.begun = at, True
        self._heard.line(line, at)
        self._look()

    def _look(self) -> None:
        if self._most is not None and self._heard.tokens >= self._most and not self.enough.done():
            self.enough.set_result(None)


class SoakClient:
    """Asks the gateways of a mesh."""

    def __init__(self, gateways: Sequence[HostPort], options: SoakOptions) -> None:
        self._gateways = gateways
        self._options = options

    async def ask(self, wish: SoakWish, heard: SoakAnswer | None = None) -> SoakOutcome:
        """Until the answer is whole, its client has left or the time is up. Fills `heard`, if it is given."""
        loop = asyncio.get_running_loop()
        outcome = SoakOutcome(wish, heard or SoakAnswer(), asked_at=loop.time())
        try:
            async with asyncio.timeout(self._options.deadline_s):
                await self._asked(outcome)
        except TimeoutError:
            last = outcome.errors[-1:] or ["no gateway answered"]
            outcome.lost = f"not within {self._options.deadline_s:.0f} s, asked again {outcome.again} times: {last[0]}"
        outcome.ended_at = loop.time()
        return outcome

    async def _asked(self, outcome: SoakOutcome) -> None:
        number = outcome.wish.gateway
        while not (outcome.heard.over or outcome.left or outcome.lost):
            gateway = self._gateways[number % len(self._gateways)]
            try:
                await self._attempt(gateway, outcome)
            except (OSError, _Broken) as error:
                told, pause_s = (error.told, error.pause_s) if isinstance(error, _Broken) else ("", _PAUSE_S)
                if told:
                    outcome.errors.append(told)
                outcome.again += 1
                number += 1
                await asyncio.sleep(pause_s)

    async def _attempt(self, gateway: HostPort, outcome: SoakOutcome) -> None:
        """One connection. Raises OSError and _Broken."""
        wish, heard = outcome.wish, outcome.heard
        last_event = heard.again()
        outcome.resumed += bool(last_event)
        request = wish.request(gateway, last_event)
        listener = _Listener(outcome) if wish.streams else None
        transport, answer = await asyncio.get_running_loop().create_connection(
            lambda: HttpAnswer(request, listener.line if listener else None), gateway.host, gateway.port
        )
        try:
            left = await (self._streamed(answer, listener) if listener else self._whole(answer, wish))
        finally:
            transport.abort()
            answer.ended.cancel()
        if left:
            outcome.left = True
            return
        answer.ended.result()
        if answer.status in _LATER:
            outcome.refusals.append(answer.status)
            raise _Broken(min(answer.retry_after, _LONGEST_PAUSE_S))
        if answer.status >= 500:
            raise _Broken(_PAUSE_S, f"status {answer.status}: {answer.text()}")
        if answer.status != 200:
            outcome.lost = f"status {answer.status}: {answer.text()}"
        elif not wish.streams:
            heard.whole(json.loads(answer.body), asyncio.get_running_loop().time())
        elif heard.error or not heard.over:
            raise _Broken(_PAUSE_S, heard.error or "the stream ended without its end")

    async def _streamed(self, answer: HttpAnswer, listener: _Listener) -> bool:
        """Returns when the answer is over, or the client leaves: then True. Raises _Broken after a long silence."""
        clock = asyncio.get_running_loop().time
        ends = (answer.ended, listener.enough)
        while not any(end.done() for end in ends):
            patience_s = self._options.patience_s if listener.begun else self._options.first_patience_s
            left_s = listener.at + patience_s - clock()
            if left_s <= 0:
                raise _Broken(0.0)
            look_s = min(left_s, self._options.patience_s)  # meanwhile it may begin
            await asyncio.wait(ends, timeout=look_s, return_when=asyncio.FIRST_COMPLETED)
        return listener.enough.done()

    async def _whole(self, answer: HttpAnswer, wish: SoakWish) -> bool:
        """Likewise of an answer in one piece."""
        leaves = wish.leaves_at is not None
        seconds = wish.leaves_at * _WHOLE_S if wish.leaves_at is not None else self._options.whole_patience_s
        await asyncio.wait([answer.ended], timeout=seconds)
        if leaves:
            return True
        if not answer.ended.done():
            raise _Broken(0.0)
        return False
