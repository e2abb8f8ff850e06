"""Long texts: 64k tokens are computed in chunks, right to the last, in memory that does not grow with the text beyond
its KV, and without work in Python that grows with it."""

from __future__ import annotations

import re
import sys
import tracemalloc
import warnings
from pathlib import Path

import pytest
import torch

from penstock.checkpoint import inspect
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.forward.runner import Runner
from penstock.engine.request import Request, SamplingParams
from penstock.engine.sampling.choice import Choice, Chosen
from penstock.engine.step.memory import PageMemory
from penstock.engine.step.run import Run
from penstock.kv.spec import KvSpec
from penstock.testing.checkpoints import TinyModel, write_checkpoint

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

LONG, CHUNK, BLOCK = 1 << 16, 512, 16
TINY = TinyModel(
    vocab_size=260, hidden_size=32, intermediate_size=32, layers=1, heads=1, kv_heads=1, max_positions=LONG + 1024
)
SLACK = 48 << 20
"""What the process may take beside the KV while the last seven eighths of the text are computed."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("long") / "model", TINY)


@pytest.fixture(scope="module")
def text():
    return torch.randint(0, 256, (LONG,), generator=torch.Generator().manual_seed(5)).tolist()


def calls_of(work):
    """Python functions that are called."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def peak():
    """Most bytes that the process has had in memory since the call before."""
    most = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    Path("/proc/self/clear_refs").write_text("5")
    return most


def test_64k_tokens_in_chunks(model, text):
    runner = Runner(inspect(model), EngineConfig(model=model, kv_dtype="int8", kv_pool_tokens=LONG))
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
    choice = Choice(params, frozenset(), text, len(text))
    run = Run(choice, 0, CHUNK, list(range(1, LONG // BLOCK + 1)), ("long", 0))
    calls, early = {}, None
    for start in range(0, LONG - CHUNK, CHUNK):
        run.aim(start, CHUNK, ())
        if start in (LONG // 8, LONG - 2 * CHUNK):
            calls[start] = calls_of(lambda: runner.step([run]))
            if early is None:
                peak()  # of other tests
                early = peak()
        else:
            runner.step([run])
    run.aim(LONG - CHUNK, CHUNK, ())
    logits = runner.logits([run])[-1]
    assert len(set(calls.values())) == 1, f"work in Python grows with the text: {calls}"
    assert peak() - early < LONG * runner.memory.block_bytes // BLOCK + SLACK
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        oracle = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        wanted = oracle(torch.tensor([text]), logits_to_keep=1, use_cache=False).logits[0, -1]
    assert torch.nn.functional.cosine_similarity(logits, wanted, dim=-1) > 0.999
    assert logits.argmax() == wanted.argmax()


class Answering:
    """A model that answers at once."""

    packed = None

    def __init__(self, memory):
        self.memory = memory

    def step(self, runs):
        return [[Chosen(7)] * run.samples for run in runs]


async def test_no_step_copies_the_text(model, text):
    """One copy of its tokens would be half a MiB in each step."""

    def load(config, checkpoint):
        memory = PageMemory(checkpoint.config, config.pages, BLOCK, torch.int8, torch.device("cpu"))
        spec = KvSpec(model="", tokenizer="", layout="", dtype="int8", block_size=BLOCK, block_bytes=memory.block_bytes)
        return Answering(memory), spec

    config = EngineConfig(model=model, kv_dtype="int8", kv_pool_tokens=LONG + 1024, draft_tokens=0)
    sampling, taken = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True), []
    async with Engine.open(config, load=load) as engine:
        tracemalloc.start()
        try:
            async for _ in engine.generate(Request("long", tuple(text), sampling)):
                now, highest = tracemalloc.get_traced_memory()
                taken.append(highest - now)
                tracemalloc.reset_peak()
        finally:
            tracemalloc.stop()
    assert len(taken) > 10 and max(taken[2:]) < 192 << 10, f"bytes of the steps: {taken}"
