"""Whole steps of every family on a device that only says it is one: what is where, and when the host waits."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.libs.engine.cuda.pretend import CUDA, there
from tests.libs.engine.cuda.test_steps import BLOCK, PAGES, play, run_of

from penstock.checkpoint import SUPPORTED, inspect
from penstock.engine.config import EngineConfig
from penstock.engine.forward.runner import Runner
from penstock.engine.kernels.cuda import copies
from penstock.engine.request import SamplingParams
from penstock.engine.sampling.choice import Choice
from penstock.engine.sampling.sampler import Sampler
from penstock.testing.checkpoints import TinyModel, write_checkpoint
from penstock.testing.twin import TwinDevice

EXTRA = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": 20}
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one, see tests/gpu")


def config_of(directory: Path, **fields) -> EngineConfig:
    return EngineConfig(model=directory, kv_pool_tokens=PAGES * BLOCK, block_size=BLOCK, max_model_len=160, **fields)


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_the_same_tokens_as_on_the_cpu(tmp_path, pretend, architecture):
    directory = write_checkpoint(tmp_path / "model", TinyModel(architecture, extra=EXTRA))
    plain = play(Runner(inspect(directory), config_of(directory, kernels=False)))
    assert not pretend.waits
    on_device = Runner(inspect(directory), config_of(directory, device="cuda"))
    assert there(on_device.memory.data) and on_device.memory.data.shape[0] == PAGES + 2
    assert play(on_device) == plain


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8"])
def test_every_dtype_runs(tmp_path, pretend, dtype):
    directory = write_checkpoint(tmp_path / "model", TinyModel("Qwen2ForCausalLM", head_dim=16))
    on_device = Runner(inspect(directory), config_of(directory, dtype=dtype, device="cuda"))
    assert play(on_device)
    assert on_device.memory.data.dtype == torch.bfloat16


def test_a_captured_step_waits_once(tmp_path, pretend):
    directory = write_checkpoint(tmp_path / "model", TinyModel())
    on_device = Runner(inspect(directory), config_of(directory, device="cuda"))
    for _ in range(3):
        pretend.waits.clear()
        on_device.step([run_of(list(range(40)), 39, 1, [1, 2, 3, 4, 5], seed=at) for at in range(3)])
    assert pretend.waits == ["synchronize"], "for the tokens"
    pretend.waits.clear()
    on_device.step([run_of(list(range(40)), 0, 20, [1, 2, 3, 4, 5])])
    assert pretend.waits == ["mark"], "for the step, which has no tokens"


@pytest.mark.parametrize("least", [0, 3])
def test_sampling_waits_once(pretend, least):
    """Whatever is asked of it; a second time only for a nucleus that is wider than those looked at first."""
    sampler = Sampler(1000, CUDA)
    logits = (torch.randn(6, 1000, generator=torch.Generator().manual_seed(1)) * 9).to(CUDA)
    params = [
        SamplingParams(9, temperature=0.0, logprobs=3),
        SamplingParams(9, top_p=0.9, min_tokens=least),
        SamplingParams(9, top_k=7, top_p=0.5, min_p=0.01, logprobs=0),
        SamplingParams(9, repetition_penalty=1.2, presence_penalty=0.3, logit_bias={5: 1.0, 7: -2.0}),
        SamplingParams(9, temperature=0.4, frequency_penalty=0.2, min_p=0.2),
        SamplingParams(9),
    ]
    choices = [Choice(one, frozenset([3, 4]), [1, 2, 3], 2, (8,)) for one in params]
    for _ in range(2):
        pretend.waits.clear()
        found = sampler.sample(logits, choices)
        assert pretend.waits == ["synchronize"]
    again = Sampler(1000, torch.device("cpu")).sample(
        logits.cpu(), [Choice(one, frozenset([3, 4]), [1, 2, 3], 2, (8,)) for one in params]
    )
    assert found == again, "and says what it says on a CPU"


def test_it_would_notice(pretend):
    here, away = torch.ones(3), torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="one device"):
        here + away
    with pytest.raises(TypeError):
        away.numpy()
    assert away.device == CUDA and away[:2].is_cuda and not away.cpu().is_cuda
    assert (away * 2).tolist() == [2, 2, 2]
    assert pretend.waits == ["cpu", "tolist"]


def test_pages_are_copied_behind_the_last_step(pretend, monkeypatch):
    log = []

    def stream(name):
        return SimpleNamespace(wait_event=lambda event: log.append(f"{name} waits for {event.name}"))

    def recorded(on):
        name = f"event {len(log)}"
        log.append(name)
        return SimpleNamespace(name=name, synchronize=lambda: log.append(f"host waits for {name}"))

    streams_made = iter(["up", "down"])
    monkeypatch.setattr(copies, "new_stream", lambda device: stream(next(streams_made)))
    monkeypatch.setattr(copies, "recorded", recorded)
    monkeypatch.setattr(torch.cuda, "stream", lambda on: nullcontext())
    content = torch.zeros(6, 64, dtype=torch.uint8, device="cuda")
    pages = copies.PageCopies(content)
    blocks = [memoryview(bytearray([number]) * 64) for number in range(1, 5)]

    def copied(begin, good):
        def copy(index, into):
            into[:] = blocks[begin + index]
            return index < good

        return copy

    assert pages.write([3, 1], blocks[:2], copied(0, 2)) == 2
    assert log == ["event 0", "up waits for event 0", "event 2", "host waits for event 2"]
    pages.mark(wait=False)
    assert bytes(pages.read(3).numpy()) == bytes(blocks[0])
    assert log[4:6] == ["event 4", "down waits for event 4"] and log[-1].startswith("host waits")
    assert pages.write([4, 5], blocks[2:], copied(2, 1)) == 1
    assert log[-1].startswith("host waits"), "also for the copies before the one that was refused"
    assert content.cpu()[:, 0].tolist() == [0, 2, 0, 1, 3, 0]
    arena = TwinDevice().allocate(64)
    arena.upload([(0, memoryview(bytearray([9]) * 64))]).wait()
    assert pages.write([2], [arena.view(0, 64)], None) == 1
    assert content.cpu()[2].tolist() == [9] * 64
    arena.close()


def test_grouped_experts_are_captured_and_do_not_wait(tmp_path, pretend, monkeypatch):
    """Of bfloat16, on a device that has such products; on the others the host waits for each layer's router."""
    extra = {**EXTRA, "sliding_window": None}
    directory = write_checkpoint(tmp_path / "model", TinyModel("MixtralForCausalLM", extra=extra))
    said, possible = [], []
    for capability in ((8, 9), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, own=capability: own)
        runner = Runner(inspect(directory), config_of(directory, dtype="bfloat16", device="cuda"))
        possible.append(runner._device._graphs.possible)
        said.append(play(runner))
    assert possible == [False, True]
    assert said[0] == said[1]
