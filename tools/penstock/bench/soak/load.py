"""The load of a soak: clients that ask one thing after the other, drawn by a seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.bench.soak.asking import SoakClient, SoakOutcome, SoakWish
from penstock.bench.soak.asks import SoakAsk, next_turn
from penstock.bench.soak.heard import SoakAnswer
from penstock.bench.soak.mesh import TENANTS
from penstock.bench.soak.options import SoakOptions

_STREAMED = 0.85
"""Share of the requests."""
_KEYS = [*TENANTS]
_ATTEMPTS = 3
"""At an answer in one piece, which is what others are compared with."""


class Unanswered(Exception):
    """A request got no whole answer although nothing was wrong with the mesh yet, or two that differ."""


@dataclass(frozen=True, slots=True)
class SoakPool:
    """What can be asked, and the right answers."""

    asks: Sequence[SoakAsk]
    right: Mapping[str, SoakAnswer]
    """By name."""

    def wish(self, options: SoakOptions, phase: str, number: int) -> SoakWish:
        """The request of that number in a phase: what it is depends on the number alone."""
        source = random.Random(f"wish {options.seed} {number}")
        ask = source.choice(self.asks)
        leaves = source.random() < options.leaving
        part = source.random()
        return SoakWish(
            name=f"{options.seed}-{phase} {number}",
            ask=ask,
            api_key=source.choice(_KEYS),
            gateway=source.randrange(2),
            streams=source.random() < _STREAMED,
            leaves_at=part if leaves else None,
            tokens=self.right[ask.name].tokens,
        )


async def answered_pool(client: SoakClient, asks: Sequence[SoakAsk], clients: int) -> SoakPool:
    """The right answers, and the later turns of sessions; each is asked for as a stream by one tenant and whole by the
    other. Raises Unanswered."""
    waiting, asked, right = [*asks], list[SoakAsk](), dict[str, SoakAnswer]()

    async def answer_all() -> None:
        while waiting:
            ask = waiting.pop(0)
            found = await _answer(client, ask)
            asked.append(ask)
            right[ask.name] = found
            following = next_turn(ask, found.choices[0].text)
            if following is not None:
                waiting.append(following)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(answer_all())
    return SoakPool(sorted(asked, key=lambda ask: ask.name), right)


async def _answer(client: SoakClient, ask: SoakAsk) -> SoakAnswer:
    found: list[SoakAnswer] = []
    for number, key in enumerate(_KEYS):
        for attempt in range(_ATTEMPTS):  # a busy machine may be slower than a client's patience
            name = f"right {ask.name} {attempt}"
            wish = SoakWish(name=name, ask=ask, api_key=key, gateway=number, streams=number == 0)
            outcome = await client.ask(wish)
            if not (outcome.lost or outcome.again):
                found.append(outcome.heard)
                break
        else:
            raise Unanswered(f"{ask.name}: {outcome.lost or outcome.errors or 'it had to be asked again'}")
    one, other = found
    if (one.choices, one.completion_tokens) != (other.choices, other.completion_tokens):
        raise Unanswered(f"{ask.name}: two answers of a mesh at rest: {one.choices} and {other.choices}")
    return one


async def play(
    client: SoakClient, wishes: Iterator[SoakWish], clients: int, take: Callable[[SoakOutcome], object]
) -> None:
    """Asks for everything, so many at a time."""

    async def one_client() -> None:
        for wish in wishes:
            take(await client.ask(wish))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(one_client())
