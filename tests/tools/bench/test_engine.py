"""The bench of the engine: its figures, how it talks to processes, and that what is absent is said."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from loadtest.peers.window import Window

from penstock.bench.engine import figures
from penstock.bench.engine.cells import Cell, Sitting, parts, sessions
from penstock.bench.engine.limits import Memory
from penstock.bench.engine.process import Failed, started
from penstock.bench.engine.rounds import CellRow, CellSample, measure
from penstock.bench.engine.shapes import LlamaShape, checkpoint
from penstock.bench.engine.subjects import OURS, Places, Subject
from penstock.checkpoint import inspect

ROOT = Path(__file__).parents[3]
TINY = LlamaShape(
    name="tiny", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=512, max_positions=256
)
LOADED = {"checkpoint": "/nowhere", "kind": "bfloat16", "threads": 1, "streams": 1, "tokens": 8, "room": 8}


def row(subject, rates, ours, cell="decode_b1", shape="1b", memory=20e9):
    samples = [CellSample(rate, memory, "" if rate else "gone") for rate in rates]
    return CellRow(shape, cell, Subject(subject), samples, [CellSample(rate, memory) for rate in ours])


def fake_peer():
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "libs", "services", "tools"))
    command = (sys.executable, Path(__file__).parent / "fake_peer.py")
    return started(command, ROOT, {**os.environ, "PYTHONPATH": paths})


def test_the_best_peer_is_the_one_beside_which_ours_looks_worst():
    slow, quick = row("llamacpp", [5.0, 5.0, 4.0], [10.0, 10.0, 10.0]), row("openvino", [8.0, 10.0], [10.0, 10.0])
    found = figures.beside_best("it", [slow, quick], 1.0)
    assert (found.value, found.min, found.max, found.met) == (1.125, 1.0, 1.25, True)
    assert "openvino" in found.against


def test_without_a_peer_there_is_no_value_but_reasons():
    found = figures.beside_best("it", [row("vllm", [None, None], [10.0, 10.0])], 1.0)
    assert (found.value, found.met) == (None, None)
    assert "vllm: gone" in found.against


def test_a_round_that_one_side_missed_is_not_compared():
    half = CellRow(
        "1b", "c", Subject("llamacpp"), [CellSample(4.0), CellSample(5.0)], [CellSample(None), CellSample(10.0)]
    )
    assert figures.beside_best("it", [half], None).value == 2.0


def test_every_cell_with_a_goal_has_a_figure_even_when_nothing_ran():
    ids = {figure.id for figure in figures.compared([])}
    assert {"decode_b1_1b_bf16_vs_best", "decode_b32_135m_bf16_vs_best", "prefill_2048_1b_bf16_vs_best"} <= ids
    measured = {
        f"{cell.name}_{session.shape.name}_bf16_vs_best" for session in sessions(False) for cell in session.cells
    }
    assert ids == measured


def test_the_share_of_the_bandwidth_counts_the_weights_once_per_token():
    found = figures.beside_memory("it", row(OURS, [8.0], [8.0]), int(2e9), 0.85)
    assert found.value == pytest.approx(0.8)
    assert found.met is False


def test_rates_of_a_subject_in_several_groups_are_one_figure():
    rows = [row(OURS, [1.0], [1.0]), row(OURS, [3.0], [3.0]), row("vllm", [None], [3.0])]
    found = {figure.id: figure for figure in figures.rates(rows)}
    assert found["decode_b1_1b_penstock_tokens_per_s"].value == 2.0
    assert found["decode_b1_1b_vllm_tokens_per_s"].against == "gone"


def test_groups_fit_into_memory_and_hold_the_first_subject_each():
    first, *others = (Subject(name) for name in (OURS, "llamacpp", "transformers", "vllm"))  # 1 + 1 + 2 + 3.5
    assert parts((first, *others), 10, 75) == [(first, *others)]
    assert parts((first, *others), 10, 74) == [(first, *others[:2]), (first, others[2])]
    assert parts((first, *others), 10, 10) == [(first, one) for one in others]
    assert parts((first,), 10, 10) == [(first,)]


def test_needs_cover_every_cell():
    session = Sitting(TINY, (Subject(OURS),), (Cell("a", 100), Cell("b", 10, 8, 20)))
    assert (session.needs.streams, session.needs.tokens, session.needs.room) == (8, 101, 8 * 31)


def test_a_window_opens_with_the_last_stream_and_counts_whole_steps():
    window = Window(["a", "b"], 2)
    for now, counts in ((1.0, (1, 0)), (2.0, (3, 1)), (3.0, (4, 2)), (4.0, (5, 3)), (9.0, (6, 4))):
        assert not window.over or now == 9.0
        window.reached("a", counts[0])
        window.reached("b", counts[1])
        window.step_over(now)
    assert (window.over, window.seconds) == (True, 2.0)


def test_a_window_that_overshoots_gives_the_time_of_the_wanted_steps():
    window = Window(["a"], 4)
    window.reached("a", 1)
    window.step_over(1.0)
    window.reached("a", 9)
    window.step_over(5.0)
    assert window.seconds == 2.0


async def test_a_peer_answers_and_its_banner_is_not_an_answer(tmp_path):
    async with fake_peer() as talk:
        await talk.ask("prepare", 120, checkpoint=str(tmp_path), kind="int8")
        assert (tmp_path / "int8").exists()
        assert isinstance(await talk.ask("load", 120, **LOADED), float)
        assert await talk.ask("prefill", 120, prompt=[1, 2, 3]) == 0.75
        with pytest.raises(Failed, match="decode: RuntimeError: 2 streams are too many"):
            await talk.ask("decode", 120, prompts=[[1], [2]], steps=1)
        assert await talk.ask("prefill", 120, prompt=[1]) == 0.25, "a no is not the end"
        with pytest.raises(Failed, match="banner"):
            await talk.ask("prefill", 120, prompt=[])


async def test_a_command_that_does_not_exist_is_a_failure_with_a_name(tmp_path):
    with pytest.raises(Failed, match="no-such-program"):
        async with started((tmp_path / "no-such-program",), tmp_path):
            pass


async def test_an_answer_that_takes_too_long_is_given_up(tmp_path):
    async with started((sys.executable, "-c", "input(); input()"), tmp_path) as talk:
        with pytest.raises(Failed, match="more than 0 s"):
            await talk.ask("prefill", 0.01, prompt=[1])


def test_a_shape_is_a_checkpoint_and_always_the_same(tmp_path):
    first, again = checkpoint(TINY, tmp_path / "a"), checkpoint(TINY, tmp_path / "b")
    weights = first / "model.safetensors"
    assert weights.read_bytes() == (again / "model.safetensors").read_bytes()
    before = weights.stat().st_mtime_ns
    assert checkpoint(TINY, tmp_path / "a") == first
    assert weights.stat().st_mtime_ns == before
    assert inspect(first).config.n_kv_heads == 2
    matrices = TINY.layers * TINY.layer_parameters + TINY.vocab * TINY.hidden
    assert inspect(first).parameters == matrices + (2 * TINY.layers + 1) * TINY.hidden


async def test_our_engine_is_measured_and_a_peer_that_is_not_there_is_named(tmp_path):
    subjects = (Subject(OURS), Subject("llamacpp"))
    cells = (Cell("decode_b2", 20, 2, 3, rounds=1), Cell("prefill_16", 16, rounds=1, warm_up=False))
    rows = await measure(Sitting(TINY, subjects, cells), Places(tmp_path), Memory(1, 1 << 20))
    assert [(one.cell, one.subject.engine) for one in rows] == [
        (cell, name) for cell in ("decode_b2", "prefill_16") for name in (OURS, "llamacpp")
    ]
    for ours, theirs in (rows[:2], rows[2:]):
        assert not ours.absent
        assert all(sample.rate > 0 and sample.memory > 0 for sample in ours.samples)
        assert "python -m loadtest.peers.install llamacpp" in theirs.absent


async def test_drafts_that_are_right_are_verified_five_tokens_at_a_time(tmp_path):
    from penstock.bench.engine.rounds import Asked, prompt

    asked = Asked(Subject(OURS), Places(tmp_path), TINY, {**LOADED_OURS, "drafts": True})
    try:
        found = await asked.ask("verify", 120, prompt=prompt(TINY, 8, 0), steps=4)
    finally:
        await asked.close()
    assert found["same_tokens"] == 1.0
    assert found["tokens_per_step"] == 5.0


LOADED_OURS = {"threads": 1, "streams": 1, "tokens": 64, "room": 64}


def test_a_gguf_file_holds_the_same_weights(tmp_path):
    gguf = pytest.importorskip("gguf")
    import torch
    from loadtest.peers.gguf_file import write
    from safetensors.torch import load_file

    directory = checkpoint(TINY, tmp_path)
    for kind in ("bfloat16", "int8", "int4"):
        write(directory, directory / f"{kind}.gguf", kind)
    weights = load_file(directory / "model.safetensors")
    plain = {tensor.name: tensor for tensor in gguf.GGUFReader(directory / "bfloat16.gguf").tensors}
    assert len(plain) == len(weights)
    embedding = torch.from_numpy(plain["token_embd.weight"].data.copy()).view(torch.bfloat16)
    assert torch.equal(embedding, weights["model.embed_tokens.weight"])
    query = torch.from_numpy(plain["blk.1.attn_q.weight"].data.copy()).view(torch.bfloat16)
    ours = weights["model.layers.1.self_attn.q_proj.weight"]
    half = TINY.head_dim // 2
    assert torch.equal(query[:2], torch.stack((ours[0], ours[half]))), "a head's halves are interleaved"
    rounded = next(t for t in gguf.GGUFReader(directory / "int8.gguf").tensors if t.name == "blk.0.ffn_up.weight")
    back = torch.from_numpy(gguf.quants.dequantize(rounded.data, rounded.tensor_type))
    assert (back - weights["model.layers.0.mlp.up_proj.weight"].float()).abs().max() < 0.02 * 4 / 127
    fewer = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(directory / "int4.gguf").tensors}
    assert (fewer["blk.0.ffn_up.weight"], fewer["token_embd.weight"]) == ("Q4_0", "Q8_0")
    config = json.loads((directory / "config.json").read_text())
    field = gguf.GGUFReader(directory / "bfloat16.gguf").fields["llama.rope.freq_base"]
    assert float(field.parts[field.data[0]][0]) == config["rope_theta"]
