"""What a client says of a request that it may send again: in headers, or in the metadata of a call."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import InvalidRequest
from penstock.gateway.accounts.auth import Auth
from penstock.gateway.completing.repeating import LAST_EVENT, TOKENS, RepeatKey

HEADER = "idempotency-key"
_MOST = 255


def repeat_key(headers: Mapping[str, str], auth: Auth, tenant: str, counts: str = TOKENS) -> RepeatKey | None:
    """The name of a request, by its header; None without one. `counts` as in RepeatKey. Raises InvalidRequest."""
    key, last = headers.get(HEADER), headers.get(LAST_EVENT, "")
    if key is None:
        if last:
            right = f"send it with the {HEADER} of the request whose stream has broken off"
            raise InvalidRequest(f"{LAST_EVENT} = {last[:40]!r}: {right}", field=LAST_EVENT)
        return None
    if not 1 <= len(key) <= _MOST or not key.isprintable():
        raise InvalidRequest(f"{HEADER}: must be 1 to {_MOST} printable characters", field=HEADER)
    return RepeatKey(auth.secret(tenant, b"repeat v1", key.encode()), last, counts)
