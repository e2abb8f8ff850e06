"""The same requests in another shape: sessions side by side, half of them, a common beginning, another pace."""

from __future__ import annotations

import bisect
import hashlib
from dataclasses import replace

from penstock.traces.reading import RecordedAsk, Trace


def overlaid(trace: Trace) -> Trace:
    """The same sessions, but they begin one shortly after the other, so that many run at once.

    Each keeps its own pace. Their beginnings are spread evenly over the mean length of a session. For traces that
    were recorded one session after the other, as agent benchmarks are.
    """
    talks = _talks(trace)
    length = sum(asks[-1].at - asks[0].at for asks in talks) / len(talks)
    moved = [
        replace(ask, at=ask.at - asks[0].at + number * length / len(talks))
        for number, asks in enumerate(talks)
        for ask in asks
    ]
    return _sorted(trace, f"{trace.name}, overlaid", moved)


def crowded(trace: Trace, concurrent: float, requests: int) -> Trace:
    """So many sessions at once, in the mean, each at its own pace, until there are so many requests: sessions begin as
    long as these come. When all have been begun, others of the same shape begin, which share with them what they share
    among themselves."""
    talks = _talks(trace)
    shared = _shared(talks)
    apart = sum(asks[-1].at - asks[0].at for asks in talks) / len(talks) / concurrent
    copied: list[RecordedAsk] = []
    times: list[float] = []
    begun = 0
    while bisect.bisect_right(times, begun * apart) < requests:
        again, which = divmod(begun, len(talks))
        first = talks[which][0].at
        renamed = _renamed(talks[which], b"/%d" % again, shared) if again else talks[which]
        copied += [replace(ask, at=ask.at - first + begun * apart) for ask in renamed]
        for ask in renamed:
            bisect.insort(times, ask.at - first + begun * apart)
        begun += 1
    crowd = _sorted(trace, trace.name, copied)
    return Trace(crowd.name, crowd.block_tokens, crowd.asks[:requests])


def copied(trace: Trace, copies: int) -> Trace:
    """So many of a trace at once, which have nothing in common. Each begins with another request, and goes round."""
    length = trace.asks[-1].at
    asks = list(trace.asks)
    for number in range(1, copies):
        moved = _renamed([*trace.asks], b"/%d" % number, set())
        asks += [replace(ask, at=(ask.at + length * number / copies) % length) for ask in moved]
    return _sorted(trace, trace.name, asks)


def coarser(trace: Trace, block_tokens: int) -> Trace:
    """The same requests in larger blocks; what does not fill one is a block of its own no more."""
    each = max(1, block_tokens // trace.block_tokens)
    asks = [replace(ask, keys=ask.keys[each - 1 :: each]) for ask in trace.asks]
    return Trace(trace.name, trace.block_tokens * each, tuple(asks))


def half(trace: Trace, *, second: bool) -> Trace:
    """Every other session, or, where sessions are not told, the requests of the first or the second half of the time:
    so that what is tuned on one half can be shown on the other."""
    if trace.has_sessions:
        names = {name: number % 2 for number, name in enumerate(dict.fromkeys(ask.session for ask in trace.asks))}
        chosen = [ask for ask in trace.asks if names[ask.session] == second]
    else:
        middle = len(trace.asks) // 2
        chosen = [*(trace.asks[middle:] if second else trace.asks[:middle])]
    first = chosen[0].at
    return _sorted(trace, trace.name, [replace(ask, at=ask.at - first) for ask in chosen])


def shrunk(trace: Trace, factor: int) -> Trace:
    """Prompts and answers that are so many times shorter, with as much in common: of so many blocks one is kept."""

    def shorter(ask: RecordedAsk) -> RecordedAsk:
        tokens, output = max(1, ask.tokens // factor), max(1, ask.output // factor)
        return replace(
            ask, tokens=tokens, output=output, keys=ask.keys[factor - 1 :: factor], tools=ask.tools // factor
        )

    return Trace(trace.name, trace.block_tokens, tuple(map(shorter, trace.asks)))


def with_common_prompt(trace: Trace, tokens: int) -> Trace:
    """Every prompt has the same `tokens` in front, rounded down to whole blocks, as a system prompt and tools are."""
    blocks = tokens // trace.block_tokens
    common = tuple(hashlib.sha256(b"common prompt/%d" % number).digest() for number in range(blocks))
    more = blocks * trace.block_tokens
    asks = [replace(ask, tokens=ask.tokens + more, keys=(*common, *ask.keys)) for ask in trace.asks]
    return _sorted(trace, f"{trace.name}, common prompt", asks)


def new_tokens(trace: Trace) -> list[int]:
    """Of each prompt, the tokens that no earlier one began with: what one cache without end leaves to be computed."""
    known: set[bytes] = set()
    new = []
    for ask in trace.asks:
        depth = bisect.bisect_left(ask.keys, True, key=lambda key: key not in known)  # a known key: all before it too
        known.update(ask.keys[depth:])
        new.append(ask.tokens - min(depth * trace.block_tokens, ask.tokens - 1))
    return new


def session_seconds(trace: Trace) -> float:
    """How long all sessions together last."""
    return sum(asks[-1].at - asks[0].at for asks in _talks(trace))


def paced(trace: Trace, seconds: float) -> Trace:
    """The same requests, faster or slower, so that they come within so many seconds."""
    factor = seconds / max(1e-9, trace.asks[-1].at)
    return _sorted(trace, trace.name, [replace(ask, at=ask.at * factor) for ask in trace.asks])


def _talks(trace: Trace) -> list[list[RecordedAsk]]:
    """The requests of each session."""
    talks: dict[str, list[RecordedAsk]] = {}
    for ask in trace.asks:
        talks.setdefault(ask.session, []).append(ask)
    return [*talks.values()]


def _shared(talks: list[list[RecordedAsk]]) -> set[bytes]:
    """The blocks that several sessions have."""
    seen: set[bytes] = set()
    shared: set[bytes] = set()
    for asks in talks:
        own = {key for ask in asks for key in ask.keys}
        shared |= own & seen
        seen |= own
    return shared


def _renamed(asks: list[RecordedAsk], suffix: bytes, shared: set[bytes]) -> list[RecordedAsk]:
    names: dict[bytes, bytes] = {}

    def name(key: bytes) -> bytes:
        return key if key in shared else names.setdefault(key, hashlib.sha256(key + suffix).digest())

    return [
        replace(ask, keys=tuple(map(name, ask.keys)), session=ask.session and ask.session + suffix.decode())
        for ask in asks
    ]


def _sorted(trace: Trace, name: str, asks: list[RecordedAsk]) -> Trace:
    asks.sort(key=lambda ask: ask.at)
    return Trace(name, trace.block_tokens, tuple(asks))
