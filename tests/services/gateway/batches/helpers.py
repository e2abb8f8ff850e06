"""Files, batches and lines for tests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from penstock.gateway.batches.records import StoredBatch, StoredFile, new_batch_id, new_file_id, new_order

ENDPOINT = "/v1/completions"


def stored_file(tenant: str = "t", size: int = 3, **fields: Any) -> StoredFile:
    made: dict[str, Any] = {"id": new_file_id(), "tenant": tenant, "name": "lines.jsonl", "purpose": "batch"}
    made |= {"bytes": size, "created_at": 100, "expires_at": 10_000, "order": new_order()}
    return StoredFile(**made | fields)


def stored_batch(tenant: str = "t", **fields: Any) -> StoredBatch:
    made: dict[str, Any] = {
        "id": new_batch_id(),
        "tenant": tenant,
        "endpoint": ENDPOINT,
        "input_file_id": new_file_id(),
    }
    made |= {"completion_window": "24h", "created_at": 100, "expires_at": 1100, "order": new_order()}
    return StoredBatch(**made | fields)


def line(custom_id: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 4, **fields.pop("body", {})}
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body, **fields}


def written(*lines: object) -> bytes:
    return "".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in lines).encode()


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def content(store: Any, tenant: str, file: str) -> bytes:
    return b"".join([piece async for piece in store.read(tenant, file)])
