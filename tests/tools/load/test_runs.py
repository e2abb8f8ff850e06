"""Whole runs: through processes of the client, and through the command line, before a real server."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.tools.load.chat_server import Said, serving
from tests.tools.load.support import mooncake

from penstock.load.errors import LoadError
from penstock.load.options import LoadOptions
from penstock.load.processes import ClientProcesses
from penstock.load.report import LoadRun, report
from penstock.load.running import run

ROWS = [(40 * number, 1024, 4, [0, number + 1]) for number in range(9)]


async def command(*arguments: str) -> tuple[int, str, str]:
    """Status, standard output and standard error of `penstock`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, error = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), error.decode()


async def played(url: str, trace: Path | None, **options: Any) -> LoadRun:
    async with asyncio.timeout(120):
        return await run(LoadOptions(url=url, **options), trace, ClientProcesses())


async def test_processes_share_the_sessions_and_all_that_they_tell_is_there_once(tmp_path: Path) -> None:
    trace = mooncake(tmp_path / "m.jsonl.gz", ROWS)
    async with serving() as server:
        done = await played(server.url, trace, processes=3, seed="s")
    assert len(server.asked) == len(done.records) == 9
    assert sorted(int(record.session) for record in done.records) == [*range(9)]
    assert {record.process: 1 for record in done.records}.keys() == {0, 1, 2}
    assert all(record.process == int(record.session) % 3 for record in done.records)
    assert sorted(record.scheduled for record in done.records) == pytest.approx([0.04 * n for n in range(9)], abs=1e-6)
    assert all(record.sent >= record.scheduled for record in done.records)
    found = report(done)
    assert found["request_count"]["avg"] == 9
    assert found["time_to_first_token"]["count"] == 9
    exact = sorted(1e3 * (record.ttft or 0) for record in done.records)
    assert found["time_to_first_token"]["p50"] == pytest.approx(exact[4])
    prompts = {body["messages"][0]["content"].split()[: 512 // 2].__repr__() for body in server.asked}
    assert len(prompts) == 1, "the block that all have is the same text in all processes"
    assert set(server.sessions) == {""}, "the trace names no sessions"


async def test_rounds_have_words_of_their_own_and_are_told_apart(tmp_path: Path) -> None:
    trace = mooncake(tmp_path / "m.jsonl.gz", ROWS[:2])
    async with serving() as server:
        done = await played(server.url, trace, rounds=3)
    found = report(done)
    assert len(found["rounds"]) == 3
    assert [each["request_count"]["avg"] for each in found["rounds"]] == [2] * 3
    assert len({body["messages"][0]["content"] for body in server.asked}) == 6


async def test_the_same_seed_is_the_same_load(tmp_path: Path) -> None:
    texts = []
    for seed in ("one", "one", "two"):
        async with serving() as server:
            await played(server.url, None, mix=("turns=2,new=30,output=4,spread=0.4",), limit=3, seed=seed)
        texts.append(sorted(body["messages"][0]["content"] for body in server.asked))
    assert texts[0] == texts[1] != texts[2]


async def test_a_server_that_counts_nothing_is_loaded_all_the_same() -> None:
    async with serving() as server:
        server.counts = False
        done = await played(server.url, None, mix=("new=100,output=6",), limit=3)
    found = report(done)
    assert (found["request_count"]["avg"], found["output_sequence_length"]["avg"]) == (3, 6), "its parts are counted"
    assert "a token is taken for 0.75 words" in found["notes"][0]
    assert "input_sequence_length" not in found and "overall_usage_prompt_cache_read_pct" not in found


async def test_completions_are_asked_for_with_ids_of_tokens() -> None:
    """Of each part the server tells how many tokens it has: the first has one, the others two."""
    mix = {"mix": ("turns=2,new=40,output=6,agents=1",), "limit": 2, "endpoint": "completions"}
    async with serving() as server:
        done = await played(server.url, None, **mix)
        server.tells_ids = False
        untold = await played(server.url, None, **mix)
    assert len(done.records) == 6 and report(done)["error_summary"] == []
    assert all(body["return_token_ids"] and min(body["prompt"]) >= 300 for body in server.asked)
    assert all(max(body["prompt"]) < 1006 for body in server.asked), "those of the answers are from 1000 on"
    for record in done.records:
        assert record.prompt_tokens == record.planned_tokens
        assert (record.sizes, record.tokens, len(record.token_gaps)) == ([1, 2, 2, 1], 6, 5)
        assert record.token_gaps[1] == record.token_gaps[3] == 0.0
    assert report(done)["inter_token_gap"]["count"] == 30
    assert not any("ids of its answers" in note for note in report(done)["notes"])
    assert all(record.tokens == 6 and not record.token_gaps for record in untold.records)
    assert "does not tell the ids of its answers" in "".join(report(untold)["notes"])


async def test_a_context_that_is_too_small_is_said() -> None:
    async with serving() as server:
        with pytest.raises(LoadError, match="fits into a context of 64 tokens"):
            await played(server.url, None, mix=("new=100",), context=64)


async def test_a_process_that_can_not_begin_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as server:
        monkeypatch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(LoadError, match="ended before it was ready"):
            await played(server.url, None, mix=("new=100",))


async def test_a_process_that_dies_ends_the_run() -> None:
    client = ClientProcesses()

    async def kills(body: object) -> Said:
        client._started[0].kill()
        return Said()

    async with serving(kills) as server, asyncio.timeout(120):
        with pytest.raises(LoadError, match="ended with -9"):
            await run(LoadOptions(url=server.url, mix=("new=100",), limit=2), None, client)


async def test_the_command_writes_what_it_was_asked_for(tmp_path: Path) -> None:
    trace = mooncake(tmp_path / "m.jsonl.gz", ROWS)
    out, html, records = (tmp_path / name for name in ("run.json", "run.html", "run.jsonl"))
    prices = tmp_path / "prices.toml"
    own, others = "input = 1.0\noutput = 2.0\n", "input = 7.0\noutput = 7.0\n"
    prices.write_text(f'currency = "EUR"\n[price.default]\n{others}[price."fake"]\n{own}')
    async with serving() as server:
        status, said, error = await command(
            *("load", str(trace), "--url", server.url, "--speed", "2", "--processes", "2", "--slo-ttft", "60"),
            *("--prices", str(prices), "--out", str(out), "--html", str(html), "--records", str(records)),
        )
        assert status == 0, error
        again = await command("load", str(trace), "--url", server.url, "--speed", "4", "--json", "--api-key", "secret")
    found = json.loads(out.read_text())
    assert "9 answered" in said and "TTFT" in said
    assert (found["request_count"]["avg"], found["good_request_fraction"]["avg"]) == (9, 1.0)
    assert found["total_cost"] == {"unit": "EUR", "avg": pytest.approx(sum(
        server.length(body) * 1e-6 + 4 * 2e-6 for body in server.asked[:9]
    ))}  # fmt: skip
    assert len(records.read_text().splitlines()) == 9
    assert html.read_text().startswith("<!doctype html>")
    assert again[0] == 0 and "secret" not in again[1]
    other = tmp_path / "other.json"
    other.write_text(again[1])
    status, said, error = await command("load", "compare", str(out), str(other), "--json")
    assert status == 0, error
    compared = json.loads(said)
    assert any("speed 2.0 and 4.0" in note for note in compared["notes"])
    assert {"time_to_first_token p50", "output_token_throughput"} <= {one["name"] for one in compared["metrics"]}


async def test_a_signal_ends_a_run_with_its_report(tmp_path: Path) -> None:
    """One answer never comes and one request is due in an hour; both are in the report."""
    waiting = asyncio.Event()

    async def answer(body: object) -> Said:
        if len(server.asked) > 1:
            waiting.set()
            await asyncio.Event().wait()
        return Said()

    trace = mooncake(tmp_path / "m.jsonl.gz", [(0, 64, 4, [1]), (50, 64, 4, [2]), (3_600_000, 64, 4, [3])])
    async with serving(answer) as server, asyncio.timeout(120):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.cli", "load", str(trace), "--url", server.url, "--json"),
            stdout=asyncio.subprocess.PIPE,
        )
        await waiting.wait()
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
    found = json.loads(out)
    assert process.returncode == 0 and found["was_cancelled"] is True
    answered, cancelled, unsent = (
        found[f"{name}_count"]["avg"] for name in ("request", "cancelled_request", "unsent_request")
    )
    assert (answered + cancelled, unsent) == (2, 1) and cancelled >= 1


async def test_a_run_without_an_answer_fails(tmp_path: Path) -> None:
    async def refuses(body: object) -> Said:
        return Said(status=500)

    async with serving(refuses) as server:
        status, said, _ = await command("load", "--mix", "new=10", "--limit", "3", "--url", server.url)
    assert status == 1 and "3 failed" in said and "∞" in said and "3 x Refused" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name a trace, or a mix"),
        (("missing.jsonl",), "missing.jsonl: no such file"),
        (("--mix", "new=10", "--speed", "0"), "--speed must be above 0, not 0"),
        (("--mix", "new=10", "--vocab", "300"), "--vocab must be above 300, not 300"),
        (("--mix", "new=10", "--max-think", "-1"), "--max-think must be 0 or more, not -1"),
        (("--mix", "new=10", "--extra", "[1]"), "--extra must be a JSON object"),
        (("--mix", "new=10", "--prices", "missing.toml"), "--prices: "),
        (("--mix", "new=10", "--url", "http://127.0.0.1:9"), "can't be reached"),
        (("--mix", "new=10", "--out", "missing/run.json"), "missing/run.json can't be written"),
        (("compare", "missing.json", "missing.json"), "missing.json can't be read"),
    ],
)
async def test_bad_input_is_named(arguments: tuple[str, ...], said: str) -> None:
    status, out, error = await command("load", *arguments)
    assert status == 2 and said in error and out == ""
