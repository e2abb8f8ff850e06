"""What the demo says: the system text, the tools and their functions, and the user's turns."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Script:
    """One session."""

    system: str
    tools: Sequence[Json]
    """In OpenAI's form."""
    functions: Mapping[str, Callable[..., object]]
    """What each tool does, called with the arguments as keywords."""
    turns: Sequence[str]
    """What the user says, one after the other."""

    def run(self, name: str, arguments: str) -> str:
        """A tool's result as the model gets it; a call that can't be made is answered with what is wrong, as JSON."""
        try:
            result = self.functions[name](**json.loads(arguments or "{}"))
        except KeyError as error:
            return json.dumps({"error": f"no such tool or thing: {error.args[0]}"})
        except (TypeError, ValueError) as error:
            return json.dumps({"error": str(error)})
        return result if isinstance(result, str) else json.dumps(result)


def demo_script() -> Script:
    """The session that the embedded model was made for."""
    from penstock.models import demo_session

    return Script(demo_session.SYSTEM, demo_session.TOOLS, demo_session.FUNCTIONS, demo_session.TURNS)
