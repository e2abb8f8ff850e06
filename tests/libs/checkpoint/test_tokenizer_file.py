"""A tokenizer made from a tiktoken file reads and writes texts as tiktoken does."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken._educational import SimpleBytePairEncoding
from tokenizers import Tokenizer

from penstock.chat.model import load_chat_model
from penstock.checkpoint import CheckpointError, inspect, tokenizer_file, tokenizer_fingerprint
from penstock.checkpoint.tokenizer_file import converted
from penstock.testing.checkpoints import TinyModel, write_checkpoint

PARTS = [r"[\p{L}&&[^\p{Han}]]+", r"\p{Han}+", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+", r"\s+(?!\S)", r"\s+"]
"""How a text is cut, with an intersection of classes, as Kimi's has."""
CUT = "|".join(PARTS)
LESSON = "the theatre then gathered there: other mothers bothered 12345 times, 漢字と漢字, ήλιος ηλίου... " * 20
NAMES = {"300": "<|begin|>", "303": "<|end|>"}
CODE = f"""
raise RuntimeError("this code is not run")
class TikTokenTokenizer:
    pat_str = "|".join({PARTS!r})
"""


@pytest.fixture(scope="module")
def ranks():
    return SimpleBytePairEncoding.train(LESSON, 300, r"\p{L}+|\s+|\S").mergeable_ranks


def write(directory: Path, ranks, *, code: str = CODE, **settings) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (directory / "tiktoken.model").write_text("\n".join(lines) + "\n")
    if code:
        (directory / "tokenization_own.py").write_text(code)
    added = {number: {"content": text, "special": True} for number, text in NAMES.items()}
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, **settings}))
    return directory


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="module")
def both(tmp_path_factory, ranks):
    directory = write(tmp_path_factory.mktemp("tokenizer"), ranks)
    specials = {text: int(number) for number, text in NAMES.items()}
    theirs = tiktoken.Encoding("own", pat_str=CUT, mergeable_ranks=ranks, special_tokens=specials)
    return Tokenizer.from_file(str(tokenizer_file(directory))), theirs


@settings(max_examples=300)
@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(LESSON.split(" ")), max_size=12).map(" ".join)))
def test_texts_become_the_same_tokens_and_come_back(both, text):
    ours, theirs = both
    found = ours.encode(text, add_special_tokens=False).ids
    assert found == theirs.encode(text, disallowed_special=())
    assert ours.decode(found) == text


def test_special_tokens_have_their_ids_and_those_between_are_reserved(both):
    ours, _ = both
    assert ours.encode("<|end|>then<|begin|>").ids[0] == 303 and ours.token_to_id("<|begin|>") == 300
    assert ours.id_to_token(301) == "<|reserved_token_301|>" and ours.get_vocab_size() == 304


def test_every_service_finds_the_same_file(tmp_path, ranks):
    tiny = TinyModel(vocab_size=420)
    directory = write(write_checkpoint(tmp_path / "model", tiny), ranks)
    own = tokenizer_fingerprint(directory)
    (directory / "tokenizer.json").unlink()
    checkpoint = inspect(directory)
    assert checkpoint.tokenizer == tokenizer_file(directory) != directory / "tokenizer.json"
    assert tokenizer_fingerprint(checkpoint) == tokenizer_fingerprint(directory) != own
    model = load_chat_model(directory)
    assert model.fingerprint == tokenizer_fingerprint(directory)
    assert model.tokenizer.decode(model.tokenizer.encode("the 漢字").ids) == "the 漢字"


def test_other_sources_make_another_file(tmp_path, ranks):
    directory = write(tmp_path, ranks)
    first = tokenizer_file(directory)
    assert tokenizer_file(directory) == first
    (directory / "tokenizer_config.json").write_text(json.dumps({"pat_str": r"\s+|\S+"}))
    second = tokenizer_file(directory)
    assert second != first and Tokenizer.from_file(str(second)).get_vocab_size() == 300


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("", "needs pat_str, in tokenizer_config.json or in tokenization_"),
        ("class A:\n  pat_str = make()", "pat_str is neither a string nor a join of strings"),
        ("class A:\n  pat_str = ''.join([1])", "pat_str is neither a string nor a join of strings"),
        ("class A(:", "is not Python"),
        ("pat_str = '['", "pat_str is no pattern that tokenizers reads"),
    ],
)
def test_a_pattern_that_cannot_be_read_is_refused(tmp_path, ranks, code, reason):
    with pytest.raises(CheckpointError, match=reason):
        tokenizer_file(write(tmp_path, ranks, code=code))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda ranks: {**ranks, b"zz zz": 999}, "ranks of its tokens are not 0, 1, 2"),
        (lambda ranks: dict(list(ranks.items())[1:]) | {b"qq": 0}, "has no token for byte 0"),
    ],
)
def test_a_list_of_tokens_that_is_none_is_refused(tmp_path, ranks, change, reason):
    with pytest.raises(CheckpointError, match=reason):
        tokenizer_file(write(tmp_path, change(ranks)))


@pytest.mark.parametrize(
    "added",
    [{"5": {"content": "<x>"}}, {"99999": {"content": "<x>"}}, {"301": "<x>"}, {"a": {"content": "<x>"}}, [1]],
)
def test_names_that_are_not_behind_the_ranks_are_refused(tmp_path, ranks, added):
    with pytest.raises(CheckpointError, match="added_tokens_decoder must"):
        tokenizer_file(write(tmp_path, ranks, added_tokens_decoder=added))


def test_a_file_that_is_not_tiktokens_is_refused(tmp_path, ranks):
    write(tmp_path, ranks)
    (tmp_path / "tiktoken.model").write_text("no tokens at all\n")
    with pytest.raises(CheckpointError, match="is not a tiktoken file"):
        tokenizer_file(tmp_path)


def test_what_others_have_left_in_tmp_is_not_read(tmp_path, ranks, monkeypatch):
    """The library keeps copies by path: of a file that was replaced, or that somebody else has put there."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "copies"))
    own = tmp_path / "own"
    own.mkdir()
    before = converted(write(own, ranks))
    turned = dict(zip(ranks, [*range(256), *reversed(range(256, len(ranks)))], strict=True))
    assert converted(write(own, turned)) != before
