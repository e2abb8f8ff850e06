"""What a request may call, given the model: what can be asked of it, and the grammar that keeps its answers to it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from penstock.chat.formats.grammar import CallRules, call_recipe
from penstock.chat.model import ChatModel
from penstock.errors import InvalidRequest
from penstock.gateway.completing.prompts import Prepared
from penstock.gateway.request.ask import Ask, Sampling
from penstock.gateway.request.calling import Calling
from penstock.grammar.recipe import Part, Recipe


async def call_grammar(
    model: ChatModel,
    calling: Calling,
    thinking: bool,
    content: Part | None,
    compiled: Callable[[Callable[[], Recipe]], Awaitable[str]],
) -> str:
    """The grammar of answers; `thinking`: they begin inside of reasoning; `content`: what one without calls must be;
    `compiled` compiles the recipe that a function writes.

    A tool that is not strict, and whose schema cannot be followed, may have any object for its arguments. Raises
    InvalidRequest for a strict one, naming the place in its schema, and what `compiled` raises.
    """
    rules = CallRules(
        tools=[(tool.at, tool) for tool in calling.tools],
        required=calling.required,
        parallel=calling.parallel,
        thinks=model.thinks,
        thinking=thinking,
        content=content,
    )
    lenient = {tool.at for tool in calling.tools if not tool.strict}
    loose: set[str] = set()
    while True:
        try:
            return await compiled(partial(call_recipe, model.family, rules, model.added, frozenset(loose)))
        except InvalidRequest as error:
            odd = _concerned(error, lenient - loose)
            if not odd:
                raise
            loose |= odd


def sampling_of(model: ChatModel, ask: Ask, prompt: Prepared, grammar: str) -> Sampling:
    """How to sample the answers to a prompt. Where no calls may come, the tokens that begin them are banned: their text
    would be shown as content."""
    if grammar:
        return replace(ask.sampling, grammar=grammar)
    if prompt.rendered is None or prompt.calling is not None or not model.call_tokens:
        return ask.sampling
    return replace(ask.sampling, banned_token_ids=tuple(model.call_tokens.union(ask.sampling.banned_token_ids)))


def _concerned(error: InvalidRequest, places: set[str]) -> set[str]:
    """The schemas that an error is about; all of them when it is about their sum."""
    if error.code in ("schema_too_large", "schema_too_complex"):
        return places
    field = error.field or ""
    return {place for place in places if field == place or field.startswith((f"{place}.", f"{place}["))}
