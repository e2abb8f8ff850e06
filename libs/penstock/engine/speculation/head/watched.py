"""What the target's layers said of a text, until somebody takes it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.engine.hooks import MOST_STATES, DraftStates


@dataclass(eq=False, slots=True)
class WatchedStates:
    """Features of one text that nobody has taken yet: of its last tokens, without gaps."""

    waiting: list[tuple[int, Tensor]] = field(default_factory=list)
    """Features of consecutive tokens [rows, layers * hidden], with the position of each piece's first."""
    real: int = 0
    """The position behind those that were taken."""

    @property
    def end(self) -> int:
        """The position behind the last token whose features there are, taken or waiting."""
        if not self.waiting:
            return self.real
        begin, last = self.waiting[-1]
        return begin + len(last)

    def watch(self, begin: int, features: Tensor) -> None:
        """Takes the features of the tokens from `begin` on. Where that leaves a gap, it begins anew."""
        if not len(features):
            return
        if begin != self.end:
            self.waiting.clear()
            self.real = begin
        last = features[-MOST_STATES:]
        if last.untyped_storage().nbytes() > MOST_STATES * last[0].nbytes:
            last = last.clone()  # else all features of its step stay as long as these
        self.waiting.append((begin + len(features) - len(last), last))
        count = sum(len(piece) for _, piece in self.waiting)
        while count - len(self.waiting[0][1]) >= MOST_STATES:
            count -= len(self.waiting.pop(0)[1])

    def rest(self) -> None:
        """What waits is dropped: the next tokens will have none."""
        self.waiting.clear()

    def ready(self, length: int) -> bool:
        """Whether there are features of all tokens but the last of a text of so many, some of them waiting."""
        return bool(self.waiting) and self.end == length - 1

    def take(self) -> tuple[int, Tensor]:
        """(position of the first, the features) of the last MOST_STATES tokens that wait. None wait any more."""
        features = torch.cat([piece for _, piece in self.waiting])[-MOST_STATES:]
        self.real = self.end
        self.waiting.clear()
        return self.real - len(features), features


def states_of(begin: int, features: Tensor) -> DraftStates:
    """Features [rows, width] of the tokens from `begin` on, as they are told to others."""
    rounded = features.to("cpu", torch.bfloat16).view(torch.int16).numpy()
    return DraftStates(begin, [row.tobytes() for row in rounded])


def features_of(states: DraftStates) -> Tensor:
    """bfloat16 [rows, width], memory of its own."""
    return torch.frombuffer(bytearray().join(states.rows), dtype=torch.bfloat16).view(len(states.rows), -1)
