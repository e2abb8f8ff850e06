"""Feed-forward blocks: one for all tokens, or many experts of which each token is sent to a few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.checkpoint import Experts, HeldExpert
from penstock.engine.layers.linear import Matrix, linear


@dataclass(slots=True)
class Dense:
    """Gate and up side by side; matrices are [in, out]."""

    gate_up: Matrix
    gate_up_bias: Tensor | None
    down: Matrix
    down_bias: Tensor | None


class AddsToExperts(Protocol):
    """What is added to products of a block with experts; an AdaptedExperts."""

    def add(self, name: str, x: Tensor, y: Tensor, total: int, rows: Tensor | None = None) -> None:
        """Adds to `y`, which a matrix has made of `x`: the router, or gate_up.N or down.N of expert N. The block
        computes `total` rows, of which these are `rows`; None: all."""
        ...


@dataclass(slots=True)
class Routed:
    router: Tensor
    """[hidden, experts]."""
    gate_up: Tensor | Sequence[Matrix]
    """[experts, hidden, 2 * inner], or a matrix for each expert; of those that the process has."""
    down: Tensor | Sequence[Matrix]
    """[experts, inner, hidden], or a matrix for each expert; likewise."""
    rule: Experts
    """How tokens choose."""
    held: Sequence[HeldExpert] | None = None
    """Those that the process has; None: all."""
    correction: Tensor | None = None
    """float32 [experts], where choices are corrected."""
    shared: Dense | None = None
    """What all tokens go through as well."""
    grouped: bool = False
    """Computed by `grouped`; the matrices are tensors then."""
    places: Tensor | None = None
    """int64 [experts, 3], where the matrices are: the place of each expert's, its turn and its copies; an expert that
    the process does not have has the place behind the last. None: it has all. For `grouped`."""
    rows: npt.NDArray[np.int64] | None = None
    """[experts]: how many rows have chosen each so far, counted by `routed`; None: they are not."""
    adapted: AddsToExperts | None = None
    """What adapters add in one step; None: nothing."""


def feed_forward(x: Tensor, block: Dense | Routed, activation: str, positions: Tensor | None = None) -> Tensor:
    """[N, hidden] -> [N, hidden]; `activation` is silu or gelu_tanh. `positions`, int64 [N], are those of the rows in
    their texts, which count where experts have copies."""
    if isinstance(block, Routed):
        at_once = block.grouped and block.adapted is None
        chosen = (grouped if at_once else routed)(x, block, activation, positions)
        return chosen if block.shared is None else chosen + feed_forward(x, block.shared, activation)
    inner = _gated(linear(x, block.gate_up, block.gate_up_bias), activation)
    return linear(inner, block.down, block.down_bias)


def routed(x: Tensor, block: Routed, activation: str, positions: Tensor | None = None) -> Tensor:
    """Each token through its best experts, weighted by the router (Shazeer et al., 2017).

    Tokens are sorted by expert, so that every expert in use is one call over its tokens; the outputs of a token's
    experts are summed in float32, always in the order of the experts. What other processes compute is left out: which
    of them has a row is said by its position alone, so that its sum over all is the same whatever is beside it.
    On a GPU the step waits for the router: the host has to know how many tokens go where. `grouped` does not.
    """
    rule = block.rule
    shares, chosen = choose(x, block)
    order = chosen.flatten().argsort(stable=True)
    tokens = order // rule.per_token
    shares = shares.flatten().index_select(0, order).unsqueeze(1)
    counted = torch.bincount(chosen.flatten(), minlength=block.router.shape[1]).cpu()
    if block.rows is not None:
        block.rows += counted.numpy()
    ends = counted.cumsum(0).tolist()
    mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    held = [HeldExpert(number) for number in range(rule.count)] if block.held is None else block.held
    for place, (expert, turn, copies) in enumerate(held):
        own = slice(ends[expert - 1] if expert else 0, ends[expert])
        rows, weights = tokens[own], shares[own]
        if copies > 1:
            assert positions is not None, "copies take turns by position"
            mine = positions.index_select(0, rows) % copies == turn
            rows, weights = rows[mine], weights[mine]
        if not len(rows):
            continue
        given = x.index_select(0, rows)
        if rule.weighs_inputs:
            given = given * weights.to(x.dtype)
        both = linear(given, block.gate_up[place])
        if block.adapted is not None:
            block.adapted.add(f"gate_up.{expert}", given, both, len(x), rows)
        inner = _gated(both, activation)
        said = linear(inner, block.down[place])
        if block.adapted is not None:
            block.adapted.add(f"down.{expert}", inner, said, len(x), rows)
        mixed.index_add_(0, rows, said.float() if rule.weighs_inputs else said * weights)
    return mixed.to(x.dtype)


def grouped(x: Tensor, block: Routed, activation: str, positions: Tensor | None = None) -> Tensor:
    """Computes `routed` with one product for all experts each way, whose rows the device alone counts: the host waits
    for nothing, so that the step can be captured. Its sums are in the same order."""
    rule, gate_up, down = block.rule, block.gate_up, block.down
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor), "grouped products need tensors"
    shares, chosen = choose(x, block)
    chosen, by = chosen.sort(-1)
    places = chosen if block.places is None else _places(chosen, block.places, len(gate_up), positions)
    experts, order = places.flatten().sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(len(gate_up), device=x.device), right=True, out_int32=True)
    given = x.index_select(0, order // rule.per_token)
    weights = shares.gather(1, by).flatten().index_select(0, order).unsqueeze(1)
    if rule.weighs_inputs:
        given = given * weights.to(x.dtype)
    inner = _gated(F.grouped_mm(given, gate_up, offs=ends), activation)
    said = F.grouped_mm(inner, down, offs=ends)
    weighted = said.float() if rule.weighs_inputs else said * weights
    if block.places is not None:  # what others compute is behind the last group, in memory that nobody has written
        weighted = weighted.masked_fill((experts == len(gate_up)).unsqueeze(1), 0)
    rows = torch.empty_like(weighted).index_copy_(0, order, weighted).view(len(x), rule.per_token, -1)
    mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for number in range(rule.per_token):
        mixed += rows[:, number]
    return mixed.to(x.dtype)


def held_places(held: Sequence[HeldExpert], experts: int) -> Tensor:
    """The `places` of a process that has these of so many experts, on a CPU."""
    places = torch.tensor([[len(held), 0, 1]]).repeat(experts, 1)
    for place, (number, turn, copies) in enumerate(held):
        places[number] = torch.tensor([place, turn, copies])
    return places


def _places(chosen: Tensor, places: Tensor, absent: int, positions: Tensor | None) -> Tensor:
    """[N, per_token]: where the matrices of each token's experts are; `absent` for those that others compute."""
    assert positions is not None, "copies take turns by position"
    place, turn, copies = places[chosen].unbind(-1)
    return torch.where(positions.unsqueeze(1) % copies == turn, place, absent)


def choose(x: Tensor, block: Routed) -> tuple[Tensor, Tensor]:
    """(weights, experts) of each token: float32 and int64 [N, per_token].

    The softmax is over all experts, before the best are taken. Sigmoids are taken of scores in float32; DeepSeek-V3's
    rule is that of its report (2024), section 2.1.2, with the groups of DeepSeek-V2.
    """
    rule = block.rule
    exact = block.correction is not None
    given = x.float() if exact else x
    scores = torch.mm(given, block.router.float() if exact else block.router)
    if block.adapted is not None:
        block.adapted.add("router", given, scores, len(x))
    if not rule.sigmoid:
        shares, chosen = scores.softmax(-1, dtype=torch.float32).topk(rule.per_token)
        return (shares / shares.sum(-1, keepdim=True) if rule.normalised else shares), chosen
    if block.correction is None:
        best, chosen = scores.topk(rule.per_token)
        return best.float().sigmoid() * rule.scaling, chosen
    scores = scores.sigmoid()
    wanted = scores + block.correction
    if rule.groups > 1:
        grouped = wanted.view(len(x), rule.groups, -1)
        used = grouped.topk(2).values.sum(-1).topk(rule.groups_used).indices
        out = torch.ones(len(x), rule.groups, dtype=torch.bool, device=x.device).scatter_(1, used, False)
        wanted = grouped.masked_fill(out.unsqueeze(-1), float("-inf")).view(len(x), -1)
    chosen = wanted.topk(rule.per_token).indices
    shares = scores.gather(1, chosen)
    if rule.normalised:
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    return shares * rule.scaling, chosen


def naive_routed(x: Tensor, block: Routed, activation: str) -> Tensor:
    """Computes `routed` one token and one expert at a time: its oracle."""
    rule, rows = block.rule, []
    for row in x:
        scores = (row @ block.router).float()
        shares = scores.sigmoid() if rule.sigmoid else scores.softmax(-1)
        wanted = [float(share) for share in shares]
        if block.correction is not None:
            wanted = [value + float(more) for value, more in zip(wanted, block.correction, strict=True)]
        size = rule.count // rule.groups
        of_groups = [sum(sorted(wanted[first : first + size])[-2:]) for first in range(0, rule.count, size)]
        used = sorted(range(rule.groups), key=lambda group: -of_groups[group])[: rule.groups_used]
        possible = [expert for expert in range(rule.count) if expert // size in used]
        best = sorted(possible, key=lambda expert: -wanted[expert])[: rule.per_token]
        total = sum(float(shares[expert]) for expert in best) if rule.normalised else 1.0
        said = torch.zeros(x.shape[1])
        for expert in best:
            weight = float(shares[expert]) / total * rule.scaling
            given = row * weight if rule.weighs_inputs else row
            inner = _gated(linear(given.unsqueeze(0), block.gate_up[expert]), activation)
            said += linear(inner, block.down[expert])[0].float() * (1.0 if rule.weighs_inputs else weight)
        rows.append(said.to(x.dtype))
    return torch.stack(rows)


def _gated(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)
