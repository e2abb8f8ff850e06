"""Whether a draft model fits, without torch. The draft model itself is in `draft_model`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.checkpoint import Checkpoint, CheckpointError, tokenizer_fingerprint
from penstock.checkpoint.files import read_object


def draft_misfit(target: Checkpoint, draft: Checkpoint) -> str | None:
    """The reason why `draft` cannot draft for `target`, or None when each of its token ids means the same text in both.

    Cheap when the two tokenizer.json are the same bytes, otherwise both vocabularies are compared.
    """
    if tokenizer_fingerprint(target) == tokenizer_fingerprint(draft):
        return None
    return vocabulary_misfit(vocabulary(target), vocabulary(draft))


def vocabulary_misfit(target: Mapping[str, int], draft: Mapping[str, int]) -> str | None:
    """The same of vocabularies, each with the id of every text. The draft may lack tokens of the target: it never
    proposes those, nor what follows them."""
    if not draft:
        return "the draft has no tokens"
    for text, token in draft.items():
        own = target.get(text)
        if own != token:
            there = "none" if own is None else str(own)
            return f"{text!r} is token {token} of the draft and {there} of the target"
    return None


def vocabulary(checkpoint: Checkpoint) -> dict[str, int]:
    """The id of each token's text. Raises CheckpointError."""
    values = read_object(checkpoint.tokenizer)
    vocab: Any = values["model"]["vocab"]
    if isinstance(vocab, list):
        vocab = {entry[0]: number for number, entry in enumerate(vocab)}
    added = values.get("added_tokens") or []
    try:
        return {**vocab, **{token["content"]: token["id"] for token in added}}
    except (TypeError, KeyError):
        raise CheckpointError(checkpoint.tokenizer, "its added_tokens are malformed") from None
