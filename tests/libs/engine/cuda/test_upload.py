"""Weights on their way to a device, with a CPU as the device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from penstock.checkpoint import CheckpointError, TensorInfo, inspect
from penstock.engine.kernels.cuda.chunks import deal, in_order
from penstock.engine.kernels.cuda.upload import Upload
from penstock.engine.models.loading import load_weights
from penstock.testing.checkpoints import TinyModel, write_checkpoint

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 250), max_size=20), st.integers(1, 64), st.integers(1, 6))
def test_every_byte_is_dealt_once(sizes, chunk_bytes, lanes):
    found = [TensorInfo(Path("f"), str(at), "BF16", (size,), 1000 * at) for at, size in enumerate(sizes)]
    work = deal(found, chunk_bytes, lanes)
    seen = [set() for _ in sizes]
    for lane in work:
        assert [chunk.tensor for chunk in lane] == sorted(chunk.tensor for chunk in lane), "in the order of loading"
        for chunk in lane:
            assert 0 < chunk.size <= chunk_bytes and chunk.offset == 1000 * chunk.tensor + chunk.at
            own = set(range(chunk.at, chunk.at + chunk.size))
            assert not own & seen[chunk.tensor]
            seen[chunk.tensor] |= own
    assert [len(each) for each in seen] == [2 * size for size in sizes]
    loads = [sum(chunk.size for chunk in lane) for lane in work]
    assert max(loads) - min(loads) <= chunk_bytes


def test_the_order_is_that_of_loading(tmp_path):
    checkpoint = inspect(write_checkpoint(tmp_path / "model", TinyModel(layers=11, shards=3)))
    names = [info.name for info in in_order(checkpoint)]
    assert sorted(names[:2]) == ["lm_head.weight", "model.embed_tokens.weight"] and names[-1] == "model.norm.weight"
    layers = [int(name.split(".")[2]) for name in names if name.startswith("model.layers.")]
    assert layers == sorted(layers) and len(names) == len(checkpoint.tensors)


@pytest.mark.parametrize(("shards", "ahead"), [(1, 1 << 30), (3, 0), (3, 5000)])
def test_brings_what_the_files_hold(tmp_path, shards, ahead):
    checkpoint = inspect(write_checkpoint(tmp_path / "model", TinyModel(shards=shards)))
    with Upload(checkpoint, CPU, lanes=3, chunk_bytes=777, ahead_bytes=ahead) as upload:
        for info in reversed(in_order(checkpoint)):  # not the order it expects
            with safe_open(info.file, framework="pt") as stored:
                assert torch.equal(upload.take(info), stored.get_tensor(info.name))


@pytest.mark.parametrize("tied", [False, True])
def test_loads_the_same_weights(tmp_path, tied):
    checkpoint = inspect(write_checkpoint(tmp_path / "model", TinyModel(tied=tied)))
    with Upload(checkpoint, CPU, lanes=2, chunk_bytes=1000, ahead_bytes=3000) as upload:
        brought = load_weights(checkpoint, torch.bfloat16, CPU, source=upload.take)
    plain = load_weights(checkpoint, torch.bfloat16, CPU)
    assert torch.equal(brought.head, plain.head) and torch.equal(brought.norm, plain.norm)
    ids = torch.arange(300)
    assert torch.equal(brought.embedding.rows(ids), plain.embedding.rows(ids))
    for mine, right in zip(brought.layers, plain.layers, strict=True):
        assert torch.equal(mine.qkv, right.qkv) and torch.equal(mine.mlp.down, right.mlp.down)


def test_left_early_the_lanes_end(tmp_path):
    checkpoint = inspect(write_checkpoint(tmp_path / "model", TinyModel()))
    with Upload(checkpoint, CPU, lanes=3, chunk_bytes=100, ahead_bytes=0) as upload:
        upload.take(in_order(checkpoint)[0])
    assert not any(lane.is_alive() for lane in upload._lanes)


def test_a_file_that_shrank_is_named(tmp_path):
    checkpoint = inspect(write_checkpoint(tmp_path / "model", TinyModel()))
    file = checkpoint.weight_files[0]
    last = max(in_order(checkpoint), key=lambda info: info.offset)
    upload = Upload(checkpoint, CPU)
    os.truncate(file, last.offset + 4)
    with pytest.raises(CheckpointError, match="ends at"), upload:
        upload.take(last)
