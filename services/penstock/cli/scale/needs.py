"""How many workers a load needs, by the seconds that it would wait: state in, a number out.

Prompts wait in one line for the next free worker, as the router's line and its costs have it: the share that waits, and
for how long, is Erlang's (Kleinrock, "Queueing Systems", volume 1, section 3.5): sizes are taken to differ as those of
an exponential distribution do. Answers share steps: a worker has as many places as a step may have sequences within the
ITL target, and as many answers run at a time as come in the time that one takes, give or take chance.

Utilisation says neither: two workers that are busy for 80 % of the time let prompts wait much longer than twenty are.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, log, sqrt
from statistics import NormalDist

_ROOM = 0.85
"""Of a target, that waits and steps may take as predicted: the rest is for what no model knows, such as hand-offs."""
_OWN = 1.5
"""A prompt's own computation, in means of them: those at the goal are longer than the mean."""
_FULL = 0.9
"""Of the KV memory of workers."""
_LEAST = 0.05
"""Of a target, at least, is left for waits, however long prompts take."""
_MOST = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SloTargets:
    """What is to hold for a share of all requests."""

    ttft_s: float
    itl_s: float
    share: float
    """0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPace:
    """How fast a worker of a mesh is; of several, their mean."""

    prefill_rate: float
    """Tokens of prompts per second."""
    step_s: float
    """Of a decoding step, however few sequences it has."""
    sequence_s: float
    """What each of them adds, with its context."""
    max_running: int
    step_tokens: float = 1.0
    """That a sequence gets in a step: more than one where drafts are accepted."""

    def places(self, itl_s: float, part: float = _ROOM) -> int:
        """Sequences that one worker may have within that part of the target: what a step gives at once comes after one
        step."""
        if self.sequence_s <= 0:
            return self.max_running
        return max(1, min(self.max_running, int((part * itl_s - self.step_s) / self.sequence_s)))

    def answer_rate(self, itl_s: float) -> float:
        """Tokens per second of one worker with all places taken."""
        taken = self.places(itl_s)
        return taken * self.step_tokens / max(1e-6, self.step_s + taken * self.sequence_s)


def prefill_workers(tokens_per_s: float, requests_per_s: float, pace: WorkerPace, targets: SloTargets) -> int:
    """The fewest at which the share of prompts that `targets` names waits no longer than its TTFT leaves."""
    busy = tokens_per_s / pace.prefill_rate
    own_s = busy / requests_per_s if requests_per_s > 0 else 0.0
    budget_s = max(_ROOM * targets.ttft_s - _OWN * own_s, _LEAST * targets.ttft_s)
    count = int(busy) + 1
    while count < _MOST and queue_s(busy, own_s, count, targets.share) > budget_s:
        count += 1
    return count


def queue_s(busy: float, own_s: float, count: int, share: float) -> float:
    """Seconds that all but a few wait for one of `count` workers, of which the work keeps `busy` busy in the mean."""
    if busy >= count:
        return inf
    waits = _erlang_c(busy, count)
    return own_s / (count - busy) * log(waits / (1 - share)) if waits > 1 - share else 0.0


def _erlang_c(busy: float, count: int) -> float:
    """The share of those who come that finds all workers busy."""
    lost = 1.0
    for number in range(1, count + 1):
        lost = busy * lost / (number + busy * lost)
    return lost / (1 - busy / count * (1 - lost))


def decode_workers(tokens_per_s: float, sequences: float, kv_used: float, pace: WorkerPace, targets: SloTargets) -> int:
    """The fewest at which the share of answers finds a place in time: those of so many tokens per second, and those
    that run and wait now, whose KV fills the memory of `kv_used` workers.

    An answer's ITL is the mean of all its steps, and chance makes some of them slow and others fast. So the mean number
    of answers has to leave the room of the target, and what chance adds has to fit within the target itself.
    """
    places = pace.places(targets.itl_s)
    mean = tokens_per_s * places / pace.answer_rate(targets.itl_s)
    at_once = mean + NormalDist().inv_cdf(max(0.5, targets.share)) * sqrt(mean)
    crowded = pace.places(targets.itl_s, 1.0)
    needs = (mean / places, at_once / crowded, sequences / places, kv_used / _FULL)
    return max(1, *(ceil(one - 1e-9) for one in needs))
