"""The whole of docs/measured.md, and one section of it for a run that has just ended."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

from penstock.bench.measured import (
    batch,
    cores,
    e2e,
    engine,
    evict,
    failover,
    gateway,
    gpu,
    house,
    kv,
    large,
    operate,
    overhead,
    rest,
    router,
    scale,
    soak,
    speculation,
    trust,
    turns,
)
from penstock.bench.measured.results import Results

RESULTS = Path("loadtest/results")
_WIDTH = 120

_SECTIONS: dict[str, Callable[[Results, Results | None], str]] = {
    "e2e": e2e.section,
    "rest": rest.section,
    "turns": turns.section,
    "overhead": overhead.section,
    "engine": engine.section,
    "cores": cores.section,
    "kv": kv.section,
    "gateway": gateway.section,
    "router": router.section,
    "speculation": speculation.section,
    "batch": batch.section,
    "scale": scale.section,
    "operate": operate.section,
    "trust": trust.section,
    "large": large.section,
    "failover": failover.section,
    "soak": soak.section,
    "evict": evict.section,
    "gpu": gpu.section,
    "house": house.section,
}
_LATER = (
    "e2e",
    "rest",
    "turns",
    "cores",
    "gateway",
    "router",
    "speculation",
    "batch",
    "scale",
    "operate",
    "trust",
    "large",
    "failover",
    "soak",
    "gpu",
)
"""Benches without a section as long as no run of theirs is kept."""
_APART = {"router": "", "speculation": "", "trust": "", "large": "", "e2e": "ablation_"}
"""Benches of parts that have nothing to do with each other, and how their names begin: each may be of another machine,
and says so."""
_HEAD = """# Measured

Written by `penstock bench measured` from the results in `loadtest/results/` (`earlier/` holds the runs beside them);
do not edit it. Benches measure beside a peer or a limit of the same run, in rounds that take turns, because a shared
machine is noisy: ratios travel, absolute figures do not. Goals were set before; where one is missed, the table says so.

Two figures have homes of their own: what the embedded models can and cannot do stands in
[their card](../libs/penstock/models/penstock-mini/README.md) (`penstock models eval`), and what a session saves on your
machine is what `make demo` prints.
"""


def section(text: str) -> str:
    """Of one run's JSON object."""
    data = json.loads(text)
    return wrapped(_SECTIONS[data["bench"]](Results(data), None))


def document(results: Path = RESULTS) -> str:
    """Of all kept results. Raises OSError when one is missing."""
    parts = [_HEAD]
    for name, write in _SECTIONS.items():
        if name in _LATER and not (results / f"{name}.json").exists():
            continue
        now, earlier = (folder / f"{name}.json" for folder in (results, results / "earlier"))
        apart = _APART.get(name)
        before = Results.read(earlier, apart=apart) if earlier.exists() else None
        parts.append(write(Results.read(now, apart=apart), before))
    return wrapped("\n".join(parts))


def wrapped(markdown: str) -> str:
    """The same with paragraphs and list items filled to _WIDTH; tables, headings and code stay."""
    blocks = re.split(r"(```.*?```)", markdown, flags=re.DOTALL)
    return "".join(block if block.startswith("```") else _filled(block) for block in blocks)


def _filled(text: str) -> str:
    return "\n\n".join(_paragraph(block) for block in text.split("\n\n"))


def _paragraph(block: str) -> str:
    if block.lstrip().startswith(("|", "#")) or not block.strip():
        return block
    begin = block[: len(block) - len(block.lstrip("\n"))]
    end = block[len(block.rstrip("\n")) :]
    items = re.split(r"\n(?=- )", block.strip("\n"))
    return begin + "\n".join(_fill(item) for item in items) + end


def _fill(item: str) -> str:
    indent = "  " if item.startswith("- ") else ""
    return textwrap.fill(
        " ".join(item.split()), _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
