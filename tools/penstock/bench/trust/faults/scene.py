"""Requests in each phase at the moment of a fault, and what became of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from penstock.bench.soak.asking import SoakClient, SoakOutcome, SoakWish
from penstock.bench.soak.asks import CHAT, MODEL, TEXT, SoakAsk
from penstock.bench.soak.heard import SoakAnswer, wrong_tokens
from penstock.bench.soak.mesh import TENANTS, SoakMesh
from penstock.bench.trust.faults.acts import Act, struck
from penstock.load.client import HttpClient
from penstock.load.target import LoadTarget
from penstock.testing.wires import MeshWires

Phase = Literal["idle", "queued", "prefilling", "handing over", "decoding", "masked decoding"]
PHASES: tuple[Phase, ...] = ("idle", "queued", "prefilling", "handing over", "decoding", "masked decoding")
DEADLINE_S = 2.0
"""Of the request whose deadline comes in the middle of the fault."""
_UNDER_WAY = 8
"""Tokens after which an answer is in its middle."""
_BEGIN_S = 20.0
_BEAT_S = 0.02
_KEYS = [*TENANTS]
_COUNTS: Mapping[Phase, int] = {"handing over": 1, "prefilling": 3, "queued": 3}
"""Requests of a phase that come when others are decoded. Long prompts are computed one by one: those behind the first
ones wait."""
_BEGUN: Sequence[Phase] = ("handing over", "decoding", "masked decoding")
"""Phases in which a client has tokens."""
_NUMBERS, _WORDS, _LONG = 800, 900, 3500
"""Of the schema's answer, of a long prompt, and tokens of a long answer."""


@dataclass(frozen=True, slots=True)
class FaultCell:
    """One request, in the phase in which the fault found it."""

    service: str
    act: Act
    phase: Phase
    reached: bool
    """Whether it was in that phase, as far as its client can tell."""
    lost: str
    """Why it has no whole answer; empty: it has."""
    wrong: int
    """Tokens that differ from those of the same request when nothing is wrong."""
    pause_s: float
    """The longest wait for a token that ended after the fault began, of an answer that had begun."""
    again: int
    """How often its client had to ask again."""

    @property
    def failed(self) -> bool:
        """Whether its client noticed more than a pause."""
        return bool(self.lost or self.wrong)


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault."""

    cells: list[FaultCell]
    overdue_s: float
    """By how much a request outlived its deadline; below 0: it did not."""
    back_s: float
    """After the end of the fault, until a new request was answered."""
    late_s: float = 0.0
    """By how much this process, which measures all that, was late itself, at most."""


class _Watched(SoakAnswer):
    """Says when an answer is under way."""

    def __init__(self, enough: int) -> None:
        super().__init__()
        self._enough = enough
        self.begun = asyncio.Event()

    def line(self, line: bytes, at: float) -> None:
        super().line(line, at)
        if self.tokens >= self._enough or self.over:
            self.begun.set()


@dataclass(slots=True)
class _Asked:
    """A request that runs."""

    phase: Phase
    wish: SoakWish
    heard: _Watched
    task: asyncio.Task[SoakOutcome]
    tokens: int = 0
    """That its client had when the fault began."""

    def cell(self, service: str, act: Act, since: float, right: SoakAnswer) -> FaultCell:
        """Once it has ended."""
        outcome = self.task.result()
        times = outcome.heard.times
        pause_s = max((later - earlier for earlier, later in pairwise(times) if later >= since), default=0.0)
        return FaultCell(
            service=service,
            act=act,
            phase=self.phase,
            reached=0 < self.tokens < right.tokens if self.phase in _BEGUN else self.tokens == 0,
            lost=outcome.lost,
            wrong=0 if outcome.lost else wrong_tokens(outcome.heard, right),
            pause_s=pause_s if self.tokens else 0.0,
            again=outcome.again,
        )


@dataclass(slots=True)
class FaultScene:
    """A mesh whose services are struck one by one."""

    mesh: SoakMesh
    wires: MeshWires
    client: SoakClient
    files: Path
    """Where the store has its files."""
    size: float = 1.0
    """Of long prompts and answers; with less, fewer requests are in their phases."""
    _asked: int = field(default=0, init=False)

    async def strike(self, service: str, act: Act, *, idle: bool) -> Strike:
        """That service gets that fault: while the mesh is idle, and a request comes at once; or while requests are in
        all other phases. Raises NotBack when it does not come back."""
        await self.mesh.until_up()
        clock, over = asyncio.get_running_loop().time, asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            late = tasks.create_task(_late_s(over))
            running = [] if idle else await self._under_way(tasks)
            for one in running:
                one.tokens = one.heard.tokens
            begin = clock()
            async with struck(self.mesh, self.wires, self.files, service, act):
                due = tasks.create_task(self._overdue_s(service))
                if idle:
                    running = [self._ask(tasks, "idle", number) for number in range(2)]
                await asyncio.wait([due, *(one.task for one in running)])
            healed = clock()
            await self._ask(tasks, "idle", 0).task
            back_s = clock() - healed
            over.set()
        await self.mesh.until_up()
        cells = [one.cell(service, act, begin, await self._right(one.wish)) for one in running]
        return Strike(cells, due.result(), back_s, late.result())

    async def _under_way(self, tasks: asyncio.TaskGroup) -> list[_Asked]:
        """Requests in each phase."""
        running = [self._ask(tasks, phase, 0) for phase in ("decoding", "masked decoding")]
        await self._begun(running)
        more = [self._ask(tasks, phase, number) for phase, count in _COUNTS.items() for number in range(count)]
        await self._begun([one for one in more if one.phase == "handing over"])
        return running + more

    async def _begun(self, running: list[_Asked]) -> None:
        async with asyncio.timeout(_BEGIN_S):
            for one in running:
                await one.heard.begun.wait()

    def _ask(self, tasks: asyncio.TaskGroup, phase: Phase, number: int) -> _Asked:
        """Nobody has asked this before: no store has it."""
        self._asked += 1
        name = f"{phase} {self._asked}"
        wish = SoakWish(
            name=name,
            ask=_asked_in(phase, name, self._asked, self.size),
            api_key=_KEYS[number % len(_KEYS)],
            gateway=number,
            streams=True,
        )
        heard = _Watched(1 if phase == "handing over" else _UNDER_WAY)
        return _Asked(phase, wish, heard, tasks.create_task(self.client.ask(wish, heard)))

    async def _right(self, wish: SoakWish) -> SoakAnswer:
        """The answer when nothing is wrong."""
        return (await self.client.ask(replace(wish, name=f"right {wish.name}"))).heard

    async def _overdue_s(self, service: str) -> float:
        """How much longer than it may a request takes whose deadline comes in the middle of the fault."""
        gateways = [gateway for number, gateway in enumerate(self.mesh.gateways) if service != f"gateway-{number}"]
        gateway = gateways[0]
        target = LoadTarget(host=gateway.host, port=gateway.port, tls=False, prefix="", key=_KEYS[0])
        self._asked += 1
        body = _text(self._asked, words=20, tokens=4000)
        client = HttpClient(target)
        content = json.dumps({**body, "stream": True}).encode()
        request = client.request("POST", TEXT, content, ("x-penstock-timeout", str(DEADLINE_S)))
        clock = asyncio.get_running_loop().time
        begin = clock()
        await client.send(request)
        return clock() - begin - DEADLINE_S


async def _late_s(over: asyncio.Event) -> float:
    """By how much this process was late, at most, until `over`."""
    clock, late_s = asyncio.get_running_loop().time, 0.0
    while not over.is_set():
        due = clock() + _BEAT_S
        with suppress(TimeoutError):
            async with asyncio.timeout_at(due):
                await over.wait()
        late_s = max(late_s, clock() - due)
    return late_s


def _asked_in(phase: Phase, name: str, number: int, size: float) -> SoakAsk:
    if phase in ("queued", "prefilling"):
        return SoakAsk(name, TEXT, _text(number, words=int(size * _WORDS), tokens=16))
    if phase == "handing over":
        return SoakAsk(name, TEXT, _text(number, words=150, tokens=200))
    if phase == "masked decoding":
        body = {
            "messages": [{"role": "user", "content": f"{number}: Which depths?"}],
            "response_format": {"type": "json_schema", "json_schema": _depths(int(size * _NUMBERS))},
            **_sampled(number, 6000),
        }
        return SoakAsk(name, CHAT, body)
    return SoakAsk(name, TEXT, _text(number, words=20, tokens=int(size * _LONG) if phase == "decoding" else 40))


def _depths(count: int) -> dict[str, Any]:
    number = {"type": "integer", "minimum": 0, "maximum": 999_999}
    fields = {"depths": {"type": "array", "items": number, "minItems": count, "maxItems": count}}
    schema = {"type": "object", "properties": fields, "required": ["depths"], "additionalProperties": False}
    return {"name": "depths", "schema": schema, "strict": True}


def _text(number: int, *, words: int, tokens: int) -> dict[str, Any]:
    prompt = f"{number}: " + "Call me Ishmael. " * (words // 3)
    return {"prompt": prompt, "ignore_eos": True, **_sampled(number, tokens)}


def _sampled(number: int, tokens: int) -> dict[str, Any]:
    return {"model": MODEL, "temperature": 1.0, "seed": number, "max_tokens": tokens}
