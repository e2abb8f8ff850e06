"""The interfaces between the engine and the rest of a worker: sources and sinks of KV, and drafters.

Everything here runs on the engine's event loop. Contents of pages are opaque bytes, one block per page, in the
layout that `Engine.spec` names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.engine.request import TokenOut
from penstock.kv.device.memory import DeviceView

if TYPE_CHECKING:
    from penstock.grammar.guide import Guide

Source = memoryview | DeviceView
"""A block's bytes: in host memory, or on the engine's device."""
Check = Callable[[int, memoryview], bool]
"""Whether the bytes are those of the block with that index in the call."""


class PageWriter(Protocol):
    """Write access to the leading pages of one sequence that is being loaded."""

    @property
    def block_size(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    async def write(self, first_block: int, blocks: Sequence[Source], check: Check | None = None) -> int:
        """Copies `blocks` (each `block_bytes` long) to the pages from `first_block` on; the buffers may be reused
        when the call is over. `check` sees every copy of host memory, in order and maybe in a thread; the write ends
        before the first that it refuses. Blocks on the device come first, and are not checked.

        Blocks are written from 0 upward; a block that was written before may be written again. Returns how many
        blocks were stored: fewer than given when the pool is short or `check` refused one, 0 when the load has been
        given up or its pages were needed elsewhere (a late write changes no page). ValueError for a block of another
        length or one that leaves a gap.
        """
        ...


@dataclass(frozen=True, slots=True)
class LoadResult:
    valid_tokens: int
    """Leading tokens of prompt + output whose KV is in the written pages; clamped to what can be used."""
    output: tuple[TokenOut, ...] = ()
    """Tokens that another worker sampled after `Request.output`. They count, and are not emitted again."""
    cached_tokens: int = 0
    """The number that `Update.cached_tokens` reports."""


class KvSource(Protocol):
    async def load(self, pages: PageWriter) -> int | LoadResult:
        """Fills pages and says how many leading tokens are valid (a bare int is also `cached_tokens`).

        Awaited before the sequence is scheduled, while others are computed; cancelled when the request is
        dropped. The engine logs any exception, ignores what was loaded and computes everything.
        """
        ...


class PageRef(Protocol):
    """Keeps one page alive and unchanged until `release`, which may be called twice but must be called once."""

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


@dataclass(frozen=True, slots=True)
class GrammarAsk:
    """What a sequence's output keeps to."""

    text: str
    """As in SamplingParams."""
    prompt: int
    """Leading tokens of the sequence that are no output."""
    ends: frozenset[int]
    """Tokens that end the output."""


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """Asks a drafter for `k` tokens of one sequence."""

    id: str
    tokens: Sequence[int]
    """Prompt and output so far. Shared, not copied: it grows after the call is over."""
    k: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    grammar: GrammarAsk | None = None
    guide: Guide | None = None
    """The way through the grammar, if the drafter follows it; then nobody else uses it while the ask is answered."""


class Drafter(Protocol):
    async def propose(self, asks: Sequence[DraftAsk]) -> Mapping[str, Sequence[int]]:
        """Up to `k` tokens for each ask; short or missing answers are fine."""
        ...

    def forget(self, id: str) -> None:
        """Notes that the sequence has ended, so that the drafter can free its state."""
        ...
