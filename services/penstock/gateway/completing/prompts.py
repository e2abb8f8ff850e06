"""Turns an ask into prompts with token ids and block keys; this part of a request may take a while."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.chat.model import ChatModel
from penstock.chat.prompt import Encoded, TooManyTokens, common_prefix
from penstock.chat.sessions import Branch, Continuation, Divergence, branch_of
from penstock.errors import InvalidRequest
from penstock.gateway.completing.threads import THREAD_FROM
from penstock.gateway.request.ask import Conversation, Keep, Prompt, check_token
from penstock.gateway.request.calling import Calling
from penstock.gateway.request.work import KeepWish
from penstock.kv.identity import block_keys

_OPENING = 4096
"""Characters of a message that tell conversations apart."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt, ready for the mesh."""

    ids: Sequence[int]
    keys: Sequence[bytes]
    """The keys of all full blocks."""
    keep: Sequence[KeepWish] = ()
    rendered: str | None = None
    """The text that the chat template made, if it made one."""
    calling: Calling | None = None
    session: SessionUse | None = None
    """None for a prompt that was not rendered from messages."""
    session_key: str = ""
    """Under which the session is remembered: the client's own, or the conversation's opening."""


@dataclass(frozen=True, slots=True)
class SessionUse:
    """What a prompt took over from its session, and the branch that it is now."""

    branch: Branch
    continued: Branch | None = None
    """The branch that it took most from; it goes on from all of it when `divergence` is None."""
    known_tokens: int = 0
    """Tokens that were known of that branch: a prompt and its answer."""
    spliced_tokens: int = 0
    """Tokens of the last answer that were taken over as generated."""
    divergence: Divergence | None = None

    def replaces(self) -> Branch | None:
        """The branch that is not needed any more: all of its text is in the new one."""
        old = self.continued
        return old if old is not None and self.branch.prompt.text.startswith(old.prompt.text) else None


@dataclass(frozen=True, slots=True)
class Naming:
    """How the prompts of one tenant are named and bounded, with the model that is served now."""

    root: bytes
    block_size: int
    context: int
    """Most tokens of prompt and answer together."""


def weight(prompt: Prompt) -> int:
    """Estimates how many characters all renderings together read; exact only below `THREAD_FROM`."""
    if not isinstance(prompt, Conversation):
        return len(prompt)
    total = 0
    for part in _texts(prompt):
        total += part
        if total >= THREAD_FROM:
            break
    return total * (1 + len(prompt.keeps))


def _texts(prompt: Conversation) -> Iterator[int]:
    """The weight of each part that a template may read."""
    for message in prompt.messages:
        yield 64 + len(message.content) + len(message.reasoning) + len(message.name) + len(message.call_id)
        for call in message.calls:
            yield 64 + len(call.arguments) + len(call.name) + len(call.id)
    for tool in prompt.tools:
        yield 64 + len(tool.name) + len(tool.description)
        yield from _values(tool.parameters)


def _values(value: object) -> Iterator[int]:
    """The weight of each value inside a JSON value."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        yield 8 + (len(value) if isinstance(value, str) else 0)
        if isinstance(value, Mapping):
            yield sum(map(len, value))
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


def opening(prompt: Prompt) -> str:
    """A digest of the conversation's beginning, which stands in for the session of a client that names no session.

    Only the memory of prompts uses it, so two conversations with the same beginning merely lose that memory's
    speed-up.
    """
    digest = hashlib.sha256()
    for message in prompt.messages if isinstance(prompt, Conversation) else ():
        begin = message.content[:_OPENING]
        digest.update(f"{message.role}:{len(message.content)}:{begin}".encode(errors="surrogatepass"))
        if message.role == "user":
            break
    return f"opening {digest.hexdigest()}"


def prepare(model: ChatModel, prompt: Prompt, naming: Naming, branches: Sequence[Branch] = ()) -> Prepared:
    """Renders, tokenizes and names blocks. Pure; runs in any thread. Raises InvalidRequest."""
    if isinstance(prompt, Conversation):
        return _conversation(model, prompt, naming, branches)
    if isinstance(prompt, str):
        check_length(model.encoder.at_least(prompt), naming.context, "prompt")
        with _bounded(naming.context, "prompt"):
            ids = model.encoder.encode_raw(prompt, most=naming.context - 1)
    else:
        for token in prompt:
            check_token(token, model.vocab_size, "prompt")
        ids = array("I", prompt)
    if not ids:
        raise InvalidRequest("prompt: is empty; it needs at least one token", field="prompt")
    check_length(len(ids), naming.context, "prompt")
    return Prepared(ids, block_keys(naming.root, ids, naming.block_size))


def check_length(tokens: int, context: int, field: str) -> None:
    """Raises InvalidRequest for a prompt that leaves no room for an answer."""
    if tokens >= context:
        # Clients look for the first sentence, to shorten the conversation.
        what = (
            f"This model's maximum context length is {context} tokens. However, {field} has at least {tokens} tokens,"
            " and the answer needs room for one or more; send less."
        )
        raise InvalidRequest(what, field=field, code="context_length_exceeded")


@contextmanager
def _bounded(context: int, field: str) -> Iterator[None]:
    """Raises InvalidRequest when the encoder found more tokens than its limit."""
    try:
        yield
    except TooManyTokens as error:
        check_length(error.tokens, context, field)
        raise


def _conversation(model: ChatModel, prompt: Conversation, naming: Naming, branches: Sequence[Branch]) -> Prepared:
    if prompt.calling is not None and prompt.calling.required and not model.family.heads:
        raise InvalidRequest("tool_choice: this model's chat template has no tool calls", field="tool_choice")
    text = model.render(prompt.messages, prompt.tools)
    check_length(model.encoder.at_least(text), naming.context, prompt.field)
    found = model.continuations.best(text, prompt.messages, branches)
    with _bounded(naming.context, prompt.field):
        encoded = model.encoder.encode(text, found.earlier if found else None, most=naming.context - 1)
    if not encoded.ids:
        what = f"{prompt.field}: the chat template renders this to an empty prompt"
        raise InvalidRequest(what, field=prompt.field)
    session = _session(model, prompt, naming, found, encoded)
    leading = ((keep.seconds, _leading(model, prompt, keep, encoded) // naming.block_size) for keep in prompt.keeps)
    wishes = [KeepWish(seconds, blocks) for seconds, blocks in leading if blocks]
    return Prepared(encoded.ids, session.branch.keys, wishes, rendered=text, calling=prompt.calling, session=session)


def _session(
    model: ChatModel, prompt: Conversation, naming: Naming, found: Continuation | None, encoded: Encoded
) -> SessionUse:
    old = found.branch if found is not None and encoded.reused else None
    branch = branch_of(encoded, len(prompt.messages), old, naming.root, naming.block_size)
    if found is None or old is None:
        return SessionUse(branch)
    divergence = model.continuations.divergence(old, encoded)
    return SessionUse(branch, old, len(old.ids), found.spliced, divergence)


def _leading(model: ChatModel, prompt: Conversation, keep: Keep, encoded: Encoded) -> int:
    """Length of the retained part in tokens: the common prefix of both encodings."""
    try:
        text = model.render(keep.upto, prompt.tools)
    except InvalidRequest:  # a template may want more than the beginning of a conversation
        return 0
    shared = text[: common_prefix(text, encoded.text)]
    return common_prefix(model.encoder.encode(shared, encoded).ids, encoded.ids)
