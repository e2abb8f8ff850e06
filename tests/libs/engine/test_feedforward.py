"""Routed experts equal the loop over tokens."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.layers.feedforward import Routed, feed_forward, naive_routed


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
    per_token = data.draw(st.integers(1, experts))
    block = Routed(
        router=torch.randn(8, experts),
        gate_up=torch.randn(experts, 8, 12),
        down=torch.randn(experts, 6, 8),
        per_token=per_token,
        normalised=normalised,
    )
    x = torch.randn(rows, 8)
    found = feed_forward(x, block, activation)
    torch.testing.assert_close(found, naive_routed(x, block, activation), atol=1e-4, rtol=1e-4)
    alone = torch.cat([feed_forward(row.unsqueeze(0), block, activation) for row in x])
    torch.testing.assert_close(found, alone, atol=1e-4, rtol=1e-4)
