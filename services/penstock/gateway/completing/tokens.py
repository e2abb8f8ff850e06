"""Prompts as token ids, and ids as text, without an answer to them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from penstock.chat.model import ChatModel
from penstock.chat.prompt import TooManyTokens
from penstock.errors import InvalidRequest
from penstock.gateway.completing.prompts import MOST_TOKENS, has_pictures, weight, with_pictures
from penstock.gateway.completing.threads import Threads
from penstock.gateway.completing.volatile import VolatileLines
from penstock.gateway.request.ask import Conversation, check_token
from penstock.gateway.request.bounds import MAX_SHOWN, check_count


class Tokens:
    """Tokenizes what clients want to know the tokens of."""

    def __init__(self, model: ChatModel, threads: Threads, volatile: VolatileLines) -> None:
        self._model = model
        self._threads = threads
        self._volatile = volatile

    async def of(self, prompt: Conversation | str, tenant: str, *, special: bool = True) -> Sequence[int]:
        """The ids of a prompt, as a request for an answer would have them. `special`: with what the tokenizer puts
        around a raw text. Raises InvalidRequest."""
        work, size = partial(self._of, prompt, special), weight(prompt)
        if isinstance(prompt, Conversation):
            return await self._threads.render(work, size, tenant)
        return await self._threads.run(work, size, tenant)

    async def text(self, ids: Sequence[int], tenant: str) -> str:
        """The text of ids. Raises InvalidRequest for too many, Unprocessable for an id that the model does not have."""
        check_count("tokens", len(ids), MAX_SHOWN)
        return await self._threads.run(partial(self._text, ids), len(ids), tenant)

    def name(self, token: int) -> str | None:
        """How the tokenizer writes the token; None where it has no such token."""
        return self._model.tokenizer.id_to_token(token)

    def _of(self, prompt: Conversation | str, special: bool) -> Sequence[int]:
        encoder = self._model.encoder
        field = "prompt"
        if isinstance(prompt, Conversation):
            field = prompt.field
            prompt = self._volatile.steady(prompt)
        try:
            if not isinstance(prompt, Conversation):
                text = prompt
            elif has_pictures(prompt):
                return with_pictures(self._model, prompt, MOST_TOKENS).ids
            else:
                text = self._model.render(prompt.messages, prompt.tools, prompt.rendering)
            if encoder.at_least(text) > MOST_TOKENS:
                raise TooManyTokens(encoder.at_least(text))
            if field == "prompt" and special:
                return encoder.encode_raw(text, most=MOST_TOKENS)
            return encoder.encode(text, most=MOST_TOKENS).ids
        except TooManyTokens:
            raise InvalidRequest(f"{field}: has more than {MOST_TOKENS} tokens", field=field) from None

    def _text(self, ids: Sequence[int]) -> str:
        for token in ids:
            check_token(token, self._model.vocab_size, "tokens")
        [text] = self._model.tokenizer.decode_batch([list(ids)], skip_special_tokens=False)  # without the GIL
        return text
