"""The gateway's order to a worker, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.request import Request
from penstock.kv.client.origin import Origin


@dataclass(frozen=True, slots=True)
class Mark:
    """A client's wish to keep the first `blocks` blocks of a prompt for `seconds`; None: every block of the prompt and
    of the answer."""

    seconds: float
    blocks: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One request."""

    request: Request
    """The engine's part."""
    cache_root: bytes
    """The parent of the first block's key: it covers all that blocks depend on besides their tokens."""
    origin: Origin
    marks: tuple[Mark, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output so far."""
        return self.request.prompt + self.request.output
