"""Routed experts equal the loop over tokens, however their matrices are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.checkpoint import Experts, HeldExpert
from penstock.engine.kernels.cpu.machine import Machine
from penstock.engine.kernels.cpu.matrix import PackedMatrix
from penstock.engine.kernels.rounding import degrouped, dequantised, grouped
from penstock.engine.layers.feedforward import Routed, feed_forward, naive_routed

KINDS = ("float32", "bfloat16", "int8", "int4", "lossless")


def rule_of(experts: int, per_token: int, **more) -> Experts:
    fields = {"normalised": True, "layers": (True,), **more}
    return Experts(count=experts, per_token=per_token, intermediate_size=6, **fields)


def block_of(rule: Experts, hidden: int = 8, inner: int = 6) -> Routed:
    return Routed(
        router=torch.randn(hidden, rule.count),
        gate_up=torch.randn(rule.count, hidden, 2 * inner) / hidden**0.5,
        down=torch.randn(rule.count, inner, hidden) / inner**0.5,
        rule=rule,
        correction=torch.randn(rule.count) if rule.corrected else None,
    )


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@settings(max_examples=40)
@given(
    st.integers(1, 40),
    st.integers(1, 9),
    st.data(),
    st.booleans(),
    st.sampled_from(["silu", "gelu_tanh"]),
    st.integers(0, 10**6),
)
def test_routed_equals_the_naive_loop(rows, experts, data, normalised, activation, seed):
    torch.manual_seed(seed)
    block = block_of(rule_of(experts, data.draw(st.integers(1, experts)), normalised=normalised))
    x = torch.randn(rows, 8)
    found = feed_forward(x, block, activation)
    close(found, naive_routed(x, block, activation))
    close(found, torch.cat([feed_forward(row.unsqueeze(0), block, activation) for row in x]))


@pytest.mark.parametrize(
    "rule",
    [
        {"sigmoid": True, "corrected": True, "groups": 3, "groups_used": 2, "scaling": 2.5},
        {"sigmoid": True, "corrected": True, "normalised": False},
        {"sigmoid": True, "weighs_inputs": True, "normalised": False},
    ],
)
def test_rules_with_sigmoids_equal_the_naive_loop(rule):
    torch.manual_seed(3)
    block, x = block_of(rule_of(6, 2, **rule)), torch.randn(30, 8)
    close(feed_forward(x, block, "silu"), naive_routed(x, block, "silu"))


def as_kept(matrix: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "float32":
        return matrix
    if kind == "int4":
        return degrouped(*grouped(matrix))
    return dequantised(matrix) if kind == "int8" else matrix.bfloat16().float()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hidden", "inner"), [(8, 6), (34, 50), (64, 80)])
def test_packed_experts_equal_the_naive_loop(kind, hidden, inner):
    torch.manual_seed(5)
    machine, block = Machine(2), block_of(rule_of(7, 3), hidden, inner)
    packed = Routed(
        block.router,
        [PackedMatrix.pack(machine, matrix, None, kind) for matrix in block.gate_up],
        [PackedMatrix.pack(machine, matrix, None, kind) for matrix in block.down],
        block.rule,
    )
    block.gate_up = [as_kept(matrix, kind) for matrix in block.gate_up]
    block.down = [as_kept(matrix, kind) for matrix in block.down]
    tolerance = 0.05 if machine.rounds(kind) else 1e-4
    for rows in (1, 2, 9, 150):
        x = torch.randn(rows, hidden)
        found, expected = feed_forward(x, packed, "silu"), naive_routed(x, block, "silu")
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", [None, "float32"])
@pytest.mark.parametrize(
    "more", [{}, {"sigmoid": True, "weighs_inputs": True, "normalised": False}], ids=["", "llama 4"]
)
def test_groups_that_share_experts_say_together_what_one_process_says(kind, more):
    """Each row at each expert once; by whom, its position says alone."""
    torch.manual_seed(7)
    machine, whole = Machine(1), block_of(rule_of(5, 2, **more), 16, 16)
    turns = [(HeldExpert(0, 0, 2), HeldExpert(1), HeldExpert(3, 1, 3)), (HeldExpert(2), HeldExpert(3, 0, 3))]
    turns.append((HeldExpert(0, 1, 2), HeldExpert(3, 2, 3), HeldExpert(4)))

    def matrix(own: torch.Tensor) -> torch.Tensor | PackedMatrix:
        return own if kind is None else PackedMatrix.pack(machine, own, None, kind)

    parts = [
        replace(
            whole,
            gate_up=[matrix(whole.gate_up[one.number]) for one in held],
            down=[matrix(whole.down[one.number]) for one in held],
            held=held,
        )
        for held in turns
    ]
    x, positions = torch.randn(40, 16), torch.randperm(40)
    found = [feed_forward(x, part, "silu", positions) for part in parts]
    close(sum(found), naive_routed(x, whole, "silu"))
    for row in range(40):
        own = [feed_forward(x[row : row + 1], part, "silu", positions[row : row + 1])[0] for part in parts]
        for alone, beside in zip(own, found, strict=True):
            close(alone, beside[row])
