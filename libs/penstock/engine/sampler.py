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

_OUT = float("-inf")
_NUCLEUS = 512
"""Most probable tokens in which a top-p cut is looked for first."""
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
                logits[row, list(choice.banned)] = _OUT
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
        """Sampled ids [rows] from shaped logits [rows, vocab]. Noise is drawn for the tokens that are left only."""
        temperatures = self._tensor([choice.params.temperature for choice in choices], torch.float32)
        scaled = logits / temperatures.unsqueeze(1)
        streams = [noise.stream(choice.params.seed, choice.position) for choice in choices]
        places = self._tensor(streams, torch.int64).unsqueeze(1) + self._steps
        floor = self._floor(scaled, choices)
        if floor is None:
            return scaled.add_(noise.gumbel(places)).argmax(-1)
        left = (scaled >= floor).nonzero(as_tuple=True)
        noisy = torch.full_like(scaled, _OUT)
        noisy[left] = scaled[left] + noise.gumbel(places[left])
        return noisy.argmax(-1)

    def _floor(self, scaled: Tensor, choices: Sequence[Choice]) -> Tensor | None:
        """[rows, 1]: tokens with less than this are out, so tied tokens share their fate; None when all stay."""
        min_p = [choice.params.min_p for choice in choices]
        top_k = [self._top_k(choice) for choice in choices]
        top_p = [choice.params.top_p for choice in choices]
        floor = None
        if any(min_p):
            floor = scaled.amax(-1, keepdim=True) + self._tensor(min_p, torch.float32).log().unsqueeze(1)
            scaled = scaled.masked_fill(scaled < floor, _OUT)
        if any(top_k) or min(top_p) < 1.0:
            cut = self._cut(scaled, top_k, top_p, _NUCLEUS)
            if cut is None:
                cut = self._cut(scaled, top_k, top_p, self._vocab_size)
            assert cut is not None, "the whole vocabulary holds every nucleus"
            floor = cut if floor is None else torch.maximum(cut, floor)
        return floor

    def _top_k(self, choice: Choice) -> int:
        """0 when it is off."""
        return choice.params.top_k if choice.params.top_k < self._vocab_size else 0

    def _cut(self, scaled: Tensor, top_k: Sequence[int], top_p: Sequence[float], nucleus: int) -> Tensor | None:
        """The least value that top-k, then top-p of the k (renormalised), leave: [rows, 1].

        Rows without top-k are sorted no further than their best `nucleus` tokens; None when these do not make up
        some row's top_p.
        """
        widest = min(max(count or nucleus for count in top_k), self._vocab_size)
        counts = self._tensor([count or widest for count in top_k], torch.int64).unsqueeze(1)
        everything = self._tensor([count == 0 for count in top_k], torch.bool).unsqueeze(1)
        whole = self._tensor([share >= 1.0 for share in top_p], torch.bool).unsqueeze(1)
        ordered = scaled.topk(widest, dim=-1).values
        last = counts
        if min(top_p) < 1.0:
            limit = self._tensor(top_p, torch.float32).unsqueeze(1)
            share = self._shares(scaled, ordered, counts, everything)
            until = share.cumsum(-1)
            missed = everything & ~whole & (until[:, -1:] < limit)
            if widest < self._vocab_size and bool(missed.any()):
                return None
            inside = (until - share < limit).sum(-1, keepdim=True).clamp_(min=1).minimum(counts)
            last = torch.where(whole, counts, inside)
        return ordered.gather(1, last - 1).masked_fill_(everything & whole, _OUT)

    def _shares(self, scaled: Tensor, ordered: Tensor, counts: Tensor, everything: Tensor) -> Tensor:
        """Probabilities of the `ordered` tokens among the first `counts`, or among all where `everything`."""
        beyond = torch.arange(ordered.shape[1], device=self._device) >= counts
        ordered = ordered.masked_fill(beyond, _OUT)
        total = ordered.logsumexp(-1, keepdim=True)
        if bool(everything.any()):
            total = torch.where(everything, scaled.logsumexp(-1, keepdim=True), total)
        return (ordered - total).exp()

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
