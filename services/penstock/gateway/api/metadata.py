"""What a client writes on its own things: OpenAI's `metadata`."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import InvalidRequest
from penstock.gateway.request.bounds import check_count

_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512


def check_metadata(pairs: Mapping[str, str]) -> None:
    """Raises InvalidRequest for more than OpenAI takes."""
    check_count("metadata", len(pairs), _MAX_PAIRS)
    for key, value in pairs.items():
        if len(key) > _MAX_KEY or len(value) > _MAX_VALUE:
            what = f"metadata: keys have at most {_MAX_KEY} characters, values {_MAX_VALUE}"
            raise InvalidRequest(what, field="metadata")
