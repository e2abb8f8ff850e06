"""Lists of files and batches, a page at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from penstock.gateway.api.paging import paged
from penstock.gateway.batches.records import Json


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
    ordered = sorted(found, key=lambda one: (one.order, one.id))
    page, more = paged(ordered, query, lambda one: one.id, most=most, usual=usual)
    ends = {"first_id": page[0].id if page else None, "last_id": page[-1].id if page else None}
    return {"object": "list", "data": [one.shown() for one in page], **ends, "has_more": more}
