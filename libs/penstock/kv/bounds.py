"""Checks of block keys and namespaces in messages. Like those of `penstock.rpc.bounds` they raise InvalidRequest."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.kv.identity import KEY_BYTES, MAX_KEYS, NAMESPACE_BYTES
from penstock.rpc.bounds import bad, check_count, check_length


def check_key(field: str, key: bytes) -> None:
    """A block key."""
    check_length(field, key, KEY_BYTES)


def check_keys(field: str, keys: Sequence[bytes], *, most: int = MAX_KEYS) -> list[bytes]:
    """At most `most` block keys, as a list: a message copies each key whenever it is read."""
    check_count(field, keys, most)
    checked = list(keys)
    if set(map(len, checked)) - {KEY_BYTES}:
        for index, key in enumerate(checked):
            check_key(f"{field}[{index}]", key)
    return checked


def keys_of(field: str, packed: bytes, *, most: int = MAX_KEYS) -> list[bytes]:
    """The block keys, at most `most`, that are one behind the other in `packed`."""
    if len(packed) % KEY_BYTES:
        raise bad(field, f"{len(packed)} bytes", f"must be whole keys of {KEY_BYTES} bytes")
    check_count(field, range(len(packed) // KEY_BYTES), most)
    return [packed[begin : begin + KEY_BYTES] for begin in range(0, len(packed), KEY_BYTES)]


def check_namespace(field: str, value: bytes) -> None:
    """Checks a tenant's namespace, which may be empty."""
    check_length(field, value, 0, NAMESPACE_BYTES)
