"""Published vectors of block keys: an implementation in another language agrees with these or not at all."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from penstock.kv import identity
from penstock.kv.identity import Chain, PictureSpan, block_keys, extend_keys, namespace, packed, root_key
from penstock.kv.spec import KvSpec

SPEC = KvSpec(
    model="a" * 64,
    tokenizer="b" * 64,
    layout="v1:layers,kv,heads,tokens,dim",
    dtype="float32",
    block_size=4,
    block_bytes=1024,
)
SPACE = namespace(b"server key", "tenant")
ROOT = root_key(SPEC, SPACE)

PRINT_KEYS = """
from penstock.kv.spec import KvSpec
from penstock.kv.identity import block_keys, namespace, root_key
names = {"model": "a" * 64, "tokenizer": "b" * 64, "layout": "v1:layers,kv,heads,tokens,dim", "dtype": "float32"}
spec = KvSpec(**names, block_size=4, block_bytes=1024)
print(*(key.hex() for key in block_keys(root_key(spec, namespace(b"server key", "tenant")), range(9), 4)))
"""


def test_vectors() -> None:
    assert SPACE.hex() == "6f0d0a8a98a7b63dd9c2966a53d4d1d54c6d9584dc052e03edc77aa02325c615"
    assert ROOT.hex() == "f35802e5ce684ca515a8f02ff969af51b1ad09ecfbf8294b0880cb21b567754d"
    assert [key.hex() for key in block_keys(ROOT, range(9), 4)] == [
        "0e319b993a8c8a99c1f8b2c119b130e4f2b378f6685cb7e2dffae90f0e6a2c48",
        "163f46943866a86bdb6a8f451f75e6b7ebfcea129af3dde559aa4b5caac023fa",
    ]
    with_adapter = "5ca696b424bd35698f05bec32ddcd84b7faf2b0bff1501cb4dea98f7cd2cb5ad"
    assert root_key(SPEC, SPACE, "adapter").hex() == with_adapter
    largest = "a044f0d0e439d395caa995ee5c6affa8540b19bf47c141795a4eb879f5ff497b"
    assert block_keys(bytes(32), [0, 1, 2**32 - 1, 2**31], 2)[1].hex() == largest


def test_processes_agree_whatever_their_hash_seed() -> None:
    libs = str(Path(identity.__file__).parents[2])
    printed = {
        subprocess.run(
            [sys.executable, "-c", PRINT_KEYS],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": libs},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert printed == {" ".join(key.hex() for key in block_keys(ROOT, range(9), 4)) + "\n"}


def test_every_field_changes_the_name() -> None:
    roots = {ROOT, root_key(SPEC, SPACE, "lora"), root_key(SPEC, namespace(b"server key", "tenant2"))}
    roots.add(root_key(SPEC, namespace(b"other key", "tenant")))
    for field in fields(SPEC):
        other = getattr(SPEC, field.name) * 2
        changed = replace(SPEC, **{field.name: other})
        roots.add(root_key(changed, SPACE))
        assert field.name in (SPEC.difference(changed) or "")
    assert len(roots) == 4 + len(fields(SPEC))
    assert SPEC.difference(replace(SPEC)) is None


def test_neighbouring_fields_do_not_run_into_each_other() -> None:
    assert root_key(replace(SPEC, layout="ab", dtype="c"), SPACE) != root_key(
        replace(SPEC, layout="a", dtype="bc"), SPACE
    )
    assert root_key(SPEC, b"", "x") != root_key(SPEC, b"x", "")


def test_a_chain_is_extended_at_the_cost_of_the_new_tokens() -> None:
    tokens = list(range(1000, 1043))
    keys = block_keys(ROOT, tokens, 4)
    assert len(keys) == 10
    assert extend_keys(ROOT, keys[:7], tokens, 4) == keys
    assert extend_keys(ROOT, keys, tokens, 4) == keys
    tokens[5] += 1
    other = block_keys(ROOT, tokens, 4)
    assert other[0] == keys[0] and not set(other[1:]) & set(keys)


def test_a_block_has_its_key_with_its_last_token() -> None:
    chain = Chain(ROOT, 4)
    lengths = []
    for length in range(10):
        chain.cover(range(length))
        lengths.append(len(chain.keys))
    assert lengths == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert chain.keys == block_keys(ROOT, range(9), 4)


@pytest.mark.skipif(sys.byteorder == "big", reason="turns the order of this machine's bytes")
def test_tokens_are_packed_alike_on_machines_of_the_other_byte_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packed([1]) == b"\1\0\0\0"
    monkeypatch.setattr(sys, "byteorder", "big")
    assert packed([1]) == b"\0\0\0\1", "swapped: there, it would be turned into the order above"


CAT, DOG = bytes(range(32)), bytes(range(1, 33))


def test_a_block_that_a_picture_touches_names_it() -> None:
    plain, seen = block_keys(ROOT, range(16), 4), extend_keys(ROOT, [], range(16), 4, [PictureSpan(6, 9, CAT)])
    assert plain[0] == seen[0], "what comes before it is that of any other"
    by_hand, tokens = [ROOT], [packed(range(at, at + 4)) for at in range(0, 16, 4)]
    for block, shown in enumerate((b"", CAT + struct.pack("<i", 2), CAT + struct.pack("<i", -2), b"")):
        by_hand.append(hashlib.sha256(by_hand[-1] + tokens[block] + shown).digest())
    assert seen == by_hand[1:]


@pytest.mark.parametrize(
    "other",
    [
        [PictureSpan(6, 9, DOG)],
        [PictureSpan(5, 9, CAT)],
        [PictureSpan(6, 8, CAT), PictureSpan(8, 9, DOG)],
        [PictureSpan(6, 9, CAT), PictureSpan(9, 10, DOG)],
        [],
    ],
)
def test_other_pictures_have_other_keys(other: list[PictureSpan]) -> None:
    seen = extend_keys(ROOT, [], range(16), 4, [PictureSpan(6, 9, CAT)])
    assert seen[2:] != extend_keys(ROOT, [], range(16), 4, other)[2:]


def test_a_chain_with_pictures_grows_as_it_is_made_at_once() -> None:
    pictures = [PictureSpan(1, 6, CAT), PictureSpan(6, 7, DOG), PictureSpan(13, 19, CAT)]
    chain = Chain(ROOT, 4, pictures=pictures)
    for end in range(25):
        chain.cover(range(end))
        assert chain.keys == extend_keys(ROOT, chain.keys[: end // 8], range(end), 4, pictures)
    assert [chain.touches_pictures(at, at + 1) for at in (0, 1, 6, 7, 12, 13, 18, 19)] == [
        False, True, True, False, False, True, True, False,
    ]  # fmt: skip
