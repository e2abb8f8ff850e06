"""The prompts of one session as ids of tokens, exactly as long as planned."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.load.events import AnswerText
from penstock.load.planning import LoadSession, LoadTurn
from penstock.load.wording import Wording


class TokenPrompts:
    """The prompts of one session. Each turn is asked for when those that it waits for have been answered."""

    def __init__(self, session: LoadSession, wording: Wording) -> None:
        self._session = session
        self._wording = wording
        self._prompts: dict[int, Sequence[int]] = {}
        self._answers: dict[int, Sequence[int]] = {}

    def ids(self, number: int) -> Sequence[int]:
        """The prompt of a turn."""
        if number not in self._prompts:
            turn = self._session.turns[number]
            self._prompts[number] = [*self._beginning(turn), *self._wording.ids(self._seed(number), turn.new)]
        return self._prompts[number]

    def answered(self, number: int, answer: AnswerText | None) -> None:
        """What came of a turn. Where nothing did, or nobody said of which tokens it is, later turns have others, as
        many as were recorded."""
        ids = answer.ids if answer else ()
        output = self._session.turns[number].output
        self._answers[number] = ids or self._wording.ids(f"{self._seed(number)}/answer", output)

    def _beginning(self, turn: LoadTurn) -> Sequence[int]:
        """What it has in common with others, or with an earlier turn."""
        if turn.parent < 0:
            block = self._session.block_tokens
            return [id for seed in (*turn.system, *turn.blocks) for id in self._wording.ids(seed, block)]
        before = self.ids(turn.parent)
        return [*before, *self._answers[turn.parent]] if turn.answered else before[: turn.kept]

    def _seed(self, number: int) -> str:
        return f"{self._session.name}/{number}"
