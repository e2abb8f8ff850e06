"""Recorded workloads: the coding agents' format, excerpts, and the shapes that they can be given."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.bench.router.policies import TRACES
from penstock.traces.excerpt import excerpt
from penstock.traces.reading import RecordedAsk, Trace, load
from penstock.traces.shaping import (
    coarser,
    copied,
    crowded,
    half,
    new_tokens,
    paced,
    session_seconds,
    shrunk,
    with_common_prompt,
)

BLOCK = 4


def key(name: str) -> bytes:
    return name.encode().ljust(32, b".")


def talk(session: str, at: float, *lengths: int, common: int = 1) -> list[RecordedAsk]:
    """A session whose turns come one second after each other, each longer than the one before."""
    names = [f"common{number}" if number < common else f"{session}{number}" for number in range(max(lengths))]
    return [
        RecordedAsk(at + turn, length * BLOCK + 1, 2, tuple(map(key, names[:length])), session)
        for turn, length in enumerate(lengths)
    ]


TALKS = Trace("t", BLOCK, tuple(sorted([*talk("a", 0, 2, 3), *talk("b", 10, 4, 6, 8)], key=lambda ask: ask.at)))


def naive_new_tokens(trace: Trace) -> list[int]:
    known: set[bytes] = set()
    new = []
    for ask in trace.asks:
        cached = 0
        for one in ask.keys:
            if one not in known:
                break
            cached += trace.block_tokens
        new.append(ask.tokens - min(cached, ask.tokens - 1))
        known |= set(ask.keys)
    return new


def test_what_one_endless_cache_leaves() -> None:
    assert new_tokens(TALKS) == naive_new_tokens(TALKS) == [blocks * BLOCK + 1 for blocks in (2, 1, 3, 2, 2)]


def test_the_coding_agents_format(tmp_path: Path) -> None:
    rows = [
        {"session": "x", "block_size": 4, "tool_tokens": 5, "system_tokens": 4, "requests": [
            [0, 13, 7, 4, 0, -1, 0, "end", 0, 1], [5, 21, 0, 6, 3, 0, 0, "end", 0, 1]]},
        {"session": "y", "block_size": 4, "tool_tokens": 0, "system_tokens": 4, "requests": [[1, 8, 1, 2, 0, -1]]},
    ]  # fmt: skip
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    trace = load(path)
    first, other, second = trace.asks
    assert [(ask.at, ask.tokens, ask.output, len(ask.keys)) for ask in trace.asks] == [
        (0, 13, 7, 4),
        (1, 8, 1, 2),
        (5, 21, 1, 6),
    ]
    assert second.keys[:3] == first.keys[:3] and second.keys[3] != first.keys[3]
    assert other.keys[0] == first.keys[0], "the system prompt is common"
    assert other.keys[1] != first.keys[1]


@pytest.mark.parametrize("name", ["coding_agents", "conversation", "swe_agents", "synthetic"])
def test_the_traces_of_the_repository_can_be_read_and_cut(name: str, tmp_path: Path) -> None:
    source = TRACES / f"{name}.jsonl.gz"
    excerpt(source, tmp_path / "a.jsonl.gz", first=3)
    whole, part = load(source), load(tmp_path / "a.jsonl.gz")
    assert part.block_tokens == whole.block_tokens
    assert 3 <= len(part.asks) < len(whole.asks)
    if "requests" not in gzip.decompress(source.read_bytes()).decode()[:200]:
        assert [ask.tokens for ask in part.asks] == [ask.tokens for ask in whole.asks[:3]]
        assert new_tokens(part) == naive_new_tokens(Trace("", whole.block_tokens, whole.asks[:3]))


def test_halves_are_apart_and_together_all() -> None:
    for trace in (TALKS, Trace("t", BLOCK, tuple(RecordedAsk(at, 4, 1, (), "") for at in range(5)))):
        first, second = half(trace, second=False), half(trace, second=True)
        assert len(first.asks) + len(second.asks) == len(trace.asks)
        assert first.asks[0].at == second.asks[0].at == 0
    assert {ask.session for ask in half(TALKS, second=True).asks} == {"b"}


def test_a_common_prompt_is_in_front_of_all() -> None:
    more = with_common_prompt(TALKS, 11)
    assert len({ask.keys[:2] for ask in more.asks}) == 1
    assert [ask.tokens for ask in more.asks] == [ask.tokens + 8 for ask in TALKS.asks]
    assert sum(new_tokens(more)) == sum(new_tokens(TALKS)) + 8


def test_another_pace_and_other_lengths() -> None:
    assert [ask.at for ask in paced(TALKS, 6).asks] == [0, 0.5, 5, 5.5, 6]
    short = shrunk(TALKS, 2)
    assert [(ask.tokens, ask.output, len(ask.keys)) for ask in short.asks] == [
        (max(1, ask.tokens // 2), 1, len(ask.keys) // 2) for ask in TALKS.asks
    ]
    large = coarser(TALKS, 2 * BLOCK)
    assert large.block_tokens == 2 * BLOCK
    assert [ask.keys for ask in large.asks] == [ask.keys[1::2] for ask in TALKS.asks]
    assert coarser(TALKS, 1) == TALKS


def test_copies_have_nothing_in_common_and_come_at_other_times() -> None:
    alone = replace(TALKS, asks=tuple(replace(ask, session="") for ask in TALKS.asks))
    three = copied(alone, 3)
    assert len(three.asks) == 3 * len(alone.asks) and not three.has_sessions
    assert sorted(three.asks, key=lambda ask: ask.at) == list(three.asks)
    assert {ask.at for ask in alone.asks} <= {ask.at for ask in three.asks}
    assert three.asks[-1].at <= alone.asks[-1].at
    assert len({ask.keys[0] for ask in three.asks}) == 3 * len({ask.keys[0] for ask in alone.asks})
    assert sum(new_tokens(three)) >= 3 * sum(new_tokens(alone))
    assert copied(alone, 1).asks == alone.asks


def test_a_crowd_is_as_dense_as_it_should_be_and_shares_what_sessions_shared() -> None:
    crowd = crowded(TALKS, concurrent=1.5, requests=200)
    assert len(crowd.asks) == 200
    assert session_seconds(TALKS) == 3
    begins: dict[str, list[float]] = {}
    for ask in crowd.asks:
        begins.setdefault(ask.session, []).append(ask.at)
    whole = [times for times in begins.values() if times[-1] < crowd.asks[-1].at]
    assert sum(times[-1] - times[0] for times in whole) / crowd.asks[-1].at == pytest.approx(1.5, rel=0.1)
    assert len({ask.keys[0] for ask in crowd.asks}) == 1, "the common beginning"
    assert len({ask.keys[1] for ask in crowd.asks}) == len(begins), "and nothing else"
    assert {ask.session for ask in crowd.asks} == begins.keys()
    assert crowd.asks[-1].at - max(times[0] for times in begins.values()) < 1.0, "sessions begin to the end"
