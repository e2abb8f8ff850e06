"""The files of the page, as they lie in the package, and the headers that they are sent with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PAGE = "index.html"
_HERE = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self'",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": "; ".join(_POLICY),
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Of everything that the console sends."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file."""

    body: bytes
    kind: str
    etag: str


@cache
def page_files() -> Mapping[str, PageFile]:
    """All files by their names; read when the first is asked for."""
    return {path.name: _read(path) for path in sorted(_HERE.iterdir()) if path.suffix in _TYPES}


def _read(path: Path) -> PageFile:
    body = path.read_bytes()
    return PageFile(body, _TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:16]}"')
