"""The paths of the document, and the document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import msgspec

from penstock.gateway.api.anthropic.bodies import CountBody, MessagesBody
from penstock.gateway.api.inquiry import Json, encode
from penstock.gateway.api.openai.batch_bodies import BatchBody
from penstock.gateway.api.openai.bodies import ChatBody, CompletionBody, HintBody
from penstock.gateway.api.openai.tokenizing import DetokenizeBody, TokenizeBody
from penstock.gateway.api.openapi import answers
from penstock.gateway.api.openapi.schemas import components, reference
from penstock.gateway.api.responses.bodies import ResponseBody

Struct = type[msgspec.Struct]


_TEXT: Json = {"type": "string"}
_FILE_FORM: Json = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"enum": ["batch"]},
        "file": {**_TEXT, "format": "binary", "description": "Lines of JSON, one for each request"},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {**_TEXT, "pattern": "^[0-9]{4,7}$"},
    },
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: Literal["get", "post", "delete"]
    path: str
    summary: str
    answer: Struct | None = None
    """None: it is no JSON."""
    body: Struct | None = None
    form: Json | None = None
    """The schema of a form in place of a body."""
    streams: bool = False
    kind: str = "text/plain"
    """Of an answer that is no JSON."""
    queries: tuple[str, ...] = ()
    open: bool = False
    """Whether it asks for no key."""

    @property
    def error(self) -> Struct:
        """Its errors."""
        return answers.MessageErrorAnswer if self.path.startswith("/v1/messages") else answers.ErrorAnswer


OPERATIONS = (
    Operation("post", "/v1/chat/completions", "A chat completion", answers.ChatAnswer, ChatBody, streams=True),
    Operation("post", "/v1/completions", "A legacy completion", answers.CompletionAnswer, CompletionBody, streams=True),
    Operation("post", "/v1/responses", "A response", answers.ResponseAnswer, ResponseBody, streams=True),
    Operation("post", "/v1/responses/input_tokens", "The tokens of an input", answers.InputTokensAnswer, ResponseBody),
    Operation("get", "/v1/responses/{id}", "A stored response", answers.ResponseAnswer),
    Operation("delete", "/v1/responses/{id}", "Forgets a stored response", answers.DeletedAnswer),
    Operation(
        "get",
        "/v1/responses/{id}/input_items",
        "The input of a stored response",
        answers.ItemsAnswer,
        queries=("order", "limit", "after"),
    ),
    Operation(
        "post", "/v1/messages", "A message, in Anthropic's form", answers.MessageAnswer, MessagesBody, streams=True
    ),
    Operation("post", "/v1/messages/count_tokens", "The tokens of a prompt", answers.CountAnswer, CountBody),
    Operation("post", "/v1/embeddings", "Always an error: no model here makes embeddings", answers.AnyAnswer),
    Operation("post", "/tokenize", "The token ids of a prompt", answers.TokenizeAnswer, TokenizeBody),
    Operation("post", "/detokenize", "The text of token ids", answers.DetokenizeAnswer, DetokenizeBody),
    Operation("post", "/v1/sessions/hint", "When a session comes back, or that it ended", answers.HintAnswer, HintBody),
    Operation("post", "/v1/files", "Keeps a file for batches", answers.FileAnswer, form=_FILE_FORM),
    Operation("get", "/v1/files", "Files", answers.FilesAnswer, queries=("order", "limit", "after", "purpose")),
    Operation("get", "/v1/files/{id}", "One file", answers.FileAnswer),
    Operation("delete", "/v1/files/{id}", "Deletes a file", answers.DeletedFileAnswer),
    Operation("get", "/v1/files/{id}/content", "The bytes of a file", kind="application/jsonl"),
    Operation("post", "/v1/batches", "Begins a batch", answers.BatchAnswer, BatchBody),
    Operation("get", "/v1/batches", "Batches", answers.BatchesAnswer, queries=("order", "limit", "after")),
    Operation("get", "/v1/batches/{id}", "One batch", answers.BatchAnswer),
    Operation("post", "/v1/batches/{id}/cancel", "Cancels a batch", answers.BatchAnswer),
    Operation("get", "/v1/models", "All models", answers.ModelsAnswer),
    Operation("get", "/v1/models/{name}", "One model", answers.ModelAnswer),
    Operation("get", "/v1/requests/{id}", "The plan and the times of a recent request", answers.AnyAnswer),
    Operation(
        "get",
        "/v1/usage",
        "What tenants have used",
        answers.AnyAnswer,
        queries=("from", "to", "by", "tenant", "format"),
    ),
    Operation("get", "/openapi.json", "This document", answers.AnyAnswer, open=True),
    Operation("get", "/health", "Whether a request would succeed", answers.HealthAnswer, open=True),
    Operation("get", "/healthz", "Answers while the process runs", open=True),
    Operation("get", "/readyz", "Whether a request would succeed", open=True),
    Operation("get", "/metrics", "Metrics, in Prometheus' form"),
)
_ABOUT = """OpenAI's Chat Completions, Completions and Responses, Anthropic's Messages, and what belongs to them.

A field with `x-penstock-fate: accepted` has no effect and promises none; `refused` is an error unless it asks for what
every answer is."""


@cache
def document() -> bytes:
    """The document, as JSON."""
    types = {kind for found in OPERATIONS for kind in (found.answer, found.body, found.error) if kind is not None}
    paths: Json = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Penstock", "version": "1", "description": _ABOUT},
            "security": [{"bearer": []}, {"key": []}, {}],
            "paths": paths,
            "components": {
                "schemas": components(sorted(types, key=lambda kind: kind.__name__)),
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
        }
    )


def _operation(operation: Operation) -> Json:
    made: Json = {
        "summary": operation.summary,
        "operationId": f"{operation.method}{operation.path.replace('/', '_').replace('{', '').replace('}', '')}",
        "responses": {
            "200": {"description": "The answer", "content": _content(operation)},
            "default": {"description": "An error", "content": _json(operation.error)},
        },
    }
    if parameters := list(_parameters(operation)):
        made["parameters"] = parameters
    if operation.body is not None:
        made["requestBody"] = {"required": True, "content": _json(operation.body)}
    if operation.form is not None:
        made["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": operation.form}}}
    return made | ({"security": [{}]} if operation.open else {})


def _content(operation: Operation) -> Json:
    if operation.answer is None:
        return {operation.kind: {"schema": _TEXT}}
    stream = {"text/event-stream": {"schema": {"type": "string"}}} if operation.streams else {}
    return _json(operation.answer) | stream


def _json(kind: Struct) -> Json:
    return {"application/json": {"schema": reference(kind)}}


def _parameters(operation: Operation) -> Iterator[Json]:
    for part in operation.path.split("/"):
        if part.startswith("{"):
            yield {"name": part[1:-1], "in": "path", "required": True, "schema": {"type": "string"}}
    for name in operation.queries:
        yield {"name": name, "in": "query", "schema": {"type": "string"}}
