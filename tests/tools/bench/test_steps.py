"""The measurement of the engine's own work measures that, and the work is not much."""

from __future__ import annotations

import pytest

from penstock.bench.engine.steps import step_gap_us, step_overhead_us
from penstock.testing.checkpoints import write_checkpoint

GENEROUS_US = 3000
"""At 32 streams on a machine with other things to do; quietly it is a tenth of that."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A Llama of three layers."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "llama")


async def test_a_step_without_a_model_takes_little(tiny):
    found = await step_overhead_us(tiny, 32, steps=40, rounds=5)
    assert len(found) == 5 and 0 < min(found) < GENEROUS_US


async def test_one_stream_costs_less_than_many(tiny):
    alone = await step_overhead_us(tiny, 1, steps=40, rounds=5)
    many = await step_overhead_us(tiny, 32, steps=40, rounds=5)
    assert 0 < min(alone) < min(many)


async def test_a_model_waits_less_than_all_that_is_done(tiny):
    """What is done for the readers is done while it computes."""
    gaps = await step_gap_us(tiny, 32, steps=40, rounds=5)
    assert len(gaps) == 5 and 0 < min(gaps) < GENEROUS_US
