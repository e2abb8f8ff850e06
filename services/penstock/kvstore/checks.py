"""Every bound on what a client may send, in one place. Each check raises InvalidRequest with the field named."""

from __future__ import annotations

from collections.abc import Sequence, Sized

from penstock.errors import InvalidRequest, Refused
from penstock.kv.bytes.checksum import CHECKSUM_BYTES
from penstock.kv.identity import KEY_BYTES, MAX_KEYS, NAMESPACE_BYTES
from penstock.kv.spec import KvSpec

_MAX_NAME = 256
_MAX_SOURCES = 16
_MAX_SESSION = 64
_MAX_BLOCK_BYTES = 1 << 30


def check_count(field: str, items: Sized) -> None:
    """At most MAX_KEYS of them."""
    if len(items) > MAX_KEYS:
        raise InvalidRequest(f"{field} has {len(items)} entries, at most {MAX_KEYS} are allowed", field=field)


def check_key(field: str, key: bytes) -> None:
    """A block key."""
    if len(key) != KEY_BYTES:
        raise InvalidRequest(f"{field} has {len(key)} bytes, a block key has {KEY_BYTES}", field=field)


def check_keys(keys: Sequence[bytes], field: str = "keys") -> list[bytes]:
    """The block keys, in a list: a message makes each anew whenever it is read."""
    check_count(field, keys)
    checked = list(keys)
    if set(map(len, checked)) - {KEY_BYTES}:
        for index, key in enumerate(checked):
            check_key(f"{field}[{index}]", key)
    return checked


def check_sources(sources: Sequence[str]) -> None:
    """A few addresses. Whether they may be called is another question: see Neighbours."""
    if len(sources) > _MAX_SOURCES:
        raise InvalidRequest(f"sources has {len(sources)} entries, at most {_MAX_SOURCES} are allowed", field="sources")
    for source in sources:
        check_name("sources", source)


def check_checksum(field: str, value: bytes) -> None:
    """A checksum, or nothing."""
    if len(value) not in (0, CHECKSUM_BYTES):
        raise InvalidRequest(f"{field} has {len(value)} bytes, a checksum has {CHECKSUM_BYTES}", field=field)


def check_length(length: int, block_bytes: int) -> None:
    """The blocks that a client writes are as long as those it announced."""
    if length != block_bytes:
        raise Refused(f"length is {length}, the blocks of this store have {block_bytes} bytes", field="length")


def check_name(field: str, name: str) -> None:
    """A short text."""
    if len(name) > _MAX_NAME:
        raise InvalidRequest(f"{field} has {len(name)} characters, at most {_MAX_NAME} are allowed", field=field)


def check_session(digest: str) -> None:
    """A session's digest, or nothing."""
    if len(digest) > _MAX_SESSION:
        raise InvalidRequest(
            f"session has {len(digest)} characters, at most {_MAX_SESSION} are allowed", field="session"
        )


def check_namespace(value: bytes) -> None:
    """A tenant's namespace, or nothing."""
    if len(value) not in (0, NAMESPACE_BYTES):
        raise InvalidRequest(f"namespace has {len(value)} bytes, it must have {NAMESPACE_BYTES}", field="namespace")


def check_seconds(field: str, seconds: float) -> None:
    """A length of time."""
    if not 0 <= seconds < float("inf"):  # also false for a NaN
        raise InvalidRequest(f"{field} is {seconds}; it must be a number of seconds, 0 or more", field=field)


def check_spec(spec: KvSpec) -> None:
    """A spec that describes blocks."""
    for name in ("model", "tokenizer", "layout", "dtype"):
        check_name(f"spec.{name}", getattr(spec, name))
    if spec.block_size < 1:
        raise InvalidRequest("spec.block_size must be at least 1 token", field="spec.block_size")
    if not 1 <= spec.block_bytes <= _MAX_BLOCK_BYTES:
        raise InvalidRequest(f"spec.block_bytes must be 1 to {_MAX_BLOCK_BYTES}", field="spec.block_bytes")


def lease_seconds(asked: float, longest: float) -> float:
    """What is granted: as asked, at most `longest`, which is also what 0 asks for."""
    if not 0 <= asked < float("inf"):
        raise InvalidRequest("lease_s must be a number of seconds, 0 or more", field="lease_s")
    return min(asked, longest) if asked else longest
