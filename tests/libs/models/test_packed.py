"""Packed rows: what is computed for a batch is what the plain network computes for each document by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen

from penstock.engine.kernels.cpu.build import instruction_sets
from penstock.models import captured, embedded, native, train
from penstock.models.cuda import CudaKernels, positions
from penstock.models.data import DocumentStream, Spans, TokenizedDocument, collate, pack
from penstock.models.export import export
from penstock.models.export import load as load_net
from penstock.models.induction import initialise
from penstock.models.native import NativeKernels, difference, kernels_for, library
from penstock.models.net import Net, NetShape, Norm
from penstock.models.pace import PlainTrainer, pace
from penstock.models.packed import PackedNet, TorchKernels
from penstock.models.pair import train_pair
from penstock.models.presets import PRESETS
from penstock.models.tokenizer import load
from penstock.models.train import Trainer, pieces

SHAPE = NetShape(3, 64, 96, 2, 2, vocabulary=208, head=32)
WIDE = NetShape(3, 128, 352, 2, 2, vocabulary=512)
LENGTHS = (5, 64, 65, 130, 1, 200, 17, 33)
SPANS = Spans.of(LENGTHS)
EXACT = TorchKernels(torch.float32)
needs_bfloat16 = pytest.mark.skipif(
    not {"amx", "avx512_bf16"} & {*instruction_sets()}, reason="needs a processor that multiplies bfloat16"
)


def document(length: int, vocabulary: int) -> TokenizedDocument:
    rng = Random(length)
    ids = [rng.randrange(vocabulary) for _ in range(length)]
    return TokenizedDocument(ids, [rng.choice((0.0, 0.0, 1.0, 3.0)) for _ in ids], range(length))


def network(shape: NetShape) -> Net:
    net = Net(shape)
    initialise(net, 0)
    return net


def alone(net: Net, sample: TokenizedDocument) -> torch.Tensor:
    """The naive reference: the weighted loss of one document."""
    ids = torch.tensor(sample.ids)
    losses = F.cross_entropy(net(ids[None])[0, :-1], ids[1:], reduction="none")
    return (losses * torch.tensor(sample.weights)[1:]).sum()


def gradients(net: Net, loss: torch.Tensor) -> torch.Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.detach().float(), wanted.detach().float()
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, heads=4), WIDE], ids=["narrow", "shared keys", "wide"])
def test_a_packed_batch_has_the_loss_and_the_gradients_of_its_documents(shape):
    net = network(shape) if shape.heads == shape.kv_heads else Net(shape)
    samples = [document(n, shape.vocabulary) for n in LENGTHS]
    wanted = torch.stack([alone(net, sample) for sample in samples if len(sample.ids) > 1]).sum()
    found = PackedNet(net, EXACT).cross_entropy(pack(samples))
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert apart(gradients(net, found), gradients(net, wanted)) < 1e-4


def test_a_document_does_not_notice_its_neighbours():
    net = network(SHAPE)
    samples = [document(n, SHAPE.vocabulary) for n in LENGTHS if n > 1]
    logits = PackedNet(net, EXACT).logits(pack(samples))
    singly = [PackedNet(net, EXACT).logits(pack([sample])) for sample in samples]
    assert torch.allclose(logits, torch.cat(singly), atol=1e-5)


def test_pieces_of_a_batch_sum_up_to_its_mean():
    net = network(SHAPE)
    samples = [document(n, SHAPE.vocabulary) for n in LENGTHS]
    (whole,), parts = pieces(samples), pieces(samples, 130)
    assert [piece.spans.lengths for piece in parts] == [[5, 64, 65], [130], [1, 200], [17, 33]]
    assert float(whole.weights.sum()) == pytest.approx(1.0)
    model = PackedNet(net, EXACT)
    whole_gradient = gradients(net, model.cross_entropy(whole))
    summed = torch.stack([gradients(net, model.cross_entropy(piece)) for piece in parts]).sum(0)
    assert apart(summed, whole_gradient) < 1e-4


# ---------------------------------------------------------------- what is compiled


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    found = library()
    assert found is not None, "this processor multiplies bfloat16, and the tests have a compiler"
    return NativeKernels(found)


def both_ways(function, reference, *inputs):
    """Results and gradients of a kernel, and those of torch in float32 from the same numbers."""
    ways = []
    for call, cast in ((function, lambda x: x), (reference, torch.Tensor.float)):
        given = [cast(x).detach().requires_grad_() for x in inputs]
        out = call(*given)
        out = out if isinstance(out, tuple) else (out,)
        generator = torch.Generator().manual_seed(5)
        slopes = [torch.randn(o.shape, generator=generator).bfloat16().to(o.dtype) for o in out]
        ways.append([*out, *torch.autograd.grad(out, given, slopes)])
    return zip(*ways, strict=True)


def numbers(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


@needs_bfloat16
def test_compiled_attention_is_that_of_torch(kernels):
    qkv = numbers(sum(LENGTHS), 3 * 128).bfloat16()
    for found, wanted in both_ways(
        lambda x: kernels.attention(x, SPANS, WIDE), lambda x: EXACT.attention(x, SPANS, WIDE), qkv
    ):
        assert apart(found, wanted) < 0.006
    rows = qkv.split(list(LENGTHS))
    singly = [kernels.attention(part, Spans.of([len(part)]), WIDE) for part in rows]
    assert torch.equal(kernels.attention(qkv, SPANS, WIDE), torch.cat(singly))


@needs_bfloat16
def test_compiled_attention_of_large_scores_is_that_of_torch(kernels):
    """Scores up to some hundreds, as induction heads have them: the largest takes everything."""
    qkv = (numbers(150, 3 * 128) * 6).bfloat16()
    for found, wanted in both_ways(
        lambda x: kernels.attention(x, Spans.of([150]), WIDE), lambda x: EXACT.attention(x, Spans.of([150]), WIDE), qkv
    ):
        assert found.isfinite().all() and apart(found, wanted) < 0.05


@needs_bfloat16
@pytest.mark.parametrize("added", [True, False])
def test_compiled_norms_are_those_of_torch(kernels, added):
    slope, results = numbers(70, 128).bfloat16().float(), []
    for given in (kernels, EXACT):
        module = Norm(128, 1e-5)
        module.weight = torch.nn.Parameter(numbers(128).abs())
        inputs = [numbers(70, 128).requires_grad_()]
        if added:
            inputs.append((2 * numbers(70, 128)).bfloat16().float().requires_grad_())
        change = inputs[1].to(given.dtype) if added else None
        total, normed = given.norm(inputs[0], change, module)
        (total.sum() + (normed.float() * slope).sum()).backward()
        results.append([total, normed, module.weight.grad, *(each.grad for each in inputs)])
    for found, wanted in zip(*results, strict=True):
        assert apart(found, wanted) < 0.004


@needs_bfloat16
def test_the_compiled_gate_is_that_of_torch(kernels):
    for found, wanted in both_ways(kernels.gate, EXACT.gate, (numbers(50, 704) * 3).bfloat16()):
        assert apart(found, wanted) < 0.004


@needs_bfloat16
def test_the_compiled_loss_is_that_of_torch(kernels):
    logits, targets = (numbers(40, 512) * 5).bfloat16(), torch.arange(40) * 12
    weights = numbers(40).abs()
    for found, wanted in both_ways(
        lambda x: kernels.cross_entropy(x.clone(), targets, weights),
        lambda x: EXACT.cross_entropy(x, targets, weights),
        logits,
    ):
        assert apart(found, wanted) < 0.004
    once = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(kernels.cross_entropy(once.clone(), targets, weights), once)
    twice = logits.clone().requires_grad_()
    (doubled,) = torch.autograd.grad(2 * kernels.cross_entropy(twice.clone(), targets, weights), twice)
    assert torch.equal(doubled, 2 * gradient)


@needs_bfloat16
def test_compiled_training_errs_no_more_than_torch_in_bfloat16(kernels):
    net, samples = network(WIDE), [document(n, WIDE.vocabulary) for n in LENGTHS]
    exact, rounded, compiled = (
        gradients(net, PackedNet(net, each).cross_entropy(pack(samples)))
        for each in (EXACT, TorchKernels(torch.bfloat16), kernels)
    )
    assert apart(compiled, exact) < 1.2 * apart(rounded, exact)


@needs_bfloat16
def test_tiles_compute_what_registers_compute(tmp_path):
    """The code for AMX, its instructions replaced by software."""
    tiles = Path(__file__).parent / "software_tiles.h"
    compiled = NativeKernels(native.load(native.built(tmp_path / "tiles", ("-D__AMX_BF16__", "-include", str(tiles)))))
    assert difference(compiled) < 0.005


@needs_bfloat16
def test_without_a_compiler_or_with_wrong_results_torch_computes(monkeypatch, tmp_path):
    shape, cpu = PRESETS["mini"].pole.shape, torch.device("cpu")
    assert isinstance(kernels_for(shape, cpu), NativeKernels)
    assert isinstance(kernels_for(PRESETS["tiny"].pole.shape, cpu), TorchKernels)
    with monkeypatch.context() as patch:
        patch.setattr(native, "difference", lambda kernels: 0.02)
        assert library.__wrapped__() is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert library.__wrapped__() is None
    monkeypatch.setattr(native, "library", library.__wrapped__)
    assert isinstance(kernels_for(shape, cpu), TorchKernels)


@needs_bfloat16
def test_wrong_results_differ(kernels):
    class Wrong(NativeKernels):
        def attention(self, qkv, spans, shape):
            return super().attention(qkv, Spans.of([sum(spans.lengths)]), shape)

    assert difference(kernels) < 0.005 < 0.1 < difference(Wrong(kernels.library))


# ---------------------------------------------------------------- what a GPU computes


def test_a_padded_batch_has_the_loss_and_the_gradients_of_the_batch():
    net, batch = network(SHAPE), pack([document(n, SHAPE.vocabulary) for n in LENGTHS])
    wider, sizes = captured.padded(batch)
    assert sizes == (1024, 2048, 32, 1024) == (wider.tokens, len(wider.keep), len(wider.spans.bounds) - 1, 1024)
    assert wider.spans.lengths == [*LENGTHS, 1024 - 515, *[0] * 23] and wider.spans.longest == 1024
    model = PackedNet(net, EXACT)
    wanted, found = model.cross_entropy(batch), model.cross_entropy(wider)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert apart(gradients(net, found), gradients(net, wanted)) < 1e-5
    full = pack([TokenizedDocument(range(n), [1.0] * n, ()) for n in [2049, *[33] * 31]])
    assert captured.padded(full)[1] == (3072, 4096, 64, 4096)


def test_kernels_of_a_gpu_compute_what_torch_computes(monkeypatch):
    """Run here, with torch's attention in place of the GPU's."""

    def attend(q, k, v, bounds, *_, window_size):
        assert window_size == (-1, 0)
        out = [
            F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in part), is_causal=True)[0].transpose(0, 1)
            for part in zip(*(torch.split(x, bounds.diff().tolist()) for x in (q, k, v)), strict=True)
        ]
        return torch.cat(out)

    monkeypatch.setattr(varlen, "varlen_attn", attend)
    shape = replace(WIDE, heads=4)
    net, samples = Net(shape), [document(n, WIDE.vocabulary) for n in LENGTHS]
    found, wanted = (
        gradients(net, PackedNet(net, each).cross_entropy(pack(samples)))
        for each in (CudaKernels(), TorchKernels(torch.bfloat16))
    )
    assert apart(found, wanted) < 0.03
    assert positions(SPANS.bounds, 515).tolist() == [i for n in LENGTHS for i in range(n)]


# ---------------------------------------------------------------- training with it


@pytest.fixture(scope="module")
def tokenizer():
    return load(embedded("penstock-mini"))


def test_a_resumed_run_computes_what_an_uninterrupted_one_does(tokenizer, tmp_path):
    plan = replace(PRESETS["tiny"].seedling, shape=replace(WIDE, layers=2, vocabulary=4096), batch=700)
    whole, before = Trainer(plan, tokenizer, tmp_path / "a"), Trainer(plan, tokenizer, tmp_path / "b")
    losses = [whole.step() for _ in range(4)]
    assert [before.step(), before.step()] == losses[:2]
    before.save()
    before.step()  # lost
    after = Trainer(plan, tokenizer, tmp_path / "b")
    assert [after.step(), after.step()] == losses[2:]
    assert after.progress.tokens == whole.progress.tokens and after.progress.fraction(plan) > 0.1
    pairs = zip(whole.net.parameters(), after.net.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_sitting_ends_early_and_the_next_goes_on(tmp_path):
    preset, steps = PRESETS["tiny"], []

    def reporter(step, plan):
        return lambda progress, note: steps.append((step, progress.steps))

    def sit(sitting):
        train_pair(
            preset,
            tmp_path,
            tmp_path,
            ("seedling", "sapling"),
            minutes=None,
            save_every=120.0,
            sitting=sitting,
            reporter=reporter,
        )

    sit(0.0)
    assert not steps and (tmp_path / "seedling" / "checkpoint.safetensors").exists()
    assert not (tmp_path / "sapling").exists()
    sit(None)
    assert steps[0] == ("seedling", 1) and steps[-1][0] == "sapling"


def test_a_sequel_goes_on_from_a_model_and_a_draft_needs_its_target(tmp_path):
    preset, plans = PRESETS["tiny"], []

    def go(step, start):
        reporter = lambda step, plan: plans.append((step, plan)) or (lambda *_: None)  # noqa: E731
        train_pair(preset, tmp_path, tmp_path, (step,), minutes=None, save_every=120.0, start=start, reporter=reporter)

    with pytest.raises(FileNotFoundError, match="there is no checkpoint; do the step seedling first"):
        go("draft", None)
    export(network(preset.target.shape), train.learn_tokenizer(preset, tmp_path / "tokenizer.json"), tmp_path / "old")
    go("target", tmp_path / "old")
    ((step, plan),) = plans
    assert (step, plan.tokens, plan.rate) == ("target", preset.target.tokens // 10, preset.target.rate * 0.4)
    old, new = (dict(load_net(tmp_path / name)[0].named_parameters()) for name in ("old", "penstock-mini"))
    moved = [apart(new[name], old[name]) for name in old]
    assert 0 < max(moved) < 0.5


def test_both_loops_make_the_same_steps(tokenizer, tmp_path, monkeypatch):
    """The plain loop and the fast path, in float32: from the same documents they make the same network."""
    plan = replace(PRESETS["tiny"].seedling, shape=replace(WIDE, layers=2, vocabulary=4096), batch=2000)
    monkeypatch.setattr(train, "kernels_for", lambda shape, device: EXACT)
    fast, plain = Trainer(plan, tokenizer, tmp_path), PlainTrainer(plan, tokenizer, torch.float32)
    start = [parameter.clone() for parameter in fast.net.parameters()]
    drawn = DocumentStream(tokenizer, plan.stages, plan.seed)
    for _ in range(3):
        plain.stream.ready = [collate(drawn.take(0.0, plan.batch))]
        plain.progress = replace(fast.progress)
        assert fast.step() == pytest.approx(plain.step(), rel=1e-5)
    moved, wanted = (
        torch.cat([(now - then).flatten() for now, then in zip(net.parameters(), start, strict=True)])
        for net in (fast.net, plain.net)
    )
    assert apart(moved, wanted) < 0.01


def test_the_pace_of_a_step_is_told_for_each_part():
    report = pace(PRESETS["tiny"], "sapling")
    assert "times as fast" in report and all(
        report.count(f"{part} ") == 2 for part in ("data", "forward", "backward", "optimizer")
    )
