"""One forward pass and its samples. Synchronous; a single thread drives it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.checkpoint import Checkpoint
from penstock.engine.forward.batch import BatchBuilder, Run, arrange
from penstock.engine.forward.memory import PageMemory
from penstock.engine.kernels.cpu.build import NotBuilt
from penstock.engine.kernels.cpu.decoder import CompiledDecoder
from penstock.engine.kernels.cpu.machine import Machine
from penstock.engine.kernels.cpu.matrix import PackedMatrix
from penstock.engine.kernels.rounding import dequantised
from penstock.engine.layers.embedding import StoredTable
from penstock.engine.layers.linear import Matrix
from penstock.engine.layers.stacks import Stack, as_it_is
from penstock.engine.layers.weights import Weights
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.loading import EMBEDDING, load_weights
from penstock.engine.models.packed import CACHE_BYTES, SMALL_BYTES, PackedWeights, packed_weights
from penstock.engine.sampling.sampler import Choice, Chosen, Sampler

_WEIGHTS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.bfloat16,
    "float8": torch.bfloat16,
}
"""As loaded; 8 bits are rounded from there. Also what KV is kept in by default, and what a CUDA device computes in."""
_CACHE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
_BYTES_PER_THREAD = 16 << 20
"""Weights for which one more thread is worth meeting it five times per layer, also when others want its core."""
_log = logging.getLogger(__name__)


class Runner:
    """A loaded model with its pool of `pages` pages.

    Loading takes as long as reading the weights does. Raises CheckpointError.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str,
        device: str,
        pages: int,
        block_size: int,
        max_positions: int,
        kernels: bool = True,
        cache_bytes: int = CACHE_BYTES,
        max_running: int = 64,
        lossless: bool = False,
        kv_dtype: str | None = None,
        threads: int | None = None,
    ) -> None:
        """`kernels`: whether a CPU uses the C++ kernels, where there is a compiler and the model suits them, and a CUDA
        device paged attention and captured steps, of up to `max_running` sequences.
        `cache_bytes`: how much packed weights of this and other models may take on disk; 0: none is kept.
        `lossless`: keep the bfloat16 weights for the kernels in 12 bits.
        `kv_dtype`, `threads`: see EngineConfig.

        Raises ValueError when the device can't compute in this dtype.
        """
        config, place = checkpoint.config, torch.device(device)
        cache = _CACHE[kv_dtype] if kv_dtype else _WEIGHTS[dtype]
        machine = _machine(checkpoint, place, threads) if kernels else None
        compute = _WEIGHTS[dtype] if _computes_as_kept(dtype, place, machine) else torch.float32
        attention, self.packed = None, None
        if place.type == "cuda":
            from penstock.engine.kernels.cuda import setup as cuda

            cuda.check(dtype, place)
            with cuda.uploading(checkpoint, place) as upload:
                self.memory = PageMemory(config, pages, block_size, cache, place, memory=cuda.memory_on(place))
                attention = cuda.attention_for(config, self.memory) if kernels else None
                keep = cuda.keep_for(dtype, place)
                weights = load_weights(checkpoint, _WEIGHTS[dtype], place, keep=keep, source=upload.take)
        else:
            weights, self.packed = _load(checkpoint, dtype, place, machine, cache_bytes, lossless)
            self.memory = PageMemory(config, pages, block_size, cache, place)
        self.decoder = Decoder(config, weights, max_positions, compute)
        self.sampler = Sampler(config.vocab_size, place)
        self._builder = BatchBuilder(self.memory, place, config.windows, compute)
        self._compiled = self._device = None
        if machine is not None and CompiledDecoder.fits(config):
            self._compiled = CompiledDecoder(machine, config, weights, self.decoder.tables[0], self.memory)
        if place.type == "cuda" and kernels:
            from penstock.engine.kernels.cuda import setup as cuda

            own = (self.decoder, self.memory, self._builder, attention)
            self._device = cuda.steps_for(*own, most_sequences=max_running, max_positions=max_positions)

    @torch.inference_mode()
    def step(self, runs: Sequence[Run]) -> list[list[Chosen]]:
        """Computes the runs' KV and samples; per run the tokens that are certain.

        That is none for a run that leaves known tokens for later, else one, plus one for each draft that equals
        the token sampled in its place.
        """
        for run in runs:
            self._clear_tail(run)
        takes = self._takes(runs)
        order = runs if takes else arrange(runs)
        if self._compiled is not None and takes and all(run.choice.plain for run in runs):
            sampled = [Chosen(token) for token in self._compiled.best(order)]
        else:
            logits = self.logits(order)
            rows = [choice for run in order for choice in _choices(run)]
            self.memory.computed(wait=not rows)  # a step is over when it is computed, with or without samples
            sampled = self.sampler.sample(logits, rows) if rows else []
        answers: dict[int, list[Chosen]] = {}
        first = 0
        for run in order:
            own = sampled[first : first + run.samples]
            answers[id(run)] = accepted(run.choice.drafts, own) if len(own) > 1 else own
            first += run.samples
        return [answers[id(run)] for run in runs]

    def logits(self, order: Sequence[Run]) -> Tensor:
        """float32 [samples, vocab] of runs, which the kernels take in any order and others in that of `arrange`; leaves
        their keys and values in the pool."""
        if self._compiled is not None and self._takes(order):
            return self._compiled.forward(order)
        if self._device is not None:
            return self._device.logits(order)
        return self.decoder.forward(self._builder.build(order), self.memory)

    def _takes(self, runs: Sequence[Run]) -> bool:
        return self._compiled is not None and self._compiled.takes(sum(run.tokens for run in runs))

    def _clear_tail(self, run: Run) -> None:
        """The last page of a run that begins it and will not fill it: attention masks the rest, but a masked NaN is
        still a NaN, and the page may leave as a sequence's tail."""
        size = self.memory.block_size
        filled = run.end % size
        if filled and run.end - filled >= run.start:
            self.memory.clear(run.pages[run.end // size])


def _machine(checkpoint: Checkpoint, place: torch.device, threads: int | None) -> Machine | None:
    if place.type != "cpu" or checkpoint.config.experts is not None:
        return None
    size = sum(file.stat().st_size for file in checkpoint.weight_files)
    try:
        return Machine(threads or max(1, min(torch.get_num_threads(), size // _BYTES_PER_THREAD)))
    except NotBuilt as reason:
        _log.warning("no C++ kernels, torch computes everything: %s", reason)
        return None


def _load(
    checkpoint: Checkpoint, dtype: str, place: torch.device, machine: Machine | None, cache_bytes: int, lossless: bool
) -> tuple[Weights, PackedWeights | None]:
    """The weights, and how they were packed, where they are."""
    loaded = _WEIGHTS[dtype]
    if machine is None:
        return load_weights(checkpoint, loaded, place, keep=_rounded if dtype == "int8" else as_it_is), None
    kind = "lossless" if lossless else dtype
    packed = packed_weights(checkpoint, kind, loaded, torch.get_num_threads(), cache_bytes)
    _log.info("weights: %s", packed)

    def keep(stack: Stack, _: object, bias: Tensor | None) -> tuple[Matrix, None]:
        return PackedMatrix.of(machine, packed.matrices[stack.name], bias, stack.columns), None

    table = StoredTable(checkpoint.tensors[EMBEDDING]) if packed.nbytes >= SMALL_BYTES else None
    return load_weights(checkpoint, loaded, place, keep=keep, table=table), packed


def _rounded(_: Stack, matrix: Callable[[], Tensor], bias: Tensor | None) -> tuple[Matrix, Tensor | None]:
    """To what int8 can say."""
    return dequantised(matrix()), None if bias is None else bias.float()


def _computes_as_kept(dtype: str, place: torch.device, machine: Machine | None) -> bool:
    """Whether activations have the weights' type; a CPU's own kernels, and int8 there, compute in float32."""
    return place.type == "cuda" or (machine is None and dtype != "int8")


def _choices(run: Run) -> list[Choice]:
    """One choice for each sampled row: after the known tokens, after the first draft, after the second..."""
    choice = run.choice
    if run.samples <= 1 or choice.plain:
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
