"""A running request: its choices on their way through the mesh, and their answers."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from penstock.errors import Internal, PenstockError, Unavailable
from penstock.gateway.completing.answer import Answer
from penstock.gateway.completing.flow import Flow
from penstock.gateway.completing.heard import Heard
from penstock.gateway.completing.outbox import Outbox
from penstock.gateway.completing.prompts import Prepared
from penstock.gateway.completing.repeating import TOKENS, EventPlace, RepeatKey, TokenPlace
from penstock.gateway.completing.stored_answers import StoredAnswer
from penstock.gateway.completing.timing import Marks, times
from penstock.gateway.completing.usage import Usage
from penstock.gateway.request.ask import Ask
from penstock.gateway.request.work import SampledToken
from penstock.runtime.request_metrics import RequestMetrics

_RETOLD = 64
"""Recalled tokens that are told at one time; then others have their turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The client of a request, and the time at which the request began."""

    tenant: str
    session: str
    """Digest of the client's session key; empty when the client sent no key."""
    request_id: str
    began: float
    """`time.perf_counter` at the first byte."""
    body_s: float = 0.0
    """Seconds until its body had arrived and was read."""
    patience_s: float = math.inf
    """How long the caller itself is willing to wait."""
    repeat: RepeatKey | None = None
    """Under which name it may be sent again; None: it may not."""
    yields: bool = False
    """It gives way to everybody else, and takes as long as it takes: only `patience_s` bounds it."""
    taken: Callable[[], None] = lambda: None
    """Called when workers were found for a choice."""

    @classmethod
    def of_line(cls, tenant: str, id: str, *, patience_s: float, taken: Callable[[], None]) -> Caller:
        """A line of a batch, which has no session: what is remembered of one is for those who come back."""
        began = time.perf_counter()
        return cls(
            tenant=tenant, session="", request_id=id, began=began, patience_s=patience_s, yields=True, taken=taken
        )


@dataclass(slots=True)
class Speaker:
    """One choice: its prompt, its way through the mesh and its answer."""

    prompt: Prepared
    flow: Flow
    answer: Answer
    heard: Heard
    finish: str = ""
    """How the answer ended; empty: it has not."""


class Completion:
    """A running request. `outbox` gives its deltas; `usage` is complete when the outbox has ended."""

    def __init__(
        self,
        ask: Ask,
        caller: Caller,
        *,
        prompts: int,
        block_size: int,
        fingerprint: str,
        tokenize_s: float,
        metrics: RequestMetrics,
        answered: Callable[[Speaker], None],
        account: Callable[[Completion], None],
    ) -> None:
        """Call `add` for every choice, then `run`. Preparing the prompts took `tokenize_s` seconds. `answered` is given
        each choice that has come to its end, `account` the whole request, both before the client hears of the end."""
        self.ask = ask
        self.caller = caller
        repeat = caller.repeat
        self.id = secrets.token_hex(12) if repeat is None else repeat.id
        self.work_id = secrets.token_hex(4)
        """Of this run of the request, for the mesh: another may run elsewhere."""
        self.created = int(time.time())
        self.seed = repeat.seed if repeat is not None and ask.sampling.seed is None else ask.sampling.first_seed()
        self.place: TokenPlace | EventPlace | None = None
        """Where the client of a repeatable request has come to."""
        self.stored: StoredAnswer | None = None
        """Where the tokens of its answer are kept; None: nowhere."""
        self.fingerprint = fingerprint
        counted = ask.stream and repeat is not None and repeat.counts != TOKENS
        self.outbox = Outbox(prompts * ask.n, self.settle, apart=counted)
        self._account: Callable[[Completion], None] | None = account
        self._block_size = block_size
        self._tokenize_s = tokenize_s
        self._metrics = metrics
        self._answered = answered
        self._begun = [asyncio.Event() for _ in range(prompts)]
        self._choices: list[Speaker] = []
        self.first_choice = 0
        """The choice that had the first token."""
        self._first_token: float | None = None
        """Seconds from the first byte to it."""
        self._last_token = 0.0
        """`time.perf_counter` at it."""
        self.given_up = False
        """It was ended before its choices came to their ends: its client has left, or its time was over."""

    def usage(self) -> Usage:
        """The cost of the request so far."""
        usage = Usage(seed=self.seed, fingerprint=self.fingerprint)
        for number, choice in enumerate(self._choices):
            if number % self.ask.n == 0:
                usage.add_prompt(len(choice.prompt.ids), choice.flow.account)
                usage.dropped_messages += choice.prompt.dropped_messages
                usage.dropped_tokens += choice.prompt.dropped_tokens
                if choice.prompt.session is not None:
                    usage.session = choice.prompt.session
            else:
                usage.add_copy(choice.flow.account)
            usage.add_choice(choice.answer, choice.flow.account)
        for first in range(0, len(self._choices), self.ask.n):
            promised = [choice.flow.account.promised for choice in self._choices[first : first + self.ask.n]]
            usage.add_promised(promised, self._block_size)
        usage.times = times(self.marks(), time.perf_counter() - self.caller.began)
        return usage

    @property
    def choices(self) -> Sequence[Speaker]:
        """All choices; those of one prompt follow each other."""
        return self._choices

    def marks(self) -> Marks:
        """When the stages ended of the choice that had the first token."""
        account, began = self._choices[self.first_choice].flow.account, self.caller.began
        return Marks(
            body=self.caller.body_s,
            tokenize_s=self._tokenize_s,
            planned=None if account.planned_at is None else account.planned_at - began,
            first=self._first_token,
            decoding=None if account.decoding_at is None else account.decoding_at - began,
            last=self._last_token - began if self._last_token else None,
            worker=account.times,
        )

    @property
    def replans(self) -> int:
        """Number of times that choices moved to other workers."""
        return sum(choice.flow.account.replans for choice in self._choices)

    @property
    def usage_defects(self) -> int:
        """Reports that don't add up, and choices with tokens whose prompt was never reported."""
        accounts = [(choice.flow.account, choice.answer) for choice in self._choices]
        return sum(
            account.defects + (account.use is None and answer.tokens > account.recalled) for account, answer in accounts
        )

    def settle(self) -> None:
        """Accounts for the request, the first time it is called; it is called when it has ended, however it did."""
        account, self._account = self._account, None
        if account is not None:
            account(self)

    def close(self) -> None:
        """Accounts for the request and lets go of its parts. They refer to each other: together they would stay until
        the garbage collector looks for them, with all their tokens."""
        self.settle()
        if self.stored is not None:
            self.stored.close()
        self._choices = []
        self.outbox.close()

    def add(self, choice: Speaker) -> None:
        """Adds a choice; those of one prompt follow each other."""
        self._choices.append(choice)

    def recall(self, found: Sequence[Sequence[int]], *, interrupted: bool) -> None:
        """The answers begin with these tokens, by choice; `interrupted` as for a Flow. The last of each is generated
        again: the worker that does it says whether the answer ends with it."""
        for choice, tokens in zip(self._choices, found, strict=True):
            choice.flow.recall(tokens[:-1], interrupted=interrupted)

    async def run(self) -> None:
        """Runs all choices to their ends, or fails the request."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(len(self._choices)):
                tasks.create_task(self._run(number))

    async def _run(self, number: int) -> None:
        """Runs one choice. A prompt's other choices wait for its first choice's first token, then fetch the prompt."""
        choice = self._choices[number]
        begun = self._begun[number // self.ask.n]
        try:
            if number % self.ask.n and choice.prompt.keys:
                await begun.wait()
            await self._retell(choice)
            finish = await choice.flow.run()
            last = choice.answer.finish(finish)
            choice.heard.finish(last)
            choice.finish = last.finish or ""
            self._answered(choice)
            self.outbox.put(last if self.place is None else self.place.last(last))
            await choice.flow.farewell(self.ask.outlook, waits_for_tool=last.finish == "tool_calls")
        except PenstockError as error:
            self.outbox.fail(error)
        except Exception:
            structlog.get_logger("penstock.gateway").exception("request failed")
            self.outbox.fail(Internal("internal error"))
        except asyncio.CancelledError:
            self.given_up = True
            self.outbox.fail(Unavailable("the request was given up", retry_after=1))
            raise
        finally:
            choice.flow.close()
            begun.set()

    async def _retell(self, choice: Speaker) -> None:
        """Tells the client what was recalled of a choice."""
        for index, id in enumerate(choice.flow.recalled):
            if index and index % _RETOLD == 0:
                await asyncio.sleep(0)
            self._tell(choice.answer, choice.heard, SampledToken(index, id))

    def accept(self, answer: Answer, heard: Heard, token: SampledToken) -> bool:
        """Takes one more token of a choice and returns whether it was the last."""
        now = time.perf_counter()
        if self._first_token is None:
            self.first_choice, self._first_token = answer.choice, now - self.caller.began
            if not self.caller.yields:
                self._metrics.ttft.observe(self._first_token)
        elif self.ask.n == 1 and not self.caller.yields:
            self._metrics.itl.observe(now - self._last_token)
        self._last_token = now
        self._begun[answer.choice // self.ask.n].set()
        self._metrics.generation_tokens.inc()
        if self.stored is not None:
            self.stored.add(answer.choice, token.index, token.id)
        return self._tell(answer, heard, token)

    def _tell(self, answer: Answer, heard: Heard, token: SampledToken) -> bool:
        """Tells the client one more token; whether the choice ends with it."""
        delta = answer.feed(token)
        heard.add(token.id, delta)
        if self.place is None or not self.place.holds_back(delta):
            self.outbox.put(delta)
        return answer.ended
