"""`penstock models eval`: what the pair gets right on held-out words, phrasings and seeds.

Nothing here constrains decoding: a call, an answer or a JSON object counts only if greedy decoding writes it. The
column with constrained decoding is `served`.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from .export import load
from .generate import generate
from .judging import Tally, Written, judge
from .net import Net
from .report import figure, fraction, fractions, spread
from .text import Library
from .tokenizer import ids_and_starts
from .turns import CONTEXT, documents, fitting

_OTHERS = ("json", "facts", "chat", "asking", "foreign")
_LONGER = 39
"""Tokens by which an answer may be longer than the right one."""
DRAFTED = 4


def written(net: Net, tokenizer: Tokenizer, prompt: Sequence[int], limit: int) -> Written:
    """What greedy decoding writes after a prompt, without the end marker."""
    ids = generate(net, prompt, limit)
    return Written.freely(tokenizer.decode(ids, skip_special_tokens=False).removesuffix("<|im_end|>"))


def score(
    net: Net, tokenizer: Tokenizer, count: int, seed: int, *, kinds: Sequence[str], context: int = CONTEXT
) -> Tally:
    """Play the assistant turns of held-out documents that end within `context` tokens, each after the right history.

    One teacher-forced pass finds the turns that greedy decoding writes exactly as expected; only the others
    are decoded, since there the difference decides.
    """
    tally = Tally()
    for doc in documents(kinds, count, seed):
        ids, _ = ids_and_starts(tokenizer, doc.text)
        row = torch.tensor(ids[:context])
        with torch.no_grad():
            best = net(row[None])[0].argmax(-1).tolist()
        for turn, prompt, right in fitting(tokenizer, doc, context):
            found = judge(turn, Written.freely(turn.expected))
            first = len(prompt) - 1
            if found and best[first : first + len(right)] != right:
                found = judge(turn, written(net, tokenizer, prompt, len(right) + _LONGER))
            tally.add(found)
    return tally


def perplexity(net: Net, tokenizer: Tokenizer, count: int, seed: int) -> float:
    """Per token, on held-out plain text."""
    library = Library(evaluation=True)
    loss, tokens = 0.0, 0
    for i in range(count):
        ids = torch.tensor(tokenizer.encode(library.document(Random(f"{seed}:{i}")).text).ids)[:1024]
        with torch.no_grad():
            loss += float(F.cross_entropy(net(ids[None])[0, :-1], ids[1:], reduction="sum"))
        tokens += len(ids) - 1
    return math.exp(loss / tokens)


# ---------------------------------------------------------------- the pair


def accepted_share(chances: Sequence[float], rng: Random) -> tuple[int, int]:
    """Accepted and drafted tokens when `DRAFTED` tokens are proposed per step along one output, the token at i
    being accepted with `chances[i]`. A step ends with a token of the target's own."""
    accepted = drafted = position = 0
    while position < len(chances):
        width = min(DRAFTED, len(chances) - position)
        run = 0
        while run < width and rng.random() < chances[position + run]:
            run += 1
        accepted, drafted, position = accepted + run, drafted + width, position + run + 1
    return accepted, drafted


@torch.no_grad()
def acceptance(
    target: Net, draft: Net, prompts: Sequence[Sequence[int]], limit: int, *, temperature: float, seed: int
) -> tuple[int, int]:
    """Accepted and drafted tokens over the target's own outputs for `prompts`.

    At temperature 0 a draft token is accepted where both argmaxes agree; above it with the probability that
    speculative sampling accepts, the sum over tokens of min(p, q).
    """
    rng, generator = Random(seed), torch.Generator().manual_seed(seed)
    accepted = drafted = 0
    for prompt in prompts:
        out = generate(target, prompt, limit, temperature, generator=generator)
        row = torch.tensor([*prompt, *out[:-1]])[None]
        p, q = (net(row)[0, len(prompt) - 1 :] for net in (target, draft))
        if temperature == 0.0:
            chances = (p.argmax(-1) == q.argmax(-1)).float().tolist()
        else:
            chances = torch.minimum((p / temperature).softmax(-1), (q / temperature).softmax(-1)).sum(-1).tolist()
        a, d = accepted_share(chances, rng)
        accepted, drafted = accepted + a, drafted + d
    return accepted, drafted


def prompts(tokenizer: Tokenizer, count: int, seed: int) -> Mapping[str, list[list[int]]]:
    """Up to `count` prompts each for tool calls, answers and plain text."""
    found: dict[str, list[list[int]]] = {"tool_calls": [], "answers": [], "text": []}
    for doc in documents(("L2", "L3", "everyday"), max(2, count // 4), seed):
        for turn, prompt, _ in fitting(tokenizer, doc, CONTEXT):
            if turn.label in ("call", "answer") and len(prompt) < 2000:
                found["tool_calls" if turn.label == "call" else "answers"].append(list(prompt))
    library = Library(evaluation=True)
    for i in range(count):
        ids = tokenizer.encode(library.document(Random(f"accept:{seed}:{i}")).text).ids
        found["text"].append(ids[: max(8, min(48, len(ids) // 2))])
    for name in ("tool_calls", "answers"):
        Random(seed).shuffle(found[name])
    return {name: rows[:count] for name, rows in found.items()}


# ---------------------------------------------------------------- the report


def _loading(directory: Path) -> float:
    """Seconds to load a model directory; the median of three."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        load(directory)
        times.append(time.perf_counter() - began)
    return sorted(times)[1]


def _speed(net: Net) -> float:
    """Tokens per second of the reference decoder, one sequence after a 256-token prompt."""
    began = time.perf_counter()
    count = len(generate(net, list(range(100, 356)), 64, stops=()))
    return count / (time.perf_counter() - began)


def evaluate(
    directory: Path,
    draft_directory: Path | None,
    *,
    count: int,
    seed: int,
    kinds: Sequence[str],
    note: Callable[[str], None],
    served: Tally | None = None,
) -> dict[str, Any]:
    """All figures of a model and, where there is one, of its draft; those of a mesh that was asked are `served`."""
    target, tokenizer = load(directory)
    began = time.perf_counter()
    note("tool calls, answers and JSON")
    tally = score(target, tokenizer, count, seed, kinds=(*kinds, *_OTHERS))
    figures = [*fractions(tally), *spread(tally, kinds)]
    if served is not None:
        figures += fractions(served, constrained=True)
    note("plain text")
    figures.append(figure("perplexity_text", perplexity(target, tokenizer, max(4, count), seed), "per token"))
    names = [("target", directory, target)]
    if draft_directory is not None:
        draft, _ = load(draft_directory)
        names.append(("draft", draft_directory, draft))
        note("acceptance")
        for name, rows in prompts(tokenizer, max(4, count), seed).items():
            for suffix, temperature in (("", 0.0), ("_t08", 0.8)):
                accepted, drafted = acceptance(target, draft, rows, 48, temperature=temperature, seed=seed)
                figures.append(fraction(f"accept_{name}{suffix}", accepted, drafted))
        tally = score(draft, tokenizer, max(1, count // 2), seed, kinds=(*kinds, "facts"))
        both = [name for name in ("tool_exact", "value_exact") if tally.total[name]]
        figures += [fraction(f"draft_{name}", tally.right[name], tally.total[name]) for name in both]
    for name, where, net in names:
        figures.append(figure(f"load_{name}", _loading(where), "s", goal=0.3, met=_loading(where) <= 0.3))
        figures.append(figure(f"reference_rate_{name}", _speed(net), "tokens/s"))
    figures.append(figure("evaluation_time", time.perf_counter() - began, "s"))
    return {"bench": "models", "host": host(), "versions": versions(), "figures": figures}


def host() -> dict[str, Any]:
    """The machine, as far as it matters for the figures."""
    return {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def versions() -> dict[str, str]:
    """Versions of what computed the figures."""
    names = ("penstock", "torch", "tokenizers", "safetensors")
    out = {"python": platform.python_version()}
    for name in names:
        try:
            out[name] = version(name)
        except ModuleNotFoundError:
            out[name] = "source"
    return out
