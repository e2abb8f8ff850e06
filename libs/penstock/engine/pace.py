"""How much a step may compute, and when: beside the engine's own streams, and beside workers on the same cores.

Steps with streams are computed in turn with those of other workers, and so are prompts where several wait: then a slice
of prompts has the cores for itself, as long as the target gives way. One prompt alone is computed beside the streams
without turns: while theirs read weights, its steps multiply, and both together get more out of two cores than one after
the other. Of a model in several stages only steps that are tried again take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from penstock.engine.config import EngineSettings
from penstock.engine.forward.model import ComputesInLayers
from penstock.engine.scheduling.chunking import (
    attainable_s,
    chunk_tokens,
    enough_tokens,
    patience,
    room_s,
    whole_tokens,
)
from penstock.engine.scheduling.leftover import ANY_LEFTOVER, Leftover, leftover
from penstock.engine.scheduling.situation import PromptRoom
from penstock.engine.stats import Counters
from penstock.engine.step.run import Run
from penstock.runtime.turns.baton import ALONE, Baton, TurnCounters

_UNKNOWN_S = 1.0
"""What a step takes before the first was measured."""


class StepPace:
    """Sets the sizes of an engine's steps, and waits for their turns."""

    def __init__(
        self,
        config: EngineSettings,
        counters: Counters,
        crowd: Callable[[], tuple[int, int]],
        runner: object,
        baton: Baton | None,
    ) -> None:
        """`crowd` as in the scheduler."""
        self._config = config
        self._counters = counters
        self._crowd = crowd
        self._baton = baton
        self._none = TurnCounters()
        self._runner = runner if isinstance(runner, ComputesInLayers) else None
        self._layers = 1 if self._runner is None else self._runner.layers
        self._stops = False
        """Whether steps stop between their layers, which costs a little."""
        self._queue = False
        """Whether prompts wait behind another one."""
        self._slice_s = 0.0
        """What streams of other workers leave to a slice of prompts."""

    @property
    def turns(self) -> TurnCounters:
        """Of this worker."""
        return self._none if self._baton is None else self._baton.counters

    def room(self) -> PromptRoom:
        """Of the next step."""
        counters, most, target_s = self._counters, self._config.max_batch_tokens, self._config.itl_target_s
        if target_s is not None:
            target_s /= self._config.pp  # between two steps of a stream are those of the others
        prompts, streams = self._crowd()
        beside = ALONE
        if self._baton is not None:
            self._baton.tell(streams, counters.decode_step_s)
            beside = self._baton.beside()
        rate, step_s = counters.prefill_tokens_per_s, counters.decode_step_s + beside.step_s
        whole, enough = whole_tokens(target_s, step_s, rate, most), enough_tokens(target_s, rate)
        patient_s = target_s
        if target_s is not None:
            gives = patience(prompts, streams + beside.streams)
            target_s, patient_s = gives * target_s, gives * attainable_s(target_s, step_s, rate)
        chunk = 0 if counters.stale else chunk_tokens(patient_s, step_s, rate, most)
        self._slice_s = 0.0 if target_s is None else room_s(target_s, beside.step_s)
        self._queue = prompts > 1
        alone = None
        if beside.streams and self._queue:
            alone = chunk_tokens(target_s, beside.step_s, rate * self._layers, most)
        return PromptRoom(beside=chunk, alone=alone, whole=whole, enough=enough)

    def leftover(self, yielding: bool) -> Leftover:
        """What the next step has for sequences that yield, if there are any. Streams of others on the same cores would
        wait for them."""
        if not yielding:
            return ANY_LEFTOVER
        counters = self._counters
        alone = self._baton is None or not self._baton.beside().streams
        most_s, streams = self._config.yield_ms / 1000, self._crowd()[1]
        rate = counters.prefill_tokens_per_s
        return leftover(most_s, counters.fit.coefficients, rate, streams, alone=alone)

    @contextmanager
    def turn(self, runs: Sequence[Run]) -> Iterator[None]:
        """In the lane: a step is computed within, in its turn."""
        decodes = any(run.known == 1 for run in runs)
        if self._baton is None:
            yield
            return
        if not (decodes or self._queue):
            self._stop(False)
            yield
            return
        prompts = sum(run.tokens for run in runs if run.known > 1)
        rate, expected_s = self._counters.prefill_tokens_per_s, self._counters.decode_step_s
        if prompts:
            expected_s = (expected_s + (prompts / rate if rate else _UNKNOWN_S)) / self._layers
        with self._baton.turn(decodes, expected_s) as held:
            self._stop(held and not decodes)
            yield

    def _stop(self, stops: bool) -> None:
        if stops != self._stops and self._runner is not None:
            self._stops = stops
            self._runner.between_layers(self._between_layers if stops else None)

    def _between_layers(self) -> None:
        assert self._baton is not None
        self._baton.pause(self._slice_s)
