"""Modelled workers: prompts one after the other, streams together, both at speeds that are constant between events."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from penstock.router.workers import StepCost


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModel:
    """How fast a worker is and what it holds. Rates are those that `penstock bench` measures."""

    prefill_rate: float = 5_000.0
    """Tokens of prompts per second, with nothing else to do and no context before them."""
    prefill_context_s: float = 0.0
    """Seconds that each token of the context before it adds to a token of a prompt."""
    step: StepCost = field(default_factory=lambda: StepCost(0.02, 0.0003, 2e-8))
    itl_target_s: float = 0.05
    """A step with streams and prompts takes so long, if one with streams alone takes less."""
    max_running: int = 64
    kv_tokens: int = 1_000_000
    """Of context, in its own pages: those of prompts that were here stay until others need them."""
    max_model_len: int = 1_000_000
    fetch_rate: float = 1e9
    """Bytes per second from the store of its host."""
    remote_rate: float = 2e8
    """Likewise by way of another host's store."""

    def prefill_s(self, cached: int, tokens: int) -> float:
        """Seconds to compute a prompt of so many tokens, of which the first ones are cached."""
        context = (tokens * tokens - cached * cached) / 2
        return (tokens - cached) / self.prefill_rate + context * self.prefill_context_s


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt that is to be computed."""

    expected: float
    """Tokens, as was thought when it came."""
    begin: Callable[[], float]
    """Called when it is the first: tokens, and as many more as its fetch takes as long as."""
    done: Callable[[], None]
    left: float | None = None
    """None: it has not begun."""


@dataclass(slots=True, eq=False)
class Stream:
    """An answer that is being generated."""

    left: float
    """Tokens."""
    context: int
    done: Callable[[], None]


@dataclass(slots=True, eq=False)
class ModelledWorker:
    """One worker. Its owner calls `advance` before it looks or changes anything, and asks `due` when to look again."""

    model: WorkerModel
    prompts: deque[Prompt] = field(default_factory=deque)
    """The first one is being computed."""
    streams: list[Stream] = field(default_factory=list)
    waiting: deque[Stream] = field(default_factory=deque)
    """Those that have no place in the batch."""
    _at: float = 0.0

    @property
    def step_s(self) -> float:
        """Of a step as things are."""
        model = self.model
        alone = model.step.seconds(len(self.streams), sum(stream.context for stream in self.streams))
        return max(alone, model.itl_target_s) if self.prompts else alone

    @property
    def prompt_rate(self) -> float:
        """Tokens of the first prompt per second, as things are."""
        if not self.streams:
            return self.model.prefill_rate
        alone = self.model.step.seconds(len(self.streams), sum(stream.context for stream in self.streams))
        return self.model.prefill_rate * max(0.1, 1 - alone / self.model.itl_target_s)

    def advance(self, now: float) -> list[Callable[[], None]]:
        """Does the work until `now`, which is not after `due`; returns what to tell of what ended."""
        passed, self._at = now - self._at, now
        ended: list[Callable[[], None]] = []
        step_s, rate = self.step_s, self.prompt_rate
        first = self.prompts[0] if self.prompts else None
        if first is not None and first.left is not None:
            first.left -= passed * rate
            if first.left <= 1e-6:
                ended.append(self.prompts.popleft().done)
        for stream in self.streams:
            stream.left -= passed / step_s
        over = [stream for stream in self.streams if stream.left <= 1e-6]
        if over:
            ended += [stream.done for stream in over]
            self.streams = [stream for stream in self.streams if stream.left > 1e-6]
        if self.prompts and self.prompts[0].left is None and not ended:
            self.prompts[0].left = self.prompts[0].begin()
        while self.waiting and len(self.streams) < self.model.max_running:
            self.streams.append(self.waiting.popleft())
        return ended

    def due(self) -> float:
        """When the next thing ends, if nothing comes."""
        first = self.prompts[0].left if self.prompts else None
        prompt_s = inf if first is None else first / self.prompt_rate
        stream_s = min((stream.left for stream in self.streams), default=inf) * self.step_s if self.streams else inf
        return self._at + max(0.0, min(prompt_s, stream_s))

    @property
    def queued(self) -> float:
        """Tokens of prompts that are still to be computed."""
        return sum(prompt.expected if prompt.left is None else prompt.left for prompt in self.prompts)

    @property
    def held(self) -> int:
        """Tokens of context."""
        return sum(stream.context for stream in (*self.streams, *self.waiting))


class ModelledStore:
    """The blocks of one host, or of one worker's pages, the longest unused of which go first."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: blocks."""
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def depth(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks it has."""
        return next((number for number, key in enumerate(keys) if key not in self._blocks), len(keys))

    def store(self, keys: Iterable[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Takes or uses blocks, the end of the chain first, so that it goes first too. Returns those that came, and
        those that went."""
        came = []
        for key in reversed([*keys]):
            if key in self._blocks:
                self._blocks.move_to_end(key)
            else:
                self._blocks[key] = None
                came.append(key)
        went = [self._blocks.popitem(last=False)[0] for _ in range(max(0, len(self._blocks) - self._capacity))]
        return came, went
