"""From logits to tokens.

Order: logprobs are taken from the raw logits; then logit bias, repetition penalty, frequency and presence penalty,
banned tokens, the ban on end tokens below min_tokens, the grammar; then, unless greedy, temperature, min-p, top-k,
top-p (of the tokens that top-k left, renormalised) and Gumbel noise. So min-p, top-k and top-p count legal tokens only.
Where a grammar allows nothing but an end, min_tokens doesn't ban it; where it allows nothing but banned tokens, they
are not banned. Greedy and noise both end in an argmax in which
the lowest id wins ties. `reference.sample` computes the same in plain Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.engine.errors import NotFinite
from penstock.engine.sampling import noise
from penstock.engine.sampling.bans import left
from penstock.engine.sampling.choice import Choice, Chosen
from penstock.engine.sampling.occurrences import Occurrences
from penstock.grammar.tokenizer import MaskWords

_OUT = float("-inf")
_NUCLEUS = 512
"""Most probable tokens in which a top-p cut is looked for first."""
_AT_ONCE = 1 << 17
"""Logits that get noise at once on a CPU."""


class Draws(Protocol):
    """Chooses a token for each row of `logits` (float32 [rows, vocab], contiguous, not changed), of those that are
    legal there: whatever else changes logits has been applied to them. -1 where the largest one is not finite."""

    def __call__(self, logits: Tensor, choices: Sequence[Choice]) -> list[int]: ...


class Sampler:
    """Chooses tokens for one model. Its only memory between calls is `Choice.state`."""

    def __init__(self, vocab_size: int, device: torch.device, draws: Draws | None = None) -> None:
        """`draws`: chooses in place of torch, on a CPU."""
        self._vocab_size = vocab_size
        self._device = device
        self._draws = draws
        self._steps = noise.steps(vocab_size, device)

    def sample(self, logits: Tensor, choices: Sequence[Choice]) -> list[Chosen]:
        """One token per row of `logits` (float32 [rows, vocab], which is not changed).

        On a device all is submitted without waiting, and the host waits once, for the copies of the results; a
        second time when some row's top-p takes more than its best _NUCLEUS tokens. Raises NotFinite.
        """
        if all(choice.plain and choice.bare for choice in choices):
            best, peaks = on_host(*_best(logits))
            _check_finite(peaks.tolist())
            return [Chosen(token) for token in best.tolist()]
        if self._draws is not None and all(choice.unshaped for choice in choices):
            tokens = self._draws(logits, choices)
            if -1 in tokens:
                raise NotFinite
            return [Chosen(token) for token in tokens]
        chosen = self._sample(logits, choices, _NUCLEUS)
        if chosen is None:
            chosen = self._sample(logits, choices, self._vocab_size)
        assert chosen is not None, "the whole vocabulary holds every nucleus"
        return chosen

    def _sample(self, logits: Tensor, choices: Sequence[Choice], nucleus: int) -> list[Chosen] | None:
        """Samples one token per row; None when the `nucleus` best tokens of some row do not make up its top_p."""
        (tokens, peaks), missed = _best(logits), None
        changed = [row for row, choice in enumerate(choices) if not (choice.greedy and choice.bare)]
        if changed:
            index = self._tensor(changed, torch.int64)
            own = logits.index_select(0, index)  # the one copy
            found, missed = self._choose(own, [choices[row] for row in changed], nucleus)
            tokens.index_copy_(0, index, found)
        wanted = [row for row, choice in enumerate(choices) if choice.params.logprobs is not None]
        described = self._describe(logits, tokens, choices, wanted) if wanted else ()
        values, short, peaks, *facts = on_host(tokens, tokens[:0] if missed is None else missed, peaks, *described)
        _check_finite(peaks.tolist())
        if missed is not None and bool(short.any()):
            return None
        chosen = [Chosen(token) for token in values.tolist()]
        for row, fact in zip(wanted, zip(*(each.tolist() for each in facts), strict=True), strict=True):
            chosen[row] = _described(chosen[row].token, choices[row].params.logprobs or 0, *fact)
        return chosen

    def _tensor(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        if self._device.type == "cpu":
            return torch.tensor(values, dtype=dtype)
        return torch.tensor(values, dtype=dtype, pin_memory=True).to(self._device, non_blocking=True)

    def _choose(self, logits: Tensor, choices: Sequence[Choice], nucleus: int) -> tuple[Tensor, Tensor | None]:
        """Applies biases and penalties to raw logits, which it overwrites, and chooses a token; returns as `_draw`."""
        self._shape(logits, choices)
        noisy = [row for row, choice in enumerate(choices) if not choice.greedy]
        if len(noisy) == len(choices):
            return self._draw(logits, choices, nucleus)
        tokens, missed = _argmax(logits), None
        if noisy:
            index = self._tensor(noisy, torch.int64)
            drawn, missed = self._draw(logits.index_select(0, index), [choices[row] for row in noisy], nucleus)
            tokens.index_copy_(0, index, drawn)
        return tokens, missed

    def _shape(self, logits: Tensor, choices: Sequence[Choice]) -> None:
        """Bias, penalties, bans and grammars, in place."""
        for row, choice in enumerate(choices):
            if choice.params.logit_bias:
                ids = self._tensor(list(choice.params.logit_bias), torch.int64)
                bias = self._tensor(list(choice.params.logit_bias.values()), torch.float32)
                logits[row].index_add_(0, ids, bias)
            if choice.penalised:
                self._penalise(logits[row], choice)
            if choice.legal is None and (banned := choice.banned):
                logits[row].index_fill_(0, self._tensor(list(banned), torch.int64), _OUT)
        guided = [row for row, choice in enumerate(choices) if choice.legal is not None]
        if guided:
            legal = np.stack([left(words, one.banned) for one in choices if (words := one.legal) is not None])
            logits[guided] = logits[guided].masked_fill_(~self._unpacked(legal), _OUT)

    def _unpacked(self, legal: MaskWords) -> Tensor:
        """bool [rows, vocab] of bits [rows, words]."""
        packed = legal.view(np.uint8)
        if self._device.type == "cpu":
            flags = np.unpackbits(packed, axis=1, count=self._vocab_size, bitorder="little")
            return torch.from_numpy(flags.view(np.bool_))
        on_device = torch.from_numpy(packed).pin_memory().to(self._device, non_blocking=True).unsqueeze(2)
        bits = torch.arange(8, dtype=torch.uint8, device=self._device)
        return (on_device >> bits & 1).flatten(1)[:, : self._vocab_size].bool()

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
        known = choice.state.occurrences
        if known is None:
            seen = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            known = Occurrences(seen, torch.zeros(self._vocab_size, dtype=torch.float32, device=self._device))
            choice.state.occurrences = known
        self._count(known, choice.tokens[known.until :], max(0, choice.prompt_length - known.until))
        if choice.drafts:
            known = Occurrences(known.seen.clone(), known.counts.clone(), known.until)
            self._count(known, choice.drafts, 0)
        return known.seen, known.counts

    def _count(self, known: Occurrences, tokens: Sequence[int], skip: int) -> None:
        """Adds the next `tokens`, the first `skip` of them (prompt) to `seen` alone."""
        if not tokens:
            return
        ids = self._tensor(tokens, torch.int64)
        output = ids[skip:]
        known.seen.index_fill_(0, ids, True)
        known.counts.index_add_(0, output, torch.ones_like(output, dtype=torch.float32))
        known.until += len(tokens)

    def _draw(self, logits: Tensor, choices: Sequence[Choice], nucleus: int) -> tuple[Tensor, Tensor | None]:
        """(sampled ids [rows], rows whose nucleus is wider than `nucleus` or None) from shaped logits [rows, vocab],
        which it overwrites."""
        if self._draws is not None:
            return torch.tensor(self._draws(logits, choices)).clamp_(
                min=0
            ), None  # the caller looks for what is not finite
        temperatures = self._tensor([choice.params.temperature for choice in choices], torch.float32)
        scaled = logits.div_(temperatures.unsqueeze(1))
        streams = self._tensor([noise.stream(choice.params.seed, choice.position) for choice in choices], torch.int64)
        floor, missed = self._floor(scaled, choices, nucleus)
        if floor is None:
            return self._noisiest(scaled, streams), missed
        if self._device.type == "cpu":
            return self._noisiest_left(scaled, floor, streams), missed
        # how many are left is not known to the host, and it need not wait for that
        noisy = scaled + noise.gumbel(streams.unsqueeze(1) + self._steps)
        return torch.where(scaled >= floor, noisy, _OUT).argmax(-1), missed

    def _noisiest(self, scaled: Tensor, streams: Tensor) -> Tensor:
        """The tokens [rows] that win with noise; `scaled` is written over. A CPU takes a few rows at a time, so that
        the tensors behind the noise stay in its cache."""
        rows = len(scaled) if self._device.type != "cpu" else max(1, _AT_ONCE // self._vocab_size)
        found = []
        for first in range(0, len(scaled), rows):
            some = slice(first, first + rows)
            places = streams[some].unsqueeze(1) + self._steps
            found.append(_argmax(scaled[some].add_(noise.gumbel(places))))
        return torch.cat(found)

    def _noisiest_left(self, scaled: Tensor, floor: Tensor, streams: Tensor) -> Tensor:
        """The same among the tokens that are not below the `floor` [rows, 1]; others need no noise."""
        rows, ids = (scaled >= floor).nonzero(as_tuple=True)
        noisy = (scaled[rows, ids] + noise.gumbel(streams[rows] + self._steps[ids])).numpy()
        best, begin = [], 0
        for count in rows.bincount(minlength=len(scaled)).tolist():
            best.append(begin + int(noisy[begin : begin + count].argmax()) if count else 0)
            begin += count
        return ids[best] if len(ids) else torch.zeros(len(scaled), dtype=torch.int64)

    def _floor(self, scaled: Tensor, choices: Sequence[Choice], nucleus: int) -> tuple[Tensor | None, Tensor | None]:
        """([rows, 1] or None, missed): tokens below this value are excluded, so tied tokens stay or go together; None
        when all stay. `missed` is as in `_cut`."""
        min_p = [choice.params.min_p for choice in choices]
        top_k = [self._top_k(choice) for choice in choices]
        top_p = [choice.params.top_p for choice in choices]
        floor, missed = None, None
        if any(min_p):
            floor = scaled.amax(-1, keepdim=True) + self._tensor(min_p, torch.float32).log().unsqueeze(1)
            scaled = scaled.masked_fill(scaled < floor, _OUT)
        if any(top_k) or min(top_p) < 1.0:
            cut, missed = self._cut(scaled, top_k, top_p, nucleus)
            floor = cut if floor is None else torch.maximum(cut, floor)
        return floor, missed

    def _top_k(self, choice: Choice) -> int:
        """top_k, or 0 when it excludes no token."""
        return choice.params.top_k if choice.params.top_k < self._vocab_size else 0

    def _cut(
        self, scaled: Tensor, top_k: Sequence[int], top_p: Sequence[float], nucleus: int
    ) -> tuple[Tensor, Tensor | None]:
        """(the least value that top-k, then top-p of the k (renormalised), leave: [rows, 1], missed).

        Rows without top-k are sorted no further than their best `nucleus` tokens; `missed` says in which rows these
        do not make up top_p (bool [rows, 1]; their cut is meaningless), and is None when every row surely does.
        """
        widest = min(max(count or nucleus for count in top_k), self._vocab_size)
        counts = self._tensor([count or widest for count in top_k], torch.int64).unsqueeze(1)
        everything = self._tensor([count == 0 for count in top_k], torch.bool).unsqueeze(1)
        whole = self._tensor([share >= 1.0 for share in top_p], torch.bool).unsqueeze(1)
        ordered = scaled.topk(widest, dim=-1).values
        last, missed = counts, None
        if min(top_p) < 1.0:
            limit = self._tensor(top_p, torch.float32).unsqueeze(1)
            share = self._shares(scaled, ordered, counts, everything if 0 in top_k else None)
            until = share.cumsum(-1)
            if widest < self._vocab_size and 0 in top_k:
                missed = everything & ~whole & (until[:, -1:] < limit)
            inside = (until - share < limit).sum(-1, keepdim=True).clamp_(min=1).minimum(counts)
            last = torch.where(whole, counts, inside)
        return ordered.gather(1, last - 1).masked_fill_(everything & whole, _OUT), missed

    def _shares(self, scaled: Tensor, ordered: Tensor, counts: Tensor, everything: Tensor | None) -> Tensor:
        """Probabilities of the `ordered` tokens among the first `counts`, or among all where `everything`."""
        beyond = torch.arange(ordered.shape[1], device=self._device) >= counts
        ordered = ordered.masked_fill(beyond, _OUT)
        total = ordered.logsumexp(-1, keepdim=True)
        if everything is not None:
            total = torch.where(everything, scaled.logsumexp(-1, keepdim=True), total)
        return (ordered - total).exp()

    def _describe(
        self, logits: Tensor, tokens: Tensor, choices: Sequence[Choice], rows: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of some rows of raw logits: the token's logprob, the most probable tokens and their logprobs."""
        most = max(choices[row].params.logprobs or 0 for row in rows)
        index = self._tensor(rows, torch.int64)
        logprobs = logits.index_select(0, index).log_softmax(-1)
        own = logprobs.gather(1, tokens.index_select(0, index).unsqueeze(1)).squeeze(1)
        values, ids = logprobs.topk(min(most, self._vocab_size))
        return own, ids, values


def _argmax(logits: Tensor) -> Tensor:
    """The most probable token of each row, the lowest id where several are. On a CPU by numpy: torch's takes twenty
    times as long."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(the most probable tokens [rows], their logits [rows]): a NaN anywhere in a row counts as its largest."""
    tokens = _argmax(logits)
    if logits.device.type != "cpu":
        return tokens, logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    values = logits.numpy()
    return tokens, torch.from_numpy(values[np.arange(len(values)), tokens.numpy()])


def _check_finite(peaks: Sequence[float]) -> None:
    """Raises NotFinite when some row's largest logit is not a finite number and cannot be sampled from."""
    if not all(map(math.isfinite, peaks)):
        raise NotFinite


def on_host(*tensors: Tensor) -> list[Tensor]:
    """The same on the host. Copies from a device are submitted together and waited for once."""
    device = tensors[0].device
    if device.type == "cpu":
        return list(tensors)
    copies = []
    for tensor in tensors:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copies.append(copy.copy_(tensor, non_blocking=True))
    torch.cuda.current_stream(device).synchronize()
    return copies


def _described(token: int, wanted: int, logprob: float, ids: list[int], logprobs: list[float]) -> Chosen:
    pairs = sorted(zip(ids, logprobs, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return Chosen(token, logprob, tuple(pairs[:wanted]))
