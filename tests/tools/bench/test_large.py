"""The bench of large models: its shapes, its figures, and what other engines get of the weights."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import transformers
from tests.tools.bench.test_engine import row

from penstock.bench.engine.shapes import CHUNKED, LATENT, MIXED, LlamaShape, checkpoint
from penstock.bench.engine.subjects import OURS
from penstock.bench.large import forms
from penstock.bench.large.experts import figures_of, sitting
from penstock.bench.large.families import families
from penstock.bench.large.fetching import fetch_figures
from penstock.bench.large.kv_bytes import kv_figures
from penstock.bench.large.measure import measure
from penstock.bench.large.pictures import cell_encoders, tile_encoders
from penstock.bench.large.ranks import LOADS, STAGED, death_s
from penstock.bench.large.ranks import figures_of as ranks_of
from penstock.checkpoint import inspect
from penstock.checkpoint.model_config import parse_config
from penstock.checkpoint.tensors import needed_tensors
from penstock.engine.config import EngineConfig
from penstock.engine.forward.runner import Runner
from penstock.engine.kernels.cpu.decoder import CompiledDecoder
from penstock.engine.request import SamplingParams
from penstock.engine.sampling.choice import Choice
from penstock.engine.step.run import Run
from penstock.runtime.config import ConfigError

TINY = LlamaShape(
    name="tiny", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=512, experts=3
)


def test_the_shape_has_the_parameters_that_it_says():
    total = MIXED.layers * MIXED.layer_parameters + MIXED.vocab * MIXED.hidden
    assert total == pytest.approx(1e9, rel=0.1)
    assert MIXED.active_parameters == pytest.approx(250e6, rel=0.1)


@pytest.mark.parametrize("shape", [LATENT, CHUNKED], ids=lambda shape: shape.name)
def test_so_have_the_forms_which_the_kernels_compute(tmp_path, shape):
    config = parse_config(tmp_path / "config.json", shape.config)
    sizes = {name: math.prod(size) for name, size in needed_tensors(config).items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    total = sum(sizes.values())
    assert total == pytest.approx(1e9, rel=0.1)
    assert total - experts * (1 - config.experts.per_token / config.experts.count) == pytest.approx(250e6, rel=0.1)
    assert CompiledDecoder.fits(config)


def tiny(shape):
    """The same form with few numbers."""
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 512, "experts": 8, "expert_intermediate": 32}
    if shape is LATENT:
        ranks = {"query_rank": 32, "rank": 32, "plain_dim": 16, "turned_dim": 16, "value_dim": 16}
        return replace(shape, **sizes, **ranks, intermediate=96, groups=4, groups_used=2)
    return replace(shape, **sizes, kv_heads=2, head_dim=16)


@pytest.mark.parametrize("shape", [LATENT, CHUNKED], ids=lambda shape: shape.name)
def test_a_form_is_the_same_model_for_us_and_for_transformers(tmp_path, shape):
    directory = checkpoint(tiny(shape), tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = [(7 * number) % 256 for number in range(20)]
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0, -1]
    runner = Runner(inspect(directory), EngineConfig(directory, dtype="float32", kv_pool_tokens=64, threads=1))
    choice = Choice(SamplingParams(max_tokens=4, temperature=0.0), frozenset(), tokens, 20)
    found = runner.logits([Run(choice, 0, 20, [1, 2], ("one", 0))])
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=1e-4)


def test_a_form_is_beside_transformers_and_beside_torch():
    rows = [
        replace(row(OURS, [rate, rate], [6.0, 6.0], cell, "deepseek"), subject=subject)
        for cell, rates in (("decode_b1", (6.0, 4.0, 2.0)), ("decode_4k", (6.0, 3.0, 12.0)))
        for subject, rate in zip(forms.sitting(LATENT, quick=False).subjects, rates, strict=True)
    ]
    found = {figure.id: figure for figure in forms.figures_of(LATENT, rows)}
    assert {id: found[id].value for id in found if "_vs_" in id} == {
        "deepseek_decode_vs_best": 3.0,
        "deepseek_decode_vs_torch": 1.5,
        "deepseek_decode_4k_vs_best": 0.5,
        "deepseek_decode_4k_vs_torch": 2.0,
    }
    assert found["deepseek_decode_4k_vs_best"].met is False
    assert "transformers" in found["deepseek_decode_vs_best"].against
    assert "torch" in found["deepseek_decode_vs_torch"].against
    assert found["decode_b1_deepseek_penstock_torch_tokens_per_s"].value == 4.0


def test_every_cell_of_a_form_has_its_figure():
    cells = {shape: [cell.name for cell in forms.sitting(shape, quick=False).cells] for shape in (LATENT, CHUNKED)}
    assert cells == {LATENT: ["decode_b1", "decode_b8", "decode_4k"], CHUNKED: ["decode_b1", "decode_b8"]}


def test_a_shape_of_experts_is_a_checkpoint(tmp_path):
    found = inspect(checkpoint(TINY, tmp_path))
    assert (found.config.architecture, found.config.tied) == ("MixtralForCausalLM", True)
    assert (found.config.experts.count, found.config.experts.per_token) == (3, 2)
    routers, norms = TINY.layers * 3 * TINY.hidden, (2 * TINY.layers + 1) * TINY.hidden
    matrices = TINY.layers * TINY.layer_parameters + TINY.vocab * TINY.hidden
    assert found.parameters == matrices + routers + norms


def test_each_figure_is_beside_the_better_peer():
    rows = [
        row(name, [rate, rate], [6.0, 6.0], cell, "moe")
        for cell, rates in (("decode_b1", (6.0, 4.0, 2.0)), ("decode_b8", (6.0, 3.0, 12.0)))
        for name, rate in zip((OURS, "llamacpp", "transformers"), rates, strict=True)
    ]
    found = {figure.id: figure for figure in figures_of(rows)}
    assert (found["moe_decode_vs_best"].value, found["moe_decode_vs_best"].met) == (1.5, True)
    assert (found["moe_decode8_vs_best"].value, found["moe_decode8_vs_best"].met) == (0.5, False)
    assert "transformers" in found["moe_decode8_vs_best"].against
    assert found["decode_b8_moe_llamacpp_tokens_per_s"].value == 3.0


def test_every_cell_has_its_figure():
    for quick in (True, False):
        cells = [cell.name for cell in sitting(quick).cells]
        assert [figure.id for figure in figures_of([])] == ["moe_decode_vs_best", "moe_decode8_vs_best"]
        assert cells == ["decode_b1", "decode_b8"]


def test_ranks_are_compared_round_by_round():
    ratio, split, whole = ranks_of(LOADS[0], [9.0, 8.0, 30.0], [10.0, 10.0, 10.0])
    assert (ratio.id, ratio.value, ratio.goal, ratio.met) == ("tp2_vs_threads2", 0.9, 0.85, True)
    assert (split.value, whole.value) == (9.0, 10.0)
    assert ranks_of(LOADS[1], [1.0], [2.0])[0].met is None
    speedup, _, alone = ranks_of(STAGED[0], [18.0], [10.0])
    assert (speedup.value, speedup.goal, speedup.met) == (1.8, 1.6, True)
    assert alone.against == "one process with one thread"


async def test_a_death_of_a_rank_is_timed():
    assert 0 < await death_s() < 30


def test_an_architecture_counts_when_all_its_tests_have_passed():
    def case(architecture, outcome=""):
        told = f'<property name="architecture" value="{architecture}"/><property name="other" value="Wrong"/>'
        return f"<testcase><properties>{told}</properties>{outcome}</testcase>"

    cases = [case("Right"), case("Right"), case("Wrong"), case("Wrong", "<failure/>"), "<testcase/>"]
    (found,) = families(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    assert (found.id, found.value, found.goal, found.met) == ("oracle_families", 1, 2, False)
    assert found.against.startswith("2 tried, in 4 tests")
    with pytest.raises(ValueError, match="names an architecture"):
        families("<testsuites><testsuite><testcase/></testsuite></testsuites>")


async def test_latent_attention_keeps_a_vector_and_its_rotated_part():
    ratio, latent, grouped = await kv_figures(True)
    assert (latent.value, grouped.value) == (2 * (512 + 64), 2 * 8 * (128 + 128))
    assert (ratio.value, ratio.met) == (pytest.approx(576 / 2048), True)


async def test_a_sixth_of_a_long_prefix_is_fetched_and_its_last_window():
    share, *times = await fetch_figures(True)
    far, blocks = (4096 - 1024) // 16, 4096 // 16
    assert share.value == pytest.approx((far / 6 + blocks - far) / blocks, abs=0.002)
    assert share.met and [one.id for one in times] == ["sliding_fetch_s_mapped", "sliding_fetch_s_streamed"]


async def test_a_part_that_there_is_not_is_named():
    with pytest.raises(
        ConfigError, match="part = 'exports': must be one of families, kv, fetch, experts, forms, ranks, lora, pictures"
    ):
        await measure(True, ["exports"])


@pytest.mark.parametrize("made", [tile_encoders, cell_encoders])
def test_both_encoders_see_the_same(tmp_path, made):
    encoders = made(tmp_path)
    torch.testing.assert_close(encoders.ours(), encoders.theirs(), atol=1e-3, rtol=1e-3)


def test_llama_cpp_gets_a_layers_experts_in_one_tensor(tmp_path):
    gguf = pytest.importorskip("gguf")
    from loadtest.peers.gguf_file import write
    from safetensors.torch import load_file

    directory = checkpoint(TINY, tmp_path)
    write(directory, directory / "bfloat16.gguf", "bfloat16")
    weights = load_file(directory / "model.safetensors")
    reader = gguf.GGUFReader(directory / "bfloat16.gguf")
    found = {tensor.name: tensor for tensor in reader.tensors}
    for theirs, ours in (("ffn_gate_exps", "w1"), ("ffn_up_exps", "w3"), ("ffn_down_exps", "w2")):
        whole = torch.from_numpy(found[f"blk.1.{theirs}.weight"].data.copy()).view(torch.bfloat16)
        each = [weights[f"model.layers.1.block_sparse_moe.experts.{number}.{ours}.weight"] for number in range(3)]
        assert torch.equal(whole, torch.stack(each))
    router = torch.from_numpy(found["blk.0.ffn_gate_inp.weight"].data.copy())
    assert router.dtype == torch.float32
    assert torch.equal(router, weights["model.layers.0.block_sparse_moe.gate.weight"].float())
    assert reader.fields["llama.expert_count"].parts[-1][0] == 3
    assert reader.fields["llama.expert_used_count"].parts[-1][0] == 2
