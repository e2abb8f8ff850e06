"""Drafts over a slow link: a drafter that knows what comes, as often as it is told to, behind a delay."""

from __future__ import annotations

import statistics
import sys
import zlib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from penstock.bench.harness import Figure, figure, missing
from penstock.bench.speculation import asks
from penstock.bench.speculation.meshes import MeshRate, PairedRates
from penstock.bench.speculation.running import WITHOUT_LOOKUP, BenchMesh, Form, running
from penstock.checkpoint import tokenizer_fingerprint
from penstock.draft.drafts import Description
from penstock.models import embedded
from penstock.testing.drafters import PlainForesight, served_drafts
from penstock.testing.slow_link import SlowLink

_LINKED = "linked"
_DELAYS_MS = (0, 2, 5, 10, 20, 35, 50)
"""Added to the way there and back."""
_FARTHER_MS = (80, 120)
"""Where only the best drafter may pay, if any."""
_RIGHT = (0.95, 0.8, 0.0)
"""Of the drafter's tokens, if those before are right."""
_TOKENS = 256
_TAIL = 24
"""Tokens by which a place in a text is known again."""
_ROUNDS = 8, 16
"""Of each delay, and more where it is in doubt: machines that are shared are noisy."""
_DOUBTFUL = 1.0
"""Ratio below which a delay gets the second number of rounds, too."""
_OFF = 0.02
"""Accepted drafts for each token, below which the drafter counts as switched off."""


class KnownTexts:
    """The next token of texts that are known, or, for some places, another one."""

    def __init__(self, vocabulary: int) -> None:
        self._next: dict[tuple[int, ...], int] = {}
        self._vocabulary = vocabulary
        self.right = 1.0
        """How many of the guesses are right."""

    def add(self, text: Sequence[int]) -> None:
        """A prompt of at least some tokens, and its answer."""
        for place in range(_TAIL, len(text)):
            self._next[tuple(text[place - _TAIL : place])] = text[place]

    def guess(self, text: Sequence[int]) -> int:
        """The same one at the same place each time."""
        tail = tuple(text[-_TAIL:])
        token = self._next.get(tail, 0)
        drawn = zlib.crc32(repr(tail).encode()) / 2**32
        return token if drawn < self.right else (token + 1) % self._vocabulary


@dataclass(frozen=True, slots=True)
class _Bench:
    mesh: BenchMesh
    texts: KnownTexts
    link: SlowLink
    prompts: Sequence[Sequence[int]]

    async def learn(self) -> None:
        """Lets the drafter know what the model answers."""
        for prompt in self.prompts:
            answer = await self.mesh.complete(prompt, _TOKENS, drafts=False)
            self.texts.add([*prompt, *answer.ids])

    async def measured(self, rounds: int, more: int) -> Sequence[PairedRates]:
        """So many rounds, and `more` where drafts may cost too much: all of them count."""
        await self.sample(0)  # what was learned of the last delay is unlearned
        samples = [await self.sample(turn) for turn in range(rounds)]
        if statistics.median(one.ratio for one in samples) < _DOUBTFUL:
            samples += [await self.sample(turn) for turn in range(more)]
        return samples

    async def sample(self, turn: int) -> PairedRates:
        """Each prompt with drafts and without, in turns."""
        rates = PairedRates(MeshRate(), MeshRate())
        for number, prompt in enumerate(self.prompts):
            order = (rates.drafted, rates.plain) if (number + turn) % 2 else (rates.plain, rates.drafted)
            for rate in order:
                rate.add([await self.mesh.complete(prompt, _TOKENS, rate is rates.drafted)])
        return rates


async def delay_figures(quick: bool) -> list[Figure]:
    """Of the embedded model, by how often the drafter is right and by delay."""
    rounds, chances, delays = ((1, 0), (0.95,), (0, 50)) if quick else (_ROUNDS, _RIGHT, _DELAYS_MS)
    found: list[Figure] = []
    even: dict[float, float] = {}
    async with _bench(2 if quick else 4) as bench:
        await bench.learn()
        for right in chances:
            for delay_ms in (*delays, *(_FARTHER_MS if right == _RIGHT[0] and not quick else ())):
                bench.texts.right, bench.link.delay_s = right, delay_ms / 1000
                samples = await bench.measured(*rounds)
                ratios = [one.ratio for one in samples]
                accepted = statistics.median(one.drafted.accepted_share for one in samples)
                cell = f"{round(100 * right)}_{delay_ms}ms"
                print(f"{cell}: {statistics.median(ratios):.3f}, {accepted:.2f} accepted", file=sys.stderr, flush=True)
                found.append(figure(f"ratio_delay_{cell}", ratios, "ratio", "no drafts"))
                found.append(figure(f"accepted_delay_{cell}", [accepted], "per token", "scale"))
                if statistics.median(ratios) > 1.0 and accepted > _OFF:
                    even[right] = delay_ms
    worst = min(one.value or 0.0 for one in found if one.id.startswith("ratio_"))
    lead = figure("worst_ratio_delay", [worst], "ratio", "no drafts", 0.97)
    best = chances[0]
    if best not in even:
        return [lead, missing("break_even_ms", "ms", "no delay at which drafts paid"), *found]
    return [lead, figure("break_even_ms", [even[best]], "ms", f"{best:.0%} right"), *found]


@asynccontextmanager
async def _bench(prompts: int) -> AsyncIterator[_Bench]:
    target = Path(embedded("penstock-mini"))
    tokenizer: Tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    texts = KnownTexts(tokenizer.get_vocab_size())
    description = Description(tokenizer_fingerprint(target), tokenizer.get_vocab)
    async with served_drafts(PlainForesight(texts.guess), description) as (server, _):
        link = SlowLink(server.port)
        async with (
            link.serving() as address,
            running(target, {_LINKED: Form(address, WITHOUT_LOOKUP)}) as meshes,
        ):
            yield _Bench(meshes[_LINKED], texts, link, list(_prompts(tokenizer, prompts)))


def _prompts(tokenizer: Tokenizer, count: int) -> Iterable[Sequence[int]]:
    for body in asks.free_text(count, 1).bodies:
        yield tokenizer.encode("\n".join(message["content"] for message in body["messages"])).ids
