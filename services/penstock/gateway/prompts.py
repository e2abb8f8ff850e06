"""From an ask to prompts with token ids and block keys; the part of a request that may take a while."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.chat.memory import Remembered, remember
from penstock.chat.model import ChatModel
from penstock.chat.prompt import Encoded
from penstock.gateway.ask import Conversation, Prompt, check_token
from penstock.kv.identity import block_keys
from penstock.rpc.errors import InvalidRequest

THREAD_FROM = 8192
"""Characters from which a prompt is prepared in a thread: more may hold the event loop for over 5 ms."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt, ready for the mesh."""

    ids: array[int]
    keys: Sequence[bytes]
    rendered: str | None
    """The text that the chat template made, if it made one."""
    call_tools: bool = False
    remembered: Remembered | None = None
    """What to remember for the session's next turn."""


def weight(prompt: Prompt) -> int:
    """About how many characters have to be read."""
    if not isinstance(prompt, Conversation):
        return len(prompt)
    total = sum(len(message.content) + 64 for message in prompt.messages)
    total += sum(len(call.arguments) for message in prompt.messages for call in message.calls)
    return total + sum(256 + 64 * len(tool.parameters) for tool in prompt.tools)


def prepare(model: ChatModel, prompt: Prompt, root: bytes, block_size: int, earlier: Remembered | None) -> Prepared:
    """Renders, tokenizes and names blocks. Pure; runs in any thread. Raises InvalidRequest."""
    if isinstance(prompt, Conversation):
        return _conversation(model, prompt, root, block_size, earlier)
    if isinstance(prompt, str):
        ids = model.encoder.encode_raw(prompt)
    else:
        for token in prompt:
            check_token(token, model.vocab_size, "prompt")
        ids = array("I", prompt)
    if not ids:
        raise InvalidRequest("prompt: is empty; a prompt needs at least one token", field="prompt")
    return Prepared(ids, block_keys(root, ids, block_size), None)


def _conversation(
    model: ChatModel, prompt: Conversation, root: bytes, block_size: int, earlier: Remembered | None
) -> Prepared:
    text = model.render(prompt.messages, prompt.tools)
    encoded: Encoded = model.encoder.encode(text, earlier.encoded if earlier else None)
    if not encoded.ids:
        raise InvalidRequest("messages: the chat template made an empty prompt of them", field="messages")
    known = remember(encoded, earlier, root, block_size)
    return Prepared(encoded.ids, known.keys, text, prompt.call_tools, known)
