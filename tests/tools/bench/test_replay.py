"""Replays: against a plain LRU, against every schedule there is, and what traces may look like."""

from __future__ import annotations

import gzip
import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.bench.evict.__main__ import replay as command
from penstock.bench.evict.offline import Clairvoyant, Future
from penstock.bench.evict.run import ReplayRates, Saved, TraceReplay
from penstock.bench.evict.table import HINTED, OFFLINE, jobs, play
from penstock.kv.cost import PrefillCost
from penstock.kv.eviction import POLICIES, Lru, make_policy
from penstock.traces.reading import ROOT, RecordedAsk, Trace, TraceError, load
from penstock.traces.shaping import overlaid

FLAT = PrefillCost(1.0, 1 << 60)
RATES = ReplayRates(FLAT, 1e9)
APART_S = 1000.0
"""Between requests: none of them overlap."""


def node(path: tuple[int, ...]) -> bytes:
    return bytes(path).ljust(32, b"\xff")


def trace_of(paths: list[tuple[int, ...]]) -> Trace:
    """One request per path in a tree; each step of it is a block of one token."""
    asks = [
        RecordedAsk(at * APART_S, len(path) + 1, 1, tuple(node(path[: end + 1]) for end in range(len(path))), "")
        for at, path in enumerate(paths)
    ]
    return Trace("test", 1, tuple(asks))


PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8)


def lru_hits(trace: Trace, capacity: int) -> int:
    """Blocks found, by a list in the order of use whose tails go first."""
    order: OrderedDict[bytes, None] = OrderedDict()
    hits = 0
    for ask in trace.asks:
        for key in ask.keys:
            if key not in order:
                break
            hits += 1
        for key in reversed(ask.keys):
            order.pop(key, None)
            order[key] = None
        while len(order) > capacity:
            order.popitem(last=False)
    return hits


def best_hits(trace: Trace, capacity: int, number: int = 0, stored: frozenset[bytes] = frozenset()) -> int:
    """Over every choice of victims: a leaf that the running request doesn't use, whenever room is needed."""
    if number == len(trace.asks):
        return 0
    keys = trace.asks[number].keys
    hits = next((at for at, key in enumerate(keys) if key not in stored), len(keys))
    parents = {ask.keys[at]: ask.keys[at - 1] for ask in trace.asks for at in range(1, len(ask.keys))}
    wanted = stored | set(keys)
    ways, todo = {wanted}, max(0, len(wanted) - capacity)
    for _ in range(todo):
        ways = {
            way - {leaf} for way in ways for leaf in way - set(keys) if not any(parents.get(one) == leaf for one in way)
        }
    return hits + max((best_hits(trace, capacity, number + 1, way) for way in ways), default=0)


def hits_of(trace: Trace, saved: Saved) -> int:
    return round(saved.block_hit * sum(len(ask.keys) for ask in trace.asks))


@given(PATHS, st.integers(3, 6))
def test_lru_through_the_table_is_lru(paths: list[tuple[int, ...]], capacity: int) -> None:
    trace = trace_of(paths)
    assert hits_of(trace, TraceReplay(trace, RATES).run([capacity], Lru)) == lru_hits(trace, capacity)


@given(PATHS, st.integers(3, 4))
@settings(max_examples=200)
def test_who_knows_the_future_finds_as_many_blocks_as_any_schedule_could(
    paths: list[tuple[int, ...]], capacity: int
) -> None:
    trace = trace_of(paths)
    replay = TraceReplay(trace, RATES)
    saved = replay.run([capacity], lambda: Clairvoyant(Future(trace), "farthest", FLAT, replay.at))
    assert hits_of(trace, saved) == best_hits(trace, capacity)


@given(PATHS, st.integers(3, 6), st.sampled_from(POLICIES))
def test_with_room_for_all_every_policy_finds_all(paths: list[tuple[int, ...]], capacity: int, name: str) -> None:
    trace = trace_of(paths)
    replay = TraceReplay(trace, RATES)
    saved = replay.run([trace.blocks], lambda: make_policy(name, replay.clock))
    seen: set[bytes] = set()
    again = 0
    for ask in trace.asks:
        again += len(seen & set(ask.keys))
        seen |= set(ask.keys)
    assert hits_of(trace, saved) == again
    assert (saved.evictions, saved.full) == (0, 0)
    assert saved.seconds_saved == pytest.approx(again), "a token a block, a second a token"


def test_two_tiers_hold_what_one_of_both_sizes_holds() -> None:
    paths = [(at % 6, 0, 0) for at in range(30)]
    trace = trace_of(paths)
    one = TraceReplay(trace, RATES).run([18], Lru)
    two = TraceReplay(trace, RATES).run([6, 18], Lru)
    small = TraceReplay(trace, RATES).run([6], Lru)
    assert two.block_hit == one.block_hit > small.block_hit == 0.0
    assert (two.below, two.evictions) == (1.0, 0)
    assert two.moves == 18, "each block is written once: what is brought up leaves its copy"


def test_blocks_of_a_running_request_are_not_evicted() -> None:
    trace = trace_of([(0, 0, 0), (1, 1, 1)])
    together = Trace("test", 1, (replace(trace.asks[0], output=1000), replace(trace.asks[1], at=1.0)))
    saved = TraceReplay(together, ReplayRates(FLAT, 1.0)).run([3], Lru)
    assert (saved.full, saved.evictions) == (3, 0)


def test_a_hint_that_a_session_has_ended_frees_its_blocks_first() -> None:
    """An ended session's blocks are the latest used, so that without the hint others go."""
    turns = [("keeps", (0, 0)), ("ends", (1, 1)), ("ends", (1, 1)), ("new", (2, 2)), ("keeps", (0, 0))]
    plain = trace_of([path for _, path in turns])
    asks = [replace(ask, session=name) for ask, (name, _) in zip(plain.asks, turns, strict=True)]
    trace = Trace("test", 1, tuple(asks))
    found = [hits_of(trace, saved) for job, saved in play(trace, jobs(trace, True), RATES) if job.policy == HINTED]
    assert found
    replays = [TraceReplay(trace, RATES, hints=hints) for hints in (False, True)]
    hits = [hits_of(trace, one.run([4], lambda one=one: make_policy("worth", one.clock))) for one in replays]
    assert hits == [2, 4]


def test_all_policies_are_replayed_at_all_sizes() -> None:
    trace = trace_of([(at % 4, 0, 0) for at in range(12)])
    todo = jobs(trace, quick=False)
    assert {job.policy for job in todo} == {*POLICIES, OFFLINE}
    assert sum(len(job.capacities) == 1 for job in todo) >= 6 * 4
    assert {len(job.capacities) for job in todo} == {1, 2}
    assert [job for job, _ in play(trace, todo, RATES)] == todo


def written(path: Path, rows: list[dict[str, object]]) -> Path:
    with gzip.open(path, "wt") if path.name.endswith(".gz") else open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


IDS = [
    {"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
    {"timestamp": 1000, "input_length": 1024, "output_length": 9, "hash_ids": [7, 8]},
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_trace_with_ids(tmp_path: Path, name: str) -> None:
    trace = load(written(tmp_path / name, IDS))
    assert (trace.name, trace.block_tokens, trace.blocks, trace.has_sessions) == ("a", 512, 3, False)
    assert [(ask.at, ask.tokens, ask.output) for ask in trace.asks] == [(0.0, 1024, 9), (2.0, 1100, 5)]
    assert trace.asks[1].keys[:2] == trace.asks[0].keys and ROOT not in trace.asks[0].keys


def test_a_trace_with_texts(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 2_000_000, "input": "a" * 64 + "b" * 10, "output": "x" * 8, "session_id": "s"},
        {"timestamp": 4_000_000, "input": "a" * 64 + "c" * 64, "output": "", "session_id": "s"},
    ]
    trace = load(written(tmp_path / "texts.jsonl", rows))
    first, second = trace.asks
    assert (trace.block_tokens, first.tokens, first.output, second.at) == (16, 19, 2, 2.0)
    assert first.keys[0] == second.keys[0] and first.keys[1] != second.keys[1]
    assert trace.has_sessions


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("none.jsonl", None, "no such file"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023,1,2\n", "without block ids nothing is known"),
        ("a.jsonl", "no json", "not JSON lines"),
        ("a.jsonl", "", "no request"),
        ("a.jsonl", '{"a": 1}\n', "neither hash_ids, nor input"),
        ("a.jsonl", json.dumps(IDS[0]) + "\n" + json.dumps(IDS[0] | {"hash_ids": [8, 7]}), "follows two different"),
    ],
)
def test_a_trace_that_can_not_be_replayed(tmp_path: Path, name: str, text: str | None, why: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(TraceError, match=why):
        load(tmp_path / name)


def test_overlaid_sessions_begin_soon_after_each_other_at_their_own_pace() -> None:
    asks = [RecordedAsk(100.0 * at, 1, 1, (node((at,)),), "ab"[at // 2]) for at in range(4)]
    found = overlaid(Trace("t", 1, tuple(asks)))
    assert [(ask.at, ask.session) for ask in found.asks] == [(0.0, "a"), (50.0, "b"), (100.0, "a"), (150.0, "b")]


def test_the_command_says_one_object_per_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [IDS[0] | {"session": 1, "timestamp": at} for at in range(3)]
    path = written(tmp_path / "talk.jsonl", rows)
    assert command(path, overlay=True, quick=True) == 0
    head, *lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (head["trace"], head["overlay"], head["replays"]) == ("talk, overlaid", True, len(lines))
    assert {line["policy"] for line in lines} == {*POLICIES, HINTED, OFFLINE}
    assert command(tmp_path / "none.jsonl") == 2
    assert command(written(tmp_path / "ids.jsonl", IDS), overlay=True) == 2
    assert "no such file\nit names no sessions" in capsys.readouterr().err
