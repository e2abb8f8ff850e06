"""What is expected of answers, beside all that was seen of them."""

from __future__ import annotations

from random import Random

import pytest

from penstock.router.lengths import Lengths, OutputLengths

ME = ("m", "t", "s")


def test_output_is_expected_from_session_then_tenant_then_model() -> None:
    lengths = OutputLengths(100, ttl=1000)
    assert lengths.expect(ME, limit=10_000, now=0) == 256
    lengths.learn(("m", "other", ""), 40, now=0)
    assert lengths.expect(ME, limit=10_000, now=0) == 40
    lengths.learn(ME, 100, now=0)
    lengths.learn(("m", "t", "another"), 500, now=0)
    assert lengths.expect(ME, limit=10_000, now=0) == 100
    assert 100 < lengths.expect(("m", "t", "new"), limit=10_000, now=0) < 500
    assert lengths.expect(ME, limit=10, now=0) == 10


def test_what_is_left_follows_from_those_that_were_longer() -> None:
    """Most answers are short calls of tools; one that is no longer short is a long one."""
    lengths = OutputLengths(100, ttl=1000)
    for _ in range(20):
        for tokens in (20, 20, 20, 1000):
            lengths.learn(ME, tokens, now=0)
    assert 200 < lengths.expect(ME, limit=10_000, now=0) < 350
    assert lengths.expect(ME, limit=10_000, now=0, generated=50) == pytest.approx(1000, rel=0.01)
    assert lengths.expect(ME, limit=500, now=0, generated=50) == 500
    assert lengths.expect(ME, limit=10_000, now=0, generated=2000) == 3000, "longer than all: half of it again"


def test_an_unknown_answer_is_expected_to_go_on() -> None:
    lengths = OutputLengths(100, ttl=1000)
    expected = [lengths.expect(ME, limit=10_000, now=0, generated=tokens) for tokens in (0, 100, 256, 1000)]
    assert expected == [256, 256, 384, 1500]


@pytest.mark.parametrize("seed", range(5))
def test_the_mean_of_what_is_left_is_that_of_the_answers(seed: int) -> None:
    draw, lengths, seen, weight = Random(seed), Lengths(), [], 1.0
    for _ in range(200):
        tokens = int(draw.lognormvariate(5, 1)) + 1
        lengths.learn(tokens, ended=True)
        seen = [(value, old * 0.9) for value, old in seen] + [(tokens, weight)]
    for generated in (0, 50, 150):
        longer = [(value, weight) for value, weight in seen if value > generated]
        mean = sum((min(value, 400) - generated) * weight for value, weight in longer)
        mean /= sum(weight for _, weight in longer)
        assert lengths.left(generated, 400) == pytest.approx(mean, rel=0.25)


def test_answers_that_clients_leave_teach_too() -> None:
    """Left at half their length, they count as those that went on to their end; those before any other at least as long
    as they got."""
    ended, left = Lengths(), Lengths()
    left.learn(300, ended=False)
    assert left.left(0, 10_000) == 300
    for tokens in (100, 200, 400, 800) * 10:
        ended.learn(tokens, ended=True)
        left.learn(tokens, ended=True)
        left.learn(tokens // 2, ended=False)
    whole, half = ended.left(0, 10_000), left.left(0, 10_000)
    assert whole is not None and half is not None
    assert 0.9 * whole < half < 2 * whole


def test_memory_is_bounded() -> None:
    lengths = Lengths()
    draw = Random(1)
    for _ in range(5000):
        lengths.learn(draw.randrange(1, 1 << 20), ended=draw.random() < 0.5)
    assert len(lengths._ranges) < 70
