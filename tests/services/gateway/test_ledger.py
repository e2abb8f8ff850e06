"""The ledger: exact sums in every book, across restarts and gateways, for those who may see them."""

from __future__ import annotations

import asyncio
import csv
import io
import os
import shutil
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx2
import pytest
from structlog.testing import capture_logs

from penstock.gateway.accounts.books import LedgerBatch, MemoryBook, open_book
from penstock.gateway.accounts.entry import HOUR_S, NANO, Counts, LedgerLine, merged, of_request
from penstock.gateway.accounts.ledger import UsageLedger, open_ledger
from penstock.gateway.accounts.report import as_csv, rows
from penstock.gateway.accounts.terms import Price, Terms, read_terms
from penstock.runtime.config import ConfigError
from penstock.testing.keys import key_file
from penstock.testing.redis_server import free_port, redis_server

PRICES = """
currency = "EUR"
[price.default]
input = 2.0
output = 10.0
cached = { host = 0.5, gpu = 0.25 }
"""
HELLO = [{"role": "user", "content": "hello"}]


def counts(computed: int = 10, host: int = 4, output: int = 3) -> Counts:
    return of_request(computed, {"host": host}, output, reasoning=1)


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def where(request, tmp_path) -> AsyncIterator[str]:
    """An address of each kind of book."""
    if request.param == "memory":
        yield ""
    elif request.param == "sqlite":
        yield str(tmp_path / "ledger.db")
    else:
        assert shutil.which("redis-server"), "make setup installs it"
        async with redis_server(tmp_path) as server:
            yield server.url


async def test_every_book_adds_and_finds(where):
    first, later, other = LedgerLine(HOUR_S, "a", "m"), LedgerLine(2 * HOUR_S, "a", "m"), LedgerLine(HOUR_S, "b", "m")
    async with open_book(where) as book:
        await book.add({first: counts(), other: counts(1)}, LedgerBatch("one", 1))
        await book.add({first: counts(20), later: counts(5)}, LedgerBatch("two", 1))
        assert await book.read(0, 10 * HOUR_S, None) == merged(
            [(first, counts()), (first, counts(20)), (later, counts(5)), (other, counts(1))]
        )
        assert set(await book.read(0, 2 * HOUR_S, None)) == {first, other}
        assert set(await book.read(2 * HOUR_S, 3 * HOUR_S, None)) == {later}
        assert set(await book.read(0, 10 * HOUR_S, "b")) == {other}
        assert await book.read(0, 10 * HOUR_S, "nobody") == {}


@pytest.mark.parametrize("where", ["sqlite", "redis"], indirect=True)
async def test_a_ledger_survives_its_process_and_is_shared(where):
    terms = Terms(prices={"default": Price(input=1.0)})
    async with open_ledger(where, terms, lambda name: None) as one:
        async with open_ledger(where, terms, lambda name: None) as two:
            for ledger in (one, two, one):
                ledger.add("a", "m", counts())
    async with open_ledger(where, terms, lambda name: None) as after:
        [(account, found)] = (await after.read(0, 2**33, None)).items()
        assert (account.tenant, account.model, found.requests, found.input_tokens) == ("a", "m", 3, 42)
        assert after.spent_today("a") == found.cost_nano / NANO == pytest.approx(3 * 14 / 1e6)


async def test_without_a_place_the_ledger_lives_as_long_as_the_gateway():
    for _ in range(2):
        async with open_ledger("", Terms(), lambda name: None) as ledger:
            assert await ledger.read(0, 2**33, None) == {}
            ledger.add("a", "m", counts())
            assert len(await ledger.read(0, 2**33, None)) == 1


class Stubborn(MemoryBook):
    """Can't be written at first."""

    failures = 3

    async def add(self, entries, batch) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise OSError("the disk is full")
        await super().add(entries, batch)


async def test_what_cant_be_written_waits_and_is_counted_once():
    ledger = UsageLedger(Stubborn(), Terms())
    for number in range(4):
        ledger.add("a", "m", counts())
        assert await ledger.flush() is (number == 3)
        [found] = (await ledger.read(0, 2**33, None)).values()
        assert found.requests == number + 1
    assert await ledger.flush() and not ledger.waits


class Slow(MemoryBook):
    """Takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may = asyncio.Event(), asyncio.Event()

    async def add(self, entries, batch) -> None:
        self.asked.set()
        await self.may.wait()
        await super().add(entries, batch)


async def test_what_is_being_written_when_the_gateway_ends_is_written_once(monkeypatch):
    book = Slow()

    @asynccontextmanager
    async def opened(where):
        yield book

    monkeypatch.setattr("penstock.gateway.accounts.ledger.open_book", opened)
    async with open_ledger("", Terms(), lambda name: None) as ledger:
        ledger.add("a", "m", counts())
        await book.asked.wait()
        ledger.add("a", "m", counts())
        asyncio.get_running_loop().call_later(0.05, book.may.set)
    [found] = (await book.read(0, 2**33, None)).values()
    assert found.requests == 2


@pytest.mark.parametrize("where", ["redis"], indirect=True)
async def test_a_batch_whose_answer_got_lost_counts_once(where):
    """Also one that is asked again when the next has been written: what was asked first came late."""
    async with open_book(where) as book:
        for number in (1, 1, 2, 1, 2):
            await book.add({LedgerLine(HOUR_S, "a", "m"): counts()}, LedgerBatch("the same", number))
        [found] = (await book.read(0, 10 * HOUR_S, None)).values()
        assert found == merged([(None, counts()), (None, counts())])[None]


@pytest.mark.parametrize("where", ["redis"], indirect=True)
async def test_a_redis_keeps_one_name_of_each_gateway_however_often_it_writes(where):
    async with open_ledger(where, Terms(), lambda name: None) as ledger:
        for _ in range(20):
            ledger.add("a", "m", counts())
            assert await ledger.flush()
        assert len(await ledger.book.redis.keys("penstock:usage:*")) == 3, "the hours, this one, and the last batch"


class Long(MemoryBook):
    """Whoever reads first waits."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may = asyncio.Event(), asyncio.Event()

    async def read(self, since, until, tenant):
        if not self.asked.is_set():
            self.asked.set()
            await self.may.wait()
        return await super().read(since, until, tenant)


async def test_while_a_long_history_is_read_the_ledger_is_written_and_each_request_counts_once():
    book, now = Long(), [20.5 * HOUR_S]
    ledger = UsageLedger(book, Terms(), lambda: now[0])
    await book.add({LedgerLine(10 * HOUR_S, "a", "m"): counts()}, LedgerBatch("other", 1))
    ledger.add("a", "m", counts())
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(ledger.read(0, 100 * HOUR_S, None))
        await book.asked.wait()
        async with asyncio.timeout(10):
            assert await ledger.flush()
            now[0] += HOUR_S
            ledger.add("a", "m", counts())
            await ledger.learn_spent(["a"])
        book.may.set()
    assert {line.hour // HOUR_S: found.requests for line, found in reading.result().items()} == {10: 1, 20: 1, 21: 1}


async def test_what_waits_for_long_counts_once_in_what_is_read_meanwhile():
    """Its hour is over, and is not read before it is written."""
    book, now = Long(), [10.5 * HOUR_S]
    ledger = UsageLedger(book, Terms(), lambda: now[0])
    ledger.add("a", "m", counts())
    now[0] += 10 * HOUR_S
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(ledger.read(0, 100 * HOUR_S, None))
        await book.asked.wait()
        writing = tasks.create_task(ledger.flush())
        book.may.set()
    assert [found.requests for found in reading.result().values()] == [1] and writing.result()


async def test_others_have_the_event_loop_between_the_parts_of_a_history(where):
    """Of 20 hours, and of 4000 counts in one."""
    lines = {LedgerLine(hour * HOUR_S, "a", "m"): counts() for hour in range(20)}
    lines |= {LedgerLine(HOUR_S, f"tenant {number}", "m"): counts() for number in range(400)}
    async with open_book(where) as book:
        await book.add(lines, LedgerBatch("one", 1))
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            counting = tasks.create_task(count())
            found = await book.read(0, 100 * HOUR_S, None)
            assert turns >= 20
            counting.cancel()
        assert found == lines


async def test_a_large_account_is_written_in_a_thread(opened, monkeypatch):
    places = []

    def written(*asked):
        places.append(threading.current_thread())
        return rows(*asked)

    monkeypatch.setattr("penstock.gateway.door.accounting.rows", written)
    hour = int(time.time()) // HOUR_S * HOUR_S
    async with opened() as setup, httpx2.AsyncClient(base_url=setup.url) as http:
        await setup.gateway.reception.ledger.book.add(
            {LedgerLine(hour, "a", f"model {number:05}"): counts() for number in range(2000)}, LedgerBatch("one", 1)
        )
        for form in ("json", "csv"):
            answer = await http.get("/v1/usage", params={"format": form})
            assert answer.status_code == 200
            found = answer.json()["data"] if form == "json" else list(csv.DictReader(io.StringIO(answer.text)))
            assert [row["model"] for row in found] == [f"model {number:05}" for number in range(2000)]
    assert len(places) == 2 and threading.main_thread() not in places


def test_prices_by_tier_and_model():
    price = Price(input=2.0, output=10.0, cached={"host": 0.5})
    assert price.cost(1_000_000, {"host": 1_000_000, "nvme": 1_000_000}, 100_000) == 2.0 + 0.5 + 2.0 + 1.0
    terms = Terms(prices={"default": price, "free": Price()})
    assert terms.price("free").cost(10**6, {}, 10**6) == 0 and terms.price("other") is price
    assert terms.price("free:legal") == Price() and terms.price("other:legal") is price, "an adapter, as its model"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("x = 1", "unknown field"),
        ("[price.m]\ninput = -1", "price.m.input"),
        ("[price.m]\ncached = { disk = 1.0 }", "no tier 'disk'"),
        ("[limits.t]\nconcurrency = 1.5", "limits"),
        ("[limits.t]\nspend_per_day = nan", "limits.t.spend_per_day"),
        ("[price", "is not valid"),
    ],
)
def test_terms_are_checked(tmp_path, text, named):
    (tmp_path / "terms.toml").write_text(text)
    with pytest.raises(ConfigError, match=named):
        read_terms(tmp_path / "terms.toml")


async def test_places_that_cant_be_used_are_named(tmp_path):
    with pytest.raises(ConfigError, match="ledger"):
        async with open_book(str(tmp_path)):
            pass


@pytest.mark.parametrize("away", ["stopped", "not there"])
async def test_a_gateway_begins_without_its_redis(opened, tmp_path, away):
    """It says so, serves, and what was used meanwhile is written when Redis is back."""
    port = free_port()
    async with AsyncExitStack() as stack:
        server = None
        if away == "stopped":
            server = await stack.enter_async_context(redis_server(tmp_path, port=port))
            os.kill(server.pid, signal.SIGSTOP)
        async with asyncio.timeout(20):
            with capture_logs() as lines:
                setup = await stack.enter_async_context(opened(ledger=f"redis://127.0.0.1:{port}/0"))
            assert any("the gateway begins without it" in line["event"] for line in lines)
            await setup.client.chat.completions.create(model="tiny", messages=HELLO)
        assert setup.gateway.reception.ledger.waits
        if server is not None:
            os.kill(server.pid, signal.SIGCONT)
        else:
            await stack.enter_async_context(redis_server(tmp_path, port=port))
        async with asyncio.timeout(60), open_book(f"redis://127.0.0.1:{port}/0") as book:
            while not (found := await book.read(0, 2**33, None)):
                await asyncio.sleep(0.05)
        assert [one.requests for one in found.values()] == [1]


async def test_the_account_is_what_usage_said(opened, tmp_path):
    (tmp_path / "terms.toml").write_text(PRICES)
    keys = key_file(tmp_path / "keys.json", {"key-a": "a", "key-b": "b"})
    keys_of_ops = key_file(tmp_path / "ops.json", {"key-ops": "ops"}, role="operator")
    joined = tmp_path / "all.json"
    joined.write_text(keys.read_text().rstrip()[:-1].rstrip()[:-1] + "," + keys_of_ops.read_text().split("[", 1)[1])
    settings = {"api_keys": joined, "server_key": "ab" * 16, "terms": tmp_path / "terms.toml"}
    async with opened(**settings, ledger=str(tmp_path / "ledger.db"), api_key="key-a") as setup:
        setup.script.cached = {"host": 4, "gpu": 2}
        usages = []
        for key in ("key-a", "key-b", "key-a"):
            client = setup.client.with_options(api_key=key)
            usages.append((await client.chat.completions.create(model="tiny", messages=HELLO)).usage)
        total = sum(usage.prompt_tokens for usage in usages)
        async with httpx2.AsyncClient(base_url=setup.url) as http:

            async def read(key: str, **query: str) -> httpx2.Response:
                return await http.get("/v1/usage", params=query, headers={"authorization": f"Bearer {key}"})

            everyone = (await read("key-ops", by="total")).json()
            assert everyone["currency"] == "EUR"
            by_tenant = {row["tenant"]: row for row in everyone["data"]}
            assert {tenant: row["requests"] for tenant, row in by_tenant.items()} == {"a": 2, "b": 1}
            assert sum(row["input_tokens"] for row in by_tenant.values()) == total
            assert sum(row["output_tokens"] for row in by_tenant.values()) == sum(u.completion_tokens for u in usages)
            b, usage = by_tenant["b"], usages[1]
            assert b["cached_tokens"] == usage.penstock["cached_tokens"]
            assert b["computed_tokens"] == usage.penstock["computed_tokens"]
            cost = b["computed_tokens"] * 2.0 + 4 * 0.5 + 2 * 0.25 + b["output_tokens"] * 10.0
            assert b["cost"] == pytest.approx(cost / 1e6, abs=1e-9)

            sources = setup.gateway.metrics.registry
            for tier in ("computed", "host", "gpu"):
                labels = {"model_name": "tiny", "source": tier}
                counted = sources.get_sample_value("penstock_prompt_tokens_total", labels)
                found = [
                    row["computed_tokens"] if tier == "computed" else row["cached_tokens"][tier]
                    for row in everyone["data"]
                ]
                assert sum(found) == counted, "what workers reported"

            own = (await read("key-b")).json()["data"]
            assert [row["tenant"] for row in own] == ["b"]
            assert (await read("key-b", tenant="a")).status_code == 403
            assert [row["tenant"] for row in (await read("key-ops", tenant="a")).json()["data"]] == ["a"]
            [line] = csv.DictReader(io.StringIO((await read("key-b", format="csv")).text))
            assert (line["tenant"], int(line["cached_host"]), line["currency"]) == ("b", 4, "EUR")
            for query, field in (
                ({"by": "week"}, "by"),
                ({"format": "xml"}, "format"),
                ({"from": "soon"}, "from"),
                ({"from": "2030-01-01", "to": "2029-01-01"}, "from"),
                ({"since": "1"}, "since"),
            ):
                refused = await read("key-b", **query)
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
            assert (await read("wrong")).status_code == 401
    async with opened(**settings, ledger=str(tmp_path / "ledger.db"), api_key="key-a") as again:
        async with httpx2.AsyncClient(base_url=again.url, headers={"x-api-key": "key-ops"}) as http:
            assert (await http.get("/v1/usage", params={"by": "total"})).json()["data"] == everyone["data"]


def test_a_tenants_name_is_no_formula():
    entries = {LedgerLine(0, "=cmd()", "m"): counts()}
    assert "'=cmd()" in as_csv(rows(entries, "total"), "USD")


async def test_what_may_be_in_the_book_is_not_counted_twice():
    """Its answer was lost; it is written again before anybody counts what all have spent."""
    ledger = UsageLedger(Stubborn(), Terms(prices={"default": Price(input=1.0)}))
    ledger.add("a", "m", counts())
    spent = ledger.spent_today("a")
    assert not await ledger.flush()
    for account, found in ledger._writing.items():
        await MemoryBook.add(ledger.book, {account: found}, ledger._batch)
    await ledger.learn_spent(["a"])
    assert ledger.spent_today("a") == spent > 0
