"""The sampler in plain Python: slow, obvious, and the oracle of the fast one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

from penstock.engine.request import SamplingParams
from penstock.grammar.joining import standing

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def gumbel(seed: int, position: int, token: int) -> float:
    """Standard Gumbel noise of one token id at one position of prompt + output."""
    stream = _mix(_mix(seed + _GAMMA) + (position + 1) * _GAMMA)
    bits = _mix(stream + (token + 1) * _GAMMA)
    uniform = ((bits >> 11) + 0.5) * 2.0**-53
    return -math.log(-math.log(uniform))


def sample(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stops: frozenset[int] = frozenset(),
    *,
    legal: Collection[int] | None = None,
    texts: Sequence[bytes] = (),
) -> int:
    """The token that follows `prompt` and `output`; `stops` are all tokens that would end the sequence, `legal` those
    that the grammar allows here, ends included (None: there is no grammar). `texts` are those of all tokens, which bad
    words need."""
    banned = params.banned_token_ids | (completing(params.bad_words, output, texts) if params.bad_words else set())
    shaped = shape(logits, params, prompt, output, stops, legal=legal, banned=banned)
    if params.temperature < 1e-5:
        return shaped.index(max(shaped))
    scaled = keep([value / params.temperature for value in shaped], params.top_k, params.top_p, params.min_p)
    position = len(prompt) + len(output)
    noisy = [value + gumbel(params.seed, position, token) for token, value in enumerate(scaled)]
    return noisy.index(max(noisy))


def shape(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stops: frozenset[int],
    *,
    legal: Collection[int] | None = None,
    banned: Collection[int] = (),
) -> list[float]:
    """Bias, repetition penalty, frequency and presence penalty, then the grammar, the ban on early ends, and what is
    banned otherwise; neither ban holds where it would leave nothing."""
    shaped = [value + params.logit_bias.get(token, 0.0) for token, value in enumerate(logits)]
    for token in {*prompt, *output}:
        value = shaped[token]
        shaped[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token, count in Counter(output).items():
        shaped[token] -= params.frequency_penalty * count + params.presence_penalty
    left = set(range(len(logits)) if legal is None else legal)
    for some in (stops if len(output) < params.min_tokens else (), banned):
        left = left.difference(some) or left
    return [value if token in left else -math.inf for token, value in enumerate(shaped)]


def completing(words: Collection[str], output: Sequence[int], texts: Sequence[bytes]) -> set[int]:
    """The tokens with which one more of the words would stand in the output's text."""
    before = b"".join(texts[token] for token in output)
    known = len(before.decode(errors="replace"))

    def completes(text: bytes) -> bool:
        after = (before + text).decode(errors="replace")
        return any(end > known for word in words for end in standing(word, after))

    found = {token for token, text in enumerate(texts) if completes(text)}
    return found if len(found) < len(texts) else set()


def keep(scaled: Sequence[float], top_k: int, top_p: float, min_p: float) -> list[float]:
    """min-p, then top-k, then top-p of the k; a token that ties with the last one kept is kept."""
    best = max(scaled)
    kept = [value if min_p == 0 or value >= best + math.log(min_p) else -math.inf for value in scaled]
    ordered = sorted(kept, reverse=True)[: top_k or None]
    floor = ordered[-1]
    if top_p < 1:
        weights = [math.exp(value - best) for value in ordered]
        before = 0.0
        for value, weight in zip(ordered, weights, strict=True):
            if before >= top_p * sum(weights):
                break
            floor = value
            before += weight
    return [value if value >= floor else -math.inf for value in kept]
