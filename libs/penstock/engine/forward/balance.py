"""How the layers of a model are divided among stages: so that all take as long, by what one of each kind is measured to
take here, and what else the first and the last have to do. On CUDA devices it is not measured.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.checkpoint import (
    EMBEDDING,
    HEAD,
    AdapterCheckpoint,
    Checkpoint,
    Rank,
    layer_of,
    part_of,
    remembered_fingerprint,
)
from penstock.engine.config import EngineConfig
from penstock.engine.forward.runner import CACHE, Runner
from penstock.engine.kernels.cpu.forms import processor
from penstock.engine.kernels.cpu.meeting import SharedGroup
from penstock.engine.models.packed import SMALL_BYTES
from penstock.engine.pictures.shown import ShownRows
from penstock.engine.ranks.messages import PlainRows
from penstock.engine.ranks.place import RankStep
from penstock.engine.ranks.window import PageWindow
from penstock.engine.request import SamplingParams
from penstock.engine.sampling.choice import Choice
from penstock.engine.step.batch import Rows
from penstock.engine.step.memory import PageMemory
from penstock.runtime.caches import cache_directory
from penstock.runtime.notes import read_note, write_note
from penstock.runtime.private import locked

_ROWS, _CONTEXT = 8, 256
"""What is measured: a step of so many streams, with so many tokens each."""
_TIMES = 5
_log = logging.getLogger(__name__)


def stage_layers(checkpoint: Checkpoint, config: EngineConfig) -> list[range]:
    """The layers of each of the `pp` stages. Raises CheckpointError."""
    count = checkpoint.config.n_layers
    if config.pp == 1:
        return [range(count)]
    if config.device != "cpu":
        return _by_numbers(checkpoint, config)
    if sum(file.stat().st_size for file in checkpoint.weight_files) < SMALL_BYTES:
        return _chosen(checkpoint, config)
    with suppress(OSError):
        note = cache_directory("stages") / _subject(checkpoint, config)
        with locked(note.parent):
            ends = read_note(note)
            if not ends:
                ends = ",".join(str(own.stop) for own in _chosen(checkpoint, config))
                write_note(note, ends)
        return [range(*bounds) for bounds in pairwise([0, *map(int, ends.split(","))])]
    return _chosen(checkpoint, config)


def _by_numbers(checkpoint: Checkpoint, config: EngineConfig) -> list[range]:
    """So that no device has more weights than need be: they take its memory, and most of the time of a step goes into
    reading them. Each rank of the first stage has all of the embedding."""
    sizes = [0] * checkpoint.config.n_layers
    for name, info in checkpoint.tensors.items():
        if (layer := layer_of(name)) is not None:
            sizes[layer] += math.prod(info.shape)
    embedding, head = (
        math.prod(checkpoint.tensors[name].shape) for name in (EMBEDDING, EMBEDDING if checkpoint.config.tied else HEAD)
    )
    return divided(sizes, config.pp, embedding * config.tp, head)


def _subject(checkpoint: Checkpoint, config: EngineConfig) -> str:
    """Names all that the division depends on. Workers of a host divide a model alike, so that they share the memory of
    its packed weights."""
    form = (config.dtype, config.kv, config.weights, config.kernels, config.block_size)
    split = (config.tp, config.pp, config.ep, config.threads)
    return hashlib.sha256(repr((remembered_fingerprint(checkpoint), form, split, processor())).encode()).hexdigest()


def _chosen(checkpoint: Checkpoint, config: EngineConfig) -> list[range]:
    costs = _measured(checkpoint, config)
    gc.collect()  # the probes, each of which its runner knows
    stages = divided(costs.layers, config.pp, costs.before, costs.behind)
    took = [sum(costs.layers[own.start : own.stop]) for own in stages]
    took[0] += costs.before
    took[-1] += costs.behind
    each = ", ".join(f"{own.start} to {own.stop - 1} ({s * 1e3:.2f} ms)" for own, s in zip(stages, took, strict=True))
    _log.info("layers of the stages, and what a step of %d streams should take in each: %s", _ROWS, each)
    return stages


def divided(layers: Sequence[float], stages: int, before: float, behind: float) -> list[range]:
    """Divides layers that take so long, at least one to each stage, so that the slowest stage is as fast as it can be.
    The first stage takes `before` longer, the last one `behind`."""
    ends = [0.0, *accumulate(layers)]
    count = len(layers)
    slowest = [[float("inf")] * (count + 1) for _ in range(stages + 1)]
    begins = [[0] * (count + 1) for _ in range(stages + 1)]
    slowest[0][0] = 0.0
    for stage in range(1, stages + 1):
        more = (before if stage == 1 else 0.0) + (behind if stage == stages else 0.0)
        for end in range(stage, count + 1):
            for begin in range(stage - 1, end):
                found = max(slowest[stage - 1][begin], ends[end] - ends[begin] + more)
                if found < slowest[stage][end]:
                    slowest[stage][end], begins[stage][end] = found, begin
    found_ranges, end = [], count
    for stage in range(stages, 0, -1):
        begin = begins[stage][end]
        found_ranges.append(range(begin, end))
        end = begin
    return found_ranges[::-1]


@dataclass(frozen=True, slots=True)
class _Costs:
    """Seconds in a step."""

    layers: Sequence[float]
    before: float
    """Of the first stage, beside its layers: embeddings, and samples."""
    behind: float
    """Of the last one: the last matrix."""


def _measured(checkpoint: Checkpoint, config: EngineConfig) -> _Costs:
    """Loads one layer of each kind, and the last one."""
    model = checkpoint.config
    kinds = [model.experts is not None and model.experts.layers[number] for number in range(model.n_layers)]
    probes = {kind: _Probe(checkpoint, config, kinds.index(kind)) for kind in set(kinds)}
    seconds = {kind: probe.seconds(embeds=False) for kind, probe in probes.items()}
    first = probes[kinds[0]]
    before = max(0.0, first.seconds(embeds=True) - seconds[kinds[0]]) + first.sampling_s()
    last = _Probe(checkpoint, config, model.n_layers - 1)
    behind = max(0.0, last.seconds(embeds=False) - seconds[kinds[-1]])
    return _Costs([seconds[kind] for kind in kinds], before, behind)


class _Probe:
    """One layer of a model, and the last matrix if it is the last: the place of a process that has no others."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, number: int) -> None:
        model = checkpoint.config
        self.vocab_size = model.vocab_size
        self.stages, self.alone, self.leads = 1, True, False
        self.shared: SharedGroup | None = None
        self.counted: npt.NDArray[np.int64] | None = None
        self.taps: tuple[int, ...] = ()
        pages = -(-(_CONTEXT + 1) // config.block_size)
        self.memory = PageMemory(model, _ROWS * pages, config.block_size, CACHE[config.kv], torch.device("cpu"))
        self.window = PageWindow(self.memory, range(model.kv.heads))
        self._states: Tensor | None = None
        own = Rank(0, 1, layers=range(number, number + 1))
        part = part_of(checkpoint, own, "")
        self._runner = Runner(part, replace(config, tp=1, ep=1, pp=1, redundant_experts=0, packed_bytes=0), self)
        at = min(_CONTEXT, config.context(model.max_positions) - 1)
        self._runs = [
            PlainRows([row], at, 1, ("", row), range(1 + row * pages, 1 + (row + 1) * pages), None)
            for row in range(_ROWS)
        ]
        self._given = torch.randn(_ROWS, model.hidden_size, generator=torch.Generator().manual_seed(1))

    def seconds(self, *, embeds: bool) -> float:
        """Of a step of the layer; `embeds`: from tokens on, else from what a layer before has made of them."""
        self._states = None if embeds else self._given

        def work() -> None:
            self._runner.computed(self._runs)

        with torch.inference_mode():
            return _quickest(work)

    def sampling_s(self) -> float:
        """Seconds to choose the tokens of a step."""
        logits = torch.randn(_ROWS, self.vocab_size, generator=torch.Generator().manual_seed(1))
        params = SamplingParams(max_tokens=1, temperature=0.0)
        rows = [Choice(params, frozenset(), [0], 1) for _ in range(_ROWS)]
        with torch.inference_mode():
            return _quickest(lambda: self._runner.sampler.sample(logits.clone(), rows))

    # The place of a process

    def add(self, own: Tensor) -> Tensor:
        """There is nobody else."""
        return own

    def pages_at(self, place: torch.device) -> PageMemory:
        """Those that it has."""
        return self.memory

    def adapter(self, found: AdapterCheckpoint) -> AdapterCheckpoint:
        """It has none."""
        return found

    def forget_adapter(self, fingerprint: str) -> None:
        """It has none."""

    @contextmanager
    def step(self, order: Sequence[Rows], compiled: bool, shown: ShownRows | None) -> Iterator[RankStep]:
        """Alone."""
        yield RankStep(self._states, lambda own: own)


def _quickest(work: Callable[[], object]) -> float:
    """Seconds, of several times."""
    took = []
    for _ in range(1 + _TIMES):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return min(took)
