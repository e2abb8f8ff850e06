"""The section about what has been measured on a GPU."""

from __future__ import annotations

from penstock.bench.measured.results import Line, Results, figures

_LINES = (
    *(
        Line(f"{memory}_{way}", f"blocks of 1 MiB {words}, {memory} host memory, GB/s", 1)
        for memory in ("registered", "pageable")
        for way, words in (("up", "to the device"), ("down", "from it"), ("up_checked", "to it, read back and checked"))
    ),
    *(
        Line(f"train_{step}", f"training of the {step}, tokens/s", 0)
        for step in ("seedling", "sapling", "pole", "target", "draft")
    ),
)


def section(now: Results, earlier: Results | None = None) -> str:
    """In Markdown."""
    return f"""## On a GPU

What `pytest tests/gpu/kv -k bandwidth` printed of the store's device tier (64 blocks), and the pace at which the
steps of `penstock models train` made the embedded pair, captures of their updates included, while tests ran on the
same device: a script ran them one after another, since the last two had budgets in minutes of their own. One run each.
Speed of the engine there has not been measured: `python -m tests.gpu.engine.speed DIR` does it.

{figures(_LINES, now, earlier)}

Measured on {now.data["host"]["gpu"]} beside {now.machine}.
"""
