"""A small model that guesses the tokens of a large one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.checkpoint import Checkpoint, inspect
from penstock.engine.checks import settled
from penstock.engine.config import EngineConfig
from penstock.engine.forward.runner import Runner
from penstock.engine.hooks import DraftAsk
from penstock.engine.pages import PagePool
from penstock.engine.request import SamplingParams
from penstock.engine.sampling.choice import Choice
from penstock.engine.step.run import Run
from penstock.grammar.guide import Guide
from penstock.grammar.matcher import GrammarLeft


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Statistics of one draft model."""

    sequences: int
    free_pages: int
    evicted: int
    """Sequences that lost their KV to others."""
    behind: int
    """Answers that were empty because the sequence's KV was not ready yet."""


@dataclass(eq=False, slots=True)
class _Context:
    """KV that the draft model keeps of one sequence: that of `tokens` is in `pages`."""

    owner: str
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    version: int = 0


@dataclass(slots=True)
class _Task:
    """One ask being worked on; `tokens` grows by the guesses."""

    ask: DraftAsk
    context: _Context
    tokens: list[int]
    computed: int
    params: SamplingParams
    guide: Guide | None = None
    """A copy, which follows the guesses."""
    over: bool = True
    """No step has given it a guess yet, or the last one gave none: it is behind, or its text left its grammar."""

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def guesses(self) -> list[int]:
        return self.tokens[len(self.ask.tokens) :]

    def guess_forced(self) -> None:
        """Takes what the grammar forces for guesses, which cost no steps; leaves room for one that does."""
        if self.guide is not None:
            self.tokens += self.guide.forced[: max(0, self.params.max_tokens - len(self.guesses) - 1)]


class ModelProposer:
    """Proposer with a model of its own. Raises CheckpointError when the model cannot be loaded,
    ConfigError when it can't be with these settings.

    Keeps the KV of up to `max_sequences` sequences, least recently asked first to go; of a sequence that comes
    back with other tokens the common prefix is kept. One call costs one step over at most `max_batch_tokens`
    tokens to catch up and k - 1 small steps: a sequence that is further behind gets an empty answer and catches
    up over several calls. Guesses are drawn with the target's own noise (see `noise`), so that draft and target
    agree when sampling as often as their distributions allow. Not thread-safe: one thread at a time.
    """

    def __init__(self, config: EngineConfig, max_sequences: int = 256) -> None:
        self.checkpoint: Checkpoint = inspect(config.model, config.max_model_len or None)
        config = settled(config, self.checkpoint)
        self._limit = config.context(self.checkpoint.config.max_positions)
        self._runner = Runner(self.checkpoint, config)
        self._pool = PagePool(config.pages)
        self._block_size = config.block_size
        self._budget = config.max_batch_tokens
        self._most = max_sequences
        self._contexts: OrderedDict[str, _Context] = OrderedDict()
        self._made = 0
        self._evicted = 0
        self._behind = 0

    def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """Drafts for each ask, legal ones where it has a guide; for a sequence that is still too far behind or gets no
        pages at most what its grammar forces."""
        asked = {ask.id for ask in asks}
        tasks = [self._prepare(ask, asked) for ask in asks]
        able = [task for task in tasks if task is not None]
        ready = self._catch_up(able)
        while ready:
            self._step([(task, task.remaining) for task in ready])
            ready = self._unfinished(ready)
        for task in able:
            task.context.tokens = task.tokens[: task.computed]
        return [task.guesses if task is not None else [] for task in tasks]

    def forget(self, id: str) -> None:
        """Frees the sequence's KV."""
        context = self._contexts.pop(id, None)
        if context is not None:
            self._pool.release(context.owner, context.pages)

    def stats(self) -> DraftStats:
        return DraftStats(len(self._contexts), self._pool.free, self._evicted, self._behind)

    def _prepare(self, ask: DraftAsk, asked: set[str]) -> _Task | None:
        """The ask with pages for all its tokens and guesses; None when it cannot be served."""
        tokens = list(ask.tokens)
        k = min(ask.k, self._limit - len(tokens))
        if k < 1 or not tokens or max(tokens) >= self.checkpoint.config.vocab_size:
            return None
        context = self._context(ask.id, asked)
        if context is None or not self._make_room(context, len(tokens) + k - 1, asked):
            return None
        computed = min(_common(context.tokens, tokens), len(tokens) - 1)
        del context.tokens[computed:]  # from here on this call writes over the rest
        params = SamplingParams(
            max_tokens=k,
            temperature=ask.temperature,
            top_k=ask.top_k,
            top_p=ask.top_p,
            min_p=ask.min_p,
            seed=ask.seed,
        )
        task = _Task(ask, context, tokens, computed, params, _guide(ask))
        task.guess_forced()
        return task

    def _context(self, id: str, asked: set[str]) -> _Context | None:
        """The sequence's context, made if it is missing and marked as used last; None when there is no room for it."""
        if id not in self._contexts:
            if len(self._contexts) >= self._most and not self._evict(asked):
                return None
            self._made += 1
            self._contexts[id] = _Context(f"{id}#{self._made}")
        self._contexts.move_to_end(id)
        return self._contexts[id]

    def _make_room(self, context: _Context, positions: int, asked: set[str]) -> bool:
        """Pages for `positions` tokens, taken from sequences that were not asked for lately."""
        need = max(0, -(-positions // self._block_size) - len(context.pages))
        while not self._pool.can_allocate(need):
            if not self._evict(asked):
                return False
        if need:
            context.pages.extend(self._pool.allocate(context.owner, need))
            context.version += 1
        return True

    def _evict(self, asked: set[str]) -> bool:
        """Forgets the sequence whose last ask is oldest, but none that is being asked for right now."""
        for id in self._contexts:
            if id not in asked:
                self.forget(id)
                self._evicted += 1
                return True
        return False

    def _catch_up(self, tasks: list[_Task]) -> list[_Task]:
        """One step over tokens that the target gave meanwhile, sequences with the fewest first. Returns those that need
        further steps."""
        budget = self._budget
        work: list[tuple[_Task, int]] = []
        for task in sorted(tasks, key=lambda task: task.remaining):
            count = min(task.remaining, budget)
            budget -= count
            if count:
                work.append((task, count))
        self._step(work)
        self._behind += sum(1 for task in tasks if task.over and task.remaining)
        return self._unfinished(tasks)

    def _step(self, work: list[tuple[_Task, int]]) -> None:
        if not work:
            return
        answers = self._runner.step([self._run(task, count) for task, count in work])
        for (task, count), answer in zip(work, answers, strict=True):
            task.computed += count
            task.over = not isinstance(answer, list) or not answer
            if isinstance(answer, list) and answer:
                task.tokens.extend(chosen.token for chosen in answer)
                task.guess_forced()

    def _run(self, task: _Task, count: int) -> Run:
        length = len(task.ask.tokens)
        choice = Choice(task.params, frozenset(), task.tokens, length, guide=task.guide)
        context = task.context
        return Run(choice, task.computed, count, context.pages, (context.owner, context.version))

    def _unfinished(self, tasks: list[_Task]) -> list[_Task]:
        """The tasks that have room for another guess, are not behind, and have not guessed the end of the text."""
        return [
            task
            for task in tasks
            if not task.over
            and len(task.guesses) < task.params.max_tokens
            and task.tokens[-1] not in self.checkpoint.eos_token_ids
        ]


def _guide(ask: DraftAsk) -> Guide | None:
    """The ask's way through its grammar, up to its last token, to be led on."""
    if ask.guide is None:
        return None
    try:
        ask.guide.follow(ask.tokens)
    except GrammarLeft:
        return None
    return ask.guide.copy()


def _common(old: list[int], new: list[int]) -> int:
    """Length of the common prefix."""
    length = min(len(old), len(new))
    if old[:length] == new[:length]:
        return length
    return next(place for place in range(length) if old[place] != new[place])
