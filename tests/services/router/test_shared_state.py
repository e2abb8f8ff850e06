"""Routers that share a Redis, a real one: what they tell each other, what outlives them, and what goes wrong there."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs
from tests.services.router.helpers import Harness

from penstock.router.config import RouterConfig
from penstock.router.shared import scripts
from penstock.router.shared.in_redis import record_key
from penstock.router.shared.records import (
    AnswerFact,
    BookingFact,
    Fact,
    FreedFact,
    HomeFact,
    LengthsFact,
    pack,
    pack_record,
)
from penstock.runtime.config import ConfigError
from penstock.testing.redis_server import RedisKind, RedisServer, free_port, redis_server
from penstock.v1 import router_pb2

Start = Callable[..., Awaitable[Harness]]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    async with redis_server(tmp_path) as running:
        yield running


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[Redis]:
    async with Redis.from_url(server.plain) as client:
        yield client


async def soon(fact: Callable[[], object], what: str = "") -> None:
    """Returns when `fact` holds: others need round trips for it."""
    async with asyncio.timeout(10):
        while not fact():
            await asyncio.sleep(0.005)


def booked(router: Harness, member: str) -> tuple[int, int, int]:
    """What a router knows of others' plans on a member: plans that decode there, tokens to prefill, context."""
    account = router.router.planner.commons.others.of(member)
    return account.sequences, account.prefill_tokens, account.context_tokens


def known(router: Harness) -> int:
    """Routers of which this one knows all bookings, itself among them."""
    return router.router.planner.commons.others.routers


def sample(router: Harness, name: str) -> float:
    value = router.router.metrics.registry.get_sample_value(name)
    assert value is not None
    return value


async def two(start: Start, url: str, **settings: Any) -> tuple[Harness, Harness]:
    """Two routers and two workers that have joined both."""
    settings["silent_s"] = 600
    a = await start(state=url, name="a", **settings)
    b = await start(state=url, name="b", **settings)
    for router in (a, b):
        for worker in ("v", "w"):
            await router.join(worker, routers=2)
    await soon(lambda: known(a) == known(b) == 2)
    return a, b


async def answer(router: Harness, call: Any, tokens: int) -> None:
    """The plan's answer has so many tokens, and ends."""
    await call.write(router_pb2.PlanRequest(progress=router_pb2.PlanProgress(prefill_done=True, generated=tokens)))
    await call.done_writing()
    await call.read()
    router.calls.remove(call)


def named(record: HomeFact) -> str:
    """Its name in the list of its kind."""
    return record_key(record).partition("{")[2].removesuffix("}")


class Owner:
    """Another router, as a test plays it: it writes what it is told to."""

    def __init__(self, redis: Redis, name: str = "played") -> None:
        self._redis = redis
        self.name = name
        self.keys = scripts.owner_keys(name)
        self.epoch = 0

    async def take(self, lease_ms: int = 60_000) -> None:
        self.epoch, _ = await self._redis.eval(scripts.TAKE, 4, *self.keys, lease_ms, 60_000)
        await self._redis.zadd(scripts.OWNERS, {self.name: time.time() * 1000})

    def write(self, to: Any, number: int, *facts: Fact) -> Any:
        placed = [part for fact in facts if isinstance(fact, BookingFact) for part in (fact.number, pack(fact))]
        over = [fact.number for fact in facts if isinstance(fact, FreedFact)]
        numbers = self.epoch, 60_000, 60_000, number, pack(list(facts)), len(placed) // 2
        return to.eval(scripts.WRITE, 3, *self.keys[1:], *numbers, *placed, *over)


def booking(number: int, tokens: int = 100) -> BookingFact:
    return BookingFact(number, "w", "w", tokens, 2 * tokens, 0.0)


@pytest.mark.parametrize("kind", ["port", "unix", "cluster", "sentinel"])
async def test_two_routers_share_sessions_answers_beliefs_and_bookings(
    start: Start, tmp_path: Path, kind: RedisKind
) -> None:
    async with redis_server(tmp_path, kind) as server:
        a, b = await two(start, server.url)
        call, plan = await a.plan(tokens=320, session="s", tenant="t")
        at = plan.decode.member_id
        await soon(lambda: booked(b, at)[0] == 1)
        _, prompt, context = booked(b, at)
        assert (prompt, context) == (320, 320 + 50)
        assert booked(a, at) == (0, 0, 0), "its own plans are in its ledger"
        await answer(a, call, 7)
        await soon(lambda: not len(b.router.planner.commons.others))
        names = ("m", "t", "s")
        await soon(lambda: b.router.planner._lengths.known.entry(names) is not None)
        found = [one.router.planner._lengths.known.entry(names)[1].parts() for one in (a, b)]  # type: ignore[index]
        assert found[0] == found[1] != []
        for _ in range(8):
            _, again = await b.plan(tokens=320, session="s", tenant="t")
            assert again.decode.member_id == at and again.reasons.home
            await b.gone(b.calls[-1])
            await soon(lambda: b.router.planner.ledger.empty)  # else what is left of it weighs on its worker
        await a.plan(avoid=["w"])  # it failed a request there
        seat = b.router.planner.registry.get("w")
        assert seat is not None
        await soon(lambda: seat.suspect_until > time.monotonic())
        assert sample(a, "penstock_state_failures_total") == sample(b, "penstock_state_refused_total") == 0


async def test_a_router_that_starts_again_knows_sessions_lengths_and_rates(
    start: Start, server: RedisServer, redis: Redis
) -> None:
    """It had gone before anybody else was there."""
    async with AsyncExitStack() as stack:
        from penstock.router.service import open_router
        from penstock.rpc.channels import open_channels

        config = RouterConfig(seed=1, state=server.url, name="a")
        first = Harness(
            await stack.enter_async_context(open_router(config)), await stack.enter_async_context(open_channels())
        )
        stack.callback(lambda: [call.cancel() for call in first.calls])
        for worker in ("v", "w"):
            await first.join(worker)
        call, plan = await first.plan(session="s", tenant="t")
        at = plan.decode.member_id
        await answer(first, call, 33)
        seat = first.router.planner.registry.get(at)
        assert seat is not None
        seat.prompts.learn(4.0, 1.0, time.monotonic())
        first.router.planner.commons.judged(at)
        await soon(lambda: not first.router.planner.commons.pending)
        await asyncio.sleep(0.2)  # what was taken is written: nothing here says when
    await redis.config_resetstat()
    second = await start(state=server.url, name="a")
    assert "cmdstat_scan" not in await redis.info("commandstats"), "others may have any number of keys there"
    planner = second.router.planner
    assert planner._lengths.expect(("m", "t", "s"), 1000, time.monotonic()) == 33
    assert planner._lengths.expect(("m", "other", ""), 1000, time.monotonic()) == 33
    for worker in ("v", "w"):
        await second.join(worker)
    seat = planner.registry.get(at)
    assert seat is not None
    assert 1.1 < seat.prompts.value < 1.2
    _, plan = await second.plan(session="s", tenant="t")
    assert plan.decode.member_id == at
    assert plan.reasons.home


async def test_an_expired_lease_frees_all_bookings_at_once(start: Start, server: RedisServer, redis: Redis) -> None:
    b = await start(state=server.url, name="b")
    await b.join("w", routers=2)
    owner = Owner(redis)
    await owner.take()
    assert await owner.write(redis, 1, *(booking(number) for number in range(50))) == 1
    await soon(lambda: booked(b, "w") == (50, 5000, 10_000))
    assert known(b) == 2
    await redis.pexpire(owner.keys[1], 1)
    await soon(lambda: len(b.router.planner.commons.others) != 50)
    assert booked(b, "w") == (0, 0, 0)
    # What the owner writes late is refused, and nobody sees it.
    assert await owner.write(redis, 2, booking(50)) == 0
    assert await redis.xlen(owner.keys[3]) == 1
    # So is what it writes when its successor has begun.
    late = Owner(redis)
    await late.take()
    owner_epoch, owner.epoch = owner.epoch, late.epoch
    assert await owner.write(redis, 1, booking(7, 10)) == 1
    owner.epoch = owner_epoch
    assert await owner.write(redis, 3, booking(8, 10), FreedFact(7)) == 0
    await soon(lambda: booked(b, "w") == (1, 10, 20))
    assert await redis.hkeys(owner.keys[2]) == [b"7"]


async def test_what_comes_twice_changes_nothing(start: Start, server: RedisServer, redis: Redis) -> None:
    b = await start(state=server.url, name="b")
    owner = Owner(redis)
    await owner.take()
    await soon(lambda: known(b) == 2)
    names = ("m", "t", "")
    await owner.write(redis, 1, booking(1), AnswerFact(*names, 40, True))
    await owner.write(redis, 2, FreedFact(1), booking(2))
    await soon(lambda: booked(b, "w")[0] == 1)
    lengths = b.router.planner._lengths.known
    assert lengths.entry(names[:2]) is not None
    before = lengths.entry(names[:2])[1].parts()  # type: ignore[index]
    for _, fields in await redis.xrange(owner.keys[3]):
        await redis.xadd(owner.keys[3], fields)
    await owner.write(redis, 3, booking(3))
    await soon(lambda: booked(b, "w")[0] == 2)
    assert sorted(b.router.planner.commons.others._owners[owner.name]) == [2, 3]
    assert lengths.entry(names[:2])[1].parts() == before  # type: ignore[index]


async def test_after_a_trimmed_gap_everything_is_read(start: Start, server: RedisServer, redis: Redis) -> None:
    b = await start(state=server.url, name="b")
    owner = Owner(redis)
    await owner.take()
    await owner.write(redis, 1, booking(1))
    await soon(lambda: booked(b, "w")[0] == 1)
    home = HomeFact("m", "s", "v", "v")
    async with redis.pipeline(transaction=True) as pipe:
        owner.write(pipe, 2, FreedFact(1), booking(2), home)
        pipe.set(record_key(home), pack_record(home, int(time.time() * 1000)))
        pipe.zadd(scripts.recent_key("home"), {named(home): time.time() * 1000})
        owner.write(pipe, 3, booking(3))
        pipe.xtrim(owner.keys[3], maxlen=0, approximate=False)
        owner.write(pipe, 4, booking(4))
        await pipe.execute()
    await soon(lambda: booked(b, "w")[0] == 3)
    assert sorted(b.router.planner.commons.others._owners[owner.name]) == [2, 3, 4]
    await soon(lambda: b.router.planner.homes.entry(("m", "s")) is not None)
    await owner.write(redis, 5, FreedFact(2))
    await soon(lambda: booked(b, "w")[0] == 2)


@pytest.mark.parametrize("away", ["stopped", "not there"])
async def test_a_router_begins_without_redis_and_joins_it_later(start: Start, tmp_path: Path, away: str) -> None:
    port = free_port()
    async with AsyncExitStack() as stack:
        if away == "stopped":
            server = await stack.enter_async_context(redis_server(tmp_path, port=port))
            os.kill(server.pid, signal.SIGSTOP)
        with capture_logs() as lines:
            async with asyncio.timeout(10):
                a = await start(state=f"redis://127.0.0.1:{port}/0", name="a", silent_s=600)
            await a.join("w")
            await a.plan(session="meanwhile")
            await soon(lambda: any("does not answer; routing goes on" in line["event"] for line in lines), "a warning")
        assert known(a) == 0
        if away == "stopped":
            os.kill(server.pid, signal.SIGCONT)
        else:
            await stack.enter_async_context(redis_server(tmp_path, port=port))
        await soon(lambda: known(a) == 1)
        b = await start(state=f"redis://127.0.0.1:{port}/0", name="b")
        await soon(lambda: b.router.planner.homes.entry(("m", "meanwhile")) is not None)


async def test_routing_goes_on_without_redis_and_catches_up(start: Start, tmp_path: Path) -> None:
    port = free_port()
    async with redis_server(tmp_path, port=port) as server:
        a, b = await two(start, server.url, state_lease_s=2)
        await a.plan(session="before")
        await soon(lambda: len(b.router.planner.commons.others) == 1)
        await server.kill()
        await soon(lambda: sample(a, "penstock_state_behind_seconds") > 0)
        took = []
        for number in range(20):
            began = time.monotonic()
            _, plan = await a.plan(session=f"meanwhile-{number}")
            took.append(time.monotonic() - began)
            assert plan.decode.member_id in ("v", "w")
        assert sorted(took)[10] < 0.05, "nothing waits"
        await soon(lambda: known(b) == 0)  # its lease would be over by now
        assert not len(b.router.planner.commons.others)
    async with redis_server(tmp_path, port=port):  # with nothing in it
        await soon(lambda: len(b.router.planner.commons.others) == 21)
        await soon(lambda: b.router.planner.homes.entry(("m", "meanwhile-19")) is not None)
        assert sample(b, "penstock_state_behind_seconds") == 0
        await soon(lambda: known(a) == known(b) == 2)
        c = await start(state=server.url, name="c")
        assert c.router.planner.homes.entry(("m", "before")) is not None, "what Redis had lost was written again"


async def test_what_is_not_ours_is_refused_named_and_written_anew(
    start: Start, server: RedisServer, redis: Redis
) -> None:
    _, lease, bookings, log = scripts.owner_keys("a")
    home = HomeFact("m", "s", "v", "v")
    older = pack_record(home, int(time.time() * 1000)).replace(b"PS1:", b"PS0:")
    await redis.set(record_key(home), older)
    await redis.set(f"{scripts.ROOT}:lengths:{{x}}", b"\xff\x00nonsense")
    await redis.lpush(f"{scripts.ROOT}:member:{{y}}", "a list")
    for kind, name in (("home", named(home)), ("lengths", "x"), ("member", "y")):
        await redis.zadd(scripts.recent_key(kind), {name: time.time() * 1000})
    await redis.set(scripts.OWNERS, "nobody")
    await redis.lpush(bookings, "1")
    await redis.set(log, "log")
    with capture_logs() as logs:
        a, b = await two(start, server.url)
        said = [line["what"] for line in logs if line["event"] == "shared state refused"]
    for what in (record_key(home), "lengths:{x}", "member:{y}", scripts.OWNERS, "was a list", "was a string"):
        assert any(what in line for line in said), (what, said)
    await a.plan(session="s")
    await soon(lambda: len(b.router.planner.commons.others) == 1)
    # The same while they run.
    before = sample(b, "penstock_state_refused_total")
    await redis.xadd(log, {"e": "1", "n": "99", "d": b"\x92\x07\x90"})
    await redis.xadd(log, {"what": "is this"})
    await soon(lambda: sample(b, "penstock_state_refused_total") > before)
    await redis.hset(bookings, "5", b"junk")
    await redis.set(lease, "mine")
    await soon(lambda: sample(a, "penstock_state_lost_leases_total") == 1)
    await a.plan(session="later")
    await soon(lambda: len(b.router.planner.commons.others) == 2)
    assert sorted(await redis.hkeys(bookings)) == [b"1", b"2"]
    value = await redis.get(record_key(home))
    assert value.startswith(b"PS1:"), "the older format is overwritten"


async def test_records_of_each_kind_are_bounded(start: Start, server: RedisServer, redis: Redis) -> None:
    """Those longest unwritten are deleted, whoever wrote them; others of the same server are left alone."""
    await redis.set("home:of:somebody:else", "stays")
    await redis.lpush(scripts.recent_key("home"), "no sorted set")
    a, b = await two(start, server.url, max_sessions=5)

    async def until(fact: Callable[[], Awaitable[object]]) -> None:
        async with asyncio.timeout(10):
            while not await fact():
                await asyncio.sleep(0.005)

    async def bounded(kind: str) -> bool:
        """Five are there, and listed."""
        names = await redis.zrange(scripts.recent_key(kind), 0, -1)
        keys = {f"{scripts.ROOT}:{kind}:{{{name.decode()}}}".encode() for name in names}
        return len(keys) == 5 and keys == set(await redis.keys(f"{scripts.ROOT}:{kind}:*"))

    for number in range(12):
        router = (a, b)[number % 2]
        call, _ = await router.plan(session=f"s{number}", tenant=f"t{number}")
        await answer(router, call, 7)
        records = HomeFact("m", f"s{number}", "v", "v"), LengthsFact(("m", f"t{number}", f"s{number}"), [])
        await until(lambda: redis.exists(record_key(records[0])))  # noqa: B023
        await until(lambda: redis.exists(record_key(records[1])))  # noqa: B023
    await until(lambda: bounded("home"))
    await until(lambda: bounded("lengths"))
    assert await redis.exists(*(record_key(HomeFact("m", f"s{number}", "v", "v")) for number in range(7, 12))) == 5
    assert 0 < await redis.pttl(scripts.recent_key("home")) <= 1_800_000
    assert await redis.get("home:of:somebody:else") == b"stays"
    assert sample(a, "penstock_state_failures_total") == sample(b, "penstock_state_failures_total") == 0


async def test_two_of_one_name_do_not_stop_each_other(start: Start, server: RedisServer) -> None:
    a = await start(state=server.url, name="same", silent_s=600)
    await a.join("w")
    other = await start(state=server.url, name="same", silent_s=600)
    await other.join("w")
    await soon(lambda: sample(a, "penstock_state_lost_leases_total") > 0)
    for router in (a, other):
        _, plan = await router.plan()
        assert plan.decode.member_id == "w"


async def test_alone_nothing_is_noted(mesh: Harness) -> None:
    await mesh.join("w")
    await mesh.plan(session="s", avoid=["w"])
    assert not mesh.router.planner.commons.pending


def test_a_state_that_is_none_is_named_without_its_password() -> None:
    with pytest.raises(ConfigError, match=r"state = 'http://\*\*\*@x': must be memory, or the address of a Redis"):
        RouterConfig(state="http://me:hush@x")
    with pytest.raises(ConfigError, match="name = 'a b': must be 1 to 128 letters"):
        RouterConfig(name="a b")
