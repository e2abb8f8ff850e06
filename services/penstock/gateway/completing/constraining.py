"""The grammar of an answer: what the client says that it must be, behind the reasoning of a model that thinks."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from penstock.chat.model import ChatModel
from penstock.errors import InvalidRequest
from penstock.gateway.completing.prompts import Prepared
from penstock.gateway.request.ask import Ask, Conversation, check_token
from penstock.gateway.request.bounds import BOUNDS
from penstock.grammar.recipe import Recipe, answer
from penstock.grammar.thinking import after_thinking


def recipe_of(model: ChatModel, ask: Ask, prompt: Prepared) -> Recipe | None:
    """What an answer without calls must be; None: any text."""
    if ask.constraint is None:
        return None
    if prompt.rendered is None or not model.thinks or ask.constraint.kind == "tokens":
        return answer(ask.constraint)
    markers = (model.family.reasoning.open, model.family.reasoning.close)
    return after_thinking(ask.constraint, markers, model.added, opened=prompt.thinking)


def without_end(model: ChatModel, ask: Ask) -> Ask:
    """The same ask; an answer that may hold certain tokens only, and no end token among them, is as long as it may be.

    Raises Unprocessable for a token that the model does not have, InvalidRequest for calls that could not be written.
    """
    part = ask.constraint
    if part is None or part.kind != "tokens":
        return ask
    if any(isinstance(prompt, Conversation) and prompt.calling is not None for prompt in ask.prompts):
        raise InvalidRequest(f"{part.at}: is not supported together with tools", field=part.at)
    tokens: list[int] = msgspec.json.decode(part.text)
    for token in tokens:
        check_token(token, model.vocab_size, part.at)
    if not model.eos_ids.isdisjoint(tokens):
        return ask
    if not set(ask.sampling.stop_token_ids).isdisjoint(tokens):
        what = f"{part.at}: must have the model's end token where it has one of stop_token_ids"
        raise InvalidRequest(what, field=part.at)
    return replace(ask, sampling=replace(ask.sampling, min_tokens=int(BOUNDS["min_tokens"].high)))
