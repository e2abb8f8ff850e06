"""Attention in C++ against its naive twin: one row, one head and one token at a time."""

from __future__ import annotations

import math
from ctypes import addressof
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.checkpoint import Rope, Temperature
from penstock.engine.kernels.cpu.build import instruction_sets
from penstock.engine.kernels.cpu.layout import Kind, LayerArgs, ModelArgs, StepArgs
from penstock.engine.kernels.cpu.machine import Machine
from penstock.engine.layers.attention import naive_attend
from penstock.engine.layers.norm import rms_norm
from penstock.engine.layers.rope import rope_tables, rotate
from penstock.engine.step.int8_kv import from_rows, to_rows

PIECE = 512
"""kPiece of attention.h."""
CACHES = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.int8: 1e-2}
"""How far a mix of numbers of size 1 may be off: the last bit of a rotated key may make it round to the other
neighbour."""
ROUNDED = 1.5e-2
"""The same for bfloat16 where the processor multiplies it: queries and weights are in bfloat16 too."""


WARM = Temperature(0.1, 24)
"""How queries grow where nothing turns."""


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    block_size: int
    window: int
    normed: bool
    cache: torch.dtype = torch.float32
    chunked: bool = False
    turning: str = "halves"
    """What turns: halves, neighbours, neighbours that are normalised behind it, or nothing."""

    latent: bool = False
    """Keys and values are one vector for all heads, which the tests keep; queries are there when they have turned."""

    @property
    def width(self) -> int:
        return self.heads * self.dim if self.latent else (self.heads + 2 * self.kv_heads) * self.dim

    @property
    def planes(self) -> int:
        return 1 if self.latent else 2

    @property
    def kept_heads(self) -> int:
        return 1 if self.latent else self.kv_heads


def kept(shape: Shape, vectors: Tensor) -> Tensor:
    """[N, kv_heads, dim] as they are kept: the last axes of the page memory."""
    return to_rows(vectors) if shape.cache == torch.int8 else vectors.to(shape.cache)


def read(shape: Shape, cached: Tensor) -> Tensor:
    """The numbers that cached ones stand for."""
    return from_rows(cached, shape.kept_heads) if shape.cache == torch.int8 else cached.float()


class Sequence:
    """Rows from `start` on, after random keys and values of the tokens before; `pages` hold them."""

    def __init__(self, shape: Shape, start: int, rows: int, pages: list[int], random: torch.Generator) -> None:
        self.start, self.rows, self.pages = start, rows, pages
        self.qkv = torch.randn(rows, shape.width, generator=random)
        known = start + rows if shape.latent else start
        self.before = torch.randn(shape.planes, known, shape.kept_heads, shape.dim, generator=random)

    def fill(self, shape: Shape, memory: Tensor) -> None:
        size = shape.block_size
        # Nobody may look at what isn't there. In int8, -1 makes the bytes of a scale that is no number.
        memory[self.pages] = -1 if memory.dtype == torch.int8 else float("nan")
        for which in range(shape.planes):
            at = torch.arange(self.before.shape[1])
            memory[torch.tensor(self.pages)[at // size], 0, which, at % size] = kept(shape, self.before[which])


class Layer:
    """One layer's attention, on the machine and in words."""

    def __init__(self, shape: Shape, random: torch.Generator) -> None:
        self.shape = shape
        self.norm = torch.rand(shape.heads + shape.kv_heads, shape.dim, generator=random) + 0.5
        self.interleaved = shape.turning.startswith("neighbours")
        self.tables = rope_tables(Rope(interleaved=self.interleaved), shape.dim, 4000, torch.float32)
        layer = LayerArgs(
            qk_norm=self.norm.data_ptr() if shape.normed else None,
            window=shape.window,
            unturned=shape.latent or shape.turning == "nothing",
        )
        self._layers = (LayerArgs * 1)(layer)
        self._scale = shape.dim**-0.5

    def mixed(self, machine: Machine, memory: Tensor, sequences: list[Sequence]) -> Tensor:
        shape = self.shape
        model = ModelArgs(
            layers=1,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.dim,
            rank=shape.dim if shape.latent else 0,
            eps=1e-6,
            scale=self._scale,
            kv_kind=Kind.of(shape.cache),
            block_size=shape.block_size,
            chunked=shape.chunked,
            interleaved=self.interleaved,
            key_norm=shape.turning == "neighbours, normalised",
            warm_tokens=0 if shape.latent else WARM.tokens,
            warm_strength=WARM.strength,
            cosine=self.tables[0].data_ptr(),
            sine=self.tables[1].data_ptr(),
            layer=addressof(self._layers),
            memory=memory.data_ptr(),
            page_layers=1,
            row_heads=shape.kept_heads,
        )
        qkv = torch.cat([one.qkv for one in sequences])
        first = np.cumsum([0, *(one.rows for one in sequences)])
        position = [at for one in sequences for at in range(one.start, one.start + one.rows)]
        table = [page for one in sequences for page in one.pages]
        table_at = np.cumsum([0, *(len(one.pages) for one in sequences)])[:-1]
        lists = {"first": first, "position": position, "turned": position, "table": table, "table_at": table_at}
        arrays = {name: np.asarray(values, dtype=np.int32) for name, values in lists.items()}
        addresses = {name: array.ctypes.data for name, array in arrays.items()}
        step = StepArgs(rows=len(qkv), sequences=len(sequences), **addresses)
        mixed = torch.empty(len(qkv), shape.heads * shape.dim)
        machine.attend(model, step, qkv, mixed)
        return mixed

    def naive(self, one: Sequence) -> Tensor:
        shape, heads = self.shape, self.shape.heads
        x = one.qkv.view(one.rows, -1, shape.dim)
        if shape.latent:
            both = read(shape, kept(shape, one.before[0]))
            seen = range(one.start, one.start + one.rows)
            return naive_attend(x, both, both, seen, scale=self._scale, window=None)
        turned, values = x[:, : heads + shape.kv_heads], x[:, heads + shape.kv_heads :]
        if shape.normed:
            turned = rms_norm(turned, self.norm, torch.tensor(1e-6))
        at = slice(one.start, one.start + one.rows)
        if shape.turning != "nothing":
            tables = [table[at].unsqueeze(1) for table in self.tables]
            turned = rotate(turned, *tables, interleaved=self.interleaved)
        if shape.turning == "neighbours, normalised":
            turned = rms_norm(turned, torch.ones(shape.dim), torch.tensor(1e-6))
        keys = read(shape, kept(shape, torch.cat((one.before[0], turned[:, heads:]))))
        values = read(shape, kept(shape, torch.cat((one.before[1], values))))
        query = turned[:, :heads]
        if shape.turning == "nothing":
            warmth = [1 + WARM.strength * math.log1p((at + 1) // WARM.tokens) for at in range(at.start, at.stop)]
            query = query * torch.tensor(warmth).view(-1, 1, 1)
        mixed = []
        for row, position in enumerate(range(one.start, one.start + one.rows)):
            window = position % shape.window + 1 if shape.chunked and shape.window else shape.window or None
            looks = slice(row, row + 1)
            mixed.append(naive_attend(query[looks], keys, values, [position], scale=self._scale, window=window))
        return torch.cat(mixed)


@cache
def machine(isa: str, threads: int) -> Machine:
    return Machine(threads, isa)


def setting(shape: Shape, members: list[tuple[int, int]], seed: int) -> tuple[Layer, Tensor, list[Sequence]]:
    """A layer, page memory and sequences on scattered pages: of each the tokens before its rows, and their number."""
    random = torch.Generator().manual_seed(seed)
    needs = [-(-(start + rows) // shape.block_size) for start, rows in members]
    free = (torch.randperm(sum(needs), generator=random) + 1).tolist()
    last = kept(shape, torch.zeros(1, shape.kept_heads, shape.dim)).shape[1:]
    memory = torch.zeros(sum(needs) + 1, 1, shape.planes, shape.block_size, *last, dtype=shape.cache)
    sequences = []
    for (start, rows), need in zip(members, needs, strict=True):
        sequences.append(Sequence(shape, start, rows, [free.pop() for _ in range(need)], random))
        sequences[-1].fill(shape, memory)
    return Layer(shape, random), memory, sequences


def shapes_of(dims: list[int], block_sizes: list[int], caches: list[torch.dtype]) -> st.SearchStrategy[Shape]:
    return st.builds(
        lambda group, kv_heads, *rest: Shape(group * kv_heads, kv_heads, *rest),
        st.sampled_from([1, 2, 3, 4, 7, 33]),
        st.sampled_from([1, 2, 3, 8]),
        st.sampled_from(dims),
        st.sampled_from(block_sizes),
        st.sampled_from([0, 1, 11, 100, 600]),
        st.booleans(),
        st.sampled_from(caches),
        st.booleans(),
        st.sampled_from(["halves", "neighbours", "neighbours, normalised", "nothing"]),
    )


shapes = st.one_of(
    shapes_of([16, 32, 48, 64, 80, 128, 256], [1, 3, 16, 32], list(CACHES)),
    shapes_of([32, 64, 96, 128], [16, 48], [torch.bfloat16]),  # what fills a processor's tiles
    st.builds(
        lambda sizes, dim, block_size, cache: Shape(*sizes, dim, block_size, 0, False, cache, latent=True),
        st.sampled_from([(1, 1), (4, 1), (34, 2), (64, 2), (128, 4), (47, 1)]),  # heads, and parts of them
        st.sampled_from([32, 48, 64, 160, 576]),
        st.sampled_from([3, 16]),
        st.sampled_from(list(CACHES)),
    ),
)
members = st.tuples(
    st.one_of(st.integers(0, 70), st.integers(PIECE - 9, PIECE + 3), st.integers(0, 2 * PIECE)),
    st.one_of(st.integers(1, 9), st.integers(1, 20), st.integers(30, 60)),
)


@pytest.mark.parametrize("isa", instruction_sets())
@settings(max_examples=20)
@given(shapes, st.lists(members, min_size=1, max_size=3), st.sampled_from([1, 3]), st.integers(0, 10**6))
def test_it_is_what_the_naive_loop_gives(isa, shape, members, threads, seed):
    layer, memory, sequences = setting(shape, members, seed)
    found = layer.mixed(machine(isa, threads), memory, sequences)
    expected = torch.cat([layer.naive(one) for one in sequences])
    tolerance = ROUNDED if isa in ("amx", "avx512_bf16") and shape.cache == torch.bfloat16 else CACHES[shape.cache]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("isa", instruction_sets())
@settings(max_examples=12)
@given(shapes, st.lists(members, min_size=2, max_size=3), st.integers(0, 10**6))
def test_a_row_depends_on_its_own_context_alone(isa, shape, members, seed):
    """Bit for bit: alone or in a batch, decoded or verified with others (which looks at the same pages before the
    others are there), on one thread or on five."""
    layer, memory, sequences = setting(shape, members, seed)
    together = layer.mixed(machine(isa, 5), memory, sequences)
    assert torch.equal(row_by_row(isa, layer, memory, sequences), together)


def row_by_row(isa: str, layer: Layer, memory: Tensor, sequences: list[Sequence]) -> Tensor:
    """What each row is alone, on one thread."""
    rows = []
    for one in sequences:
        one.fill(layer.shape, memory)
        for row in range(one.rows):
            single = object.__new__(Sequence)
            single.start, single.rows, single.pages, single.qkv = (
                one.start + row,
                1,
                one.pages,
                one.qkv[row : row + 1],
            )
            rows.append(layer.mixed(machine(isa, 1), memory, [single]))
    return torch.cat(rows)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("heads", [(64, 2), (47, 1), (16, 1)])
@pytest.mark.parametrize("isa", instruction_sets())
def test_drafts_that_are_verified_over_a_long_context_are_what_each_is_alone(isa, heads, cache):
    """Bit for bit, whether threads share their pieces or the rows of a head are one unit, and across a piece's end."""
    shape = Shape(*heads, 160, 16, 0, False, cache, latent=True)
    for members in ([(PIECE - 1, 3)], [(2 * PIECE - 3, 5)], [(PIECE + 40, 8)], [(PIECE, 9)], [(2 * PIECE, 2)] * 3):
        layer, memory, sequences = setting(shape, members, 7)
        expected = row_by_row(isa, layer, memory, sequences)
        for threads in (1, 4):
            for one in sequences:
                one.fill(shape, memory)
            assert torch.equal(layer.mixed(machine(isa, threads), memory, sequences), expected)


def share(shape: Shape, memory: Tensor, sequences: list[Sequence], tokens: int) -> None:
    """Gives the sequences the same first `tokens` tokens, on the pages of the first."""
    first, *others = sequences
    blocks = tokens // shape.block_size
    for one in others:
        one.pages[:blocks] = first.pages[:blocks]
        one.before[:, : blocks * shape.block_size] = first.before[:, : blocks * shape.block_size]
    for one in sequences:
        one.fill(shape, memory)


@pytest.mark.parametrize("isa", instruction_sets())
@settings(max_examples=25)
@given(
    shapes,
    st.integers(PIECE, 3 * PIECE),
    st.lists(st.tuples(st.integers(0, PIECE), st.integers(1, 3)), min_size=2, max_size=9),
    st.lists(st.tuples(st.integers(0, 2 * PIECE), st.integers(1, 9)), max_size=2),
    st.sampled_from([1, 3]),
    st.integers(0, 10**6),
)
def test_rows_that_share_pages_are_what_each_is_alone(isa, shape, tokens, sharers, others, threads, seed):
    """Bit for bit, whoever looks at the shared pieces with it, windows and all."""
    members = [(tokens + start, rows) for start, rows in sharers] + others
    layer, memory, sequences = setting(shape, members, seed)
    share(shape, memory, sequences[: len(sharers)], tokens)
    together = layer.mixed(machine(isa, threads), memory, sequences)
    alone = [layer.mixed(machine(isa, 1), memory, [one]) for one in sequences]
    assert torch.equal(torch.cat(alone), together)
    tolerance = ROUNDED if shape.cache == torch.bfloat16 else CACHES[shape.cache]
    torch.testing.assert_close(layer.naive(sequences[0]), alone[0], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("isa", instruction_sets())
def test_values_are_kept_as_torch_keeps_them(isa, cache):
    """Byte for byte, so that it doesn't matter who computed a block."""
    shape = Shape(6, 3, 48, 16, 0, False, cache)
    layer, memory, (one,) = setting(shape, [(0, 16)], 3)
    one.qkv *= torch.logspace(-20, 20, 16).unsqueeze(1)
    one.qkv[5] = 0
    layer.mixed(machine(isa, 2), memory, [one])
    values = one.qkv.view(16, -1, 48)[:, 9:]
    assert torch.equal(memory[one.pages[0], 0, 1], kept(shape, values))


@given(st.integers(1, 4), st.sampled_from([1, 16, 65]), st.integers(-30, 30), st.integers(0, 99))
def test_int8_is_within_half_a_step_of_a_vector(kv_heads, dim, power, seed):
    vectors = torch.randn(5, kv_heads, dim, generator=torch.Generator().manual_seed(seed)) * 10.0**power
    vectors[0] = 0
    found = from_rows(to_rows(vectors), kv_heads)
    assert bool(((found - vectors).abs() <= vectors.abs().amax(-1, keepdim=True) / 127 * 0.5001).all())
