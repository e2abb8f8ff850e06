"""Guessing the next tokens without torch: n-gram lookup, and the check whether a draft model fits.

The draft model itself is in `draft_model`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Protocol

from penstock.checkpoint import Checkpoint, CheckpointError, tokenizer_fingerprint
from penstock.checkpoint.files import read_object
from penstock.engine.hooks import DraftAsk


class Proposer(Protocol):
    """Proposes for many sequences in one call. Synchronous; one thread at a time."""

    def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """At most `k` tokens for each ask, in the order of the asks; an empty list is an answer."""
        ...

    def forget(self, id: str) -> None:
        """Frees everything kept for a sequence; does nothing for an unknown one."""
        ...


class NgramProposer:
    """Prompt lookup (Saxena, 2023): proposes the tokens that followed the last few tokens at their last occurrence.

    Looks for the longest of the last `longest`..`shortest` tokens in the last `window` tokens. Keeps no state
    between calls; the time of a call is linear in the window, most of it spent in one byte search.
    """

    def __init__(self, longest: int = 4, shortest: int = 2, window: int = 8192) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"shortest {shortest} and longest {longest} must be 1 <= shortest <= longest")
        self._longest = longest
        self._shortest = shortest
        self._window = window

    def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """The tokens that followed the last tokens of each ask before; an empty list when these are new."""
        return [self._continue(list(ask.tokens[-self._window :]), ask.k) for ask in asks]

    def forget(self, id: str) -> None:
        """Does nothing, because this proposer keeps no state."""

    def _continue(self, tokens: list[int], k: int) -> list[int]:
        packed = array("I", tokens).tobytes()
        for length in range(min(self._longest, len(tokens) - 1), self._shortest - 1, -1):
            place = _last_occurrence(packed, length)
            if place is not None:
                return _copy_on(tokens, place + length, k)
        return []


def _last_occurrence(packed: bytes, length: int) -> int | None:
    """The latest earlier place, in tokens of 4 bytes, of the last `length` tokens; None when they are new."""
    suffix, end = packed[-4 * length :], len(packed) - 4
    place = packed.rfind(suffix, 0, end)
    while place >= 0 and place % 4:
        place = packed.rfind(suffix, 0, place + len(suffix) - 1)
    return place // 4 if place >= 0 else None


def _copy_on(tokens: list[int], start: int, k: int) -> list[int]:
    """`k` tokens from `start` on; past the end the copy feeds on itself, which continues a cycle."""
    copied: list[int] = []
    for place in range(start, start + k):
        copied.append(tokens[place] if place < len(tokens) else copied[place - len(tokens)])
    return copied


def draft_misfit(target: Checkpoint, draft: Checkpoint) -> str | None:
    """The reason why `draft` cannot draft for `target`, or None when each token id means the same text in both.

    Cheap when the two tokenizer.json are the same bytes, otherwise both vocabularies are compared.
    """
    if tokenizer_fingerprint(target) == tokenizer_fingerprint(draft):
        return None
    mine, theirs = _vocabulary(target), _vocabulary(draft)
    for text, token in theirs.items():
        if mine.get(text) != token:
            return f"{text!r} is token {token} of the draft and {mine.get(text)} of the target"
    if len(theirs) < len(mine):
        return f"the draft knows {len(theirs)} tokens, the target {len(mine)}"
    return None


def _vocabulary(checkpoint: Checkpoint) -> dict[str, int]:
    values = read_object(checkpoint.tokenizer)
    vocab: Any = values["model"]["vocab"]
    if isinstance(vocab, list):
        vocab = {entry[0]: number for number, entry in enumerate(vocab)}
    added = values.get("added_tokens") or []
    try:
        return {**vocab, **{token["content"]: token["id"] for token in added}}
    except (TypeError, KeyError):
        raise CheckpointError(checkpoint.tokenizer, "its added_tokens are malformed") from None
