"""The numbers of the table, of a tiny model on the CPU: that they are there, and what they are of."""

from __future__ import annotations

from tests.gpu.engine.measure import speed

from penstock.checkpoint import inspect
from penstock.engine.config import EngineConfig
from penstock.engine.forward.runner import Runner
from penstock.testing.checkpoints import TinyModel, write_checkpoint


def test_what_is_counted(tmp_path):
    directory = write_checkpoint(tmp_path / "model", TinyModel())
    runner = Runner(inspect(directory), EngineConfig(model=directory, kv_pool_tokens=640))
    steps, compute = [], runner.step
    runner.step = lambda runs: steps.append([run.tokens for run in runs]) or compute(runs)
    found = speed(runner, prompts=(20, 70), batches=(1, 3), context=10, tokens=4, rounds=2)
    assert set(found.prefill) == {20, 70} and set(found.decode) == {1, 3} and found.used_bytes == 0
    assert all(rate > 0 for rate in (*found.prefill.values(), *found.decode.values(), found.verify))
    decode = [[1]] * 12 + [[1] * 3] * 12
    assert steps == [[20]] * 3 + [[70]] * 3 + decode + [[1]] * 12 + [[5]] * 12
