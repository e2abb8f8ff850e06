"""What is kept of a file and of a batch, and how the API shows both."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

Json = dict[str, Any]
Clock = Callable[[], float]
"""Gives Unix seconds."""

Purpose = Literal["batch", "batch_output"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
OVER: frozenset[BatchStatus] = frozenset({"failed", "completed", "expired", "cancelled"})
"""Nothing changes any more."""
_ID_BYTES = 12


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a tenant, without its bytes."""

    id: str
    tenant: str
    name: str
    """As its client calls it."""
    purpose: Purpose
    bytes: int
    created_at: int
    expires_at: int
    order: int
    """Nanoseconds at which it was made: those of a list stand in this order."""

    def shown(self) -> Json:
        """As the API has it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
        }


class LineFault(msgspec.Struct, frozen=True):
    """Why a batch can't be run: what is wrong with a line of its input, or with the input."""

    code: str
    message: str
    line: int | None = None
    """Its number, from 1."""
    param: str | None = None


class LinesUsage(msgspec.Struct, frozen=True):
    """Tokens of the answers of a batch, all together."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def plus(self, other: LinesUsage) -> LinesUsage:
        """Both."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return LinesUsage(*(one + more for one, more in pairs))

    def shown(self) -> Json:
        """As the API has it."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of a tenant. Whoever runs it writes it; others only say that it is to be cancelled."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    """As its client wrote it."""
    metadata: dict[str, str] | None = None
    results_kept_s: int | None = None
    """For which its client wants the results kept; None: as long as usual."""
    status: BatchStatus = "validating"
    created_at: int
    expires_at: int
    """When its window ends."""
    order: int
    """Nanoseconds at which it was made."""
    model: str | None = None
    """Of its lines, where all have the same."""
    total: int = 0
    """Lines."""
    completed: int = 0
    """Those that have answers."""
    failed: int = 0
    """Those that have errors instead."""
    usage: LinesUsage = LinesUsage()
    faults: tuple[LineFault, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    @property
    def over(self) -> bool:
        """Whether nothing changes any more."""
        return self.status in OVER

    @property
    def over_at(self) -> int:
        """When that began, or when it was made."""
        times = (self.completed_at, self.failed_at, self.expired_at, self.cancelled_at)
        return max((at for at in times if at is not None), default=self.created_at)

    def results(self, ok: bool) -> str:
        """The id of the file of its answers, or of its errors, whether there is one yet or not."""
        return f"file-{self.id.removeprefix('batch_')}{'a' if ok else 'e'}"

    def cancelling(self, since: int | None) -> StoredBatch:
        """As it looks when it is to be cancelled since then; None: it is not. Nobody cancels what is nearly over."""
        if since is None or self.status not in ("validating", "in_progress"):
            return self
        return msgspec.structs.replace(self, status="cancelling", cancelling_at=since)

    def shown(self) -> Json:
        """As the API has it."""
        faults = [msgspec.structs.asdict(fault) for fault in self.faults]
        times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": faults} if faults else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": getattr(self, f"{name}_at") for name in times},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": self.usage.shown(),
            "metadata": self.metadata,
        }


def new_file_id() -> str:
    """A name for a file that nobody can guess."""
    return f"file-{secrets.token_hex(_ID_BYTES)}"


def new_batch_id() -> str:
    """A name for a batch that nobody can guess."""
    return f"batch_{secrets.token_hex(_ID_BYTES)}"


def new_order() -> int:
    """The place of what is made now, among all others."""
    return time.time_ns()
