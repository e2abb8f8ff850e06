"""What whole answers look like, for the document; the shapes write them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Object = dict[str, Any]


class ChatAnswer(msgspec.Struct):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[Object]
    usage: Object


class CompletionAnswer(msgspec.Struct):
    """A legacy completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[Object]
    usage: Object


class ResponseAnswer(msgspec.Struct):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    model: str
    output: list[Object]
    usage: Object | None
    error: Object | None
    incomplete_details: Object | None
    instructions: str | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    top_p: float
    text: Object
    tool_choice: str | Object
    tools: list[Object]
    completed_at: int | None = None


class DeletedAnswer(msgspec.Struct):
    """A stored response that is gone."""

    id: str
    object: Literal["response"]
    deleted: bool


class ItemsAnswer(msgspec.Struct):
    """A page of input items."""

    object: Literal["list"]
    data: list[Object]
    first_id: str
    last_id: str
    has_more: bool


class MessageAnswer(msgspec.Struct):
    """A message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Object]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: Object


class CountAnswer(msgspec.Struct):
    """The tokens of a prompt."""

    input_tokens: int


class InputTokensAnswer(msgspec.Struct):
    """The tokens of an input."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class TokenizeAnswer(msgspec.Struct):
    """Token ids."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeAnswer(msgspec.Struct):
    """A text."""

    prompt: str


class HintAnswer(msgspec.Struct):
    """A hint was taken."""

    object: Literal["session.hint"]
    accepted: bool


class ModelAnswer(msgspec.Struct):
    """A model, in OpenAI's form; clients that send anthropic-version get Anthropic's."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    """Of an adapter: the model to which it is added."""
    max_model_len: int | None
    ready: bool


class ModelsAnswer(msgspec.Struct):
    """All models."""

    object: Literal["list"]
    data: list[ModelAnswer]


class HealthAnswer(msgspec.Struct):
    """Whether a request would succeed."""

    status: Literal["ok", "loading model"]


class FileAnswer(msgspec.Struct):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class FilesAnswer(msgspec.Struct):
    """A page of files."""

    object: Literal["list"]
    data: list[FileAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFileAnswer(msgspec.Struct):
    """A file that is gone."""

    id: str
    object: Literal["file"]
    deleted: bool


class BatchAnswer(msgspec.Struct):
    """A batch. The times are None as long as it has not been so."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: Object | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: Object
    usage: Object
    metadata: dict[str, str] | None


class BatchesAnswer(msgspec.Struct):
    """A page of batches."""

    object: Literal["list"]
    data: list[BatchAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class AnyAnswer(msgspec.Struct):
    """An object that its page of the documents describes."""


class ErrorDetails(msgspec.Struct):
    """What was wrong, in OpenAI's form."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """An error."""

    error: ErrorDetails


class MessageErrorDetails(msgspec.Struct):
    """What was wrong, in Anthropic's form."""

    type: str
    message: str


class MessageErrorAnswer(msgspec.Struct):
    """An error."""

    type: Literal["error"]
    error: MessageErrorDetails
    request_id: str
