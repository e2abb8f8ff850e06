"""The model of an engine, loaded, and the name of its KV."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch

from penstock.checkpoint import Checkpoint, inspect_head, remembered_fingerprint, tokenizer_fingerprint
from penstock.engine.config import EngineConfig
from penstock.engine.errors import EngineError
from penstock.engine.forward.balance import stage_layers
from penstock.engine.forward.redundancy import expert_copies
from penstock.engine.forward.runner import CACHE, BegunStep, Runner
from penstock.engine.models.packed import PackedWeights
from penstock.engine.ranks.followers import Launch
from penstock.engine.ranks.lead import Lead
from penstock.engine.sampling.choice import Chosen
from penstock.engine.step.memory import PageMemory
from penstock.engine.step.run import Run
from penstock.kv.spec import KvSpec
from penstock.runtime.cores import available_cores

_log = logging.getLogger(__name__)


class Computes(Protocol):
    """Computes steps: a Runner, or a stand-in in tests and benches."""

    @property
    def memory(self) -> PageMemory:
        """The memory that holds the KV."""
        ...

    @property
    def packed(self) -> PackedWeights | None:
        """The weights in the kernels' layout; None when torch holds the weights."""
        ...

    def step(self, runs: Sequence[Run]) -> Sequence[list[Chosen] | EngineError]:
        """The tokens that are certain after each run, in lists of their own, or why there are none. Called in the
        engine's thread, and again with a part of the runs when it raises."""
        ...


@runtime_checkable
class ComputesInLayers(Protocol):
    """What a step can be interrupted in; a Runner."""

    @property
    def layers(self) -> int:
        """Of the model."""
        ...

    def between_layers(self, call: Callable[[], object] | None) -> None:
        """From the next step on, `call` is called after each layer, in the engine's thread; it must not raise."""
        ...


@runtime_checkable
class ComputesInStages(Protocol):
    """What can begin steps before others are finished; a Runner."""

    def begin(self, runs: Sequence[Run]) -> BegunStep:
        """Begins with a step, of sequences that are in no other."""
        ...

    def finish(self, begun: BegunStep) -> Sequence[list[Chosen] | EngineError]:
        """As Computes.step, of one that has begun."""
        ...


@runtime_checkable
class InRanks(Protocol):
    """What has processes that compute with it; a Runner's Lead."""

    @property
    def watched(self) -> Sequence[int]:
        """Files that can be read as soon as one of them has ended."""
        ...

    @property
    def leaving(self) -> Sequence[int]:
        """Files that can be read as soon as one of them says that it will end, or has."""
        ...

    def abandon(self) -> None:
        """Ends them, so that nothing waits for them. Callable from any thread."""
        ...

    def close(self) -> None:
        """Ends them."""
        ...


Load = Callable[[EngineConfig, Checkpoint], tuple[Computes, KvSpec]]


def set_threads(threads: int) -> None:
    """Sets the number of threads with which torch computes in this thread; 0: one for each core."""
    torch.get_num_threads()  # else the first look at the number takes what any other thread has set since
    torch.set_num_threads(threads or available_cores())


def load_model(
    config: EngineConfig, checkpoint: Checkpoint, launch: Launch | None = None, away: Sequence[Launch] = ()
) -> tuple[Runner, KvSpec]:
    """The model and the name of its KV. `launch` starts other ranks; None: as processes. `away` start what speaks for
    the stages but the first, where these are on other hosts. Raises CheckpointError, ConfigError, and RankLost when
    another rank can't load its part."""
    runner = _in_ranks(checkpoint, config, launch, away) if config.split else Runner(checkpoint, config)
    token, tokens = runner.memory.block_bytes // config.block_size, config.pages * config.block_size
    _log.info("KV of %d tokens fits: %d bytes each in %s, %.0f MiB", tokens, token, config.kv, tokens * token / 2**20)
    spec = KvSpec(
        model=remembered_fingerprint(checkpoint),
        tokenizer=tokenizer_fingerprint(checkpoint),
        layout=runner.memory.layout,
        dtype=config.identity,
        block_size=config.block_size,
        block_bytes=runner.memory.block_bytes,
    )
    return runner, spec


def _in_ranks(checkpoint: Checkpoint, config: EngineConfig, launch: Launch | None, away: Sequence[Launch]) -> Runner:
    """Rank 0 of several, when all have loaded."""
    kept = CACHE[config.kv]
    memory = PageMemory(checkpoint.config, config.pages, config.block_size, kept, torch.device("cpu"), shared=True)
    stages = stage_layers(checkpoint, config)
    lead = Lead(
        checkpoint,
        config,
        memory,
        remembered_fingerprint(checkpoint),
        stages=stages,
        copies=expert_copies(checkpoint, config),
        taps=inspect_head(config.draft_head, checkpoint).layers if config.has_head else (),
        launch=launch,
        away=away,
    )
    try:
        runner = Runner(lead.checkpoint, lead.config, lead)
        lead.meet()
    except BaseException:
        lead.close()
        raise
    return runner
