"""Stop strings, found on text across any chunk border.

An Aho-Corasick automaton over characters: its depth is the length of the longest suffix of the text that may
still become a stop string, which is exactly what has to be held back. Linear in the text, whatever the strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """Stop strings, compiled; immutable, shared by the choices of a request."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match = [0]
        """Length of the longest stop string that ends in this state, 0 for none."""
        for stop in stops:
            self._insert(stop)
        self.fail = [0] * len(self.next)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for letter in stop:
            following = self.next[state].get(letter)
            if following is None:
                following = self.next[state][letter] = len(self.next)
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.match.append(0)
            state = following
        self.match[state] = len(stop)

    def _link(self) -> None:
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for letter, following in self.next[state].items():
                queue.append(following)
                self.fail[following] = self.step(self.fail[state], letter) if state else 0
            self.match[state] = max(self.match[state], self.match[self.fail[state]])

    def step(self, state: int, letter: str) -> int:
        """The state after `letter`."""
        while letter not in self.next[state]:
            if state == 0:
                return 0
            state = self.fail[state]
        return self.next[state][letter]


class StopMatcher:
    """One text's way through the automaton."""

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._state = 0
        self._held = ""
        self.found = False
        self.stop = ""
        """The stop string that was found."""

    def feed(self, text: str) -> str:
        """What may be released now. Once `found`, it is the rest before the stop string and nothing ever follows."""
        if self.found:
            return ""
        machine, state = self._automaton, self._state
        held = self._held + text
        for at, letter in enumerate(text):
            state = machine.step(state, letter)
            if machine.match[state]:
                self.found = True
                self._held = ""
                end = len(held) - len(text) + at + 1
                self.stop = held[end - machine.match[state] : end]
                return held[: end - machine.match[state]]
        self._state = state
        keep = machine.depth[state]
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """The held-back rest of a text that ended without a stop string; another text may follow."""
        held, self._held, self._state = self._held, "", 0
        return held
