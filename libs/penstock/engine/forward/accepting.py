"""Which draft tokens are accepted."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engine.sampling.choice import Chosen


def accepted(drafts: Sequence[int], sampled: Sequence[Chosen]) -> list[Chosen]:
    """The samples up to and including the first that differs from its draft.

    Every sample is the target's own for its place, with that place's noise, so keeping those that rest on right
    guesses gives exactly the tokens that plain decoding gives.
    """
    kept: list[Chosen] = []
    for number, chosen in enumerate(sampled):
        kept.append(chosen)
        if number < len(drafts) and drafts[number] != chosen.token:
            break
    return kept
