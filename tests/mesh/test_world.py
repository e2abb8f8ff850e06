"""Schedules of a mesh in one thread, each of which a seed makes: see `penstock.testing.world`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from penstock.gateway.completing.attempt import Attempt
from penstock.gateway.mesh.plans import PlanStream
from penstock.gateway.request.work import SampledToken
from penstock.kvstore.table.leases import Leases
from penstock.router.index import BlockIndex
from penstock.router.streams import PlanStreams
from penstock.testing.world.world import Played, played

FIRST = int(os.environ.get("PENSTOCK_WORLD_SEED", "0"))
COUNT, BATCH = 500, 100


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, BATCH))
def test_whatever_breaks_answers_are_right_and_nothing_is_kept(first: int) -> None:
    for seed in range(first, first + BATCH):
        outcome = played(seed)
        assert not outcome.wrong, str(outcome)


def test_schedules_are_of_all_kinds() -> None:
    """Most requests are answered, some fail, some clients leave; each act happens, and workers compute and hand off."""
    outcomes = [played(seed) for seed in range(60)]
    heard = [one for outcome in outcomes for one in outcome.heard]
    whole = [one for one in heard if one.error is None and not one.left]
    assert len(whole) > len(heard) / 2
    assert any(one.error for one in heard) and any(one.left for one in heard)
    acts = {fault.act for outcome in outcomes for fault in outcome.schedule.faults}
    assert acts == {"kill", "stop", "restart", "cut", "hold", "hang", "slow", "leave"}
    sent = {what for outcome in outcomes for _, _, _, what, _ in outcome.trace}
    for method in (
        "Prefill/Handoff",
        "KvStore/Commit",
        "KvStore/Write",
        "KvStore/Read",
        "KvStore/Claim",
        "Decode/Listen",
    ):
        assert any(f"{method} begins" in what for what in sent), method


def test_a_seed_gives_the_same_trace_again_whatever_came_before_and_in_another_process() -> None:
    seeds = range(20, 40)
    digests = [played(seed).digest for seed in seeds]
    assert [played(seed).digest for seed in reversed(seeds)] == digests[::-1]
    assert len(set(digests)) == len(digests)
    program = f"from penstock.testing.world.world import played\nfor seed in {seeds}: print(played(seed).digest)"
    command, environment = [sys.executable, "-c", program], {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == digests


def first_found(most: int) -> Played:
    """The first schedule that goes wrong."""
    return next(outcome for seed in range(most) if (outcome := played(seed)).wrong)


def nothing(*_: object) -> None:
    """Instead of what has to be done."""


def any_token(attempt: Attempt, index: int, id: int) -> None:
    """As `Attempt.token` without its look at the index."""
    attempt._tokens.append(id)
    if attempt._accept(SampledToken(index, id)):
        attempt._end("stop")


@pytest.mark.parametrize(
    ("whose", "name", "instead", "said"),
    [
        (PlanStreams, "_release", nothing, "charges left"),
        (PlanStream, "close", nothing, "Plan"),
        (Leases, "release_all", nothing, "leases"),
        (BlockIndex, "removed", nothing, "blocks too many"),
        (Attempt, "token", any_token, "is next"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_planted_defect_is_found_and_its_seed_finds_it_again(
    monkeypatch: pytest.MonkeyPatch, whose: type, name: str, instead: object, said: str
) -> None:
    monkeypatch.setattr(whose, name, instead)
    found = first_found(100)
    assert any(said in one for one in found.wrong), found
    assert f"--seed {found.schedule.seed} --count 1" in str(found)
    again = played(found.schedule.seed)
    assert (again.wrong, again.digest) == (found.wrong, found.digest)


def test_the_command_plays_a_seed_again_and_prints_what_was_sent() -> None:
    command = [sys.executable, "-m", "penstock.testing.world", "--seed", "3", "--count", "1", "--trace"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert f"digest {played(3).digest}" in done.stdout
    assert "gateway -> router-0: /penstock.v1.Router/Plan begins" in done.stdout
