"""What grammars and bans allow in a step. What grammars allow is worked out in a thread of its own while the model
computes the logits; what bans leave is known before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Lock, Thread
from weakref import finalize

from penstock.engine.errors import EngineError, GrammarFailed
from penstock.engine.kernels.cpu.legality import Legality
from penstock.engine.sampling.bans import WORD_BITS, all_but
from penstock.engine.sampling.choice import Choice, Chosen
from penstock.engine.step.run import Run
from penstock.grammar.masks import MaskAsk, MaskMaker, StepMasks
from penstock.grammar.matcher import GrammarLeft
from penstock.grammar.tokenizer import MaskWords
from penstock.runtime.cores import available_cores

_MOST_THREADS = 4
"""For the masks of one step: more would take cores from the model."""


class RunMasks:
    """The masks of some runs, which may still be in the making."""

    def __init__(self, guided: Sequence[Run], banned: Sequence[Run], words: int) -> None:
        """`guided` runs have a grammar, the `banned` have none and may have tokens that they can't have. A mask has
        `words`."""
        self._number = {id(run): number for number, run in enumerate(guided)}
        asks = [MaskAsk(guide, run.choice.tokens, run.choice.drafts) for run in guided if (guide := run.choice.guide)]
        sets = {id(run): [run.choice.banned_after(count) for count in range(run.samples)] for run in banned}
        different = {tokens for several in sets.values() for tokens in several if tokens}
        self._masks = StepMasks(asks, words, len(different))
        number = {frozenset[int](): -1}
        for row, tokens in enumerate(different, self._masks.made):
            self._masks.rows[row] = all_but(tokens, words)
            number[tokens] = row
        self._bans = {run: [number[tokens] for tokens in several] for run, several in sets.items()}
        """The row of each sample of a banned run, -1 where everything is legal."""
        self._defect: BaseException | None = None
        self._ready = array("i", [0 if guided else 1])
        """What C++ waits for."""
        self._making = Lock()  # quicker than an Event, and there is one for each step
        if guided:
            self._making.acquire()

    @property
    def needed(self) -> bool:
        """Whether there is any mask."""
        return bool(len(self._masks.rows))

    def make(self, maker: MaskMaker) -> None:
        """Makes them, in a thread; whatever happens, they are ready then."""
        try:
            maker.fill(self._masks)
        except BaseException as error:  # a panic of llguidance's is no Exception
            self._defect = error
            self._masks.rows[: self._masks.made] = -1
        finally:
            self._ready[0] = 1
            self._making.release()

    def wait(self) -> None:
        """Returns when they are made."""
        with self._making:
            pass

    def legality(self, order: Sequence[Run]) -> Legality:
        """What is legal in the samples of `order`; need not be made yet."""
        row: list[int] = []
        for run in order:
            first = self._first(run)
            free = self._bans.get(id(run)) or [-1] * run.samples
            row += free if first is None else range(first, first + run.samples)
        return Legality(self._masks.rows, row, self._ready)

    def choices(self, run: Run) -> list[Choice]:
        """One choice for each sampled row: after the known tokens, after the first draft, after the second... Waits
        until the masks are made."""
        self.wait()
        own, first = run.choice, self._first(run)
        legal: list[MaskWords | None] = [None] * run.samples
        if first is not None:
            legal = list(self._masks.rows[first : first + run.samples])
        given = (own.params, own.stops, own.tokens, own.prompt_length)
        return [
            Choice(*given, own.drafts[:count], own.state, guide=own.guide, legal=mask, words=own.words)
            for count, mask in enumerate(legal)
        ]

    def answer(self, run: Run, answer: list[Chosen]) -> list[Chosen] | EngineError:
        """Tells the run's guide of the tokens it gains; an error when they, or those before, leave the grammar."""
        number = self._number.get(id(run))
        if number is None:
            return answer
        self.wait()
        if self._defect is not None:
            return EngineError(f"the masks of a step failed: {self._defect}")
        failed, guide = self._masks.failed.get(number), run.choice.guide
        # without leading, it takes them in the next step, while the model computes
        if failed is None and guide is not None and guide.leads:
            try:
                guide.take([chosen.token for chosen in answer])
            except GrammarLeft as error:
                failed = error
        return answer if failed is None else GrammarFailed(failed)

    def _first(self, run: Run) -> int | None:
        """The number of the row for the run's first sample, others follow; None for a run without a grammar."""
        number = self._number.get(id(run))
        return None if number is None else self._masks.first[number]


class Masking:
    """The thread that makes masks. It begins when the first are wanted, and ends with the object."""

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // WORD_BITS)
        self._wanted: SimpleQueue[RunMasks | None] = SimpleQueue()
        self._working = False
        self._last: RunMasks | None = None

    def begin(self, runs: Sequence[Run]) -> RunMasks | None:
        """Begins with the masks of those of the runs that are sampled with a grammar or a ban; None when none is."""
        if all(run.choice.guide is None and not run.choice.bans for run in runs):
            return None  # the usual case costs next to nothing
        sampled = [run for run in runs if run.samples]
        guided = [run for run in sampled if run.choice.guide is not None]
        banned = [run for run in sampled if run.choice.guide is None and run.choice.bans]
        if not guided:
            masks = RunMasks((), banned, self._words)
            return masks if masks.needed else None
        if not self._working:
            self._working = True
            Thread(target=_work, args=(self._wanted,), name="masks", daemon=True).start()
            finalize(self, self._wanted.put, None)
        if self._last is not None:
            self._last.wait()  # of a step that failed, whose guides the thread may still be using
        self._last = RunMasks(guided, banned, self._words)
        self._wanted.put(self._last)
        return self._last


def _work(wanted: SimpleQueue[RunMasks | None]) -> None:
    maker = MaskMaker(min(available_cores(), _MOST_THREADS))
    while (masks := wanted.get()) is not None:
        masks.make(maker)
        del masks  # the waiting thread keeps no object alive
