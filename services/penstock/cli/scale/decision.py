"""Which workers a mesh is to have next: what was seen and what is remembered in, actions out. No clock, no await.

Prompts and answers are planned apart. What each needs (`needs.py`) is asked for the load that is expected while a new
worker would start (`forecast.py`), and for what waits already. Then, in this order:

1. a role that lacks workers gets back those that are being drained, of the other role too;
2. then those that the other role has had to spare for `flip_after_s`: changing a role costs nothing and takes no time;
3. then new ones.
4. A role that has had workers to spare for `down_after_s`, however its need went up and down meanwhile, loses them, the
   least busy first: they drain, and are removed when nothing runs there any more. Of a load whose period is known
   `flip_after_s` is enough, as the need says what comes next.

So more is done at once and less is done late, and what was done for one reason is not undone for the opposite one
within `cool_s`: a steady load comes to rest. Nothing goes below `least` or above `most`, nor below the workers whose
places the running answers fill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, inf, sqrt

from penstock.cli.scale.answers import WINDOW, AnswersCome, AnswersSeen, answers_expected
from penstock.cli.scale.forecast import level, peak, period_of, seasonal, seen
from penstock.cli.scale.moves import Moves
from penstock.cli.scale.needs import decode_workers, prefill_workers
from penstock.cli.scale.state import (
    JUDGED_S,
    ROLES,
    MeshSeen,
    ScaleDecision,
    ScaleKnobs,
    ScaleMemory,
    ScaleWant,
    WorkRole,
)

_STRAINED = 1.15
"""How much more load is planned for after targets were missed with as many workers as the plan wanted."""
_MOST_STRAIN = 2.0
_RELAXED_S = 6 * 3600.0
"""After so many seconds in which they are met, half of that is left: long, as who gives the worker back too soon needs
it again."""
_ENOUGH = 20
"""Requests by which targets are judged."""
_HURRY = 1.5
"""Workers that make up for what waits are at most so many times those that the load needs anyway."""
_SHOWS = 3
"""Looks in which all had enough to do say what they can."""
_MOST_LEAVING = 1024
"""Workers that are remembered as leaving, some of them away."""
_WAITS = 0.5
"""Of the TTFT target, prompts may wait so long."""


def decide(mesh: MeshSeen, memory: ScaleMemory, knobs: ScaleKnobs) -> tuple[ScaleDecision, ScaleMemory]:
    """What to do now, and what to remember until the next look."""
    memory = _remembered(mesh, memory, knobs)
    needed, why = _needed(mesh, memory, knobs)
    want = {role: min(max(needed[role], knobs.least[role], 1), knobs.most[role]) for role in ROLES}
    wants = {
        role: (
            *(one for one in memory.wants.get(role, ()) if mesh.at - one.at < knobs.down_after_s),
            ScaleWant(mesh.at, want[role]),
        )
        for role in ROLES
    }
    memory = replace(memory, wants=wants)
    moves = Moves(mesh, memory, knobs, want, why)
    moves.raise_all()
    moves.lower_all()
    moves.remove()
    return ScaleDecision(actions=moves.actions, want=want, why=why), moves.memory


def _remembered(mesh: MeshSeen, memory: ScaleMemory, knobs: ScaleKnobs) -> ScaleMemory:
    passed, here = mesh.at - memory.at, {one.id: one for one in mesh.workers}
    looks = 1 if passed == inf else max(1, round(passed / knobs.every_s))
    memory = _strained(mesh, memory, knobs, min(passed, knobs.every_s * looks))
    prompts = seen(memory.prompts, mesh.prompt_tokens_per_s, mesh.requests_per_s * knobs.every_s, looks)
    answers = seen(memory.answers, mesh.generated_per_s, mesh.requests_per_s * knobs.every_s, looks)
    return replace(
        memory,
        at=mesh.at,
        prompts=prompts,
        answers=answers,
        period=period_of(prompts) or period_of(answers),  # what comes again brings both; prompts say more exactly when
        late_computed=(*memory.late_computed, mesh.computed_per_s)[-WINDOW:] if _all_busy(mesh, knobs) else (),
        late_answers=(
            *memory.late_answers,
            AnswersSeen(mesh.sequences, mesh.generated_per_s, mesh.ended_per_s),
        )[-WINDOW:],
        leaving=dict(
            [
                (id, mesh.at if id in here and here[id].busy else at)
                for id, at in memory.leaving.items()
                if id not in here or here[id].draining  # who is away may be back: a router that starts knows nobody
            ][-_MOST_LEAVING:]
        ),
    )


def _strained(mesh: MeshSeen, memory: ScaleMemory, knobs: ScaleKnobs, passed_s: float) -> ScaleMemory:
    """Targets that are missed although there are as many workers as were wanted, for as long as it takes to show, say
    that the workers do less than is thought."""
    strain, since, missed = dict(memory.strain), dict(memory.strained_at), dict(memory.missed_at)
    shares: Mapping[WorkRole, float] = {"prefill": mesh.ttft_met, "decode": mesh.itl_met}
    for role, met in shares.items():
        if mesh.judged < _ENOUGH or role not in memory.wants:
            continue
        if not _missed(met, mesh.judged, knobs.targets.share):
            missed[role] = inf
            strain[role] = 1 + (strain[role] - 1) * 0.5 ** (max(0.0, passed_s) / _RELAXED_S)
            continue
        missed[role] = inf if _makes_up(mesh, knobs) else min(missed[role], mesh.at)
        if mesh.at - missed[role] >= JUDGED_S and _settled(mesh, memory, knobs, role):
            strain[role] = min(_MOST_STRAIN, strain[role] * _STRAINED)
            since[role] = mesh.at
    return replace(memory, strain=strain, strained_at=since, missed_at=missed)


def _makes_up(mesh: MeshSeen, knobs: ScaleKnobs) -> bool:
    """Whether so many prompts wait that targets are missed for that reason."""
    rate = max(1, len(mesh.having("prefill"))) * mesh.pace.prefill_rate
    return mesh.backlog_tokens > _WAITS * knobs.targets.ttft_s * rate


def _missed(met: float, judged: int, share: float) -> bool:
    """Whether fewer met a target than should, by more than chance explains."""
    return (share - met) * judged > 2 * sqrt(judged * share * (1 - share))


def _settled(mesh: MeshSeen, memory: ScaleMemory, knobs: ScaleKnobs, role: WorkRole) -> bool:
    """Whether a role has had the workers that it wanted for so long that what is seen comes of it."""
    since = max(memory.strained_at[role], memory.raised_at[role] + knobs.start_s, memory.lowered_at[role])
    shows_s = JUDGED_S + knobs.cool_s
    late = [one.count for one in memory.wants[role] if mesh.at - one.at < shows_s]
    return mesh.at - since >= shows_s and len(mesh.having(role)) >= max(late, default=0)


def _needed(mesh: MeshSeen, memory: ScaleMemory, knobs: ScaleKnobs) -> tuple[dict[WorkRole, int], dict[WorkRole, str]]:
    """Workers of each role, and the figures behind them."""
    ahead, pace, targets = ceil((knobs.start_s + knobs.every_s) / knobs.every_s) + 1, mesh.pace, knobs.targets
    requests = level(replace(memory.prompts, work=memory.prompts.requests)) / knobs.every_s
    prompts, soon = level(memory.prompts), peak(memory.prompts, memory.period, ahead)
    strain = memory.strain
    own = prompts / requests if requests > 0 else 0.0
    expected = strain["prefill"] * max(prompts, soon)
    count = prefill_workers(expected, max(requests, expected / own) if own else 0.0, pace, targets)
    late, left_s = _late(mesh, memory.late_computed, strain["prefill"] * prompts, knobs)
    late = min(late, ceil(_HURRY * count))
    why: dict[WorkRole, str] = {
        "prefill": f"{prompts:,.0f} prompt tokens/s, {soon:,.0f} expected, {mesh.backlog_tokens:,.0f} wait"
        f" ({left_s:.2f} s left of them when a new worker would be ready)"
    }
    answers = answers_expected(
        memory.late_answers,
        AnswersCome(per_s=requests, tokens=mesh.answer_tokens),
        pace,
        leaving=sum(one.busy for one in mesh.workers if one.role == "decode" and one.draining),
        every_s=knobs.every_s,
        ahead_s=knobs.start_s + knobs.every_s,
    )
    earlier = seasonal(memory.answers, memory.period, ahead)
    tokens = strain["decode"] * max(answers.tokens_per_s, earlier)
    decode = decode_workers(tokens, answers.running, mesh.kv_used, pace, targets)
    why["decode"] = (
        f"{answers.running:.1f} answers run or wait, {answers.soon:.1f} will when a new worker would be ready,"
        f" {tokens:,.0f} tokens/s of them are expected, {pace.places(targets.itl_s)} places a worker"
    )
    return {"prefill": max(count, late), "decode": decode}, why


def _all_busy(mesh: MeshSeen, knobs: ScaleKnobs) -> bool:
    """Whether more prompts wait than can be computed until the next look."""
    return mesh.backlog_tokens > len(mesh.having("prefill")) * mesh.pace.prefill_rate * knobs.every_s


def _late(mesh: MeshSeen, computed: Sequence[float], tokens_per_s: float, knobs: ScaleKnobs) -> tuple[int, float]:
    """Workers that make up, within as long again, for the prompts that will wait too long when a new one is ready; and
    the seconds for which those prompts, and all that will wait then, would keep the present ones busy.

    What they `computed` while they had enough to do is what they can: one that has answers to end beside prompts is
    slower by half than one that has none.
    """
    count, rate, horizon_s = max(1, mesh.count("prefill")), mesh.pace.prefill_rate, knobs.start_s + knobs.every_s
    able = count * rate
    if len(computed) >= _SHOWS:
        able = min(able, max(rate, sum(computed) / len(computed)) + mesh.starting.get("prefill", 0) * rate)
    left_s = max(0.0, mesh.backlog_tokens + (tokens_per_s - able) * horizon_s) / able
    too_long = (left_s - _WAITS * knobs.targets.ttft_s) * able
    clear_s = max(knobs.targets.ttft_s, knobs.start_s)
    more = (tokens_per_s + too_long / clear_s - able) / rate
    return (max(0, count + ceil(more - 1e-9)) if too_long > 0 else 0), left_s
