"""The cost of a step, learned from steps whose cost is known."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from penstock.engine.fit import LinearFit, PromptFit, StepFit

Cost = tuple[float, float, float]
SLOW: Cost = (0.02, 0.001, 1e-6)


def steps(cost: Cost, count: int, seed: int = 1, noise: float = 0.1) -> Iterator[tuple[float, int, int]]:
    """Sequences come and go, and their contexts grow."""
    draw = Random(seed)
    contexts: list[int] = []
    for _ in range(count):
        if draw.random() < 0.05 and len(contexts) < 32:
            contexts.append(draw.randrange(4000))
        if draw.random() < 0.04 and contexts:
            contexts.pop()
        contexts = [context + 1 for context in contexts] or [100]
        sequences, tokens = len(contexts), sum(contexts)
        exact = cost[0] + cost[1] * sequences + cost[2] * tokens
        yield exact * draw.uniform(1 - noise, 1 + noise), sequences, tokens


def seconds(fit: StepFit, sequences: int, tokens: int) -> float:
    base, sequence, token = fit.coefficients
    return base + sequence * sequences + token * tokens


def test_a_known_cost_is_learned() -> None:
    fit = StepFit()
    for step in steps(SLOW, 2000):
        fit.learn(*step)
    for sequences, tokens in ((1, 100), (8, 8000), (32, 60_000)):
        expected = SLOW[0] + SLOW[1] * sequences + SLOW[2] * tokens
        assert seconds(fit, sequences, tokens) == pytest.approx(expected, rel=0.1)


def test_it_is_the_least_squares_of_the_steps() -> None:
    """Of those that it has not forgotten; without noise the first guess is all that is between them."""
    seen = list(steps(SLOW, 400, noise=0.0))
    fit = StepFit()
    for step in seen:
        fit.learn(*step)
    weights = 0.995 ** np.arange(len(seen) - 1, -1, -1)
    rows = np.array([(1.0, sequences, tokens) for _, sequences, tokens in seen]) * np.sqrt(weights)[:, None]
    exact, *_ = np.linalg.lstsq(rows, np.array([step[0] for step in seen]) * np.sqrt(weights), rcond=None)
    assert fit.coefficients == pytest.approx(tuple(exact), rel=0.02)


def test_a_change_of_the_machine_is_followed() -> None:
    fit = StepFit()
    for cost in (SLOW, (0.04, 0.002, 2e-6)):
        for step in steps(cost, 1500):
            fit.learn(*step)
    assert seconds(fit, 8, 8000) == pytest.approx(0.04 + 0.016 + 0.016, rel=0.1)


def test_what_was_learned_of_many_is_kept_while_one_runs() -> None:
    """A single stream for long says nothing of what a second one would cost."""
    fit = StepFit()
    for step in steps(SLOW, 2000):
        fit.learn(*step)
    for position in range(5000):
        fit.learn(SLOW[0] + SLOW[1] + SLOW[2] * position, 1, position)
    assert seconds(fit, 16, 20_000) == pytest.approx(SLOW[0] + 16 * SLOW[1] + 20_000 * SLOW[2], rel=0.25)


@pytest.mark.parametrize("seed", range(5))
def test_no_cost_is_negative(seed: int) -> None:
    fit, draw = StepFit(), Random(seed)
    for _ in range(500):
        fit.learn(draw.uniform(0.001, 0.1), draw.randrange(1, 64), draw.randrange(1, 100_000))
        assert min(fit.coefficients) >= 0
    assert seconds(fit, 64, 100_000) < 0.2


def test_the_first_step_is_a_guess() -> None:
    fit = StepFit()
    assert fit.coefficients == (0.0, 0.0, 0.0)
    fit.learn(0.03, 1, 100)
    assert seconds(fit, 1, 100) == pytest.approx(0.03)


def chunks(
    token_s: float, context_s: float, count: int, noise: float = 0.1
) -> Iterator[tuple[float, list[tuple[int, int]]]]:
    """Steps that compute portions of one or two prompts."""
    draw = Random(2)
    for _ in range(count):
        portions = [(draw.randrange(30_000), draw.randrange(1, 512)) for _ in range(draw.choice((1, 1, 2)))]
        exact = sum(
            token_s + context_s * (at + 0.5) for start, length in portions for at in range(start, start + length)
        )
        yield exact * draw.uniform(1 - noise, 1 + noise), portions


def test_what_context_adds_to_a_prompt_is_learned() -> None:
    fit = PromptFit()
    for seconds_, portions in chunks(2e-4, 1e-8, 1000):
        fit.learn(seconds_, portions)
    assert fit.coefficients == (pytest.approx(2e-4, rel=0.05), pytest.approx(1e-8, rel=0.05))


def test_prompts_without_context_leave_the_first_guess() -> None:
    """That it adds nothing."""
    fit = PromptFit()
    assert fit.coefficients == (0.0, 0.0)
    fit.learn(0.1, [(0, 500)])
    assert fit.coefficients == (pytest.approx(2e-4), pytest.approx(0.0))


@pytest.mark.parametrize("seed", range(5))
def test_no_prompt_has_negative_cost(seed: int) -> None:
    fit, draw = PromptFit(), Random(seed)
    for _ in range(500):
        fit.learn(draw.uniform(0.001, 0.1), [(draw.randrange(10_000), draw.randrange(1, 512))])
        assert min(fit.coefficients) >= 0


def test_quantities_that_are_never_told_apart_spoil_nothing() -> None:
    """One sequence, which is always drafted for when drafts are verified; for long times, none are."""
    cost = np.array((0.0035, 0.0005, 0.0, 0.0002, 0.0004, 0.0002))
    fit, draw = LinearFit((1.0, 16.0, 16_384.0, 1.0, 8.0, 4.0)), Random(4)
    for block in range(200):
        for step in range(200):
            drafts = draw.randrange(17) if block % 4 else 0
            quantities = (1.0, 1.0, 100.0 + step, float(drafts > 0), float(drafts), float(drafts > 0))
            fit.add(float(cost @ quantities) * draw.uniform(0.9, 1.1), quantities)
        for drafts in (0, 1, 8) if block else (0,):
            quantities = (1.0, 1.0, 200.0, float(drafts > 0), float(drafts), float(drafts > 0))
            assert fit.expected(quantities) == pytest.approx(float(cost @ quantities), rel=0.1)
        assert sum(fit.known) < 0.01
