"""OpenAI's request bodies: every field of its API, what becomes of it, and how bodies are read."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Raw

from penstock.gateway.api.extension import CacheControl, OpenAIExtension, SessionBody
from penstock.gateway.api.fields import ABSENT, accepted, honoured, refused
from penstock.gateway.api.openai.foreign import THINKING, ForeignFields
from penstock.gateway.api.reader import BodyReader

_OTHER_MEDIA = "send parts of type text"
_TOOLS = "send tools and tool_choice"
_TEMPLATE = "the model's own chat template is used"
TEMPLATE_VARIABLES = "variables that the model's chat template reads; another one is an error"
GENERATION_PROMPT = "false: the template opens no answer behind the messages"
CONTINUED = "true: the answer continues the text of the last message"
EFFORT = "given to a chat template that reads reasoning_effort; other models decide by themselves how long they think"


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: Annotated[bool | None, honoured("a last chunk with the usage")] = None
    include_obfuscation: Annotated[Raw, refused("", False)] = ABSENT
    continuous_usage_stats: Annotated[Raw, refused("", False)] = ABSENT


class _Generation(ForeignFields, kw_only=True):
    """Fields that both endpoints share."""

    model: Annotated[str, honoured("must be the name of the served model")]
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, honoured("requires stream")] = None
    max_tokens: Annotated[int | None, honoured("lowered to the room in the context")] = None
    min_tokens: Annotated[int | None, honoured("no end before so many tokens")] = None
    temperature: Annotated[float | None, honoured("default 1; 0 is greedy")] = None
    top_p: float | None = None
    top_k: Annotated[int | None, honoured("0 and -1: all tokens")] = None
    min_p: float | None = None
    repetition_penalty: Annotated[float | None, honoured("of all tokens of prompt and answer")] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, honoured("token id to bias")] = None
    seed: Annotated[int | None, honoured("left out, one is drawn; the usage says which")] = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    return_token_ids: Annotated[bool | None, honoured("every choice has its token ids")] = None
    n: int | None = None
    prompt_cache_key: Annotated[str | None, honoured("names the session, like the header x-session-affinity")] = None
    penstock: Annotated[OpenAIExtension | None, honoured("see docs/design/retention.md")] = None
    user: Annotated[Raw, accepted("a name for the client's own use")] = ABSENT
    response_format: Annotated[Raw, honoured("text, json_object or json_schema; see structured-output.md")] = ABSENT


class FunctionCallBody(msgspec.Struct, forbid_unknown_fields=True):
    """The function of a call, as the client sends it back."""

    name: str
    arguments: str


class ToolCallBody(msgspec.Struct, forbid_unknown_fields=True):
    """A call of an earlier assistant message."""

    id: str
    function: FunctionCallBody
    type: Literal["function"] | None = None
    index: Annotated[Raw, accepted("the calls are in order")] = ABSENT


class ImageUrl(msgspec.Struct, forbid_unknown_fields=True):
    """A picture."""

    url: Annotated[str, honoured("a data: URL of a png, jpeg, webp or gif; nothing is fetched")]
    detail: Annotated[Raw, accepted("pictures are cut as the model was trained")] = ABSENT


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message."""

    type: Annotated[
        str, honoured("text; image_url in messages of the user and of tools; refusal in messages of the assistant")
    ]
    text: str | None = None
    refusal: str | None = None
    cache_control: Annotated[CacheControl | None, honoured("see docs/design/retention.md")] = None
    prompt_cache_breakpoint: Annotated[Raw, accepted("whatever is repeated is found in the cache")] = ABSENT
    image_url: Annotated[ImageUrl | None, honoured("for models that see pictures")] = None
    input_audio: Annotated[Raw, refused(_OTHER_MEDIA)] = ABSENT
    audio_url: Annotated[Raw, refused(_OTHER_MEDIA)] = ABSENT
    video_url: Annotated[Raw, refused(_OTHER_MEDIA)] = ABSENT
    file: Annotated[Raw, refused(_OTHER_MEDIA)] = ABSENT


class MessageBody(msgspec.Struct, forbid_unknown_fields=True):
    """A message of any role."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: Annotated[str | None, honoured("given to the chat template")] = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: Annotated[str | None, honoured("given to the chat template")] = None
    reasoning: Annotated[str | None, honoured("another name of reasoning_content")] = None
    refusal: Annotated[str | None, honoured("is the content where there is no other")] = None
    cache_control: Annotated[CacheControl | None, honoured("see docs/design/retention.md")] = None
    annotations: Annotated[Raw, accepted("notes on a text, for people")] = ABSENT
    provider_specific_fields: Annotated[Raw, accepted("litellm's notes on an earlier answer")] = ABSENT
    function_call: Annotated[Raw, refused("send tool_calls")] = ABSENT
    audio: Annotated[Raw, refused()] = ABSENT


class FunctionBody(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, honoured("JSON Schema")] = None
    strict: Annotated[bool | None, honoured("true: a schema that can't be followed is an error")] = None


class ToolBody(msgspec.Struct, forbid_unknown_fields=True):
    """A tool; only functions are served."""

    type: Literal["function"]
    function: FunctionBody


class EffortBody(msgspec.Struct, forbid_unknown_fields=True):
    """`reasoning` of OpenRouter."""

    effort: Annotated[str | None, honoured("as reasoning_effort")] = None
    enabled: Annotated[Raw, refused(THINKING, True)] = ABSENT
    exclude: Annotated[Raw, refused("", False)] = ABSENT
    max_tokens: Annotated[Raw, refused(THINKING)] = ABSENT


class _Rendered(_Generation, kw_only=True):
    """How other servers render a chat."""

    chat_template: Annotated[Raw, refused(_TEMPLATE)] = ABSENT
    chat_template_kwargs: Annotated[dict[str, Any] | None, honoured(TEMPLATE_VARIABLES)] = None
    add_generation_prompt: Annotated[bool | None, honoured(GENERATION_PROMPT)] = None
    continue_final_message: Annotated[bool | None, honoured(CONTINUED)] = None
    enable_thinking: Annotated[bool | None, honoured("as in chat_template_kwargs")] = None
    reasoning_effort: Annotated[str | None, honoured(f"any word; {EFFORT}")] = None
    reasoning: EffortBody | None = None
    documents: Annotated[Raw, refused("", [])] = ABSENT
    mm_processor_kwargs: Annotated[Raw, refused("", {})] = ABSENT
    echo: Annotated[Raw, refused("", False)] = ABSENT
    best_of: Annotated[Raw, refused("", 1)] = ABSENT
    parse_tool_calls: Annotated[Raw, refused("", True)] = ABSENT
    thinking_forced_open: Annotated[Raw, refused("", False)] = ABSENT
    stream_tool_calls: Annotated[Raw, refused("", True)] = ABSENT


class ChatBody(_Rendered, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[MessageBody]
    tools: list[ToolBody] | None = None
    tool_choice: Annotated[Raw, honoured("auto, none, required, a function, or allowed_tools")] = ABSENT
    parallel_tool_calls: Annotated[bool | None, honoured("false: one call at most")] = None
    max_completion_tokens: Annotated[int | None, honoured("another name of max_tokens")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, honoured("requires logprobs")] = None
    metadata: Annotated[Raw, accepted("notes for the client's own use")] = ABSENT
    store: Annotated[Raw, refused("no chat completion is stored; responses are", False)] = ABSENT
    safety_identifier: Annotated[Raw, accepted("a name for the client's own use")] = ABSENT
    service_tier: Annotated[Raw, refused("", "auto", "default")] = ABSENT
    prompt_cache_retention: Annotated[Raw, accepted("a wish for the cache; penstock.retain is a promise")] = ABSENT
    prompt_cache_options: Annotated[Raw, accepted("a wish for the cache; penstock.retain is a promise")] = ABSENT
    prediction: Annotated[Raw, accepted("a hint for speed; drafts come from the mesh itself")] = ABSENT
    verbosity: Annotated[Raw, refused("", "medium")] = ABSENT
    modalities: Annotated[Raw, refused("", ["text"])] = ABSENT
    moderation: Annotated[Raw, refused()] = ABSENT
    audio: Annotated[Raw, refused()] = ABSENT
    web_search_options: Annotated[Raw, refused()] = ABSENT
    functions: Annotated[Raw, refused(_TOOLS, [])] = ABSENT
    function_call: Annotated[Raw, refused(_TOOLS, "none")] = ABSENT


class CompletionBody(_Generation, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: Annotated[str | list[str | int | list[int]], honoured("text, texts, token ids or lists of them")]
    logprobs: Annotated[int | None, honoured("so many alternatives of each token")] = None
    echo: Annotated[bool | None, refused("", False)] = None
    best_of: Annotated[int | None, honoured("must be equal to n")] = None
    suffix: Annotated[str | None, refused("", "")] = None
    enable_thinking: Annotated[Raw, refused("there is no chat template")] = ABSENT
    reasoning: Annotated[Raw, refused("there is no chat template", {})] = ABSENT


class HintBody(SessionBody, forbid_unknown_fields=True):
    """POST /v1/sessions/hint."""

    prompt_cache_key: str | None = None


read_chat = BodyReader(ChatBody).read
"""POST /v1/chat/completions."""
read_completion = BodyReader(CompletionBody).read
"""POST /v1/completions."""
read_hint = BodyReader(HintBody).read
"""POST /v1/sessions/hint."""
