"""What the gateway knows of a session: the exact tokens of its last prompts and of the answers to them.

A template renders an answer anew with every later turn, and the tokenizer cuts that text anew. Neither has to give what
the model has generated: a sampled text may have another tokenization than the usual one, and a template may write other
white space. Blocks of such an answer would never be found again in the cache. So the next turn takes over the generated
tokens themselves wherever its text agrees with the answer (`Continuations`).

A session may have several branches, as agents fork their conversations: each is a prompt and the answer to it.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from penstock.chat.messages import Call, Message
from penstock.chat.prompt import SPLIT, Cut, Encoded, common_prefix
from penstock.chat.resuming.rendered import Rendered
from penstock.kv.identity import extend_keys

_CHARS = 8
"""That count as a token: more than tokens have."""
MOST_BRANCHES = 8
"""Branches of one session; the one that was not continued for the longest time goes first."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """An answer, as it was generated and as its client got it."""

    ids: array[int]
    """Without the token that ended it."""
    message: Message
    """What the client got."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A prompt of a session and, once there is one, the answer to it."""

    prompt: Encoded
    root: bytes
    keys: Sequence[bytes]
    """Of the prompt's full blocks."""
    rendered: Rendered = field(default_factory=Rendered)
    """The prompt's text, and what it was made of."""
    answer: Spoken | None = None
    chars: int = 0
    """Of all that the messages hold, whether the template shows it or not."""

    @property
    def size(self) -> int:
        """Its tokens, or more of them where its messages hold much that no prompt shows."""
        return max(len(self.ids), self.chars // _CHARS)

    @property
    def begun(self) -> Message | None:
        """The message that the answer continues; None: the answer is one of its own."""
        return self.rendered.messages[-1] if self.rendered.open else None

    @property
    def place(self) -> int:
        """Which message of a longer conversation the answer is, or ends."""
        return len(self.rendered.messages) - self.rendered.open

    @property
    def ids(self) -> array[int]:
        """Every token that is known: prompt and answer."""
        return self.prompt.ids if self.answer is None else self.prompt.ids + self.answer.ids


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt left what was known of its session."""

    token: int
    """Number of leading tokens that agree."""
    turn: int
    """Number of turns that ended before that place."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a new prompt may take over from its session."""

    branch: Branch
    earlier: Encoded
    """For `PromptEncoder.encode`: the branch's text as the new prompt has it, with the tokens that it had."""
    spliced: int = 0
    """Tokens of the answer that were taken over as generated."""


class Continuations:
    """Finds what prompts of one model may take over."""

    def __init__(self, ends: Collection[str], decode: Callable[[Sequence[int]], str]) -> None:
        """`ends` are the texts of the added tokens that end an answer, at which a text may be cut. `decode` gives the
        text of tokens, control tokens included."""
        self._ends = ends
        self._decode = decode

    def best(self, text: str, messages: Sequence[Message], branches: Sequence[Branch]) -> Continuation | None:
        """The branch from which the rendered `text` can take over most; None when there is no branch."""
        found = [self._continued(text, messages, branch) for branch in branches]
        return max(found, key=lambda each: _usable(text, each.earlier), default=None)

    def divergence(self, branch: Branch, encoded: Encoded) -> Divergence | None:
        """Where a prompt left the branch; None when it goes on from the branch's end, or asks the same once more."""
        known = branch.ids
        token = common_prefix(known, encoded.ids)
        if token == min(len(known), len(encoded.ids)):
            return None
        chars = common_prefix(branch.prompt.text, encoded.text)
        return Divergence(token, sum(encoded.text.count(end, 0, chars) for end in self._ends))

    def _continued(self, text: str, messages: Sequence[Message], branch: Branch) -> Continuation:
        prompt, answer = branch.prompt, branch.answer
        if answer is None or len(messages) <= branch.place or not text.startswith(prompt.text):
            return Continuation(branch, prompt)
        if not _agree(messages[branch.place], branch.begun, answer.message):
            return Continuation(branch, prompt)
        begin, said = len(prompt.text), self._decode(answer.ids)
        places = [(at, end) for end in self._ends if (at := text.find(end, begin)) >= 0]
        if places:
            at, end = min(places)
            if _bare(text[begin:at]) != _bare(said):
                return Continuation(branch, prompt)
        else:
            at, end = len(text), ""
            if text[begin:] != said:  # the answer goes on, right behind what was generated
                return Continuation(branch, prompt)
        through, ids = at + len(end), prompt.ids + answer.ids
        earlier = Encoded(text[:through], ids, (*prompt.cuts, Cut(at, len(ids), through)))
        return Continuation(branch, earlier, len(answer.ids))


def _usable(text: str, earlier: Encoded) -> int:
    """Leading characters for which a text can use the ids of `earlier`."""
    shared = earlier.shared(text)
    return shared[-1].chars if shared else 0


def _agree(given: Message, begun: Message | None, spoken: Message) -> bool:
    """Whether the client sends back what it got, behind what it had `begun` itself; white space around a text, and
    inside of arguments, doesn't count."""
    return (
        given.role == spoken.role
        and _same_text(given.content, begun.content if begun else "", spoken.content)
        and (not given.reasoning or _same_text(given.reasoning, begun.reasoning if begun else "", spoken.reasoning))
        and len(given.calls) == len(spoken.calls)
        and all(map(_same_call, given.calls, spoken.calls))
    )


def _same_text(given: str, begun: str, spoken: str) -> bool:
    given, begun = given.strip(), begun.strip()
    return given.startswith(begun) and given[len(begun) :].strip() == spoken.strip()


def _same_call(given: Call, spoken: Call) -> bool:
    if given.name != spoken.name:
        return False
    if given.arguments == spoken.arguments:
        return True
    try:
        return bool(json.loads(given.arguments) == json.loads(spoken.arguments))
    except (ValueError, RecursionError):
        return False


def _bare(text: str) -> str:
    """A text without its white space and split marks."""
    return "".join(text.split()).replace(SPLIT, "")


def branch_of(encoded: Encoded, rendered: Rendered, earlier: Branch | None, root: bytes, block_size: int) -> Branch:
    """The branch of a prompt; the keys of a prefix that it took from `earlier` are taken over too."""
    known: Sequence[bytes] = ()
    if earlier is not None and earlier.root == root:
        known = earlier.keys[: encoded.reused // block_size]
    keys, chars = extend_keys(root, known, encoded.ids, block_size), sum(map(_held, rendered.messages))
    return Branch(encoded, root, keys, rendered, chars=chars)


def _held(message: Message) -> int:
    """Characters that a message holds."""
    parts = sum(len(part) for part in message.parts if isinstance(part, str))
    calls = sum(len(call.id) + len(call.name) + len(call.arguments) for call in message.calls)
    texts = (message.content, message.reasoning, message.name, message.call_id)
    return sum(map(len, texts)) + parts + calls


@dataclass(slots=True)
class _Session:
    branches: list[Branch] = field(default_factory=list)
    tokens: int = 0


class Sessions:
    """Branches by (tenant, session), least recently used first out; bounded in sessions and tokens, also by tenant."""

    def __init__(
        self, max_sessions: int = 1024, max_tokens: int = 4_000_000, max_tenant_tokens: int = 2_000_000
    ) -> None:
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self._max_tenant_tokens = min(max_tenant_tokens, max_tokens)
        self._entries: OrderedDict[tuple[str, str], _Session] = OrderedDict()
        self._by_tenant: dict[str, int] = {}
        self.tokens = 0
        """Tokens of all branches."""

    def __len__(self) -> int:
        return len(self._entries)

    def branches(self, tenant: str, session: str) -> Sequence[Branch]:
        """What is known of a session, the latest branch last."""
        found = self._entries.get((tenant, session))
        if found is None:
            return ()
        self._entries.move_to_end((tenant, session))
        return tuple(found.branches)

    def put(self, tenant: str, session: str, branch: Branch, *, replaces: Branch | None = None) -> None:
        """Adds a branch, in the place of the one that it continues."""
        size = branch.size
        if size > self._max_tenant_tokens or not self._max_sessions:
            return
        entry = self._entries.setdefault((tenant, session), _Session())
        self._entries.move_to_end((tenant, session))
        kept = [other for other in entry.branches if other is not replaces]
        entry.branches = [*kept[-(MOST_BRANCHES - 1) :], branch]
        self._count(tenant, entry)
        while self._by_tenant[tenant] > self._max_tenant_tokens:
            self._drop_oldest(tenant)
        while len(self._entries) > self._max_sessions or self.tokens > self._max_tokens:
            self._drop(next(iter(self._entries)))

    def _count(self, tenant: str, entry: _Session) -> None:
        tokens = sum(branch.size for branch in entry.branches)
        gained, entry.tokens = tokens - entry.tokens, tokens
        self.tokens += gained
        self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + gained

    def _drop_oldest(self, tenant: str) -> None:
        """Drops the tenant's oldest session; of its only session, the oldest branch."""
        key = next(key for key in self._entries if key[0] == tenant)
        entry = self._entries[key]
        if entry.tokens == self._by_tenant[tenant] and len(entry.branches) > 1:
            del entry.branches[0]
            self._count(tenant, entry)
        else:
            self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        entry = self._entries.pop(key)
        self.tokens -= entry.tokens
        self._by_tenant[key[0]] -= entry.tokens
        if not self._by_tenant[key[0]]:
            del self._by_tenant[key[0]]
