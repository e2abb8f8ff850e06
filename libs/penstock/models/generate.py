"""Decoding one sequence with a cache: the reference that evaluation uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .net import Net
from .tokenizer import END_OF_TEXT, IM_END

STOPS = (IM_END, END_OF_TEXT)


@torch.no_grad()
def generate(
    net: Net,
    prompt: Sequence[int],
    limit: int,
    temperature: float = 0.0,
    *,
    generator: torch.Generator | None = None,
    stops: Sequence[int] = STOPS,
) -> list[int]:
    """Up to `limit` tokens after `prompt`, ending with the stop token if one came. Temperature 0 is greedy."""
    step = torch.tensor(prompt)[None]
    cache = None
    out: list[int] = []
    while len(out) < limit and (not out or out[-1] not in stops):
        hidden, cache = net.hidden(step, cache)
        out.append(_choose(net.logits(hidden[:, -1])[0], temperature, generator))
        step = torch.tensor([[out[-1]]])
    return out


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
