"""Maps API keys to tenants, and tenants to their namespaces in the cache."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import structlog

from penstock.errors import Unauthenticated
from penstock.gateway.config import GatewayConfig
from penstock.kv.identity import namespace
from penstock.runtime.config import ConfigError

DEFAULT_TENANT = "default"
_LOCAL_KEY = hashlib.sha256(b"penstock: one user, one machine").digest()
"""Not a secret, which a single tenant does not need. It never changes, so cached blocks outlast a restart."""
_MIN_KEY_BYTES = 16
_SESSION_HEADERS = ("x-session-affinity", "x-claude-code-session-id", "session-id", "session_id")
_MAX_SESSION = 512


class Auth:
    """Knows the keys of all tenants. Made by `load_auth`."""

    def __init__(self, tenants: Mapping[str, str], server_key: bytes) -> None:
        """`tenants` maps API keys to tenants; empty: no key is asked for."""
        self._tenants = [(_digest(key), tenant) for key, tenant in tenants.items()]
        self._server_key = server_key

    def tenant(self, authorization: str | None) -> str:
        """The tenant of an `Authorization` value. Raises Unauthenticated. Every key is compared, in constant time."""
        if not self._tenants:
            return DEFAULT_TENANT
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip() if scheme.lower() == "bearer" else "")
        found = None
        for digest, tenant in self._tenants:
            if hmac.compare_digest(digest, given):
                found = tenant
        if found is None:
            raise Unauthenticated("send a valid API key as `Authorization: Bearer KEY`", code="invalid_api_key")
        return found

    def namespace(self, tenant: str) -> bytes:
        """The tenant's part of every block key."""
        return namespace(self._server_key, tenant)


def load_auth(config: GatewayConfig) -> Auth:
    """Reads the key files. Raises ConfigError."""
    tenants = _tenants(config.api_keys) if config.api_keys else {}
    text, field = config.server_key, "server_key"
    if config.server_key_file:
        text, field = _text("server_key_file", config.server_key_file).strip(), "server_key_file"
    if not text:
        if tenants:
            right = "must be set where api_keys is, to keep tenants apart; make one with `openssl rand -hex 32`"
            raise ConfigError("server_key", "", right)
        structlog.get_logger("penstock.gateway").info("no server_key is set: the cache belongs to a single user")
        return Auth(tenants, _LOCAL_KEY)
    try:
        key = bytes.fromhex(text)
    except ValueError:
        raise ConfigError(field, "...", "must be hex digits") from None
    if len(key) < _MIN_KEY_BYTES:
        raise ConfigError(field, "...", f"must have {2 * _MIN_KEY_BYTES} hex digits or more")
    return Auth(tenants, key)


def session_digest(tenant: str, headers: Mapping[str, str], cache_key: str | None) -> str:
    """The opaque session of a request, or an empty string. It is only a hint and gives access to nothing."""
    values: Iterable[str | None] = (*(headers.get(name) for name in _SESSION_HEADERS), cache_key)
    given = next((value for value in values if value), None)
    if given is None:
        return ""
    digest = hashlib.sha256(b"penstock session v1")
    for part in (tenant.encode(), given[:_MAX_SESSION].encode()):
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.hexdigest()[:32]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _tenants(path: Path) -> dict[str, str]:
    right = 'must hold {"key": "tenant"}'
    try:
        value = json.loads(_text("api_keys", path))
    except ValueError:
        raise ConfigError("api_keys", str(path), right) from None
    if not isinstance(value, dict) or not value or not all(k and isinstance(t, str) and t for k, t in value.items()):
        raise ConfigError("api_keys", str(path), right)
    return value


def _text(field: str, path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(field, str(path), f"cannot be read: {error.strerror}") from None
