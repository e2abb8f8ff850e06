"""How many workers a load needs: what queueing theory says of it, and that more is never fewer."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.scale.needs import SloTargets, WorkerPace, decode_workers, prefill_workers, queue_s

from .seen import PACE, TARGETS


def test_two_busy_workers_let_wait_longer_than_twenty_that_are_as_busy() -> None:
    """Why utilisation is no measure: 80 % in both cases."""
    few, many = queue_s(1.6, 1.0, 2, 0.9), queue_s(16.0, 1.0, 20, 0.9)
    assert few > 5 * many


def test_erlangs_formula() -> None:
    """Of two servers with one erlang a third of all wait, and all but a tenth ln(10/3) means of them."""
    assert queue_s(1.0, 1.0, 2, 0.9) == pytest.approx(log((1 / 3) / 0.1))


@given(st.floats(0, 50_000), st.floats(0.1, 50), st.floats(1, 4))
def test_prefill_grows_with_its_causes(tokens: float, requests: float, factor: float) -> None:
    count = prefill_workers(tokens, requests, PACE, TARGETS)
    assert count * PACE.prefill_rate > tokens
    assert prefill_workers(tokens * factor, requests, PACE, TARGETS) >= count
    tighter = SloTargets(ttft_s=TARGETS.ttft_s / factor, itl_s=TARGETS.itl_s, share=TARGETS.share)
    assert prefill_workers(tokens, requests, PACE, tighter) >= count


@given(st.floats(0, 20_000), st.floats(0, 500), st.floats(0, 8), st.floats(1, 4))
def test_decode_grows_with_its_causes(tokens: float, sequences: float, kv: float, factor: float) -> None:
    count = decode_workers(tokens, sequences, kv, PACE, TARGETS)
    assert decode_workers(tokens * factor, sequences, kv, PACE, TARGETS) >= count
    assert decode_workers(tokens, sequences * factor, kv, PACE, TARGETS) >= count
    assert decode_workers(tokens, sequences, kv * factor, PACE, TARGETS) >= count
    assert count * PACE.places(TARGETS.itl_s) >= sequences - 1e-6


@given(st.floats(0, 20_000), st.floats(1, 8))
def test_accepted_drafts_need_fewer_workers(tokens: float, step_tokens: float) -> None:
    drafting = replace(PACE, step_tokens=step_tokens)
    assert decode_workers(tokens * step_tokens, 0.0, 0.0, drafting, TARGETS) == decode_workers(
        tokens, 0.0, 0.0, PACE, TARGETS
    ), "an answer of so many more tokens takes as many steps"


def test_places_keep_the_step_within_the_target() -> None:
    places = PACE.places(0.06)
    assert PACE.step_s + places * PACE.sequence_s <= 0.06
    assert PACE.places(10.0) == PACE.max_running
    slow = WorkerPace(prefill_rate=1.0, step_s=1.0, sequence_s=0.001, max_running=64)
    assert slow.places(0.06) == 1, "some answer has to run"
