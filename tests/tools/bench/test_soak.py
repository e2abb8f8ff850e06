"""`penstock bench soak`: what is drawn, what is counted and what its figures say; the mesh is in tests/mesh."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from penstock.bench.harness import BenchReport
from penstock.bench.measured.document import section
from penstock.bench.soak.asking import SoakOutcome, SoakWish
from penstock.bench.soak.asks import TURNS, SoakAsk, drawn, next_turn
from penstock.bench.soak.faults import FaultPlan, SoakFault, needed_beside
from penstock.bench.soak.heard import SoakAnswer, wrong_beginning, wrong_tokens
from penstock.bench.soak.leaks import held, summed
from penstock.bench.soak.load import SoakPool
from penstock.bench.soak.memory import MemoryLog
from penstock.bench.soak.options import SoakOptions
from penstock.bench.soak.report import SoakReport
from penstock.bench.soak.tally import SoakTally, slower

SERVICES = ("decode-0", "decode-1", "draft", "gateway-0", "gateway-1", "kvstore", "prefill-0", "redis", "router-0")
ASK = SoakAsk("chat 1", "/v1/chat/completions", {"model": "m"})


def faults(seed: int, count: int, *, sparing: bool = False) -> list[SoakFault]:
    plan = FaultPlan(SERVICES, seed, 4.0)
    return [plan.next(sparing=sparing) for _ in range(count)]


def event(*ids: int, id: str = "", index: int = 0, finish: str | None = None, **delta: Any) -> list[bytes]:
    """The lines of an event that brings these tokens; their text is their numbers."""
    delta = {"content": "".join(map(str, ids)), **delta}
    choice = {"index": index, "delta": delta, "finish_reason": finish, "token_ids": list(ids)}
    data = b"data: " + json.dumps({"choices": [choice], "usage": None}).encode()
    return [f"id: {id}".encode(), data] if id else [data]


def heard(*events: Sequence[bytes], answer: SoakAnswer | None = None) -> SoakAnswer:
    answer = answer or SoakAnswer()
    for at, lines in enumerate(events):
        for line in lines:
            answer.line(line, float(at))
    return answer


def outcome(answer: SoakAnswer, name: str = "1-a 0", **fields: Any) -> SoakOutcome:
    wish = SoakWish(name=name, ask=ASK, api_key="k", gateway=0, streams=True)
    return SoakOutcome(wish, answer, **fields)


def test_the_same_seed_draws_the_same() -> None:
    assert faults(1, 50) == faults(1, 50) != faults(2, 50)
    assert drawn(1, 50) == drawn(1, 50) != drawn(2, 50)
    pool = SoakPool(drawn(1, 50), {ask.name: heard(event(1, 2)) for ask in drawn(1, 50)})
    options = SoakOptions()
    wishes, others = ([pool.wish(options, phase, number) for number in range(2000)] for phase in ("first", "last"))
    assert [replace(one, name="") for one in wishes] == [replace(one, name="") for one in others]
    assert wishes[0].name == "1-first 0"
    assert 0.25 < sum(wish.leaves_at is not None for wish in wishes) / 2000 < 0.35
    assert {wish.gateway for wish in wishes} == {0, 1} and len({wish.api_key for wish in wishes}) == 2


def test_every_service_is_struck_in_every_way() -> None:
    found = Counter((fault.act, fault.service) for fault in faults(3, 4000))
    assert len(found) == 4 * len(SERVICES)
    assert {fault.hold_s for fault in faults(3, 100) if fault.act == "kill"} == {0.0}
    assert all(2.0 <= fault.after_s <= 6.0 for fault in faults(3, 100))


def test_the_first_of_each_kind_is_spared() -> None:
    struck = {fault.service for fault in faults(3, 4000, sparing=True) if fault.act != "short"}
    assert struck == {"decode-1", "gateway-1"}


def test_one_gateway_and_one_router_are_down_at_a_time() -> None:
    assert needed_beside("gateway-1", SERVICES) == ["gateway-0"]
    assert needed_beside("decode-1", SERVICES) == needed_beside("redis", SERVICES) == []


def test_requests_are_of_all_kinds_and_sessions_go_on() -> None:
    asks = drawn(1, 200)
    assert len({ask.name for ask in asks}) == 200
    assert {ask.name.split()[0] for ask in asks} == {"chat", "text", "schema", "tool", "several", "session"}
    ask: SoakAsk | None = next(ask for ask in asks if ask.session)
    turns = []
    while ask is not None:
        turns.append(ask)
        ask = next_turn(ask, "I know.")
    assert len(turns) == TURNS and len({turn.name for turn in turns}) == TURNS
    assert [message["role"] for message in turns[1].body["messages"]] == ["user", "assistant", "user"]
    assert next_turn(next(ask for ask in asks if not ask.session), "I know.") is None


def test_what_came_after_the_last_id_is_heard_again() -> None:
    answer = heard(event(1, id="t-1"), event(2), event(3))
    assert answer.again() == "t-1"
    assert [choice.ids for choice in answer.choices.values()] == [[1]]
    whole = heard(event(2, 3, id="t-3"), [b"data: [DONE]"], answer=answer)
    assert (whole.choices[0].ids, whole.choices[0].text, whole.over) == ([1, 2, 3], "123", True)


def test_an_error_event_is_no_end() -> None:
    answer = heard(event(1, id="t-1"), [b'data: {"error": {"message": "no"}}', b"data: [DONE]"])
    assert answer.error and not answer.over
    answer.again()
    assert not answer.error


def test_a_call_comes_in_pieces_or_whole() -> None:
    pieces = [{"index": 0, "function": {"name": "look"}}], [{"index": 0, "function": {"arguments": '{"a": 1}'}}]
    streamed = heard(*(event(n, tool_calls=piece, content=None) for n, piece in enumerate(pieces)))
    whole = SoakAnswer()
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    choice = {"index": 0, "message": {"content": None, "tool_calls": [call]}, "token_ids": [0, 1]}
    whole.whole({"choices": [choice]}, 1.0)
    assert streamed.choices == whole.choices and whole.choices[0].calls == {0: 'look{"a": 1}'}
    assert whole.over


def test_wrong_tokens_are_counted() -> None:
    right = heard(event(1, 2, 3), event(4, 5, index=1))
    assert wrong_tokens(heard(event(1, 2, 3), event(4, 5, index=1)), right) == 0
    assert wrong_tokens(heard(event(1, 9, 3), event(4, index=1)), right) == 2
    assert wrong_tokens(heard(event(1, 2, 3, 7)), right) == 3
    assert wrong_tokens(heard(event(1, 2, 3, content="?"), event(4, 5, index=1)), right) == 1
    assert wrong_tokens(heard(event(1, 2, 3, finish="stop"), event(4, 5, index=1)), right) == 1


def test_who_left_has_the_beginning() -> None:
    right = heard(event(1, 2, 3))
    assert wrong_beginning(SoakAnswer(), right) == wrong_beginning(heard(event(1, 2)), right) == 0
    assert wrong_beginning(heard(event(1, 3)), right) == 1
    assert wrong_beginning(heard(event(1, 2, 3, 4)), right) == 1
    assert wrong_beginning(heard(event(1, content="x")), right) == 1


def test_outcomes_are_counted() -> None:
    right = heard(event(1), event(2), event(3), [b"data: [DONE]"])
    tally = SoakTally({ASK.name: right})
    tally.take(outcome(right))
    tally.take(outcome(heard(event(1)), left=True, again=2))
    tally.take(outcome(heard(event(1), event(7)), errors=["status 500: no"]))
    tally.take(outcome(SoakAnswer(), lost="no gateway answered"))
    tally.take_line("line 1", ASK.name, None)
    tally.take_line("line 2", ASK.name, right)
    assert (tally.done, tally.left, tally.lost, tally.wrong) == (6, 1, 2, 2)
    assert (tally.again, tally.errors, tally.pause_s) == (2, 1, 1.0)
    assert len(tally.problems) == 3 and tally.told == ["1-a 0, chat 1: status 500: no"]


def test_latencies_of_the_same_requests_are_compared() -> None:
    first = [outcome(SoakAnswer(), f"1-first {n}", ended_at=1.0 + n) for n in range(10)]
    last = [outcome(SoakAnswer(), f"1-last {n}", ended_at=2.0 * (1 + n)) for n in range(10)]
    assert slower(first, last) == (2.0, pytest.approx(2.0))
    last[9].left, last[9].ended_at = True, 1000.0
    assert slower(first, last)[0] == 2.0


IDLE = {
    "decode-0": {
        "vllm:num_requests_running": 0.0,
        "vllm:num_requests_waiting": 0.0,
        "vllm:kv_cache_usage_perc": 0.0,
        "penstock_queued_tokens": 0.0,
        "penstock_shared_pages": 0.0,
        "descriptors": 30.0,
        "threads": 20.0,
        "penstock_tasks": 15.0,
    },
    "redis": {"descriptors": 12.0, "threads": 4.0},
}


def test_what_is_held_at_rest_is_a_leak() -> None:
    assert held(IDLE, IDLE) == []
    now = {name: {**figures} for name, figures in IDLE.items()}
    now["decode-0"] |= {"vllm:kv_cache_usage_perc": 0.25, "descriptors": 80.0, "threads": 21.0}
    now["redis"]["descriptors"] = 100.0
    assert held(now, IDLE) == [
        "decode-0: vllm:kv_cache_usage_perc = 0.25",
        "decode-0: descriptors = 80, and was 30",
        "redis: descriptors = 100, and was 12",
    ]


def test_metrics_are_summed_over_their_labels() -> None:
    text = '# TYPE x gauge\nx{a="1"} 2.0\nx{a="2"} 3.5\n# TYPE y counter\ny_total 1.0\n'
    assert summed(text) == {"x": 5.5, "y_total": 1.0}


def test_growth_is_that_of_the_later_half_of_the_longest_life() -> None:
    log = MemoryLog()
    log.lives["decode-0", 1] = [(float(at), 1e6 * min(at, 50)) for at in range(200)]
    log.lives["decode-1", 2] = [(float(at), 1e6 * at) for at in range(150)]
    log.lives["router-0", 3] = [(float(at), 1e6 * at) for at in range(160)]
    log.lives["draft", 4] = [(float(at), 1e6 * at) for at in range(100)]
    assert log.growth() == {"decode": pytest.approx(0.0), "router": pytest.approx(79e6)}


def test_figures_and_their_section() -> None:
    tally = SoakTally({}, done=100, left=30, lost=1, tokens=5000, pause_s=2.5)
    report = SoakReport(
        seed=9,
        tally=tally,
        faults={"kill draft": 3, "short redis": 1},
        leaks=["router-0: charged requests = 1"],
        growth={"decode": 2e6, "router": 40e6},
        median_ratio=1.05,
        tail_ratio=1.3,
        seconds=20.0,
        defects=["decode-0: background task failed"],
    )
    made = {one.id: one for one in report.figures()}
    assert (made["streams_lost"].value, made["streams_lost"].met) == (1, False)
    assert (made["tokens_wrong"].met, made["leaks"].met, made["latency_last_vs_first"].met) == (True, False, True)
    assert (made["memory_growth_mb"].value, made["memory_growth_mb"].met) == (40.0, False)
    assert made["streams_lost"].against == "100 requests, 4 faults, seed 9"
    assert report.problems == [
        "leaked: router-0: charged requests = 1",
        "a defect: decode-0: background task failed",
    ]
    young = {one.id: one for one in replace(report, growth={}).figures()}
    assert (young["memory_growth_mb"].value, young["memory_growth_mb"].met) == (None, None)
    text = section(BenchReport("soak", report.figures()).json())
    assert "growth of memory, decode, MB" in text and "n/a" not in text
