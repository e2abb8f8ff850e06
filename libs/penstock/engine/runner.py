"""One forward pass and its samples. Synchronous; a single thread drives it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.checkpoint import Checkpoint
from penstock.engine.batch import BatchBuilder, Run, arrange
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.loading import load_weights
from penstock.engine.pool import KvPool
from penstock.engine.sampler import Choice, Chosen, Sampler

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Runner:
    """A loaded model with its pool of `pages` pages.

    Loading takes as long as reading the weights does. Raises CheckpointError.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: str, device: str, pages: int, block_size: int, max_positions: int
    ) -> None:
        kind, place = _DTYPES[dtype], torch.device(device)
        weights = load_weights(checkpoint, kind, place)
        self.decoder = Decoder(checkpoint.config, weights, max_positions)
        self.pool = KvPool(checkpoint.config, pages, block_size, kind, place)
        self.sampler = Sampler(checkpoint.config.vocab_size, place)
        self._builder = BatchBuilder(self.pool, place, checkpoint.config.windows)

    @torch.inference_mode()
    def step(self, runs: Sequence[Run]) -> list[list[Chosen]]:
        """Computes the runs' KV and samples; per run the tokens that are certain.

        That is none for a run that leaves known tokens for later, else one, plus one for each draft that equals
        the token sampled in its place.
        """
        for run in runs:
            self._clear_tail(run)
        order = arrange(runs)
        batch = self._builder.build(order)
        logits = self.decoder.forward(batch, self.pool)
        rows = [choice for run in order for choice in _choices(run)]
        sampled = self.sampler.sample(logits, rows) if rows else []
        answers: dict[int, list[Chosen]] = {}
        first = 0
        for run in order:
            answers[id(run)] = accepted(run.choice.drafts, sampled[first : first + run.samples])
            first += run.samples
        return [answers[id(run)] for run in runs]

    def _clear_tail(self, run: Run) -> None:
        """The last page of a run that begins it and will not fill it: attention masks the rest, but a masked NaN is
        still a NaN, and the page may leave as a sequence's tail."""
        begun, filled = divmod(run.end, self.pool.block_size)
        if filled and begun * self.pool.block_size >= run.start:
            self.pool.clear(run.pages[begun])


def _choices(run: Run) -> list[Choice]:
    """One choice for each sampled row: after the known tokens, after the first draft, after the second..."""
    choice = run.choice
    if run.samples <= 1:
        return [choice] * run.samples
    return [
        Choice(
            choice.params,
            choice.stops,
            choice.tokens,
            choice.prompt_length,
            choice.drafts[:count],
            choice.memory,
        )
        for count in range(run.samples)
    ]


def accepted(drafts: Sequence[int], sampled: Sequence[Chosen]) -> list[Chosen]:
    """The samples up to and including the first that differs from its draft.

    Every sample is the target's own for its place, with that place's noise, so keeping those that rest on right
    guesses gives exactly the tokens that plain decoding gives.
    """
    kept: list[Chosen] = []
    for number, chosen in enumerate(sampled):
        kept.append(chosen)
        if number < len(drafts) and drafts[number] != chosen.token:
            break
    return kept
