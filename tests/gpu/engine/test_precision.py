"""What bfloat16 and 8 bits change on a device, on the embedded model, against float32 on the CPU."""

from __future__ import annotations

import pytest
from tests.libs.engine.test_precision import all_logits, distances

from penstock.checkpoint import inspect
from penstock.engine.config import EngineConfig
from penstock.engine.forward.runner import Runner
from penstock.models import NAMES, embedded

BOUNDS = {"float32": (0.999, 1e-3), "bfloat16": (0.97, 0.05), "int8": (0.96, 0.06), "float8": (0.95, 0.15)}
"""Share of positions with the same most probable token, and mean distance of a logit, against float32."""


def runner_of(**fields) -> Runner:
    directory = embedded(NAMES[0])
    config = EngineConfig(model=directory, kv_pool_tokens=6400, max_model_len=4096, **fields)
    return Runner(inspect(directory), config)


@pytest.fixture(scope="module")
def exact():
    return all_logits(runner_of(dtype="float32", kernels=False), 250)


@pytest.mark.parametrize("step", [5, 250])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_less_precise_weights_say_nearly_the_same(exact, dtype, step):
    agreement, distance = BOUNDS[dtype]
    try:
        runner = runner_of(dtype=dtype, device="cuda")
    except ValueError as reason:
        pytest.skip(str(reason))
    found = all_logits(runner, step).cpu()
    assert float((found.argmax(-1) == exact.argmax(-1)).float().mean()) >= agreement
    assert float(distances(found, exact).mean()) <= distance
