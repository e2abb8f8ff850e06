"""On a GPU every family computes what it computes on the CPU."""

from __future__ import annotations

import pytest
import torch

from penstock.checkpoint import SUPPORTED, inspect
from penstock.engine.config import EngineConfig
from penstock.engine.forward.runner import Runner
from penstock.engine.request import SamplingParams
from penstock.engine.sampling.choice import Choice
from penstock.engine.step.run import Run
from penstock.testing.checkpoints import TinyModel, write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
EXTRA = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": 50}


def steps(directory, device, dtype):
    """Logits of a prompt of 200 tokens in chunks of 64, and of three that are verified behind it."""
    runner = Runner(inspect(directory), EngineConfig(model=directory, dtype=dtype, device=device, kv_pool_tokens=640))
    tokens = torch.randint(0, 256, (203,), generator=torch.Generator().manual_seed(5)).tolist()
    seen, compute = [], runner.logits

    def watched(order, features):
        logits = compute(order, features)
        seen.append(logits.clone())  # a captured step writes its logits where the one before it did
        return logits

    runner.logits = watched
    params = SamplingParams(max_tokens=1, temperature=0.0)
    for start in range(0, 200, 64):
        choice = Choice(params, frozenset(), tokens[:200], 200)
        runner.step([Run(choice, start, min(64, 200 - start), list(range(1, 15)), ("one", 0))])
    choice = Choice(params, frozenset(), tokens[:201], 201, tuple(tokens[201:]))
    runner.step([Run(choice, 200, 1, list(range(1, 15)), ("one", 0))])
    return torch.cat([logits.cpu() for logits in seen])


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_same_logits_as_on_the_cpu(tmp_path, architecture):
    directory = write_checkpoint(tmp_path / "model", TinyModel(architecture, extra=EXTRA))
    torch.testing.assert_close(
        steps(directory, "cuda", "float32"), steps(directory, "cpu", "float32"), atol=1e-3, rtol=0
    )
    assert steps(directory, "cuda", "bfloat16").isfinite().all()
