"""Turns an ask into prompts with token ids and block keys; this part of a request may take a while."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from penstock.chat.model import ChatModel
from penstock.chat.pictures import PictureTokens
from penstock.chat.prompt import Encoded, TooManyTokens, common_prefix
from penstock.chat.resuming.rendered import Rendered
from penstock.chat.sessions import Branch, Continuation, Divergence, branch_of
from penstock.errors import InvalidRequest
from penstock.gateway.completing.cutting import shortened
from penstock.gateway.completing.threads import THREAD_FROM
from penstock.gateway.request.ask import Conversation, Keep, Prompt, check_token
from penstock.gateway.request.calling import Calling
from penstock.gateway.request.work import ChoiceRequest, KeepWish
from penstock.kv.identity import block_keys, extend_keys
from penstock.pictures.picture import Picture, ShownPicture, spans
from penstock.pictures.reading import MOST_PICTURES, MOST_PIXEL_BYTES

MOST_TOKENS = 1 << 21
"""Tokens that are read at most of a prompt of which only the end is kept, or is counted; far beyond any context."""
TOO_LONG = "context_length_exceeded"
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
    thinking: bool = False
    """Whether the answer begins inside of reasoning."""
    calling: Calling | None = None
    session: SessionUse | None = None
    """None for a prompt that was not rendered from messages, or of which only the end is left."""
    dropped_messages: int = 0
    """Old messages that were left out, since the client asked for that."""
    dropped_tokens: int = 0
    """Tokens at the beginning that were left out, since the client asked for that."""
    pictures: Sequence[ShownPicture] = ()
    """In order."""
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

    def known_keys(self) -> int:
        """The block keys that the earlier branch has had, if the new one begins with all of them: a key names those
        before it too."""
        old = self.continued.keys if self.continued is not None else ()
        count = len(old)
        return count if 0 < count <= len(self.branch.keys) and self.branch.keys[count - 1] == old[-1] else 0

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
    last: int | None = None
    """How many tokens are kept of a prompt, counted from its end; None: all."""
    room: int = 1
    """Tokens that a conversation which is shortened leaves to the answer."""
    field: str = "prompt"
    """What the client's API calls a prompt that is a text or token ids."""
    sealed: bool = False
    """Its blocks are."""
    by_text: bool = False
    """Its tokens are those of its text, whatever is known of its session: any gateway makes the same of it."""
    adapter: str = ""
    """The fingerprint of the adapter with which they are computed; empty: none."""


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
    """The weight of each part that a template may read, or that is decoded."""
    for message in prompt.messages:
        yield from (THREAD_FROM for _ in message.pictures)
        yield 64 + len(message.content) + len(message.reasoning) + len(message.name) + len(message.call_id)
        for call in message.calls:
            yield 64 + len(call.arguments) + len(call.name) + len(call.id)
    for tool in prompt.tools:
        yield 64 + len(tool.name) + len(tool.description)
        yield from _values(tool.parameters)
    for variable in prompt.rendering.variables:
        yield from _values(variable.value)


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
        return _fitting(model, prompt, naming, branches)
    ids: Sequence[int]
    if isinstance(prompt, str):
        most = _most(naming)
        check_length(model.encoder.at_least(prompt), most + 1, naming.field)
        with _bounded(most + 1, naming.field):
            ids = model.encoder.encode_raw(prompt, most=most)
    else:
        for token in prompt:
            check_token(token, model.vocab_size, naming.field)
        ids = array("I", prompt)
    if not ids:
        raise InvalidRequest(f"{naming.field}: is empty; it needs at least one token", field=naming.field)
    return _end_of(ids, naming, naming.field)


def _most(naming: Naming) -> int:
    """Tokens that are read of a prompt."""
    return naming.context - 1 if naming.last is None else MOST_TOKENS


def _end_of(ids: Sequence[int], naming: Naming, field: str) -> Prepared:
    """What is to be kept of a prompt's tokens. Raises InvalidRequest when that is too long."""
    kept = ids if naming.last is None else ids[-naming.last :]
    check_length(len(kept), naming.context, field)
    dropped = len(ids) - len(kept)
    return Prepared(kept, block_keys(naming.root, kept, naming.block_size), dropped_tokens=dropped)


def _fitting(model: ChatModel, prompt: Conversation, naming: Naming, branches: Sequence[Branch]) -> Prepared:
    """A conversation; without its oldest messages when it is too long and the client wants that."""
    try:
        return _conversation(model, prompt, naming, branches)
    except InvalidRequest as error:
        if not prompt.shorten or error.code != TOO_LONG or has_pictures(prompt):
            raise
    rest, dropped = shortened(model, prompt, naming.context - naming.room, naming.context)
    return replace(_conversation(model, rest, naming, branches), dropped_messages=dropped)


def check_length(tokens: int, context: int, field: str) -> None:
    """Raises InvalidRequest for a prompt that leaves no room for an answer."""
    if tokens >= context:
        # Clients look for the first sentence, to shorten the conversation.
        what = (
            f"This model's maximum context length is {context} tokens. However, {field} has at least {tokens} tokens,"
            " and the answer needs room for one or more; send less."
        )
        raise InvalidRequest(what, field=field, code=TOO_LONG)


@contextmanager
def _bounded(context: int, field: str) -> Iterator[None]:
    """Raises InvalidRequest when the encoder found more tokens than its limit."""
    try:
        yield
    except TooManyTokens as error:
        check_length(error.tokens, context, field)
        raise


def has_pictures(prompt: Prompt) -> bool:
    """Whether a prompt shows any."""
    return isinstance(prompt, Conversation) and any(message.parts for message in prompt.messages)


def _showing(model: ChatModel, prompt: Conversation, naming: Naming) -> Prepared:
    """A conversation with pictures. Of its session nothing is taken over: its tokens are those of its text."""
    if naming.last is not None:
        what = "truncate_prompt_tokens: is not possible together with pictures"
        raise InvalidRequest(what, field="truncate_prompt_tokens", code="unsupported_parameter")
    with _bounded(naming.context, prompt.field):
        seen = with_pictures(model, prompt, naming.context - 1)
    keys = extend_keys(naming.root, (), seen.ids, naming.block_size, spans(seen.shown))
    keeps = []
    for keep in prompt.keeps:
        leading = _leading(model, prompt, keep, seen.encoded, [])
        blocks = seen.tokens.tokens_before(seen.encoded.ids, seen.shown, leading) // naming.block_size
        keeps += [KeepWish(keep.seconds, blocks)] if blocks else []
    text = seen.encoded.text
    return Prepared(
        seen.ids,
        keys,
        keeps,
        rendered=text,
        thinking=model.thinking(text),
        calling=prompt.calling,
        pictures=seen.shown,
    )


@dataclass(frozen=True, slots=True)
class SeenPrompt:
    """A conversation with pictures."""

    encoded: Encoded
    """As rendered: a token for each picture."""
    ids: array[int]
    """With the tokens of pictures."""
    shown: tuple[ShownPicture, ...]
    tokens: PictureTokens


def with_pictures(model: ChatModel, prompt: Conversation, most: int) -> SeenPrompt:
    """A conversation's tokens with those of its pictures, which this decodes. Raises InvalidRequest, and TooManyTokens
    for more than `most`."""
    links = [link for message in prompt.messages for link in message.pictures]
    tokens = model.pictures
    if tokens is None:
        raise InvalidRequest(f"{links[0].at}: this model sees no pictures", field=links[0].at)
    if len(links) > MOST_PICTURES:
        what = f"{links[MOST_PICTURES].at}: a request may have {MOST_PICTURES} pictures"
        raise InvalidRequest(what, field=links[MOST_PICTURES].at)
    text = model.rendered(prompt.messages, prompt.tools, prompt.rendering).text
    if (least := model.encoder.at_least(text)) > most:
        raise TooManyTokens(least)
    encoded = model.encoder.encode(text, most=most)
    pictures: list[Picture] = []
    size = 0
    for link in links:  # last, and one after the other: what is refused has cost little
        pictures.append(tokens.read(link))
        size += pictures[-1].pixels.nbytes
        if size > MOST_PIXEL_BYTES:
            what = f"{link.at}: the tiles of a request's pictures may have {MOST_PIXEL_BYTES} bytes of pixels"
            raise InvalidRequest(what, field=link.at)
    ids, shown = tokens.placed(encoded.ids, pictures, prompt.field)
    if len(ids) > most:
        raise TooManyTokens(len(ids))
    return SeenPrompt(encoded, ids, shown, tokens)


def without_links(prompt: Prompt) -> Prompt:
    """The prompt without the files of its pictures, which are decoded."""
    if not isinstance(prompt, Conversation) or not has_pictures(prompt):
        return prompt
    messages = [replace(message, parts=()) for message in prompt.messages]
    return replace(prompt, messages=messages, keeps=[replace(keep, upto=()) for keep in prompt.keeps])


def _conversation(model: ChatModel, prompt: Conversation, naming: Naming, branches: Sequence[Branch]) -> Prepared:
    if prompt.calling is not None and prompt.calling.required and not model.family.heads:
        raise InvalidRequest("tool_choice: this model's chat template has no tool calls", field="tool_choice")
    if has_pictures(prompt):
        return _showing(model, prompt, naming)
    known = [branch.rendered for branch in branches]
    rendered = model.rendered(prompt.messages, prompt.tools, prompt.rendering, known)
    text = rendered.text
    most = _most(naming)
    check_length(model.encoder.at_least(text), most + 1, prompt.field)
    found = None if naming.by_text else model.continuations.best(text, prompt.messages, branches)
    with _bounded(most + 1, prompt.field):
        encoded = model.encoder.encode(text, found.earlier if found else None, most=most)
    if not encoded.ids:
        what = f"{prompt.field}: the chat template renders this to an empty prompt"
        raise InvalidRequest(what, field=prompt.field)
    thinking = model.thinking(text, prompt.messages[-1].content if prompt.rendering.continued else "")
    rest = _end_of(encoded.ids, naming, prompt.field) if naming.last is not None else None
    if rest is not None and rest.dropped_tokens:
        return replace(rest, rendered=text, thinking=thinking, calling=prompt.calling)
    session = _session(model, rendered, naming, found, encoded)
    leading = (
        (keep.seconds, _leading(model, prompt, keep, encoded, [*known, rendered]) // naming.block_size)
        for keep in prompt.keeps
    )
    wishes = [KeepWish(seconds, blocks) for seconds, blocks in leading if blocks]
    return Prepared(
        encoded.ids,
        session.branch.keys,
        wishes,
        rendered=text,
        thinking=thinking,
        calling=prompt.calling,
        session=session,
    )


def _session(
    model: ChatModel, rendered: Rendered, naming: Naming, found: Continuation | None, encoded: Encoded
) -> SessionUse:
    old = found.branch if found is not None and encoded.reused else None
    branch = branch_of(encoded, rendered, old, naming.root, naming.block_size)
    if found is None or old is None:
        return SessionUse(branch)
    divergence = model.continuations.divergence(old, encoded)
    return SessionUse(branch, old, len(old.ids), found.spliced, divergence)


def _leading(model: ChatModel, prompt: Conversation, keep: Keep, encoded: Encoded, known: Sequence[Rendered]) -> int:
    """Length of the retained part in tokens: the common prefix of both encodings."""
    rendering = replace(prompt.rendering, continued=False)
    try:
        text = model.rendered(keep.upto, prompt.tools, rendering, known).text
    except InvalidRequest:  # a template may want more than the beginning of a conversation
        return 0
    shared = text[: common_prefix(text, encoded.text)]
    return common_prefix(model.encoder.encode(shared, encoded).ids, encoded.ids)


def with_output(block_size: int, request: ChoiceRequest, output: Sequence[int]) -> ChoiceRequest:
    """A request with the keys of the blocks that its answer has filled so far: who has them goes on with it soonest."""
    if not output:
        return request
    tokens, shown = [*request.prompt_ids, *output], spans(request.pictures)
    return replace(request, keys=extend_keys(request.root, request.keys, tokens, block_size, shown))
