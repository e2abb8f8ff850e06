"""One plan while it is carried out: puts together what its workers report.

Tokens are merged by index: the first comes from prefill, the others from decode. After a failed hand-off, or when
another worker takes over, tokens may arrive a second time. Sampling is a function of (seed, position), so they are the
same tokens, and are dropped.

Workers are heard where their messages are read, without a task or a queue between: a token is taken by one call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from penstock.gateway.completing.account import ChoiceAccount
from penstock.gateway.request.work import (
    Assignment,
    ChoiceRequest,
    Finish,
    Gain,
    Lost,
    PromptUse,
    Report,
    SampledToken,
    workers_failed,
)


class Attempt:
    """A Receiver. It appends to the choice's tokens and adds to its account."""

    def __init__(
        self,
        request: ChoiceRequest,
        chosen: Assignment,
        tokens: list[int],
        account: ChoiceAccount,
        accept: Callable[[SampledToken], bool],
    ) -> None:
        """`accept` is given each token once, in order, and answers whether the choice ends with it."""
        self.running = True
        """Neither at its end nor failed. Afterwards nothing is taken any more."""
        self.decoded = False
        """A decode worker has given a token."""
        self.lost_prefill: Lost | None = None
        """The loss of the prefill worker."""
        self._request = request
        self._decode = chosen.decode.member
        self._tokens = tokens
        self._start = len(tokens)
        self._account = account
        self._drafts = account.drafts
        """Of the attempts before."""
        self._accept = accept
        self._early: dict[int, SampledToken] = {}
        """Tokens whose predecessors are missing."""
        self._finish: Finish | None = None
        self._no_prefill = chosen.prefill is None
        """No token will come from a prefill worker."""
        self._reported: set[str] = set()
        """Stages whose workers have counted the tokens that they were given."""
        self._lost: Lost | None = None
        """The loss with which the attempt will end."""
        self._plain = False
        """The next token may be taken as it is: the first was, and nothing waits for it."""
        self._begun = asyncio.Event()
        self._ended: asyncio.Future[Finish | Lost] = asyncio.get_running_loop().create_future()
        self._log = structlog.get_logger("penstock.gateway")

    async def begun(self) -> None:
        """Returns when the first token was taken, or the attempt has ended."""
        await self._begun.wait()

    async def ends_within(self, seconds: float) -> None:
        """Returns when the attempt has ended, or after so many seconds."""
        await asyncio.wait([self._ended], timeout=seconds)

    async def ends(self) -> None:
        """Returns when the attempt has ended, in whatever way."""
        await asyncio.wait([self._ended])

    async def ended(self) -> Finish | Lost:
        """How the choice ended, or the loss after which only another plan helps. Raises what a call has raised."""
        return await self._ended

    def over(self, error: BaseException | None) -> None:
        """The calls to workers have ended, or one has raised `error`."""
        self._end(error or self._lost or Lost("decode", self._decode, workers_failed()))

    def token(self, index: int, id: int) -> None:
        """One token of decode, of which there is nothing else to report."""
        if not self._plain or index != len(self._tokens):
            self.report(Gain(stage="decode", tokens=(SampledToken(index, id),)))
            return
        self._tokens.append(id)
        self._account.received += 1
        self.decoded = True
        try:
            if self._accept(SampledToken(index, id)):
                self._end("stop")
        except Exception as error:
            self._end(error)

    def report(self, report: Report) -> None:
        """What a worker reports; errors are those of the attempt, not of the reader that calls this."""
        if not self.running:
            return
        finish: Finish | None = None
        try:
            if isinstance(report, Lost):
                self._lose(report)
            else:
                finish = self._take(report)
        except Exception as error:
            self._end(error)
            return
        if (ended := finish or self._loss()) is not None:
            self._end(ended)
        elif len(self._tokens) > self._start:
            self._plain = not self._early
            self._begun.set()

    def _end(self, ended: Finish | Lost | BaseException) -> None:
        if not self.running:
            return
        self.running = self._plain = False
        if isinstance(ended, BaseException):
            self._ended.set_exception(ended)
            self._ended.exception()  # as seen: a choice that was cancelled does not ask any more
        else:
            self._ended.set_result(ended)
        self._begun.set()

    def _lose(self, lost: Lost) -> None:
        """Takes note of a loss. Without prefill the decode worker computes the prompt itself: unless prefill fell
        silent, then decode waits for a hand-off that is as silent, even if the first token came before."""
        if lost.stage == "decode":
            self._lost = lost
            return
        self._log.warning("prefill failed", member=lost.member, error=lost.error.message, silent=lost.silent)
        self.lost_prefill = lost
        self._no_prefill = True
        if lost.silent and not self.decoded:
            self._lost = self._lost or lost

    def _loss(self) -> Lost | None:
        """The loss that ends the attempt because only another plan helps; None while the attempt can go on."""
        if self._no_prefill and (self._early or self._finish):
            return self._lost or Lost("prefill", "", workers_failed())  # it took a token with it
        # While early tokens wait for prefill's, which was sampled before them and is on its way, the loss can wait.
        return None if self._early else self._lost

    def _take(self, gain: Gain) -> Finish | None:
        """Counts the report and hands its tokens on in order; returns how the choice ended, or None."""
        self._count(gain)
        for token in gain.tokens:
            if token.index >= len(self._tokens):
                self._early[token.index] = token
        while (following := self._early.pop(len(self._tokens), None)) is not None:
            self._tokens.append(following.id)
            self.decoded = self.decoded or gain.stage == "decode"
            if self._accept(following):
                return "stop"
        self._finish = gain.finish or self._finish
        return None if self._early or len(self._tokens) == self._start else self._finish

    def _count(self, gain: Gain) -> None:
        account = self._account
        account.received += len(gain.tokens)
        if gain.use is not None:
            self._charge(gain.use, gain)
        if account.decoding_at is None and gain.stage == "decode" and gain.tokens:
            account.decoding_at = time.perf_counter()
        if gain.drafts is not None:
            account.drafts = self._drafts.copy()
            account.drafts.add(gain.drafts)
        # Prefill and decode may report in either order; the one that speaks of more blocks knows more.
        if gain.promised is not None and gain.promised.blocks >= account.promised.blocks:
            account.promised = gain.promised

    def _charge(self, use: PromptUse, gain: Gain) -> None:
        """Checks a worker's count of the tokens that it was given. The prompt is charged once, by the first report."""
        given = len(self._request.prompt_ids) + self._start
        if use.total != given:
            self._account.defects += 1
            self._log.error(
                "usage does not add up", stage=gain.stage, given=given, computed=use.computed, cached=dict(use.cached)
            )
        if self._account.use is None:
            self._account.use, recalled = use.parted(self._account.recalled)
            if recalled.total:
                self._account.again.update({**recalled.cached, "computed": recalled.computed})
            self._account.times |= {stage: gain.times.get(stage, 0.0) for stage in ("queue", "fetch", "prefill")}
        elif gain.stage not in self._reported:
            self._account.again.update({**use.cached, "computed": use.computed})
        self._reported.add(gain.stage)
