"""The request bodies of Messages: every field of Anthropic's API, and what becomes of it."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Raw

from penstock.gateway.api.extension import CacheControl, Extension
from penstock.gateway.api.fields import ABSENT, accepted, honoured, refused
from penstock.gateway.api.openai.bodies import EFFORT
from penstock.gateway.api.reader import BodyReader

_KEEP = "keeps the prompt up to here; see docs/design/retention.md"
_OTHER_MEDIA = "send blocks of type text"
_ECHO = "told by an earlier answer, and of no meaning to the model"
_LATE = "functions are all shown to the model"


class AnyBlock(msgspec.Struct, forbid_unknown_fields=True):
    """What all blocks have; of most other media only the names of fields are known."""

    type: Annotated[str, honoured("text")]
    text: str | None = None
    cache_control: Annotated[CacheControl | None, honoured(_KEEP)] = None
    citations: Annotated[Raw, accepted(_ECHO)] = ABSENT
    title: Annotated[Raw, refused(_OTHER_MEDIA)] = ABSENT
    context: Annotated[Raw, refused(_OTHER_MEDIA)] = ABSENT
    transformations: Annotated[Raw, refused(_OTHER_MEDIA)] = ABSENT
    tool_name: Annotated[Raw, refused(_OTHER_MEDIA)] = ABSENT


class PlainBlock(AnyBlock, forbid_unknown_fields=True):
    """A block of text."""

    source: Annotated[Raw, refused(_OTHER_MEDIA)] = ABSENT


class ImageSource(msgspec.Struct, forbid_unknown_fields=True):
    """A picture."""

    type: Annotated[str, honoured("base64; nothing is fetched")]
    media_type: Annotated[str | None, honoured("image/png, image/jpeg, image/webp or image/gif")] = None
    data: Annotated[str | None, honoured("the file, in base64")] = None
    url: Annotated[Raw, refused("send the picture itself")] = ABSENT
    file_id: Annotated[Raw, refused("send the picture itself")] = ABSENT


class ShownBlock(AnyBlock, forbid_unknown_fields=True):
    """A block of text, or a picture."""

    type: Annotated[str, honoured("text or image")]
    source: Annotated[ImageSource | None, honoured("of an image")] = None


class ContentBlock(AnyBlock, kw_only=True, forbid_unknown_fields=True):
    """A block of a message, of any type that is served."""

    type: Annotated[str, honoured("text, image, tool_use, tool_result, thinking or redacted_thinking")]
    source: Annotated[ImageSource | None, honoured("of an image, in a message of the user")] = None
    id: str | None = None
    name: str | None = None
    input: Annotated[Raw, honoured("of tool_use: an object")] = ABSENT
    tool_use_id: str | None = None
    content: Annotated[str | list[ShownBlock] | None, honoured("of tool_result")] = None
    is_error: Annotated[bool | None, honoured("the model reads `Error: ` before the content")] = None
    thinking: str | None = None
    signature: Annotated[Raw, accepted("thinking is taken as it is")] = ABSENT
    data: Annotated[Raw, accepted("of redacted_thinking, which the model cannot read")] = ABSENT
    caller: Annotated[Raw, accepted(_ECHO)] = ABSENT
    parsed_output: Annotated[Raw, accepted(_ECHO)] = ABSENT
    toolset_name: Annotated[Raw, refused("there are no toolsets")] = ABSENT


class TurnBody(msgspec.Struct, forbid_unknown_fields=True):
    """A message of any role."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class CustomToolBody(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: str
    type: Annotated[str | None, honoured("custom (default)")] = None
    input_schema: Annotated[dict[str, Any] | None, honoured("JSON Schema")] = None
    description: str | None = None
    strict: bool | None = None
    cache_control: Annotated[CacheControl | None, honoured(_KEEP)] = None
    eager_input_streaming: Annotated[Raw, accepted("input is streamed as it is generated")] = ABSENT
    defer_loading: Annotated[Raw, refused(_LATE, False)] = ABSENT
    allowed_callers: Annotated[Raw, refused("", ["direct"])] = ABSENT
    input_examples: Annotated[Raw, refused("send them in the description", [])] = ABSENT


class ToolChoiceBody(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str | None, honoured("of the type tool")] = None
    disable_parallel_tool_use: bool | None = None


class PromptMetadata(msgspec.Struct, forbid_unknown_fields=True):
    """`metadata`."""

    user_id: Annotated[Raw, accepted("a name for the client's own use")] = ABSENT


class OutputBody(msgspec.Struct, forbid_unknown_fields=True):
    """`output_config`."""

    effort: Annotated[str | None, honoured(f"any word; {EFFORT}")] = None
    format: Annotated[Raw, honoured("a json_schema")] = ABSENT


class _Prompt(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that both endpoints share."""

    model: Annotated[str, honoured("must be the name of the served model")]
    messages: Annotated[list[TurnBody], honoured("the answer continues a last one of the assistant")]
    system: Annotated[str | list[PlainBlock] | None, honoured("blocks of type text")] = None
    tools: list[CustomToolBody] | None = None
    tool_choice: ToolChoiceBody | None = None
    cache_control: Annotated[CacheControl | None, honoured("keeps the whole prompt")] = None
    thinking: Annotated[Raw, accepted("the model decides by itself whether it thinks")] = ABSENT
    output_config: OutputBody | None = None
    context_management: Annotated[Raw, accepted("the whole context is read")] = ABSENT
    speed: Annotated[Raw, refused("", "standard")] = ABSENT
    user_profile_id: Annotated[Raw, accepted("a name for the client's own use")] = ABSENT
    workspace_id: Annotated[Raw, accepted("the API key says who asks")] = ABSENT
    mcp_servers: Annotated[Raw, refused("call the server yourself and send its tools", [])] = ABSENT


class MessagesBody(_Prompt, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, honoured("lowered to the room in the context")]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float | None, honoured("default 1; 0 is greedy")] = None
    top_k: Annotated[int | None, honoured("0: all tokens")] = None
    top_p: float | None = None
    penstock: Annotated[Extension | None, honoured("see docs/design/retention.md")] = None
    metadata: PromptMetadata | None = None
    service_tier: Annotated[Raw, accepted("there is one tier")] = ABSENT
    container: Annotated[Raw, refused("there is no code execution")] = ABSENT
    inference_geo: Annotated[Raw, refused("the mesh serves where it stands")] = ABSENT
    diagnostics: Annotated[Raw, accepted("the usage says what was cached")] = ABSENT


class CountBody(_Prompt, kw_only=True):
    """POST /v1/messages/count_tokens."""


read_messages = BodyReader(MessagesBody).read
read_count = BodyReader(CountBody).read
