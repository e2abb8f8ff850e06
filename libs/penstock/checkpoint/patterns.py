"""Regular expressions out of files that others wrote, tried on names: in a process of its own, with a time limit.

Python's `re` may take for ever on a short expression, and holds the interpreter's lock meanwhile.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

LIMIT_S = 5.0
_PROGRAM = """
import json, re, sys
asked, found = json.load(sys.stdin), []
for number, expression in enumerate(asked["expressions"]):
    try:
        fits = re.compile(expression).fullmatch
    except (re.error, OverflowError, RecursionError) as error:
        print(json.dumps({"number": number, "reason": str(error)}))
        break
    found.append([at for at, name in enumerate(asked["names"]) if fits(name)])
else:
    print(json.dumps({"found": found}))
"""


class ExpressionRefused(Exception):
    """An expression is none, or all of them take too long; `number` is that of the first that is meant."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


def matching(expressions: Sequence[str], names: Sequence[str]) -> list[frozenset[str]]:
    """The names that each expression matches as a whole. Raises ExpressionRefused."""
    if not expressions:
        return []
    asked = json.dumps({"expressions": expressions, "names": names})
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM], input=asked, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise ExpressionRefused(0, f"takes more than {LIMIT_S:g} s on the names of the matrices") from None
    if child.returncode:
        raise ExpressionRefused(0, f"cannot be tried: {child.stderr.strip().rpartition(chr(10))[2]}")
    told = json.loads(child.stdout)
    if "reason" in told:
        raise ExpressionRefused(told["number"], f"is no regular expression: {told['reason']}")
    return [frozenset(names[at] for at in places) for places in told["found"]]
