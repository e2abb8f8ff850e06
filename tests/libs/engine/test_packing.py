"""Packing slice by slice, in every build that this processor runs, against the twin in torch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from penstock.checkpoint import CheckpointError
from penstock.checkpoint.tensors import declared_tensors
from penstock.engine.kernels.cpu import build, packing
from penstock.engine.kernels.cpu.memory import anonymous
from penstock.engine.kernels.cpu.pack import pack
from penstock.engine.kernels.cpu.packed_file import packed_of
from penstock.engine.kernels.cpu.packing import Packer, naive_checksums, pack_slices, plan, sliced
from penstock.engine.layers.stacks import Stack
from penstock.engine.layers.stored import read_tensor

KINDS = ("float32", "bfloat16", "int8")
STORED = (torch.float32, torch.bfloat16, torch.float16)
PACKERS = [Packer(isa) for isa in build.instruction_sets()]


def twin(rows: torch.Tensor, kind: str):
    """`pack` of stored rows [out, in], as the engine hands them over."""
    return pack(rows.to(torch.float32 if kind == "float32" else torch.bfloat16).t().contiguous(), kind)


@given(
    pairs=st.integers(1, 80),
    columns=st.integers(1, 40),
    kind=st.sampled_from(KINDS),
    stored=st.sampled_from(STORED),
    packer=st.sampled_from(PACKERS),
    seed=st.integers(0, 9),
)
@settings(max_examples=200)
def test_it_is_what_the_twin_packs(pairs, columns, kind, stored, packer, seed):
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(columns, 2 * pairs, generator=random) * torch.logspace(-6, 3, columns).unsqueeze(1)
    rows[0] = 0
    rows = rows.to(stored)
    expected = twin(rows, kind)
    data = torch.full_like(expected.data, 7)
    scale = None if expected.scale is None else torch.full_like(expected.scale, 7)
    packer.pack(rows, kind, data, scale)
    assert torch.equal(data, expected.data)
    assert scale is None or torch.equal(scale, expected.scale)


def test_every_number_of_16_bits_keeps_its_value():
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for stored in (torch.float16, torch.bfloat16):
        rows = patterns.view(stored).view(16, -1)
        rows = torch.where(rows.isnan(), torch.zeros((), dtype=stored), rows)
        for packer, kind in itertools.product(PACKERS, ("float32", "bfloat16")):
            expected = twin(rows, kind)
            data = torch.empty_like(expected.data)
            packer.pack(rows, kind, data)
            assert torch.equal(data, expected.data)


def test_rows_of_an_odd_length_are_refused():
    with pytest.raises(ValueError, match="even length, not 3"):
        PACKERS[0].pack(torch.zeros(16, 3), "float32", torch.zeros(48))


@pytest.mark.parametrize("size", [128, packing.BLOCK_BYTES, 2 * packing.BLOCK_BYTES + 256])
def test_checksums_are_those_of_the_twin_however_many_threads(size):
    content = torch.from_numpy(np.random.default_rng(size).integers(0, 256, size, np.uint8))
    for packer in PACKERS:
        assert packer.checksums(content, 1) == packer.checksums(content, 3) == naive_checksums(content)


@given(at=st.integers(0, 4095), bit=st.integers(0, 7))
@settings(max_examples=50)
def test_any_bit_changes_the_checksum(at, bit):
    content = torch.arange(4096, dtype=torch.int32).to(torch.uint8)
    before = PACKERS[0].checksums(content)
    content[at] ^= 1 << bit
    assert PACKERS[0].checksums(content) != before


def test_checksums_of_odd_sizes_are_refused():
    with pytest.raises(ValueError, match="multiple of 128"):
        PACKERS[0].checksums(torch.zeros(100, dtype=torch.uint8))


def stored_parts(directory, dtype, heights, inputs):
    """Tensors in a file, and what the checkpoint knows of them."""
    random = torch.Generator().manual_seed(len(heights))
    tensors = {f"part{n}": torch.randn(rows, inputs, generator=random).to(dtype) for n, rows in enumerate(heights)}
    save_file(tensors, directory / "model.safetensors")
    declared = declared_tensors((directory / "model.safetensors",))
    return tensors, tuple(declared[name] for name in tensors)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", STORED)
def test_slices_of_stacked_parts_make_up_the_whole(tmp_path, monkeypatch, kind, dtype):
    monkeypatch.setattr(packing, "_SLICE_BYTES", 3000)  # two slices or more for each part, and some across two parts
    tensors, parts = stored_parts(tmp_path, dtype, (50, 7, 100), 34)
    stacks = [Stack("all", parts), Stack("one", parts[:1]), Stack("last", parts[1:])]
    assert all(sliced(stack, kind) for stack in stacks)
    records, end = plan(stacks, kind, 256)
    content = anonymous(end)

    def write(at: int, piece: torch.Tensor) -> None:
        assert not content[at : at + piece.numel()].any(), "each place is written once"
        content[at : at + piece.numel()].copy_(piece)

    pack_slices(PACKERS[0], stacks, records, threads=3, write=write)
    for stack in stacks:
        expected = twin(torch.cat([tensors[part.name] for part in stack.parts]), kind)
        packed = packed_of(records[stack.name], content)
        assert (packed.inputs, packed.outputs, packed.kind) == (expected.inputs, expected.outputs, kind)
        assert torch.equal(packed.data, expected.data)
        assert (packed.scale is None) == (expected.scale is None)
        assert packed.scale is None or torch.equal(packed.scale, expected.scale)


def test_what_cannot_be_sliced(tmp_path):
    _, parts = stored_parts(tmp_path, torch.float32, (16, 16), 5)
    assert not sliced(Stack("odd", parts), "float32")
    _, even = stored_parts(tmp_path, torch.float32, (16, 16), 6)
    assert not sliced(Stack("unknown", even), "lossless")
    (tmp_path / "other").mkdir()
    _, other = stored_parts(tmp_path / "other", torch.bfloat16, (16,), 6)
    assert not sliced(Stack("mixed", (*even, *other)), "float32")


def test_a_tensor_is_read_as_it_is_stored(tmp_path):
    tensors, parts = stored_parts(tmp_path, torch.float16, (3, 5), 4)
    for part in parts:
        assert torch.equal(read_tensor(part), tensors[part.name])


def test_a_file_that_lost_its_end_is_named(tmp_path):
    _, parts = stored_parts(tmp_path, torch.float32, (64,), 32)
    with open(parts[0].file, "r+b") as file:
        file.truncate(parts[0].file.stat().st_size - 100)
    records, _ = plan([Stack("head", parts)], "float32", 0)
    with pytest.raises(CheckpointError, match=r"cut short.*part0"):
        pack_slices(PACKERS[0], [Stack("head", parts)], records, threads=2, write=lambda at, piece: None)
