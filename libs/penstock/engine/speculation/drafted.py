"""One text that a draft model guesses on, and its place among the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from penstock.engine.hooks import DraftTerms
from penstock.engine.rules import FREE, TextRules
from penstock.engine.sampling.choice import Choice, SamplerState
from penstock.engine.speculation.leads import DraftBlocks, SequenceId
from penstock.grammar.guide import Guide
from penstock.grammar.matcher import GrammarLeft
from penstock.kv.identity import Chain

REST_S = 2.0
"""Seconds without a wish after which a sequence gives way to any that has one."""


@dataclass(eq=False, slots=True, kw_only=True)
class DraftedText:
    """One sequence: the KV of the first `computed` of its tokens is in `pages`."""

    id: SequenceId
    owner: str
    """Its name in the page pool; with a number that grows from sequence to sequence."""
    born: int
    terms: DraftTerms
    rules: TextRules = FREE
    tokens: list[int] = field(default_factory=list)
    """As told, and the guesses behind that."""
    told: int = 0
    """How many of them were told."""
    most: int = 0
    """How many there may be."""
    rested: float | None = None
    """Since when no token is wanted; None: some are."""
    after: int = 0
    """Number of what was told when the guesses began."""
    given: int = 0
    """Leading tokens that were told, or handed out."""
    pages: list[int] = field(default_factory=list)
    version: int = 0
    computed: int = 0
    chain: Chain
    """Names the full blocks of what was told."""
    named: int = 0
    """Leading blocks whose pages have their keys, or are shared: nobody writes to them."""
    asked: int = 0
    """Leading blocks of which it is settled whether the store has them."""
    lacking: DraftBlocks | None = None
    """What it waits for: the store may have it."""
    choice: Choice
    """Refers to `tokens`; made anew whenever the text goes another way than was guessed."""
    waits: bool = False
    """For its rules."""
    over: bool = False
    """There is nothing to guess behind the last token: the text ends, or is not what its grammar allows."""
    refused: bool = False
    """There is no room for it now."""
    unfit: bool = False
    """There will be no guesses: the text is too long, has tokens that this model doesn't know, or can't be computed."""
    served: int = 0
    """Number of its last turn: in a step each sequence has one, and the number grows from one to the next."""

    @property
    def guesses(self) -> bool:
        """Whether it is to be guessed on."""
        return not (self.over or self.waits) and len(self.tokens) < self.most

    @property
    def wanted(self) -> int:
        """Tokens to compute. The last one that was told can wait until guesses are wanted."""
        if self.unfit or self.lacking is not None:
            return 0
        return len(self.tokens) - self.computed if self.guesses else max(0, self.told - 1 - self.computed)


Rank = tuple[bool, int, int]
"""Who comes before whom where there is not room for all: first who has no rest, then, in turn, the oldest of each
tenant."""


class ToldText(Protocol):
    """A text that somebody was told of, and may want guesses for."""

    id: SequenceId
    born: int
    terms: DraftTerms
    rested: float | None
    served: int


AnyTold = TypeVar("AnyTold", bound=ToldText)


def ranks(texts: Iterable[ToldText], rested: float) -> dict[SequenceId, Rank]:
    """The rank of each text. One that has wanted nothing since `rested`, or longer, has its rest."""
    found: dict[SequenceId, Rank] = {}
    before = Counter[tuple[bytes, bool]]()
    for text in sorted(texts, key=lambda text: text.born):
        rests = text.rested is not None and text.rested <= rested
        tenant = text.terms.owner, rests
        found[text.id] = rests, before[tenant], text.born
        before[tenant] += 1
    return found


def in_turn(texts: Sequence[AnyTold], all: Collection[AnyTold]) -> list[AnyTold]:
    """The texts in the order in which they are served, of `all` that there are: tenants take turns, and the texts of
    each, the least recently served first."""
    last: dict[bytes, int] = {}
    for text in all:
        last[text.terms.owner] = max(last.get(text.terms.owner, 0), text.served)
    before, placed = Counter[bytes](), list[tuple[int, int, AnyTold]]()
    for text in sorted(texts, key=lambda text: text.served):
        tenant = text.terms.owner
        placed.append((before[tenant], last[tenant], text))
        before[tenant] += 1
    return [text for *_, text in sorted(placed, key=lambda place: place[:2])]


def next_choice(terms: DraftTerms, rules: TextRules, tokens: Sequence[int], state: SamplerState) -> Choice:
    """How the target chooses what follows the tokens; `state` is the sampler's of this text."""
    guide = _led(rules.guide, tokens)
    return Choice(terms.sampling, terms.stops, tokens, terms.prompt, (), state, guide=guide, words=rules.words)


def _led(guide: Guide | None, tokens: Sequence[int]) -> Guide | None:
    """A copy of the guide, to be led on from the end of `tokens`; None where they left the grammar."""
    if guide is None:
        return None
    try:
        guide.follow(tokens)
    except GrammarLeft:
        guide.restart()  # it is of no more use where it is
        return None
    return guide.copy()


def fitting(terms: DraftTerms, vocab_size: int) -> DraftTerms:
    """The terms without tokens that a model of so many doesn't know."""
    sampling = terms.sampling
    known = replace(
        sampling,
        logit_bias={token: bias for token, bias in sampling.logit_bias.items() if token < vocab_size},
        banned_token_ids=frozenset(token for token in sampling.banned_token_ids if token < vocab_size),
        logprobs=None,
    )
    return replace(terms, sampling=known, stops=frozenset(token for token in terms.stops if token < vocab_size))
