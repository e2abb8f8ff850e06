"""A small model that guesses the tokens of a large one, ahead of it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from penstock.checkpoint import Checkpoint, inspect
from penstock.engine.checks import settled
from penstock.engine.config import EngineConfig
from penstock.engine.errors import EngineError
from penstock.engine.forward.model import load_model, set_threads
from penstock.engine.pages import PagePool
from penstock.engine.rules import TextRules
from penstock.engine.sampling.choice import Choice, Chosen, SamplerState
from penstock.engine.speculation.drafted import REST_S, DraftedText, Rank, fitting, in_turn, next_choice, ranks
from penstock.engine.speculation.exchange import BlockExchange
from penstock.engine.speculation.guess import right
from penstock.engine.speculation.leads import (
    DraftBlockNews,
    DraftBlocks,
    DraftDropped,
    DraftLead,
    DraftStats,
    DraftStep,
    DraftTold,
    SequenceId,
)
from penstock.engine.step.memory import PageMemory
from penstock.engine.step.run import Run
from penstock.kv.identity import Chain, root_key
from penstock.kv.sealing import sealed

_NEAR = 16
"""Tokens by which a sequence may be behind and still take part in every step."""
_FIRST_SLICE, _LEAST_SLICE = 64, 16
"""Tokens that sequences further behind may compute in a step, while it is not known how long that takes, and however
long it does."""
_BESIDE_S, _ALONE_S = 0.004, 0.02
"""Seconds that they may take otherwise, beside others and alone: whoever wants a guess meanwhile has to wait."""
_TOGETHER_S = 0.002
"""Seconds for which guesses may be kept back, so that those of several steps go out at once: a message costs both ends
as much as a step of a small model."""
_LEAST_BLOCKS = 4
"""A text that lacks fewer is computed without asking the store."""
_log = logging.getLogger(__name__)


class DraftModel:
    """Guesses ahead with a model of its own. Raises CheckpointError when the model cannot be loaded, ConfigError when
    it can't be with these settings.

    For each sequence it goes on from its own guesses until it is as many tokens ahead as are wanted. When it is told
    how the text went on, it keeps what it has as far as that is the same, and begins anew from there on otherwise.
    One step serves all sequences that want a guess, `max_running` at most. Owners take turns, and the sequences of
    each, the least recently served first; those that have much to catch up take turns with slices of it. Guesses are
    drawn with the target's own noise (see `noise`) and in its own way, so that draft and target agree as often as their
    distributions allow.

    Full blocks of what was told stay in their pages as long as there is room, and are used for other texts of the same
    owner that begin so: the next turn of a session. With a store beside it, a text that lacks blocks waits until it is
    said which of them the store has, while others are computed; and it is said which blocks are full. A text without an
    owner keeps out of the store.

    A sequence has pages for all that is wanted, or none and no guesses: those that want none for a while give way to
    those that do, and younger ones to older ones of the same owner; the oldest of each owner come before the second
    oldest of any. Not thread-safe: one thread at a time.
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        *,
        stores: bool = False,
        seals: bool = False,
    ) -> None:
        """`clock` gives seconds. `stores`: there is a store, for which somebody answers to what steps say of blocks,
        and which has them sealed if it `seals`."""
        self.checkpoint: Checkpoint = inspect(config.model, config.max_model_len or None)
        config = settled(config, self.checkpoint)
        self._vocab_size = self.checkpoint.config.vocab_size
        self._limit = config.context(self.checkpoint.config.max_positions)
        self._runner, self.spec = load_model(config, self.checkpoint)
        self.stored_spec = sealed(self.spec) if seals else self.spec
        """Of blocks in the store."""
        self._pool = PagePool(config.pages)
        self._exchange = BlockExchange(self._pool) if stores else None
        self._block_size = config.block_size
        self._budget = config.max_batch_tokens
        self._most = config.max_running
        self._threads = config.threads
        self._clock = clock
        self._sequences: dict[SequenceId, DraftedText] = {}
        self._refused: list[SequenceId] = []
        """Since the last step."""
        self._ranks: dict[SequenceId, Rank] = {}
        """For the next step."""
        self._made = self._turns = 0
        self._kept_since: float | None = None
        """When the step began that gave the first guess that is not handed out."""
        self._row_s: float | None = None
        """Seconds that a row of a step with many takes, learned."""
        self._dropped = self._evicted = self._refusals = 0
        self._computed = self._reused = self._fetched = 0

    @property
    def memory(self) -> PageMemory:
        """The memory of its pages."""
        return self._runner.memory

    def begin(self) -> None:
        """Called first, in the thread that calls the rest."""
        set_threads(self._threads)

    def tell(self, told: DraftTold) -> None:
        """Takes in how far a sequence is; the first time with its terms."""
        sequence = self._sequences.get(told.id) or self._new(told)
        if sequence is None:
            return
        length = told.keep + len(told.tokens)
        if told.keep != sequence.told or list(told.tokens) != sequence.tokens[sequence.told : length]:
            self._turn(sequence, told)
        sequence.told = length
        sequence.most = min(length + told.k, self._limit) if told.k else 0
        if told.k:
            sequence.rested = None
        elif sequence.rested is None:
            sequence.rested = self._clock()
        if length == len(sequence.tokens):
            self._guess_forced(sequence)

    def rule(self, id: SequenceId, rules: TextRules) -> None:
        """Here are the rules that were announced for the sequence."""
        sequence = self._sequences.get(id)
        if sequence is not None:
            sequence.rules, sequence.waits = rules, False
            sequence.choice = _choice(sequence)
            self._guess_forced(sequence)

    def forget(self, id: SequenceId) -> None:
        """Frees the sequence's KV."""
        sequence = self._sequences.pop(id, None)
        if sequence is not None:
            self._dropped += len(sequence.tokens) - sequence.told
            self._free(sequence)

    def drop(self, owner: bytes) -> DraftDropped:
        """Has nobody find the pages of an owner any more; those that sequences have are free when these are over."""
        blocks, in_use = self._pool.drop([root_key(self.stored_spec, owner)])
        return DraftDropped(blocks, blocks * self.spec.block_bytes, in_use)

    def clear(self) -> None:
        """Forgets all sequences."""
        for id in list(self._sequences):
            self.forget(id)

    def step(self) -> DraftStep:
        """Computes one step, for all sequences that want one."""
        work = self._work()
        began = self._clock()
        answers = self._answers([self._run(sequence, count) for sequence, count in work])
        now = self._clock()
        self._learn(work, now - began)
        for (sequence, count), answer in zip(work, answers, strict=True):
            self._turns += 1
            sequence.served = self._turns
            self._take(sequence, count, answer)
        refused, self._refused = self._refused, []
        news = DraftBlockNews() if self._exchange is None else self._exchange.take()
        return DraftStep(self._due(began, now), refused, bool(work), news)

    def stats(self) -> DraftStats:
        """Now."""
        return DraftStats(
            sequences=len(self._sequences),
            pages=self._pool.total,
            free_pages=self._pool.free,
            dropped=self._dropped,
            evicted=self._evicted,
            refused=self._refusals,
            computed=self._computed,
            reused=self._reused,
            fetched=self._fetched,
        )

    # What is told

    def _new(self, told: DraftTold) -> DraftedText | None:
        """A sequence of which nothing is known yet; None where this is not the first that is told of it."""
        if told.terms is None or told.keep:
            return None
        self._made += 1
        terms, tokens = fitting(told.terms, self._vocab_size), list[int]()
        sequence = DraftedText(
            id=told.id,
            owner=f"{told.id}#{self._made}",
            born=self._made,
            terms=terms,
            tokens=tokens,
            chain=Chain(root_key(self.stored_spec, terms.owner), self._block_size),
            choice=Choice(terms.sampling, terms.stops, tokens, terms.prompt),
            waits=told.ruled,
        )
        self._sequences[told.id] = sequence
        return sequence

    def _turn(self, sequence: DraftedText, told: DraftTold) -> None:
        """The text went another way than was guessed, or further."""
        if told.keep < sequence.told:
            self._free(sequence)  # begins anew, as nobody may write where others read
            sequence.chain = Chain(sequence.chain.root, self._block_size)
        tokens, length = sequence.tokens, told.keep + len(told.tokens)
        same = told.keep + right(tokens[told.keep : length], told.tokens)
        self._dropped += max(0, len(tokens) - max(same, sequence.told))
        del tokens[same:]
        tokens += told.tokens[same - told.keep :]
        sequence.computed = min(sequence.computed, same, length - 1)
        sequence.after, sequence.given, sequence.over = told.number, length, False
        if not sequence.unfit and (length >= self._limit or max(tokens[same:], default=0) >= self._vocab_size):
            self._give_up(sequence)
        guide = sequence.rules.guide
        if guide is not None and guide.until > told.keep:
            guide.restart()
        sequence.choice = _choice(sequence)

    def _give_up(self, sequence: DraftedText) -> None:
        """There will be no guesses for this sequence any more."""
        self._free(sequence)
        sequence.unfit = True
        self._refused.append(sequence.id)

    def _guess_forced(self, sequence: DraftedText) -> None:
        """Takes what the grammar forces for guesses, which cost no steps; leaves room for one that does."""
        guide = sequence.choice.guide
        if guide is not None and sequence.guesses:
            sequence.tokens += guide.forced[: max(0, sequence.most - len(sequence.tokens) - 1)]

    # Room

    def _work(self) -> list[tuple[DraftedText, int]]:
        """The sequences of the next step, and how many tokens of each. All have pages for them."""
        self._ranks = ranks(self._sequences.values(), self._clock() - REST_S)
        wanting = [sequence for sequence in self._sequences.values() if sequence.wanted]
        wanting.sort(key=self._rank)
        wanting = in_turn([sequence for sequence in wanting if self._has_room(sequence)], self._sequences.values())
        # whoever got room may have taken it from another that had some
        able = [(one, one.wanted) for one in wanting if not (one.refused or self._asks(one))]
        near = [(sequence, count) for sequence, count in able if count <= _NEAR]
        far = [(sequence, count) for sequence, count in able if count > _NEAR]
        work, budget = [], self._budget
        for sequence, count in near[: self._most - bool(far)]:
            if count <= budget:
                work.append((sequence, count))
                budget -= count
        budget = min(budget, self._slice(_BESIDE_S if work else _ALONE_S))
        for sequence, count in far[: self._most - len(work)]:
            if budget:
                work.append((sequence, min(count, budget)))
                budget -= min(count, budget)
        return work

    def _slice(self, seconds: float) -> int:
        """Tokens of texts that are far behind that may be computed in that time."""
        if self._row_s is None:
            return _FIRST_SLICE
        return max(_LEAST_SLICE, round(min(seconds, self._budget * self._row_s) / self._row_s))

    def _learn(self, work: list[tuple[DraftedText, int]], took_s: float) -> None:
        """A step has taken so long. How long a row takes, steps with many of them tell."""
        rows = sum(count for _, count in work)
        if rows >= _LEAST_SLICE and took_s > 0:
            each = took_s / rows
            self._row_s = each if self._row_s is None else self._row_s + 0.25 * (each - self._row_s)

    def _rank(self, sequence: DraftedText) -> Rank:
        return self._ranks[sequence.id]

    def _has_room(self, sequence: DraftedText) -> bool:
        """Whether the sequence has pages for all its tokens, now or already: free ones, or those of others behind
        it."""
        new = not sequence.pages
        if new and not sequence.refused:
            self._share(sequence)
        need = self._missing(sequence)
        if need > self._pool.free and not self._make_room(sequence, need):
            if not sequence.refused:
                self._refuse(sequence)
            return False
        if sequence.refused:  # there is room for it now, even if it shares nothing
            sequence.refused = False
            self._share(sequence)
        if new:
            self._reused += sequence.computed
            self._offer(sequence, 0)
        need = self._missing(sequence)
        if need > 0:
            sequence.pages += self._pool.allocate(sequence.owner, need)
            sequence.version += 1
        return True

    def _missing(self, sequence: DraftedText) -> int:
        """Pages that it lacks for all its tokens."""
        positions = max(len(sequence.tokens), sequence.most)
        return -(-positions // self._block_size) - len(sequence.pages)

    def _share(self, sequence: DraftedText) -> None:
        """Uses the leading blocks that are there already. The last token is always computed."""
        sequence.chain.cover(sequence.tokens[: sequence.told])
        keys = sequence.chain.keys[: (sequence.told - 1) // self._block_size]
        pages: list[int] = []
        for key in keys:
            page = self._pool.find(key)
            if page is None:
                break
            pages.append(page)
        self._pool.share(sequence.owner, pages)
        sequence.pages, sequence.named, sequence.asked = pages, len(pages), len(pages)
        sequence.computed = len(pages) * self._block_size
        sequence.version += 1

    def _name(self, sequence: DraftedText) -> None:
        """Lets others use the full blocks of what was told."""
        whole = min(sequence.computed, sequence.told) // self._block_size
        if whole <= sequence.named:
            return
        chain = sequence.chain
        chain.cover(sequence.tokens[: sequence.told])
        for block in range(sequence.named, whole):
            first_token = block * self._block_size
            self._pool.name(
                sequence.pages[block], chain.keys[block], chain.parent(block), first_token, namespace=chain.root
            )
        sequence.named = whole

    # The store

    def stored(self, blocks: DraftBlocks, count: int) -> None:
        """The first `count` of blocks that were lacking are in their pages now; the others will not come."""
        self.give_back(blocks)
        sequence = self._sequences.get(blocks.id)
        if sequence is None or sequence.lacking is not blocks:
            return
        sequence.lacking = None
        sequence.computed += count * self._block_size
        self._fetched += count * self._block_size
        self._name(sequence)
        assert self._exchange is not None
        self._exchange.came(blocks.keys[:count])

    def give_back(self, blocks: DraftBlocks) -> None:
        """Nobody reads these blocks any more, or writes to their pages."""
        assert self._exchange is not None, "there is a store"
        self._exchange.give_back(blocks)

    def _asks(self, sequence: DraftedText) -> bool:
        """Whether the sequence is about to compute blocks that the store may have; it waits for them then."""
        end = (sequence.told - 1) // self._block_size
        new = sequence.computed == sequence.asked * self._block_size and end - sequence.asked >= _LEAST_BLOCKS
        if not new or self._exchange is None or not sequence.terms.owner:
            return False
        sequence.chain.cover(sequence.tokens[: sequence.told])
        sequence.lacking = self._blocks(self._exchange.holder(), sequence, sequence.asked, end)
        sequence.asked = end
        self._exchange.lack(sequence.lacking)
        return True

    def _offer(self, sequence: DraftedText, first: int) -> None:
        """The named blocks from `first` on are used: the store may take them."""
        if first < sequence.named and self._exchange is not None and sequence.terms.owner:
            self._exchange.offer(self._blocks(self._exchange.holder(), sequence, first, sequence.named))

    def _blocks(self, holder: str, sequence: DraftedText, first: int, end: int) -> DraftBlocks:
        """Those from `first` to `end`, for which the sequence has pages."""
        return DraftBlocks(
            id=sequence.id,
            holder=holder,
            terms=sequence.terms,
            first=first,
            parent=sequence.chain.parent(first),
            keys=sequence.chain.keys[first:end],
            pages=sequence.pages[first:end],
            block_s=(self._row_s or 0.0) * self._block_size,
        )

    # Room for others

    def _make_room(self, sequence: DraftedText, need: int) -> bool:
        """Takes `need` pages from sequences behind this one, the last first; none where these have too few."""
        own = self._rank(sequence)
        others = sorted((other for other in self._sequences.values() if other.pages), key=self._rank, reverse=True)
        behind = [other for other in others if self._rank(other) > own]
        theirs = Counter(page for other in behind for page in other.pages)
        freed = sum(self._pool.holds(page) == holds for page, holds in theirs.items())  # those that nobody else holds
        if need > self._pool.free + freed:
            return False
        for other in behind:
            if need > self._pool.free:
                self._evicted += 1
                self._refuse(other)
        return True

    def _refuse(self, sequence: DraftedText) -> None:
        """There is no room for the sequence: it gets no guesses until there is."""
        self._free(sequence)
        sequence.refused = True
        self._refusals += 1
        self._refused.append(sequence.id)

    def _free(self, sequence: DraftedText) -> None:
        self._pool.release(sequence.owner, sequence.pages)
        sequence.pages, sequence.computed, sequence.named = [], 0, 0
        sequence.asked, sequence.lacking = 0, None

    # A step

    def _due(self, began: float, now: float) -> list[DraftLead]:
        """The guesses to hand out after a step that `began` then: all, if some sequence has what it wants, or if they
        have been kept back for long enough."""
        kept = [sequence for sequence in self._sequences.values() if len(sequence.tokens) > sequence.given]
        if kept and self._kept_since is None:
            self._kept_since = began
        ready = any(not sequence.guesses for sequence in kept)
        if self._kept_since is None or not (ready or now - self._kept_since >= _TOGETHER_S):
            return []
        self._kept_since, leads = None, []
        for sequence in kept:
            leads.append(DraftLead(sequence.id, sequence.after, sequence.given, sequence.tokens[sequence.given :]))
            sequence.given = len(sequence.tokens)
        return leads

    def _run(self, sequence: DraftedText, count: int) -> Run:
        table = sequence.owner, sequence.version
        return Run(sequence.choice, sequence.computed, count, sequence.pages, table)

    def _answers(self, runs: Sequence[Run]) -> Sequence[list[Chosen] | EngineError]:
        """The answer to each run; a step that fails is tried again in halves, as the engine does it."""
        try:
            return self._runner.step(runs) if runs else []
        except EngineError as error:
            if len(runs) == 1:
                _log.warning("no drafts for %s: %s", runs[0].table[0], error)
                return [error]
        half = len(runs) // 2
        return [*self._answers(runs[:half]), *self._answers(runs[half:])]

    def _take(self, sequence: DraftedText, count: int, answer: list[Chosen] | EngineError) -> None:
        """A step has computed `count` tokens of the sequence, and given the answer."""
        if isinstance(answer, EngineError):
            if sequence.choice.guide is None:
                self._pool.forget(sequence.pages)  # they may be damaged
                self._give_up(sequence)
            else:
                sequence.over = True  # what was guessed, or forced, has left the grammar
                self._refused.append(sequence.id)
            return
        self._computed += max(0, min(count, sequence.told - sequence.computed))
        sequence.computed += count
        before = sequence.named
        self._name(sequence)
        self._offer(sequence, before)
        if answer and sequence.guesses:
            token = answer[0].token
            sequence.tokens.append(token)
            sequence.over = token in sequence.terms.stops
            self._guess_forced(sequence)


def _choice(sequence: DraftedText) -> Choice:
    """How the next token is chosen, for a sequence without guesses."""
    return next_choice(sequence.terms, sequence.rules, sequence.tokens, SamplerState())
