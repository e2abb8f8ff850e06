"""The keys that count now; a changed file is read again, and a broken one changes nothing."""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from penstock.gateway.accounts.keys import ApiKey, digest, read_keys
from penstock.runtime.config import ConfigError
from penstock.runtime.tasks import Failed, beside

_LOOK_S = 1.0
"""Seconds between two looks at the file."""


class KeyRing:
    """Finds the entry of a key."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError."""
        self._path = path
        self._log = structlog.get_logger("penstock.gateway")
        self._seen = _state(path)
        self._use(read_keys(path))

    def find(self, key: str) -> ApiKey | None:
        """The entry of a key that counts. How long it takes says nothing of the keys: their digests are looked up."""
        given = digest(key)
        found = self._keys.get(given)
        return found if found is not None and hmac.compare_digest(bytes.fromhex(found.sha256), given) else None

    def reload(self) -> bool:
        """Reads the file again if it has changed; returns whether other keys count now."""
        state = _state(self._path)
        if state == self._seen:
            return False
        self._seen = state
        try:
            keys = read_keys(self._path)
        except ConfigError as error:
            self._log.error("the changed key file is not used, the old keys still count", reason=str(error))
            return False
        self._use(keys)
        self._log.info("keys read again", keys=len(keys))
        return True

    def _use(self, keys: Sequence[ApiKey]) -> None:
        self._keys = {bytes.fromhex(key.sha256): key for key in keys}

    @asynccontextmanager
    async def watched(self, failed: Failed, every_s: float = _LOOK_S) -> AsyncIterator[None]:
        """Follows the file for the length of the block."""

        async def watch() -> None:
            while True:
                await asyncio.sleep(every_s)
                self.reload()

        async with beside(watch, name="keys", on_failure="restart", failed=failed):
            yield


def _state(path: Path) -> tuple[int, ...]:
    """Changes with the file."""
    try:
        stat = os.stat(path)
    except OSError:
        return ()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
