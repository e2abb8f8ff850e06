"""The figures of `penstock bench cores`."""

from __future__ import annotations

import pytest

from penstock.bench.engine.cores import CommonPrefix, SharedCores, context_figures, prefix_figures, shared_figures
from penstock.bench.engine.shapes import SMALL
from penstock.bench.harness import BenchReport
from penstock.bench.measured.document import section


def test_rates_are_of_what_a_longer_context_takes_more() -> None:
    """Weights of 1 GB in 10 ms; the KV of 8 x 1,984 tokens in 5 ms more."""
    kv = 8 * 1984 * SMALL.kv_bytes
    found = {one.id: one.value for one in context_figures([(0.010, 0.011, 0.015)], 10**9)}
    assert found["kv_read_rate_vs_weights"] == pytest.approx(kv / 0.005 / 1e11)
    assert found["step_ms_8_2000"] == pytest.approx(15)


def test_a_common_beginning_is_beside_none() -> None:
    found = {one.id: one.value for one in prefix_figures([CommonPrefix(0.08, 0.02)])}
    assert found == {"step_common_prefix_vs_own": pytest.approx(0.25), "step_ms_8_common": pytest.approx(20)}


def test_the_section_says_what_is_missed() -> None:
    figures = shared_figures([SharedCores(40, 16), SharedCores(50, 20)]) + context_figures([(0.01, 0.02, 0.03)], 10**8)
    text = section(BenchReport("cores", figures).json())
    assert "0.40 | 0.40 to 0.40 | 0.5, missed" in text and "| 30.0 |" in text
