"""Incremental text equals the text, and tokens know their bytes."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from penstock.chat.detokenize import TextStream, TokenBytes

from .tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SILENT = frozenset({0, 1, 2})
SIZE = TOKENIZER.get_vocab_size()
BYTES = TokenBytes(TOKENIZER, True)
OF_BYTE = {BYTES.of(token): token for token in range(SIZE)}


def stream(ids: list[int]) -> str:
    text = TextStream(TOKENIZER, SILENT, BYTES)
    return "".join([*(text.feed(token) for token in ids), text.finish()])


@given(st.text(max_size=60))
def test_text_comes_back(text):
    assert stream(TOKENIZER.encode(text).ids) == text


@given(st.lists(st.integers(0, SIZE - 1), max_size=60))
def test_any_tokens_have_some_text(ids):
    shown = [token for token in ids if token not in SILENT]
    text = stream(ids)
    exact = b"".join(TokenBytes(TOKENIZER, True).of(token) for token in shown)
    assert text.replace("\ufffd", "") == exact.decode(errors="ignore") or "\ufffd" in text
    assert "<|im_" not in text


PIECES = st.one_of(
    st.sampled_from([text.encode() for text in ("🎉", "é", "中", "\ufffd", "the")]),
    st.lists(st.integers(0x80, 0xFF), max_size=20).map(bytes),
)


@settings(max_examples=500)
@given(st.lists(PIECES | st.integers(0, SIZE - 1), max_size=12))
@example([b"\xf0" * 13, "🎉".encode()])
@example([b"\x80" * 15, "é".encode()])
def test_the_text_is_that_of_all_tokens_at_once(pieces):
    """Also where nothing, or the end of much that is broken, is a character."""
    ids = []
    for piece in pieces:
        ids += [piece] if isinstance(piece, int) else [OF_BYTE[bytes([byte])] for byte in piece]
    shown = [token for token in ids if token not in SILENT]
    assert stream(ids) == TOKENIZER.decode(shown, skip_special_tokens=False)


@given(st.text(max_size=40))
def test_bytes_of_tokens_make_the_text(text):
    table = TokenBytes(TOKENIZER, True)
    assert b"".join(table.of(token) for token in TOKENIZER.encode(text).ids) == text.encode()


def test_partial_characters_are_held_back():
    ids = TOKENIZER.encode("🎉").ids
    text = TextStream(TOKENIZER, SILENT, BYTES)
    assert [text.feed(token) for token in ids] == ["", "", "", "🎉"]


def test_broken_characters_are_shown_in_the_end():
    head = TOKENIZER.encode("🎉").ids[:2]
    assert stream(head) == "\ufffd"
    assert len(stream(head * 40)) >= 20
    assert stream([*head, *TOKENIZER.encode("the").ids]).endswith("the")


def test_behind_what_is_no_character_words_keep_their_space():
    """As in Llama 2: the decoder takes the space in front of a text's first word away."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581the", "\u2581cat", "a"]
    own = Tokenizer(models.BPE(vocab={piece: id for id, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    cut = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    own.decoder = decoders.Sequence(cut)
    the, cat, a = (own.token_to_id(piece) for piece in pieces[-3:])

    def said(ids: list[int]) -> str:
        text = TextStream(own, frozenset(), TokenBytes(own, byte_level=False))
        return "".join([*(text.feed(token) for token in ids), text.finish()])

    accent, broken = [1 + 0xC3, 1 + 0xA9], [1 + 0xF0]
    assert said([the, cat]) == "the cat"
    assert said([*accent, *broken, the, cat]) == "é\ufffd the cat"
    assert said([a, *broken * 16, the]) == "a" + "\ufffd" * 16 + " the"
