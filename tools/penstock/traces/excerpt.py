"""Cuts an excerpt of a trace for the repository: `python -m penstock.traces.excerpt SOURCE TARGET --first N`.

What is kept are numbers: times, lengths, and which blocks are the same. Texts become ids of blocks, unless `--texts`
keeps them.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from cyclopts import App

from penstock.traces.reading import load

app = App(name="excerpt", help="Cut an excerpt of a trace.")


@app.default
def excerpt(source: Path, target: Path, *, first: int, texts: bool = False) -> None:
    """Writes JSON lines with `hash_ids`, or of coding agents' sessions the lines themselves, gzipped.

    Parameters
    ----------
    source:
        A trace.
    target:
        The file to write; its name ends in .jsonl.gz.
    first:
        How many requests, or of coding agents sessions, from the beginning.
    texts:
        Keep the lines as they are.
    """
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        head = [line for line, _ in zip(lines, range(first), strict=False)]
    rows = head if texts or "requests" in json.loads(head[0]) else _rows(source, first)
    text = "".join(f"{row.strip()}\n" for row in rows)
    target.write_bytes(gzip.compress(text.encode(), mtime=0))


def _rows(source: Path, first: int) -> list[str]:
    trace = load(source)
    numbers: dict[bytes, int] = {}
    sessions: dict[str, int] = {}
    rows = []
    for ask in trace.asks[:first]:
        row: dict[str, object] = {
            "timestamp": round(ask.at * 1e3),
            "input_length": ask.tokens,
            "output_length": ask.output,
            "block_size": trace.block_tokens,
            "hash_ids": [numbers.setdefault(key, len(numbers)) for key in ask.keys],
        }
        if ask.session:
            row["session"] = sessions.setdefault(ask.session, len(sessions))
        rows.append(json.dumps(row, separators=(",", ":")))
    return rows


if __name__ == "__main__":
    app()
