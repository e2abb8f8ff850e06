"""Which web pages may use the gateway. A browser sends the page's origin with each request that matters."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from penstock.runtime.addresses import is_loopback

_SAFE = ("GET", "HEAD", "OPTIONS")
_METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
_EXPOSED = b"x-request-id, x-penstock-ignored-fields, x-penstock-seed, retry-after, server-timing"
_A_DAY = b"86400"

Header = tuple[bytes, bytes]


class Origins:
    """The setting `cors_origins`."""

    def __init__(self, allowed: Iterable[str], *, keyless: bool) -> None:
        """`allowed` are origins such as https://chat.example, or *. `keyless`: clients need no key, so that a page
        needs none either to start a generation."""
        self._allowed = frozenset(origin.rstrip("/").lower() for origin in allowed)
        self._keyless = keyless

    def allows(self, origin: str) -> bool:
        """Whether pages of `origin` may read answers."""
        return "*" in self._allowed or origin.lower() in self._allowed

    def refuses(self, origin: str, host: str, method: str) -> bool:
        """Whether a request is refused: it would have an effect, on behalf of a page that is not ours to trust."""
        return self._keyless and method not in _SAFE and not self.allows(origin) and not _own(origin, host)

    def headers(self, origin: str) -> list[Header]:
        """The headers with which a browser hands an answer to the page."""
        if not self.allows(origin):
            return [(b"vary", b"origin")] if self._allowed else []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"origin"),
        ]

    def preflight(self, origin: str, wanted: str) -> list[Header]:
        """The headers of the answer to the question before a request; `wanted` are the headers that it will have."""
        headers = [(b"allow", _METHODS)]
        if origin and self.allows(origin):
            headers += self.headers(origin)
            headers += [(b"access-control-allow-methods", _METHODS), (b"access-control-max-age", _A_DAY)]
            if wanted:
                headers.append((b"access-control-allow-headers", wanted.encode("latin-1")))
        return headers


def _own(origin: str, host: str) -> bool:
    """Whether the page came from this gateway itself. Its name must be this machine's: any page can have a name that
    resolves to this machine later."""
    try:
        parts = urlsplit(origin.lower())
    except ValueError:  # no address of a page
        return False
    return parts.netloc == host.lower() and is_loopback(parts.hostname or "")
