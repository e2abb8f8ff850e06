"""What grammars allow in a step, worked out in a thread of its own while the model computes the logits."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from penstock.engine.errors import EngineError, GrammarFailed
from penstock.engine.kernels.cpu.machine import Legality
from penstock.engine.sampling.choice import Choice, Chosen
from penstock.engine.step.run import Run
from penstock.grammar.masks import MaskAsk, MaskMaker, StepMasks
from penstock.grammar.matcher import GrammarLeft
from penstock.grammar.tokenizer import MaskWords
from penstock.runtime.cores import available_cores

_MOST_THREADS = 4
"""Of the masks of one step: more would take cores from the model."""


class RunMasks:
    """The masks of some runs, which may still be in the making."""

    def __init__(self, runs: Sequence[Run], making: Future[StepMasks]) -> None:
        self._number = {id(run): number for number, run in enumerate(runs)}
        self._making = making

    @property
    def rows(self) -> MaskWords:
        """[rows, words] of all runs; waits until they are made."""
        return self._making.result().rows

    def legality(self, order: Sequence[Run]) -> Legality:
        """What is legal in the samples of `order`; waits until the masks are made."""
        row: list[int] = []
        for run in order:
            first = self.first(run)
            row += [-1] * run.samples if first is None else range(first, first + run.samples)
        return Legality(self.rows, row)

    def first(self, run: Run) -> int | None:
        """The number of the row for the run's first sample, others follow; None for a run without a grammar."""
        number = self._number.get(id(run))
        return None if number is None else self._making.result().first[number]

    def choices(self, run: Run) -> list[Choice]:
        """One choice for each sampled row: after the known tokens, after the first draft, after the second..."""
        own, first = run.choice, self.first(run)
        legal = [None] * run.samples if first is None else list(self.rows[first : first + run.samples])
        given = (own.params, own.stops, own.tokens, own.prompt_length)
        return [
            Choice(*given, own.drafts[:count], own.state, guide=own.guide, legal=words)
            for count, words in enumerate(legal)
        ]

    def answer(self, run: Run, answer: list[Chosen]) -> list[Chosen] | EngineError:
        """Tells the run's guide of the tokens it gains; an error when they, or those before, leave the grammar."""
        guide, number = run.choice.guide, self._number.get(id(run))
        if guide is None or number is None:
            return answer
        failed = self._making.result().failed.get(number)
        if failed is None:
            try:
                guide.take([chosen.token for chosen in answer])
                return answer
            except GrammarLeft as error:
                failed = error
        return GrammarFailed(failed)


class Masking:
    """The thread that makes masks, started when the first is wanted."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._making: Future[StepMasks] | None = None
        self._maker: MaskMaker | None = None

    def begin(self, runs: Sequence[Run]) -> RunMasks | None:
        """Begins with the masks of those of the runs that have a grammar and are sampled; None when none is."""
        guided = [run for run in runs if run.choice.guide is not None and run.samples]
        if not guided:
            return None
        if self._thread is None or self._maker is None:
            self._thread, self._maker = ThreadPoolExecutor(1, "masks"), MaskMaker(min(available_cores(), _MOST_THREADS))
        if self._making is not None:
            wait([self._making])  # of a step that failed, whose guides it may still be using
        asks = [MaskAsk(guide, run.choice.tokens, run.choice.drafts) for run in guided if (guide := run.choice.guide)]
        self._making = self._thread.submit(_masks, self._maker, asks)
        return RunMasks(guided, self._making)


def _masks(maker: MaskMaker, asks: Sequence[MaskAsk]) -> StepMasks:
    try:
        return maker.masks(asks)
    except BaseException as error:  # a panic of llguidance's is no Exception
        raise EngineError(f"the masks of a step failed: {error}") from error
