"""The grammar of an answer: what the client says that it must be, behind the reasoning of a model that thinks."""

from __future__ import annotations

from penstock.chat.model import ChatModel
from penstock.errors import InvalidRequest
from penstock.gateway.completing.prompts import Prepared
from penstock.gateway.request.ask import Ask
from penstock.grammar.recipe import Recipe, answer
from penstock.grammar.thinking import after_thinking


def recipe_of(model: ChatModel, ask: Ask, prompt: Prepared) -> Recipe | None:
    """What the answer to a prompt must be; None: any text. Raises InvalidRequest."""
    if ask.constraint is None:
        return None
    if prompt.calling is not None:
        field = ask.constraint.at
        raise InvalidRequest(f"{field}: is not supported together with tools", field=field)
    if prompt.rendered is None or not model.thinks:
        return answer(ask.constraint)
    added = {token.content: id for id, token in model.tokenizer.get_added_tokens_decoder().items()}
    opened = prompt.rendered.rstrip().endswith(model.family.reasoning.open.rstrip())
    markers = (model.family.reasoning.open, model.family.reasoning.close)
    return after_thinking(ask.constraint, markers, added, opened=opened)
