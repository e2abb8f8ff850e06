"""Where a word of a text stands by itself: no letter, digit or underscore joins it on either side.

An end of the word that is none of these itself needs no such place, and letters of scripts that write no spaces between
words join nothing.
"""

from __future__ import annotations

import unicodedata

_UNSPACED = (
    (0x0E00, 0x109F),  # Thai, Lao, Tibetan, Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3000, 0x31FF),  # kana, Bopomofo
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xA9E0, 0xA9FF),
    (0xAA60, 0xAA7F),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9D),
    (0x20000, 0x3FFFF),
)


def joins(letter: str) -> bool:
    """Whether a word ends only where this character does not follow."""
    if any(first <= ord(letter) <= last for first, last in _UNSPACED):
        return False
    return letter.isalnum() or letter == "_" or unicodedata.category(letter)[0] == "M"


def last_joins(text: bytes) -> bool:
    """Whether the last character of a text joins what follows; the text may begin or end within a character."""
    for begin in range(len(text) - 1, max(-1, len(text) - 5), -1):
        if text[begin] & 0xC0 != 0x80:
            last = text[begin:].decode(errors="replace")
            return len(last) == 1 and joins(last)
    return False


def standing(word: str, text: str) -> list[int]:
    """The ends of the places in a text at which a word stands by itself. Plain and slow, for tests and to be read."""
    places = [(at, at + len(word)) for at in range(len(text)) if text.startswith(word, at)]
    return [
        end
        for begin, end in places
        if not (joins(word[0]) and begin and joins(text[begin - 1]))
        and not (joins(word[-1]) and end < len(text) and joins(text[end]))
    ]
