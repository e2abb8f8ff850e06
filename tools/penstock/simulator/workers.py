"""Modelled workers: steps that compute chunks of prompts, one prompt after the other, and a token of each stream.

How large the chunks are beside streams is what the engine's own code says. Where there are streams alone, or one prompt
alone, many steps are one event.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

from penstock.engine.scheduling.chunking import attainable_s, chunk_tokens, enough_tokens, patience, whole_tokens
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
    """A step with streams and one prompt takes so long, if one with streams alone takes less."""
    chunk_tokens: int = 512
    """Of prompts, in one step."""
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
    """Called when its first tokens are computed: tokens, and as many more as its fetch takes as long as."""
    done: Callable[[], None]
    context: int = 0
    """Tokens that it needs room for, with its answer where that is generated here."""
    keeps_room: bool = False
    """Its answer is generated here: a stream with room follows on it."""
    left: float | None = None
    """None: it has not begun."""
    place: int = 0
    """In the order in which prompts and streams have come."""


@dataclass(slots=True, eq=False)
class Stream:
    """An answer that is being generated."""

    left: float
    """Tokens."""
    context: int
    joined: Callable[[float], None]
    """Called when it has its place in the batch, with the seconds that it has waited for it: those until the end of the
    step in which it came are none."""
    done: Callable[[], None]
    has_room: bool = False
    """That of its prompt, which was computed here."""
    place: int = 0
    """As in Prompt."""
    lacks_since: float | None = None
    """When there was first no place for it; None: there always was."""


@dataclass(slots=True)
class _Step:
    """One that computes prompts, or several of the same prompt as long as nothing comes between."""

    begun: float
    until: float
    portions: list[tuple[Prompt, float]]
    """Tokens of each."""


@dataclass(slots=True, eq=False)
class ModelledWorker:
    """One worker. Its owner calls `advance` before and after it adds anything, and asks `due` when to look again.

    Prompts begin, and streams join the batch, in the order in which they came: who finds no room for its context is not
    passed by those behind it.
    """

    model: WorkerModel
    prompts: deque[Prompt] = field(default_factory=deque)
    """The first one is being computed."""
    streams: list[Stream] = field(default_factory=list)
    waiting: deque[Stream] = field(default_factory=deque)
    """Those that have no place in the batch, or came in the middle of a step."""
    _step: _Step | None = None
    _at: float = 0.0
    _places: Iterator[int] = field(default_factory=itertools.count)
    _no_room: float = inf
    """The place of the first prompt that has found no room."""
    _taken: int = 0
    """Tokens of context that have room."""
    _context: int = 0
    """Those of the batch."""
    _waiting_context: int = 0

    def add_prompt(self, prompt: Prompt) -> None:
        """A prompt comes."""
        prompt.place = next(self._places)
        self.prompts.append(prompt)

    def add_stream(self, stream: Stream) -> None:
        """A stream comes; one that has room is next."""
        stream.place = next(self._places)
        self._waiting_context += stream.context
        if stream.has_room:
            self.waiting.appendleft(stream)
        else:
            self.waiting.append(stream)

    @property
    def step_s(self) -> float:
        """Of a step with the streams alone."""
        return self.model.step.seconds(len(self.streams), self._context)

    def advance(self, now: float) -> list[Callable[[], None]]:
        """Does the work until `now`, which is not after `due`; returns what to tell of what ended."""
        passed, self._at = now - self._at, now
        step = self._step
        if step is not None and self.waiting and not self.streams:
            self._cut(step)
        if step is not None and now < step.until:
            return []
        ended: list[Callable[[], None]] = []
        if step is not None:
            self._step = None
            for prompt, tokens in step.portions:
                assert prompt.left is not None, "it has begun"
                prompt.left -= tokens
                if prompt.left <= 1e-6:
                    self.prompts.remove(prompt)
                    self._taken -= 0 if prompt.keeps_room else prompt.context
                    ended.append(prompt.done)
        steps = 1.0 if step is not None else passed / self.step_s if self.streams else 0.0
        for stream in self.streams:
            stream.left -= steps
        over = [stream for stream in self.streams if stream.left <= 1e-6]
        if over:
            ended += [stream.done for stream in over]
            self.streams = [stream for stream in self.streams if stream.left > 1e-6]
            freed = sum(stream.context for stream in over)
            self._taken -= freed
            self._context -= freed
        if self.waiting:
            self._join()
        if self.prompts and not ended:
            self._step = self._begin()
        return ended

    def due(self) -> float:
        """When the next thing ends, if nothing comes."""
        if self._step is not None:
            return self._step.until
        return self._at + max(0.0, min((stream.left for stream in self.streams), default=inf) * self.step_s)

    def _fits(self, tokens: int) -> bool:
        """Whether there is room for so many beside what has begun."""
        return not self._taken or self._taken + tokens <= self.model.kv_tokens

    def _join(self) -> None:
        """Streams join the batch."""
        waiting = self.waiting
        while waiting and len(self.streams) < self.model.max_running:
            head = waiting[0]
            if not head.has_room:
                if head.place > self._no_room or not self._fits(head.context):
                    break
                self._taken += head.context
            waiting.popleft()
            self._waiting_context -= head.context
            self._context += head.context
            self.streams.append(head)
            head.joined(0.0 if head.lacks_since is None else self._at - head.lacks_since)
        for late in reversed(waiting):
            if late.lacks_since is not None:
                break
            late.lacks_since = self._at

    def _may_begin(self, prompt: Prompt) -> bool:
        """Whether there is room for it, and nobody who waits for room was before it."""
        first = self.waiting[0] if self.waiting else None
        passes = first is None or first.has_room or first.place > prompt.place
        return passes and self._fits(prompt.context)

    def _begin(self) -> _Step | None:
        """The next step with prompts; None: there is no room for the first of them."""
        model, alone_s = self.model, self.step_s if self.streams else 0.0
        target_s, rate, most, whole = model.itl_target_s, model.prefill_rate, model.chunk_tokens, 0
        enough = enough_tokens(target_s, rate) or inf
        if self.streams:
            whole = whole_tokens(target_s, alone_s, rate, most)
            target_s = attainable_s(target_s, alone_s, rate) * patience(len(self.prompts), len(self.streams))
            most = chunk_tokens(target_s, alone_s, rate, most)
        left, portions, taken = float(most), list[tuple[Prompt, float]](), 0.0
        self._no_room = inf
        for prompt in self.prompts:
            if left <= 0:
                break
            if prompt.left is None:
                if not self._may_begin(prompt):
                    self._no_room = prompt.place
                    break
                self._taken += prompt.context
                prompt.left = prompt.begin()
                if not portions and left < prompt.left <= whole:
                    left = prompt.left
            if not portions and not self.streams and prompt.left > most:
                left = (ceil(prompt.left / most) - 1) * most  # whole chunks, in which nothing else finds room
            tokens = min(left, prompt.left)
            portions.append((prompt, tokens))
            left -= tokens
            taken += tokens
            if tokens == prompt.left and taken >= enough:
                break
        if not portions:
            return None
        took_s = alone_s + sum(tokens for _, tokens in portions) / model.prefill_rate
        return _Step(self._at, self._at + took_s, portions)

    def _cut(self, step: _Step) -> None:
        """A stream has come while chunks of a prompt follow each other: it begins with the next one."""
        [(prompt, tokens), *others] = step.portions
        chunk_s = self.model.chunk_tokens / self.model.prefill_rate
        if not others and tokens > self.model.chunk_tokens:
            done = ceil(max(1e-9, self._at - step.begun) / chunk_s) * self.model.chunk_tokens
            if done < tokens:
                step.portions, step.until = [(prompt, done)], step.begun + done / self.model.prefill_rate

    @property
    def queued(self) -> float:
        """Tokens of prompts that are still to be computed."""
        tokens = sum(prompt.expected if prompt.left is None else prompt.left for prompt in self.prompts)
        if self._step is not None and self._step.until > self._step.begun:
            part = (self._at - self._step.begun) / (self._step.until - self._step.begun)
            tokens -= part * sum(tokens for _, tokens in self._step.portions)
        return max(0.0, tokens)

    @property
    def held(self) -> int:
        """Tokens of context of all streams, those that wait too."""
        return self._context + self._waiting_context


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
