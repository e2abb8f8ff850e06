"""What is remembered of requests that have ended, for GET /v1/requests/{id}: the last ones, by number and by bytes."""

from __future__ import annotations

import re
from collections import OrderedDict

_PREFIX = re.compile(r"^(chatcmpl|cmpl|resp|msg)[-_]")


class PastRequests:
    """Records of requests, each under the ids that its client knows: that of the request and that of the response."""

    def __init__(self, most: int, most_bytes: int) -> None:
        """Keeps at most `most` records, of at most `most_bytes` together; the newest one always, unless `most` is 0."""
        self._most = most
        self._most_bytes = most_bytes
        self._records: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        """By tenant and the response's id, oldest first."""
        self._names: dict[str, OrderedDict[tuple[str, str], None]] = {}
        """For each id of a request, which its client may have used before: where the records are."""
        self._requests: dict[tuple[str, str], str] = {}
        self.bytes = 0
        """Of all records together."""

    def __len__(self) -> int:
        return len(self._records)

    def add(self, tenant: str, request: str, response: str, record: bytes) -> None:
        """Remembers a request that was `request` to its client, and its answer `response`."""
        if self._most == 0:
            return
        key = (tenant, response)
        self._records[key] = record
        self._requests[key] = request
        self._names.setdefault(request, OrderedDict())[key] = None
        self.bytes += len(record)
        while len(self._records) > self._most or (self.bytes > self._most_bytes and len(self._records) > 1):
            self._forget()

    def find(self, id: str, tenant: str | None) -> bytes | None:
        """The last record with that id, of a request or a response; only of `tenant` unless that is None."""
        for key in reversed(self._names.get(id, ())):
            if tenant in (None, key[0]):
                return self._records[key]
        response = _PREFIX.sub("", id)
        if tenant is not None:
            return self._records.get((tenant, response))
        return next((record for key, record in self._records.items() if key[1] == response), None)

    def _forget(self) -> None:
        key, record = self._records.popitem(last=False)
        self.bytes -= len(record)
        request = self._requests.pop(key)
        names = self._names[request]
        del names[key]
        if not names:
            del self._names[request]
