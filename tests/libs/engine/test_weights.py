"""Weights from the cache compute what weights in private memory compute, and several processes hold one copy."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from penstock.checkpoint import CheckpointError, inspect
from penstock.engine.config import EngineConfig
from penstock.engine.forward import runner as runners
from penstock.engine.forward.runner import Runner
from penstock.engine.kernels.cpu import build
from penstock.engine.kernels.cpu.pack import pack, unpack
from penstock.engine.layers.embedding import Embedding, StoredTable
from penstock.engine.models import packed as packing
from penstock.engine.models.loading import all_stacks
from penstock.engine.request import SamplingParams
from penstock.engine.sampling.choice import Choice
from penstock.engine.step.memory import PageMemory
from penstock.engine.step.run import Run
from penstock.models import NAMES, embedded
from penstock.testing.checkpoints import DEEPSEEK_IN_VECTORS, TINY_DEEPSEEK, TINY_LLAMA_4, TinyModel, write_checkpoint

MODELS = {
    "llama": TinyModel(),
    "tied": TinyModel(tied=True, vocab_size=333),
    "biased": TinyModel(architecture="Qwen2ForCausalLM", seed=2),
    "gemma": TinyModel(architecture="Gemma2ForCausalLM", tied=True, head_dim=16, extra={"sliding_window": 64}),
    "shards": TinyModel(seed=3, shards=3),
    "latent": DEEPSEEK_IN_VECTORS,
    "latent, by torch": TINY_DEEPSEEK,
    "turned": TINY_LLAMA_4,
}


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache of its own, with the compiled kernels; every model is large enough for it."""
    kernels = tmp_path / "cache" / "penstock" / "kernels"
    kernels.mkdir(parents=True, mode=0o700)
    shutil.copy(build.cached(build.kernels_directory()), kernels)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for module in (packing, runners):
        monkeypatch.setattr(module, "SMALL_BYTES", 0)
    return tmp_path / "cache" / "penstock" / "packed"


def load(directory: Path, dtype: str, cache_bytes: int = 1 << 30) -> Runner:
    return Runner(
        inspect(directory), EngineConfig(model=directory, dtype=dtype, kv_pool_tokens=640, packed_bytes=cache_bytes)
    )


@torch.inference_mode()
def logits(runner: Runner) -> torch.Tensor:
    """Of 60 tokens at once and then of one more."""
    params = SamplingParams(max_tokens=4, temperature=0.0)
    tokens = [(7 * number) % 256 for number in range(61)]
    pages = [1, 2, 3, 4]
    rows = []
    for start, count in ((0, 60), (60, 1)):
        choice = Choice(params, frozenset(), tokens[: start + count], start + count)
        rows.append(runner.logits([Run(choice, start, count, pages, ("one", 0))]).clone())
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("model", MODELS)
def test_mapped_weights_compute_the_same(tmp_path, cache, model, dtype):
    directory = write_checkpoint(tmp_path / model, MODELS[model])
    private = load(directory, dtype, cache_bytes=0)
    made, mapped = load(directory, dtype), load(directory, dtype)
    assert [(one.packed.shared, one.packed.packed) for one in (private, made, mapped)] == [
        (False, True),
        (True, True),
        (True, False),
    ]
    expected = logits(private)
    for shared in (made, mapped):
        assert torch.equal(logits(shared), expected)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "lossless"])
def test_what_latent_attention_has_for_each_head_is_in_the_file_alone(tmp_path, cache, kind):
    """In bfloat16 at least; the kernels and torch read it there."""
    checkpoint = inspect(write_checkpoint(tmp_path / "model", DEEPSEEK_IN_VECTORS))
    packed = packing.packed_weights(checkpoint, kind, torch.float32, 2, 1 << 30)
    exact, heads = torch.float32 if kind == "float32" else torch.bfloat16, checkpoint.config.n_heads
    assert packed.shared
    for number in checkpoint.layers:
        name = f"model.layers.{number}.self_attn.kv_b_proj.weight"
        both = packing.read_tensor(checkpoint.tensors[name]).view(heads, 32, 32)
        for own, expected in (("keys", both[:, :16]), ("values", both[:, 16:].transpose(1, 2))):
            found = packed.matrices[f"{number}.{own}"]
            whole = unpack(found, found.outputs).view(found.inputs, heads, -1).transpose(0, 1)
            assert torch.equal(whole, expected.to(exact))
    if kind != "lossless":
        runner = load(tmp_path / "model", kind)
        weights = runner.decoder._weights.layers[0].latent
        assert weights.keys.packed is runner.packed.matrices["0.keys"]
        assert weights.values.packed is runner.packed.matrices["0.values"]


def test_another_model_is_another_file(tmp_path, cache):
    for seed in (1, 2):
        directory = write_checkpoint(tmp_path / str(seed), TinyModel(seed=seed))
        assert load(directory, "float32").packed.packed
    assert len(list(cache.glob("*.packed"))) == 2


def test_kinds_that_are_packed_whole_are_kept_as_well(tmp_path, cache, monkeypatch):
    directory = write_checkpoint(tmp_path / "model")
    expected = logits(load(directory, "int8", cache_bytes=0))
    monkeypatch.setattr(packing, "sliced", lambda stack, kind: False)
    whole = load(directory, "int8", cache_bytes=0)
    assert torch.equal(logits(whole), expected)
    for packed in (True, False):
        one = load(directory, "int8")
        assert one.packed.packed is packed
        assert torch.equal(logits(one), expected)


def test_lossless_weights_are_kept_as_well(tmp_path, cache):
    checkpoint = inspect(write_checkpoint(tmp_path / "model"))
    arguments = (checkpoint, "lossless", torch.bfloat16, 2)
    private, made, mapped = (packing.packed_weights(*arguments, cache_bytes) for cache_bytes in (0, 1 << 30, 1 << 30))
    assert (private.shared, made.packed, mapped.packed) == (False, True, False)
    for stack in all_stacks(checkpoint):
        rows = torch.cat([packing.read_tensor(part) for part in stack.parts])
        expected = pack(rows.bfloat16().t().contiguous(), "lossless")
        for weights in (private, made, mapped):
            for field in dataclasses.fields(expected):
                own, other = (getattr(one, field.name) for one in (expected, weights.matrices[stack.name]))
                assert torch.equal(own, other) if isinstance(own, torch.Tensor) else own == other


@pytest.mark.parametrize("fault", ["no directory", "no room"])
def test_without_a_place_for_the_file_the_weights_are_private(tmp_path, cache, caplog, fault):
    directory = write_checkpoint(tmp_path / "model")
    expected = logits(load(directory, "bfloat16", cache_bytes=0))
    if fault == "no directory":
        cache.write_text("a file")
    with caplog.at_level(logging.WARNING):
        private = load(directory, "bfloat16", cache_bytes=100 if fault == "no room" else 1 << 30)
    assert not private.packed.shared
    assert torch.equal(logits(private), expected)
    said = [record for record in caplog.records if "private memory" in record.getMessage()]
    assert len(said) == 1


def test_rows_of_a_stored_table(tmp_path):
    directory = write_checkpoint(tmp_path / "model")
    checkpoint = inspect(directory)
    table = StoredTable(checkpoint.tensors["model.embed_tokens.weight"])
    ids = torch.tensor([5, 0, 319, 5])
    expected = packing.read_tensor(checkpoint.tensors["model.embed_tokens.weight"])
    assert torch.equal(table.rows(ids.tolist()), expected[ids])
    scaled = Embedding(table, torch.bfloat16, 3.0).rows(ids)
    assert torch.equal(scaled, expected[ids].bfloat16() * torch.tensor(3.0, dtype=torch.bfloat16))
    assert torch.equal(Embedding(expected.bfloat16(), torch.bfloat16, 3.0).rows(ids), scaled)
    with open(checkpoint.weight_files[0], "r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match=r"row 319 of model\.embed_tokens\.weight"):
        table.rows([319])


_PROCESS = """
import sys
from pathlib import Path
from penstock.checkpoint import inspect
from penstock.engine.config import EngineConfig
from penstock.engine.forward.runner import Runner

def private():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

before = private()
config = EngineConfig(model=Path(sys.argv[1]), dtype="bfloat16", weights="plain", kv_pool_tokens=64)
runner = Runner(inspect(config.model), config)
print(private() - before, flush=True)
sys.stdin.readline()  # until all have loaded
mapping, found = "", {"Rss": 0, "Pss": 0}
for line in open("/proc/self/smaps"):
    name = line.split()[0]
    if ":" not in name or "-" in name:
        mapping = line
    elif name[:-1] in found and mapping.rstrip().endswith(".packed"):
        found[name[:-1]] += int(line.split()[1])
print(found["Rss"], found["Pss"], flush=True)
sys.stdin.readline()  # until all have looked
"""


@pytest.mark.timeout(300)  # torch is loaded three times, and on a busy machine that takes its time
def test_three_processes_hold_one_copy(tmp_path, cache):
    """kB. The second and third start together, while the first serves."""
    shape = TinyModel(vocab_size=24000, hidden_size=1024, intermediate_size=2048, layers=4, heads=16, tied=True)
    directory = write_checkpoint(tmp_path / "model", shape)
    weights = inspect(directory).parameters * 2 // 1024
    assert weights > 90_000
    with ExitStack() as stack:
        processes = []
        for number in range(3):
            command = (sys.executable, "-c", _PROCESS, str(directory))
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
            if number == 0:
                private = [int(process.stdout.readline())]
        private += [int(process.stdout.readline()) for process in processes[1:]]
        for process in processes:
            print(file=process.stdin, flush=True)
        shares = [tuple(map(int, process.stdout.readline().split())) for process in processes]
        for process in processes:
            print(file=process.stdin, flush=True)
    assert [rss for rss, _ in shares] == pytest.approx([weights] * 3, rel=0.02), "all of it is there"
    assert sum(pss for _, pss in shares) == pytest.approx(weights, rel=0.02), "once"
    assert max(private[1:]) < 30_000, "no process has a copy of its own"
    assert private[0] < 60_000, "nor did the one who packed, but for the slices"


def test_pages_cost_memory_once_they_are_used():
    """kB of this process."""

    def private() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    config = inspect(embedded(NAMES[0])).config
    before = private()
    memory = PageMemory(config, 1000, 16, torch.float32, torch.device("cpu"))
    assert memory.block_bytes * 1000 > 100 << 20, "the memory is large enough to be noticed"
    assert private() - before < 20_000
    for page in range(1, 501):
        memory.data[page].fill_(1.0)
    assert private() - before > 0.4 * memory.block_bytes * 1000 / 1024
