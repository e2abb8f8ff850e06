"""On a GPU grouped products of experts give what products of each expert give, also in a captured step."""

from __future__ import annotations

import pytest
import torch
from tests.libs.engine.test_feedforward import block_of, rule_of

from penstock.engine.kernels.cuda.capability import ungrouped
from penstock.engine.layers.feedforward import Routed, grouped, routed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
RULES = [{}, {"normalised": False}, {"sigmoid": True, "weighs_inputs": True, "normalised": False}]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rows", [1, 8, 300])
def test_grouped_products_of_bfloat16(rule, rows):
    reason = ungrouped("bfloat16", (256, 128), torch.cuda.get_device_capability())
    if reason is not None:
        pytest.skip(reason)
    torch.manual_seed(rows)
    plain = block_of(rule_of(16, 2, **rule), 256, 128)
    tensors = (plain.router, plain.gate_up, plain.down)
    block = Routed(*(tensor.to("cuda", torch.bfloat16) for tensor in tensors), plain.rule)
    x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
    expected = routed(x, block, "silu")
    torch.testing.assert_close(grouped(x, block, "silu"), expected, atol=0.02, rtol=0.02)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = grouped(x, block, "silu")
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(result, routed(x, block, "silu"), atol=0.02, rtol=0.02)
