"""A run from its options to its requests."""

from __future__ import annotations

import secrets
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from penstock.gateway.accounts.terms import Terms, read_terms
from penstock.load.errors import LoadError
from penstock.load.metrics import MetricTerms
from penstock.load.options import LoadOptions
from penstock.load.planning import LoadPlan, planned
from penstock.load.processes import ClientProcesses
from penstock.load.records import LoadRecord
from penstock.load.report import LoadRun
from penstock.load.target import LoadTarget, calibrated, served
from penstock.load.wording import Wording
from penstock.load.worker import LoadShare
from penstock.runtime.config import ConfigError

Told = Callable[[LoadRecord], None]
Begun = Callable[[LoadPlan, int], None]
"""Hears of the plan, and of how often it is played."""


async def run(
    options: LoadOptions,
    trace: Path | None,
    processes: ClientProcesses,
    told: Told = lambda _record: None,
    begun: Begun = lambda _plan, _rounds: None,
) -> LoadRun:
    """Plays a trace, or a mix, in all rounds; `told` hears of each request when it is over. Raises LoadError."""
    options.check()
    seed = options.seed or secrets.token_hex(4)
    terms = _terms(options.prices)
    workload = options.workload(trace, seed)
    model = await served(options.target())
    target = msgspec.structs.replace(options.target(), model=model.name)
    price, currency = (None, "") if terms is None else (terms.price(model.name), terms.currency)
    if target.endpoint == "chat":
        wording = await calibrated(target, model.context, seed)
    else:
        wording = Wording(salt=seed, vocab=options.vocab)
    plan = planned(workload, options.playing(model.context, seed))
    del workload  # of a long trace, the keys are most of what is there
    if not plan.sessions:
        raise LoadError(f"nothing of {plan.name} fits into a context of {options.context or model.context} tokens")
    if not plan.has_sessions:
        target = msgspec.structs.replace(target, session_header="")
    begun(plan, options.rounds)
    records: list[LoadRecord] = []
    round_began = []

    def tell(record: LoadRecord) -> None:
        records.append(record)
        told(record)

    for number in range(options.rounds):
        shares = _shares(target, _salted(wording, number), plan, options, number)
        round_began.append(await processes.play(shares, tell))
        if processes.stopped:
            break
    return LoadRun(
        plan=plan,
        rounds=options.rounds,
        records=records,
        terms=MetricTerms(
            turns={session.name: len(session.turns) for session in plan.sessions},
            begins={session.name: session.at for session in plan.sessions},
            has_sessions=plan.has_sessions,
            slo=options.slo,
            price=price,
            currency=currency,
        ),
        config=options.config(trace) | {"url": target.url, "model": target.model},
        seed=seed,
        command=_command(options.api_key),
        began=round_began[0],
        ended=time.time(),
        round_began=round_began,
        cancelled=processes.stopped,
        notes=[*_notes(target, wording, plan), *_unnamed(target, records)],
    )


def _terms(path: Path | None) -> Terms | None:
    if path is None:
        return None
    try:
        return read_terms(path)
    except ConfigError as error:
        raise LoadError(f"--prices: {error}") from None


def _salted(wording: Wording, round: int) -> Wording:
    return msgspec.structs.replace(wording, salt=f"{wording.salt}-{round}")


def _shares(target: LoadTarget, wording: Wording, plan: LoadPlan, options: LoadOptions, round: int) -> list[LoadShare]:
    """Every session goes to one process: the next one to the next."""
    count = min(options.processes, len(plan.sessions))
    return [
        LoadShare(
            target=target,
            wording=wording,
            sessions=plan.sessions[process::count],
            round=round,
            process=process,
            duration_s=options.duration,
        )
        for process in range(count)
    ]


def _command(key: str) -> str:
    text = shlex.join(["penstock", "load", *sys.argv[2:]])
    return text.replace(key, "...") if key else text


def _notes(target: LoadTarget, wording: Wording, plan: LoadPlan) -> list[str]:
    notes = []
    if wording.guessed:
        notes.append(
            f"The server does not say how long prompts are: a token is taken for {wording.words_per_token} words."
        )
    tools = any(turn.tools for session in plan.sessions for turn in session.turns)
    if tools and target.endpoint == "chat" and target.tools != "none" and wording.tool_tokens is None:
        notes.append("The server does not tell its model of tools, or refuses them: they are text of the prompt.")
    if plan.skipped_requests:
        cut = f", so {plan.cut_sessions} sessions end early" if plan.cut_sessions else ""
        notes.append(f"{plan.skipped_requests} requests were skipped, as they would not fit into the context{cut}.")
    return notes


def _unnamed(target: LoadTarget, records: Sequence[LoadRecord]) -> list[str]:
    """Of a server that is asked for ids of tokens and tells none."""
    if target.endpoint == "chat" or not any(record.first is not None and not record.sizes for record in records):
        return []
    return ["The server does not tell the ids of its answers: random ones take their place in later turns."]
