"""When a request is served at another site than its own: by what the routers of both predict, and nothing else.

A site that computes what another has cached takes time from its own requests, and the session's next turn finds its
prefix divided. So a long prompt is no reason to go: only waiting is, and then only for a site where it ends sooner.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Prospect:
    """Predicted by a router, in seconds from now; what is infinite is refused or not known."""

    wait_s: float
    """Before anything is done for the request: behind others' prompts, for room, or held back by the router."""
    first_token_s: float = inf
    answer_s: float = inf
    """Until the last token."""

    def ends_sooner(self, there: Prospect, way_s: float) -> bool:
        """Whether the answer ends sooner at another site, there and back included: where only the wait is known here,
        whether it begins there before it would be over."""
        if self.answer_s < inf:
            return there.answer_s + way_s < self.answer_s
        return there.first_token_s + way_s < self.wait_s
