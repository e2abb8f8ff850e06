"""The interfaces between the engine and the rest of a worker: sources and sinks of KV, and drafters.

Everything here runs on the engine's event loop. Contents of pages are opaque bytes, one block per page, in the
layout that `Engine.spec` names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from penstock.engine.request import SamplingParams, TokenOut, Update
from penstock.kv.device.memory import DeviceView

Source = memoryview | DeviceView
"""A block's bytes: in host memory, or on the engine's device."""
Copy = Callable[[int, memoryview], bool]
"""Copies the block with that index of the call, from host memory; False: it is not intact."""


class PageWriter(Protocol):
    """Write access to the leading pages of one sequence that is being loaded."""

    @property
    def block_size(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    async def write(self, first_block: int, blocks: Sequence[Source], copy: Copy | None = None) -> int:
        """Copies `blocks` (each `block_bytes` long) to the pages from `first_block` on; the buffers may be reused
        when the call is over. With `copy` that one copies those in host memory, in order and maybe in a thread; the
        write ends before the first that is not intact. Blocks on the device come first, and are copied here.

        Blocks are written from 0 upward; a block that was written before may be written again. Returns how many
        blocks were stored: fewer than given when the pool is short or one was not intact, 0 when the load has been
        given up or its pages were needed elsewhere (a late write changes no page). ValueError for a block of another
        length, for one that leaves a gap, and for one that is shared.
        """
        ...

    async def take(self, first_block: int, blocks: int, within_s: float | None = None) -> int:
        """Takes the blocks from `first_block` up to the first `blocks` from pages of this engine, where other sequences
        left them, up to the first that is not there; returns how many. They need not be written. Waits while another
        source writes them, for `within_s` seconds at most; the caller is taken to write the rest, until it calls
        `settled`."""
        ...

    def settled(self, blocks: int) -> None:
        """Says that the first `blocks` blocks are intact: others may share them, and nobody writes them again. More
        will not come before the next `take`."""
        ...


@runtime_checkable
class PartedWriter(PageWriter, Protocol):
    """A PageWriter for blocks of which the far part may be enough, see penstock.kv.parts."""

    async def write(self, first_block: int, blocks: Sequence[Source], copy: Copy | None = None, *, far: int = 0) -> int:
        """As PageWriter. Of the first `far` of `blocks`, as far as they are in host memory, `copy` copies the far part
        alone. It is for the source to see that the prefix ends where that is enough: see `lacking`."""
        ...

    def far_is_enough(self, blocks: int) -> None:
        """Says of how many leading blocks it is, from now on: `take` takes pages that have nothing else, too."""
        ...

    def lacking(self, blocks: int) -> int:
        """The first block whose near part is not there and would be looked at, if the prefix ended behind so many
        blocks; `blocks` when there is none."""
        ...

    def give_back(self, first_block: int) -> None:
        """Gives back the pages from that block on, which can be written or taken anew."""
        ...


@dataclass(frozen=True, slots=True)
class LoadResult:
    valid_tokens: int
    """Leading tokens of prompt + output whose KV is in the written pages; clamped to what can be used."""
    output: tuple[TokenOut, ...] = ()
    """Tokens that another worker sampled after `Request.output`. They count, and are not emitted again."""
    cached_tokens: int = 0
    """The number that `Update.cached_tokens` reports."""
    stored_blocks: int | None = None
    """Leading blocks that the sink need not know of; None: all that are valid."""
    waited_s: float = 0.0
    """Seconds of the load that passed until others had computed something: asking again would not take as long."""


class KvSource(Protocol):
    async def load(self, pages: PageWriter) -> int | LoadResult:
        """Fills pages and says how many leading tokens are valid (a bare int is also `cached_tokens`).

        Awaited before the sequence is scheduled, while others are computed; cancelled when the request is
        dropped. The engine logs any exception, ignores what was loaded and computes everything.
        """
        ...


@runtime_checkable
class PatientSource(KvSource, Protocol):
    """A source that may have more when its sequence has waited for a while."""

    async def load_more(self, pages: PageWriter) -> int | LoadResult:
        """As `load`; the sequence still has the pages that it had after the last call, and those that it took since."""
        ...


class PageRef(Protocol):
    """Keeps one page alive and unchanged until `release`, which may be called twice but must be called once."""

    @property
    def page(self) -> int:
        """The page's number; references of several sequences may have the same."""
        ...

    @property
    def sound(self) -> bool:
        """Whether the page is known to hold finite numbers only."""
        ...

    def view(self) -> memoryview:
        """The page's bytes, read-only; not to be used after `release`."""
        ...

    def read_into(self, destination: memoryview) -> None:
        """Copies the page's bytes; `destination` is `block_bytes` long. May be called from any thread."""
        ...

    def release(self) -> None:
        """Ends the reference; call it on the event loop only."""
        ...


class KvSink(Protocol):
    """Learns about finished KV, synchronously, after the step that computed it. Exceptions are logged, no more."""

    def filled(self, first_block: int, pages: Sequence[PageRef], tokens: Sequence[int]) -> None:
        """Blocks `first_block`... are full and final, each reported once; blocks that a source loaded are not.

        `tokens` are those of prompt and output so far (shared: it grows after the call), of which block i holds
        tokens[i * block_size : (i + 1) * block_size]. The sink owns the references and releases each.
        """
        ...

    def finished(self, valid_tokens: int, tail: PageRef | None) -> None:
        """The sequence ended normally with KV for its first `valid_tokens` tokens, all full blocks reported.

        `tail` is the partly filled last page, None when there is none; the sink releases it.
        """
        ...


@runtime_checkable
class PartedSink(KvSink, Protocol):
    """A sink of blocks of which the far part may be enough, see penstock.kv.parts."""

    def passed(self, first_block: int, blocks: int, tokens: Sequence[int]) -> None:
        """So many blocks from `first_block` on are used of which the far part alone is here, as a source had brought it
        once; `filled` does not report them. `tokens` as there."""
        ...


@runtime_checkable
class PunctualSink(KvSink, Protocol):
    """A sink that others wait for."""

    def set_back(self) -> None:
        """The sequence has lost its pages: what it has not reported comes later than it would have, or never."""
        ...


class Pending(Protocol):
    """The tokens of one request that nobody has taken yet."""

    @property
    def more(self) -> bool:
        """Whether there is something for `passed`."""
        ...

    def passed(self) -> Update:
        """Takes them, while there is `more`: see Update. The last update is the reader's, and so is any error."""
        ...


Relay = Callable[[Pending], None]
"""Hears, after each step, that a request has tokens. It takes them then or later, those of several steps at once, and
spares the request's reader one wake per token."""


@dataclass(frozen=True, slots=True)
class DraftTerms:
    """What a sequence's output keeps to, for whoever guesses how it goes on."""

    sampling: SamplingParams
    prompt: int
    """Leading tokens of the sequence that are no output."""
    stops: frozenset[int]
    """Tokens that end the output."""
    owner: bytes = b""
    """Whose it is: what was computed for one owner is used for no other."""
    session: bytes = b""
    """Names the session to whoever keeps what was computed."""
    seal: bytes = field(default=b"", repr=False)
    """With which that one seals it."""


MOST_STATES = 32
"""Tokens of a text with whose states a head begins, or goes on after a rest, at most: the last ones. What lies before
them it does not see, as it doesn't see what other workers have computed."""


@dataclass(frozen=True, slots=True)
class DraftStates:
    """What the model's layers said of consecutive tokens of a sequence."""

    begin: int
    """Position of the first token."""
    rows: Sequence[bytes]
    """Of each token, its hidden states after some layers: bfloat16, little-endian."""

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return self.begin + len(self.rows)


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """Says how far a sequence is, and asks for `k` tokens beyond that; 0: for none until told anew."""

    id: str
    tokens: Sequence[int]
    """Prompt and output so far. Shared, not copied: it only grows, and does so after the call."""
    k: int
    terms: DraftTerms
    """The same whenever the sequence is told of."""
    states: DraftStates | None = None
    """Those that there are since the last ask, for a drafter that guesses from them. Without those of the last token
    but one it guesses nothing."""


class Drafter(Protocol):
    """Guesses how sequences go on, ahead of what it is told. Nothing here raises, or waits but for `arrived`."""

    def tell(self, asks: Sequence[DraftAsk]) -> None:
        """Says how far the sequences are, and how many tokens beyond that are wanted. The first time is best before the
        first token is wanted, with k = 0, so that the drafter can get ready."""
        ...

    def ahead(self, id: str, length: int) -> Sequence[int]:
        """Drafts at hand that go on from the sequence's first `length` tokens as they were told last; () when there are
        none, or when those at hand began from other tokens."""
        ...

    def judged(self, id: str) -> tuple[int, int]:
        """How many of its drafts have met the text that it was told since the last call: right ones behind right ones,
        and wrong ones."""
        ...

    @property
    def delay_s(self) -> float:
        """Seconds from when a text has gone another way to the first drafts for it, as learned."""
        ...

    def expected(self, id: str, count: int = 1) -> float:
        """Seconds by which `count` drafts for what was told last should be there, as learned: 0.0 when they are, inf
        when they are not to be expected."""
        ...

    async def arrived(self) -> None:
        """Returns when any drafts have come since the last call."""
        ...

    def forget(self, id: str) -> None:
        """Notes that the sequence has ended, so that the drafter can free its state."""
        ...
