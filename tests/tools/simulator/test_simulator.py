"""The simulator: what can be said by arithmetic is so, and the router's own code does what it does in a mesh."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.router.baselines import PolicyName
from penstock.router.workers import StepCost
from penstock.simulator.capacity import CapacitySearch, Slo
from penstock.simulator.command import app, summary
from penstock.simulator.simulation import SimulatedMesh, Simulation, SimulationResult
from penstock.simulator.workers import ModelledWorker, Prompt, Stream, WorkerModel
from penstock.traces.reading import RecordedAsk, Trace

BLOCK = 16
MODEL = WorkerModel(prefill_rate=1000.0, step=StepCost(0.01, 0.001, 0.0), itl_target_s=0.05)
ONE = SimulatedMesh(both=1, model=MODEL, token_bytes=1)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def ask(at: float, tokens: int, output: int = 1, *, chain: int = 1, shared: int = 0, session: str = "") -> RecordedAsk:
    """`shared` leading blocks are those of everybody, the others those of a chain."""
    blocks = tokens // BLOCK
    keys = [*map(key, range(shared)), *(key(chain * 10**6 + at) for at in range(blocks - shared))][:blocks]
    return RecordedAsk(at, tokens, output, tuple(keys), session)


def run(mesh: SimulatedMesh, *asks: RecordedAsk) -> SimulationResult:
    simulation = Simulation(mesh, Trace("test", BLOCK, tuple(asks)))
    result = simulation.run()
    assert simulation.planner.ledger.empty, "everything has ended"
    return result


def test_one_request_takes_its_prompt_and_its_steps() -> None:
    [served] = run(ONE, ask(0, 500, 11)).requests
    assert served.ttft_s == pytest.approx(0.5)
    assert served.itl_s == pytest.approx(0.011)
    assert served.cached == 0


def test_prompts_wait_for_each_other_and_streams_share_steps() -> None:
    first, second = run(ONE, ask(0, 500), ask(0.1, 500, chain=2)).requests
    assert (first.queue_s, second.queue_s, second.ttft_s) == pytest.approx((0, 0.4, 0.9))
    both = run(ONE, ask(0, 16, 1000), ask(0, 16, 1000, chain=2)).requests
    assert [one.itl_s for one in both] == pytest.approx([0.012, 0.012], rel=0.05)


def test_a_prompt_beside_a_stream_slows_both_as_the_itl_target_says() -> None:
    stream, prompt = run(ONE, ask(0, 16, 200), ask(1, 780, chain=2)).requests
    assert prompt.ttft_s == pytest.approx(0.780 / (1 - 0.011 / 0.05), rel=0.01)
    steps = prompt.ttft_s / 0.05
    assert stream.itl_s * 199 == pytest.approx(prompt.ttft_s + (199 - steps) * 0.011, rel=0.01)


def test_a_short_prompt_beside_a_stream_is_computed_whole() -> None:
    """380 tokens take 0.38 s beside a step of 0.011; 400 are more than what streams wait for at most, 8 x 0.05 s."""
    stream, prompt = run(ONE, ask(0, 16, 200), ask(1, 380, chain=2)).requests
    assert prompt.ttft_s == pytest.approx(0.391, abs=0.011), "and the rest of the step in which it came"
    assert stream.itl_s * 199 == pytest.approx(199 * 0.011 + 0.38)
    _, longer = run(ONE, ask(0, 16, 200), ask(1, 400, chain=2)).requests
    assert longer.ttft_s == pytest.approx(0.4 / (1 - 0.011 / 0.05), abs=0.05)


def test_of_prompts_that_come_together_each_has_its_first_token_when_it_ends() -> None:
    """Those of 64 tokens fill a step of 0.05 s each; of 16, four do. The first one comes a little before the others."""
    long = run(ONE, *(ask(0, 64, chain=chain) for chain in (1, 2, 3))).requests
    assert [one.ttft_s for one in long] == pytest.approx([0.064, 0.128, 0.192])
    short = run(ONE, *(ask(0, 16, chain=chain) for chain in range(1, 7))).requests
    assert [one.ttft_s for one in short] == pytest.approx([0.016, 0.08, 0.08, 0.08, 0.08, 0.096])


@pytest.mark.parametrize("names", [True, False])
def test_a_session_waits_for_its_answers(names: bool) -> None:
    """Whether the router is told of it or not."""
    asks = [ask(at, 500, 11, chain=1 + at, session="s") for at in range(3)] + [ask(0.1, 500, chain=9)]
    at_once = run(replace(ONE, model=replace(MODEL, prefill_rate=100.0)), *sorted(asks, key=lambda one: one.at))
    assert [one.at for one in at_once.requests] == [0, 0.1, 1, 2]
    mesh = replace(ONE, in_turn=True, names=names, model=replace(MODEL, prefill_rate=100.0))
    in_turn = run(mesh, *sorted(asks, key=lambda one: one.at))
    first, other, second, third = in_turn.requests
    assert (first.at, other.at) == (0, 0.1)
    for before, after in ((first, second), (second, third)):
        assert after.at == pytest.approx(before.at + before.ttft_s + 10 * before.itl_s)


def test_tokens_behind_a_long_context_cost_more() -> None:
    mesh = replace(ONE, model=replace(MODEL, prefill_context_s=1e-5))
    first, second = run(mesh, ask(0, 800), ask(9, 816)).requests
    assert first.ttft_s == pytest.approx(0.8 + 800**2 / 2 * 1e-5)
    assert second.ttft_s == pytest.approx(0.016 + 16 * 808 * 1e-5)


def test_what_is_stored_is_fetched() -> None:
    mesh = replace(ONE, token_bytes=1000, model=replace(MODEL, fetch_rate=4e6, kv_tokens=1000))
    first, _, again = run(mesh, ask(0, 800), ask(2, 896, chain=2), ask(4, 816)).requests
    assert (first.cached, again.cached) == (0, 800)
    left = 1000 // BLOCK * BLOCK - 896
    assert again.ttft_s == pytest.approx(16 / 1000 + (800 - left) * 1000 / 4e6), "the other prompt took its pages"


@pytest.mark.parametrize("fetch_rate", [2e5, 9e5, 2e6, 1e9])
def test_fetching_pays_where_it_is_decided(fetch_rate: float) -> None:
    """Beside workers that fetch all that is stored, and those that have no store, with pages for one prompt."""
    model = replace(MODEL, fetch_rate=fetch_rate, kv_tokens=5000, prefill_context_s=2e-7)
    decides = replace(ONE, token_bytes=1000, model=model)
    asks = [ask(30.0 * at, 800 + 320 * at, chain=1 + at % 2) for at in range(12)]
    took = {
        name: sum(one.ttft_s for one in run(mesh, *asks).requests)
        for name, mesh in (
            ("decided", decides),
            ("always", replace(decides, compares=False)),
            ("never", replace(decides, store_blocks=0)),
        )
    }
    assert took["decided"] <= min(took["always"], took["never"]) + 1e-6
    assert took["decided"] < 0.9 * max(took["always"], took["never"])


def test_what_is_in_a_workers_own_pages_costs_nothing() -> None:
    mesh = replace(ONE, token_bytes=1000, model=replace(MODEL, fetch_rate=1e6))
    *_, second = run(mesh, ask(0, 800), ask(2, 816)).requests
    assert (second.cached, second.ttft_s) == (800, pytest.approx(16 / 1000))


def test_a_hand_off_moves_the_prompt() -> None:
    mesh = replace(ONE, both=0, prefill=1, decode=1, handoff_s=0.1)
    [served] = run(mesh, ask(0, 500, 11)).requests
    assert served.ttft_s == pytest.approx(0.5)
    assert served.itl_s * 10 == pytest.approx(0.1 + 10 * 0.011, rel=0.01)


def test_who_would_wait_too_long_is_refused() -> None:
    result = run(replace(ONE, max_queue_s=1.0), *(ask(0, 800, chain=number) for number in range(1, 6)))
    assert [one.refused for one in result.requests] == [False, False, True, True, True]
    assert summary(result)["refused"] == 3


def test_who_would_only_wait_at_a_worker_waits_in_the_routers_line() -> None:
    """Each prompt takes 0.8 s, and the line holds back behind a second of them."""
    mesh = replace(ONE, token_bytes=1000, model=replace(MODEL, fetch_rate=1e6))
    asks = [ask(0, 800, chain=number) for number in range(1, 5)]
    result = run(mesh, *asks)
    assert result.requests[-1].ttft_s == pytest.approx(3.2)
    held = [one.held_s for one in result.requests]
    assert held[:2] == [0, 0]
    assert [one.queue_s - least for one, least in zip(result.requests[2:], held[2:], strict=True)] <= [1.0, 1.0]
    assert held[2] > 0.5 and held[3] > 1.3
    at_once = run(replace(mesh, policy="least-tokens"), *asks)
    assert [one.held_s for one in at_once.requests] == [0, 0, 0, 0], "the other policies place whatever comes"


@pytest.mark.parametrize(("fetch_rate", "fetched"), [(1e6, True), (3e5, False)])
def test_nothing_is_fetched_while_a_request_is_held_back(fetch_rate: float, fetched: bool) -> None:
    """What is in the store alone takes 0.48 s to compute. It comes to the worker a second after the prompt before it,
    which leaves a second to fetch, and not the two since it was asked for."""
    mesh = replace(ONE, token_bytes=1000, model=replace(MODEL, fetch_rate=fetch_rate, kv_tokens=2490))
    *_, again = run(mesh, ask(0, 480), ask(2, 2480, chain=2), ask(9, 1990, chain=3), ask(9, 496)).requests
    assert again.held_s == pytest.approx(1.0)
    assert again.queue_s == pytest.approx(1.99)
    assert again.cached == (480 if fetched else 0)


@pytest.mark.parametrize("policy", ["seconds", "least-tokens"])
def test_the_wait_for_room_counts_wherever_it_is(policy: PolicyName) -> None:
    """Two answers of 2 s each, one after the other: ours waits before its prompt, the other policy behind it."""
    mesh = replace(ONE, both=0, prefill=1, decode=1, handoff_s=0, policy=policy)
    mesh = replace(mesh, model=replace(MODEL, kv_tokens=1000))
    result = run(mesh, ask(0, 500, 201), ask(0.5, 500, 201, chain=2))
    first, second = result.requests
    assert first.waited_s == 0
    told = summary(result)
    assert (told["waited_s_p99"], told["started_s_p99"]) == (second.waited_s, second.started_s)
    answer_s = 200 * 0.011
    waits = {"seconds": [answer_s, 0.0], "least-tokens": [0.0, answer_s - 0.5]}
    assert [second.queue_s, second.room_s] == pytest.approx(waits[policy], abs=0.02)
    assert second.started_s == pytest.approx(second.ttft_s + second.room_s)


def drain(worker: ModelledWorker) -> None:
    """Lets it do all that it has."""
    now = 0.0
    for _ in range(100):
        for done in worker.advance(now):
            done()
        now = worker.due() if worker.due() < inf else now
    assert not (worker.streams or worker.waiting or worker.prompts or worker.held)


def test_an_answer_has_the_room_of_the_prompt_before_it() -> None:
    """A stream that was handed off and waits for room does not take that of a prompt which is computed here."""
    model = replace(MODEL, kv_tokens=1000)
    worker = ModelledWorker(model)
    events: list[str] = []

    def stream(name: str, *, has_room: bool = False) -> Stream:
        return Stream(10, 600, lambda waited_s: events.append(f"{name} joins"), lambda: None, has_room)

    def computed() -> None:
        events.append("prompt")
        worker.add_stream(stream("own", has_room=True))

    worker.add_prompt(Prompt(500, begin=lambda: 500, done=computed, context=600, keeps_room=True))
    assert worker.advance(0.0) == []
    worker.add_stream(stream("handed off"))
    drain(worker)
    assert events == ["prompt", "own joins", "handed off joins"]


@pytest.mark.parametrize("first", ["prompt", "stream"])
def test_who_finds_no_room_is_not_passed(first: str) -> None:
    """A prompt, a stream, which have no room beside another stream; then a small one of each, which would have."""
    worker = ModelledWorker(replace(MODEL, kv_tokens=1000))
    events: list[str] = []

    def add(kind: str, name: str, context: int) -> None:
        def begin() -> float:
            events.append(name)
            return 10.0

        if kind == "prompt":
            worker.add_prompt(Prompt(10, begin=begin, done=lambda: None, context=context))
        else:
            worker.add_stream(Stream(10, context, lambda waited_s: events.append(name), lambda: None))

    add("stream", "there", 600)
    worker.advance(0.0)
    other = {"prompt": "stream", "stream": "prompt"}[first]
    for kind, name, context in ((first, "big", 600), (other, "small", 100), (first, "small too", 100)):
        add(kind, name, context)
        worker.advance(0.0)
    drain(worker)
    assert events[:2] == ["there", "big"] and len(events) == 4


def sessions(seed: int, count: int = 60) -> list[RecordedAsk]:
    """Turns that resend all that came before, behind the same system prompt."""
    draw, asks = Random(seed), []
    for number in range(1, count + 1):
        at, tokens = draw.uniform(0, 60), 480
        for _ in range(draw.randrange(1, 8)):
            tokens += draw.randrange(50, 1500)
            asks.append(ask(at, tokens, draw.randrange(1, 100), chain=number, shared=20, session=f"s{number}"))
            at += draw.uniform(1, 20)
    return sorted(asks, key=lambda one: one.at)


@pytest.mark.parametrize("shape", [{"both": 4}, {"both": 0, "prefill": 3, "decode": 2}], ids=["together", "apart"])
def test_every_token_is_cached_or_computed(shape: dict[str, Any]) -> None:
    mesh = replace(ONE, **shape, store_blocks=100_000, model=replace(MODEL, prefill_rate=5000.0))
    result = run(mesh, *sessions(1))
    assert not any(one.refused for one in result.requests)
    tokens = sum(one.tokens for one in result.requests)
    computed = sum(result.computed) + result.computed_beside
    assert computed + sum(one.cached for one in result.requests) == tokens
    assert 0.8 * result.reusable < result.hit <= result.reusable
    again = run(mesh, *sessions(1))
    assert [one.ttft_s for one in again.requests] == [one.ttft_s for one in result.requests], "no chance"


def test_policies_differ_as_they_are_known_to() -> None:
    """Without a way between hosts: who has no prefix computes it."""
    model = replace(MODEL, prefill_rate=4000.0, remote_rate=1.0)
    mesh = replace(ONE, both=4, store_blocks=1000, model=model, max_queue_s=1e9)
    found = {
        policy: run(replace(mesh, policy=policy), *sessions(2, 120))
        for policy in ("seconds", "round-robin", "longest-prefix")
    }
    ours, turns, longest = found.values()
    assert ours.hit > 1.2 * turns.hit
    assert longest.busiest_over_mean > 1.5 * ours.busiest_over_mean
    assert ours.percentile(lambda one: one.queue_s, 0.99) < turns.percentile(lambda one: one.queue_s, 0.99)


def test_the_command_prints_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * number, "input_length": 1024, "output_length": 5, "hash_ids": [1, number + 2]}
        for number in range(5)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert app([str(trace), "--both", "2", "--slo-ttft", "0.15", "--json"], result_action="return_value") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["refused"], found["good"]) == (5, 0, 4)
    assert found["hit"] == pytest.approx(4 * 512 / 5120)
    assert app([str(tmp_path / "nothing"), "--json"], result_action="return_value") == 2
    assert "no such file" in capsys.readouterr().err


def busy(seconds: float) -> list[RecordedAsk]:
    """Prompts of 400 tokens, ten a second, with answers of 50."""
    return [ask(at / 10, 400, 50, chain=at + 1) for at in range(int(seconds * 10))]


def written(path: Path, asks: list[RecordedAsk]) -> str:
    """Them in a file."""
    names: dict[bytes, int] = {}
    rows = [
        {
            "timestamp": one.at * 1e3,
            "input_length": one.tokens,
            "output_length": one.output,
            "block_size": BLOCK,
            "hash_ids": [names.setdefault(key, len(names)) for key in one.keys],
        }
        for one in asks
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def test_the_cheapest_split_is_that_of_trying_all() -> None:
    trace, slo = Trace("test", BLOCK, tuple(busy(6))), Slo(ttft_s=1.0, itl_s=0.03)

    def share(mesh: SimulatedMesh) -> float:
        return slo.share(Simulation(mesh, trace).run())

    search = CapacitySearch(ONE, 0.9, share, 16)
    best = search.run()
    splits = [(prefill, workers - prefill, 0) for workers in range(2, 9) for prefill in range(1, workers)]
    every = [replace(ONE, prefill=prefill, decode=decode, both=both) for prefill, decode, both in splits]
    every += [replace(ONE, both=both) for both in range(1, 9)]
    every.sort(key=lambda mesh: mesh.prefill + mesh.decode + mesh.both)
    first = next(mesh for mesh in every if share(mesh) >= 0.9)
    assert best is not None and best.workers == first.prefill + first.decode + first.both
    assert best.good >= 0.9
    assert len(search.tried) < len(every)
    assert CapacitySearch(ONE, 0.9, share, 2).run() is None


def test_the_command_plans_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, picture = written(tmp_path / "trace.jsonl", busy(3)), tmp_path / "a.svg"

    def called(*more: str) -> tuple[int, str, str]:
        code = app([trace, *more], result_action="return_value")
        return (code, *capsys.readouterr())

    code, out, _ = called("--plan", "0.9", "--slo-ttft", "2", "--json", "--plot", str(picture))
    found = json.loads(out)
    assert code == 0 and found["best"]["good"] >= 0.9 and found["best"] in found["tried"]
    assert "<svg" in picture.read_text()
    code, out, _ = called("--plan", "0.9", "--slo-ttft", "0.0001", "--plan-most", "2", "--json")
    assert code == 1 and json.loads(out)["best"] is None
    code, _, error = called("--step-base-s", "0", "--step-sequence-s", "0")
    assert code == 2 and "steps take time" in error
    code, _, error = called("--plan", "0.9")
    assert code == 2 and "needs --slo-ttft or --slo-itl" in error
    code, _, error = called("--plot", str(tmp_path / "a.nothing"))
    assert code == 2 and "a.nothing" in error
