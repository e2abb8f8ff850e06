"""Batches from their begin to their end, before answers of the test's own and a clock that it sets."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.errors import InvalidRequest, Overloaded, PenstockError, RateLimited
from penstock.gateway.api.openai.shapes import error_json
from penstock.gateway.batches import answering
from penstock.gateway.batches.in_directory import open_directory_batches
from penstock.gateway.batches.in_redis import open_redis_batches
from penstock.gateway.batches.run import BatchShop
from penstock.gateway.batches.runner import BatchRunner
from penstock.gateway.batches.window import LineWindow
from penstock.gateway.completing.threads import open_threads
from penstock.runtime.metrics import GatewayMetrics
from penstock.runtime.tasks import end, start
from penstock.testing.redis_server import redis_server

from .helpers import content, line, pieces, stored_batch, stored_file, written

NOW = 1000.0


class Answers:
    """Answers lines, and holds those back that a test wants to see on their way."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.asks: list[answering.LineAsk] = []
        self.running = 0
        self.bounded = False
        self._permits = asyncio.Semaphore(0)
        self.takes = True
        """Whether workers take lines."""
        self.fails: dict[str, list[BaseException]] = {}
        """By prompt: what its next tries fail with."""

    def served(self, model: str) -> str | None:
        return None if model == "tiny" else f"there is no {model}"

    async def answer(self, ask: answering.LineAsk) -> dict[str, Any]:
        prompt = json.loads(ask.body)["prompt"]
        self.asked[prompt] += 1
        self.asks.append(ask)
        self.running += 1
        try:
            if errors := self.fails.get(prompt):
                raise errors.pop(0)
            if self.takes:
                ask.taken()
            if self.bounded:
                await self._permits.acquire()
            usage = {"prompt_tokens": 3, "completion_tokens": 2}
            return {"id": ask.id, "text": prompt.upper(), "usage": usage}
        finally:
            self.running -= 1

    def let(self, count: int) -> None:
        """From now on lines are answered as far as a test lets so many."""
        self.bounded = True
        for _ in range(count):
            self._permits.release()

    def error(self, ask: answering.LineAsk, error: PenstockError) -> dict[str, Any]:
        return error_json(error)


class Place:
    """A store, and gateways that run what is in it."""

    def __init__(self, opened, store) -> None:
        self.opened = opened
        """Opens the store as another gateway would."""
        self.store = store
        self.now = NOW
        self.answers = Answers()
        self.metrics = GatewayMetrics()

    async def begin(self, *lines: object, tenant: str = "t", window_s: int = 600):
        file = stored_file(tenant)
        await self.store.write(tenant, file.id, pieces(written(*lines)))
        await self.store.add_file(file)
        now = int(self.now)
        batch = stored_batch(tenant, input_file_id=file.id, created_at=now, expires_at=now + window_s)
        await self.store.add_batch(batch)
        return batch

    @asynccontextmanager
    async def gateway(self, store=None, **settings: Any):
        """Runs batches for the length of the block."""
        with open_threads() as threads:
            made: dict[str, Any] = {"window": LineWindow(64, spread=0), "clock": lambda: self.now, "look_s": 0.01}
            made |= {"most_lines": 100, "most_bytes": 10_000, "kept_s": 500.0, "metrics": self.metrics}
            shop = BatchShop(store=store or self.store, answers=self.answers, threads=threads, **made | settings)
            runner = BatchRunner(shop)
            task = start(runner.keep, name="batches", on_failure="stop", failed=self.metrics.task_failed)
            try:
                yield runner
            finally:
                await end(task)

    async def until(self, batch, *statuses: str):
        """The batch as soon as it is so."""
        async with asyncio.timeout(20):
            while True:
                found = await self.store.batch(batch.tenant, batch.id)
                if found is not None and (found.status in statuses if statuses else found.over):
                    return found
                await asyncio.sleep(0.005)

    async def done(self, batch, count: int) -> None:
        """Returns when so many lines have answers."""
        async with asyncio.timeout(20):
            while len(await self.results(batch)) < count:
                await asyncio.sleep(0.001)

    async def results(self, batch, ok: bool = True) -> dict[str, Any]:
        """By custom id; each is there once."""
        text = await content(self.store, batch.tenant, batch.results(ok))
        lines = [json.loads(one) for one in text.splitlines()]
        found = {one["custom_id"]: one for one in lines}
        assert len(found) == len(lines), "no line is done twice"
        return found


@pytest.fixture(scope="module")
async def redis_url(tmp_path_factory):
    async with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(params=["directory", "redis"])
async def place(request, tmp_path, redis_url):
    if request.param == "directory":
        opened = lambda: open_directory_batches(tmp_path / "batches")  # noqa: E731
    else:
        import redis.asyncio

        async with redis.asyncio.Redis.from_url(redis_url) as client:
            await client.flushall()
        opened = lambda: open_redis_batches(redis_url, lambda name: None, lease_s=5)  # noqa: E731
    async with opened() as store:
        yield Place(opened, store)


@pytest.fixture
def quick(monkeypatch):
    """Lines that are tried again do not wait."""
    monkeypatch.setattr(answering, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(answering, "_LONGEST_PAUSE_S", 0.004)


def lines(*prompts: str):
    return [line(f"id-{prompt}", body={"prompt": prompt}) for prompt in prompts]


async def eventually(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


async def test_every_line_has_its_answer(place):
    batch = await place.begin(*lines("a", "b", "c"), "\n", *lines("d"))
    async with place.gateway():
        found = await place.until(batch)
    assert found.status == "completed" and (found.total, found.completed, found.failed) == (4, 4, 0)
    assert found.error_file_id is None and found.model == "tiny"
    assert found.in_progress_at == found.finalizing_at == found.completed_at == NOW
    assert found.usage.shown()["total_tokens"] == 20
    results = await place.results(batch)
    assert {name: one["response"]["body"]["text"] for name, one in results.items()} == {
        f"id-{prompt}": prompt.upper() for prompt in "abcd"
    }
    file = await place.store.file("t", found.output_file_id)
    assert file.purpose == "batch_output" and file.expires_at == NOW + 500
    assert file.bytes == len(await content(place.store, "t", file.id))
    ask = place.answers.asks[0]
    assert ask.patience_s == 600 and ask.id == f"batch_req_{batch.id.removeprefix('batch_')}_1"
    sample = place.metrics.registry.get_sample_value
    assert sample("penstock_batch_lines_total", {"outcome": "answered"}) == 4
    assert sample("penstock_batch_lines_waiting") == sample("penstock_batch_lines_running") == 0


async def test_errors_are_lines_of_their_own_file(place, quick):
    refused, broken = InvalidRequest("prompt: no", field="prompt"), RuntimeError("a defect")
    place.answers.fails = {"b": [refused], "c": [broken] * 3, "d": [broken, Overloaded("full")]}
    batch = await place.begin(*lines("a", "b", "c", "d"))
    async with place.gateway():
        found = await place.until(batch)
    assert (found.status, found.completed, found.failed) == ("completed", 2, 2)
    assert {*await place.results(batch)} == {"id-a", "id-d"}
    errors = await place.results(batch, ok=False)
    assert errors["id-b"]["response"]["status_code"] == 400
    assert errors["id-b"]["response"]["body"]["error"]["param"] == "prompt"
    assert errors["id-c"]["response"]["status_code"] == 500 and "defect" not in json.dumps(errors["id-c"])
    assert found.error_file_id == batch.results(False)


async def test_an_input_with_mistakes_runs_nothing(place):
    batch = await place.begin(*lines("a"), "{\n", line("id-a"), *lines("b"))
    async with place.gateway():
        found = await place.until(batch)
    assert found.status == "failed" and found.failed_at == NOW
    assert [(fault.line, fault.code) for fault in found.faults] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
    ]
    assert not place.answers.asked and found.output_file_id is None


@pytest.mark.parametrize(
    ("text", "settings", "code"),
    [
        ("\n\n", {}, "empty_file"),
        (written(*lines("a", "b", "c")).decode(), {"most_lines": 2}, "too_many_lines"),
        ("x" * 20_000, {}, "line_too_long"),
    ],
)
async def test_inputs_that_are_none(place, text, settings, code):
    batch = await place.begin(text)
    async with place.gateway(**settings):
        found = await place.until(batch)
    assert found.status == "failed" and found.faults[0].code == code


async def test_many_mistakes_are_not_all_told(place):
    batch = await place.begin("{\n" * 5000)
    async with place.gateway(most_lines=10_000):
        found = await place.until(batch)
    assert len(found.faults) == 100


async def test_what_is_done_is_not_done_again_by_the_next_gateway(place):
    names = [f"p{number}" for number in range(30)]
    place.answers.let(12)
    batch = await place.begin(*lines(*names))
    async with place.gateway(window=LineWindow(5, spread=0)):
        await place.done(batch, 12)
        await eventually(lambda: place.answers.running == 5)
    assert place.answers.running == 0, "a gateway that stops leaves nothing running"
    done = await place.results(batch)
    assert len(done) == 12 and (await place.store.batch("t", batch.id)).status == "in_progress"
    before = Counter(place.answers.asked)
    place.answers.bounded = False
    async with place.opened() as store, place.gateway(store):
        found = await place.until(batch)
    assert found.status == "completed" and found.completed == 30 == len(await place.results(batch))
    again = {name for name, count in place.answers.asked.items() if count > before[name] > 0}
    assert len(again) == 5 and not again & {name.removeprefix("id-") for name in done}
    assert found.usage.output_tokens == 60, "also of what was done before"


async def test_of_two_gateways_one_runs_a_batch_and_the_other_takes_over(place):
    place.answers.let(0)
    batch = await place.begin(*lines("a", "b", "c"))
    async with place.opened() as store, place.gateway(store):
        await eventually(lambda: place.answers.running == 3)
        async with place.gateway():
            other = await place.begin(*lines("d"))
            await eventually(lambda: place.answers.running == 4)
            assert max(place.answers.asked.values()) == 1, "the other has another batch"
            place.answers.let(4)
            assert (await place.until(other)).status == (await place.until(batch)).status == "completed"
    assert max(place.answers.asked.values()) == 1


async def test_a_batch_that_is_cancelled_has_what_is_done(place):
    place.answers.let(1)
    batch = await place.begin(*lines("a", "b", "c", "d"))
    async with place.gateway(window=LineWindow(2, spread=0)) as runner:
        await place.done(batch, 1)
        await eventually(lambda: place.answers.running == 2)
        await place.store.cancel(batch, int(place.now))
        runner.stir()
        found = await place.until(batch)
        assert found.status == "cancelled" and found.cancelled_at == found.cancelling_at == NOW
        assert place.answers.running == 0
    results = await place.results(batch)
    assert found.completed == len(results) == 1 and found.output_file_id and found.error_file_id is None


async def test_a_batch_that_was_cancelled_before_it_began(place):
    batch = await place.begin(*lines("a"))
    await place.store.cancel(batch, 7)
    async with place.gateway():
        found = await place.until(batch)
    assert (found.status, found.cancelling_at, found.output_file_id) == ("cancelled", 7, None)
    assert not place.answers.asked


async def test_at_the_windows_end_the_rest_are_errors(place):
    place.answers.let(2)
    batch = await place.begin(*lines("a", "b", "c", "d", "e"))
    async with place.gateway(window=LineWindow(2, spread=0)):
        await place.done(batch, 2)
        place.now += 600
        found = await place.until(batch)
        assert place.answers.running == 0
    assert found.status == "expired" and found.expired_at == NOW + 600
    done, late = await place.results(batch), await place.results(batch, ok=False)
    assert {*done} | {*late} == {f"id-{prompt}" for prompt in "abcde"} and not {*done} & {*late}
    assert (found.completed, found.failed) == (len(done), len(late)) == (2, 3)
    assert {one["error"]["code"] for one in late.values()} == {"batch_expired"}
    assert found.output_file_id and found.error_file_id


async def test_a_batch_whose_window_ended_while_nobody_ran_it(place):
    batch = await place.begin(*lines("a", "b"))
    place.now += 10_000
    async with place.gateway():
        found = await place.until(batch)
    assert found.status == "expired" and not place.answers.asked


async def test_a_batch_that_has_to_end_waits_for_no_other_of_its_tenant(place):
    place.answers.let(0)
    first = await place.begin(*lines("a"), window_s=10)
    async with place.gateway():
        await eventually(lambda: place.answers.running == 1)
        unwanted, late = await place.begin(*lines("b"), window_s=50), await place.begin(*lines("c"), window_s=5)
        await place.store.cancel(unwanted, int(NOW))
        assert (await place.until(unwanted)).status == "cancelled"
        place.now += 5
        assert (await place.until(late)).status == "expired"
        assert (await place.store.batch("t", first.id)).status == "in_progress"
        place.answers.let(1)
        assert (await place.until(first)).completed == 1
    assert {*place.answers.asked} == {"a"}


async def test_as_many_lines_are_on_their_way_as_workers_take(place):
    """And two that ask."""
    place.answers.let(0)
    place.answers.takes = False
    batch = await place.begin(*lines(*(f"p{number}" for number in range(20))))
    window = LineWindow(8, spread=0)
    async with place.gateway(window=window):
        await eventually(lambda: place.answers.running == 2)
        assert window.asking.total() == window.lines == 2
        for ask in place.answers.asks[:2]:
            ask.taken()
        await eventually(lambda: place.answers.running == 4)
        place.answers.takes = True
        for ask in place.answers.asks[2:4]:
            ask.taken()
        await eventually(lambda: place.answers.running == 8)
        assert (window.asking.total(), window.lines) == (0, 8), "as many as it may hold"
        place.answers.let(20)
        await place.until(batch)
    assert (window.asking.total(), window.lines) == (0, 0)


class CountedWindow(LineWindow):
    """Counts the lines that have asked for a place."""

    asked = 0

    async def enter(self, model):
        self.asked += 1
        return await super().enter(model)


async def test_tenants_share_the_window(place):
    place.answers.let(0)
    place.answers.takes = False
    window = CountedWindow(64, spread=0)
    long = await place.begin(*lines(*(f"long{number}" for number in range(50))))
    async with place.gateway(window=window) as runner:
        await eventually(lambda: place.answers.running == 2)
        short = await place.begin(*lines(*(f"short{number}" for number in range(5))), tenant="other")
        runner.stir()
        await eventually(lambda: window.asked == 4)  # one of each batch waits behind the two that are asking
        place.answers.takes = True
        for ask in list(place.answers.asks):
            ask.taken()
        await eventually(lambda: place.answers.asked.total() == 55)
        order = [json.loads(ask.body)["prompt"] for ask in place.answers.asks]
        place.answers.let(55)
        await place.until(short, "completed")
        await place.until(long, "completed")
    assert max(order.index(f"short{number}") for number in range(5)) < 15, (
        "a long batch is not done before a short one of somebody else"
    )


async def test_a_tenant_without_money_waits_and_holds_nobody_up(place, quick):
    broke = RateLimited("the limit of 1 USD per day is used up", code="insufficient_quota", retry_after=5000)
    place.answers.fails = {"poor": [broke] * 40}
    batch = await place.begin(*lines("poor"), tenant="other")
    rich = await place.begin(*lines(*(f"rich{number}" for number in range(20))))
    async with place.gateway():
        assert (await place.until(rich)).status == "completed"
        assert (await place.until(batch)).completed == 1
    assert place.answers.asked["poor"] == 41


async def test_a_batch_outlasts_a_store_that_is_away_for_a_while(place, monkeypatch):
    from penstock.gateway.batches import runner as running

    monkeypatch.setattr(running, "_AGAIN_S", 0.01)
    batch = await place.begin(*lines("a", "b"))
    failures = 2

    class Flaky:
        def __init__(self, claim) -> None:
            self._claim = claim

        def __getattr__(self, name):
            return getattr(self._claim, name)

        async def append(self, answers, errors):
            nonlocal failures
            if failures:
                failures -= 1
                raise OSError("no space left on device")
            await self._claim.append(answers, errors)

    claim = place.store.claim

    @asynccontextmanager
    async def flaky(batch):
        async with claim(batch) as found:
            yield found and Flaky(found)

    monkeypatch.setattr(place.store, "claim", flaky)
    async with place.gateway():
        found = await place.until(batch)
    assert found.status == "completed" and {*await place.results(batch)} == {"id-a", "id-b"}


async def test_a_defect_in_one_batch_stops_no_other(place, monkeypatch):
    bad = await place.begin(*lines("a"))
    served = place.answers.served

    def broken(model: str) -> str | None:
        if place.answers.asked:
            raise RuntimeError("a defect")
        return served(model)

    monkeypatch.setattr(place.answers, "served", broken)
    async with place.gateway():
        await place.until(bad)
        worse = await place.begin(*lines("b"))
        await eventually(
            lambda: place.metrics.registry.get_sample_value("penstock_task_failures_total", {"task": "batch"})
        )
        monkeypatch.setattr(place.answers, "served", served)
        good = await place.begin(*lines("c"))
        assert (await place.until(good)).status == "completed"
        assert (await place.store.batch("t", worse.id)).status == "validating"


async def test_the_window_gives_no_place_twice():
    window = LineWindow(3, spread=0)
    first, second = [await window.enter("m") for _ in range(2)]
    waiting = [asyncio.ensure_future(window.enter("m")) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    first.taken(), first.taken()
    await asyncio.sleep(0)
    assert waiting[1].done() and not waiting[2].done() and window.lines == 3
    second.leave(), second.leave()
    await asyncio.sleep(0)
    third = await waiting[2]
    assert (window.lines, window.asking.total()) == (3, 2)
    for one in (first, third, waiting[1].result()):
        one.leave()
    assert (window.lines, window.asking.total()) == (0, 0)
    given = asyncio.ensure_future(window.enter("m"))
    await asyncio.sleep(0)
    given.cancel()
    with suppress(asyncio.CancelledError):
        (await given).leave()
    assert (window.lines, window.asking.total()) == (0, 0)


async def test_lines_that_ended_together_do_not_begin_together():
    """Each of them as far behind the one before as ends are from each other, when they are spread evenly, or nearly."""
    window, loop, begun = LineWindow(10, spread=1.0), asyncio.get_running_loop(), []

    async def line(seconds: float) -> None:
        place = await window.enter("m")
        begun.append(loop.time())
        place.taken()
        await asyncio.sleep(seconds)  # its answer
        place.leave()

    await asyncio.gather(*(line(0.2) for _ in range(5)))
    gaps = [after - before for before, after in itertools.pairwise(begun)]
    assert min(gaps) >= 0.015, "the first ones, too"
    begun.clear()
    await asyncio.gather(*(line(0.05) for _ in range(8)))
    gaps = [after - before for before, after in itertools.pairwise(begun)]
    assert all(gap >= min(0.018, 0.045 / number) for number, gap in enumerate(gaps, 1)), gaps
    assert sum(gaps) < 1.0, "and no further"
    assert (window.lines, window.asking.total()) == (0, 0)


async def test_a_model_without_room_holds_up_no_other():
    window = LineWindow(10, spread=0)
    for _ in range(2):
        await window.enter("full")
    waiting = asyncio.ensure_future(window.enter("full"))
    await asyncio.sleep(0)
    place = await window.enter("roomy")
    assert not waiting.done()
    place.leave()
    waiting.cancel()


async def test_a_turn_that_is_due_is_given_whoever_comes_in_that_moment():
    """A line comes as the turn of another has begun and its timer has not run yet."""
    window = LineWindow(10, spread=1000.0)
    (await window.enter("m")).taken()
    waiting = asyncio.ensure_future(window.enter("m"))
    await asyncio.sleep(0)
    window._paces["m"].next_at = asyncio.get_running_loop().time()
    late = asyncio.ensure_future(window.enter("m"))
    async with asyncio.timeout(5):
        place = await waiting
    assert not late.done()
    place.leave()
    late.cancel()


async def test_an_input_that_was_looked_at_is_run_whatever_the_bounds_are_now(place):
    """The next gateway may take shorter bodies."""
    place.answers.let(1)
    async with place.gateway():
        batch = await place.begin(line("long", body={"prompt": "a" * 3000}), *lines("b", "c"))
        await place.done(batch, 1)
    place.answers.let(10)
    async with place.gateway(most_bytes=100):
        found = await place.until(batch)
    assert (found.status, found.completed, found.failed) == ("completed", 3, 0)
    stopped = await place.begin(line("long", body={"prompt": "d" * 3000}), *lines("e"))
    await place.store.add_file(stored_file("t"))
    async with place.store.claim(stopped) as claim:
        await claim.save(replace(stopped, status="in_progress", total=2))
    place.now += 601
    async with place.gateway(most_bytes=100):
        found = await place.until(stopped)
    assert (found.status, found.failed) == ("expired", 2)


async def test_a_store_that_is_away_for_a_look_costs_no_line(place, monkeypatch):
    """The claim says whether the batch is run here."""
    found, looks = place.store.batch, []

    async def away(tenant, id):
        looks.append(id)
        if len(looks) < 5:
            raise OSError("it does not answer")
        return await found(tenant, id)

    place.answers.let(0)
    async with place.gateway():
        batch = await place.begin(*lines("a", "b"))
        await eventually(lambda: place.answers.running == 2)
        monkeypatch.setattr(place.store, "batch", away)
        await eventually(lambda: len(looks) > 6)
        place.answers.let(2)
        assert (await place.until(batch)).completed == 2
    assert place.answers.asked == {"a": 1, "b": 1}
