"""Decode steps as CUDA graphs, which turn hundreds of launches into one.

A step is captured when its shape is first used: it runs once without a graph, which also compiles what has to be
compiled, and is then captured. From then on it is replayed: one copy brings the input from pinned memory to the device,
and the logits always appear at the same place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.checkpoint import ModelConfig
from penstock.engine.kernels.cuda.paged import Attend, Paged, PagedAttention
from penstock.engine.kernels.cuda.plan import StepInput, StepShape, buckets, shape_of
from penstock.engine.step.batch import Batch, Leading
from penstock.engine.step.features import Features
from penstock.engine.step.memory import PageMemory
from penstock.engine.step.run import Run

_log = logging.getLogger(__name__)


class Forward(Protocol):
    """A model that computes a step."""

    config: ModelConfig

    @property
    def waits(self) -> bool:
        """Whether the host waits for the device in the middle of a step."""
        ...

    def forward(
        self, batch: Batch, memory: PageMemory, features: Features | None = None, states: Tensor | None = None
    ) -> Tensor:
        """float32 [samples, vocab]; leaves the rows' keys and values in the page memory, and fills `features`. Of some
        of the model's layers as Decoder says."""
        ...


class Capture(Protocol):
    """Turns a body, whose tensors must keep their places, into something that can be repeated."""

    def __call__(self, body: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Returns the replay of the body, which has run before and is not computed now. Raises when it can't be
        captured."""
        ...


class CudaCapture:
    """Captures as CUDA graphs, which share their memory: replaying one overwrites the results of the others."""

    def __init__(self) -> None:
        self._handle = torch.cuda.graph_pool_handle()

    def __call__(self, body: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Captures the body, which has run before, and returns its replay. Raises when it can't be captured."""
        graph = torch.cuda.CUDAGraph()
        # Other threads copy pages meanwhile; a capture of the whole process would forbid that.
        with torch.cuda.graph(graph, pool=self._handle, capture_error_mode="thread_local"):
            result = body()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class GraphSteps:
    """The captured steps of one model over one page memory, whose last page is the scratch page."""

    def __init__(
        self,
        decoder: Forward,
        memory: PageMemory,
        attention: PagedAttention,
        *,
        most_sequences: int,
        max_positions: int,
        capture: Capture,
    ) -> None:
        self._decoder = decoder
        self._memory = memory
        self._attention = attention
        self._sizes = buckets(most_sequences)
        self._width = -(-max_positions // memory.block_size)
        self._capture = capture
        self._steps: dict[StepShape, _Captured] = {}
        self.possible = attention.graph_rows > 0 and not decoder.waits
        """Whether steps can be captured."""

    def logits(self, runs: Sequence[Run]) -> Tensor | None:
        """float32 [samples, vocab], valid until the next call; None when this step can't be captured."""
        shape = shape_of(runs, self._sizes, self._attention.graph_rows) if self.possible else None
        if shape is None:
            return None
        step = self._steps.get(shape)
        if step is None:
            step = self._steps[shape] = _Captured(self._decoder, self._memory, self._attention, shape, self._width)
            return step.first(runs, self._capture)
        return step.logits(runs)


class _Captured:
    """One step: its input on the host and on the device, and how to repeat it."""

    def __init__(
        self, decoder: Forward, memory: PageMemory, attention: PagedAttention, shape: StepShape, width: int
    ) -> None:
        self._decoder = decoder
        self._memory = memory
        self._attention = attention
        device, size = memory.data.device, StepInput.size(shape, width)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        page_vectors = memory.n_layers * memory.planes * memory.block_size
        scratch = memory.data.shape[0] - 1
        self._input = StepInput(
            self._host.numpy(), shape, width, block_size=memory.block_size, page_vectors=page_vectors, scratch=scratch
        )
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        rows = shape.sequences * shape.rows
        parts = torch.split(self._device, [rows, rows, rows, shape.sequences, shape.sequences * width])
        self._ids, self._positions, self._places, ends, tables = parts
        starts = torch.from_numpy(self._input.host.starts).to(device)
        self._paged = Paged(
            starts, ends, tables.view(shape.sequences, width), rows, shape.rows, width * memory.block_size
        )
        kinds = torch.arange(memory.planes * memory.n_layers, device=device).view(memory.n_layers, memory.planes, 1)
        self._offsets = kinds * memory.block_size
        self._attend: Attend | None = None
        self._repeat: Callable[[], Tensor] = self._body

    def first(self, runs: Sequence[Run], capture: Capture) -> Tensor:
        """Computes the step without a graph, then captures it."""
        self._bring(runs)
        logits = self._body().clone()
        try:
            self._repeat = capture(self._body)
        except Exception:  # a driver or a library refuses; the result is right all the same
            _log.warning(
                "a step of shape %s can't be captured and runs without a graph", self._input.shape, exc_info=True
            )
        return logits[: self._real(runs)]

    def logits(self, runs: Sequence[Run]) -> Tensor:
        """Repeats the step with other input."""
        self._bring(runs)
        return self._repeat()[: self._real(runs)]

    def _real(self, runs: Sequence[Run]) -> int:
        return len(runs) * self._input.shape.rows

    def _bring(self, runs: Sequence[Run]) -> None:
        """Copies the input to the device. The host's copy is free: whoever read the last logits has waited for that
        step."""
        self._input.fill(runs)
        self._device.copy_(self._host, non_blocking=True)
        if self._attend is None:
            self._attend = self._attention.begin(self._paged, self._input.host, True)
        else:
            self._attend.again(self._input.host)

    def _body(self) -> Tensor:
        assert self._attend is not None, "a step is filled before it runs"
        batch = Batch(
            ids=self._ids.long(),
            positions=self._positions.long(),
            places=self._places.long() + self._offsets,
            groups=[],
            sampled=None,
            n_sampled=self._paged.rows,
            last_groups=[],
            leading=Leading(self._paged.rows, self._attend),
        )
        return self._decoder.forward(batch, self._memory)
