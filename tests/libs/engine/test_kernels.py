"""The C++ pieces against their twins in torch, in every build that this processor runs."""

from __future__ import annotations

import gc
import itertools
import logging
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.kernels.cpu import build
from penstock.engine.kernels.cpu import machine as machines
from penstock.engine.kernels.cpu.lossless import compressed, naive_restore, verbatim_share
from penstock.engine.kernels.cpu.machine import Machine
from penstock.engine.kernels.cpu.matrix import PackedMatrix
from penstock.engine.kernels.cpu.pack import pack, unpack
from penstock.engine.kernels.cpu.packed import LANES
from penstock.engine.kernels.groups import GROUP
from penstock.engine.kernels.rounding import degrouped, dequantised, grouped, quantised
from penstock.engine.request import Request, SamplingParams
from penstock.models import NAMES, embedded

KINDS = ("float32", "bfloat16", "int8", "int4", "lossless")


@pytest.fixture(scope="module", params=build.instruction_sets())
def machine(request) -> Machine:
    return Machine(2, request.param)


def kept(matrix: torch.Tensor, kind: str) -> torch.Tensor:
    """The numbers that a packed matrix stands for."""
    if kind == "int8":
        return dequantised(matrix)
    if kind == "int4":
        return degrouped(*grouped(matrix))
    return matrix.float() if kind == "float32" else matrix.bfloat16().float()


def random_matrix(inputs: int, columns: int, seed: int) -> torch.Tensor:
    """With a few weights of rare sizes."""
    random = torch.Generator().manual_seed(seed)
    matrix = torch.randn(inputs, columns, generator=random)
    rare = torch.rand(inputs, columns, generator=random) < 0.001
    return torch.where(rare, matrix * 1e-20, matrix)


@given(pairs=st.integers(1, 40), columns=st.integers(1, 70), kind=st.sampled_from(KINDS), seed=st.integers(0, 9))
@settings(max_examples=60)
def test_unpacking_gives_the_matrix_back(pairs, columns, kind, seed):
    matrix = random_matrix(2 * pairs, columns, seed)
    packed = pack(matrix, kind)
    back = naive_restore(packed, columns) if kind == "lossless" else unpack(packed, columns)
    assert torch.equal(back.float(), kept(matrix, kind))


def test_an_odd_number_of_inputs_is_refused():
    with pytest.raises(ValueError, match="3 inputs"):
        pack(torch.zeros(3, 4), "float32")


def test_int8_is_within_half_a_step_of_the_weight():
    matrix = torch.randn(64, 30) * torch.logspace(-3, 3, 30)
    numbers, scale = quantised(matrix)
    assert bool(((numbers.float() * scale - matrix).abs() <= scale * 0.5001).all())
    assert int(numbers.abs().max()) == 127


def test_int4_is_within_half_a_step_of_the_weight():
    matrix = torch.randn(5 * GROUP + 2, 30) * torch.logspace(-3, 3, 30)
    numbers, scale = grouped(matrix)
    steps = scale.float().repeat_interleave(GROUP, 0)[: len(matrix)]
    assert bool(((degrouped(numbers, scale) - matrix).abs() <= steps * 0.53).all()), "rounding the scale adds a little"
    assert (int(numbers.min()), int(numbers.max())) == (-8, 7)
    assert torch.equal(degrouped(numbers, scale).double(), numbers.double() * steps.double()), "exact"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("inputs", "columns"), [(2, 1), (64, 16), (66, 47), (256, 300), (34, 130), (2210, 70)])
def test_products_are_those_of_torch(machine, kind, inputs, columns):
    random = torch.Generator().manual_seed(inputs)
    matrix, bias = torch.randn(inputs, columns, generator=random), torch.randn(columns, generator=random)
    packed = PackedMatrix.pack(machine, matrix, bias, kind)
    for rows in (1, 2, 3, 4, 5, 7, 16, 17, 32, 33, 70, 127):
        x = torch.randn(rows, inputs, generator=random)
        rounded = x.bfloat16() if machine.rounds(kind) else x
        expected = rounded.double() @ kept(matrix, kind).double() + bias
        torch.testing.assert_close(packed.product(x).double(), expected, rtol=1e-5, atol=2e-5 * max(1, inputs / 256))


@pytest.mark.parametrize(("inputs", "columns"), [(2, 1), (66, 47), (256, 300), (34, 130)])
def test_lossless_weights_multiply_as_bfloat16_does(machine, inputs, columns):
    matrix = random_matrix(inputs, columns, 3)
    plain, small = (PackedMatrix.pack(machine, matrix, None, kind) for kind in ("bfloat16", "lossless"))
    for rows in (1, 2, 5, 9, 17, 32, 70):
        x = torch.randn(rows, inputs)
        assert torch.equal(small.product(x), plain.product(x))


async def test_lossless_weights_give_the_tokens_of_bfloat16():
    request = Request("one", tuple(range(300, 400)), SamplingParams(max_tokens=24, temperature=0.7, seed=3))
    said = []
    for weights in ("plain", "lossless"):
        config = EngineConfig(embedded(NAMES[0]), dtype="bfloat16", weights=weights)
        async with Engine.open(config) as engine:
            said.append([token.token async for update in engine.generate(request) for token in update.tokens])
    assert len(said[0]) == 24
    assert said[0] == said[1]


def test_lossless_is_for_bfloat16():
    with pytest.raises(ValueError, match="needs dtype bfloat16, not int8"):
        EngineConfig(embedded(NAMES[0]), dtype="int8", weights="lossless")


def test_lossless_takes_12_bits_and_a_bit_a_group():
    matrix = torch.randn(1024, 256) * 0.02
    packed = pack(matrix, "lossless")
    assert packed.data.numel() / matrix.numel() == pytest.approx(1.5 + 0.5 * verbatim_share(packed), rel=0.002)
    assert verbatim_share(packed) < 0.1
    assert verbatim_share(pack(torch.full((64, 16), 1e-20), "lossless")) == 0


def test_only_bfloat16_is_compressed():
    with pytest.raises(ValueError, match="not int8"):
        compressed(build.library(), pack(torch.ones(2, LANES), "int8"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_neighbours(machine, kind):
    packed = PackedMatrix.pack(machine, torch.randn(128, 200), None, kind)
    x = torch.randn(300, 128)
    together = packed.product(x) if kind in ("float32", "int8", "int4") else machine.linear(x, packed.args)[:, :200]
    for rows in (1, 2, 3, 5, 8, 31, 70):
        assert torch.equal(packed.product(x[:rows]), together[:rows])
        assert torch.equal(packed.product(x[-rows:]), together[-rows:])


@pytest.mark.parametrize("kind", KINDS)
def test_nor_on_the_number_of_threads(kind):
    matrix, x = torch.randn(64, 333), torch.randn(4, 64)
    one, three = (PackedMatrix.pack(Machine(threads), matrix, None, kind).product(x) for threads in (1, 3))
    assert torch.equal(one, three)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_a_matrix_are_those_columns_of_the_product(machine, kind):
    packed = PackedMatrix.pack(machine, torch.randn(32, 100), torch.randn(100), kind)
    x = torch.randn(3, 32)
    for first, last in ((16, 60), (8, 60), (31, 32), (0, 100), (99, 100)):
        part = packed.columns(first, last)
        assert torch.equal(part.product(x), packed.product(x)[:, first:last])
        assert torch.equal(part.columns(1, last - first).product(x), packed.product(x)[:, first + 1 : last])


@pytest.mark.parametrize("kind", ["bfloat16", "lossless"])
def test_torch_may_take_many_rows(machine, kind, monkeypatch):
    matrix, bias, x = torch.randn(64, 1300), torch.randn(1300), torch.randn(200, 64)
    expected = x.bfloat16().double() @ kept(matrix, kind).double() + bias
    for faster in (True, False):
        monkeypatch.setitem(vars(machine), "torch_multiplies_bfloat16", faster)
        packed = PackedMatrix.pack(machine, matrix, bias, kind)
        assert (packed.by_torch(200), packed.by_torch(100)) == (faster, False)
        torch.testing.assert_close(packed.product(x).double(), expected, rtol=0.02, atol=0.2)


def test_who_multiplies_many_rows_is_measured_once_and_before_the_first_prompt(caplog, monkeypatch):
    machine = Machine(1)
    with caplog.at_level(logging.INFO):
        for kind in ("float32", "int8"):
            PackedMatrix.pack(machine, torch.randn(64, 64), None, kind)
        assert not caplog.records, "they have nothing to choose"
        one, _ = (PackedMatrix.pack(machine, torch.randn(64, 64), None, kind) for kind in ("bfloat16", "lossless"))
    assert ["bfloat16 products of many rows: by" in record.getMessage() for record in caplog.records] == [True]
    monkeypatch.setattr(machines, "_seconds", None)  # nothing is timed any more
    one.product(torch.randn(300, 64))


def test_torch_has_to_be_clearly_faster(monkeypatch):
    for shares, torchs in (((1.0, 0.9), False), ((1.0, 1.1), False), ((1.0, 0.7), True)):
        times = itertools.cycle(shares)
        monkeypatch.setattr(machines, "_seconds", lambda work, times=times: next(times))
        assert Machine(1).torch_multiplies_bfloat16 is torchs


def test_threads_end_with_their_machine():
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    torch.ones(200, 64) @ torch.ones(64, 64)  # torch has its own by now
    gc.collect()  # those of earlier machines
    before = threads()
    machine = Machine(5)
    packed = PackedMatrix.pack(machine, torch.randn(64, 700), None, "bfloat16")
    packed.product(torch.randn(200, 64))
    assert threads() == before + 4
    del machine, packed
    gc.collect()
    assert threads() == before


def test_rows_of_another_kind_are_refused(machine):
    packed = PackedMatrix.pack(machine, torch.randn(32, 16), None, "float32")
    for wrong in (torch.zeros(2, 30), torch.zeros(2, 32, dtype=torch.float64)):
        with pytest.raises(ValueError, match="rows of 32 float32"):
            packed.product(wrong)


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.NotBuilt, match="no C\\+\\+ compiler"):
        build.cached(tmp_path)


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho cannot do that >&2; exit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(build.NotBuilt, match="cannot do that"):
        build.cached(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


def test_it_is_compiled_once():
    first = build.cached(build.kernels_directory())
    before = first.stat().st_mtime_ns
    assert build.cached(build.kernels_directory()) == first
    assert first.stat().st_mtime_ns == before
