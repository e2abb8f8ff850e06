"""Layers of experts in the C++ step equal the same layers in torch, over the same packed matrices."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from penstock.checkpoint import Checkpoint, inspect
from penstock.engine.kernels.cpu.build import instruction_sets
from penstock.engine.kernels.cpu.decoder import CompiledDecoder
from penstock.engine.kernels.cpu.machine import Machine
from penstock.engine.kernels.cpu.matrix import PackedMatrix
from penstock.engine.layers.stacks import Stack
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.loading import load_weights
from penstock.engine.models.packed import packed_weights
from penstock.engine.request import SamplingParams
from penstock.engine.sampling.choice import Choice
from penstock.engine.step.batch import BatchBuilder, arrange
from penstock.engine.step.memory import PageMemory
from penstock.engine.step.run import Run
from penstock.testing.checkpoints import TinyModel, write_checkpoint

KINDS = ("float32", "bfloat16", "int8", "int4", "lossless")
CPU = torch.device("cpu")
MIXTRAL = {
    "architecture": "MixtralForCausalLM",
    "hidden_size": 48,
    "intermediate_size": 80,
    "extra": {"num_local_experts": 5, "num_experts_per_tok": 2},
}
ONE_EACH = {**MIXTRAL, "extra": {"num_local_experts": 16, "num_experts_per_tok": 1}}
WIDE = {**MIXTRAL, "hidden_size": 656, "intermediate_size": 592, "layers": 2}
QWEN = {
    "architecture": "Qwen3MoeForCausalLM",
    "extra": {"num_experts": 18, "num_experts_per_tok": 7, "moe_intermediate_size": 16, "mlp_only_layers": [1]},
}
LLAMA_4 = {
    "architecture": "Llama4ForCausalLM",
    "intermediate_size": 48,
    "layers": 4,
    "extra": {
        "intermediate_size_mlp": 80,
        "num_local_experts": 6,
        "attention_chunk_size": 40,
        "floor_scale": 16,
        "moe_layers": [0, 2, 3],
    },
}
TWO_WEIGHED = {**LLAMA_4, "extra": {**LLAMA_4["extra"], "num_experts_per_tok": 2, "use_qk_norm": False}}
DEEPSEEK = {
    "architecture": "DeepseekV3ForCausalLM",
    "extra": {
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
}
MANY_HEADS = {
    **DEEPSEEK,
    "heads": 40,
    "extra": {**DEEPSEEK["extra"], "q_lora_rank": None, "attention_bias": True, "kv_lora_rank": 144, "n_group": 1}
    | {"topk_group": 1, "norm_topk_prob": False, "rope_interleave": False, "v_head_dim": 80},
}
MANY_EXPERTS = {
    "architecture": "Qwen3MoeForCausalLM",
    "hidden_size": 1040,
    "layers": 1,
    "extra": {"num_experts": 261, "num_experts_per_tok": 5, "moe_intermediate_size": 16},
}
"""Several threads share the scores of a row."""
MODELS = {
    "mixtral": MIXTRAL,
    "one each": ONE_EACH,
    "wide": WIDE,
    "qwen": QWEN,
    "llama 4": LLAMA_4,
    "two weighed": TWO_WEIGHED,
    "many experts": MANY_EXPERTS,
    "deepseek": DEEPSEEK,
    "many heads": MANY_HEADS,
}


@dataclass
class Both:
    """One model's steps by step.cpp and by torch, each with a memory of its own."""

    compiled: CompiledDecoder
    decoder: Decoder
    builder: BatchBuilder
    memory: PageMemory
    rounds: bool

    @classmethod
    def of(cls, checkpoint: Checkpoint, kind: str, machine: Machine) -> Both:
        config, packed = checkpoint.config, packed_weights(checkpoint, kind, torch.float32, 1, 0)

        def keep(stack: Stack, _, bias):
            return PackedMatrix.of(machine, packed.matrices[stack.name], bias, stack.columns), None

        def keep_heads(stack: Stack):
            return PackedMatrix.of(machine, packed.matrices[stack.name], None, stack.columns)

        kept = torch.float32 if kind == "float32" else torch.bfloat16
        weights = load_weights(checkpoint, kept, CPU, keep=keep, keep_heads=keep_heads, compute=torch.float32)
        decoder = Decoder(config, weights, 512, torch.float32)
        memories = [PageMemory(config, 64, 16, torch.float32, CPU) for _ in range(2)]
        assert CompiledDecoder.fits(config)
        compiled = CompiledDecoder(machine, config, weights, decoder.tables[0], memories[0])
        builder = BatchBuilder(memories[1], CPU, config.windows, torch.float32, chunked=config.chunked)
        return cls(compiled, decoder, builder, memories[1], machine.rounds(kind))

    def check(self, runs: list[Run]) -> torch.Tensor:
        order = arrange(runs)
        with torch.inference_mode():
            expected = self.decoder.forward(self.builder.build(order), self.memory)
        found = self.compiled.forward(order)
        if self.rounds:  # a row may choose another expert then
            assert torch.nn.functional.cosine_similarity(found, expected).median() > 0.99
        else:
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
        return found


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def run_of(tokens: list[int], pages: list[int], start: int = 0) -> Run:
    """A run whose rows are all sampled."""
    drafts = tuple(tokens[start + 1 :])
    choice = Choice(SamplingParams(max_tokens=4, temperature=0.0), frozenset(), tokens[: start + 1], start + 1, drafts)
    return Run(choice, start, 1, pages, (str(pages[0]), 0))


def sequences(*lengths: int) -> list[Run]:
    pages = itertools.count(1)
    return [
        run_of(tokens_of(length, number), [next(pages) for _ in range(0, length, 16)])
        for number, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module", params=instruction_sets())
def machine(request) -> Machine:
    """Kernels compute all of its products. Torch would take those of many rows where it has instructions that this set
    lacks, and would round the rows."""
    made = Machine(2, request.param)
    vars(made)["torch_multiplies_bfloat16"] = False
    return made


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory) -> Checkpoint:
    return inspect(write_checkpoint(tmp_path_factory.mktemp("model"), TinyModel(**MODELS[request.param])))


@pytest.mark.parametrize("kind", KINDS)
def test_one_row_to_many(machine, checkpoint, kind):
    both = Both.of(checkpoint, kind, machine)
    for lengths in ((1,), (2,), (3,), (1, 1, 1, 1, 1), (11,), (7, 1, 9), (40,), (130, 1), (300,)):
        both.check(sequences(*lengths))


def test_all_rows_choose_one_expert(machine, tmp_path):
    """The same token at the same position: the expert gets all rows, the others none."""
    both = Both.of(inspect(write_checkpoint(tmp_path / "model", TinyModel(**ONE_EACH))), "bfloat16", machine)
    for count in (1, 4, 12, 40):
        found = both.check([run_of([65], [1 + number]) for number in range(count)])
        assert torch.equal(found, found[:1].expand_as(found))


def test_only_some_rows_are_sampled(machine, checkpoint):
    both = Both.of(checkpoint, "float32", machine)
    text = tokens_of(30)
    silent = Run(Choice(SamplingParams(max_tokens=4), frozenset(), text, 30), 0, 20, [1, 2], ("silent", 0))
    assert both.check([silent]).shape[0] == 0
    said = run_of(text, [1, 2], start=20)
    prompt = Run(Choice(SamplingParams(max_tokens=4), frozenset(), text, 30), 0, 30, [3, 4], ("one", 0))
    assert both.check([said, prompt]).shape[0] == 11


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_neighbours(machine, checkpoint, kind):
    both = Both.of(checkpoint, kind, machine)
    runs = sequences(60, 1, 7)
    together = both.compiled.forward(runs)
    alone = torch.cat([both.compiled.forward([run]) for run in runs])
    assert torch.equal(together, alone)
    text = [*runs[0].choice.tokens, *runs[0].choice.drafts]
    cut = [
        both.compiled.forward([run_of(text[:end], [1, 2, 3, 4], begin)]) for begin, end in ((0, 9), (9, 26), (26, 60))
    ]
    assert torch.equal(torch.cat(cut), together[:60])


@pytest.mark.parametrize("kind", ["float32", "lossless"])
def test_nor_on_the_number_of_threads(checkpoint, kind):
    runs = sequences(21, 1, 4)
    one, three = (Both.of(checkpoint, kind, Machine(threads)).compiled.forward(runs) for threads in (1, 3))
    assert torch.equal(one, three)


def test_a_router_without_numbers_fails_the_row_alone(machine, tmp_path):
    """Scores that are no numbers choose experts all the same, each once."""
    checkpoint = inspect(write_checkpoint(tmp_path / "model", TinyModel(**MIXTRAL)))
    both = Both.of(checkpoint, "float32", machine)
    good = both.compiled.forward(sequences(1, 5))
    block = both.decoder._weights.layers[0].mlp
    block.router[:, :] = float("nan")
    broken = CompiledDecoder(
        machine,
        checkpoint.config,
        both.decoder._weights,
        both.decoder.tables[0],
        PageMemory(checkpoint.config, 64, 16, torch.float32, CPU),
    )
    assert good.isfinite().all()
    assert broken.forward(sequences(1, 5)).isnan().all()
