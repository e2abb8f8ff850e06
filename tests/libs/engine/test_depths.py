"""Which drafts a step verifies, beside trying all ways."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.speculation.depths import StepSeconds, depths

seconds = st.floats(1e-5, 1e-2)
reaches = st.lists(
    st.lists(st.floats(0.01, 1), max_size=4).map(lambda found: sorted(found, reverse=True)), min_size=1, max_size=4
)


def rate(reaches, chosen, step):
    tokens = len(reaches) + sum(sum(own[:depth]) for own, depth in zip(reaches, chosen, strict=True))
    return tokens / step.of(sum(chosen))


@given(reaches, seconds, seconds, seconds)
def test_no_other_choice_makes_more_tokens_per_second(reaches, plain, verify, row):
    step = StepSeconds(plain, verify, row)
    best = max(rate(reaches, way, step) for way in product(*[range(len(own) + 1) for own in reaches]))
    assert rate(reaches, depths(reaches, step), step) == pytest.approx(best)


@given(reaches, seconds, seconds, seconds, st.floats(0, 0.5))
def test_drafts_are_chosen_only_where_they_raise_the_rate_by_the_margin(reaches, plain, verify, row, margin):
    step = StepSeconds(plain, verify, row)
    chosen = depths(reaches, step, margin)
    alone = rate(reaches, [0] * len(reaches), step)
    if any(chosen):
        assert rate(reaches, chosen, step) > alone * (1 + margin) * (1 - 1e-9)
    else:
        assert rate(reaches, depths(reaches, step), step) <= alone * (1 + margin) * (1 + 1e-9)


def test_before_a_step_was_measured_every_draft_is_tried():
    assert depths([[0.9, 0.1], [], [0.5]], StepSeconds(0, 0, 0)) == [2, 0, 1]


@given(st.integers(1, 64), st.integers(1, 16), seconds, seconds, seconds, st.floats(0.01, 1))
def test_what_cannot_pay_is_known_without_looking_at_a_guess(sequences, drafts, plain, verify, row, hope):
    step = StepSeconds(plain, verify, row)
    chosen = sum(depths([[hope] * drafts, *[[] for _ in range(sequences - 1)]], step))
    gain = hope * drafts * plain - sequences * (verify + row * drafts)
    if abs(gain) > 1e-9:
        assert not step.pays(sequences, drafts, hope) or chosen
        assert step.pays(sequences, drafts, hope) or chosen < drafts
