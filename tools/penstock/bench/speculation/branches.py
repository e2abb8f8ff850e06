"""What a draft that is there for the likeliest other outcome could bring, at most.

A draft model could go on not only from its own guess but, at the place of its lead that it is least sure of, also from
its second choice. Where verification ends there, and with that token, the next step has drafts at once. This bench
counts how often that would be so, in texts that the embedded model says, and what it would bring if all of this were
free: the branch costs nothing, and without it the step behind a rejection never has a draft. What a step of the draft
costs with one more row it measures as well.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import httpx2
import torch
from torch import Tensor

from penstock.bench.harness import Figure, figure
from penstock.bench.speculation.asks import Asks, free_text, quotes, tool_calls
from penstock.bench.speculation.meshes import checkpoints, open_meshes
from penstock.bench.speculation.running import PLAIN
from penstock.checkpoint import inspect
from penstock.engine.config import EngineConfig
from penstock.engine.forward.runner import Runner
from penstock.engine.request import SamplingParams
from penstock.engine.sampling import noise
from penstock.engine.sampling.choice import Choice
from penstock.engine.step.run import Run

_DEPTHS = (4, 8)
_TEMPERATURES = (0.0, 0.8)
_ANSWER_TOKENS = 96
_MOST_TOKENS = 2048
_CHUNK = 256
_CONTEXT, _STEPS = 512, 50
"""Tokens of each text, and steps, when it is timed how long a step takes."""
_ANY = SamplingParams(max_tokens=_MOST_TOKENS, temperature=0.0)
"""Of rows whose logits alone are looked at."""


@dataclass(frozen=True, slots=True)
class SaidText:
    """What a client asked, and the target's answer."""

    prompt: Sequence[int]
    answer: Sequence[int]
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class TwoChoices:
    """What a draft says of one place of a text: its first and second choice, and by how much it prefers the first."""

    first: int
    second: int
    margin: float


@dataclass(frozen=True, slots=True)
class Outcomes:
    """How the verification of leads ends."""

    tokens: int = 0
    passes: int = 0
    rejections: int = 0
    second_right: int = 0
    """Rejections where the second choice was right."""
    ready: int = 0
    """Those of them at the least sure place of the lead."""

    @property
    def gain(self) -> float:
        """Tokens per step with branches over those without, if each step behind a rejection that no branch was ready
        for verifies nothing, and so gives one token."""
        plain = self.rejections
        with_some = (self.tokens + plain - self.ready) / (self.passes + plain - self.ready)
        return with_some / ((self.tokens + plain) / (self.passes + plain))

    def __add__(self, other: Outcomes) -> Outcomes:
        return Outcomes(
            self.tokens + other.tokens,
            self.passes + other.passes,
            self.rejections + other.rejections,
            self.second_right + other.second_right,
            self.ready + other.ready,
        )


def outcomes(choices: Sequence[TwoChoices], came: Sequence[int], depth: int) -> Outcomes:
    """Leads of `depth` tokens, verified one after the other. What a draft would say behind its first wrong token is not
    known here, so those places never count as the least sure one: that errs in favour of branches."""
    found, place = Outcomes(), 0
    while place < len(came):
        end = min(place + depth, len(came))
        wrong = next((at for at in range(place, end) if choices[at].first != came[at]), None)
        if wrong is None:
            found += Outcomes(passes=1)
            place = end + 1
            continue
        right = choices[wrong].second == came[wrong]
        ready = right and choices[wrong].margin == min(one.margin for one in choices[place : wrong + 1])
        found += Outcomes(passes=1, rejections=1, second_right=right, ready=ready)
        place = wrong + 1
    return replace(found, tokens=len(came))


async def branch_figures(quick: bool) -> list[Figure]:
    """Of the embedded pair, by workload and temperature."""
    found: list[Figure] = []
    number = 3 if quick else 12
    draft = DraftChoices()
    found.append(figure("second_row", draft.second_row(2 if quick else 9), "ratio", "a draft step of one row"))
    async with open_meshes("embedded", (PLAIN,)) as meshes:
        for name, make in (("tool_calls", tool_calls), ("quote", quotes), ("text", free_text)):
            for temperature in _TEMPERATURES:
                texts = await _said(str(meshes[PLAIN].client.base_url), make(number, 0), temperature)
                choices = [draft.of(text) for text in texts]
                end = f"{name}_{'drawn' if temperature else 'greedy'}"
                for depth in _DEPTHS:
                    pairs = zip(choices, texts, strict=True)
                    each = [outcomes(some, text.answer, depth) for some, text in pairs]
                    found += _figures(f"{end}_{depth}", sum(each, Outcomes()))
    return found


def _figures(end: str, all_of_them: Outcomes) -> list[Figure]:
    rejections = max(1, all_of_them.rejections)
    return [
        figure(f"rejections_{end}", [all_of_them.rejections / all_of_them.passes], "per pass", "scale"),
        figure(f"second_right_{end}", [all_of_them.second_right / rejections], "per rejection", "scale"),
        figure(f"branch_ready_{end}", [all_of_them.ready / rejections], "per rejection", "scale"),
        figure(f"branch_gain_{end}", [all_of_them.gain], "ratio", "no branches"),
    ]


async def _said(url: str, wanted: Asks, temperature: float) -> list[SaidText]:
    """The answers of a mesh without drafts. Grammars are left out: what they force is no draft's merit."""
    texts = []
    async with httpx2.AsyncClient(base_url=url.removesuffix("/v1/"), timeout=300) as http:
        for number, body in enumerate(wanted.bodies):
            shown = {name: body[name] for name in ("messages", "tools") if name in body}
            prompt = (await http.post("/tokenize", json=shown)).raise_for_status().json()
            asked = {"model": "penstock-mini", "temperature": temperature, "seed": number, "max_tokens": _ANSWER_TOKENS}
            asked |= {"return_token_ids": True, **shown}
            answer = (await http.post("/v1/chat/completions", json=asked)).raise_for_status().json()
            texts.append(SaidText(prompt["tokens"], answer["choices"][0]["token_ids"], temperature, number))
    return texts


class DraftChoices:
    """The embedded draft, over texts that are known."""

    def __init__(self) -> None:
        _, model = checkpoints("embedded")
        self._runner = Runner(inspect(model), EngineConfig(model=model, kv_pool_tokens=_MOST_TOKENS, threads=1))
        self._steps = noise.steps(self._runner.decoder.config.vocab_size, torch.device("cpu"))
        self._pages = range(1, _MOST_TOKENS // 16 + 1)
        self._names = count(1)

    def of(self, text: SaidText) -> list[TwoChoices]:
        """At each place of the answer."""
        table, prompt, answer = (f"text {next(self._names)}", 1), list(text.prompt), list(text.answer)
        asked = Choice(_ANY, frozenset(), prompt, len(prompt))
        for start in range(0, len(prompt) - 1, _CHUNK):
            known = min(_CHUNK, len(prompt) - 1 - start)
            self._runner.step([Run(asked, start, known, self._pages, table)])
        found: list[TwoChoices] = []
        for start in range(0, len(answer), _CHUNK):
            tokens, rest = [*prompt, *answer[:start]], tuple(answer[start : start + _CHUNK])
            choice = Choice(_ANY, frozenset(), tokens, len(prompt), rest)
            logits = self._runner.logits([Run(choice, len(tokens) - 1, 1, self._pages, table)])
            found += [self._two(row, text, len(tokens) + at) for at, row in enumerate(logits[:-1])]
        return found

    def second_row(self, rounds: int) -> list[float]:
        """How much longer a step with a second text takes than with one, in each round."""
        runs = []
        for number in range(2):
            tokens, table = list(range(_CONTEXT)), (f"text {next(self._names)}", 1)
            pages = self._pages[number * _CONTEXT // 16 :]
            choice = Choice(_ANY, frozenset(), tokens, _CONTEXT)
            for start in range(0, _CONTEXT - 1, _CHUNK):
                known = min(_CHUNK, _CONTEXT - 1 - start)
                self._runner.step([Run(choice, start, known, pages, table)])
            runs.append(Run(choice, _CONTEXT - 1, 1, pages, table))
        return [self._lowest(runs) / self._lowest(runs[:1]) for _ in range(rounds)]

    def _lowest(self, runs: Sequence[Run]) -> float:
        """Seconds of a step that nobody disturbed: of many, the one after the quickest tenth."""
        took = []
        for _ in range(_STEPS):
            began = time.perf_counter()
            self._runner.step(runs)
            took.append(time.perf_counter() - began)
        return sorted(took)[_STEPS // 10]

    def _two(self, logits: Tensor, text: SaidText, position: int) -> TwoChoices:
        """For the token at `position`, drawn as the target draws it."""
        if text.temperature:
            drawn = noise.gumbel(self._steps + noise.stream(text.seed, position))
            logits = logits / text.temperature + drawn
        values, tokens = torch.topk(logits, 2)
        return TwoChoices(int(tokens[0]), int(tokens[1]), float(values[0] - values[1]))
