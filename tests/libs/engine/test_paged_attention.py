"""Attention in C++ against its naive twin: one row, one head and one token at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.checkpoint import Rope
from penstock.engine.kernels.cpu.build import instruction_sets
from penstock.engine.kernels.cpu.machine import LayerArgs, Machine, ModelArgs, StepArgs
from penstock.engine.layers.attention import naive_attend
from penstock.engine.layers.norm import rms_norm
from penstock.engine.layers.rope import rope_tables, rotate

PIECE = 512
"""kPiece of attention.h."""
CACHES = {torch.float32: (0, 1e-5), torch.bfloat16: (1, 2e-2)}
"""Kind, and how far a mix of numbers of size 1 may be off: bfloat16 rounds keys and values to 8 bits."""


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    block_size: int
    window: int
    normed: bool
    cache: torch.dtype = torch.float32

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim


class Sequence:
    """Rows from `start` on, after random keys and values of the tokens before; `pages` hold them."""

    def __init__(self, shape: Shape, start: int, rows: int, pages: list[int], random: torch.Generator) -> None:
        self.start, self.rows, self.pages = start, rows, pages
        self.qkv = torch.randn(rows, shape.width, generator=random)
        self.before = torch.randn(2, start, shape.kv_heads, shape.dim, generator=random)

    def fill(self, shape: Shape, pool: Tensor) -> None:
        size = shape.block_size
        pool[self.pages] = float("nan")  # nobody may look at what isn't there
        for token in range(self.start):
            pool[self.pages[token // size], 0, :, token % size] = self.before[:, token].to(pool.dtype)


class Layer:
    """One layer's attention, on the machine and in words."""

    def __init__(self, shape: Shape, random: torch.Generator) -> None:
        self.shape = shape
        self.norm = torch.rand(shape.heads + shape.kv_heads, shape.dim, generator=random) + 0.5
        self.tables = rope_tables(Rope(), shape.dim, 4000, torch.float32)
        layer = LayerArgs(qk_norm=self.norm.data_ptr() if shape.normed else None, window=shape.window)
        self._layers = (LayerArgs * 1)(layer)
        self._scale = shape.dim**-0.5

    def mixed(self, machine: Machine, pool: Tensor, sequences: list[Sequence]) -> Tensor:
        shape = self.shape
        model = ModelArgs(
            layers=1,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.dim,
            eps=1e-6,
            scale=self._scale,
            kv_kind=CACHES[shape.cache][0],
            block_size=shape.block_size,
            cosine=self.tables[0].data_ptr(),
            sine=self.tables[1].data_ptr(),
            layer=self._layers,
            pool=pool.data_ptr(),
        )
        qkv = torch.cat([one.qkv for one in sequences])
        first = np.cumsum([0, *(one.rows for one in sequences)])
        position = [at for one in sequences for at in range(one.start, one.start + one.rows)]
        table = [page for one in sequences for page in one.pages]
        table_at = np.cumsum([0, *(len(one.pages) for one in sequences)])[:-1]
        arrays = [np.asarray(values, dtype=np.int32) for values in (first, position, table, table_at)]
        step = StepArgs(len(qkv), len(sequences), 0, 0, *(array.ctypes.data for array in arrays))
        mixed = torch.empty(len(qkv), shape.heads * shape.dim)
        machine.attend(model, step, qkv, mixed)
        return mixed

    def naive(self, one: Sequence) -> Tensor:
        shape, heads = self.shape, self.shape.heads
        x = one.qkv.view(one.rows, -1, shape.dim)
        turned, values = x[:, : heads + shape.kv_heads], x[:, heads + shape.kv_heads :]
        if shape.normed:
            turned = rms_norm(turned, self.norm, torch.tensor(1e-6))
        at = slice(one.start, one.start + one.rows)
        turned = rotate(turned, *(table[at].unsqueeze(1) for table in self.tables))
        keys = torch.cat((one.before[0], turned[:, heads:]))
        values = torch.cat((one.before[1], values))
        window = shape.window or None
        return naive_attend(
            turned[:, :heads], keys, values, range(one.start, one.start + one.rows), self._scale, window
        )


@cache
def machine(isa: str, threads: int) -> Machine:
    return Machine(threads, isa)


def setting(shape: Shape, members: list[tuple[int, int]], seed: int) -> tuple[Layer, Tensor, list[Sequence]]:
    """A layer, a pool and sequences on scattered pages: of each the tokens before its rows, and their number."""
    random = torch.Generator().manual_seed(seed)
    needs = [-(-(start + rows) // shape.block_size) for start, rows in members]
    free = (torch.randperm(sum(needs), generator=random) + 1).tolist()
    pool = torch.zeros(sum(needs) + 1, 1, 2, shape.block_size, shape.kv_heads, shape.dim, dtype=shape.cache)
    sequences = []
    for (start, rows), need in zip(members, needs, strict=True):
        sequences.append(Sequence(shape, start, rows, [free.pop() for _ in range(need)], random))
        sequences[-1].fill(shape, pool)
    return Layer(shape, random), pool, sequences


shapes = st.builds(
    lambda group, kv_heads, *rest: Shape(group * kv_heads, kv_heads, *rest),
    st.sampled_from([1, 2, 3, 4, 7, 40]),
    st.integers(1, 3),
    st.sampled_from([16, 32, 48, 64, 80, 128, 256]),
    st.sampled_from([1, 3, 16, 32]),
    st.sampled_from([0, 1, 11, 100, 600]),
    st.booleans(),
    st.sampled_from(list(CACHES)),
)
members = st.tuples(
    st.one_of(st.integers(0, 70), st.integers(PIECE - 9, PIECE + 3), st.integers(0, 3 * PIECE)),
    st.one_of(st.integers(1, 9), st.integers(10, 32)),
)


@pytest.mark.parametrize("isa", instruction_sets())
@settings(max_examples=25, deadline=None)
@given(shapes, st.lists(members, min_size=1, max_size=3), st.sampled_from([1, 3]), st.integers(0, 10**6))
def test_it_is_what_the_naive_loop_gives(isa, shape, members, threads, seed):
    layer, pool, sequences = setting(shape, members, seed)
    found = layer.mixed(machine(isa, threads), pool, sequences)
    expected = torch.cat([layer.naive(one) for one in sequences])
    tolerance = CACHES[shape.cache][1]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("isa", instruction_sets())
@settings(max_examples=12, deadline=None)
@given(shapes, st.lists(members, min_size=2, max_size=3), st.integers(0, 10**6))
def test_a_row_depends_on_its_own_context_alone(isa, shape, members, seed):
    """Bit for bit: alone or in a batch, decoded or verified with others (which looks at the same pages before the
    others are there), on one thread or on five."""
    layer, pool, sequences = setting(shape, members, seed)
    together = layer.mixed(machine(isa, 5), pool, sequences)
    first = 0
    for one in sequences:
        rows = []
        one.fill(shape, pool)
        for row in range(one.rows):
            single = object.__new__(Sequence)
            single.start, single.rows, single.pages, single.qkv = (
                one.start + row,
                1,
                one.pages,
                one.qkv[row : row + 1],
            )
            rows.append(layer.mixed(machine(isa, 1), pool, [single]))
        assert torch.equal(torch.cat(rows), together[first : first + one.rows])
        first += one.rows
