"""Growing a small trained network into a larger one that computes the same function.

Training the small network first is several times cheaper per token; the large one then starts where the
small one ended. First layers that change nothing are put in between, later every width is doubled by repeating
it; the repeated halves differ by noise that cancels out, so that training can tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .net import Net, NetShape


def widened(shape: NetShape) -> NetShape:
    """`shape` with every width doubled."""
    return replace(
        shape,
        width=2 * shape.width,
        inner=2 * shape.inner,
        heads=2 * shape.heads,
        kv_heads=2 * shape.kv_heads,
    )


@torch.no_grad()
def deepen(small: Net, places: Sequence[int], seed: int) -> Net:
    """A network of `max(places) + 1` layers that computes what `small` does: `places[i]` is where its layer i
    went, and the other layers start as the identity."""
    generator = torch.Generator().manual_seed(seed)
    deep = Net(replace(small.shape, layers=max(places) + 1))
    old = dict(small.named_parameters())
    for name, parameter in deep.named_parameters():
        parts = name.split(".")
        if parts[1] == "layers":
            if int(parts[2]) not in places:
                _identity(name, parameter, generator)
                continue
            parts[2] = str(places.index(int(parts[2])))
        parameter.copy_(old[".".join(parts)])
    return deep


@torch.no_grad()
def with_heads(small: Net, heads: int, seed: int) -> Net:
    """A network that computes what `small` does, with `heads` heads in each layer; the new ones add nothing yet."""
    generator = torch.Generator().manual_seed(seed)
    large = Net(replace(small.shape, heads=heads, kv_heads=heads))
    old = dict(small.named_parameters())
    for name, parameter in large.named_parameters():
        weight = old[name]
        if "o_proj" in name:
            parameter.zero_()
            parameter[:, : weight.shape[1]] = weight
        elif parameter.shape == weight.shape:
            parameter.copy_(weight)
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6 / parameter.shape[1] ** 0.5)
            parameter[: len(weight)] = weight
    return large


@torch.no_grad()
def widen(small: Net, seed: int, noise: float = 0.5) -> Net:
    """A network of twice the width whose logits are those of `small`, up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    large = Net(widened(small.shape))
    old = dict(small.named_parameters())

    def noise_like(weight: Tensor) -> Tensor:
        return torch.randn(weight.shape, generator=generator) * weight.std() * noise

    def wide(weight: Tensor) -> Tensor:
        """Twice the outputs, each reading the sum of both halves of the input, with cancelling noise."""
        rows = []
        for _ in range(2):
            change = noise_like(weight)
            rows.append(torch.cat([weight + change, weight - change], 1) / 2)
        return torch.cat(rows, 0)

    for name, parameter in large.named_parameters():
        weight = old[name]
        if name == "model.norm.weight":
            parameter.copy_(weight.repeat(2) / 2)  # the doubled embedding doubles every logit
        elif weight.ndim == 1:
            parameter.copy_(weight.repeat(2))
        elif "embed_tokens" in name:
            parameter.copy_(weight.repeat(1, 2))
        else:
            parameter.copy_(wide(weight))
    return large


def _identity(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """A weight of a layer that adds nothing: its output projections are zero, the rest small noise."""
    if parameter.ndim == 1:
        parameter.fill_(1.0)
    elif "o_proj" in name or "down_proj" in name:
        parameter.zero_()
    else:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6 / parameter.shape[1] ** 0.5)
