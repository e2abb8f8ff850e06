"""Grouped products of experts: when they are used, and that they give what products of each expert give."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from tests.libs.engine.cuda.pretend import CUDA, Pretend
from tests.libs.engine.test_feedforward import block_of, rule_of

from penstock.checkpoint import HeldExpert
from penstock.engine.kernels.cuda import experts
from penstock.engine.kernels.cuda.capability import ungrouped
from penstock.engine.layers.feedforward import Routed, grouped, held_places, naive_routed, routed

RULES = [
    {},
    {"normalised": False},
    {"sigmoid": True, "corrected": True, "groups": 3, "groups_used": 2, "scaling": 2.5},
    {"sigmoid": True, "weighs_inputs": True, "normalised": False},
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rows", [1, 2, 30, 200])
def test_they_equal_the_naive_loop(rule, rows):
    torch.manual_seed(rows)
    block, x = block_of(rule_of(12, 4, **rule), 16, 24), torch.randn(rows, 16)
    found = grouped(x, block, "silu")
    torch.testing.assert_close(found, naive_routed(x, block, "silu"), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found, routed(x, block, "silu"), atol=1e-6, rtol=1e-6)


HELD = [
    [HeldExpert(number) for number in (0, 3, 4)],
    [HeldExpert(1), HeldExpert(2, 1, 2), HeldExpert(7, 0, 3), HeldExpert(11)],
    [HeldExpert(5)],
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("rows", [1, 30])
def test_they_equal_the_loop_over_the_experts_that_a_process_has(rule, held, rows):
    """Whose copies take turns with those of others. Rows that have chosen none of them get zeros."""
    torch.manual_seed(rows)
    block, x = block_of(rule_of(12, 4, **rule), 16, 24), torch.randn(rows, 16)
    block.gate_up, block.down = block.gate_up[: len(held)], block.down[: len(held)]
    block.held, block.places = held, held_places(held, 12)
    positions = torch.randint(0, 100, (rows,))
    found = grouped(x, block, "silu", positions)
    torch.testing.assert_close(found, routed(x, block, "silu", positions), atol=1e-6, rtol=1e-6)


def test_experts_of_a_process_have_to_prove_themselves():
    torch.manual_seed(1)
    blocks = []
    for held in ([HeldExpert(1, 1, 2), HeldExpert(3)], [HeldExpert(number) for number in range(5)]):
        block = in_bfloat16(block_of(rule_of(5, 2), 16, 24))
        block.gate_up, block.down, block.held = block.gate_up[: len(held)], block.down[: len(held)], held
        blocks.append(block)
    experts.group_experts(SimpleNamespace(layers=[SimpleNamespace(mlp=block) for block in blocks]), "silu", (9, 0))
    assert all(block.grouped for block in blocks)
    assert blocks[0].places.tolist() == [[2, 0, 1], [0, 1, 2], [2, 0, 1], [1, 0, 1], [2, 0, 1]]
    assert blocks[1].places is None, "it has all"


def test_they_equal_the_loop_over_experts_in_bfloat16():
    torch.manual_seed(1)
    block, x = in_bfloat16(block_of(rule_of(6, 2), 32, 48)), torch.randn(40, 32).bfloat16()
    torch.testing.assert_close(grouped(x, block, "silu"), routed(x, block, "silu"), atol=0.02, rtol=0.02)


def test_all_rows_at_one_expert_and_none_at_the_others():
    torch.manual_seed(2)
    block = block_of(rule_of(5, 1), 16, 24)
    x = torch.randn(1, 16).expand(20, 16).contiguous()
    torch.testing.assert_close(grouped(x, block, "silu"), naive_routed(x, block, "silu"), atol=1e-4, rtol=1e-4)


def test_the_host_waits_for_the_loop_and_not_for_grouped_products():
    torch.manual_seed(3)
    block, waits = block_of(rule_of(5, 2), 16, 24), {}
    for way in (routed, grouped):
        with Pretend() as mode:
            there = Routed(block.router.to(CUDA), block.gate_up.to(CUDA), block.down.to(CUDA), block.rule)
            x = torch.randn(4, 16).to(CUDA)
            mode.waits.clear()
            way(x, there, "silu")
            waits[way] = list(mode.waits)
    assert waits[routed] and not waits[grouped]


@pytest.mark.parametrize(
    ("dtype", "sizes", "capability", "reason"),
    [
        ("bfloat16", (64, 32), (9, 0), None),
        ("bfloat16", (64, 32), (10, 3), None),
        ("bfloat16", (64, 32), (8, 9), "compute capability 8.9 has no grouped products, only 9 and 10 have"),
        ("bfloat16", (64, 32), (12, 0), "compute capability 12.0 has no grouped products"),
        ("float32", (64, 32), (9, 0), "grouped products are of bfloat16, not of float32"),
        ("bfloat16", (64, 36), (9, 0), "grouped products need sizes that are multiples of 8, not 36"),
    ],
)
def test_where_there_are_none_the_reason_is_said(dtype, sizes, capability, reason):
    found = ungrouped(dtype, sizes, capability)
    assert found is None if reason is None else found.startswith(reason)


def in_bfloat16(block: Routed) -> Routed:
    tensors = (block.router, block.gate_up, block.down)
    return Routed(*(tensor.bfloat16() for tensor in tensors), block.rule)


def test_they_have_to_prove_themselves(caplog, monkeypatch):
    block = in_bfloat16(block_of(rule_of(5, 2), 16, 24))
    weights = SimpleNamespace(layers=[SimpleNamespace(mlp=None), SimpleNamespace(mlp=block)])
    experts.group_experts(weights, "silu", (9, 0))
    assert block.grouped
    monkeypatch.setattr(experts, "grouped", lambda *given: 2 * routed(*given))
    with caplog.at_level(logging.INFO):
        experts.group_experts(weights, "silu", (9, 0))
    assert not block.grouped and "they are off by 1 of the largest result" in caplog.text


def test_a_torch_without_them_is_no_error(caplog, monkeypatch):
    block = in_bfloat16(block_of(rule_of(5, 2), 16, 24))
    weights = SimpleNamespace(layers=[SimpleNamespace(mlp=block)])
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    with caplog.at_level(logging.INFO):
        experts.group_experts(weights, "silu", (9, 0))
    assert not block.grouped and "AttributeError" in caplog.text
