"""Requests are sent when they are due, their time counts from then on, and what becomes of each is told."""

from __future__ import annotations

import asyncio
import socket
from itertools import pairwise

import pytest
from tests.tools.load.chat_server import Said, at_once, serving
from tests.tools.load.support import WORDING, chain, plan, play, single, target

from penstock.load.mixes import mixed, parse_mix
from penstock.load.planning import Playing, planned
from penstock.load.playing import MonotonicClock, SessionsPlayer
from penstock.load.records import CANCELLED, LoadRecord


async def test_a_stall_is_in_the_latency_of_all_that_was_due_meanwhile() -> None:
    """The server says nothing until all requests are there. A client that waits for answers before it sends more would
    wait for ever; one that counts from when it sends would know of the last one's wait alone."""
    count, there = 20, asyncio.Event()
    arrived = 0

    async def stalled(body: object) -> Said:
        nonlocal arrived
        arrived += 1
        if arrived == count:
            there.set()
        await there.wait()
        return Said()

    asks = [single(number * 0.02, f"n{number}") for number in range(count)]
    async with serving(stalled) as server, asyncio.timeout(60):
        records = await play(server.url, plan(*asks))
    due = sorted(record.scheduled for record in records)
    assert due == pytest.approx([ask.at for ask in asks], abs=1e-6)
    for record in records:
        assert record.good and record.ttft is not None
        assert record.ttft >= due[-1] - record.scheduled
        assert record.latency >= record.ttft


async def test_a_session_that_waits_holds_up_no_other() -> None:
    """One session's answer comes when another has had three."""
    answers, free = 0, asyncio.Event()

    async def answer(body: dict) -> Said:
        nonlocal answers
        if "slow" not in server.sessions[-1]:
            answers += 1
            if answers == 3:
                free.set()
            return Said()
        await free.wait()
        return Said()

    slow, quick = chain("slow", (1.0, 2), think=0), chain("quick", (1.0, 2), (1.0, 3), (1.0, 4), think=0)
    async with serving(answer) as server, asyncio.timeout(60):
        records = await play(server.url, plan(*slow, *quick))
    assert sorted((record.session, record.good) for record in records) == [*[("quick", True)] * 3, ("slow", True)]


async def test_a_turn_is_due_when_the_one_before_has_ended_and_the_think_time_is_over() -> None:
    asks = chain("a", (1.0, 2), (1.0, 4), (1.0, 5), think=0.05)
    async with serving() as server:
        records = await play(server.url, plan(*asks))
    assert [record.turn for record in records] == [0, 1, 2]
    for before, after in pairwise(records):
        assert after.scheduled == pytest.approx(before.ended + 0.05, abs=1e-6)
        assert after.sent >= after.scheduled
    assert [len(body["messages"]) for body in server.asked] == [1, 3, 5]
    assert server.asked[2]["messages"][1] == {"role": "assistant", "content": " w0 w1"}
    assert len(set(server.sessions)) == 1


async def test_sub_agents_run_beside_each_other_and_the_main_agent_waits_for_all() -> None:
    """The server answers a sub-agent when both have asked."""
    both, asked = asyncio.Event(), 0

    async def answer(body: dict) -> Said:
        nonlocal asked
        if server.sessions[-1].endswith((".1", ".2")):
            asked += 1
            if asked == 2:
                both.set()
            await both.wait()
        return Said()

    trace = mixed(parse_mix(["turns=2,new=20,output=2,agents=2"]), 1, "seed")
    async with serving(answer) as server, asyncio.timeout(60):
        records = await play(server.url, planned(trace, Playing()))
    first, *subs, last = sorted(records, key=lambda record: record.scheduled)
    assert (first.agent, last.agent, {sub.agent for sub in subs}) == (0, 0, {1, 2})
    assert last.scheduled >= max(sub.ended for sub in subs)
    assert all(sub.scheduled >= first.ended for sub in subs)
    assert all(len(body["messages"]) == 3 for body in server.asked[1:3]), "they have the parent's turn and its answer"


class LateClock(MonotonicClock):
    """A client that is always late."""

    async def until(self, at: float) -> None:
        await super().until(at + 0.05)


async def test_what_the_client_is_late_is_told_and_counts() -> None:
    async with serving() as server:
        records = await play(server.url, plan(single(0.0, "a"), single(0.01, "b")), clock=LateClock())
    for record in records:
        assert record.sent - record.scheduled >= 0.05
        assert record.ttft is not None and record.ttft >= 0.05


async def test_more_requests_than_may_be_at_once_are_late() -> None:
    """Two files, three requests: the third is sent when one of the others has ended, and its time counts meanwhile."""
    came, second = [], asyncio.Event()

    async def answer(body: dict) -> Said:
        came.append(1)
        if len(came) == 2:
            second.set()
        await second.wait()
        return Said()

    async with serving(answer) as server, asyncio.timeout(60):
        records = await play(server.url, plan(*(single(0.0, name) for name in "abc")), at_once=2)
    last = max(records, key=lambda record: record.sent)
    assert last.sent >= min(record.ended for record in records)
    assert last.scheduled == 0.0 and last.ttft is not None and last.ttft > last.sent


@pytest.mark.parametrize(
    ("said", "kind", "status", "message"),
    [
        (Said(status=500), "Refused", 500, "not now"),
        (Said(status=429), "Refused", 429, "not now"),
        (Said(cut=True), "Incomplete", 200, "without a finish_reason"),
        (Said(error="out of memory"), "ErrorEvent", 200, "out of memory"),
    ],
    ids=["500", "429", "cut", "error"],
)
async def test_failures_have_a_kind_and_do_not_end_the_session(
    said: Said, kind: str, status: int, message: str
) -> None:
    async def once(body: dict) -> Said:
        return said if len(server.asked) == 1 else Said()

    async with serving(once) as server:
        first, second = await play(server.url, plan(*chain("a", (1.0, 2), (1.0, 4), think=0, output=6)))
    assert (first.error, first.status, first.good) == (kind, status, False)
    assert message in first.message
    assert second.good
    filler = server.asked[1]["messages"][1]
    assert filler["role"] == "assistant" and len(filler["content"].split()) == 3, "as long as the recorded answer"


async def test_no_server_and_one_that_never_answers() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else gets it
        [record] = await play(f"http://127.0.0.1:{closed.getsockname()[1]}", plan(single(0.0, "a")))
    assert (record.error, record.status) == ("ConnectionRefusedError", 0)

    async def never(body: object) -> Said:
        await asyncio.Event().wait()
        return Said()

    async with serving(never) as server:
        [record] = await play(server.url, plan(single(0.0, "a")), more={"timeout_s": 0.1})
    assert record.error == "Timeout" and "0.1 s" in record.message


async def test_refusals_are_tried_again_where_that_is_wanted() -> None:
    async def twice(body: object) -> Said:
        return Said(status=503, headers={"retry-after": "0"}) if len(server.asked) <= 2 else Said()

    async with serving(twice) as server:
        [record] = await play(server.url, plan(single(0.0, "a")), more={"retries": 2})
    assert record.good and record.refusals == 2 and len(server.asked) == 3


async def test_nothing_is_sent_that_is_due_after_the_duration() -> None:
    asks = [*chain("a", (1.0, 2), (1.0, 3), think=1000.0), single(2000.0, "late")]
    async with serving() as server:
        records = await play(server.url, plan(*asks, speed=1e4), duration_s=0.05)
    assert [(record.session, record.turn) for record in records] == [("a", 0)]


async def test_whoever_is_stopped_tells_what_was_in_flight() -> None:
    arrived = asyncio.Event()

    async def never(body: object) -> Said:
        arrived.set()
        await asyncio.Event().wait()
        return Said()

    records: list[LoadRecord] = []
    async with serving(never) as server:
        player = SessionsPlayer(target(server.url), WORDING, records.append)
        async with asyncio.TaskGroup() as tasks:
            playing = tasks.create_task(
                player.play(plan(single(0.0, "a"), single(3600.0, "b")).sessions, player.clock.now())
            )
            await arrived.wait()
            playing.cancel()
    [record] = records
    assert record.error == CANCELLED and record.cancelled and not record.good


async def test_the_usage_of_penstock_is_read_where_it_is_and_left_out_where_not() -> None:
    own = {"cached_tokens": {"worker": 3, "host": 4}, "drafted_tokens": 8, "accepted_tokens": 6, "other": [1]}
    usage = {"prompt_tokens_details": {"cached_tokens": 7}, "penstock": own, "cost": 0.25}

    async def answer(body: object) -> Said:
        return Said(usage=usage) if len(server.asked) == 1 else Said()

    async with serving(answer) as server:
        rich, plain = await play(server.url, plan(single(0.0, "a"), single(0.05, "b")))
    assert (rich.cached_tokens, rich.tiers, rich.drafted_tokens) == (7, {"worker": 3, "host": 4}, 8)
    assert (rich.accepted_tokens, rich.cost) == (6, 0.25)
    assert (plain.cached_tokens, plain.tiers, plain.drafted_tokens, plain.cost) == (None, None, None, None)
    assert rich.prompt_tokens == server.length(server.asked[0]) and rich.output_tokens == 2


async def test_calls_of_tools_are_answered_by_their_results() -> None:
    async def calls(body: object) -> Said:
        return Said(tokens=1, call="read_file") if len(server.asked) == 1 else Said()

    async with serving(calls) as server:
        await play(server.url, plan(*chain("a", (1.0, 2), (1.0, 6), think=0)))
    _, said, result = server.asked[1]["messages"]
    assert said["tool_calls"][0]["function"] == {"name": "read_file", "arguments": '{"target":"x"}'}
    assert (result["role"], result["tool_call_id"]) == ("tool", "call_7")


async def test_what_a_request_has() -> None:
    more = {"extra": {"temperature": 0}, "key": "secret", "ignore_eos": True}
    async with serving(at_once) as server:
        await play(server.url, plan(single(0.0, "a", output=9)), more=more)
        await play(server.url, plan(single(0.0, "a", output=9)), more={"ignore_eos": False, "session_header": ""})
    first, second = server.asked
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("fake", 9, 0)
    assert first["stream"] is True and first["stream_options"] == {"include_usage": True}
    assert first["ignore_eos"] is True and "ignore_eos" not in second
    assert server.sessions[0] and not server.sessions[1]
