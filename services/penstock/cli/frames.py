"""A frame of `penstock ctl top` on a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from penstock.rpc.shown.figures import Done, Frame, Json

_MIB = 1 << 20
_COLOURS = {"ready": "green", "silent": "red", "draining": "yellow", "drained": "yellow"}


def drawn(frame: Frame, done: Done) -> RenderableType:
    """The frame; `done` is what the mesh has done, of late or since its start."""
    tables = [_workers(frame), _stores(frame), *([_drafts(frame)] if frame.drafts else [])]
    return Group(_head(frame, done), *tables)


def _head(frame: Frame, done: Done) -> RenderableType:
    head = frame.head
    parts = [
        f"{counted(head['requests'], 'request')} in flight, {head['held']} held back",
        counted(head["sessions"], "session"),
        f"{counted(head['indexed_blocks'], 'block')} indexed",
        f"gateways {', '.join(one['http_address'] for one in frame.gateways) or 'none'}",
    ]
    when = f"in {done.seconds:.0f} s" if done.seconds else "since the start"
    rates = done.hit_rates
    hits = "no prompts" if rates is None else "  ".join(f"{source} {part:.0%}" for source, part in rates.items())
    work = [f"prompts {hits}", f"{done.generated} tokens generated"]
    if done.seconds:
        work.append(f"{done.generated / done.seconds:.1f} a second")
    work.append("no drafts" if done.acceptance is None else f"{done.acceptance:.0%} of drafts accepted")
    return Group(Text("; ".join(parts)), Text(f"{when}: {'; '.join(work)}"))


def _workers(frame: Frame) -> Table:
    table = Table(box=None)
    for name in ("worker", "role", "state", "model"):
        table.add_column(name, no_wrap=name == "worker")
    for name in ("queue", "batch", "waiting", "kv", "blocks", "hits", "drafts", "host"):
        table.add_column(name, justify="right")
    for worker, done in frame.workers:
        state, rates = worker["state"], done.hit_rates
        table.add_row(
            worker["address"],
            worker["role"],
            f"[{_COLOURS[state]}]{state}[/]",
            escape(worker["model"]),
            f"{worker['queue_s']:.2f} s",
            f"{worker['running']}/{worker['max_running']}",
            str(worker["waiting"]),
            f"{worker['kv_usage']:.0%}",
            str(worker["resident_blocks"]),
            "" if rates is None else f"{1 - rates['computed']:.0%}",
            "" if done.acceptance is None else f"{done.acceptance:.0%}",
            escape(worker["host"]),
        )
    return table


def _stores(frame: Frame) -> Table:
    table = Table(box=None)
    for name in ("store", "state", "tier"):
        table.add_column(name, no_wrap=name == "store")
    for name in ("blocks", "used", "of", "given", "evicted", "hits", "host"):
        table.add_column(name, justify="right")
    for store in frame.stores:
        for number, tier in enumerate(store["tiers"] or [_NO_TIER]):
            first = number == 0
            rate = store["hit_rate"] if first else None
            table.add_row(
                store["address"] if first else "",
                store["state"] if first else "",
                tier["tier"],
                str(tier["blocks"]),
                mib(tier["used_bytes"]),
                mib(tier["bytes"]),
                str(tier["given_blocks"]),
                str(tier["evictions"]),
                "" if rate is None else f"{rate:.0%}",
                escape(store["host"]) if first else "",
            )
    return table


def _drafts(frame: Frame) -> Table:
    table = Table(box=None)
    for name in ("draft service", "model"):
        table.add_column(name, no_wrap=name == "draft service")
    for name in ("workers", "sequences", "kv", "guessed", "dropped", "hits", "host"):
        table.add_column(name, justify="right")
    for draft in frame.drafts:
        rate = draft["hit_rate"]
        table.add_row(
            draft["address"],
            escape(draft["model"]),
            str(draft["workers"]),
            str(draft["sequences"]),
            f"{draft['kv_usage']:.0%}",
            str(draft["guessed_tokens"]),
            str(draft["dropped_tokens"]),
            "" if rate is None else f"{rate:.0%}",
            escape(draft["host"]),
        )
    return table


_NO_TIER: Json = {"tier": "", "blocks": 0, "used_bytes": 0, "bytes": 0, "given_blocks": 0, "evictions": 0}


def counted(number: int, what: str) -> str:
    """A number of things."""
    return f"{number} {what}{'s' * (number != 1)}"


def mib(size: int) -> str:
    """Bytes for people."""
    return f"{size / _MIB:.1f} MiB"
