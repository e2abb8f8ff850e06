"""The chat format as Python, for the generator: text plus the weight of each character range.

`chat_template.jinja` is the same format for everybody else; a test holds the two to the same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MARK_OPEN, MARK_CLOSE = "\x01", "\x02"  # round a value in an answer; never rendered
DECISION = 3.0  # weight of a token that chooses: first of a name, a key, a value, a turn
STRUCTURE = 2.0  # of a token that says what comes next: the rest of a name, JSON answers' keys, spaces in values
PLAIN = 1.0


@dataclass
class Document:
    """A training document: `text`, weighted ranges (start, end, weight) and, for measuring, labelled ranges.

    Characters outside every range weigh nothing. Where ranges overlap the later one counts. `labels` names
    the ranges that evaluation scores: `name`, `call`, `value`, `answer`, `json`, `text`. `foretold` are places of
    the list of tools whose words stand before them: nobody writes them, but they can be learned from. `differing` are
    where the name of a call first is unlike that of another tool which begins as it does. `messages` and `tools` are
    what a chat document was rendered from.
    """

    text: str = ""
    ranges: list[tuple[int, int, float]] = field(default_factory=list)
    labels: list[tuple[int, int, str]] = field(default_factory=list)
    kind: str = ""
    foretold: list[tuple[int, int]] = field(default_factory=list)
    differing: list[tuple[int, int]] = field(default_factory=list)
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()

    def add(self, text: str, weight: float = 0.0) -> tuple[int, int]:
        """Append `text`; returns its range."""
        start = len(self.text)
        self.text += text
        if weight:
            self.ranges.append((start, start + len(text), weight))
        return start, start + len(text)

    def decide(self, position: int) -> None:
        """Weigh the token that begins at `position` as a decision."""
        self.ranges.append((position, position + 1, DECISION))

    def call_name(self, name: str) -> None:
        """Append the name of a call: which tool it is, is decided by its first token."""
        span = self.add(name, STRUCTURE)
        self.decide(span[0])
        self.label(span, "name")
        for tool in self.tools:
            other = tool.get("function", tool)["name"]
            alike = next((i for i, (a, b) in enumerate(zip(name, other, strict=False)) if a != b), 0)
            if alike:
                self.differing.append((span[0] + alike, span[0] + alike + 1))

    def label(self, span: tuple[int, int], name: str) -> None:
        self.labels.append((*span, name))


def unmarked(text: str) -> str:
    """`text` without the value marks."""
    return text.replace(MARK_OPEN, "").replace(MARK_CLOSE, "")


def arguments_text(arguments: Mapping[str, Any] | str) -> str:
    """Call arguments as the model writes them; a string is taken to be that already."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), kind: str = "") -> Document:
    """Render OpenAI `messages` and `tools`; assistant turns carry weight and labels."""
    doc = Document(kind=kind, messages=messages, tools=tools)
    rest = list(messages)
    if tools or (rest and rest[0]["role"] == "system"):
        system = rest.pop(0)["content"] if rest and rest[0]["role"] == "system" else ""
        doc.add(f"<|im_start|>system\n{system}")
        if tools:
            doc.add(("\n\n" if system else "") + "# Tools")
            for tool in tools:
                start, _ = doc.add("\n" + tool_text(tool))
                doc.foretold += _foretold(doc.text[start:], start)
        doc.add("<|im_end|>\n")
    for message in rest:
        doc.add(f"<|im_start|>{message['role']}\n")
        if message.get("retold"):
            doc.add(_retold(message))
        elif message["role"] == "assistant":
            _assistant(doc, message)
        elif message["role"] == "tool":
            doc.add(f"<tool_response>\n{message['content']}\n</tool_response>")
        else:
            doc.add(message["content"])
        learned = message["role"] == "assistant" and not message.get("retold")
        doc.add("<|im_end|>", PLAIN if learned else 0.0)
        doc.add("\n")
    return doc


def _retold(message: Mapping[str, Any]) -> str:
    """A turn of calls whose arguments are the text that a client has sent."""
    calls = (call["function"] for call in message["tool_calls"])
    texts = (
        f'<tool_call>\n{{"name": "{c["name"]}", "arguments": {arguments_text(c["arguments"])}}}\n</tool_call>'
        for c in calls
    )
    return "\n".join(texts)


def _assistant(doc: Document, message: Mapping[str, Any]) -> None:
    start = len(doc.text)
    content = message.get("content") or ""
    if content:
        _answer(doc, content, message.get("label", "answer"))
    for i, call in enumerate(message.get("tool_calls") or ()):
        begin = len(doc.text)
        doc.add(("\n" if content or i else "") + "<tool_call>\n", PLAIN)
        function = call["function"]
        doc.add('{"name": "', PLAIN)
        doc.call_name(function["name"])
        doc.add('", "arguments": ', PLAIN)
        arguments = function["arguments"]
        _arguments(doc, json.loads(arguments) if isinstance(arguments, str) else arguments)
        doc.add("}\n</tool_call>", PLAIN)
        doc.label((begin, len(doc.text)), "call")
        if i:
            doc.decide(begin)
    doc.decide(start)


def _answer(doc: Document, content: str, label: str) -> None:
    start = len(doc.text)
    for piece in content.split(MARK_OPEN):
        value, closed, tail = piece.partition(MARK_CLOSE)
        if not closed:
            _between(doc, piece, label)
            continue
        doc.decide(len(doc.text))
        doc.label(doc.add(value, PLAIN), "value")
        doc.ranges[-2:] = reversed(doc.ranges[-2:])  # the decision outweighs the range added after it
        _between(doc, tail, label)
    doc.label((start, len(doc.text)), label)


def _between(doc: Document, text: str, label: str) -> None:
    """What stands between the values of an answer. In JSON each key's beginning is a decision, and so is each end of
    a key or a value, where the quote says whether the next value is a string."""
    start, _ = doc.add(text, STRUCTURE if label == "json" else PLAIN)
    if label == "json":
        for run in re.finditer(r'[{}\[\]",: ]+', text):
            doc.decide(start + run.start())
            if run.end() < len(text):
                doc.decide(start + run.end())


def _arguments(doc: Document, arguments: Mapping[str, Any]) -> None:
    """The arguments object, marking the first token of each key and value."""
    separator = "{"
    for key, item in arguments.items():
        doc.add(separator, DECISION)
        start, end = doc.add(f'"{key}": ', STRUCTURE)
        doc.decide(start + 1)
        doc.decide(end - 3)  # the key ends, and the value is quoted or not
        text = json.dumps(item, ensure_ascii=False)
        start, _ = doc.add(text, PLAIN)
        doc.decide(start + 1 if text.startswith('"') else start)
        doc.ranges += [(start + i, start + i + 1, STRUCTURE) for i, c in enumerate(text) if c == " "]
        separator = ", "
    doc.add("}" if arguments else "{}", DECISION)


_WORD = re.compile(r"[A-Za-z][a-z]{2,}")


def _foretold(text: str, start: int) -> list[tuple[int, int]]:
    """Words of a tool's name and keys that its description has, or its name; `text` begins at `start`."""
    head, mark, call = text.rpartition('{"name": ')
    known = {word.lower() for word in _WORD.findall(head)}
    found = []
    for quoted in re.finditer(r'^"[^"]+"|"[^"]+"(?=: )', call):
        words = list(_WORD.finditer(quoted.group()))
        at = start + len(head) + len(mark) + quoted.start()
        found += [(at + word.start(), at + word.end()) for word in words if word.group().lower() in known]
        known |= {word.group().lower() for word in words}
    return found


def tool_text(tool: Mapping[str, Any]) -> str:
    """A tool as the prompt shows it: its description, then the call to make, with types for values."""
    function = tool.get("function", tool)
    description = function.get("description")
    head = f"{description}\n" if description else ""
    parameters = function.get("parameters") or {}
    return f'{head}{{"name": "{function["name"]}", "arguments": {_object_text(parameters)}}}'


def _object_text(schema: Mapping[str, Any]) -> str:
    required = schema.get("required") or []
    fields = (schema.get("properties") or {}).items()
    return "{" + ", ".join(f'"{k}": {_type_text(v, k not in required)}' for k, v in fields) + "}"


def _type_text(schema: Any, optional: bool) -> str:
    """The place of a value. Strings keep their quotes, so that what surrounds them is what a call writes."""
    lead = "optional " if optional else ""
    if not isinstance(schema, Mapping):
        return f"{lead}any"
    note = f" ({schema['description']})" if schema.get("description") else ""
    if "const" in schema:
        return json.dumps(schema["const"], ensure_ascii=False)
    if schema.get("enum"):
        options = schema["enum"]
        text = " | ".join(o if isinstance(o, str) else json.dumps(o) for o in options)
        quote = '"' if isinstance(options[0], str) else ""
        return f"{quote}{lead}{text}{note}{quote}"
    if schema.get("properties"):
        return _object_text(schema)
    kind = schema.get("type")
    if kind == "array":
        return f"[{_type_text(schema.get('items'), optional)}]"
    if kind == "string":
        return f'"{lead}string{note}"'
    if isinstance(kind, str):
        return f"{lead}{kind}{note}"
    if isinstance(kind, list):
        return f"{lead}{' | '.join(kind)}{note}"
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return " | ".join(_type_text(choice, optional) for choice in choices)
    return f"{lead}any{note}"
