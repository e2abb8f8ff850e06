"""Steps beside other workers on the same cores: their sizes, their turns, and the same tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.engine.engine import Engine
from penstock.engine.pace import StepPace
from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduling.chunking import chunk_tokens
from penstock.engine.stats import Counters
from penstock.runtime.turns.baton import Baton
from penstock.runtime.turns.order import CoreClaim

CORE = CoreClaim(cores=0b1, threads=1)
RATE = 1000.0


class _Layered:
    """A model of ten layers that computes nothing."""

    layers = 10
    call = None

    def between_layers(self, call):
        self.call = call


def measured(rate: float = RATE, step_s: float = 0.0) -> Counters:
    return Counters(prefill_tokens_per_s=rate, decode_step_s=step_s)


@pytest.fixture
def batons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two that know of each other."""
    monkeypatch.setattr("penstock.runtime.turns.baton._FRESH_S", 30)
    both = [Baton(tmp_path / "turns", CORE) for _ in range(2)]
    for baton in both:
        with baton.turn(True, 0.01):
            pass
    with both[0].turn(True, 0.01):
        pass
    yield both
    for baton in both:
        baton.close()


def test_prompts_that_queue_beside_streams_of_others_leave_the_cores_in_time(config, batons):
    mine, other = batons
    config, layered, crowd = replace(config, max_batch_tokens=512, itl_target_ms=50), _Layered(), [3, 0]
    pace = StepPace(config, measured(), lambda: tuple(crowd), layered, mine)
    assert pace.room().alone is None, "no streams, no slices"
    other.tell(4, 0.03)
    target_s = 0.05 * (1 + 4 * 2 / 4)
    assert pace.room().alone == chunk_tokens(target_s, 0.03, RATE * 10, 512) == 512
    pace = StepPace(config, measured(rate=100), lambda: tuple(crowd), layered, mine)
    assert pace.room().alone == int((target_s - 0.03) * 100 * 10), "a layer is no longer than what the target leaves"
    crowd[0] = 1
    assert pace.room().alone is None, "one prompt is computed beside them"


def test_one_prompt_is_computed_without_a_turn(config, batons):
    mine, other = batons
    crowd = [1, 0]
    layered = _Layered()
    pace = StepPace(config, measured(), lambda: tuple(crowd), layered, mine)
    prompt = [_FakeRun(known=100), _FakeRun(known=50)]
    before = mine.counters.turns
    with other.turn(True, 0.01), pace.turn(prompt):
        assert mine.counters.turns == before
    crowd[0] = 2
    pace.room()
    with pace.turn(prompt):
        assert mine.counters.turns == before + 1
        assert layered.call is not None, "it stops between layers"
    with pace.turn([_FakeRun(known=1)]):
        assert mine.counters.turns == before + 2, "streams always take theirs"
        assert layered.call is None


class _FakeRun:
    def __init__(self, known: int) -> None:
        self.known = self.tokens = known
        self.shows, self.tiles = False, 0


def request(name: str, length: int, tokens: int) -> Request:
    prompt = tuple((7 * at + len(name) * 31) % 200 for at in range(length))
    return Request(name, prompt, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
async def test_a_step_stops_between_its_layers_and_its_tokens_are_the_same(config, kit, kernels):
    async with Engine.open(replace(config, kernels=kernels)) as engine:
        plain = await kit.read(engine, request("one", 100, 8))
    calls: list[int] = []
    async with Engine.open(replace(config, kernels=kernels)) as engine:
        layers = engine._runner.layers
        engine._runner.between_layers(lambda: calls.append(1))
        assert (engine._runner._compiled is not None) == kernels
        stopped = await kit.read(engine, request("one", 100, 8))
        steps = engine.stats().steps
    assert stopped.ids == plain.ids
    assert steps * (layers - 1) <= len(calls) <= steps * layers


async def test_two_engines_on_one_core_take_turns_and_give_the_same_tokens(config, kit, tmp_path):
    """One streams while prompts queue at the other."""
    config = replace(config, itl_target_ms=1)
    streams, prompts = request("stream", 20, 300), [request(f"prompt{at}", 400 + at, 2) for at in range(6)]
    async with Engine.open(config) as engine:
        expected = [(await kit.read(engine, each)).ids for each in (streams, *prompts)]
    batons = [Baton(tmp_path / "turns", CORE) for _ in range(2)]
    async with (
        Engine.open(config, baton=batons[0]) as decoding,
        Engine.open(config, baton=batons[1]) as prefilling,
        asyncio.TaskGroup() as tasks,
    ):
        jobs = [tasks.create_task(kit.read(decoding, streams))]
        jobs += [tasks.create_task(kit.read(prefilling, each)) for each in prompts]
        found = [(await job).ids for job in jobs]
        stats = [engine.stats() for engine in (decoding, prefilling)]
    for baton in batons:
        baton.close()
    assert found == expected
    assert all(each.turns.turns > 0 for each in stats)
    assert sum(each.turns.given_up for each in stats) == 0


async def test_waiting_for_a_turn_is_no_part_of_what_a_step_takes(config, kit, tmp_path):
    mine, other = (Baton(tmp_path / "turns", CORE) for _ in range(2))
    async with Engine.open(config, baton=mine) as engine:
        await kit.read(engine, request("one", 20, 20))
        with other.turn(False, 0.25):
            await kit.read(engine, request("two", 1, 1))
        stats = engine.stats()
    for baton in (mine, other):
        baton.close()
    assert stats.turns.given_up == 1
    assert stats.turns.waited_s > 0.2
    assert stats.decode_step_s < 0.1
