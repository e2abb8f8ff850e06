"""Lists that clients get a page at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from penstock.errors import InvalidRequest

_NUMBER = re.compile(r"[0-9]{1,9}")
_Entry = TypeVar("_Entry")


def paged(
    found: Sequence[_Entry], query: Mapping[str, str], id_of: Callable[[_Entry], str], *, most: int, usual: int
) -> tuple[Sequence[_Entry], bool]:
    """A page of a list, whose newest entry is the last, and whether more follow. A page has at most `most` entries,
    `usual` where the query says nothing; the newest come first, unless it says `asc`. Raises InvalidRequest for a query
    that can't be."""
    order, limit, after = query.get("order", "desc"), query.get("limit", str(usual)), query.get("after")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order: must be asc or desc, not {order[:40]!r}", field="order")
    if not _NUMBER.fullmatch(limit) or not 1 <= int(limit) <= most:
        raise InvalidRequest(f"limit: must be from 1 to {most}, not {limit[:40]!r}", field="limit")
    ordered = found if order == "asc" else found[::-1]
    if after is not None:
        places = [at for at, entry in enumerate(ordered) if id_of(entry) == after]
        if not places:
            raise InvalidRequest(f"after: {after[:100]!r} is not in this list", field="after")
        ordered = ordered[places[0] + 1 :]
    page = ordered[: int(limit)]
    return page, len(ordered) > len(page)
