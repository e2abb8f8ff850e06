"""The sampler in plain Python: slow, obvious, and the oracle of the fast one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

from penstock.engine.request import SamplingParams

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
) -> int:
    """The token that follows `prompt` and `output`; `stops` are all tokens that would end the sequence, `legal` those
    that the grammar allows here, ends included (None: there is no grammar)."""
    shaped = shape(logits, params, prompt, output, stops, legal=legal)
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
) -> list[float]:
    """Bias, repetition penalty, frequency and presence penalty, then banned tokens and the ban on early ends (unless
    the grammar allows nothing else), then the grammar."""
    shaped = [value + params.logit_bias.get(token, 0.0) for token, value in enumerate(logits)]
    for token in {*prompt, *output}:
        value = shaped[token]
        shaped[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token, count in Counter(output).items():
        shaped[token] -= params.frequency_penalty * count + params.presence_penalty
    for token in params.banned_token_ids:
        shaped[token] = -math.inf
    if len(output) < params.min_tokens and (legal is None or set(legal) - stops):
        for token in stops:
            shaped[token] = -math.inf
    if legal is not None:
        shaped = [value if token in legal else -math.inf for token, value in enumerate(shaped)]
    return shaped


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
