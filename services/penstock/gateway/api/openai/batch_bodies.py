"""What a client asks for when it begins a batch."""

import re
from typing import Annotated, Literal

import msgspec

from penstock.errors import InvalidRequest
from penstock.gateway.api.fields import honoured
from penstock.gateway.api.metadata import check_metadata
from penstock.gateway.api.reader import BodyReader

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Whose requests may be the lines of a batch."""
LEAST_WINDOW_S, MOST_WINDOW_S = 60, 7 * 86_400
LEAST_KEPT_S, MOST_KEPT_S = 3_600, 30 * 86_400
"""For which a client may have its files kept."""
_WINDOW = re.compile(r"(\d{1,6})([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class ExpiryBody(msgspec.Struct, forbid_unknown_fields=True):
    """`output_expires_after`."""

    anchor: Annotated[Literal["created_at"], honoured("from when the file was made")]
    seconds: Annotated[int, honoured(f"{LEAST_KEPT_S} to {MOST_KEPT_S}")]


class BatchBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/batches."""

    input_file_id: Annotated[str, honoured("a file with the purpose batch")]
    endpoint: Annotated[str, honoured(f"of every line: {', '.join(ENDPOINTS)}")]
    completion_window: Annotated[str, honoured('"24h"; a number of s, m, h or d, from a minute to 7 days')]
    metadata: Annotated[dict[str, str] | None, honoured("given back; at most 16 entries")] = None
    output_expires_after: Annotated[ExpiryBody | None, honoured("left out, the gateway's --batch-kept-s")] = None

    def check(self) -> None:
        """Raises InvalidRequest naming the field that can't be so."""
        if self.endpoint == "/v1/embeddings":
            raise InvalidRequest("endpoint: no model here makes embeddings", field="endpoint", code="unsupported_model")
        if self.endpoint not in ENDPOINTS:
            right = f"endpoint: must be one of {', '.join(ENDPOINTS)}, not {self.endpoint[:100]!r}"
            raise InvalidRequest(right, field="endpoint")
        if self.output_expires_after is not None:
            check_kept("output_expires_after.seconds", self.output_expires_after.seconds)
        check_metadata(self.metadata or {})

    def window_s(self) -> int:
        """The window in seconds. Raises InvalidRequest."""
        match = _WINDOW.fullmatch(self.completion_window)
        found = int(match[1]) * _UNITS[match[2]] if match else 0
        if not LEAST_WINDOW_S <= found <= MOST_WINDOW_S:
            right = 'must be "24h", or another time from "1m" to "7d"'
            raise InvalidRequest(
                f"completion_window: {right}, not {self.completion_window[:40]!r}", field="completion_window"
            )
        return found


def check_kept(field: str, seconds: int) -> None:
    """Raises InvalidRequest for a time for which no file is kept."""
    if not LEAST_KEPT_S <= seconds <= MOST_KEPT_S:
        raise InvalidRequest(f"{field}: must be from {LEAST_KEPT_S} to {MOST_KEPT_S}, not {seconds}", field=field)


read_batch = BodyReader(BatchBody).read
