"""A server with OpenAI's API: where it is, how it is asked, and how long text is for its model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from penstock.load.chunks import AnswerReader
from penstock.load.client import HttpClient
from penstock.load.errors import LoadError
from penstock.load.wording import Wording

Tools = Literal["auto", "required", "none"]
Endpoint = Literal["chat", "completions", "llamaserver"]
"""What is asked; the latter two with ids of tokens. `llamaserver`: its own, as its /v1/completions tells no ids."""
_PATHS: dict[Endpoint, str] = {"chat": "/chat/completions", "completions": "/completions", "llamaserver": "/completion"}
_PROBE_WORDS, _MOST_PROBE_WORDS = 256, 1024
"""Of the longer of two prompts whose lengths are compared: where nobody knows what fits, and at most."""
_WORDS_IN_CONTEXT = 16
"""A word takes so many tokens at most, of a context."""
_PROBE_S = 120.0
_CALL_TOKENS = 256
"""Are room enough for a call of a tool that has to be."""


class LoadTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A server, and what every request to it has."""

    host: str
    port: int
    tls: bool
    prefix: str
    """Of every path, such as /v1."""
    endpoint: Endpoint = "chat"
    model: str = ""
    key: str = ""
    """Sent as a bearer token, where it is not empty."""
    session_header: str = "x-session-affinity"
    """Names the session; empty: none does."""
    ignore_eos: bool = True
    """Answers are as long as in the trace: `ignore_eos`, an extension that most servers have, is sent."""
    tools: Tools = "auto"
    timeout_s: float = 600.0
    retries: int = 0
    """How often a request is sent again that was refused for now; its time goes on."""
    extra: dict[str, Any] = {}
    """Further fields of every request."""

    @property
    def url(self) -> str:
        """For people."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}{self.prefix}"

    @property
    def path(self) -> str:
        """Of its endpoint, behind the prefix."""
        return _PATHS[self.endpoint]

    def token_body(self, prompt: Sequence[int], output: int) -> bytes:
        """Of a streamed completion of token ids, which tells those of its answer."""
        body: dict[str, Any]
        if self.endpoint == "llamaserver":
            body = {"n_predict": output, "return_tokens": True, "cache_prompt": True}
        else:
            usage = {"include_usage": True}
            body = {"model": self.model, "max_tokens": output, "return_token_ids": True, "stream_options": usage}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode({"prompt": prompt, "stream": True} | body | self.extra)

    def chat_body(self, messages: list[dict[str, Any]], output: int, tools: list[dict[str, Any]], must: bool) -> bytes:
        """Of a streamed chat completion; `must`: it shall call one of the tools."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        forced = must and bool(tools) and self.tools == "required"
        body["max_tokens"] = max(output, _CALL_TOKENS) if forced else output
        if self.ignore_eos and not forced:
            body["ignore_eos"] = True
        if tools:
            body |= {"tools": tools, "tool_choice": "required" if forced else "auto"}
        return msgspec.json.encode(body | self.extra)


def parsed(url: str) -> tuple[str, int, bool, str]:
    """Host, port, whether it is TLS, and the prefix of paths. Raises LoadError."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.username:
        raise LoadError(f"--url must be that of a server, such as http://127.0.0.1:8080, not {url!r}")
    prefix = parts.path.rstrip("/") or "/v1"
    tls = parts.scheme == "https"
    return parts.hostname, port or (443 if tls else 80), tls, prefix


class ServedContext(msgspec.Struct, frozen=True):
    """A model that a server has."""

    name: str
    context: int
    """Tokens of a prompt and its answer; 0: the server does not say."""


async def served(target: LoadTarget) -> ServedContext:
    """The target's model, the first one where the target names none. Raises LoadError."""
    answer = await _sent(target, HttpClient(target).request("GET", "/models"))
    try:
        models = {model["id"]: model for model in json.loads(answer)["data"]}
        name = target.model or next(iter(models))
    except (ValueError, KeyError, TypeError, StopIteration):
        if target.model:
            return ServedContext(target.model, 0)
        raise LoadError(f"{target.url}/models names no model: say which with --model") from None
    if models and name not in models:
        raise LoadError(f"--model must be one of {', '.join(models)}, not {name!r}")
    context = models.get(name, {}).get("max_model_len")
    return ServedContext(name, context if isinstance(context, int) else 0)


async def calibrated(target: LoadTarget, context: int, salt: str) -> Wording:
    """How many words a token is for the target's model, by what the server says of the lengths of two prompts, and what
    a definition of a tool adds. `context`: what fits, if that is known, else 0. Raises LoadError when it doesn't
    answer."""
    wording = Wording(salt=salt, words_per_token=1.0)
    many = min(_MOST_PROBE_WORDS, max(4, context // _WORDS_IN_CONTEXT)) if context else _PROBE_WORDS
    few = many // 4
    short, long = [await _length(target, wording.text("probe", words), []) for words in (few, many)]
    if not short or long <= short:
        return Wording(salt=salt, guessed=True)
    per_token = (many - few) / (long - short)
    tool_tokens = None
    if target.tools != "none":
        try:
            with_tool = await _length(target, wording.text("probe", few), [wording.tool(0, 0)])
        except LoadError:
            with_tool = short  # it refuses tools
        tool_tokens = float(with_tool - short) if with_tool > short else None
    return Wording(salt=salt, words_per_token=per_token, tool_tokens=tool_tokens)


async def _length(target: LoadTarget, text: str, tools: list[dict[str, Any]]) -> int:
    """Tokens of a prompt. Raises LoadError."""
    body = target.chat_body([{"role": "user", "content": text}], 1, tools, must=False)
    reader = AnswerReader()
    await _sent(target, HttpClient(target).request("POST", target.path, body), reader)
    if reader.error:
        raise LoadError(f"{target.url} can't be loaded: {reader.error}")
    return reader.usage.prompt_tokens if reader.usage else 0


async def _sent(target: LoadTarget, request: bytes, reader: AnswerReader | None = None) -> bytes:
    try:
        async with asyncio.timeout(_PROBE_S):
            answer = await HttpClient(target).send(request, reader.line if reader else None)
    except TimeoutError:
        raise LoadError(f"{target.url} gives no answer within {_PROBE_S:.0f} s") from None
    except OSError as error:
        raise LoadError(f"{target.url} can't be reached: {error}") from None
    if answer.status != 200:
        raise LoadError(f"{target.url} can't be loaded: status {answer.status}: {answer.text()}")
    return answer.body
