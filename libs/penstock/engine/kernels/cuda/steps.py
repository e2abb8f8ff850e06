"""Computes steps on a device: captured where that is possible, with paged attention where a backend takes the rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from torch import Tensor

from penstock.engine.kernels.cuda import streams
from penstock.engine.kernels.cuda.graphs import Capture, Forward, GraphSteps
from penstock.engine.kernels.cuda.paged import PagedAttention, host_paged, on_device
from penstock.engine.pictures.shown import ShownRows
from penstock.engine.step.batch import Batch, BatchBuilder, Leading, Rows, turned_apart
from penstock.engine.step.features import Features
from penstock.engine.step.memory import PageMemory
from penstock.engine.step.run import Run


class DeviceSteps:
    """Computes the steps of one model, or of a part of one, over one page memory. Where steps are captured, its last
    page is a scratch page."""

    def __init__(
        self,
        decoder: Forward,
        memory: PageMemory,
        builder: BatchBuilder,
        attention: PagedAttention | None,
        *,
        capture: Capture | None,
        most_sequences: int,
        max_positions: int,
    ) -> None:
        """Without `attention` torch gathers pages; without `capture` no step is captured."""
        self._decoder = decoder
        self._memory = memory
        self._builder = builder
        self._attention = attention
        self._graphs: GraphSteps | None = None
        if attention is not None and capture is not None:
            self._graphs = GraphSteps(
                decoder,
                memory,
                attention,
                most_sequences=most_sequences,
                max_positions=max_positions,
                capture=capture,
            )

    def logits(self, order: Sequence[Run], features: Features | None = None) -> Tensor:
        """float32 [samples, vocab] of runs in the order of `arrange`, valid until the next call; leaves their keys and
        values in the page memory. A step with features, adapters or rows that are not turned by their positions is not
        captured."""
        with streams.current(self._memory.data.device):
            whole = features is None and not (turned_apart(order) or any(run.adapter for run in order))
            if self._graphs is not None and whole:
                logits = self._graphs.logits(order)
                if logits is not None:
                    return logits
        return self.piece(order, features=features)

    def piece(
        self,
        order: Sequence[Rows],
        shown: ShownRows | None = None,
        features: Features | None = None,
        states: Tensor | None = None,
    ) -> Tensor:
        """What the layers that are here make of rows, see Decoder; with `shown` in the place of tokens' embeddings. Not
        captured."""
        with streams.current(self._memory.data.device):
            batch = self._build(order)
            batch.shown = shown
            return self._decoder.forward(batch, self._memory, features, states)

    def _build(self, order: Sequence[Rows]) -> Batch:
        short = self._short(order)
        batch = self._builder.build(order, len(short))
        if short:
            batch.leading = self._leading(short, [run.tokens for run in short])
            batch.last_leading = batch.leading
            if batch.sampled is not None:
                batch.last_leading = self._leading(short, [run.samples for run in short])
        return batch

    def _short(self, order: Sequence[Rows]) -> Sequence[Rows]:
        """The first runs, as far as the backend takes them: runs are ordered by their rows, but for those of which a
        piece has only a part."""
        if self._attention is None:
            return []
        most = self._attention.most_rows
        return [*takewhile(lambda run: most is None or run.tokens <= most, order)]

    def _leading(self, runs: Sequence[Rows], rows: Sequence[int]) -> Leading | None:
        """The attention of the last `rows[i]` rows of each run; runs with no rows are left out."""
        assert self._attention is not None
        some = [(run, count) for run, count in zip(runs, rows, strict=True) if count]
        if not some:
            return None
        tables = [run.pages[: -(-run.end // self._memory.block_size)] for run, _ in some]
        counts = [count for _, count in some]
        host = host_paged([run.end for run, _ in some], counts, tables, max(map(len, tables)))
        paged = on_device(host, self._memory.data.device)
        return Leading(paged.rows, self._attention.begin(paged, host, False))
