"""The text side of a model directory: its tokenizer, its chat template, and how its answers are parsed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from penstock.chat.detokenize import TextStream, TokenBytes
from penstock.chat.formats.families import FORMATS, recognise
from penstock.chat.formats.format import ToolFormat
from penstock.chat.formats.parser import AssistantParser
from penstock.chat.messages import PLAIN, Message, Rendering, Tool
from penstock.chat.pictures import PictureTokens, picture_tokens
from penstock.chat.prompt import Marker, PromptEncoder
from penstock.chat.resuming.rendered import Rendered, furthest
from penstock.chat.sessions import Continuations
from penstock.chat.template import ChatTemplate, Renders
from penstock.checkpoint import CheckpointError, PictureForm, picture_form, tokenizer_file
from penstock.errors import InvalidRequest

_END = "\ufdd1 "
"""Behind a text that an answer continues, while the template renders it: a noncharacter, and a space that is gone when
the template trims."""


class ChatModelError(ValueError):
    """A model directory that cannot be used."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path}: {what}")


@dataclass(frozen=True, slots=True)
class ChatModel:
    """Immutable; shared by all requests. Made by `load_chat_model`."""

    tokenizer: Tokenizer
    fingerprint: str
    """sha256 of tokenizer.json, hex."""
    template: Renders | None
    encoder: PromptEncoder
    token_bytes: TokenBytes
    eos_ids: frozenset[int]
    vocab_size: int
    """Ids below this are the model's. There may be more than the tokenizer has: such a token has no text, but it can be
    generated, and what was generated can be sent back."""
    silent: frozenset[int]
    """Special tokens, which have no text in an answer."""
    family: ToolFormat
    """How tool calls and reasoning look in an answer."""
    thinks: bool
    """Whether answers may begin with reasoning."""
    added: Mapping[str, int]
    """The ids of added tokens by their texts."""
    call_tokens: frozenset[int]
    """Tokens with which calls begin; none where calls begin with text."""
    continuations: Continuations
    """Finds what a session's next prompt may take over."""
    pictures: PictureTokens | None
    """How prompts show pictures; None: they don't."""
    _foreign: Marker
    _own: Marker

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], rendering: Rendering = PLAIN) -> str:
        """The text that `rendered` makes."""
        return self.rendered(messages, tools, rendering).text

    def rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        rendering: Rendering = PLAIN,
        earlier: Sequence[Rendered] = (),
    ) -> Rendered:
        """The prompt's text, marked (see `prompt`), ready for the model to answer. Raises InvalidRequest.

        Where one of the `earlier` renderings, of any kind and with any tools, can be gone on from, only what is new is
        rendered. A text that the answer continues is always rendered as a whole, and none goes on from it.
        """
        if self.template is None:
            raise InvalidRequest("messages: this model has no chat template; use /v1/completions", field="messages")
        try:
            offered = [self._foreign.mark(tool.as_json()) for tool in tools] or None
            values = self._values(rendering, self.template.variables)
            if rendering.continued:
                text = self._continued(self.template, messages, offered, values)
                return Rendered(text, tuple(messages), open=True)
            resume = partial(self.template.resume, generate=rendering.generate, variables=values)
            found = furthest(messages, earlier)
            if found is not None:
                seen = found.seen(messages)
                shown = [self._template_message(each) if at in seen else each.role for at, each in enumerate(messages)]
                rest = resume(shown, offered, found.waypoint)
                if rest is not None:
                    return found.continued(messages, rest)
            rest = resume([self._template_message(each) for each in messages], offered, None)
        except RecursionError:
            raise InvalidRequest("messages: messages or tools are nested too deeply", field="messages") from None
        assert rest is not None, "a whole rendering is never lost"
        return Rendered(rest.text, tuple(messages), rest.waypoint)

    def _continued(
        self,
        template: Renders,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """The text up to where an answer continues the last message."""
        if messages[-1].calls or messages[-1].parts:
            has = "calls" if messages[-1].calls else "pictures"
            what = f"messages: the last one has {has}, which an answer cannot continue"
            raise InvalidRequest(what, field="messages")
        shown = [self._template_message(message) for message in messages]
        shown[-1]["content"] += _END
        return _open(template.render(shown, tools, generate=False, variables=variables))

    def _values(self, rendering: Rendering, known: Collection[str]) -> dict[str, Any]:
        """The variables that the client sets. Raises InvalidRequest for one that the template does not read."""
        for variable in rendering.variables:
            idle = variable.name == "enable_thinking" and variable.value is False and not self.thinks
            if variable.name not in known and not variable.wish and not idle:
                read = ", ".join(sorted(known)) or "none"
                what = f"{variable.at}: the model's chat template does not read it; of such variables it reads {read}"
                raise InvalidRequest(what, field=variable.at, code="unsupported_parameter")
        given = {variable.name: variable.value for variable in rendering.variables if variable.name in known}
        marked: dict[str, Any] = self._foreign.mark(given)
        return marked

    def text_stream(self) -> TextStream:
        """A detokenizer for one answer."""
        return TextStream(self.tokenizer, self.silent, self.token_bytes)

    def parser(self, *, thinking: bool, offered: Collection[str] | None) -> AssistantParser:
        """A parser for one answer; `thinking`: it begins inside of reasoning; `offered`: the functions that may be
        called."""
        return AssistantParser(self.family, offered=offered, think=self.thinks, thinking=thinking)

    def thinking(self, prompt: str, continued: str = "") -> bool:
        """Whether an answer to the rendered `prompt` begins inside of reasoning; `continued` is the text of a message
        that it continues."""
        begin, end = self.family.reasoning.open.strip(), self.family.reasoning.close.strip()
        if not self.thinks:
            return False
        return prompt.rstrip().endswith(begin) or continued.rfind(begin) > continued.rfind(end)

    def _template_message(self, message: Message) -> dict[str, Any]:
        # An assistant's text may hold a marker that the parser took for content; it must come back as it was.
        marker = self._own if message.role == "assistant" else self._foreign
        content: str | list[dict[str, str]] = marker.mark(message.content)
        if message.parts:
            content = [
                {"type": "text", "text": marker.mark(part)} if isinstance(part, str) else {"type": "image"}
                for part in message.parts
            ]
        shown: dict[str, Any] = {"role": message.role, "content": content}
        if message.name:
            shown["name"] = marker.mark(message.name)
        if message.call_id:
            shown["tool_call_id"] = marker.mark(message.call_id)
        if message.reasoning:
            shown["reasoning_content"] = marker.mark(message.reasoning)
        if message.calls:
            shown["tool_calls"] = [
                {
                    "id": marker.mark(call.id),
                    "type": "function",
                    "function": {
                        "name": marker.mark(call.name),
                        "arguments": _marked_arguments(call.arguments, marker),
                    },
                }
                for call in message.calls
            ]
        return shown


_SURROGATE = re.compile("[\ud800-\udfff]")


def _marked_arguments(text: str, marker: Marker) -> str:
    """The arguments of a call, marked; also what control tokens escapes of JSON make in them: templates may show each
    argument by itself."""
    marked: str = marker.mark(text)
    if "\\" not in text:
        return marked
    try:
        values = marker.mark(json.loads(text))
        if json.loads(marked) == values:
            return marked
        written = json.dumps(values, ensure_ascii=False)
        return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", written)  # which are no text
    except (ValueError, RecursionError):
        return marked  # no JSON: it is shown as a text


def _open(text: str) -> str:
    """A rendered text up to where the answer continues it; as transformers does it, without the space in front where
    the template trims. Raises InvalidRequest when the template shows the last message in another form."""
    at = text.rfind(_END.rstrip())
    if at < 0:
        what = "messages: the chat template does not show the last message's text, so an answer cannot continue it"
        raise InvalidRequest(what, field="messages")
    return text[:at] if text.startswith(_END, at) else text[:at].rstrip()


def load_chat_model(directory: Path, tool_format: str = "") -> ChatModel:
    """Reads the small files of a model directory; no weights. Raises ChatModelError.

    `tool_format` names one of `FORMATS`; empty: the one that the chat template belongs to.
    """
    file = tokenizer_path(directory)
    raw = _read(file)
    try:
        tokenizer = Tokenizer.from_buffer(raw)
    except BaseException as error:  # the tokenizers library raises nothing narrower
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # pyo3's, not importable
            raise
        raise ChatModelError(file, f"is not a tokenizer: {error}") from None
    tokenizer.no_truncation()  # settings of how it was trained
    tokenizer.no_padding()
    settings = _read_object(directory / "tokenizer_config.json")
    added = tokenizer.get_added_tokens_decoder()
    eos_ids = _eos_ids(directory, tokenizer, settings)
    encoder = PromptEncoder(tokenizer)
    special = {what.content for what in added.values() if what.special}
    control = {what.content for what in added.values() if what.content.strip()}  # some models have tokens for spaces
    source = _template_text(directory, settings)
    family = FORMATS[tool_format] if tool_format else recognise(source)
    return ChatModel(
        tokenizer=tokenizer,
        fingerprint=hashlib.sha256(raw).hexdigest(),
        template=_template(directory, source, settings),
        encoder=encoder,
        token_bytes=TokenBytes(tokenizer, b'"ByteLevel"' in raw),
        eos_ids=eos_ids,
        vocab_size=_vocab_size(directory, tokenizer),
        silent=frozenset(id for id, what in added.items() if what.special and not family.shows(what.content)),
        family=family,
        thinks=family.thinks(source, control),
        added={what.content: id for id, what in added.items()},
        call_tokens=frozenset(id for id, what in added.items() if what.content in family.opens),
        continuations=Continuations(
            [text for token, text in encoder.cut_texts.items() if token in eos_ids],
            lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        ),
        pictures=picture_tokens(_picture_form(directory), {what.content: id for id, what in added.items()}),
        _foreign=Marker(control.union(family.markers)),
        _own=Marker(special),
    )


def tokenizer_path(directory: Path) -> Path:
    """The tokenizer of a model directory, see tokenizer_file. Raises ChatModelError."""
    try:
        return tokenizer_file(directory)
    except CheckpointError as error:
        raise ChatModelError(error.file, error.reason) from None


def _picture_form(directory: Path) -> PictureForm | None:
    try:
        return picture_form(directory, _read_object(directory / "config.json"))
    except CheckpointError as error:
        raise ChatModelError(error.file, error.reason) from None


def _template_text(directory: Path, settings: dict[str, Any]) -> str:
    file = directory / "chat_template.jinja"
    found = settings.get("chat_template")
    if file.is_file():
        try:
            found = _read(file).decode()
        except UnicodeDecodeError:
            raise ChatModelError(file, "is not UTF-8") from None
    if isinstance(found, list):
        named = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, dict)}
        found, with_tools = named.get("default"), named.get("tool_use")
        if isinstance(found, str) and isinstance(with_tools, str):  # as transformers chooses; nothing is trimmed
            nothing = "{{ '' }}"
            parts = ("{% if tools %}", with_tools, "{% else %}", found, "{% endif %}")
            return nothing.join(parts)
    return found if isinstance(found, str) else ""


def _template(directory: Path, source: str, settings: dict[str, Any]) -> ChatTemplate | None:
    if not source:
        return None
    try:
        return ChatTemplate(source, dict(_special_texts(settings)))
    except ValueError as error:
        raise ChatModelError(directory, str(error)) from None


def _special_texts(settings: dict[str, Any]) -> list[tuple[str, str]]:
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    pairs = ((name, settings.get(name)) for name in names)
    texts = ((name, value.get("content") if isinstance(value, dict) else value) for name, value in pairs)
    return [(name, text) for name, text in texts if isinstance(text, str)]


def _eos_ids(directory: Path, tokenizer: Tokenizer, settings: dict[str, Any]) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        value = _read_object(directory / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if ids and all(type(token) is int for token in ids):
            return frozenset(ids)
    text = dict(_special_texts(settings)).get("eos_token")
    found = tokenizer.token_to_id(text) if text else None
    return frozenset() if found is None else frozenset((found,))


def _vocab_size(directory: Path, tokenizer: Tokenizer) -> int:
    """As config.json says it, where there is one."""
    config = _read_object(directory / "config.json")
    text = config.get("text_config")
    for values in (config, text if isinstance(text, dict) else {}):
        size = values.get("vocab_size")
        if type(size) is int and size > 0:
            return size
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ChatModelError(path, f"cannot be read: {error.strerror}") from None


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ChatModelError(path, f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ChatModelError(path, "does not hold a JSON object")
    return value
