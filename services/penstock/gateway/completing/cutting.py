"""Shortens what is too long for the model's context, where the client asks for that."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from penstock.chat.messages import Message
from penstock.chat.model import ChatModel
from penstock.chat.prompt import TooManyTokens
from penstock.errors import InvalidRequest
from penstock.gateway.request.ask import Ask, Conversation

_BITES = 4
"""Bites in a context."""
_SAMPLE = 256
"""Characters from the middle of a message whose tokens stand for all of it: where a bite ends need not be exact, and
tokenizing all that is left out would take too long."""
_AROUND = 4
"""Tokens that a template writes around a message, about."""


def room_for_answer(asked: int | None, context: int) -> int:
    """Tokens that a prompt leaves to its answer when it is cut: those that the client asks for, else a quarter of the
    context, and never more than half of it."""
    return max(1, min(asked or context // 4, context // 2))


def last_tokens(ask: Ask, context: int) -> int | None:
    """How many tokens of each prompt are kept, counted from its end; None: all, or the prompt is an error."""
    if ask.keep_last != -1:
        return ask.keep_last
    return context - room_for_answer(ask.sampling.max_tokens, context)


def shortened(model: ChatModel, prompt: Conversation, most: int, context: int) -> tuple[Conversation, int]:
    """The conversation without its oldest messages, and how many are gone, so that it has at most `most` tokens.

    They go in bites of about a quarter of the context, as few as it takes. Where a bite ends depends on the messages
    before alone. So the turns that follow have the same beginning, which the cache has, until the room is used up and
    another bite goes. Where no bite helps, as few messages go as it takes.

    System messages at the head stay, and the result of a call never comes without the call. What is to be kept in the
    cache is dropped with the messages. The conversation is returned as it is when nothing helps.
    """
    messages = prompt.messages
    head = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
    begins = [at for at in range(head + 1, len(messages)) if messages[at].role != "tool"]
    users = [at for at in begins if messages[at].role == "user"]
    for places in (begins, users):
        with suppress(InvalidRequest):  # some templates want a message of the user's first
            for some in (_bites(model, messages, [head, *places], context), places):
                begin = _first(model, prompt, head, some, most)
                if begin is not None:
                    return _without(prompt, head, begin), begin - head
    return prompt, 0


def _bites(model: ChatModel, messages: Sequence[Message], places: Sequence[int], context: int) -> Sequence[int]:
    """Those of the places where a bite ends: the first behind each so many tokens, counted from the first place on."""
    bite, size, found = max(1, context // _BITES), 0, []
    for at, place in pairwise(places):
        before, size = size, size + sum(_size(model, message) for message in messages[at:place])
        if before // bite < size // bite:
            found.append(place)
    return found


def _size(model: ChatModel, message: Message) -> int:
    """The message's tokens, about."""
    text = "\n".join([message.content, message.reasoning, *(call.arguments for call in message.calls)])
    begin = max(0, (len(text) - _SAMPLE) // 2)
    sample = text[begin : begin + _SAMPLE]
    return _AROUND + len(model.encoder.encode(sample).ids) * len(text) // len(sample)


def _first(model: ChatModel, prompt: Conversation, head: int, places: Sequence[int], most: int) -> int | None:
    """The first of the places from which the rest fits, found by halves. Raises InvalidRequest when the template
    refuses a rest."""
    low, high = 0, len(places)
    while low < high:
        middle = (low + high) // 2
        if _fits(model, _without(prompt, head, places[middle]), most):
            high = middle
        else:
            low = middle + 1
    return places[low] if low < len(places) else None


def _without(prompt: Conversation, head: int, begin: int) -> Conversation:
    return replace(prompt, messages=[*prompt.messages[:head], *prompt.messages[begin:]], keeps=())


def _fits(model: ChatModel, prompt: Conversation, most: int) -> bool:
    text = model.render(prompt.messages, prompt.tools, prompt.rendering)
    try:
        model.encoder.encode(text, most=most)
    except TooManyTokens:
        return False
    return True
