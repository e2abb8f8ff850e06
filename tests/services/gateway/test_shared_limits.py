"""Limits that several gateways share: each tenant gets them once, through a real Redis, and without it each goes on."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack

import openai
import pytest

from penstock.errors import RateLimited
from penstock.gateway.accounts.books import RedisBook, open_book
from penstock.gateway.accounts.entry import Counts
from penstock.gateway.accounts.ledger import UsageLedger
from penstock.gateway.accounts.limiter import Limiter
from penstock.gateway.accounts.sharing import SharedLimits, _key
from penstock.gateway.accounts.terms import Limits, Price, Terms
from penstock.testing.keys import key_file
from penstock.testing.redis_server import RedisServer, redis_server

HELLO = [{"role": "user", "content": "hello"}]
SLOW = 6
"""Requests per minute: none comes back while a test runs."""


class OneGateway:
    """What a gateway has of limits."""

    def __init__(self, book: RedisBook, **limits: float) -> None:
        prices = {"default": Price(output=1_000_000.0)}
        terms = Terms(by_tenant={"t": Limits(**limits)}, prices=prices)  # type: ignore[arg-type]
        self.ledger = UsageLedger(book, terms)
        self.limiter = Limiter(terms, self.ledger.spent_today)
        self.shared = SharedLimits(book.redis, self.limiter, self.ledger)

    def admits(self) -> bool:
        try:
            with self.limiter.one("t"):
                return True
        except RateLimited:
            return False

    async def told(self) -> None:
        """One round in which everybody is asked for."""
        self.shared._all_at = -1e9
        await self.shared.round()


@pytest.fixture
async def server(tmp_path) -> AsyncIterator[RedisServer]:
    assert shutil.which("redis-server"), "make setup installs it"
    async with redis_server(tmp_path) as server:
        yield server


@pytest.fixture
async def book(server) -> AsyncIterator[RedisBook]:
    async with open_book(server.url) as book:
        assert isinstance(book, RedisBook)
        yield book


async def test_requests_per_minute_are_given_once(book):
    one, two = OneGateway(book, requests_per_minute=SLOW), OneGateway(book, requests_per_minute=SLOW)
    assert [one.admits() for _ in range(4)] == [True] * 4
    await one.told()
    two.limiter.check("t")
    await two.told()
    assert [two.admits() for _ in range(3)] == [True, True, False]
    await two.told()
    await one.told()
    assert not one.admits()


async def test_tokens_of_one_are_a_debt_at_all(book):
    one, two = OneGateway(book, tokens_per_minute=600), OneGateway(book, tokens_per_minute=600)
    assert two.admits() and one.admits()
    one.limiter.spend("t", 60_000)
    await one.told()
    await two.told()
    with pytest.raises(RateLimited) as refused, two.limiter.one("t"):
        pass
    assert 59_000 / 10 < refused.value.retry_after < 60_000 / 10


async def test_whatever_the_order_they_take_no_more_than_one_would(book):
    """Beside one limiter that sees everything, whenever all have told each other."""
    draw = random.Random(7)
    limits = {"tokens_per_minute": 30}
    many = [OneGateway(book, **limits) for _ in range(3)]
    reference = Limiter(many[0].ledger.terms, lambda tenant: 0.0, lambda: 0.0)
    for one in many:
        one.limiter.check("t")
    for _ in range(8):
        for _ in range(draw.randrange(6)):
            tokens = draw.randrange(2)
            draw.choice(many).limiter.spend("t", tokens)
            reference.spend("t", tokens)
        for one in draw.sample(many * 2, 6):
            await one.told()
        wanted = int(reference.headers("t")["x-ratelimit-remaining-tokens"])
        assert wanted > 0
        left = {int(one.limiter.headers("t")["x-ratelimit-remaining-tokens"]) for one in many}
        assert left <= {wanted, wanted + 1}, "what came back since the test began is less than one"


async def test_requests_at_one_time_are_those_of_all_who_live(book):
    one, two = OneGateway(book, concurrency=2), OneGateway(book, concurrency=2)
    with ExitStack() as running:
        for _ in range(2):
            running.enter_context(one.limiter.one("t"))
        await one.told()
        two.limiter.check("t")
        await two.told()
        assert not two.admits()
    await one.told()
    await two.told()
    assert two.admits()
    # One that died said so long ago that it runs a thousand.
    await book.redis.hset(_key("t"), "live:dead", "1000 1")
    await two.told()
    assert two.admits()
    assert not await book.redis.hexists(_key("t"), "live:dead")


async def test_money_of_a_day_is_spent_once(book):
    one, two = OneGateway(book, spend_per_day=5.0), OneGateway(book, spend_per_day=5.0)
    assert one.admits() and two.admits()
    one.ledger.add("t", "m", Counts(output_tokens=3))
    assert await one.ledger.flush()
    two.ledger.add("t", "m", Counts(output_tokens=1))
    await two.told()
    assert two.ledger.spent_today("t") == 4.0, "three of the other, and one of its own that nobody has written yet"
    assert two.admits()
    two.ledger.add("t", "m", Counts(output_tokens=1))
    assert not two.admits()
    assert await two.ledger.flush()
    await one.told()
    assert not one.admits()


async def test_without_redis_each_goes_on_and_tells_it_later(book, server, tmp_path):
    one, two = OneGateway(book, requests_per_minute=SLOW), OneGateway(book, requests_per_minute=SLOW)
    assert one.admits()
    await one.told()
    await server.kill()
    assert one.admits()
    with pytest.raises(OSError, match=r"Connect|closed"):
        await one.told()
    assert one.admits()
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    async with redis_server(tmp_path, port=port):
        await one.told()  # it is empty: what this one knows is written
        two.limiter.check("t")
        await two.told()
        assert [two.admits() for _ in range(4)] == [True] * 3 + [False]


async def test_what_was_told_counts_once_though_the_answer_was_lost(book):
    one, two = OneGateway(book, tokens_per_minute=600), OneGateway(book, tokens_per_minute=600)
    assert one.admits() and two.admits()
    await one.told()
    one.limiter.spend("t", 60_000)
    heard = one.limiter.hear
    one.limiter.hear = lost  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        await one.told()
    one.limiter.hear = heard  # type: ignore[method-assign]
    await one.told()
    await two.told()
    with pytest.raises(RateLimited) as refused, two.limiter.one("t"):
        pass
    assert 59_000 / 10 < refused.value.retry_after < 60_000 / 10


def lost(*answer: object) -> None:
    raise ConnectionError


async def test_requests_elsewhere_are_forgotten_when_nobody_can_be_heard(book):
    one, two = OneGateway(book, concurrency=1), OneGateway(book, concurrency=1)
    with one.limiter.one("t"):
        await one.told()
        two.limiter.headers("t")
        await two.told()
        assert not two.admits()
        two.shared._heard_at -= 6
        two.shared._fail(OSError("gone"))
        assert two.admits()


async def test_what_is_not_ours_is_begun_anew(book):
    await book.redis.set(_key("t"), "foreign")
    one = OneGateway(book, requests_per_minute=SLOW)
    assert one.admits()
    await one.told()
    assert float(await book.redis.hget(_key("t"), "requests")) == pytest.approx(SLOW - 1, abs=0.5)
    assert 0 < await book.redis.pttl(_key("t")) <= 120_000


async def test_gateways_with_one_ledger_share_the_limits(opened, server, tmp_path):
    """Two whole gateways and the official client."""
    (tmp_path / "terms.toml").write_text(f"[limits.default]\nrequests_per_minute = {SLOW}\n")
    keys = key_file(tmp_path / "keys.json", {"key-a": "a"})
    settings = {"api_keys": keys, "server_key": "ab" * 16, "terms": tmp_path / "terms.toml", "ledger": server.url}
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(opened(**settings, api_key="key-a")) for _ in range(2)]
        create = second.client.chat.completions.with_raw_response.create
        assert (await create(model="tiny", messages=HELLO)).headers["x-ratelimit-remaining-requests"] == str(SLOW - 1)
        for _ in range(2):
            await first.client.chat.completions.create(model="tiny", messages=HELLO)
        async with asyncio.timeout(10):
            while int(second.gateway.reception.limiter.headers("a")["x-ratelimit-remaining-requests"]) > SLOW - 3:
                await asyncio.sleep(0.01)
        for _ in range(SLOW - 3):
            await create(model="tiny", messages=HELLO)
        with pytest.raises(openai.RateLimitError):
            await create(model="tiny", messages=HELLO)


async def test_after_an_outage_nobody_owes_what_it_was_entitled_to(book):
    """What came back meanwhile pays for what was taken meanwhile, before the rest is cut to a minute's."""
    one = OneGateway(book, tokens_per_minute=6000)
    assert one.admits()
    one.limiter.spend("t", 1)
    await one.told()
    await book.redis.hincrby(_key("t"), "tokens:at", -100_000)  # the last round was 100 s ago
    with one.limiter.one("t"):
        pass
    one.limiter.spend("t", 9000)
    await one.told()
    level = float(await book.redis.hget(_key("t"), "tokens"))
    assert level == pytest.approx(6000, abs=100), "10000 have come back"
