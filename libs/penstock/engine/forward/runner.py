"""One forward pass and its samples. Synchronous; one thread drives it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.checkpoint import EMBEDDING, AdapterCheckpoint, Checkpoint, CheckpointError
from penstock.engine.adapters.loading import load_adapter
from penstock.engine.checks import settled
from penstock.engine.config import EngineConfig
from penstock.engine.errors import EngineError
from penstock.engine.forward.accepting import accepted
from penstock.engine.forward.masking import Masking, RunMasks
from penstock.engine.forward.redundancy import imbalance
from penstock.engine.kernels.cpu.build import NotBuilt
from penstock.engine.kernels.cpu.decoder import CompiledDecoder
from penstock.engine.kernels.cpu.draws import native_draws
from penstock.engine.kernels.cpu.forms import quicker_form
from penstock.engine.kernels.cpu.machine import Machine
from penstock.engine.kernels.cpu.matrix import PackedMatrix
from penstock.engine.kernels.cpu.meeting import SharedGroup
from penstock.engine.kernels.cpu.shapes import misfit
from penstock.engine.kernels.rounding import degrouped, dequantised, grouped, keeps_groups, kind_of
from penstock.engine.layers.adapters import AdapterWeights
from penstock.engine.layers.embedding import Embedding, StoredTable
from penstock.engine.layers.linear import Matrix
from penstock.engine.layers.stacks import Keep, Stack, as_it_is
from penstock.engine.layers.stored import numbers, read_tensor
from penstock.engine.layers.weights import Weights
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.loading import load_weights
from penstock.engine.models.packed import SMALL_BYTES, PackedWeights, packed_weights
from penstock.engine.pictures.shown import ShownRows, ShownTiles
from penstock.engine.pictures.tower import tower_of
from penstock.engine.ranks.lead import ComputesPieces, Passed
from penstock.engine.ranks.place import RankStep
from penstock.engine.ranks.stages import taps_of
from penstock.engine.sampling.choice import Choice, Chosen
from penstock.engine.sampling.sampler import Sampler
from penstock.engine.step.batch import BatchBuilder, Rows, arrange
from penstock.engine.step.features import Features, featured_rows
from penstock.engine.step.memory import KvMemory, PageMemory
from penstock.engine.step.run import Run
from penstock.runtime.config import ConfigError

_WEIGHTS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.bfloat16,
    "int4": torch.bfloat16,
    "float8": torch.bfloat16,
}
"""The type in which weights are loaded (fewer bits are rounded from it), and in which a CUDA device computes."""
CACHE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
_ROUNDED = ("int8", "int4")
"""Fewer bits are kept by the kernels alone, see `_kept_by_torch`."""
_BYTES_PER_THREAD = 16 << 20
"""Weight bytes that justify one more thread, which costs five barriers per layer."""
_CPU = torch.device("cpu")
_log = logging.getLogger(__name__)


class StepsOnDevice(Protocol):
    """Steps of a CUDA device, see kernels/cuda/steps.py."""

    def logits(self, order: Sequence[Run], features: Features | None = None) -> Tensor:
        """float32 [samples, vocab] of runs in the order of `arrange`; fills `features`."""
        ...

    def piece(
        self,
        order: Sequence[Rows],
        shown: ShownRows | None = None,
        features: Features | None = None,
        states: Tensor | None = None,
    ) -> Tensor:
        """What the layers that are here make of rows, see Decoder; with `shown` in the place of tokens' embeddings."""
        ...


class HeadWindow(KvMemory, Protocol):
    """Some KV heads of a memory."""

    first_head: int


class RankPlace(Protocol):
    """The place of a process among several that have a part of the model each."""

    vocab_size: int
    """Of the whole model."""
    memory: PageMemory
    """The pages, with all heads and layers."""
    stages: int
    """Among which the layers are divided."""

    shared: SharedGroup | None
    """Where processes add what they compute, in one call of the kernels; None: they can't."""
    alone: bool
    """This process has all of each of its layers."""
    leads: bool
    """This is rank 0, which alone computes what takes the place of tokens' embeddings."""
    counted: npt.NDArray[np.int64] | None
    """[layers of the model, experts]: where this process and those of other stages count rows of experts; None: it
    counts for itself."""

    taps: tuple[int, ...]
    """Where there are several stages, after how many layers this process and others keep states of rows; empty: it
    keeps none."""

    @property
    def window(self) -> HeadWindow:
        """The heads of this process in them."""
        ...

    def pages_at(self, place: torch.device) -> PageMemory:
        """Takes memory there for this process's layers and heads of the pages. Its steps compute in them from now on;
        around each, what others have to see is copied."""
        ...

    def add(self, own: Tensor) -> Tensor:
        """The sum over all processes."""
        ...

    def adapter(self, found: AdapterCheckpoint) -> AdapterCheckpoint:
        """What this process has of an adapter; on rank 0, when all others have loaded their parts. Callable from any
        thread. Raises CheckpointError."""
        ...

    def forget_adapter(self, fingerprint: str) -> None:
        """The other processes need keep their parts of an adapter no more. Callable from any thread."""
        ...

    def step(self, order: Sequence[Rows], compiled: bool, shown: ShownRows | None) -> AbstractContextManager[RankStep]:
        """For the length of a step, which all processes compute at the same time; or those of a stage, but for the
        first. `shown` is what rank 0 has computed for it."""
        ...


@runtime_checkable
class FirstStage(RankPlace, Protocol):
    """The place of rank 0 where there are more stages than one; see Lead."""

    def launch(self, order: Sequence[Rows], first: ComputesPieces) -> Passed:
        """Has a step computed by all stages, and returns when this one has."""
        ...

    def logits(self, passed: Passed, features: Features | None) -> Tensor:
        """Of a step, when the last stage has computed it; fills `features`."""
        ...


@dataclass(slots=True)
class BegunStep:
    """A step that may be computed already, in part."""

    runs: Sequence[Run]
    order: Sequence[Run]
    takes: bool
    """The kernels compute it in one call."""
    masks: RunMasks | None
    passed: Passed | None
    """It is on its way through the stages; None: it will be computed when it is finished."""


class Runner:
    """A loaded model with its memory of pages. Loading takes as long as reading the weights does."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, place: RankPlace | None = None) -> None:
        """`place` is that of this process among several that have a part of the model each; `checkpoint` is then its
        part. Raises CheckpointError, and ConfigError when this engine cannot compute the model with these settings."""
        config = settled(config, checkpoint)
        self.ranks = place
        """The place of this process among several; None: it computes the model alone."""
        self._first = place if isinstance(place, FirstStage) and place.stages > 1 else None
        self._vocab_size = checkpoint.config.vocab_size if place is None else place.vocab_size
        self.packed: PackedWeights | None = None
        """The weights in the kernels' layout; None when torch holds the weights."""
        self._compiled: CompiledDecoder | None = None
        self._device: StepsOnDevice | None = None
        self._masking = Masking(self._vocab_size)
        self._taps: tuple[int, ...] = ()
        self.shown: ShownTiles | None = None
        """The pictures of steps; None: it computes texts, or rank 0 sees them."""
        if config.device == "cpu":
            self._load(checkpoint, config)
        else:
            self._load_on_device(checkpoint, config)

    def _load(self, checkpoint: Checkpoint, config: EngineConfig) -> None:
        model, kept = checkpoint.config, _WEIGHTS[config.dtype]
        machine = _machine(checkpoint, config) if config.kernels else None
        compute = torch.float32 if machine is not None else _kept_by_torch(config)
        if machine is None:
            rounds = config.dtype in _ROUNDED
            keep = _rounded(config.dtype, checkpoint.stores_int4, compute) if rounds else as_it_is
            table = None if checkpoint.part is None else StoredTable(checkpoint.tensors[EMBEDDING])
            weights = load_weights(checkpoint, kept, _CPU, keep=keep, compute=compute, table=table)
        else:
            self.packed, weights = _packed(checkpoint, config, machine)
        kept = CACHE[config.kv]
        among = self.ranks
        if among is None:
            self.memory = PageMemory(model, config.pages, config.block_size, kept, _CPU, shared=config.shared_pages)
        else:
            self.memory = among.memory
        apart = among.pages_at(_CPU) if among is not None and config.copies_pages else None
        self._build(checkpoint, config, weights, compute, apart)
        if machine is None or apart is not None or not CompiledDecoder.fits(model):
            return
        if among is None:
            self._compiled = CompiledDecoder(machine, model, weights, self.decoder.tables[0], self.memory)
        elif among.shared is not None or among.alone:
            self._compiled = CompiledDecoder(
                machine,
                model,
                weights,
                self.decoder.tables[0],
                self.memory,
                first_head=among.window.first_head,
                ranks=None if among.shared is None else among.shared.args,
            )

    @property
    def expert_rows(self) -> Sequence[Sequence[int]]:
        """By layer and expert, how many rows have chosen it so far; empty where there are none, or they are not
        counted."""
        return () if self._expert_rows is None else self._expert_rows.tolist()

    @property
    def expert_imbalance(self) -> float:
        """Rows of the busiest of the groups among which experts are divided : the mean; 0 where no rows of experts
        were counted yet."""
        return imbalance(self.expert_rows, self._groups, self._copies)

    def _load_on_device(self, checkpoint: Checkpoint, config: EngineConfig) -> None:
        from penstock.engine.kernels.cuda import setup as cuda  # imported only for CUDA devices

        model, place, kept = checkpoint.config, torch.device(config.device), _WEIGHTS[config.dtype]
        cuda.check(config.dtype, place)
        with cuda.uploading(checkpoint, place) if self.ranks is None else nullcontext() as upload:
            if self.ranks is None:
                cache, own = CACHE[config.kv], cuda.memory_on(place)
                self.memory = pages = PageMemory(model, config.pages, config.block_size, cache, place, memory=own)
            else:
                cuda.use(place)
                self.memory, pages = self.ranks.memory, self.ranks.pages_at(place)
            attention = cuda.attention_for(model, pages) if config.kernels else None
            keep = cuda.keep_for(config.dtype, place)
            source = None if upload is None else upload.take
            unused = StoredTable(checkpoint.tensors[EMBEDDING]) if checkpoint.layers.start else None
            weights = load_weights(checkpoint, kept, place, keep=keep, source=source, table=unused)
        if config.kernels and model.experts is not None and not config.redundant_experts:  # whose rows are counted
            cuda.group_experts(weights, model.activation, place)
        self._build(checkpoint, config, weights, kept, pages)
        if config.kernels:
            self._device = cuda.steps_for(
                self.decoder,
                pages,
                self._builder,
                attention,
                most_sequences=config.max_running,
                max_positions=config.context(model.max_positions),
                capture=self.ranks is None,
            )

    def _build(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        weights: Weights,
        compute: torch.dtype,
        pages: PageMemory | None,
    ) -> None:
        """`compute` is the type of activations; `pages` are those in which steps compute, None: those that all
        processes map."""
        model, pictures = checkpoint.config, checkpoint.pictures
        self._adapter_dtype = _WEIGHTS[config.dtype]
        rank = None if checkpoint.part is None else checkpoint.part.rank
        self._groups, self._copies = (1, None) if rank is None else (rank.expert_groups, rank.copies)
        place = weights.norm.device
        self._compute, self._place = compute, place
        self.decoder = Decoder(model, weights, config.context(model.max_positions), compute)
        if pictures is not None and (self.ranks is None or self.ranks.leads):
            self.shown = ShownTiles(tower_of(pictures, compute, place), place)
        draws = native_draws() if config.kernels and place.type == "cpu" else None
        self.sampler = Sampler(self._vocab_size, place, draws)
        among = self.ranks
        self._kv: KvMemory = self.memory if pages is None else pages
        self._expert_rows = weights.expert_rows
        if among is not None:
            self.decoder.add = among.add
            if pages is None:
                self._kv = among.window
            if among.counted is not None:
                own = checkpoint.layers
                weights.count_in(among.counted[own.start : own.stop])
                self._expert_rows = among.counted
        self._builder = BatchBuilder(self._kv, place, model.windows, compute, chunked=model.chunked)

    def load_adapter(self, found: AdapterCheckpoint) -> AdapterWeights:
        """Brings an adapter to where the model is. Callable from any thread. Raises CheckpointError."""
        kernels = self._compiled is not None
        try:
            own = found if self.ranks is None else self.ranks.adapter(found)
            return load_adapter(own, self.decoder.layers, self._adapter_dtype, self._place, kernels=kernels)
        except CheckpointError:
            self.forget_adapter(found.fingerprint)  # some ranks may have loaded their parts
            raise

    def forget_adapter(self, fingerprint: str) -> None:
        """No step will have it until it is loaded again. Callable from any thread."""
        if self.ranks is not None:
            self.ranks.forget_adapter(fingerprint)

    @property
    def layers(self) -> int:
        """Of the model."""
        return self.decoder.config.n_layers

    @property
    def embedding(self) -> Embedding:
        """Of the model."""
        return self.decoder.embedding

    def between_layers(self, call: Callable[[], object] | None) -> None:
        """From the next step on, `call` is called after each layer; it must not raise."""
        self.decoder.between = call
        if self._compiled is not None:
            self._compiled.between_layers(call)

    def tap(self, layers: Sequence[int]) -> None:
        """Chooses what runs get that ask for features: their states after so many layers, numbers that grow. Raises
        ValueError when the model has no such layers, or these are its last."""
        if list(layers) != sorted(set(layers)) or not all(0 < count < self.layers for count in layers):
            raise ValueError(f"layers {list(layers)}: need growing numbers from 1 to {self.layers - 1}")
        assert self._first is None or self._first.taps == tuple(layers), "the other stages keep those"
        self._taps = tuple(layers)

    @torch.inference_mode()
    def step(self, runs: Sequence[Run]) -> Sequence[list[Chosen] | EngineError]:
        """Computes the runs' KV and samples; returns the tokens that each run gains.

        A run that leaves known tokens for later steps gains no token. Every other run gains one, plus one for each
        draft that equals the token sampled in its place; one that leaves its grammar gets an error. Raises NotFinite.
        After an error the caller may repeat the call with the same runs: it writes the same KV at the same places.
        """
        return self.finish(self.begin(runs))

    @torch.inference_mode()
    def begin(self, runs: Sequence[Run]) -> BegunStep:
        """Begins with a step, of sequences that are in no other. Where there are several stages it returns when the
        first has computed it."""
        for run in runs:
            self._prepare(run)
        takes = self.takes(runs)
        order = runs if takes else arrange(runs)
        masks = self._masking.begin(order)
        passed = None if self._first is None else self._first.launch(order, self)
        return BegunStep(runs, order, takes, masks, passed)

    @torch.inference_mode()
    def finish(self, begun: BegunStep) -> Sequence[list[Chosen] | EngineError]:
        """As `step`, of one that has begun."""
        runs, order, masks = begun.runs, begun.order, begun.masks
        features = self._room(self._taps, order)
        if self._compiled is not None and self.ranks is None and begun.takes and all(run.choice.plain for run in runs):
            legality = None if masks is None else masks.legality(order)
            sampled = [Chosen(token) for token in self._compiled.best(order, legality, features)]
        else:
            logits = self.logits(order, features) if begun.passed is None else self._passed(begun.passed, features)
            rows = [choice for run in order for choice in (_choices(run) if masks is None else masks.choices(run))]
            self.memory.computed(wait=not rows)  # a step is over when it is computed, with or without samples
            sampled = self.sampler.sample(logits, rows) if rows else []
        if features is not None:
            features.hand_over(order)
        answers: dict[int, list[Chosen] | EngineError] = {}
        first = 0
        for run in order:
            own = sampled[first : first + run.samples]
            kept = accepted(run.choice.drafts, own) if len(own) > 1 else own
            answers[id(run)] = kept if masks is None else masks.answer(run, kept)
            first += run.samples
        return [answers[id(run)] for run in runs]

    def _passed(self, passed: Passed, features: Features | None) -> Tensor:
        """The logits of a step that is on its way through the stages."""
        assert self._first is not None
        return self._first.logits(passed, features).to(self._place)

    def logits(self, order: Sequence[Run], features: Features | None = None) -> Tensor:
        """float32 [samples, vocab]; leaves the runs' keys and values in the memory, and fills `features`. The kernels
        take runs in any order, torch in that of `arrange`."""
        if self._first is not None:
            return self._passed(self._first.launch(order, self), features)
        compiled = self._compiled is not None and self.takes(order)
        if self._device is not None and self.ranks is None and not self._shows(order):
            return self._device.logits(order, features)
        return self.compute(order, compiled, features)

    def compute(self, order: Sequence[Rows], compiled: bool, features: Features | None = None) -> Tensor:
        """As `logits`, without captured steps: by the kernels of a CPU in one call, or by torch. With several ranks the
        others do it too."""
        shown = self.rows_shown(order)
        if self.ranks is None:
            return self.compute_piece(order, compiled, shown, features)
        with self.ranks.step(order, compiled, shown) as step:
            return step.done(self.compute_piece(order, compiled, step.shown, features, step.states))

    def computed(self, order: Sequence[Rows]) -> Tensor:
        """As `compute`, in the way in which a step of these rows is computed."""
        return self.compute(order, self.takes(order))

    def compute_piece(
        self,
        order: Sequence[Rows],
        compiled: bool,
        shown: ShownRows | None,
        features: Features | None = None,
        states: Tensor | None = None,
    ) -> Tensor:
        """What the layers of this process make of rows; `states` is what those before have made of them."""
        if compiled and self._compiled is not None:
            return self._compiled.forward(order, features, states)
        states = None if states is None else states.to(self._place)
        if shown is not None:
            shown = ShownRows(shown.rows.to(self._place), shown.embeddings.to(self._place))
        if self._device is not None:
            return self._device.piece(order, shown, features, states)
        batch = self._builder.build(order)
        batch.shown = shown
        return self.decoder.forward(batch, self._kv, features, states)

    def rows_shown(self, order: Sequence[Rows]) -> ShownRows | None:
        """What stands in the place of their tokens' embeddings, as far as this process computes it."""
        return None if self.shown is None else self.shown.rows(order)

    def features(self, order: Sequence[Rows]) -> Features | None:
        """Room for what the layers of this stage say of rows that have features; None: they are not asked."""
        taps = () if self.ranks is None else self.ranks.taps
        return self._room(taps[taps_of(taps, self.decoder.layers)], order)

    def _room(self, taps: tuple[int, ...], order: Sequence[Rows]) -> Features | None:
        rows = featured_rows(order) if taps else []
        if not rows:
            return None
        width = len(taps) * self.decoder.config.hidden_size
        return Features(taps, rows, torch.empty(len(rows), width, dtype=self._compute, device=self._place))

    def takes(self, runs: Sequence[Rows]) -> bool:
        """Whether the kernels compute these rows in one call."""
        return self._compiled is not None and not self._shows(runs) and self._compiled.takes(runs)

    def _shows(self, runs: Sequence[Rows]) -> bool:
        """Whether some rows are of pictures."""
        return self.shown is not None and self.shown.takes(runs)

    def _prepare(self, run: Run) -> None:
        """Copies what the run takes from another's page. Zeroes the last page of a run that begins that page and does
        not fill it: attention masks the rest, but a masked NaN is still a NaN; and the page may leave the engine as a
        sequence's tail."""
        size = self.memory.block_size
        if run.source is not None:
            self.memory.copy_rows(run.source, run.pages[run.start // size], run.start % size)
        filled = run.end % size
        if filled and run.end - filled >= run.start:
            self.memory.clear(run.pages[run.end // size])


def _machine(checkpoint: Checkpoint, config: EngineConfig) -> Machine | None:
    """The kernels of this CPU; None when they cannot be built or cannot compute the model."""
    reason = misfit(checkpoint.config)
    if reason is not None:
        _log.info("torch computes everything: %s", reason)
        return None
    size = _weight_bytes(checkpoint)
    try:
        return Machine(config.threads or max(1, min(torch.get_num_threads(), size // _BYTES_PER_THREAD)))
    except NotBuilt as error:
        if config.weights == "lossless":
            raise ConfigError("weights", config.weights, f"needs the C++ kernels: {error}; or use plain") from error
        _log.warning("no C++ kernels, torch computes everything: %s", error)
        return None


def _packed(checkpoint: Checkpoint, config: EngineConfig, machine: Machine) -> tuple[PackedWeights, Weights]:
    """Packs the weights; returns an account of the packing, and the weights."""
    kept = _WEIGHTS[config.dtype]
    kind = _form(checkpoint, config, machine)
    packed = packed_weights(checkpoint, kind, kept, torch.get_num_threads(), config.packed_bytes)
    _log.info("weights: %s", packed)

    def keep_heads(stack: Stack) -> PackedMatrix:
        return PackedMatrix.of(machine, packed.matrices[stack.name], None, stack.columns)

    def keep(stack: Stack, _: object, bias: Tensor | None) -> tuple[Matrix, None]:
        return PackedMatrix.of(machine, packed.matrices[stack.name], bias, stack.columns), None

    stays = checkpoint.part is not None or packed.nbytes >= SMALL_BYTES
    table = StoredTable(checkpoint.tensors[EMBEDDING]) if stays else None
    weights = load_weights(checkpoint, kept, _CPU, keep=keep, keep_heads=keep_heads, table=table, compute=torch.float32)
    return packed, weights


def _form(checkpoint: Checkpoint, config: EngineConfig, machine: Machine) -> str:
    """How the weights are packed. A small model stays in the processor's caches, where fewer bits gain nothing."""
    if config.dtype != "bfloat16" or config.weights == "plain":
        return config.dtype
    if config.weights == "lossless":
        return "lossless"
    return quicker_form(machine) if _weight_bytes(checkpoint) >= SMALL_BYTES else "bfloat16"


def _weight_bytes(checkpoint: Checkpoint) -> int:
    """About as many as this process loads."""
    size = sum(file.stat().st_size for file in checkpoint.weight_files)
    if checkpoint.part is None:
        return size
    return size * len(checkpoint.layers) // (checkpoint.config.n_layers * checkpoint.part.rank.ranks)


def _kept_by_torch(config: EngineConfig) -> torch.dtype:
    """The type in which torch keeps matrices and computes where there are no kernels. It is float32 for numbers in
    fewer bits, but bfloat16 for int4 where kernels were asked for: who serves int4 has no room for float32."""
    if config.dtype == "int4" and config.kernels:
        _log.warning("int4 matrices are kept in bfloat16, 16 bits a number: only the kernels keep 4")
        return torch.bfloat16
    return torch.float32 if config.dtype in _ROUNDED else _WEIGHTS[config.dtype]


def _rounded(dtype: str, stored: bool, wide: torch.dtype) -> Keep:
    """Keeps matrices in `wide`, as the numbers for which the kernels' own would stand, see `kind_of`."""

    def meant(stack: Stack, matrix: Callable[[], Tensor]) -> Tensor:
        match kind_of(stack, dtype, stored):
            case "int8":
                return dequantised(matrix())
            case "int4" if keeps_groups(stack):
                return stack.joined(lambda part: numbers(part, read_tensor))
            case "int4":
                return degrouped(*grouped(matrix()))
            case _:
                return matrix()

    def keep(stack: Stack, matrix: Callable[[], Tensor], bias: Tensor | None) -> tuple[Matrix, Tensor | None]:
        return meant(stack, matrix).to(wide), None if bias is None else bias.to(wide)

    return keep


def _choices(run: Run) -> list[Choice]:
    """One choice for each sampled row: after the known tokens, after the first draft, after the second..."""
    choice = run.choice
    if run.samples <= 1 or choice.plain:
        return [choice] * run.samples
    own = (choice.params, choice.stops, choice.tokens, choice.prompt_length)
    return [Choice(*own, choice.drafts[:count], choice.state) for count in range(run.samples)]
