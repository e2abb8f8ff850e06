"""Pages of one rank in memory of its own, such as that of a CUDA device, beside those that all ranks map.

The shared pages stay the truth: with them the worker finds, sends, lends and checks blocks, as if it computed all of
the model in host memory. A rank computes in a copy that has its layers and heads alone. Before a step it brings there
what rank 0 has written to pages outside of steps, see PageChanges; after the step, before it answers, it takes back
what its layers keep of the step's tokens. So a rank needs device memory for its part, and the host for the whole.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.checkpoint import Checkpoint
from penstock.checkpoint.split import heads_of_rank
from penstock.engine.step.batch import Rows
from penstock.engine.step.memory import PageMemory
from penstock.engine.step.places import token_places

_PORTION = 16 << 20
"""Bytes that are copied at a time, about."""
_log = logging.getLogger(__name__)


class PagesApart:
    """The part of shared pages that one rank has; for the thread that computes its steps."""

    def __init__(self, shared: PageMemory, part: Checkpoint, place: torch.device) -> None:
        """`part` is what the rank has of the model; its pages are at `place`, and zeros at first as the shared ones
        are."""
        assert part.part is not None and not shared.scaled
        rank, every = part.part.rank, shared.heads[0]
        layers, heads = part.layers, heads_of_rank(every, rank.ranks, rank.number)
        pages, dtype = len(shared.data) - 1, shared.data.dtype
        self.own = PageMemory(part.config, pages, shared.block_size, dtype, place, layers=layers)
        """What the rank computes in."""
        _log.info("a rank's part of the pages: %.0f MiB on %s", self.own.data.nbytes / 2**20, place)
        self._shared = _rows(shared.data)[:, layers.start : layers.stop, :, :, heads.start : heads.stop]
        self._place, self._pinned = place, place.type == "cuda"
        self._alone = rank.number == 0 or heads != heads_of_rank(every, rank.ranks, rank.number - 1)
        """Whether no rank before it has the same heads, and takes the same numbers back."""
        page = self.own.block_bytes
        self._pages = max(1, _PORTION // page)
        self._tokens = max(1, _PORTION * shared.block_size // page)

    def bring(self, written: Sequence[int], cleared: Sequence[int]) -> None:
        """Makes pages what rank 0 has written to them, or zeros."""
        if cleared:
            self.own.data.index_fill_(0, torch.tensor(cleared, device=self._place), 0)
        for first in range(0, len(written), self._pages):
            some = written[first : first + self._pages]
            staged = self._staged(len(some), *self.own.data.shape[1:])
            for there, page in zip(_rows(staged), some, strict=True):
                there[:] = self._shared[page]
            index = torch.tensor(some, device=self._place)
            self.own.data.index_copy_(0, index, staged.to(self._place, non_blocking=True))

    def take_back(self, order: Sequence[Rows]) -> None:
        """Writes to the shared pages what a step has kept of its tokens. Returns when they are there."""
        if not self._alone:
            return
        runs = ((run.pages, run.start, run.tokens) for run in order)
        every = token_places(runs, self.own.block_size)
        for first in range(0, len(every[0]), self._tokens):
            pages, offsets = (one[first : first + self._tokens] for one in every)
            page_index, offset_index = (torch.from_numpy(one).to(self._place) for one in (pages, offsets))
            found = self.own.data[page_index, :, :, offset_index]
            self._shared[pages, :, :, offsets] = _rows(self._staged(*found.shape).copy_(found))

    def _staged(self, *shape: int) -> Tensor:
        """Host memory from which and to which a device copies. While a copy of it is on its way, torch gives it to
        nobody else."""
        return torch.empty(shape, dtype=self.own.data.dtype, pin_memory=self._pinned)


def _rows(host: Tensor) -> NDArray[np.void]:
    """[..., width] of host memory as an array of rows, [...]: numpy copies few of them in less time than torch."""
    plain: NDArray[np.uint8] = host.view(torch.uint8).numpy()
    return plain.view(f"V{plain.shape[-1]}")[..., 0]
