"""The part of a batch's life in which all its streams decode."""

from __future__ import annotations

from collections.abc import Sequence


class Window:
    """Opens at the end of the step after which every stream has a token, and closes when they have `steps` more each
    on average. Streams may begin one after the other, as engines that admit prompts in pieces have it."""

    def __init__(self, names: Sequence[str], steps: int) -> None:
        self._counts = dict.fromkeys(names, 0)
        self._wanted = len(names) * steps
        self._opened: tuple[float, int] | None = None
        self.over = False
        self.seconds = 0.0
        """For `steps` steps; once it is over."""

    def reached(self, name: str, count: int) -> None:
        """The stream has `count` tokens by now."""
        self._counts[name] = count

    def step_over(self, now: float) -> None:
        """All that a step gave has been told."""
        total = sum(self._counts.values())
        if self._opened is None:
            if all(self._counts.values()):
                self._opened = now, total
            return
        begin, before = self._opened
        if not self.over and total - before >= self._wanted:
            self.over = True
            self.seconds = (now - begin) * self._wanted / (total - before)
