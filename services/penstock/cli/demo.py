"""`penstock demo`"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from penstock.cli.mesh import DemoOptions
from penstock.cli.playing import Exchange, ToolCall, play
from penstock.cli.running import running_mesh
from penstock.cli.script import Script, demo_script
from penstock.cli.unseen import account, play_unseen
from penstock.cli.up import reporting
from penstock.cli.view import View

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_LONGEST = 96


def demo(options: DemoOptions) -> int:
    """Plays the scripted session on a mesh of its own, then drawn ones. The exit code is 1 when a later request of the
    scripted one was not served from the cache."""
    return reporting(options, partial(_run, options))


async def _run(options: DemoOptions, view: View) -> int:
    try:
        from openai import AsyncOpenAI, OpenAIError
    except ImportError as error:
        view.failed(f"{error}; the demo needs the official client: pip install 'penstock[demo]'")
        return 2
    console = Console(highlight=False, soft_wrap=True)
    script = demo_script()
    console.print("[bold]A whole mesh on this machine[/]: one process per service, a real model, real tokens")
    if options.prefill and not options.aggregated:
        console.print("[dim]prefill and decode have workers of their own, to show the hand-off[/]")
    async with running_mesh(options, view) as mesh:
        view.ready()
        console.print(f"[dim]{mesh.url}, model {options.names[0]}[/]\n")
        async with AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client:
            try:
                exchanges = await _play(client, options.names[0], script, console)
                unseen = await play_unseen(client, options.names[0], options.seed)
            except OpenAIError as error:
                view.failed(f"the session broke off: {error}")
                return 1
    console.print(table(exchanges))
    console.print(summary(exchanges))
    for line in ("", *account(unseen, options.seed)):
        console.print(line)
    cold = not_cached(exchanges)
    for exchange in cold:
        console.print(f"[red]turn {exchange.turn} was not served from the cache[/]")
    return 1 if cold else 0


async def _play(client: AsyncOpenAI, model: str, script: Script, console: Console) -> list[Exchange]:
    exchanges: list[Exchange] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("playing", total=len(script.turns))
        async for exchange in play(client, model, script, f"demo-{uuid4().hex}"):
            exchanges.append(exchange)
            for line in transcript(exchange):
                progress.console.print(line)
            progress.update(bar, completed=exchange.turn - bool(exchange.calls), description=f"turn {exchange.turn}")
    console.print()
    return exchanges


def transcript(exchange: Exchange) -> list[str]:
    """The messages of the exchange, one line each."""
    lines = [f"[bold cyan]user[/]       {escape(exchange.user)}"] if exchange.user else []
    if exchange.text:
        lines.append(f"[bold green]assistant[/]  {escape(_short(exchange.text))}")
    lines += [f"[bold yellow]tool[/]       {escape(_called(call))}" for call in exchange.calls]
    return lines


def table(exchanges: Sequence[Exchange]) -> Table:
    """One row per request."""
    made = Table(title="What each request cost", title_justify="left", title_style="bold", header_style="bold")
    made.add_column("turn")
    made.add_column("answer")
    for name in ("prompt", "cached", "TTFT", "tokens/s", "drafted", "accepted"):
        made.add_column(name, justify="right", no_wrap=True)
    turn = 0
    for exchange in exchanges:
        made.add_row(
            str(exchange.turn) if exchange.turn != turn else "",
            "tool" if exchange.calls else "text",
            str(exchange.prompt_tokens),
            _cached(exchange),
            f"{exchange.ttft_s * 1000:.0f} ms",
            f"{exchange.tokens_per_s:.0f}" if exchange.tokens_per_s else "-",
            str(exchange.drafted),
            str(exchange.accepted),
        )
        turn = exchange.turn
    return made


def summary(exchanges: Sequence[Exchange]) -> str:
    """The table in a sentence."""
    prompt = sum(exchange.prompt_tokens for exchange in exchanges)
    cached = sum(exchange.cached_tokens for exchange in exchanges)
    output = sum(exchange.output_tokens for exchange in exchanges)
    accepted = sum(exchange.accepted for exchange in exchanges)
    took = sum(exchange.total_s for exchange in exchanges)
    return (
        f"[bold]{cached} of {prompt}[/] prompt tokens ({cached / max(1, prompt):.0%}) were reused, not recomputed; "
        f"[bold]{accepted} of {output}[/] output tokens came from the draft; {took:.1f} s in all."
    )


def not_cached(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Requests after the first that found nothing: their prompts all begin with the one before."""
    return [exchange for exchange in exchanges[1:] if exchange.cached_tokens == 0]


def _cached(exchange: Exchange) -> str:
    tiers = " + ".join(f"{tokens} {tier}" for tier, tokens in exchange.cached.items())
    return tiers or "0"


def _called(call: ToolCall) -> str:
    try:
        arguments = ", ".join(f"{key}={value!r}" for key, value in json.loads(call.arguments or "{}").items())
    except (ValueError, AttributeError):
        arguments = call.arguments
    return _short(f"{call.name}({arguments}) = {call.result}")


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _LONGEST else f"{flat[:_LONGEST]}..."
