"""A draft head that guesses for the sequences of others, which tell it what the target's layers say."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.checkpoint import EMBEDDING, Checkpoint, HeadCheckpoint
from penstock.engine.config import EngineConfig
from penstock.engine.forward.model import set_threads
from penstock.engine.hooks import DraftTerms
from penstock.engine.layers.embedding import Embedding, StoredTable
from penstock.engine.rules import FREE, TextRules
from penstock.engine.sampling.choice import Choice, SamplerState
from penstock.engine.speculation.drafted import REST_S, fitting, in_turn, next_choice, ranks
from penstock.engine.speculation.guess import Guess
from penstock.engine.speculation.head.guessing import HeadAsk, HeadGuesser, HeadView
from penstock.engine.speculation.head.model import ROOM, HeadModel
from penstock.engine.speculation.head.watched import features_of
from penstock.engine.speculation.leads import (
    DraftBlocks,
    DraftDropped,
    DraftLead,
    DraftStats,
    DraftStep,
    DraftTold,
    SequenceId,
)


@dataclass(eq=False, slots=True)
class _Text:
    """One sequence, as far as it was told."""

    id: SequenceId
    born: int
    terms: DraftTerms
    tokens: list[int] = field(default_factory=list)
    view: HeadView = field(default_factory=HeadView)
    rules: TextRules = FREE
    state: SamplerState = field(default_factory=SamplerState)
    number: int = 0
    """Of what was told last."""
    k: int = 0
    """Tokens wanted behind that; 0: none, or it was guessed."""
    waits: bool = False
    """For its rules."""
    unfit: bool = False
    """There will be no guesses: the text is too long, or has tokens that the target doesn't know."""
    rested: float | None = None
    """Since when no token is wanted; None: some are, or were last."""
    served: int = 0
    """Number of its last turn."""

    @property
    def ready(self) -> bool:
        """Whether it is to be guessed on, and can be."""
        return self.k > 0 and not (self.waits or self.unfit) and self.view.ready(len(self.tokens))

    @property
    def choice(self) -> Choice:
        """How the target chooses what comes next."""
        return next_choice(self.terms, self.rules, self.tokens, self.state)


class HeadForesight:
    """Guesses with a head. Raises CheckpointError when its weights, or the target's embeddings, can't be read.

    A head guesses behind a text of all but whose last token it has states: so it guesses once each time that a sequence
    is told of, and does not run ahead. One call serves all sequences that want guesses, `max_running` at most; owners
    take turns, and the sequences of each. It has rows of its own for as many sequences as `kv_pool_tokens` hold; where
    they are more, those that want nothing lose theirs, then the youngest, as in a DraftModel. What is told may be
    wrong: numbers that are not finite are left out. Not thread-safe: one thread at a time.
    """

    def __init__(
        self,
        config: EngineConfig,
        target: Checkpoint,
        head: HeadCheckpoint,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`head` is one for `target`. `clock` gives seconds."""
        self.checkpoint, self.head = target, head
        shape, device = target.config, torch.device(config.device)
        embedding = Embedding(StoredTable(target.tensors[EMBEDDING]), torch.float32, shape.embedding_scale)

        def embed(ids: Tensor) -> Tensor:
            return embedding.rows(ids).to(device)

        self._limit = shape.max_positions
        self._guesser = HeadGuesser(HeadModel(self.head, embed, self._limit, device), device)
        self._device = device
        self._most = config.max_running
        self._most_views = max(1, config.kv_pool_tokens // ROOM)
        self._threads = config.threads
        self._clock = clock
        self._texts: dict[SequenceId, _Text] = {}
        self._refused: list[SequenceId] = []
        """Since the last step."""
        self._made = self._turns = self._computed = self._evicted = self._refusals = 0

    def begin(self) -> None:
        """Called first, in the thread that calls the rest."""
        set_threads(self._threads)

    def tell(self, told: DraftTold) -> None:
        """Takes in how far a sequence is; the first time with its terms."""
        text = self._texts.get(told.id) or self._new(told)
        if text is None:
            return
        if told.keep < len(text.tokens):
            self._turn(text, told.keep)
        text.tokens += told.tokens
        text.number, text.k = told.number, max(0, min(told.k, self._limit - len(text.tokens)))
        if told.k:
            text.rested = None
        elif text.rested is None:
            text.rested = self._clock()
        if told.states is not None:
            self._watch(text, told.states.begin, features_of(told.states))
        strange = max(told.tokens, default=0) >= self.head.vocab_size
        if not text.unfit and (strange or len(text.tokens) >= self._limit):
            text.unfit, text.view = True, HeadView()
            self._refuse(text)

    def rule(self, id: SequenceId, rules: TextRules) -> None:
        """Here are the rules that were announced for the sequence."""
        text = self._texts.get(id)
        if text is not None:
            text.rules, text.waits = rules, False

    def forget(self, id: SequenceId) -> None:
        """Frees its rows."""
        self._texts.pop(id, None)

    def drop(self, owner: bytes) -> DraftDropped:
        """Nothing: what is computed for a sequence is used for no other, and goes with it."""
        return DraftDropped()

    def clear(self) -> None:
        """Forgets all sequences."""
        self._texts.clear()

    def stored(self, blocks: DraftBlocks, count: int) -> None:
        """It asks no store for blocks."""

    def give_back(self, blocks: DraftBlocks) -> None:
        """It gives none away."""

    def step(self) -> DraftStep:
        """Guesses once for each sequence that wants that and has its states."""
        texts, leads = self._chosen(), list[DraftLead]()
        for text, guess in zip(texts, self._guesses(texts), strict=True):
            self._turns += 1
            text.served, text.k = self._turns, 0
            if guess.tokens:
                leads.append(DraftLead(text.id, text.number, len(text.tokens), guess.tokens))
            else:
                self._refused.append(text.id)
        refused, self._refused = self._refused, []
        return DraftStep(leads, refused, bool(texts))

    def _guesses(self, texts: Sequence[_Text]) -> Sequence[Guess]:
        if not texts:
            return ()
        guesses = self._guesser.guess([HeadAsk(one.view, one.tokens, one.k, one.choice) for one in texts])
        self._computed += self._guesser.rows
        return guesses

    def stats(self) -> DraftStats:
        """Now."""
        held = sum(text.view.context.held for text in list(self._texts.values()))  # the thread may add some meanwhile
        return DraftStats(
            sequences=len(self._texts),
            pages=self._most_views,
            free_pages=self._most_views - held,
            computed=self._computed,
            evicted=self._evicted,
            refused=self._refusals,
        )

    def _new(self, told: DraftTold) -> _Text | None:
        """A sequence of which nothing is known yet; None where this is not the first that is told of it."""
        if told.terms is None or told.keep:
            return None
        self._made += 1
        terms = fitting(told.terms, self.head.vocab_size)
        self._texts[told.id] = text = _Text(told.id, self._made, terms, waits=told.ruled)
        return text

    def _turn(self, text: _Text, keep: int) -> None:
        """The text goes another way behind its first `keep` tokens."""
        del text.tokens[keep:]
        text.view, text.state = HeadView(), SamplerState()
        guide = text.rules.guide
        if guide is not None and guide.until > keep:
            guide.restart()

    def _watch(self, text: _Text, begin: int, features: Tensor) -> None:
        if features.isfinite().all():
            text.view.watch(begin, features.to(self._device))

    def _chosen(self) -> Sequence[_Text]:
        """The sequences of the next step. All have rows, or room for some."""
        ready = [text for text in self._texts.values() if text.ready]
        if not ready:
            return ()
        chosen = in_turn(ready, self._texts.values())[: self._most]
        new = [text for text in chosen if not text.view.context.held]
        holders = [text for text in self._texts.values() if text.view.context.held]
        if len(new) + len(holders) <= self._most_views:
            return chosen
        place = ranks([*holders, *new], self._clock() - REST_S)
        for text in sorted([*holders, *new], key=lambda text: place[text.id])[self._most_views :]:
            self._evicted += text.view.context.held
            text.view, text.k = HeadView(), 0
            self._refuse(text)
        return [text for text in chosen if text.k]

    def _refuse(self, text: _Text) -> None:
        self._refusals += 1
        self._refused.append(text.id)
