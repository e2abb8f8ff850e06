"""Muon for matrices, AdamW for the rest; state in plain tensors, so that it can be saved as safetensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(batch: Tensor, dtype: torch.dtype = torch.float32, steps: int = 5) -> Tensor:
    """Push the singular values of a batch of matrices towards one (Newton-Schulz, quintic), computing in `dtype`."""
    a, b, c = _COEFFICIENTS
    x = batch.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    result: Tensor = (x.mT if tall else x).to(batch.dtype)
    return result


class Optimizer:
    """Steps a model's parameters; one learning rate serves both halves, since Muon is scaled to AdamW's size. Products
    are computed in `dtype`, everything else in float32."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.98),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.dtype = dtype
        self.decay = decay
        self.betas = betas
        self.groups: dict[tuple[int, ...], list[tuple[str, nn.Parameter]]] = {}
        self.others: list[tuple[str, nn.Parameter]] = []
        for name, parameter in named:
            if parameter.ndim == 2 and "embed_tokens" not in name:
                self.groups.setdefault(tuple(parameter.shape), []).append((name, parameter))
            else:
                self.others.append((name, parameter))
        self.momentum = {
            shape: torch.zeros(len(members), *shape, device=members[0][1].device)
            for shape, members in self.groups.items()
        }
        self.steps = torch.zeros((), device=self.others[0][1].device)
        self.first = {name: torch.zeros_like(p) for name, p in self.others}
        self.second = {name: torch.zeros_like(p) for name, p in self.others}

    @torch.no_grad()
    def step(self, rate: float | Tensor) -> None:
        """One update at learning rate `rate`, from the gradients in place; clears them. A rate on a GPU, without
        dimensions, lets the update be captured."""
        self.steps += 1
        for shape, members in self.groups.items():
            gradient = torch.stack([_gradient(p) for _, p in members])
            momentum = self.momentum[shape]
            momentum.mul_(0.95).add_(gradient, alpha=0.05)
            update = orthogonalise(gradient.lerp_(momentum, 0.95), self.dtype)
            scale = 0.2 * max(shape) ** 0.5
            for (_, parameter), change in zip(members, update, strict=True):
                parameter.mul_(1 - rate * self.decay).sub_(change.mul_(rate * scale))
                parameter.grad = None
        low, high = self.betas
        for name, parameter in self.others:
            gradient = _gradient(parameter)
            first, second = self.first[name], self.second[name]
            first.lerp_(gradient, 1 - low)
            second.lerp_(gradient.square(), 1 - high)
            size = (second / (1 - high**self.steps)).sqrt_().add_(1e-8)
            parameter.sub_((first / size).mul_(rate / (1 - low**self.steps)))
            parameter.grad = None

    def tensors(self) -> list[Tensor]:
        """What steps change beside the parameters."""
        return [self.steps, *self.momentum.values(), *self.first.values(), *self.second.values()]

    def state(self) -> dict[str, Tensor]:
        """Everything `restore` needs, as named tensors."""
        tensors = {"steps": self.steps}
        for shape, members in self.groups.items():
            for (name, _), momentum in zip(members, self.momentum[shape], strict=True):
                tensors[f"momentum.{name}"] = momentum.clone()
        for name in self.first:
            tensors[f"first.{name}"] = self.first[name]
            tensors[f"second.{name}"] = self.second[name]
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned."""
        self.steps.fill_(tensors["steps"])
        for shape, members in self.groups.items():
            for i, (name, _) in enumerate(members):
                self.momentum[shape][i] = tensors[f"momentum.{name}"]
        for name in self.first:
            self.first[name].copy_(tensors[f"first.{name}"])
            self.second[name].copy_(tensors[f"second.{name}"])


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "every parameter takes part in the loss"
    return parameter.grad
