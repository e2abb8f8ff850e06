"""Several routers, as processes: one dies or stops in the middle of a trace, and nobody notices."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from itertools import cycle

import httpx2
import psutil
import pytest

from penstock.engine.request import SamplingParams
from penstock.testing.mesh import Mesh, MeshSetup
from penstock.v1 import router_pb2
from penstock.worker import rotation
from penstock.worker.worker import Worker

from .support import BLOCK, REDIS, body_of, found, process, prompt, until, up

TURNS, SESSIONS, GROWTH = 6, 8, 3 * BLOCK
MISSED = 0.1
"""Of what is known: a worker with less to do may have a turn sooner than its session's own."""
BUSIEST = 1.35
"""Requests of the busiest worker : the mean, at most; 2 is one that gets all."""
RATE = 2000.0
ANSWER = SamplingParams(max_tokens=BLOCK, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=600, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
async def routers() -> AsyncIterator[list[tuple[str, int]]]:
    """Address and pid of two routers that gateways prefer to the mesh's own, in this order."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(process("router")) for _ in range(2)]


@pytest.fixture(scope="module")
async def mesh(tiny, meshes, routers) -> AsyncIterator[Mesh]:
    addresses = tuple(address for address, _ in routers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotation, "load", as_large(rotation.load))
        async with meshes(MeshSetup(model=tiny, aggregated=True, decode=2, routers=addresses)) as mesh:
            view = mesh.gateway.view
            await until(lambda: len(view._sites["here"].views) == 3, "the gateway hears all routers")
            workers = [seat for seat in mesh.router.planner.registry if seat.member.role]
            await until(lambda: all(seat.measured.prefill_rate == RATE for seat in workers), "all have reported")
            view._sites["here"].chosen = addresses[0]
            yield mesh


@pytest.fixture
async def http(mesh: Mesh) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=mesh.url, timeout=60) as client:
        yield client


def as_large(load: Callable[[Worker], router_pb2.Load]) -> Callable[[Worker], router_pb2.Load]:
    """Workers say that they take as long as those of a large model, all the same: those of a tiny one take less than
    what decides nothing."""

    def told(worker: Worker) -> router_pb2.Load:
        message = load(worker)
        message.prefill_tokens_per_s = RATE
        message.step.CopyFrom(router_pb2.StepCost(base_s=0.02, sequence_s=0.01, token_s=1e-6))
        return message

    return told


class Trace:
    """Sessions that resend what was said before, each time with something new."""

    def __init__(self, *doors: httpx2.AsyncClient, model: str = "tiny", growth: int = GROWTH) -> None:
        """Each request goes through the next of the doors, and brings so many new tokens."""
        self._doors = cycle(doors)
        self._model = model
        self._growth = growth
        self._texts = {f"routers/{number}": prompt(f"routers/{number}", growth) for number in range(SESSIONS)}
        self.known = 0
        """Tokens that had been computed before, of all requests."""
        self.missed = 0
        """Those that were computed again."""
        self.placed: Counter[str] = Counter()
        """Requests by the worker that decoded them."""

    async def turn(self, number: int) -> None:
        """The next request of every session, one beside the other."""
        async with asyncio.TaskGroup() as group:
            for session in self._texts:
                group.create_task(self._ask(session, number))

    async def _ask(self, session: str, number: int) -> None:
        text = self._texts[session]
        headers = {"x-session-affinity": session, "x-penstock-explain": "plan"}
        body = body_of(text, ANSWER) | {"model": self._model}
        answer = await next(self._doors).post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        [plan] = json.loads(answer.headers["x-penstock-plan"])
        self.placed[plan["decode"]] += 1
        found = answer.json()
        if number:
            known = len(text) - self._growth - BLOCK  # the block of the last token is not full in the cache
            self.known += known
            self.missed += max(0, known - found["usage"]["prompt_tokens_details"]["cached_tokens"])
        self._texts[session] = text + found["choices"][0]["token_ids"] + prompt(f"{session}/{number}", self._growth)


ROUTER = "--name router-0"
"""What stands on its command line, and on that of no service that is told where it is."""


async def test_kill_9_in_a_mesh_that_shares_a_redis() -> None:
    """`penstock up` with two of each: a router dies, then Redis, in the middle of a trace that goes through both
    gateways; both come back, and all that `up` has started ends with it."""
    options = ("--routers", "2", "--gateways", "2", "--redis", "--aggregated", "--decode", "2", "--draft", "none")
    async with AsyncExitStack() as stack:
        process, children, _ = await stack.enter_async_context(up(*options))
        doors = [child.cmdline() for child in children if "penstock.gateway" in child.cmdline()]
        urls = [f"http://{line[line.index('--http-address') + 1]}" for line in doors]
        both = [await stack.enter_async_context(httpx2.AsyncClient(base_url=url, timeout=60)) for url in urls]
        trace = Trace(*both, model="penstock-mini", growth=8 * GROWTH)  # enough to compute for an even share to matter
        before = Counter[str]()
        for number in range(TURNS):
            async with asyncio.timeout(60):
                await trace.turn(number)
            if number in (1, 3):
                [victim] = found(process.pid, ROUTER if number == 1 else REDIS)
                victim.kill()
                before = before or trace.placed.copy()
        assert trace.missed <= MISSED * trace.known
        for placed in (before, trace.placed - before):
            assert len(placed) == 2
            assert busiest([*placed.values()]) <= BUSIEST, placed
        for what in (ROUTER, REDIS):
            await until(lambda: found(process.pid, what), f"{what} is back")  # noqa: B023
        started = psutil.Process(process.pid).children(recursive=True)
    assert not psutil.wait_procs(started, timeout=10)[1]


def served(mesh: Mesh) -> list[float]:
    """Tokens of the prompts that each worker has served, wherever their KV came from."""
    name = "penstock_worker_prompt_tokens_total"
    samples = (
        [one for metric in worker.metrics.registry.collect() for one in metric.samples] for worker in mesh.workers
    )
    return [sum(one.value for one in found if one.name == name) for found in samples]


def requests(earlier: list[float], later: list[float], count: int) -> list[float]:
    """How many of so many requests with prompts of one length each worker has served meanwhile."""
    tokens = [after - before for before, after in zip(earlier, later, strict=True)]
    return [count * own / sum(tokens) for own in tokens]


def busiest(loads: Sequence[float]) -> float:
    """What the busiest worker has : the mean."""
    return max(loads) * len(loads) / sum(loads)


async def stream(http: httpx2.AsyncClient, text: list[int], begun: asyncio.Event) -> list[int]:
    """The tokens of a long answer; sets `begun` at the first."""
    ids: list[int] = []
    body = body_of(text, LONG) | {"stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                ids += [id for choice in json.loads(line[6:])["choices"] for id in choice["token_ids"]]
                begun.set()
    return ids


async def test_kill_9_of_a_router_in_the_middle_of_a_trace(mesh, http, routers, oracle) -> None:
    """Streams go on and are charged at another router; what was cached is found by it; both workers get as much work as
    before."""
    others = [seat.member.id for seat in mesh.router.planner.registry if seat.member.role]
    trace = Trace(http)
    begins = served(mesh)
    for number in range(TURNS // 2):
        await trace.turn(number)
    middle = served(mesh)
    assert busiest(requests(begins, middle, TURNS // 2 * SESSIONS)) <= BUSIEST
    texts = [prompt(f"long/{number}", 40) for number in range(4)]
    begun = [asyncio.Event() for _ in texts]
    running = [asyncio.create_task(stream(http, text, event)) for text, event in zip(texts, begun, strict=True)]
    await asyncio.gather(*(event.wait() for event in begun))
    assert mesh.router.planner.ledger.empty, "so far another router plans"
    os.kill(routers[0][1], signal.SIGKILL)
    dies = served(mesh)
    async with asyncio.timeout(60):
        for number in range(TURNS // 2, TURNS):
            await trace.turn(number)
        for task, text in zip(running, texts, strict=True):
            assert await task == (await oracle(text, LONG)).ids
    streams = requests(middle, dies, len(texts))  # they run beside every turn
    turns = requests(dies, served(mesh), (TURNS - TURNS // 2) * SESSIONS)
    loads = [(TURNS - TURNS // 2) * one + other for one, other in zip(streams, turns, strict=True)]
    assert busiest(loads) <= BUSIEST, (streams, turns)
    assert trace.missed <= MISSED * trace.known
    assert mesh.gateway.view._sites["here"].chosen == routers[1][0]
    assert sorted(others) == sorted(seat.member.id for seat in mesh.router.planner.registry if seat.member.role)


async def test_a_router_that_stops_is_left_within_seconds(mesh, http, routers) -> None:
    """A frozen process breaks no stream and answers nothing."""
    view = mesh.gateway.view
    await until(lambda: view._sites["here"].chosen == routers[1][0], "the second is asked first")
    texts = [prompt(f"frozen/{number}", 40) for number in range(4)]
    begun = [asyncio.Event() for _ in texts]
    running = [asyncio.create_task(stream(http, text, event)) for text, event in zip(texts[:2], begun[:2], strict=True)]
    await asyncio.gather(*(event.wait() for event in begun[:2]))
    os.kill(routers[1][1], signal.SIGSTOP)
    running += [
        asyncio.create_task(stream(http, text, event)) for text, event in zip(texts[2:], begun[2:], strict=True)
    ]
    async with asyncio.timeout(30):
        await asyncio.gather(*(event.wait() for event in begun[2:]))
        assert len(mesh.router.planner.ledger) == 2, "the new ones are planned by the last router"
        os.kill(routers[1][1], signal.SIGKILL)
        await until(
            lambda: len(mesh.router.planner.ledger) > 2 or all(map(asyncio.Task.done, running)), "it takes over"
        )
        assert [len(ids) for ids in await asyncio.gather(*running)] == [LONG.max_tokens] * 4
    await until(lambda: mesh.router.planner.ledger.empty, "nothing is left charged")
