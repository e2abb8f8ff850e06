"""The gateway's certificate, for both doors; a changed one is used for the connections that come after."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import structlog

from penstock.runtime.config import ConfigError
from penstock.runtime.tasks import Failed, beside

_LOOK_S = 1.0
"""Seconds between two looks at the files."""


class Certificate:
    """A certificate and its key."""

    def __init__(self, cert: Path, key: Path) -> None:
        """Raises ConfigError."""
        self._cert, self._key = cert, key
        self.context = _context()
        """For HTTP."""
        try:
            self._load()
        except (OSError, ssl.SSLError) as error:
            right = "must be the PEM file of a certificate, with its chain, and tls_key the file of its key"
            raise ConfigError("tls_cert", str(cert), f"{right}: {error.strerror or error}") from None

    def for_grpc(self) -> grpc.ServerCredentials:
        """For gRPC, which asks at each handshake."""
        return grpc.dynamic_ssl_server_credentials(self._pair, lambda: self._pair)

    def reload(self) -> bool:
        """Uses the files again if they have changed; a pair that does not fit is not used."""
        if self._state() == self._seen:
            return False
        log = structlog.get_logger("penstock.gateway")
        try:
            self._load()
        except (OSError, ssl.SSLError) as error:
            log.error("the changed certificate is not used", reason=error.strerror or str(error))
            return False
        log.info("certificate read again")
        return True

    @asynccontextmanager
    async def followed(self, failed: Failed, every_s: float = _LOOK_S) -> AsyncIterator[None]:
        """Follows the files for the length of the block."""

        async def watch() -> None:
            while True:
                await asyncio.sleep(every_s)
                self.reload()

        async with beside(watch, name="certificate", on_failure="restart", failed=failed):
            yield

    def _load(self) -> None:
        self._seen = self._state()
        _context().load_cert_chain(self._cert, self._key)  # raises before anything has changed
        self.context.load_cert_chain(self._cert, self._key)
        pair = [(self._key.read_bytes(), self._cert.read_bytes())]
        self._pair = grpc.ssl_server_certificate_configuration(pair)

    def _state(self) -> tuple[int, ...]:
        try:
            stats = [os.stat(path) for path in (self._cert, self._key)]
        except OSError:
            return ()
        return tuple(part for stat in stats for part in (stat.st_mtime_ns, stat.st_size, stat.st_ino))


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context
