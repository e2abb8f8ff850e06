"""Ranks on devices that only say they are some: the tokens of a CPU, and what is where."""

from __future__ import annotations

import pytest
import torch
from tests.libs.engine import test_patches
from tests.libs.engine.cuda.pretend import Pretend, there
from tests.libs.engine.cuda.test_steps import BLOCK, PAGES, play, run_of
from tests.libs.engine.rank_threads import RankThread

from penstock.checkpoint import SUPPORTED, inspect, inspect_adapter
from penstock.engine.config import EngineConfig
from penstock.engine.forward.model import load_model
from penstock.engine.forward.runner import Runner
from penstock.engine.step.memory import PageMemory
from penstock.engine.step.pictures import PictureRows
from penstock.testing.adapters import write_adapter
from penstock.testing.checkpoints import TINY_DEEPSEEK, TINY_LLAMA_4, TinyModel, write_checkpoint

EXTRA = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": 20}
MODELS = {
    **{name: TinyModel(name, extra=EXTRA) for name in SUPPORTED if name.startswith(("Llama", "Mixtral", "Gemma2"))},
    "deepseek": TINY_DEEPSEEK,
    "llama 4": TINY_LLAMA_4,
}
SPLITS = [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one, see tests/gpu")


class PretendingThread(RankThread):
    """A rank whose device says that it is one, too."""

    def _follow(self):
        with Pretend():
            super()._follow()


def config_of(directory, **fields):
    sizes = {"kv_pool_tokens": PAGES * BLOCK, "block_size": BLOCK, "max_model_len": 160}
    return EngineConfig(model=directory, threads=1, **{"dtype": "float32", **sizes, **fields})


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_tokens_as_on_the_cpu(tmp_path, pretend, monkeypatch, name, split):
    found = inspect(write_checkpoint(tmp_path / "model", MODELS[name]))
    plain = play(Runner(found, config_of(found.path, kernels=False)))
    took = []
    zeros = PageMemory.__init__

    def watched(self, *args, **kwargs):
        zeros(self, *args, **kwargs)
        took.append((args[4], there(self.data), self.data.shape))

    monkeypatch.setattr(PageMemory, "__init__", watched)
    runner, _ = load_model(config_of(found.path, device="cuda", **split), found, PretendingThread)
    try:
        assert play(runner) == plain
    finally:
        runner.ranks.close()
    apart = {device.index: shape for device, on_device, shape in took if on_device}
    assert [*sorted(apart)] == [*range(split.get("tp", 1) * split.get("pp", 1))], "each has a device of its own"
    every, form = found.config.n_layers, found.config.kv
    layers = sum(shape[1] for shape in apart.values())
    assert layers == every * split.get("tp", 1)
    assert {shape[4] for shape in apart.values()} == {max(1, form.heads // split.get("tp", 1))}
    assert not there(runner.memory.data), "the pages themselves are in host memory"


@pytest.mark.parametrize("split", [{"tp": 2}, {"tp": 2, "ep": 2}, {"tp": 2, "ep": 2, "pp": 2}], ids=str)
def test_experts_are_computed_by_grouped_products(tmp_path, pretend, monkeypatch, split):
    """Where devices have such, also those of a rank that has some of them."""
    extra = {**EXTRA, "sliding_window": None}
    found = inspect(write_checkpoint(tmp_path / "model", TinyModel("MixtralForCausalLM", extra=extra)))
    said, ways = [], []
    for capability in ((8, 9), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, own=capability: own)
        config = config_of(found.path, device="cuda", dtype="bfloat16", **split)
        runner, _ = load_model(config, found, PretendingThread)
        try:
            said.append(play(runner))
        finally:
            runner.ranks.close()
        ways.append({layer.mlp.grouped for layer in runner.decoder._weights.layers})
    assert ways == [{False}, {True}]
    assert said[0] == said[1]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_adapters_are_where_the_ranks_are(tmp_path, pretend, split):
    found = inspect(write_checkpoint(tmp_path / "model", TinyModel()))
    adapter = inspect_adapter(write_adapter(tmp_path / "one", found.path, seed=1, strength=0.7), found.config)

    def said(runner):
        weights, texts = runner.load_adapter(adapter), [list(range(20)), list(range(30, 64))]
        for step in range(6):
            starts = [step and len(text) - 1 for text in texts]
            runs = [
                run_of(text, start, len(text) - start, list(range(8 * at + 1, 8 * at + 9)), (), 2 * at)
                for at, (text, start) in enumerate(zip(texts, starts, strict=True))
            ]
            runs[1].adapter = weights
            for text, answer in zip(texts, runner.step(runs), strict=True):
                text.append(answer[0].token)
        return texts

    plain = said(Runner(found, config_of(found.path, kernels=False)))
    runner, _ = load_model(config_of(found.path, device="cuda", **split), found, PretendingThread)
    try:
        assert said(runner) == plain
    finally:
        runner.ranks.close()


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_embeddings_of_pictures_reach_the_first_stage(tmp_path, pretend, split):
    seeing = test_patches.Seeing(tmp_path)
    found = inspect(seeing.directory)
    tokens, shown = test_patches.prompt(9, test_patches.drawn(1, 3, 2), 12)

    def logits(runner):
        rows, pages = PictureRows(shown, tokens, seeing.form), list(range(1, 1 + PAGES // 2))
        made = []
        for start in range(0, len(tokens), 10):
            run = run_of(tokens[: start + 1], start, 1, pages, tokens[start + 1 : start + 10])
            run.pictures = rows
            made.append(runner.logits([run]).cpu().clone())
        return torch.cat(made)

    with torch.inference_mode():
        plain = logits(Runner(found, config_of(found.path, kernels=False)))
        runner, _ = load_model(config_of(found.path, device="cuda", **split), found, PretendingThread)
        try:
            torch.testing.assert_close(logits(runner), plain, atol=1e-4, rtol=1e-4)
        finally:
            runner.ranks.close()
