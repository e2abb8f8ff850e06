"""Two runs at the same time, one of them at any moment."""

from __future__ import annotations

import sys

import pytest

from penstock.bench.turns import TurnRun, take_turns

BENCH = """
import asyncio
from penstock.bench.harness import interleave

async def sample(round):
    with open("diary", "a") as diary:
        diary.write("begin\\n")
        await asyncio.sleep(0)
        diary.write("end\\n")
    with open("order", "a") as order:
        order.write({name!r})

asyncio.run(interleave({{"it": sample}}, {rounds}, progress=False, warm_up=False))
print({name!r})
"""


def run(directory, name, rounds):
    return TurnRun([sys.executable, "-c", BENCH.format(name=name, rounds=rounds)], directory)


async def test_samples_alternate_and_a_longer_run_goes_on_alone(tmp_path):
    async with run(tmp_path, "a", 2) as one, run(tmp_path, "b", 4) as two:
        await take_turns([one, two])
        assert [one.result(), two.result()] == [(0, b"a\n"), (0, b"b\n")]
    assert (tmp_path / "order").read_text() == "ababbb"
    assert (tmp_path / "diary").read_text() == "begin\nend\n" * 6


async def test_a_run_that_never_passes_ends_before_the_other_begins(tmp_path):
    program = "import time; open('order', 'a').write('x'); time.sleep(0.05); open('order', 'a').write('x')"
    async with TurnRun([sys.executable, "-c", program], tmp_path) as one, run(tmp_path, "b", 1) as two:
        await take_turns([one, two])
    assert (tmp_path / "order").read_text() == "xxb"


async def test_a_run_that_fails_leaves_the_turn_to_the_other(tmp_path):
    async with run(tmp_path, "a", 3) as one, TurnRun([sys.executable, "-c", "raise SystemExit(3)"], tmp_path) as two:
        await take_turns([one, two])
        assert [one.result()[0], two.result()[0]] == [0, 3]


async def test_what_still_runs_is_ended(tmp_path):
    with pytest.raises(ZeroDivisionError):
        async with run(tmp_path, "a", 10**9) as one:
            assert await one.turn()
            raise ZeroDivisionError
