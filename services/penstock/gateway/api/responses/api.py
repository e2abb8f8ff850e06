"""POST /v1/responses, as the door serves it, and what can be done with stored responses."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import msgspec
import structlog

from penstock.errors import InvalidRequest, NotFound, Unavailable
from penstock.gateway.api.inquiry import Apart, Json, Visit, encode
from penstock.gateway.api.paging import paged
from penstock.gateway.api.responses.asks import ResponseOrder, is_reference, read_order, response_ask
from penstock.gateway.api.responses.bodies import InputItem, InputPart
from penstock.gateway.api.responses.shapes import STYLE, ResponseShape
from penstock.gateway.api.responses.store import ResponseStore, StoredResponse
from penstock.gateway.request import bounds
from penstock.gateway.request.ask import Ask

_ID = re.compile(r"resp_[0-9a-f]{1,64}")
_ITEM = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{1,64})_[0-9]{1,9}")
_ITEMS = msgspec.json.Decoder(list[InputItem])


Keeper = Callable[[StoredResponse], Awaitable[None]]


class _Output(msgspec.Struct):
    output: list[InputItem]


_OUTPUT = msgspec.json.Decoder(_Output)


class ResponseInquiry:
    """One request for a response."""

    def __init__(
        self,
        order: ResponseOrder,
        ask: Ask,
        *,
        items: Sequence[InputItem],
        ancestors: tuple[str, ...],
        keep: Keeper,
        apart: Apart,
    ) -> None:
        """`items` are those of the input, `ancestors` the responses that come before it; `apart` packs what is kept."""
        self.ask = ask
        self._order = order
        self._items = items
        self._ancestors = ancestors
        self._keep = keep
        self._apart = apart
        self._shape: ResponseShape | None = None

    def shape(self, id: str, created: int) -> ResponseShape:
        """Writes the response. Raises InvalidRequest where it would take the place of one that it continues."""
        self._shape = ResponseShape(self._order, self.ask, id, created)
        if (own := self._shape.response["id"]) in self._ancestors:
            what = f"idempotency-key: names {own}, which this one continues; each request needs a key of its own"
            raise InvalidRequest(what, field="idempotency-key")
        return self._shape

    async def settle(self) -> None:
        """Keeps the response."""
        if self._shape is None or not self._order.stored:
            return
        try:
            await self._keep(await self._apart(partial(self._packed, self._shape.response)))
        except Unavailable as error:  # the answer is there: it is not held back for that
            structlog.get_logger("penstock.gateway").warning("a response was not stored", error=error.message)

    def _packed(self, response: Json) -> StoredResponse:
        items = [_listed(item, response["id"], at) for at, item in enumerate(self._items)]
        return StoredResponse(response["id"], self._ancestors, encode(items), encode(response))


class ResponsesApi:
    """POST /v1/responses."""

    style = STYLE

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def read(self, body: bytes, visit: Visit) -> ResponseInquiry:
        """The inquiry that a body makes. Raises PenstockError."""
        order = await visit.apart(lambda: read_order(body, visit.ignored))
        chain = await self._chain(visit.tenant, order.body.previous_response_id)
        items = await self._items(visit.tenant, order.items)
        size = sum(kept.size for kept in chain)
        ask = await visit.apart(lambda: response_ask(order, _earlier(chain), items), size)
        return ResponseInquiry(
            order,
            ask,
            items=items,
            ancestors=tuple(kept.id for kept in chain),
            keep=partial(self._store.put, visit.tenant),
            apart=visit.apart,
        )

    async def _chain(self, tenant: str, id: str | None) -> Sequence[StoredResponse]:
        if id is None:
            return ()
        found = await self._store.chain(tenant, id) if _ID.fullmatch(id) else None
        if found is None:
            raise InvalidRequest(
                f"previous_response_id: the response {id[:100]!r}, or one that it continues, is not stored;"
                " send the whole input",
                field="previous_response_id",
                code="previous_response_not_found",
            )
        if len(found) > bounds.MAX_MESSAGES:
            raise InvalidRequest("previous_response_id: too many responses", field="previous_response_id")
        return found

    async def _items(self, tenant: str, given: Sequence[InputItem]) -> list[InputItem]:
        """The given items, with those of stored responses in place of their ids."""
        known: dict[str, InputItem] = {}
        items = []
        for at, item in enumerate(given):
            if is_reference(item):
                id = item.id or ""
                match = _ITEM.fullmatch(id)
                if id not in known and match is not None:
                    kept = await self._store.get(tenant, f"resp_{match[1]}")
                    known |= {other.id: other for other in _output(kept) if other.id} if kept else {}
                if id not in known:
                    what = f"input[{at}].id: the item {id[:100]!r} is not stored; send the item itself"
                    raise InvalidRequest(what, field=f"input[{at}].id", code="item_not_found")
                item = known[id]
            items.append(item)
        return items


class StoredResponses:
    """What clients may do with stored responses of their own tenant."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def find(self, tenant: str, id: str) -> StoredResponse:
        """A response. Raises NotFound."""
        found = await self._store.get(tenant, id) if _ID.fullmatch(id) else None
        if found is None:
            raise _unknown(id)
        return found

    async def delete(self, tenant: str, id: str) -> Json:
        """Forgets the response. Raises NotFound."""
        if not _ID.fullmatch(id) or not await self._store.delete(tenant, id):
            raise _unknown(id)
        return {"id": id, "object": "response", "deleted": True}


def page_of(kept: StoredResponse, query: Mapping[str, str]) -> Json:
    """A page of a response's own input items. Raises InvalidRequest for a wrong query."""
    items: list[Json] = msgspec.json.decode(kept.items)
    page, more = paged(items, query, lambda item: item["id"], most=100, usual=20)
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": "", "last_id": ""}
    return {"object": "list", "data": page, **ends, "has_more": more}


def _unknown(id: str) -> NotFound:
    return NotFound(f"the response {id[:100]!r} is not stored", field="response_id", code="not_found")


def _earlier(chain: Sequence[StoredResponse]) -> list[InputItem]:
    return [item for kept in chain for item in (*_ITEMS.decode(kept.items), *_output(kept))]


def _output(kept: StoredResponse) -> list[InputItem]:
    return _OUTPUT.decode(kept.response).output


def _listed(item: InputItem, response: str, at: int) -> Json:
    """An input item as it is stored and listed: with an id, and content as parts."""
    kind = item.type or "message"
    shown: Json = {"id": item.id or f"in_{response.removeprefix('resp_')}_{at}", "type": kind}
    for name in ("role", "call_id", "name", "arguments", "encrypted_content"):
        if getattr(item, name) is not None:
            shown[name] = getattr(item, name)
    for name in ("content", "output", "summary"):
        value = getattr(item, name)
        if isinstance(value, list):
            shown[name] = [_listed_part(part) for part in value]
        elif value is not None and (kind, name) == ("message", "content"):
            shown[name] = [{"type": "output_text" if item.role == "assistant" else "input_text", "text": value}]
        elif value is not None:
            shown[name] = value
    return shown


def _listed_part(part: InputPart) -> Json:
    if part.type == "refusal":
        return {"type": "refusal", "refusal": part.refusal}
    if part.type == "input_image":
        return {"type": "input_image", "image_url": part.image_url, "detail": "auto"}
    return {"type": part.type, "text": part.text} | ({"annotations": []} if part.type == "output_text" else {})
