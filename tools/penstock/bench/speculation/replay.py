"""Recorded sessions of agents, decoded greedily with guesses by lookup: tokens of a verify step.

Each recorded output is what the model says. A step keeps the longest right beginning of the guess, and one token more.
Requests come one after the other, in the order of their times.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from penstock.bench.harness import Figure, figure
from penstock.engine.speculation.lookup.corpus import Corpora
from penstock.engine.speculation.lookup.lookup import Lookup, LookupLimits
from penstock.engine.speculation.lookup.native import NativeCorpora, corpora
from penstock.models import embedded
from penstock.runtime.config import ConfigError
from penstock.traces.reading import TraceError, texts

EXCERPT = Path("loadtest/traces/texts/customer_agents.jsonl.gz")
_DRAFTS = 16
"""Most tokens of a guess."""
_GOALS = {"miniswe": 4.0, "taubench": 2.3}
_KNOWN = {"_prompt": "its own text", "_session": "and its session's", "": "and its tenant's"}
"""What a guess is made from, by the end of the figure's id."""
_QUICK = 40


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A request in tokens."""

    session: bytes
    prompt: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(slots=True)
class Tally:
    """What the steps of a replay came to."""

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    """In the lookup, without what it did when requests began and ended."""


def replay_figures(paths: Sequence[Path], quick: bool) -> list[Figure]:
    """Of each trace, by its name. Raises ConfigError."""
    found: list[Figure] = []
    made = corpora()
    for path in paths:
        turns = recorded_turns(path)[: _QUICK if quick else None]
        name = trace_name(path)
        for end in _KNOWN:
            found += _figures(f"{name}{end}", _KNOWN[end], replay(turns, made, end), made)
    return found


def trace_name(path: Path) -> str:
    """The last word of the file's name."""
    return path.name.split(".")[0].rpartition("_")[2]


def recorded_turns(path: Path) -> list[RecordedTurn]:
    """The requests of a trace that were answered, in tokens of the embedded model. Raises ConfigError."""
    try:
        asks = [ask for ask in texts(path) if ask.output]
    except TraceError as error:
        raise ConfigError("trace", str(path), str(error)) from None
    tokenizer = Tokenizer.from_file(str(embedded("penstock-mini") / "tokenizer.json"))
    ids = [
        [tuple(encoded.ids) for encoded in tokenizer.encode_batch(list(side), add_special_tokens=False)]
        for side in ([ask.input for ask in asks], [ask.output for ask in asks])
    ]
    return [RecordedTurn(ask.session.encode(), *pair) for ask, *pair in zip(asks, *ids, strict=True)]


def replay(turns: Sequence[RecordedTurn], corpora: Corpora, known: str) -> Tally:
    """With a lookup that begins empty and has what `known` says, one of `_KNOWN`."""
    lookup, tally = Lookup(LookupLimits(), corpora), Tally()
    for turn in turns:
        # Alone in a tenant, a session learns from itself.
        tenant = {"_prompt": b"", "_session": turn.session, "": b"all"}[known]
        lookup.begin(0, turn.prompt, len(turn.prompt), tenant, turn.session)
        _decode(lookup, turn.output, tally)
        lookup.end(0)
    return tally


def _decode(lookup: Lookup, output: tuple[int, ...], tally: Tally) -> None:
    at = 0
    while at < len(output):
        began = time.perf_counter()
        guess = lookup.propose(0, min(_DRAFTS, len(output) - at - 1)).tokens
        tally.seconds += time.perf_counter() - began
        right = next((n for n, token in enumerate(guess) if token != output[at + n]), len(guess))
        began = time.perf_counter()
        lookup.extend(0, output[at : at + right + 1])
        tally.seconds += time.perf_counter() - began
        tally.steps += 1
        tally.drafted += len(guess)
        tally.accepted += right
        at += right + 1
    tally.tokens += len(output)


def _figures(name: str, known: str, tally: Tally, corpora: Corpora) -> list[Figure]:
    form = "C++" if isinstance(corpora, NativeCorpora) else "numpy"
    steps = max(1, tally.steps)
    return [
        figure(f"tokens_per_step_{name}", [tally.tokens / steps], "tokens", f"1 without; {known}", _GOALS.get(name)),
        figure(f"drafted_per_step_{name}", [tally.drafted / steps], "tokens", f"at most {_DRAFTS}"),
        figure(f"accepted_share_{name}", [tally.accepted / max(1, tally.drafted)], "ratio", "all that were drafted"),
        figure(f"lookup_us_{name}", [tally.seconds / steps * 1e6], "us", f"a step, {form}"),
    ]
