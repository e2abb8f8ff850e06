"""API keys at rest: the file holds their sha256 and never a key itself.

A key has 256 random bits, so its plain digest gives nothing away; salts and slow hashes are for what people choose.
`penstock keys` writes the file, a running gateway reads it again when it has changed.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from penstock.runtime.config import ConfigError
from penstock.runtime.disk import replace_file

Role = Literal["client", "operator"]
PREFIX = "pk-"
_RIGHT = "must be a file that `penstock keys add` has made"


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key, as the file has it."""

    id: str
    """By which it is revoked; no secret."""
    sha256: str
    """Of the key, hex."""
    tenant: str
    role: Role = "client"
    """A client generates; an operator sees every tenant's accounts, and generates nothing."""
    created: str = ""
    """When, in UTC, ISO 8601."""
    note: str = ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[ApiKey]


def digest(key: str) -> bytes:
    """By which a key is known."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def new_key(tenant: str, role: Role = "client", note: str = "", *, key: str = "") -> tuple[str, ApiKey]:
    """A key, which is told once, and its entry. `key` may be given where it comes from elsewhere."""
    key = key or PREFIX + secrets.token_urlsafe(32)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return key, ApiKey(
        id=f"k-{secrets.token_hex(4)}", sha256=digest(key).hex(), tenant=tenant, role=role, created=now, note=note
    )


def read_keys(path: Path) -> Sequence[ApiKey]:
    """The keys of a file. Raises ConfigError."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError("api_keys", str(path), f"cannot be read: {error.strerror}") from None
    try:
        keys = msgspec.json.decode(raw, type=_File).keys
    except (msgspec.DecodeError, UnicodeDecodeError):  # it may quote what it found: a key, perhaps
        raise ConfigError("api_keys", str(path), _RIGHT) from None
    for key in keys:
        if not key.id or not key.tenant or len(key.sha256) != 64 or set(key.sha256) - set("0123456789abcdef"):
            raise ConfigError("api_keys", str(path), f"{_RIGHT}: the key {key.id!r} lacks its id, tenant or sha256")
    for name in ("id", "sha256"):
        if len({getattr(key, name) for key in keys}) < len(keys):
            raise ConfigError("api_keys", str(path), f"{_RIGHT}: two keys have the same {name}")
    return keys


def write_keys(path: Path, keys: Sequence[ApiKey]) -> None:
    """Replaces the file at once; only its owner may read it. Raises OSError."""
    text = msgspec.json.format(msgspec.json.encode(_File(list(keys))), indent=2)
    replace_file(path, text + b"\n")
