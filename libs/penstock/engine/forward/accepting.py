"""Which draft tokens are accepted."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

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


def credited(kept: Sequence[Chosen], proposers: Sequence[str]) -> list[Chosen]:
    """The same tokens, which say that the first of them are drafts of these proposers, and the others nobody's."""
    return [
        msgspec.structs.replace(chosen, proposer=proposers[at] if at < len(proposers) else "")
        for at, chosen in enumerate(kept)
    ]
