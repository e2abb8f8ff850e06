"""The block keys of the last sequences, so that a sequence that continues one of them is hashed from there on."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.kv.identity import extend_keys

_MOST_CHAINS = 64
_MOST_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True)
class _Named:
    root: bytes
    tokens: bytes
    """The ids of all full blocks."""
    keys: Sequence[bytes]


class RecentKeys:
    """Keys of sequences whose blocks have `block_size` tokens. What it gives is always what `block_keys` gives: the
    tokens themselves are compared, and what is not remembered is hashed."""

    def __init__(self, block_size: int, *, most_tokens: int = _MOST_TOKENS) -> None:
        """Remembers sequences of at most `most_tokens` tokens together, those longest unused go first."""
        self._block_size = block_size
        self._most_tokens = most_tokens
        self._chains: list[_Named] = []
        self.hashed = 0
        """Blocks that were hashed so far."""

    def of(self, root: bytes, tokens: Sequence[int]) -> list[bytes]:
        """The keys of all full blocks of `tokens`, in order."""
        ids = array("I", tokens)
        said = ids.tobytes()
        known = [chain for chain in self._chains if chain.root == root and said.startswith(chain.tokens)]
        longest = max(known, key=lambda chain: len(chain.keys), default=_Named(root, b"", ()))
        keys = extend_keys(root, longest.keys, ids, self._block_size)
        self.hashed += len(keys) - len(longest.keys)
        if keys:
            full = said[: len(keys) * self._block_size * ids.itemsize]
            self._remember(_Named(root, full, keys), longest)
        return list(keys)

    def _remember(self, chain: _Named, continued: _Named) -> None:
        """Keeps `chain` in the place of the one that it continues."""
        kept = [other for other in self._chains if other is not continued]
        kept = [*kept[-(_MOST_CHAINS - 1) :], chain]
        while sum(len(other.keys) for other in kept) * self._block_size > self._most_tokens:
            del kept[0]
        self._chains = kept
