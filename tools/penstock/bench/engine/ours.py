"""Our engine in a process of its own, asked like the peers (see loadtest/peers/protocol.py).

Run by its path, not as a module: then nothing of the command line is imported, and time and memory are the engine's.
Requests are greedy and ignore end tokens. A prompt that is only there to be continued has its KV from a source that
answers zeros: what it holds does not change what a step costs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop  # what the workers run on

from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.hooks import DraftAsk, LoadResult, PageWriter
from penstock.engine.request import Request, SamplingParams
from penstock.kv.identity import Chain
from penstock.testing.drafters import InlineDrafter

_SLACK = 64
"""More tokens than are measured, for streams that begin earlier than the last."""
_DRAFTS = 4
_PAUSE_S = 0.001


class Zeros:
    """KV for all but the last token of a prompt."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    async def load(self, pages: PageWriter) -> LoadResult:
        """Fills the pages."""
        blocks = -(-self._tokens // pages.block_size)
        block = memoryview(bytes(pages.block_bytes))
        await pages.write(0, [block] * blocks)
        return LoadResult(self._tokens)


class Foreseen:
    """Drafts that are right: the output of the same request earlier. No drafts before the first time."""

    def __init__(self) -> None:
        self.tokens: Sequence[int] = ()
        """Keeps the tokens of a finished request: prompt and output."""
        self.most = _DRAFTS
        """Of one step."""

    def propose(self, ask: DraftAsk) -> Sequence[int]:
        """The drafts for an ask."""
        return self.tokens[len(ask.tokens) : len(ask.tokens) + min(ask.k, self.most)]


class Ours:
    """An open engine."""

    def __init__(self, engine: Engine, foreseen: Foreseen) -> None:
        self._engine = engine
        self._foreseen = foreseen
        self._names = itertools.count()

    async def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds to the first token."""
        begin = time.perf_counter()
        await self._generated(prompt, 1, None)
        return time.perf_counter() - begin

    async def decode(self, prompts: Sequence[Sequence[int]], steps: int, shared: bool = False) -> float:
        """Seconds for `steps` tokens of every prompt, counted from the step that gave the last stream its first. With
        `shared`, prompts that begin alike share the pages of their common blocks."""
        begun: list[float] = []
        before = 0
        counts = [0] * len(prompts)
        over = asyncio.Event()
        end, ended = 0.0, 0

        async def stream(number: int) -> None:
            nonlocal before, end, ended
            async for count in self._stream(prompts[number], steps + _SLACK, shared):
                counts[number] += count
                total = (
                    self._engine.stats().generated_tokens
                )  # counted per step, so it does not matter which stream is read first
                if not begun and all(counts):
                    begun.append(time.perf_counter())
                    before = total
                elif begun and not over.is_set() and total - before >= steps * len(prompts):
                    end = time.perf_counter() - begun[0]
                    over.set()
            ended += 1
            if ended == len(prompts):
                over.set()

        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(stream(number)) for number in range(len(prompts))]
            await over.wait()
            for one in streams:
                one.cancel()
        # The last step may hold pages that the next streams need, and says nothing when it is done.
        while self._engine.stats().free_pages < self._engine.stats().total_pages:  # noqa: ASYNC110
            await asyncio.sleep(_PAUSE_S)
        if not end:
            raise RuntimeError("the first streams ended before the last one began")
        return end

    async def verify(self, prompt: Sequence[int], steps: int, drafts: int = _DRAFTS) -> dict[str, float]:
        """Seconds of a step that gives one token, and of one that verifies so many drafts, four at most, and gives one
        more."""
        self._foreseen.tokens, self._foreseen.most = (), drafts
        plain = await self._generated(prompt, (drafts + 1) * steps + 1, Zeros(len(prompt) - 1))
        self._foreseen.tokens = (*prompt, *plain.tokens)
        drafted = await self._generated(prompt, (drafts + 1) * steps + 1, Zeros(len(prompt) - 1))
        self._foreseen.tokens = ()
        return {
            "step_s": plain.seconds / (len(plain.tokens) - 1),
            "verify_s": drafted.seconds / max(1, drafted.steps),
            "tokens_per_step": (len(drafted.tokens) - 1) / max(1, drafted.steps),
            "same_tokens": float(plain.tokens == drafted.tokens),
        }

    async def _generated(self, prompt: Sequence[int], tokens: int, source: Zeros | None) -> _Generated:
        """All tokens of one request."""
        found: list[int] = []
        first, steps = 0.0, 0
        async with aclosing(self._engine.generate(self._request(prompt, tokens), source)) as updates:
            async for update in updates:
                found += [token.token for token in update.tokens]
                if not first:
                    first, steps = time.perf_counter(), self._engine.stats().steps
        return _Generated(found, time.perf_counter() - first, self._engine.stats().steps - steps)

    async def _stream(self, prompt: Sequence[int], tokens: int, shared: bool) -> AsyncIterator[int]:
        request, size = self._request(prompt, tokens), self._engine.config.block_size
        chain = Chain(b"", size, request.prompt) if shared else None
        async with aclosing(self._engine.generate(request, Zeros(len(prompt) - 1), chain=chain)) as updates:
            async for update in updates:
                yield len(update.tokens)

    def _request(self, prompt: Sequence[int], tokens: int) -> Request:
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        return Request(str(next(self._names)), tuple(prompt), sampling)


@dataclasses.dataclass(frozen=True, slots=True)
class _Generated:
    tokens: list[int]
    seconds: float
    """After the first token."""
    steps: int
    """After the first token."""


@asynccontextmanager
async def opened(
    checkpoint: str,
    kind: str,
    *,
    threads: int,
    streams: int,
    tokens: int,
    room: int,
    drafts: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> AsyncIterator[Ours]:
    """Opens the engine for the length of the block.

    `kind` is a dtype of the engine, `lossless`, or `torch`, which computes without kernels; `drafts` enables `verify`;
    `settings` are further fields of its config. Raises ValueError for a field that this engine does not have.
    """
    pool = room + streams * (_SLACK + 16)
    wanted: dict[str, Any] = {"dtype": kind, "kv_pool_tokens": pool, "max_model_len": tokens + _SLACK}
    if kind in ("lossless", "torch"):
        wanted["dtype"] = "bfloat16"
    wanted["kernels"] = kind != "torch"
    wanted["weights"] = "lossless" if kind == "lossless" else "plain"
    # The text of random weights repeats itself, which drafts would make use of and no peer does.
    wanted |= {"lookup_tokens": 0, "draft_always": drafts, "draft_tokens": _DRAFTS, "draft_timeout_s": 1.0}
    wanted |= settings or {}
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    if unknown := wanted.keys() - known:
        raise ValueError(f"this engine has no {', '.join(sorted(unknown))}: kind {kind!r} can't be measured")
    foreseen = Foreseen()
    config = EngineConfig(Path(checkpoint), threads=threads, **wanted)
    async with Engine.open(config, InlineDrafter(foreseen.propose) if drafts else None) as engine:
        yield Ours(engine, foreseen)


def peak_memory() -> dict[str, int]:
    """Most bytes of memory that this process has had, file mappings included, and what it has now, by kind."""
    with open("/proc/self/status") as lines:
        found = dict(line.rstrip().split(":", 1) for line in lines)
    names = {"peak": "VmHWM", "anonymous": "RssAnon", "file": "RssFile", "shared": "RssShmem"}
    return {name: int(found[key].split()[0]) << 10 for name, key in names.items()}


async def serve() -> None:
    """Answers lines until the input ends. The first question is `load`."""
    wire = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    line = await asyncio.to_thread(sys.stdin.readline)
    values = json.loads(line)
    assert values.pop("do") == "load", "the first question is load"
    begin = time.perf_counter()
    try:
        async with opened(**values) as ours:
            _answer(wire, {"ok": time.perf_counter() - begin})
            while line := await asyncio.to_thread(sys.stdin.readline):
                _answer(wire, await _performed(ours, json.loads(line)))
    except ValueError as error:
        _answer(wire, {"error": str(error)})


async def _performed(ours: Ours, values: dict[str, Any]) -> dict[str, object]:
    try:
        match values.pop("do"):
            case "prefill":
                return {"ok": await ours.prefill(**values)}
            case "decode":
                return {"ok": await ours.decode(**values)}
            case "verify":
                return {"ok": await ours.verify(**values)}
            case "memory":
                return {"ok": peak_memory()}
            case other:
                raise ValueError(f"do must be prefill, decode, verify or memory, not {other!r}")
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _answer(wire: Any, values: Mapping[str, object]) -> None:
    wire.write(json.dumps(values) + "\n")
    wire.flush()


if __name__ == "__main__":
    uvloop.run(serve())
