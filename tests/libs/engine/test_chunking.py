"""Prompts beside running streams: the streams keep their pace, the prompts get on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.engine import Engine
from penstock.engine.pages import PagePool
from penstock.engine.request import Request, SamplingParams
from penstock.engine.sampling.choice import Chosen
from penstock.engine.scheduling.chunking import (
    LEAST_TOKENS,
    attainable_s,
    chunk_tokens,
    enough_tokens,
    patience,
    whole_tokens,
)
from penstock.engine.scheduling.live import new_live
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.situation import PromptRoom, StepLimits
from penstock.engine.stats import Counters
from penstock.engine.step.memory import PageMemory
from penstock.kv.spec import KvSpec

seconds = st.floats(0, 10)


@given(st.none() | st.floats(1e-4, 10), seconds, st.floats(0, 1e6), st.integers(1, 4096))
def test_the_budget_is_what_time_allows_and_never_nothing(target_s, step_s, rate, most):
    found = chunk_tokens(target_s, step_s, rate, most)
    assert min(LEAST_TOKENS, most) <= found <= most
    if target_s is None:
        assert found == most
    elif rate > 0:
        assert found <= LEAST_TOKENS or found / rate <= max(target_s - step_s, step_s / 2) * (1 + 1e-9)
        more = found + 1
        assert found == most or more / rate > max(target_s - step_s, step_s / 2) * (1 - 1e-9), "no time is left over"
        assert chunk_tokens(target_s * 2, step_s, rate, most) >= found


def test_before_anything_was_measured_a_step_has_a_few_tokens_of_a_prompt():
    assert [chunk_tokens(0.05, 0.0, 0.0, most) for most in (8, 64, 512)] == [8, 64, 64]
    assert attainable_s(0.05, 0.0, 0.0) == 0.05, "the target is believed"


@given(st.integers(0, 500), st.integers(0, 500))
def test_streams_wait_longer_for_a_queue_and_not_for_one_prompt(prompts, streams):
    found = patience(prompts, streams)
    assert 1 <= found <= 8
    if prompts <= 1:
        assert found == 1
    elif prompts - 1 == streams:
        assert found == 5
    assert patience(prompts + 1, streams) >= found >= patience(prompts, streams + 1)


@given(st.none() | st.floats(1e-3, 1), st.floats(0, 1), st.floats(0, 1e5), st.integers(16, 4096))
def test_a_prompt_is_short_while_streams_wait_no_longer_for_it_than_for_a_queue(target_s, step_s, rate, most):
    whole, enough = whole_tokens(target_s, step_s, rate, most), enough_tokens(target_s, rate)
    if target_s is None or not rate:
        assert (whole, enough) == (0, None), "steps are filled"
        return
    longest = chunk_tokens(patience(10**6, 1) * attainable_s(target_s, step_s, rate), step_s, rate, most)
    assert chunk_tokens(target_s, step_s, rate, most) <= whole == longest
    assert enough == LEAST_TOKENS or enough <= target_s * rate < enough + 1


def test_streams_that_have_become_more_are_measured_while_prompts_queue():
    """Every step has prompts, and one stream more every ten steps: what they cost follows, and prompts keep half of
    it, though the target can't be met."""
    counters, target_s, row_s, token_s = Counters(), 0.05, 0.005, 0.001
    counters.step(row_s, 0, 1)
    counters.step(64 * token_s, 64, 64)
    for at in range(400):
        streams = min(30, 1 + at // 10)
        chunk = (
            0 if counters.stale else chunk_tokens(target_s, counters.decode_step_s, counters.prefill_tokens_per_s, 512)
        )
        counters.step(streams * row_s + chunk * token_s, chunk, streams + chunk)
        assert counters.mixed <= 16, "one step in seventeen"
    assert counters.decode_step_s == pytest.approx(30 * row_s, rel=0.05)
    assert counters.prefill_tokens_per_s == pytest.approx(1 / token_s, rel=0.1)
    assert chunk == 0 or chunk == pytest.approx(15 * row_s / token_s, rel=0.15)


def sequence(ticket, length, tokens):
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return new_live(Request(str(ticket), (0,) * length, sampling), ticket, frozenset())


def turns_of_agents(room_of, sessions=8, turns=5, *, token_s=0.001, row_s=0.003, beside_s=0.0):
    """Sessions begin together, and each asks again as soon as it has its answer: (seconds to the first tokens of later
    turns, seconds in all), when `room_of` says how large steps are. Any prompt beside streams costs `beside_s`."""
    scheduler, counters, now = Scheduler(StepLimits(512, 64, 16), PagePool(1000)), Counters(), 0.0
    asked: dict[int, tuple[int, float]] = {}
    first: list[float] = []

    def ask(turn):
        ticket = len(asked)
        asked[ticket] = turn, now
        scheduler.add(sequence(ticket, 150, 60))

    for _ in range(sessions):
        ask(1)
    while len(first) < sessions * (turns - 1) or scheduler.stats().running:
        lives = scheduler.next_step({}, room=room_of(counters, *scheduler.crowd()))
        known = [live.run.known for live in lives]
        prefill, streams = sum(count for count in known if count > 1), known.count(1)
        took = 0.01 + row_s * streams + token_s * prefill + beside_s * bool(prefill and streams)
        now += took
        counters.step(took, prefill, sum(known))
        beginning = [live.ticket for live in lives if not live.generated and live.run.samples]
        ended = scheduler.commit(lives, [[Chosen(0)] * live.run.samples for live in lives])
        first += [now - asked[ticket][1] for ticket in beginning if asked[ticket][0] > 1]
        for end in ended:
            scheduler.drop(end.live)
            if asked[end.live.ticket][0] < turns:
                ask(asked[end.live.ticket][0] + 1)
    return first, now


FAST = {"token_s": 0.001, "row_s": 0.003, "beside_s": 0.0}
SLOW = {"token_s": 0.004, "row_s": 0.006, "beside_s": 0.0}
"""The smallest chunk takes longer than the target leaves."""
DEAR = {**SLOW, "beside_s": 0.037}


@pytest.mark.parametrize(
    ("sessions", "costs"),
    [*((sessions, costs) for costs in (FAST, SLOW) for sessions in (3, 8, 16)), (8, DEAR), (16, DEAR)],
)
def test_turns_of_agents_begin_at_once_and_last_no_longer(sessions, costs):
    """What a prompt costs the streams is no less when it is cut up, and its own wait is longer."""
    target_s = 0.05

    def cut(counters, prompts, streams):
        rate, step_s = counters.prefill_tokens_per_s, counters.decode_step_s
        patient_s = target_s * patience(prompts, streams)
        return PromptRoom(beside=0 if counters.stale else chunk_tokens(patient_s, step_s, rate, 512))

    def whole(counters, prompts, streams):
        rate, step_s = counters.prefill_tokens_per_s, counters.decode_step_s
        short, enough = whole_tokens(target_s, step_s, rate, 512), enough_tokens(target_s, rate)
        patient_s = attainable_s(target_s, step_s, rate) * patience(prompts, streams)
        beside = 0 if counters.stale else chunk_tokens(patient_s, step_s, rate, 512)
        return PromptRoom(beside=beside, whole=short, enough=enough)

    waits, took = turns_of_agents(whole, sessions, **costs)
    waits_cut, took_cut = turns_of_agents(cut, sessions, **costs)
    alone_s = 150 * costs["token_s"] + 0.01 + costs["beside_s"]
    assert median(waits) <= 1.5 * alone_s, "most of them meet no other prompt"
    assert median(waits) <= 0.5 * median(waits_cut)
    assert took <= 1.01 * took_cut


def simulate(target_s: float | None, decode_s: float, token_s: float, prompt: int = 3000) -> tuple[list[float], float]:
    """A long prompt joins four streams: (seconds of each step until its first token, seconds of a batch of them all)
    when a step takes `decode_s`, and `token_s` more per prompt token, growing with the prompt's length."""
    limits, pool, counters = StepLimits(512, 8, 16), PagePool(1000), Counters()
    scheduler = Scheduler(limits, pool)

    def step():
        chunk = chunk_tokens(target_s, counters.decode_step_s, counters.prefill_tokens_per_s, 512)
        chunk = 0 if counters.stale else chunk
        lives = scheduler.next_step({}, room=PromptRoom(beside=chunk))
        known = [live.run.known for live in lives]
        prefill = sum(count for count in known if count > 1)
        slower = 1 + max(live.length for live in lives) / 10_000
        took = (decode_s if prefill < sum(known) else 0.0) + prefill * token_s * slower
        counters.step(took, prefill, sum(known))
        scheduler.commit(lives, [[Chosen(0)] * live.run.samples for live in lives])
        return took

    for ticket in range(4):
        scheduler.add(sequence(ticket, 20, 10**6))
    for _ in range(20):
        step()
    late = sequence(9, prompt, 10**6)
    scheduler.add(late)
    times = []
    while late.generated == 0:
        times.append(step())
        assert len(times) < 10_000, "the prompt gets on"
    return times, decode_s + prompt * token_s


@pytest.mark.parametrize(
    ("target_s", "decode_s", "token_s"), [(0.1, 0.02, 0.001), (0.05, 0.001, 0.0001), (1, 0.1, 0.003)]
)
def test_running_streams_keep_their_pace(target_s, decode_s, token_s):
    times, _ = simulate(target_s, decode_s, token_s)
    free, _ = simulate(None, decode_s, token_s)
    assert max(free) > max(times)
    assert sorted(times)[len(times) // 2] <= 1.15 * target_s
    assert max(times) <= 1.5 * target_s, "also while the rate is learnt again"
    busy = sum(times[:-1]) / (len(times) - 1) if len(times) > 1 else target_s
    assert busy >= 0.8 * target_s, "and no time is given away"


def test_a_target_that_cannot_be_met_does_not_starve_prompts():
    """Decoding alone takes twice the target: each step grows by half, and the prompt needs three times its own time."""
    times, alone_s = simulate(0.02, 0.04, 0.001)
    assert max(times) <= 0.04 * 1.5 * 1.1
    assert sum(times) <= 4 * alone_s


@dataclass
class _Noting:
    """A model that answers at once, and notes how many rows of each step belong to whom."""

    memory: PageMemory
    steps: list[list[int]] = field(default_factory=list)
    packed = None

    def step(self, runs):
        self.steps.append([run.tokens for run in runs])
        return [[Chosen(7)] * run.samples for run in runs]


async def test_the_engine_keeps_to_it(config, monkeypatch):
    made = []

    def load(config, checkpoint):
        memory = PageMemory(checkpoint.config, 256, 16, torch.float32, torch.device("cpu"))
        made.append(_Noting(memory))
        return made[0], KvSpec(
            model="", tokenizer="", layout="", dtype="float32", block_size=16, block_bytes=memory.block_bytes
        )

    def request(name, length, tokens):
        return Request(name, (1,) * length, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))

    async def read(engine, request, begun=None):
        async for update in engine.generate(request):  # noqa: B007
            if begun is not None:
                begun.set()
        assert update.finish == "length"

    monkeypatch.setattr(Counters, "step", lambda *_, **__: None)
    async with Engine.open(replace(config, itl_target_ms=50), load=load) as engine, asyncio.TaskGroup() as tasks:
        engine._counters.decode_step_s, engine._counters.prefill_tokens_per_s = 0.02, 1000.0
        begun = asyncio.Event()
        tasks.create_task(read(engine, request("alone", 128, 300), begun))
        await begun.wait()
        await read(engine, request("long", 400, 2))
        await read(engine, request("short", 100, 2))
    assert made[0].steps[0] == [128], "no stream waits: the whole batch"
    both = [rows for rows in made[0].steps if len(rows) == 2]
    assert both == [*[[1, 30]] * 13, [1, 10], [1, 1], [1, 100], [1, 1]]
