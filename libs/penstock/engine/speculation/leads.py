"""What a model that drafts hears and says. Plain values, importable without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from penstock.engine.hooks import DraftStates, DraftTerms
from penstock.engine.rules import TextRules

SequenceId = tuple[int, int]
"""Of a stream, and of a sequence in it."""


@dataclass(frozen=True, slots=True)
class DraftTold:
    """How far a sequence is: its first `keep` tokens as they were told before, then `tokens`."""

    id: SequenceId
    number: int
    """Grows from one to the next."""
    keep: int
    tokens: Sequence[int]
    k: int
    """Tokens wanted beyond these."""
    terms: DraftTerms | None = None
    """With the first of a sequence."""
    ruled: bool = False
    """With the first of a sequence: rules will follow, and no token is guessed before."""
    states: DraftStates | None = None
    """New ones, for a model that guesses from what the target's layers said."""


@dataclass(frozen=True, slots=True)
class DraftLead:
    """Guesses behind a sequence. Those with the same `after` follow each other without gaps."""

    id: SequenceId
    after: int
    """Number of what was told when these guesses began: they go on from its text."""
    length: int
    """Tokens of that text, and guesses handed out before these."""
    tokens: Sequence[int]


Move = Literal["named", "stored", "forgotten"]
BlockMove = tuple[bytes, Move]
"""A block's key, and that a page holds it from now on, that this was so because a store had it, or that none does."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DraftBlocks:
    """Consecutive blocks of a text, in pages that are held until the model gets this back."""

    id: SequenceId
    holder: str
    """Of the pages."""
    terms: DraftTerms
    """Of the text."""
    first: int
    """Number of the first block."""
    parent: bytes
    """Key of the block before that."""
    keys: Sequence[bytes]
    pages: Sequence[int]
    """Of each block."""
    block_s: float
    """Seconds to compute one of them; 0: unknown."""


@dataclass(frozen=True, slots=True)
class DraftBlockNews:
    """What has become of blocks since the last step."""

    lacking: Sequence[DraftBlocks] = ()
    """Blocks that a store may have; their sequences wait for `stored`."""
    full: Sequence[DraftBlocks] = ()
    """Blocks that are used, and that a store may take; until they are given back nobody writes to their pages."""
    moves: Sequence[BlockMove] = ()
    """In order."""


@dataclass(frozen=True, slots=True)
class DraftStep:
    """What one step has given."""

    leads: list[DraftLead] = field(default_factory=list)
    refused: list[SequenceId] = field(default_factory=list)
    """Sequences for which there are no more guesses, until there are."""
    worked: bool = False
    """Whether there was anything to compute; else the next step waits for news."""
    blocks: DraftBlockNews = DraftBlockNews()

    @property
    def says(self) -> bool:
        """Whether anybody is to hear of it."""
        news = self.blocks
        return bool(self.leads or self.refused or news.lacking or news.full or news.moves)


@dataclass(frozen=True, slots=True)
class DraftDropped:
    """Blocks that nobody finds any more."""

    blocks: int = 0
    bytes: int = 0
    in_use: int = 0
    """Those of them that sequences use until they are over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStats:
    """Statistics of one draft model. Counts are since the start."""

    computed: int = 0
    """Tokens that were told, whose KV was computed."""
    reused: int = 0
    """Those whose KV was in pages."""
    fetched: int = 0
    """Those whose KV came from the store."""
    sequences: int = 0
    pages: int = 0
    """For KV; of a head, room for so many sequences."""
    free_pages: int = 0
    """That no sequence has."""
    dropped: int = 0
    """Guesses of which the text went another way."""
    evicted: int = 0
    """Times that a sequence lost its KV to another."""
    refused: int = 0
    """Times that a sequence got no guesses for lack of room."""


class Foresight(Protocol):
    """Guesses ahead for many sequences. Synchronous; one thread at a time."""

    def begin(self) -> None:
        """Called first, in the thread that calls the rest."""
        ...

    def tell(self, told: DraftTold) -> None:
        """Takes in how far a sequence is; of one that it does not know nothing but the first."""
        ...

    def rule(self, id: SequenceId, rules: TextRules) -> None:
        """Here are the rules that were announced for the sequence."""
        ...

    def forget(self, id: SequenceId) -> None:
        """Frees everything kept for a sequence; does nothing for an unknown one."""
        ...

    def drop(self, owner: bytes) -> DraftDropped:
        """Has nobody find any more what was computed for an owner."""
        ...

    def step(self) -> DraftStep:
        """Computes one step, for all sequences that want one."""
        ...

    def stored(self, blocks: DraftBlocks, count: int) -> None:
        """The first `count` of blocks that were lacking are in their pages now; the others will not come."""
        ...

    def give_back(self, blocks: DraftBlocks) -> None:
        """Nobody reads these full blocks any more."""
        ...

    def clear(self) -> None:
        """Forgets all sequences. Pages that others hold stay theirs until they give them back."""
        ...

    def stats(self) -> DraftStats:
        """Now."""
        ...
