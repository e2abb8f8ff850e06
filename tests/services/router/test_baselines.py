"""Simple policies: each does what it is known for, and none chooses who cannot serve."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import get_args

import pytest

from penstock.router.baselines import Baseline, PolicyName
from penstock.router.config import RouterConfig
from penstock.router.demand import Demand, Knobs
from penstock.router.options import Decision, NoWorker, QueueFull, TooLong
from penstock.router.workers import Role, WorkerFacts
from penstock.runtime.config import ConfigError

from .test_policy import but, worker

SIMPLE: list[PolicyName] = [name for name in get_args(PolicyName) if name != "seconds"]
ASK = Demand(2000, 100)


def chosen(name: PolicyName, workers: list[WorkerFacts], ask: Demand = ASK, count: int = 100) -> Counter[str]:
    policy, random, found = Baseline(name), Random(1), Counter[str]()
    for _ in range(count):
        answer = policy.decide(ask, workers, random, Knobs())
        assert isinstance(answer, Decision), answer
        found[answer.decode.id] += 1
    return found


BUSY = worker("busy", queued_tokens=20_000, context_tokens=90_000, sequences=30)
HOLDS = worker("holds", cached_tokens=1900, queued_tokens=19_000, context_tokens=80_000, sequences=20)
IDLE = worker("idle")


def test_what_each_is_known_for() -> None:
    all_three = [BUSY, HOLDS, IDLE]
    assert chosen("round-robin", all_three, count=99) == {"busy": 33, "holds": 33, "idle": 33}
    assert min(chosen("random", all_three, count=300).values()) > 60
    assert chosen("least-tokens", all_three) == {"idle": 100}
    assert chosen("two-choices", all_three)["busy"] == 0
    assert chosen("longest-prefix", all_three) == {"holds": 100}
    assert chosen("cache-aware", all_three) == {"holds": 100}
    assert chosen("dynamo", all_three) == {"idle": 100}
    assert chosen("dynamo", [HOLDS, but(HOLDS, resident_tokens=1900, id="more")]) == {"more": 100}
    assert chosen("llm-d", [IDLE, but(HOLDS, queued_tokens=0)]) == {"holds": 100}


def test_the_cache_counts_less_where_loads_are_unequal() -> None:
    crowded = but(HOLDS, sequences=200)
    assert chosen("cache-aware", [crowded, IDLE]) == {"idle": 100}
    assert chosen("cache-aware", [but(HOLDS, cached_tokens=500), IDLE]) == {"idle": 100}


def test_equal_openings_go_to_the_same_worker_and_stay_there() -> None:
    workers = [worker(f"w{number}") for number in range(8)]
    asks = [Demand(2000, 100, opening=bytes([number])) for number in range(100)]
    before = [chosen("prefix-hash", workers, ask, count=3) for ask in asks]
    assert all(len(found) == 1 for found in before)
    assert len({next(iter(found)) for found in before}) == 8
    after = [chosen("prefix-hash", workers[1:], ask, count=1) for ask in asks]
    moved = [was for was, now in zip(before, after, strict=True) if was.keys() != now.keys()]
    assert all("w0" in was for was in moved), "who loses its worker moves, and nobody else"


@pytest.mark.parametrize("name", SIMPLE)
def test_nobody_who_cannot_serve_is_chosen(name: PolicyName) -> None:
    small, failed = worker("small", max_model_len=1000), worker("failed")
    ask = Demand(2000, 100, avoid=frozenset({"failed"}), opening=b"x")
    assert chosen(name, [small, failed, IDLE], ask) == {"idle": 100}
    policy = Baseline(name)
    assert policy.decide(ask, [], Random(1), Knobs()) == NoWorker()
    assert policy.decide(ask, [small], Random(1), Knobs()) == TooLong(1000)
    assert isinstance(policy.decide(ask, [BUSY], Random(1), Knobs(max_queue_s=1)), QueueFull)


@pytest.mark.parametrize("name", SIMPLE)
def test_prompts_are_computed_apart_where_somebody_does_only_that(name: PolicyName) -> None:
    policy = Baseline(name)
    pair = [worker("p", Role.PREFILL), worker("d", Role.DECODE)]
    apart = policy.decide(ASK, pair, Random(1), Knobs())
    assert isinstance(apart, Decision) and apart.prefill is not None and apart.decode.id == "d"
    short = policy.decide(Demand(20, 100), pair, Random(1), Knobs())
    assert isinstance(short, Decision) and short.prefill is None
    for lost in range(2):
        without = [but(one, store_away=True) if at == lost else one for at, one in enumerate(pair)]
        alone = policy.decide(ASK, without, Random(1), Knobs())
        assert isinstance(alone, Decision) and alone.prefill is None


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy"):
        RouterConfig(policy="fastest")  # type: ignore[arg-type]
