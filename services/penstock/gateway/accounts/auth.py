"""Maps API keys to tenants, and tenants to their namespaces in the cache."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from penstock.errors import Forbidden, Unauthenticated, Unavailable
from penstock.gateway.accounts.ring import KeyRing
from penstock.gateway.config import GatewayConfig
from penstock.kv.identity import namespace
from penstock.kv.sealing import seal_key
from penstock.rpc.sessions import SESSION_HEADERS
from penstock.runtime.config import ConfigError
from penstock.runtime.tasks import Failed

DEFAULT_TENANT = "default"
_LOCAL_KEY = hashlib.sha256(b"penstock: one user, one machine").digest()
"""Not a secret, which a single tenant does not need. It never changes, so cached blocks outlast a restart."""
_MIN_KEY_BYTES = 16
_MAX_SESSION = 512


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks."""

    tenant: str
    key: str = ""
    """The id of the key; empty where no key is asked for."""
    operator: bool = False
    """Whether the accounts of all tenants may be seen."""

    def client(self) -> str:
        """The tenant that generates. Raises Forbidden for an operator's key."""
        if self.operator and self.key:
            what = "an operator's key sees accounts and generates nothing; send a client's key"
            raise Forbidden(what, code="forbidden")
        return self.tenant


class Auth:
    """Knows who asks. Made by `load_auth`."""

    def __init__(self, ring: KeyRing | None, server_key: bytes) -> None:
        """Without a ring no key is asked for: the one user is tenant and operator."""
        self.ring = ring
        self._server_key = server_key

    def identify(self, headers: Mapping[str, str]) -> Identity:
        """Who sent these headers, by `Authorization: Bearer KEY` or `x-api-key: KEY`. Raises Unauthenticated."""
        if self.ring is None:
            return Identity(DEFAULT_TENANT, operator=True)
        scheme, _, bearer = (headers.get("authorization") or "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
        found = self.ring.find(given)
        if found is None:
            right = "send a valid API key as `Authorization: Bearer KEY` or `x-api-key: KEY`"
            raise Unauthenticated(right, code="invalid_api_key")
        return Identity(found.tenant, found.id, found.role == "operator")

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The tenant that may generate with these headers. Raises Unauthenticated, Forbidden for an operator's key."""
        return self.identify(headers).client()

    @asynccontextmanager
    async def followed(self, failed: Failed) -> AsyncIterator[None]:
        """Follows changes of the key file for the length of the block."""
        if self.ring is None:
            yield
            return
        async with self.ring.watched(failed):
            yield

    def secret(self, tenant: str, purpose: bytes, value: bytes) -> bytes:
        """32 bytes that stand for a value of the tenant's, at all gateways with the same server key."""
        named = b"".join(len(part).to_bytes(4) + part for part in (purpose, tenant.encode(), value))
        return hmac.digest(self._server_key, b"penstock secret" + named, "sha256")

    def seal_key(self, tenant: str) -> bytes:
        """The key of the tenant's sealed blocks. Raises Unavailable without a server key: everybody knows this one."""
        if self._server_key == _LOCAL_KEY:
            what = "the workers seal their blocks, and this gateway has no server_key to seal them with"
            raise Unavailable(what, code="no_server_key")
        return seal_key(self._server_key, tenant)

    def namespace(self, tenant: str) -> bytes:
        """The tenant's part of every block key."""
        return namespace(self._server_key, tenant)


def load_auth(config: GatewayConfig) -> Auth:
    """Reads the key files. Raises ConfigError."""
    ring = KeyRing(config.api_keys) if config.api_keys else None
    text, field = config.server_key, "server_key"
    if config.server_key_file:
        text, field = _text("server_key_file", config.server_key_file).strip(), "server_key_file"
    if not text:
        if ring is not None:
            right = "must be set where api_keys is, to keep tenants apart; make one with `openssl rand -hex 32`"
            raise ConfigError("server_key", "", right)
        structlog.get_logger("penstock.gateway").info("no server_key is set: the cache belongs to a single user")
        return Auth(ring, _LOCAL_KEY)
    try:
        key = bytes.fromhex(text)
    except ValueError:
        raise ConfigError(field, "...", "must be hex digits") from None
    if len(key) < _MIN_KEY_BYTES:
        raise ConfigError(field, "...", f"must have {2 * _MIN_KEY_BYTES} hex digits or more")
    return Auth(ring, key)


def session_digest(tenant: str, headers: Mapping[str, str], cache_key: str | None) -> str:
    """The opaque session of a request, or an empty string. It is only a hint and gives access to nothing."""
    values: Iterable[str | None] = (*(headers.get(name) for name in SESSION_HEADERS), cache_key)
    given = next((value for value in values if value), None)
    if given is None:
        return ""
    digest = hashlib.sha256(b"penstock session v1")
    for part in (tenant.encode(), given[:_MAX_SESSION].encode()):
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.hexdigest()[:32]


def _text(field: str, path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(field, str(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(field, str(path), "is not UTF-8") from None
