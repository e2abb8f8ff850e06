"""One session under construction: each exchange appends the messages that it consists of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from typing import Any

from . import talk
from .phrasing import addressed
from .results import compact, failed, shown
from .tools import ToolRequest, mark
from .values import spoken
from .words import Side

Message = dict[str, Any]


class Dialogue:
    """Messages under construction: each method appends what one exchange says."""

    def __init__(self, rng: Random, side: Side, calls_only: bool = False) -> None:
        self.rng = rng
        self.side = side
        self.calls_only = calls_only  # the next request follows a call at once: nothing but choices to learn
        self.messages: list[Message] = []
        self.calls = 0

    def system(self, text: str) -> None:
        if text:
            self.messages.append({"role": "system", "content": text})

    def user(self, text: str) -> None:
        rng = self.rng
        text = addressed(rng, self.side, text)
        draw = rng.random()
        if draw < 0.05:
            text = rng.choice(("Hi, ", "Hello, ", "Ok, ", "Next: ", "Also, ")) + text
        elif draw < 0.09:
            text += rng.choice((" Thanks.", " Thank you.", " Please be quick."))
        self.messages.append({"role": "user", "content": text})

    def say(self, text: str, label: str = "answer") -> None:
        self.messages.append({"role": "assistant", "content": text, "label": label})

    def call(self, *asks: ToolRequest) -> list[str]:
        """The assistant calls; returns the call ids."""
        ids = [f"call_{self.calls + i}" for i in range(len(asks))]
        self.calls += len(asks)
        calls = [
            {
                "id": id_,
                "type": "function",
                "function": {"name": a.name, "arguments": json.dumps(a.arguments, ensure_ascii=False)},
            }
            for id_, a in zip(ids, asks, strict=True)
        ]
        self.messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        return ids

    def result(self, id_: str, content: Mapping[str, Any] | str) -> None:
        text = content if isinstance(content, str) else shown(self.rng, self.side, content)
        self.messages.append({"role": "tool", "tool_call_id": id_, "content": text})

    def retell(self) -> None:
        """The calls up to some turn as a client sends them back that has read them and writes them its own way; they
        teach nothing, since the model is not to write them so."""
        until = self.rng.randrange(len(self.messages) + 1)
        for message in self.messages[:until]:
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = compact(self.rng, call["function"]["arguments"])
                message["retold"] = True

    # ------------------------------------------------------------ exchanges

    def perform(self, ask: ToolRequest, short: bool = False) -> None:
        """Call, result, answer."""
        (id_,) = self.call(ask)
        if self.calls_only:
            return
        if short:
            self.result(id_, "ok")
            self.say("Done.")
            return
        self.result(id_, ask.result)
        self.say(ask.answer)

    def open_question(self) -> None:
        """A question that needs no tool, and an honest sentence."""
        question, reply = talk.open_question(self.rng, self.side)
        self.messages.append({"role": "user", "content": question})
        self.say(reply, "chat")

    def failing(self, ask: ToolRequest) -> None:
        """A call that fails: for good, and the user is told; or for now, and it is called again."""
        rng = self.rng
        self.user(ask.text)
        (id_,) = self.call(ask)
        if rng.random() < 0.5:
            reason = rng.choice(
                ("not found", "access denied", "out of service", "invalid value", "no such entry", "limit reached")
            )
            detail = next((spoken(v) for v in ask.arguments.values()), ask.name)
            error = rng.choice((f"{detail}: {reason}", f"{reason}: {detail}", reason))
            self.result(id_, failed(rng, error))
            self.say(f"Sorry, that did not work: {mark(error)}.")
        else:
            error = rng.choice(("timeout, try again", "temporarily unavailable, try again", "busy, try again"))
            self.result(id_, failed(rng, error))
            self.perform(ask)

    def asking_back(self, ask: ToolRequest) -> None:
        """A request that lacks a value: a question, the value, the call."""
        if ask.missing is None:
            self.user(ask.text)
            return self.perform(ask)
        request, question, reply = ask.missing
        self.user(request)
        self.say(question)
        form = self.rng.choice(("{v}", "{v}", "{v}.", "Use {v}.", "{v}, please.", "It is {v}."))
        self.messages.append({"role": "user", "content": form.format(v=reply)})
        self.perform(ask)

    def parallel(self, first: ToolRequest, second: ToolRequest) -> None:
        """Two calls at once."""
        join = self.rng.choice((" and ", " and also ", ", and ", " and then "))
        text = first.clause + join + second.clause[0].lower() + second.clause[1:]
        self.user(text[0].upper() + text[1:] + ".")
        ids = self.call(first, second)
        if self.calls_only:
            return
        self.result(ids[0], first.result)
        self.result(ids[1], second.result)
        self.say(f"{first.answer} {second.answer}")

    def chained(self, first: ToolRequest, second: ToolRequest) -> None:
        """Two calls, the second of which needs the result of the first."""
        text = f"{first.clause}, then {second.clause[0].lower()}{second.clause[1:]}."
        self.user(text[0].upper() + text[1:])
        (id_,) = self.call(first)
        self.result(id_, first.result)
        self.perform(second)
