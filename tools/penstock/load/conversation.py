"""The prompts of one session, built as its turns are answered: messages, answers as they came, results of tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from penstock.load.events import AnswerText, Json
from penstock.load.planning import LoadSession, LoadTurn
from penstock.load.wording import Wording


@dataclass(frozen=True, slots=True)
class SentMessage:
    """One message of a prompt."""

    role: str
    text: str
    tokens: int
    """About so many."""
    more: Json = field(default_factory=dict)
    """Its further fields."""

    @property
    def json(self) -> Json:
        """As OpenAI's API has it."""
        return {"role": self.role, "content": self.text, **self.more}


class SessionPrompts:
    """The conversations of one session. Each turn is asked for when those that it waits for have been answered."""

    def __init__(self, session: LoadSession, wording: Wording, *, tools: bool) -> None:
        """`tools`: their definitions are sent as such, where the server tells its model of them."""
        self._session = session
        self._wording = wording
        self._tools = tools and wording.tool_tokens is not None
        self._prompts: dict[int, list[SentMessage]] = {}
        self._answers: dict[int, AnswerText] = {}
        self._defined: dict[int, list[Json]] = {}
        """Tools by how many tokens they take."""

    def tools(self, number: int) -> list[Json]:
        """The definitions of tools that go with a turn: those of the prompt that it grew from."""
        if not self._tools:
            return []
        turn = self._session.turns[number]
        while turn.parent >= 0:
            turn = self._session.turns[turn.parent]
        if turn.tools not in self._defined:
            self._defined[turn.tools] = self._wording.tools(turn.tools)
        return self._defined[turn.tools]

    def messages(self, number: int) -> list[Json]:
        """The messages of a turn."""
        return [message.json for message in self._prompt(number)]

    def answered(self, number: int, answer: AnswerText | None) -> None:
        """What came of a turn. None: nothing did; then later turns have a text as long as the recorded answer."""
        text = self._wording.text(f"{self._session.name}/{number}/answer", self._session.turns[number].output)
        self._answers[number] = answer or AnswerText(text)

    def _prompt(self, number: int) -> list[SentMessage]:
        if number not in self._prompts:
            turn = self._session.turns[number]
            made = self._opened(number, turn) if turn.parent < 0 else self._continued(number, turn)
            self._prompts[number] = made
        return self._prompts[number]

    def _opened(self, number: int, turn: LoadTurn) -> list[SentMessage]:
        """A system message of what other sessions begin with too, less the tools where they are sent as such, and what
        the user says."""
        block = self._session.block_tokens
        of_tools = turn.tools // block if self._tools else 0
        system = turn.system[of_tools:]
        words = self._wording.blocks(system, block, of_tools)
        messages = [SentMessage("system", " ".join(words), len(system) * block)] if system else []
        words = self._wording.blocks(turn.blocks, block, len(turn.system))
        if turn.new:
            words += self._own(number, turn.new)
        return [*messages, SentMessage("user", " ".join(words), len(turn.blocks) * block + turn.new)]

    def _continued(self, number: int, turn: LoadTurn) -> list[SentMessage]:
        before, parent = self._prompt(turn.parent), self._session.turns[turn.parent]
        words = self._own(number, turn.new)
        if turn.answered:
            answer = self._answers[turn.parent]
            more = {"tool_calls": list(answer.tool_calls)} if answer.tool_calls else {}
            said = SentMessage("assistant", answer.content, parent.output, more)
            return [*before, said, *_reply(answer.tool_calls, words, turn.new)]
        kept = before if turn.kept >= parent.tokens else self._cut(before, turn)
        if kept and kept[-1].role != "assistant" and kept[-1].role != "system":
            last = kept[-1]
            text = f"{last.text} {' '.join(words)}"
            return [*kept[:-1], SentMessage(last.role, text, last.tokens + turn.new, last.more)]
        return [*kept, SentMessage("user", " ".join(words), turn.new)]

    def _cut(self, before: Sequence[SentMessage], turn: LoadTurn) -> list[SentMessage]:
        """The beginning of a prompt: whole messages, and of the next one what is left."""
        left = turn.kept - (self._beginning(turn) if self._tools else 0)
        kept: list[SentMessage] = []
        for message in before:
            if message.tokens > left:
                if message.role != "assistant" and left > 0:
                    words = message.text.split(" ")
                    text = " ".join(words[: max(1, len(words) * left // message.tokens)])
                    kept.append(SentMessage(message.role, text, left, message.more))
                break
            kept.append(message)
            left -= message.tokens
        while kept and kept[-1].more.get("tool_calls"):
            kept.pop()  # nobody answers its calls
        return kept

    def _beginning(self, turn: LoadTurn) -> int:
        """Tokens of the tools in front of the messages."""
        while turn.parent >= 0:
            turn = self._session.turns[turn.parent]
        block = self._session.block_tokens
        return turn.tools // block * block

    def _own(self, number: int, tokens: int) -> list[str]:
        return self._wording.words(f"{self._session.name}/{number}", tokens)


def _reply(calls: Sequence[Json], words: Sequence[str], tokens: int) -> Iterator[SentMessage]:
    """The results of the tools that were called, the first of them with all but a word for each other; what the user
    says, where none was."""
    if not calls:
        yield SentMessage("user", " ".join(words), tokens)
    for number, call in enumerate(calls):
        text = " ".join(words) if number == 0 else words[0]
        yield SentMessage("tool", text, tokens if number == 0 else 1, {"tool_call_id": call["id"]})
