"""Streams put together, for comparison with the answer as a whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx2

Json = dict[str, Any]
_OWN = ("id", "created", "created_at", "completed_at", "system_fingerprint", "call_id", "item_id", "request_id")
_USAGE = ("times", "session", "seed")
_OF_WORKERS = ("drafted_tokens", "accepted_tokens", "drafts")
"""What a worker had drafted when it heard that a stop string ended the answer is no function of the request."""


def events_of(answer: httpx2.Response) -> list[Json]:
    """The data of a stream's events."""
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def plain(value: Any, *, stopped: bool = False) -> Any:
    """Without what differs between two equal requests; `stopped`: stop strings may end them."""
    if isinstance(value, list):
        return [plain(item, stopped=stopped) for item in value]
    if not isinstance(value, dict):
        return value
    left_out = {*_OWN, *(_USAGE if "computed_tokens" in value else ()), *(_OF_WORKERS if stopped else ())}
    return {name: plain(item, stopped=stopped) for name, item in value.items() if name not in left_out}


def completion(events: Sequence[Json]) -> Json:
    """A chat or a legacy completion."""
    choices: dict[int, Json] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            found = choices.setdefault(choice["index"], {"finish_reason": None, "logprobs": None, "said": {}})
            for name, value in choice.get("delta", {"text": choice.get("text")}).items():
                _add(found["said"], name, value)
            found["finish_reason"] = choice["finish_reason"] or found["finish_reason"]
            if choice["logprobs"]:
                found["logprobs"] = found["logprobs"] or {}
                for name, entries in choice["logprobs"].items():
                    _add(found["logprobs"], name, entries)
    return {"choices": choices, "usage": events[-1]["usage"]}


def _add(found: Json, name: str, value: Any) -> None:
    if name == "tool_calls":
        calls = found.setdefault("tool_calls", [])
        for call in value:
            if call["index"] == len(calls):
                calls.append({"type": call["type"], "function": {"name": call["function"]["name"], "arguments": ""}})
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    elif name == "role" or value is None:
        found[name] = value
    else:
        found[name] = found[name] + value if found.get(name) else value


def whole_completion(answer: Json) -> Json:
    """A completion in the form that `completion` gives."""
    choices = {}
    for choice in answer["choices"]:
        said = dict(choice.get("message", {"text": choice.get("text")}))
        said.pop("refusal", None)
        if "message" in choice:
            said["content"] = said["content"] or ""
        kept = {"finish_reason": choice["finish_reason"], "logprobs": choice["logprobs"]}
        if "message" in choice and kept["logprobs"] is not None:
            kept["logprobs"] = {"content": kept["logprobs"]["content"], "refusal": None}
        choices[choice["index"]] = kept | {"said": said}
    return {"choices": choices, "usage": answer["usage"]}


def response(events: Sequence[Json]) -> Json:
    """A response; its items are built of their own events."""
    items: list[Json] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            items.append({"text": "", "done": None})
        elif kind.endswith(".delta"):
            items[event["output_index"]]["text"] += event["delta"]
        elif kind == "response.output_item.done":
            items[event["output_index"]]["done"] = event["item"]
    for item in items:
        done = item["done"]
        said = done["arguments"] if done["type"] == "function_call" else done["content"][0]["text"]
        assert said == item["text"], "deltas build the item"
    return {**events[-1]["response"], "output": [item["done"] for item in items]}


def message(events: Sequence[Json]) -> Json:
    """A message of Anthropic's."""
    built: Json = {}
    for event in events:
        if event["type"] == "message_start":
            built = event["message"]
        elif event["type"] == "content_block_start":
            built["content"].append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = built["content"][event["index"]], event["delta"]
            name = {"input_json_delta": "partial_json"}.get(delta["type"], delta["type"].removesuffix("_delta"))
            block["json" if name == "partial_json" else name] += delta[name]
        elif event["type"] == "content_block_stop":
            block = built["content"][event["index"]]
            written = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = _object(written)
        elif event["type"] == "message_delta":
            built |= event["delta"] | {"usage": event["usage"]}
    return built


def _object(text: str) -> Json:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
