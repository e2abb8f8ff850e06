"""The request bodies of Responses: every field of OpenAI's API, and what becomes of it."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Raw

from penstock.gateway.api.extension import CacheControl, Extension
from penstock.gateway.api.fields import ABSENT, accepted, honoured, refused
from penstock.gateway.api.openai.bodies import EFFORT
from penstock.gateway.api.reader import BodyReader

_OTHER_MEDIA = "send parts of type input_text"
_ECHO = "told by an earlier response, and of no meaning to the model"


class InputPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of an item."""

    type: Annotated[str, honoured("input_text, input_image, output_text, refusal, reasoning_text or summary_text")]
    text: str | None = None
    refusal: str | None = None
    cache_control: Annotated[CacheControl | None, honoured("see docs/design/retention.md")] = None
    annotations: Annotated[Raw, accepted(_ECHO)] = ABSENT
    logprobs: Annotated[Raw, accepted(_ECHO)] = ABSENT
    parsed: Annotated[Raw, accepted(_ECHO)] = ABSENT
    prompt_cache_breakpoint: Annotated[Raw, accepted("whatever is repeated is found in the cache")] = ABSENT
    image_url: Annotated[
        str | None, honoured("in messages of the user and outputs of functions: a data: URL; nothing is fetched")
    ] = None
    detail: Annotated[Raw, accepted("pictures are cut as the model was trained")] = ABSENT
    file_id: Annotated[Raw, refused(_OTHER_MEDIA)] = ABSENT
    file_data: Annotated[Raw, refused(_OTHER_MEDIA)] = ABSENT
    file_url: Annotated[Raw, refused(_OTHER_MEDIA)] = ABSENT
    filename: Annotated[Raw, refused(_OTHER_MEDIA)] = ABSENT
    input_audio: Annotated[Raw, refused(_OTHER_MEDIA)] = ABSENT


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """An item of the input, of any type that is served."""

    type: Annotated[
        str | None, honoured("message (default), function_call, function_call_output, reasoning, item_reference")
    ] = None
    role: Annotated[Literal["user", "assistant", "system", "developer"] | None, honoured("of a message")] = None
    content: Annotated[str | list[InputPart] | None, honoured("of a message, or of reasoning")] = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Annotated[str | list[InputPart] | None, honoured("of a function")] = None
    summary: Annotated[list[InputPart] | None, honoured("of reasoning without content")] = None
    encrypted_content: Annotated[str | None, honoured("of reasoning without content, as a response gave it")] = None
    id: Annotated[str | None, honoured("of an item_reference")] = None
    cache_control: Annotated[CacheControl | None, honoured("see docs/design/retention.md")] = None
    status: Annotated[Raw, accepted(_ECHO)] = ABSENT
    phase: Annotated[Raw, accepted(_ECHO)] = ABSENT
    caller: Annotated[Raw, accepted(_ECHO)] = ABSENT
    created_by: Annotated[Raw, accepted(_ECHO)] = ABSENT
    parsed_arguments: Annotated[Raw, accepted(_ECHO)] = ABSENT
    namespace: Annotated[Raw, refused("functions have no namespaces")] = ABSENT
    async_: Annotated[Raw, refused("", False)] = ABSENT


class FunctionToolBody(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call."""

    type: Annotated[str, honoured("function")]
    name: str = ""
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, honoured("JSON Schema")] = None
    strict: bool | None = None
    defer_loading: Annotated[Raw, refused("", False)] = ABSENT
    allowed_callers: Annotated[Raw, refused("", ["direct"])] = ABSENT
    output_schema: Annotated[Raw, accepted("what a function returns is for the client to check")] = ABSENT
    async_: Annotated[Raw, refused("", False)] = ABSENT


class TextBody(msgspec.Struct, forbid_unknown_fields=True):
    """`text`."""

    format: Annotated[Raw, honoured("text, json_object or json_schema")] = ABSENT
    verbosity: Annotated[Raw, refused("the model decides", "medium")] = ABSENT


class ReasoningBody(msgspec.Struct, forbid_unknown_fields=True):
    """`reasoning`."""

    effort: Annotated[str | None, honoured(f"any word; {EFFORT}")] = None
    summary: Annotated[str | None, honoured("given back; reasoning is given in full")] = None
    generate_summary: Annotated[Raw, accepted("reasoning is given in full")] = ABSENT
    context: Annotated[Raw, refused("", "auto", "all_turns")] = ABSENT
    mode: Annotated[Raw, refused("", "standard")] = ABSENT


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`."""

    include_obfuscation: Annotated[Raw, refused("", False)] = ABSENT
    include_usage: Annotated[Raw, accepted("every response has its usage")] = ABSENT


class ResponseBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses."""

    model: Annotated[str, honoured("must be the name of the served model")]
    input: Annotated[str | list[InputItem] | None, honoured("may be left out after a previous response")] = None
    instructions: Annotated[str | None, honoured("a system message in front; not carried over")] = None
    previous_response_id: Annotated[str | None, honoured("a stored response of the same tenant")] = None
    store: Annotated[bool | None, honoured("default true")] = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: list[FunctionToolBody] | None = None
    tool_choice: Annotated[Raw, honoured("auto, none, required, a function, or allowed_tools")] = ABSENT
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: Annotated[float | None, honoured("default 1; 0 is greedy")] = None
    top_p: float | None = None
    top_logprobs: int | None = None
    text: TextBody | None = None
    reasoning: ReasoningBody | None = None
    include: Annotated[
        list[str] | None,
        honoured("message.output_text.logprobs, reasoning.encrypted_content; others name items that never occur"),
    ] = None
    metadata: Annotated[dict[str, str] | None, honoured("kept with the response")] = None
    prompt_cache_key: Annotated[str | None, honoured("names the session, like the header x-session-affinity")] = None
    penstock: Annotated[Extension | None, honoured("see docs/design/retention.md")] = None
    user: Annotated[str | None, honoured("given back; a name for the client's own use")] = None
    safety_identifier: Annotated[str | None, honoured("given back; a name for the client's own use")] = None
    service_tier: Annotated[Raw, refused("", "auto", "default")] = ABSENT
    prompt_cache_retention: Annotated[Raw, accepted("blocks are kept as long as they are worth it")] = ABSENT
    prompt_cache_options: Annotated[Raw, accepted("blocks are kept as long as they are worth it")] = ABSENT
    max_tool_calls: Annotated[Raw, accepted("counts calls of built-in tools, of which there are none")] = ABSENT
    truncation: Annotated[
        Literal["auto", "disabled"] | None, honoured("auto: the oldest items of an input that is too long are left out")
    ] = None
    background: Annotated[Raw, refused("", False)] = ABSENT
    conversation: Annotated[Raw, refused("send previous_response_id")] = ABSENT
    prompt: Annotated[Raw, refused("send instructions and input")] = ABSENT
    context_management: Annotated[Raw, refused("", [])] = ABSENT
    moderation: Annotated[Raw, refused()] = ABSENT
    access_programs: Annotated[Raw, refused("", {})] = ABSENT
    image: Annotated[Raw, refused("", {})] = ABSENT


read_body = BodyReader(ResponseBody).read
