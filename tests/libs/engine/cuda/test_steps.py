"""Steps of a device, on a CPU: which are captured, what their input is, and that their tokens are the plain ones."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.libs.engine.cuda.test_paged import FLASHINFER

from penstock.checkpoint import inspect
from penstock.engine.config import EngineConfig
from penstock.engine.forward.runner import Runner
from penstock.engine.kernels.cuda.graphs import GraphSteps
from penstock.engine.kernels.cuda.over_flashinfer import FlashInferPaged
from penstock.engine.kernels.cuda.paged import GatherPaged, Heads
from penstock.engine.kernels.cuda.plan import StepInput, StepShape, buckets, shape_of
from penstock.engine.kernels.cuda.steps import DeviceSteps
from penstock.engine.request import SamplingParams
from penstock.engine.sampling.choice import Choice
from penstock.engine.step.run import Run
from penstock.testing.checkpoints import TinyModel, write_checkpoint

BLOCK, PAGES = 8, 60


def config_of(directory: Path, **fields) -> EngineConfig:
    return EngineConfig(model=directory, kv_pool_tokens=PAGES * BLOCK, block_size=BLOCK, max_model_len=160, **fields)


def run_of(tokens, start, count, pages, drafts=(), seed=0, version=0):
    params = SamplingParams(500, temperature=0.7 if seed % 2 else 0.0, seed=seed)
    choice = Choice(params, frozenset(), tokens, 1, tuple(drafts))
    return Run(choice, start, count, pages, (f"s{seed}", version))


# Plans


@given(st.integers(1, 300))
def test_buckets_hold_all_and_waste_little(most):
    sizes = buckets(most)
    assert sizes[-1] == most and list(sizes) == sorted(set(sizes))
    for count in range(1, most + 1):
        fitting = next(size for size in sizes if size >= count)
        assert fitting - count <= max(3, fitting // 3)


def test_which_steps_are_captured():
    decode = [run_of([1, 2, 3], 2, 1, [1], seed=at) for at in range(5)]
    assert shape_of(decode, buckets(8), 4) == StepShape(6, 1)
    assert shape_of(decode, buckets(4), 4) is None, "more than a step holds"
    verify = [run_of([1, 2, 3], 2, 1, [1], drafts=[4, 5]) for _ in range(2)]
    assert shape_of(verify, buckets(8), 4) == StepShape(2, 3)
    assert shape_of(verify, buckets(8), 2) is None, "more rows than the backend captures"
    assert shape_of([*decode, *verify], buckets(8), 4) is None, "unequal"
    assert shape_of([run_of([1, 2, 3, 4], 0, 3, [1])], buckets(8), 4) is None, "a chunk that samples nothing"
    assert shape_of([run_of([1, 2, 3], 0, 3, [1])], buckets(8), 4) is None, "a chunk that samples its last row"


def test_input_of_a_step():
    shape, width, vectors = StepShape(4, 2), 5, 3 * 2 * BLOCK
    memory = np.full(StepInput.size(shape, width), -7, dtype=np.int32)
    step = StepInput(memory, shape, width, block_size=BLOCK, page_vectors=vectors, scratch=PAGES)
    runs = [
        run_of(list(range(10, 28)), 17, 1, [4, 9, 2], drafts=[5], seed=1),
        run_of(list(range(30, 46)), 15, 1, [7, 3, 8], drafts=[6], seed=2),
    ]
    for _ in range(2):  # the second time from the tables it knows
        step.fill(runs)
        assert step.ids.tolist() == [27, 5, 45, 6, 0, 0, 0, 0]
        assert step.positions.tolist() == [17, 18, 15, 16, 0, 0, 0, 0]
        places = [2 * vectors + 1, 2 * vectors + 2, 3 * vectors + 7, 8 * vectors]
        assert step.places.tolist() == places + [PAGES * vectors] * 4
        assert step.ends.tolist() == [19, 17, 2, 2]
        assert step.tables[0, :3].tolist() == [4, 9, 2] and step.tables[1, :3].tolist() == [7, 3, 8]
        assert step.tables[2:, 0].tolist() == [PAGES, PAGES]
        assert step.host.starts.tolist() == [0, 2, 4, 6, 8]
    runs[0] = run_of(runs[0].choice.tokens, 17, 1, [4, 1, 2], drafts=[5], seed=1, version=1)
    step.fill(runs[:1])
    assert step.tables[0, :3].tolist() == [4, 1, 2], "another version of the table is another table"
    assert step.ends.tolist() == [19, 2, 2, 2] and step.tables[1, 0] == PAGES


# Steps


class Recorder:
    """Captures by remembering the body, and counts."""

    def __init__(self):
        self.captured, self.replayed = 0, 0

    def __call__(self, body):
        self.captured += 1

        def replay():
            self.replayed += 1
            return body()

        return replay


def device_runner(directory, capture, most_rows=None):
    """A runner whose steps are a device's, with the last page for scratch."""
    runner = Runner(inspect(directory), config_of(directory, kernels=False))
    attention = GatherPaged(Heads.of(runner.decoder.config), runner.memory)
    attention.graph_rows, attention.most_rows = 4, most_rows
    runner._device = DeviceSteps(
        runner.decoder, runner.memory, runner._builder, attention, capture=capture, most_sequences=6, max_positions=160
    )
    return runner


def play(runner, seed=0):
    """Five texts side by side, chunks of prompts beside decode steps beside verified drafts; what was sampled."""
    chance = random.Random(seed)
    pages = list(range(1, PAGES))
    chance.shuffle(pages)
    texts = [[chance.randrange(256) for _ in range(chance.randrange(1, 40))] for _ in range(5)]
    own = [[pages.pop() for _ in range(10)] for _ in texts]
    done = [0] * len(texts)
    news = [[] for _ in texts]
    for step in range(30):
        runs, who = [], []
        for at, text in enumerate(texts):
            if step >= 12 and at == step % 7:
                continue
            left = len(text) - done[at]
            drafts = [chance.randrange(256)] * (2 if left == 1 and step % 3 == 0 else 0)
            run = run_of(text, done[at], min(left, 16), own[at][: -(-(len(text) + 3) // BLOCK)], drafts, at, len(text))
            runs.append(run)
            who.append(at)
        for at, run, answer in zip(who, runs, runner.step(runs), strict=True):
            tokens = [chosen.token for chosen in answer]
            done[at] = run.start + run.known + max(0, len(tokens) - 1)
            texts[at].extend(tokens)
            news[at].append(tokens)
    return news


@pytest.mark.parametrize("most_rows", [None, 2])
@pytest.mark.parametrize(
    "tiny",
    [
        TinyModel(),
        TinyModel("Gemma2ForCausalLM", extra={"sliding_window": 12, "query_pre_attn_scalar": 16}),
    ],
    ids=lambda tiny: tiny.architecture,
)
def test_the_same_tokens_as_plain_steps(tmp_path, tiny, most_rows):
    directory = write_checkpoint(tmp_path / "model", tiny)
    expected = play(Runner(inspect(directory), config_of(directory, kernels=False)))
    recorder = Recorder()
    runner = device_runner(directory, recorder, most_rows)
    assert play(runner) == expected
    assert recorder.captured >= 2 and recorder.replayed > 10
    assert not runner.memory.data[0].any(), "page 0 stays zero"
    assert runner.memory.data[PAGES].any(), "padding was written, to the scratch page"


def test_the_same_tokens_through_flashinfer(tmp_path):
    """Beside chunks of prompts the last layer computes fewer rows than the others, by another plan of the same step."""
    directory = write_checkpoint(
        tmp_path / "model", TinyModel("Gemma2ForCausalLM", extra={"sliding_window": 12, "query_pre_attn_scalar": 16})
    )
    expected = play(Runner(inspect(directory), config_of(directory, kernels=False)))
    recorder = Recorder()
    runner = device_runner(directory, recorder)
    attention = FlashInferPaged(Heads.of(runner.decoder.config), runner.memory, FLASHINFER)
    runner._device = DeviceSteps(
        runner.decoder, runner.memory, runner._builder, attention, capture=recorder, most_sequences=6, max_positions=160
    )
    assert play(runner) == expected
    assert recorder.replayed > 3


def test_what_cannot_be_captured_runs_as_it_is(tmp_path, caplog):
    directory = write_checkpoint(tmp_path / "model", TinyModel())

    def refuse(body):
        raise RuntimeError("operation not permitted when stream is capturing")

    expected = play(Runner(inspect(directory), config_of(directory, kernels=False)))
    assert play(device_runner(directory, refuse)) == expected
    assert "can't be captured" in caplog.text


def test_routed_experts_are_not_captured(tmp_path):
    extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    directory = write_checkpoint(tmp_path / "model", TinyModel("Qwen3MoeForCausalLM", extra=extra))
    runner = Runner(inspect(directory), config_of(directory, kernels=False))
    attention = GatherPaged(Heads.of(runner.decoder.config), runner.memory)
    assert not GraphSteps(
        runner.decoder, runner.memory, attention, most_sequences=4, max_positions=160, capture=Recorder()
    ).possible


def test_without_a_backend_torch_gathers(tmp_path):
    directory = write_checkpoint(tmp_path / "model", TinyModel())
    runner = Runner(inspect(directory), config_of(directory, kernels=False))
    expected = play(runner)
    runner._device = DeviceSteps(
        runner.decoder, runner.memory, runner._builder, None, capture=Recorder(), most_sequences=4, max_positions=160
    )
    runner.memory.data.zero_()
    assert play(runner) == expected
    assert torch.equal(runner.memory.data[0], torch.zeros_like(runner.memory.data[0]))
