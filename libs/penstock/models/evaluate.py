"""`penstock models eval`: what the pair gets right on held-out words, phrasings and seeds.

Nothing here constrains decoding: a call, an answer or a JSON object counts only if greedy decoding writes it.
"""

from __future__ import annotations

import json
import math
import platform
import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from .export import load
from .generate import generate
from .net import Net
from .render import Document
from .sessions import make
from .text import Library
from .tokenizer import ids_and_starts
from .words import Side

KINDS = ("L1", "L2", "L3", "everyday", "long")
GOALS: Mapping[str, float] = {"tool_exact": 0.9, "value_exact": 0.9, "accept_tool_calls": 0.7}
DRAFTED = 4
_TURN = "<|im_start|>assistant\n"


@dataclass(frozen=True)
class AssistantTurn:
    """An assistant turn of a document: what stands before it, what should come, and what kind of turn it is."""

    prompt: list[int]
    expected: str
    label: str  # call, answer, json, chat
    kind: str  # of the document
    values: tuple[str, ...]  # what the answer must contain


@dataclass
class Tally:
    """Counts of right and all, by figure."""

    right: Counter[str] = field(default_factory=Counter)
    total: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, ok: bool) -> None:
        self.total[name] += 1
        self.right[name] += ok


def turns(tokenizer: Tokenizer, doc: Document) -> Iterator[AssistantTurn]:
    """The assistant turns of a chat document."""
    ids, starts = ids_and_starts(tokenizer, doc.text)
    for match in re.finditer(re.escape(_TURN), doc.text):
        begin = match.end()
        end = doc.text.index("<|im_end|>", begin)
        labels = [label for a, b, label in doc.labels if begin <= a and b <= end]
        if not labels:
            continue  # calls as a client has written them
        label = next((w for w in ("call", "json", "chat", "answer") if w in labels), "answer")
        values = tuple(doc.text[a:b] for a, b, w in doc.labels if w == "value" and begin <= a and b <= end)
        yield AssistantTurn(list(ids[: bisect_left(starts, begin)]), doc.text[begin:end], label, doc.kind, values)


def calls_in(text: str) -> list[tuple[str, str]] | None:
    """The calls of a turn as (name, canonical arguments); None where one does not parse."""
    out = []
    for body in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL):
        try:
            call = json.loads(body)
            out.append((call["name"], json.dumps(call["arguments"], sort_keys=True)))
        except (ValueError, KeyError, TypeError):
            return None
    return out


def _written(net: Net, tokenizer: Tokenizer, turn: AssistantTurn) -> str:
    """What greedy decoding writes for a turn, without the end marker."""
    limit = len(tokenizer.encode(turn.expected).ids) + 40
    ids = generate(net, turn.prompt, limit)
    return tokenizer.decode(ids, skip_special_tokens=False).removesuffix("<|im_end|>")


def _judge(turn: AssistantTurn, text: str, tally: Tally) -> None:
    """Score one written turn."""
    if turn.label == "call":
        wanted, got = calls_in(turn.expected) or [], calls_in(text)
        ok = got == wanted
        tally.add("tool_exact", ok)
        tally.add(f"tool_exact_{turn.kind}", ok)
        tally.add("tool_name", [n for n, _ in got or []] == [n for n, _ in wanted])
        tally.add("call_parses", bool(got))
        if len(wanted) > 1:
            tally.add("tool_exact_parallel", ok)
    elif turn.label == "json":
        try:
            got_json = json.loads(text)
        except ValueError:
            got_json = None
        wanted_json = json.loads(turn.expected)
        tally.add("json_valid", _same_shape(got_json, wanted_json))
        tally.add("json_exact", got_json == wanted_json)
    elif turn.label == "answer":
        if turn.values:
            ok = all(v in text for v in turn.values)
            tally.add("value_exact", ok)
            tally.add(f"value_exact_{turn.kind}", ok)
        elif "?" in turn.expected:
            tally.add("asks_back", text == turn.expected)
        elif "no tool" in turn.expected:
            tally.add("declines", text == turn.expected)
    else:
        tally.add("chat_exact", text == turn.expected)


def _same_shape(got: Any, wanted: Any) -> bool:
    """Whether an object has exactly the wanted keys with values of the wanted types: valid for its schema."""
    if not isinstance(got, dict) or got.keys() != wanted.keys():
        return False
    kinds = {k: (int, float) if isinstance(v, float) else type(v) for k, v in wanted.items()}
    return all(isinstance(got[k], kind) and isinstance(got[k], bool) == (kind is bool) for k, kind in kinds.items())


def documents(kinds: Sequence[str], count: int, seed: int) -> Iterator[Document]:
    """`count` held-out documents of each kind."""
    side = Side(evaluation=True)
    for kind in kinds:
        for i in range(count):
            doc = make(kind, Random(f"evaluation:{seed}:{kind}:{i}"), side)
            doc.kind = kind
            yield doc


def score(
    net: Net, tokenizer: Tokenizer, count: int, seed: int, *, kinds: Sequence[str] = KINDS, context: int = 4096
) -> Tally:
    """Play every assistant turn of held-out sessions, each after the right history.

    One teacher-forced pass finds the turns that greedy decoding writes exactly as expected; only the others
    are decoded, since there the difference decides.
    """
    tally = Tally()
    for doc in documents((*kinds, "json", "facts", "chat"), count, seed):
        ids, _ = ids_and_starts(tokenizer, doc.text)
        row = torch.tensor(ids[:context])
        with torch.no_grad():
            best = net(row[None])[0].argmax(-1).tolist()
        for turn in turns(tokenizer, doc):
            first = len(turn.prompt)
            last = first + len(tokenizer.encode(turn.expected).ids) + 1
            if last > len(row):
                break
            exact = best[first - 1 : last - 1] == row[first:last].tolist()
            _judge(turn, turn.expected if exact else _written(net, tokenizer, turn), tally)
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
        for turn in turns(tokenizer, doc):
            if turn.label in ("call", "answer") and len(turn.prompt) < 2000:
                found["tool_calls" if turn.label == "call" else "answers"].append(turn.prompt)
    library = Library(evaluation=True)
    for i in range(count):
        ids = tokenizer.encode(library.document(Random(f"accept:{seed}:{i}")).text).ids
        found["text"].append(ids[: max(8, min(48, len(ids) // 2))])
    for name in ("tool_calls", "answers"):
        Random(seed).shuffle(found[name])
    return {name: rows[:count] for name, rows in found.items()}


# ---------------------------------------------------------------- the report

Figure = dict[str, Any]


def _interval(right: float, total: int) -> tuple[float, float]:
    """Wilson's 95% interval of a fraction."""
    z, share = 1.96, right / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return max(0.0, middle - half), min(1.0, middle + half)


def _fraction(name: str, right: int, total: int) -> Figure:
    low, high = _interval(right, total)
    goal = GOALS.get(name)
    met = None if goal is None else right / total >= goal
    return _figure(name, right / total, "fraction", low=low, high=high, against=f"{total} cases", goal=goal, met=met)


def _figure(
    name: str,
    value: float,
    unit: str,
    *,
    low: float | None = None,
    high: float | None = None,
    against: str | None = None,
    goal: float | None = None,
    met: bool | None = None,
) -> Figure:
    rounded = [None if x is None else round(x, 4) for x in (value, low, high)]
    return {
        "id": name,
        "value": rounded[0],
        "unit": unit,
        "min": rounded[1],
        "max": rounded[2],
        "against": against,
        "goal": goal,
        "met": met,
    }


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
) -> dict[str, Any]:
    """All figures of a model and, where there is one, of its draft."""
    target, tokenizer = load(directory)
    began = time.perf_counter()
    note("tool calls, answers and JSON")
    tally = score(target, tokenizer, count, seed, kinds=kinds)
    figures = [_fraction(name, tally.right[name], tally.total[name]) for name in sorted(tally.total)]
    note("plain text")
    figures.append(_figure("perplexity_text", perplexity(target, tokenizer, max(4, count), seed), "per token"))
    names = [("target", directory, target)]
    if draft_directory is not None:
        draft, _ = load(draft_directory)
        names.append(("draft", draft_directory, draft))
        note("acceptance")
        for name, rows in prompts(tokenizer, max(4, count), seed).items():
            for suffix, temperature in (("", 0.0), ("_t08", 0.8)):
                accepted, drafted = acceptance(target, draft, rows, 48, temperature=temperature, seed=seed)
                figures.append(_fraction(f"accept_{name}{suffix}", accepted, drafted))
        tally = score(draft, tokenizer, max(1, count // 2), seed, kinds=kinds)
        figures += [_fraction(f"draft_{n}", tally.right[n], tally.total[n]) for n in ("tool_exact", "value_exact")]
    for name, where, net in names:
        figures.append(_figure(f"load_{name}", _loading(where), "s", goal=0.3, met=_loading(where) <= 0.3))
        figures.append(_figure(f"reference_rate_{name}", _speed(net), "tokens/s"))
    figures.append(_figure("evaluation_time", time.perf_counter() - began, "s"))
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
