"""The engine computes what transformers computes, for every family, however the work is cut up."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from penstock.checkpoint import inspect
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.forward.runner import Runner
from penstock.engine.request import SamplingParams
from penstock.engine.sampling.choice import Choice
from penstock.engine.step.run import Run
from penstock.testing.checkpoints import TinyModel, write_checkpoint, write_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.25,
}


def made_by_transformers(directory, name, **fields):
    """A checkpoint that transformers itself drew and saved."""
    torch.manual_seed(7)
    settings = getattr(transformers, f"{name}Config")(**{**SIZES, **fields})
    model = getattr(transformers, f"{name}ForCausalLM")(settings)
    model.save_pretrained(directory)
    write_tokenizer(directory / "tokenizer.json")


def made_here(directory, name, **fields):
    """A checkpoint of ours: norms and biases are random too, and config.json has the older spelling."""
    write_checkpoint(directory, TinyModel(architecture=f"{name}ForCausalLM", **fields))


def tied_with_a_head(directory, name, **fields):
    """config.json ties the head to the embedding, and the file holds another head: that one counts."""
    write_checkpoint(directory, TinyModel(architecture=f"{name}ForCausalLM", tied=False, **fields))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))


CASES = {
    "llama": (made_by_transformers, "Llama", {}),
    "llama-tied-llama3": (made_by_transformers, "Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "mistral": (made_by_transformers, "Mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "mistral-wide-heads": (made_by_transformers, "Mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2-tied": (made_by_transformers, "Qwen2", {"tie_word_embeddings": True}),
    "qwen3": (made_by_transformers, "Qwen3", {"head_dim": 32}),
    "qwen3-tied-yarn": (
        made_by_transformers,
        "Qwen3",
        {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": YARN},
    ),
    "llama-biased-sharded": (made_here, "Llama", {"extra": {"attention_bias": True, "mlp_bias": True}, "shards": 3}),
    "mistral-linear": (made_here, "Mistral", {"extra": {"rope_scaling": {"type": "linear", "factor": 2.0}}}),
    "llama-two-scalings": (
        made_here,
        "Llama",
        {"extra": {"rope_parameters": LLAMA3, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}},
    ),
    "llama-two-originals": (
        made_here,
        "Llama",
        {"extra": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 256}},
    ),
    "qwen3-yarn-backwards": (
        made_here,
        "Qwen3",
        {"extra": {"rope_scaling": {**YARN, "beta_fast": 1.0, "beta_slow": 24.0}}},
    ),
    "llama-tied-with-a-head": (tied_with_a_head, "Llama", {}),
    "qwen2-tied-with-a-head": (tied_with_a_head, "Qwen2", {"kv_heads": 4}),
    "qwen2-biased": (made_here, "Qwen2", {"kv_heads": 4}),
    "qwen3-biased": (made_here, "Qwen3", {"tied": True, "extra": {"attention_bias": True}}),
}
LENGTHS = (1, 2, 15, 16, 17, 33, 129, 700)


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """(directory, the same model in transformers)."""
    make, name, fields = CASES[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    make(directory, name, **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return directory, model.eval()


@pytest.fixture(autouse=True)
def told(request, record_property):
    """Which architecture a test is of, for who reads the report."""
    if "case" in request.fixturenames:
        record_property("architecture", inspect(request.getfixturevalue("case")[0]).config.architecture)


def prompt_of(length):
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def logits_of(model, tokens):
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


def greedy_of(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


class Recorder:
    """A runner whose logits can be looked at."""

    def __init__(self, directory, kernels=True):
        self.runner = Runner(inspect(directory), EngineConfig(model=directory, kv_pool_tokens=3200, kernels=kernels))
        self._compute = self.runner.logits
        self.runner.logits = self._record
        self._next_page = 1

    def _record(self, order, features=None):
        self.logits = self._compute(order, features)
        return self.logits

    def pages(self, tokens):
        count = -(-tokens // 16)
        self._next_page += count
        return list(range(self._next_page - count, self._next_page))


def run_of(tokens, start, count, pages, drafts=()):
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)  # else no logits leave the kernels
    choice = Choice(params, frozenset(), tokens, len(tokens), tuple(drafts))
    return Run(choice, start, count, pages, (str(pages[0]), 0))


def test_all_logits_of_a_whole_prompt(case):
    directory, model = case
    recorder = Recorder(directory)
    prompt = prompt_of(700)
    recorder.runner.step([run_of(prompt[:1], 0, 1, recorder.pages(700), prompt[1:])])
    torch.testing.assert_close(recorder.logits, logits_of(model, prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("chunk", "kernels"), [(3, True), (7, True), (16, False), (250, True)])
def test_chunked_prompts_alone_and_together(case, chunk, kernels):
    """Steps of few rows and of many, and with torch alone."""
    directory, model = case
    recorder = Recorder(directory, kernels)
    prompts = [prompt_of(length) for length in LENGTHS]
    pages = [recorder.pages(len(prompt)) for prompt in prompts]
    expected = [logits_of(model, prompt)[-1] for prompt in prompts]
    for start in range(0, max(LENGTHS), chunk):
        live = [at for at, prompt in enumerate(prompts) if start < len(prompt)]
        runs = [run_of(prompts[at], start, min(chunk, len(prompts[at]) - start), pages[at]) for at in live]
        answers = recorder.runner.step(runs)
        ended = [at for at, answer in zip(live, answers, strict=True) if answer]
        assert ended == [at for at in live if len(prompts[at]) <= start + chunk]
        for at, answer in zip(live, answers, strict=True):
            if answer:
                assert answer[0].token == int(expected[at].argmax())
        found = sorted(row.tolist() for row in recorder.logits)
        wanted = sorted(expected[at].tolist() for at in ended)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=1e-4, rtol=0)


async def test_greedy_ids_of_mixed_batches(case, kit):
    directory, model = case
    requests = [kit.request(str(length), length, kit.greedy(6)) for length in LENGTHS]
    expected = [greedy_of(model, request.prompt, 6) for request in requests]
    config = EngineConfig(directory, kv_pool_tokens=4096, max_batch_tokens=100, max_running=8, threads=1)
    async with Engine.open(config) as engine:
        answers = await kit.read_all(engine, requests)
        assert [answer.ids for answer in answers] == expected
        assert (await kit.read(engine, requests[-1])).ids == expected[-1]
