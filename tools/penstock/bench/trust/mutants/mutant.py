"""One small change of one file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A source with one change. The tree itself is never changed."""

    path: str
    """Of the file, in the checkout."""
    line: int
    function: str
    """Where the change is: `Class.method`; `<module>` outside of functions."""
    kind: str
    """Of change, in a word or two."""
    before: str
    """The lines that change, without indentation."""
    after: str
    """The same as they are then."""
    source: str
    """The whole file as it is then."""
    number: int = 0
    """Among those of the same file that look the same."""

    @property
    def module(self) -> str:
        """The name that the file is imported by: `penstock.kv.identity`."""
        return self.path.split("/", 1)[1].removesuffix(".py").replace("/", ".")

    @property
    def place(self) -> str:
        """`path:line function`."""
        return f"{self.path}:{self.line} {self.function}"

    def rank(self, seed: int) -> bytes:
        """Where it stands in the line of those that are drawn. Edits elsewhere don't change that."""
        words = (str(seed), self.path, self.function, self.before, self.after, str(self.number))
        return hashlib.sha256("\0".join(words).encode()).digest()

    def diff(self) -> str:
        """For people."""
        gone = [f"- {line}" for line in self.before.splitlines()]
        return "\n".join([f"{self.place}: {self.kind}", *gone, *(f"+ {line}" for line in self.after.splitlines())])
