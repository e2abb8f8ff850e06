"""Token ids to text, one step at a time, with the bytes of each token."""

from __future__ import annotations

import codecs
from collections.abc import Collection

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from penstock.checkpoint.byte_level import byte_table

_MAX_HELD = 16
"""Tokens that may be held back until they end in a complete character, which has at most 4 bytes."""


class TextStream:
    """Text of a growing token sequence. Partial UTF-8 is held back; `silent` tokens have no text."""

    def __init__(self, tokenizer: Tokenizer, silent: Collection[int], token_bytes: TokenBytes) -> None:
        self._tokenizer = tokenizer
        self._silent = silent
        self._bytes = token_bytes
        self._stream = DecodeStream(skip_special_tokens=False)
        self._held: list[int] = []
        self._last: int | None = None
        """The last token whose text was given out."""
        self._again = ""
        """What the stream may give once more, of that token."""

    def feed(self, token: int) -> str:
        """The text that became complete with `token`."""
        if token in self._silent:
            return ""
        self._held.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # the stream refuses some sequences of invalid bytes; it raises nothing narrower
            return self._give_way()
        if text is None:
            return self._give_way() if len(self._held) >= _MAX_HELD else ""
        self._held.clear()
        self._last = token
        again, self._again = self._again, ""
        return text.removeprefix(again)

    def _give_way(self) -> str:
        """What is held back, but for the beginning of a character."""
        begun = self._held[self._settled() :]
        del self._held[len(self._held) - len(begun) :]
        return self.finish() + "".join(map(self.feed, begun))

    def _settled(self) -> int:
        """So many of the held tokens are no part of a character that the next one may go on with; all of them where
        that is none."""
        held = [self._bytes.of(token) for token in self._held]
        text = _begun(b"".join(held))
        for count in range(len(held), 0, -1):
            if b"".join(held[:count]).decode(errors="replace") + _begun(b"".join(held[count:])) == text:
                return count
        return len(held)

    def finish(self) -> str:
        """The text held back, with replacement characters for bytes that are not valid UTF-8."""
        if not self._held:
            return ""
        before = [] if self._last is None else [self._last]
        known = self._tokenizer.decode(before, skip_special_tokens=False)
        text = self._tokenizer.decode([*before, *self._held], skip_special_tokens=False).removeprefix(known)
        self._last = self._held[-1]
        self._held.clear()
        self._stream = DecodeStream(ids=[self._last], skip_special_tokens=False)  # no text begins here
        own = self._tokenizer.decode([self._last], skip_special_tokens=False)
        self._again = own if own.endswith("\ufffd") else ""  # which it takes for the beginning of a character
        return text


def _begun(text: bytes) -> str:
    """A text that may go on: without the beginning of a character at its end."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(text)


class TokenBytes:
    """The bytes that a single token stands for."""

    def __init__(self, tokenizer: Tokenizer, byte_level: bool) -> None:
        self._tokenizer = tokenizer
        self._table = byte_table() if byte_level else None
        self._added = tokenizer.get_added_tokens_decoder()

    def of(self, token: int) -> bytes:
        """Bytes of `token`; not necessarily whole characters."""
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if token in self._added:
            return piece.encode()
        if self._table is not None:
            return bytes(self._table[letter] for letter in piece if letter in self._table)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()
