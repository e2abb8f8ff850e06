"""Drafters in the engine's own process; a mesh has a draft service."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from penstock.checkpoint import Checkpoint, tokenizer_fingerprint
from penstock.draft.config import DraftConfig
from penstock.draft.drafts import Description, Drafts, KvAnswers, Ruling, open_drafts
from penstock.draft.service import SERVICE, DraftService
from penstock.engine.grammars import RequestRules
from penstock.engine.hooks import DraftAsk
from penstock.engine.rules import TextRules
from penstock.engine.speculation.draft_model import DraftModel
from penstock.engine.speculation.guess import right
from penstock.engine.speculation.head.foresight import HeadForesight
from penstock.engine.speculation.leads import (
    DraftBlocks,
    DraftDropped,
    DraftLead,
    DraftStats,
    DraftStep,
    DraftTold,
    Foresight,
    SequenceId,
)
from penstock.rpc.channels import open_channels
from penstock.rpc.server import RpcServer, serve
from penstock.v1 import draft_pb2_grpc
from penstock.worker.serving.drafting import DraftClient, DraftDelay


class InlineDrafter:
    """Drafter over a function that is quick enough to be called on the event loop: the drafts for an ask."""

    def __init__(self, propose: Callable[[DraftAsk], Sequence[int]]) -> None:
        self._propose = propose
        self._told: dict[str, tuple[int, Sequence[int]]] = {}
        self._judged: dict[str, tuple[int, int]] = {}

    def tell(self, asks: Sequence[DraftAsk]) -> None:
        """Has the drafts ready at once."""
        for ask in asks:
            before, drafts = self._told.get(ask.id, (0, ()))
            came = ask.tokens[before:]
            hits = right(drafts, came)
            self._judged[ask.id] = hits, int(hits < min(len(drafts), len(came)))
            self._told[ask.id] = len(ask.tokens), self._propose(ask) if ask.k else ()

    def judged(self, id: str) -> tuple[int, int]:
        """Of the last drafts."""
        return self._judged.pop(id, (0, 0))

    def ahead(self, id: str, length: int) -> Sequence[int]:
        """What the function gave."""
        told, drafts = self._told.get(id, (0, ()))
        return drafts if told == length else ()

    @property
    def delay_s(self) -> float:
        """They are there."""
        return 0.0

    def expected(self, id: str, count: int = 1) -> float:
        """They are there."""
        return 0.0

    async def arrived(self) -> None:
        """Never: nothing is waited for."""
        await asyncio.Event().wait()

    def forget(self, id: str) -> None:
        """The sequence is gone."""
        self._told.pop(id, None)


class PlainForesight:
    """Guesses by a function of the text, one token for each sequence in a step: the plain form of what a DraftModel
    does. Steps wait for `gate`, which is open at first."""

    def __init__(self, guess: Callable[[Sequence[int]], int]) -> None:
        self._guess = guess
        self._texts: dict[SequenceId, _Guessed] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.told: list[DraftTold] = []
        self.rules: dict[SequenceId, TextRules] = {}
        self.forgotten: list[SequenceId] = []
        self.defect: Exception | None = None
        """Raised by the next step."""

    def begin(self) -> None:
        """Needs nothing."""

    def tell(self, told: DraftTold) -> None:
        """Keeps what it guessed as far as it has come true."""
        self.told.append(told)
        one = self._texts.setdefault(told.id, _Guessed())
        text = [*one.text[: told.keep], *told.tokens]
        if not one.after or text != [*one.text, *one.guesses][: len(text)] or len(text) < len(one.text):
            one.after, one.guesses = told.number, []
        one.guesses = one.guesses[max(0, len(text) - len(one.text)) :]
        one.text, one.k = text, told.k

    def rule(self, id: SequenceId, rules: TextRules) -> None:
        """Remembers them."""
        self.rules[id] = rules

    def forget(self, id: SequenceId) -> None:
        """The sequence is gone."""
        self.forgotten.append(id)
        self._texts.pop(id, None)

    def drop(self, owner: bytes) -> DraftDropped:
        """It keeps nothing for others."""
        return DraftDropped()

    def clear(self) -> None:
        """All are gone."""
        for id in list(self._texts):
            self.forget(id)

    def stored(self, blocks: DraftBlocks, count: int) -> None:
        """It lacks none."""

    def give_back(self, blocks: DraftBlocks) -> None:
        """It has none."""

    def step(self) -> DraftStep:
        """One more token for each."""
        self.gate.wait(30)
        defect, self.defect = self.defect, None
        if defect is not None:
            raise defect
        leads = []
        for id, one in self._texts.items():
            if len(one.guesses) < one.k:
                text = [*one.text, *one.guesses]
                one.guesses.append(self._guess(text))
                leads.append(DraftLead(id, one.after, len(text), one.guesses[-1:]))
        return DraftStep(leads, [], bool(leads))

    def stats(self) -> DraftStats:
        """As far as there are any."""
        return DraftStats(sequences=len(self._texts))


@dataclass
class _Guessed:
    text: list[int] = field(default_factory=list)
    guesses: list[int] = field(default_factory=list)
    after: int = 0
    k: int = 0


class PatientDelay(DraftDelay):
    """Drafts may take as long as they like."""

    usual_s = 10.0

    def __init__(self) -> None:
        super().__init__()
        self.each_s = 1.0

    def learn(self, took_s: float) -> None:
        """Nothing is learned."""

    def learn_pace(self, count: int, took_s: float) -> None:
        """Nor that."""


@asynccontextmanager
async def served_drafts(
    model: Foresight,
    description: Description,
    ruling: Ruling | None = None,
    *,
    port: int = 0,
    kv: KvAnswers | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[RpcServer, Drafts]]:
    """A draft service over `model` on a real socket; `settings` are fields of its DraftConfig."""
    config = DraftConfig(model="of the test", **settings)
    async with open_drafts(model, description, ruling, kv=kv) as drafts:
        register = partial(draft_pb2_grpc.add_DraftServicer_to_server, DraftService(drafts, config))
        async with serve(f"127.0.0.1:{port}", register, [SERVICE], grace=0.1) as server:
            yield server, drafts


@asynccontextmanager
async def draft_client(
    port: int, target: Checkpoint, *, patient: bool = False, layers: Sequence[int] = ()
) -> AsyncIterator[DraftClient]:
    """A worker's client of the service at that port; `patient`: it expects drafts however long they take. It tells
    states after `layers`."""
    async with open_channels() as channels, asyncio.TaskGroup() as tasks:
        delay = PatientDelay() if patient else None
        client = DraftClient(channels.to(f"127.0.0.1:{port}", "draft"), target, delay, layers=layers)
        running = tasks.create_task(client.run())
        try:
            yield client
        finally:
            running.cancel()


@asynccontextmanager
async def model_drafter(model: DraftModel | HeadForesight) -> AsyncIterator[DraftClient]:
    """A patient drafter that has a service with this model, or this head."""
    checkpoint, description = model.checkpoint, Description(tokenizer_fingerprint(model.checkpoint), dict)
    if isinstance(model, HeadForesight):
        description = replace(description, layers=model.head.layers, hidden=model.head.hidden_size)
    async with (
        served_drafts(model, description, RequestRules(checkpoint, drafting=True)) as (server, _),
        draft_client(server.port, checkpoint, patient=True, layers=description.layers) as client,
    ):
        async with asyncio.timeout(10):
            await client.connected.wait()
        yield client
