"""Lists of files and batches, a page at a time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from penstock.errors import InvalidRequest
from penstock.gateway.batches.records import Json

_NUMBER = re.compile(r"[0-9]{1,9}")


class Listed(Protocol):
    """A file or a batch."""

    @property
    def id(self) -> str: ...

    @property
    def order(self) -> int: ...

    def shown(self) -> Json: ...


def page_of(found: Sequence[Listed], query: Mapping[str, str], most: int, usual: int) -> Json:
    """A page of at most `most` of them, `usual` where the query says nothing; the newest first, unless it says `asc`.
    Raises InvalidRequest for a query that can't be."""
    order, limit, after = query.get("order", "desc"), query.get("limit", str(usual)), query.get("after")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order: must be asc or desc, not {order[:40]!r}", field="order")
    if not _NUMBER.fullmatch(limit) or not 1 <= int(limit) <= most:
        raise InvalidRequest(f"limit: must be from 1 to {most}, not {limit[:40]!r}", field="limit")
    ordered = sorted(found, key=lambda one: (one.order, one.id), reverse=order == "desc")
    if after is not None:
        places = [at for at, one in enumerate(ordered) if one.id == after]
        if not places:
            raise InvalidRequest(f"after: {after[:100]!r} is not in this list", field="after")
        ordered = ordered[places[0] + 1 :]
    page = ordered[: int(limit)]
    ends = {"first_id": page[0].id if page else None, "last_id": page[-1].id if page else None}
    return {"object": "list", "data": [one.shown() for one in page], **ends, "has_more": len(ordered) > len(page)}
