"""From logits to tokens.

Order: logprobs are taken from the raw logits; then logit bias, repetition penalty, frequency and presence penalty,
the ban on end tokens below min_tokens; then, unless greedy, temperature, min-p, top-k, top-p (of what top-k left,
renormalised) and Gumbel noise. Greedy and noise both end in an argmax in which the lowest id wins ties.
`reference.sample` says the same in plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine import noise
from penstock.engine.request import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would only overflow."""


@dataclass(slots=True)
class Choice:
    """One token to choose: the one that follows `tokens` and `drafts`."""

    params: SamplingParams
    stops: frozenset[int]
    tokens: Sequence[int]
    prompt_length: int
    drafts: tuple[int, ...]
    """Proposed tokens taken for granted in this row."""
    memory: dict[str, Any]
    """The sequence's scratch space; the sampler keeps token counts in it."""

    @property
    def position(self) -> int:
        return len(self.tokens) + len(self.drafts)

    @property
    def generated(self) -> int:
        return self.position - self.prompt_length

    @property
    def greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        params = self.params
        return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0

    @property
    def banned(self) -> frozenset[int]:
        return self.stops if self.generated < self.params.min_tokens else frozenset()

    @property
    def bare(self) -> bool:
        """Nothing acts on the logits before the temperature."""
        return not (self.penalised or self.params.logit_bias or self.banned)


@dataclass(frozen=True, slots=True)
class Chosen:
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._steps = noise.steps(vocab_size, device)

    def sample(self, logits: Tensor, choices: Sequence[Choice]) -> list[Chosen]:
        """One token per row of `logits` (float32 [rows, vocab], which is not changed)."""
        shaped = self._shape(logits, choices)
        tokens = shaped.argmax(-1)
        noisy = [row for row, choice in enumerate(choices) if not choice.greedy]
        if noisy:
            index = self._tensor(noisy, torch.int64)
            tokens[index] = self._draw(shaped[index], [choices[row] for row in noisy])
        chosen: list[int] = tokens.tolist()
        return self._with_logprobs(logits, choices, chosen)

    def _tensor(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)

    def _shape(self, logits: Tensor, choices: Sequence[Choice]) -> Tensor:
        """The logits after bias, penalties and bans."""
        if all(choice.bare for choice in choices):
            return logits
        logits = logits.clone()
        for row, choice in enumerate(choices):
            if choice.params.logit_bias:
                ids = list(choice.params.logit_bias)
                bias = self._tensor(list(choice.params.logit_bias.values()), torch.float32)
                logits[row, ids] += bias
            if choice.penalised:
                self._penalise(logits[row], choice)
            if choice.banned:
                logits[row, list(choice.banned)] = float("-inf")
        return logits

    def _penalise(self, row: Tensor, choice: Choice) -> None:
        """In place, on one row [vocab]."""
        params = choice.params
        seen, counts = self._counts(choice)
        if params.repetition_penalty != 1.0:
            factor = torch.where(row > 0, 1.0 / params.repetition_penalty, params.repetition_penalty)
            row.mul_(torch.where(seen, factor, 1.0))
        row.sub_(counts, alpha=params.frequency_penalty)
        row.sub_((counts > 0).to(row.dtype), alpha=params.presence_penalty)

    def _counts(self, choice: Choice) -> tuple[Tensor, Tensor]:
        """(occurs in prompt or output: bool [vocab], occurrences in the output: float32 [vocab])."""
        memory = choice.memory
        if "seen" not in memory:
            memory["seen"] = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            memory["counts"] = torch.zeros(self._vocab_size, dtype=torch.float32, device=self._device)
            memory["until"] = 0
        seen, counts, until = memory["seen"], memory["counts"], memory["until"]
        self._count(seen, counts, choice.tokens[until:], max(0, choice.prompt_length - until))
        memory["until"] = len(choice.tokens)
        if choice.drafts:
            seen, counts = seen.clone(), counts.clone()
            self._count(seen, counts, choice.drafts, 0)
        return seen, counts

    def _count(self, seen: Tensor, counts: Tensor, tokens: Sequence[int], skip: int) -> None:
        """Adds `tokens` to the counts, the first `skip` of them (prompt) to `seen` alone."""
        if not tokens:
            return
        ids = self._tensor(tokens, torch.int64)
        seen[ids] = True
        output = ids[skip:]
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.float32))

    def _draw(self, logits: Tensor, choices: Sequence[Choice]) -> Tensor:
        """Sampled ids [rows] from shaped logits [rows, vocab]."""
        temperatures = self._tensor([choice.params.temperature for choice in choices], torch.float32)
        scaled = logits / temperatures.unsqueeze(1)
        scaled = self._filter_min_p(scaled, [choice.params.min_p for choice in choices])
        scaled = self._filter_top(scaled, choices)
        streams = [noise.stream(choice.params.seed, choice.position) for choice in choices]
        return (scaled + noise.gumbel(self._tensor(streams, torch.int64), self._steps)).argmax(-1)

    def _filter_min_p(self, scaled: Tensor, min_p: Sequence[float]) -> Tensor:
        """Drops tokens less probable than min_p times the most probable one."""
        if not any(min_p):
            return scaled
        floor = scaled.amax(-1, keepdim=True) + self._tensor(min_p, torch.float32).log().unsqueeze(1)
        return scaled.masked_fill(scaled < floor, float("-inf"))

    def _filter_top(self, scaled: Tensor, choices: Sequence[Choice]) -> Tensor:
        """Top-k, then top-p. Both cut at a value, so that tied tokens share their fate."""
        top_k = [choice.params.top_k or self._vocab_size for choice in choices]
        top_p = [choice.params.top_p for choice in choices]
        widest = min(max(top_k), self._vocab_size)
        if min(top_k) >= self._vocab_size and min(top_p) >= 1.0:
            return scaled
        ordered = scaled.topk(widest, dim=-1).values
        counts = self._tensor(top_k, torch.int64).clamp_(max=widest).unsqueeze(1)
        floor = ordered.gather(1, counts - 1)
        if min(top_p) < 1.0:
            beyond = torch.arange(widest, device=self._device) >= counts
            share = ordered.masked_fill(beyond, float("-inf")).softmax(-1)
            before = share.cumsum(-1) - share
            limit = self._tensor(top_p, torch.float32).unsqueeze(1)
            inside = (before < limit).sum(-1, keepdim=True).clamp_(min=1)
            inside = torch.where(limit < 1.0, inside.minimum(counts), counts)
            floor = torch.maximum(floor, ordered.gather(1, inside - 1))
        return scaled.masked_fill(scaled < floor, float("-inf"))

    def _with_logprobs(self, logits: Tensor, choices: Sequence[Choice], tokens: Sequence[int]) -> list[Chosen]:
        chosen = [Chosen(token) for token in tokens]
        for row, choice in enumerate(choices):
            wanted = choice.params.logprobs
            if wanted is not None:
                chosen[row] = describe(logits[row], tokens[row], wanted)
        return chosen


def describe(logits: Tensor, token: int, wanted: int) -> Chosen:
    """`token` with its logprob and the `wanted` most probable tokens of one row of raw logits [vocab]."""
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(min(wanted, logprobs.shape[-1]))
    pairs: list[tuple[int, float]] = list(zip(ids.tolist(), values.tolist(), strict=True))
    pairs.sort(key=lambda pair: (-pair[1], pair[0]))
    return Chosen(token, float(logprobs[token]), tuple(pairs))
