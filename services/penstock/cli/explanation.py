"""What `penstock ctl explain` found, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.cli.frames import counted

Json = dict[str, Any]

_PARTS = {
    "body": "the body arrives and is read",
    "tokenize": "chat template and tokenizer",
    "plan": "until its workers were chosen",
    "call": "the way to the worker and back",
    "queue": "a place in the worker's batch",
    "fetch": "KV from the store",
    "prefill": "the prompt is computed",
    "handoff": "until decode's first token",
    "decode": "until the last token",
    "send": "until the answer is written",
}
"""Of a request's time, in order; the first seven end with the first token."""
_FIRST_TOKEN = "prefill"
_COSTS = ("queue", "ahead", "compute", "fetch", "pull", "penalty", "handoff", "room", "decode")
"""Parts of an option's seconds."""
_TOKENS = {"resident": "pages", "store": "store", "awaited": "awaited", "remote": "remote", "uncached": "to compute"}


def show(found: Json, console: Console | None = None) -> None:
    """Prints it."""
    console = console or Console(highlight=False)
    record = found["request"]
    for line in _head(record):
        console.print(line, markup=False)
    if record["status"] == "refused":
        return
    console.print(_times(record["times"], _held(record)))
    for choice in record["choices"]:
        for number, attempt in enumerate(choice["attempts"], 1):
            of = f"choice {choice['index']}, " if len(record["choices"]) > 1 else ""
            for line in _attempt(found, attempt, f"{of}plan {number}"):
                console.print(line)


def _head(record: Json) -> Iterator[str]:
    yield f"request {record['request_id']}, tenant {record['tenant']}, {record['status']}"
    if record["error"]:
        error = record["error"]
        yield f"error: {error['message']} ({error['code'] or error['type']})"
    if record["status"] == "refused":
        return
    tokens = record["tokens"]
    cached = {tier: count for tier, count in tokens["cached"].items() if count}
    sources = ", ".join(f"{count} from {tier}" for tier, count in cached.items())
    yield f"model {record['model']}; prompt {tokens['prompt']} tokens: {tokens['computed']} computed" + (
        f", {sources}" if sources else ", none cached"
    )
    drafts = f"{tokens['accepted']} of {tokens['drafted']} drafts accepted" if tokens["drafted"] else "no drafts"
    replans = record["replans"]
    moves = f"moved {counted(replans, 'time')} to other workers" if replans else "never moved"
    yield f"answer {tokens['completion']} tokens; {drafts}; {moves}"


def _held(record: Json) -> float:
    """Seconds for which the router held back the plan of the first choice."""
    attempts = record["choices"][0]["attempts"] if record["choices"] else []
    return sum(float((attempt["reasons"] or {}).get("held_s", 0.0)) for attempt in attempts)


def _times(times: Json, held_s: float) -> Table:
    table = Table(box=None, title="where the time went", title_justify="left")
    for name in ("part", "seconds", "share", ""):
        table.add_column(name, justify="right" if name in ("seconds", "share") else "left")
    total = times["total"] or 1.0
    for part, what in _PARTS.items():
        if part == "plan" and held_s:
            what = f"{what}; held back in the router's line for {held_s:.3f} s"
        table.add_row(part, f"{times[part]:.4f}", f"{times[part] / total:.0%}", what)
        if part == _FIRST_TOKEN:
            first = times["first_token"]
            table.add_row("[bold]first token[/]", f"{first:.4f}", f"{first / total:.0%}", "")
    table.add_row("[bold]total[/]", f"{times['total']:.4f}", "", "")
    return table


def _attempt(found: Json, attempt: Json, name: str) -> Iterator[Any]:
    where = found["members"]

    def at(worker: str) -> str:
        return escape(where.get(worker) or worker)

    prefill, decode = attempt["prefill"], attempt["decode"]
    computes = f"prompt at {at(prefill['worker'])}, " if prefill else "prompt and "
    yield f"\n[bold]{name}[/] after {attempt['at']:.3f} s: {computes}answer at {at(decode['worker'])}"
    plan = found["plans"].get(attempt["plan"])
    if plan is None:
        reasons = attempt["reasons"] or {}
        if reasons:
            yield (
                f"  expected {reasons['first_token_s']:.4f} s to the first token, {reasons['answer_s']:.4f} s in all,"
                f" {reasons['cached_tokens']} tokens cached; the router does not remember the other options"
            )
    else:
        yield _options(plan, at)
        left = plan["looked_at"] - len(plan["options"])
        more = f"{left} dearer ones that were looked at are left out; " if left else ""
        yield f"  {more}{counted(plan['choices'], 'worker')} could have decoded it"
        if plan["sources"]:
            yield f"  from the stores of other hosts at {escape(', '.join(plan['sources']))}"
    lost = attempt["lost"]
    if lost:
        silent = ", of which the router hears nothing either" if lost["silent"] else ""
        yield (
            f"  [red]lost[/] after {lost['at']:.3f} s in {lost['stage']}: {at(lost['worker'] or '')}{silent}:"
            f" {escape(lost['message'])}"
        )


def _options(plan: Json, at: Any) -> Table:
    """Seconds by part, without those that are 0 for all options."""
    options = plan["options"]
    costs = [name for name in _COSTS if any(option[f"{name}_s"] for option in options)]
    tokens = [name for name in _TOKENS if any(option[f"{name}_tokens"] for option in options)]
    table = Table(box=None)
    for column in ("", "prompt at", "answer at"):
        table.add_column(column, no_wrap=True)
    for column in ("cost", *costs, "others lose", *(f"tokens {_TOKENS[name]}" for name in tokens)):
        table.add_column(column, justify="right")
    for number, option in enumerate(options):
        lost = option["others_s"]
        table.add_row(
            "[green]chosen[/]" if number == 0 else "",
            at(option["prefill"] or option["decode"]),
            at(option["decode"]),
            f"{option['total_s'] + lost:.4f}",
            *(f"{option[f'{name}_s']:.4f}" for name in costs),
            f"{lost:.4f}",
            *(str(option[f"{name}_tokens"]) for name in tokens),
        )
    return table
