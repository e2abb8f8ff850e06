"""What was drafted is counted the same by proposer and by place."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.drafts import GRAMMAR, LOOKUP, MODEL, PROPOSERS, DraftAccount
from penstock.runtime.metrics import WorkerMetrics

Pass = tuple[int, str, int, int]
PASSES = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([LOOKUP, MODEL]), st.integers(0, 16), st.integers(0, 19)).filter(
        lambda each: each[0] + each[2] > 0
    )
)
"""Forced drafts, the proposer of those behind them, how many, and how many of all are accepted at most."""


@given(PASSES, PASSES)
def test_all_ways_of_counting_agree(first: Sequence[Pass], second: Sequence[Pass]) -> None:
    both = account_of(first)
    both.add(account_of(second))
    assert both == account_of([*first, *second]) == both.copy()
    drafts = [
        (GRAMMAR if place < forced else proposer, place, place < accepted)
        for forced, proposer, count, accepted in [*first, *second]
        for place in range(forced + count)
    ]
    assert both.passes == len(first) + len(second)
    assert both.drafted == sum(both.verified_at) == len(drafts)
    assert both.accepted == sum(both.right_at) == sum(right for _, _, right in drafts)
    for number, proposer in enumerate(PROPOSERS):
        own = [right for whose, _, right in drafts if whose == proposer]
        assert (both.verified[number], both.right[number]) == (len(own), sum(own))
    for place, (verified, accepted) in enumerate(zip(both.verified_at, both.right_at, strict=True)):
        here = [right for _, at, right in drafts if at == place]
        assert (verified, accepted) == (len(here), sum(here))


def account_of(passes: Sequence[Pass]) -> DraftAccount:
    account = DraftAccount()
    for forced, proposer, count, accepted in passes:
        account.count([(GRAMMAR, forced), (proposer, count)], min(accepted, forced + count))
    return account


def test_metrics_have_proposers_and_positions() -> None:
    account, metrics = DraftAccount(), WorkerMetrics()
    metrics.watch_drafts(lambda: account)
    account.count([(GRAMMAR, 1), (LOOKUP, 2)], 2)
    read = metrics.registry.get_sample_value
    assert read("penstock_drafts_accepted_total", {"proposer": LOOKUP}) == 1
    assert [read(f"penstock_drafts_{what}_at_total", {"position": "2"}) for what in ("verified", "accepted")] == [1, 0]
