"""Feed-forward blocks: one for all tokens, or many experts of which each token is sent to a few."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.layers.linear import Matrix, linear


@dataclass(slots=True)
class Dense:
    """Gate and up side by side; matrices are [in, out]."""

    gate_up: Matrix
    gate_up_bias: Tensor | None
    down: Matrix
    down_bias: Tensor | None


@dataclass(slots=True)
class Routed:
    router: Tensor
    """[hidden, experts]."""
    gate_up: Tensor
    """[experts, hidden, 2 * inner]."""
    down: Tensor
    """[experts, inner, hidden]."""
    per_token: int
    normalised: bool
    """The weights of a token's experts are made to sum to 1."""


def feed_forward(x: Tensor, block: Dense | Routed, activation: str) -> Tensor:
    """[N, hidden] -> [N, hidden]; `activation` is silu or gelu_tanh."""
    if isinstance(block, Routed):
        return routed(x, block, activation)
    inner = _gated(linear(x, block.gate_up, block.gate_up_bias), activation)
    return linear(inner, block.down, block.down_bias)


def routed(x: Tensor, block: Routed, activation: str) -> Tensor:
    """Each token through its best `per_token` experts, weighted by the router (Shazeer et al., 2017).

    The softmax is over all experts, before the best are taken. Tokens are sorted by expert, so that every expert in
    use is one call over its tokens; the outputs of a token's experts are summed in float32, always in the order of
    the experts. On a GPU the step waits for the router: the host has to know how many tokens go where.
    """
    shares, chosen = torch.mm(x, block.router).softmax(-1, dtype=torch.float32).topk(block.per_token)
    if block.normalised:
        shares = shares / shares.sum(-1, keepdim=True)
    order = chosen.flatten().argsort(stable=True)
    tokens = order // block.per_token
    shares = shares.flatten().index_select(0, order).unsqueeze(1)
    counts = torch.bincount(chosen.flatten(), minlength=block.router.shape[1]).tolist()
    mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    first = 0
    for expert, count in enumerate(counts):
        if count:
            own = slice(first, first + count)
            inner = _gated(torch.mm(x.index_select(0, tokens[own]), block.gate_up[expert]), activation)
            mixed.index_add_(0, tokens[own], torch.mm(inner, block.down[expert]) * shares[own])
            first += count
    return mixed.to(x.dtype)


def naive_routed(x: Tensor, block: Routed, activation: str) -> Tensor:
    """Computes `routed` one token and one expert at a time: its oracle."""
    rows = []
    for row in x:
        shares = (row @ block.router).float().softmax(-1)
        best = sorted(range(len(shares)), key=lambda expert: -float(shares[expert]))[: block.per_token]
        total = sum(float(shares[expert]) for expert in best) if block.normalised else 1.0
        said = torch.zeros(x.shape[1])
        for expert in best:
            inner = _gated((row @ block.gate_up[expert]).unsqueeze(0), activation)[0]
            said += (inner @ block.down[expert]).float() * float(shares[expert]) / total
        rows.append(said.to(x.dtype))
    return torch.stack(rows)


def _gated(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)
