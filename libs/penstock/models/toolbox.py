"""The tools of a session."""

from __future__ import annotations

from random import Random

from .everyday import entries, everyday
from .invented import invented
from .tools import TrainingTool
from .words import Side


def toolbox(rng: Random, side: Side, count: int, level: int, everyday_share: float) -> list[TrainingTool]:
    """`count` tools with different names and subjects, some of them everyday ones."""
    tools: list[TrainingTool] = []
    while len(tools) < count:
        known = rng.random() < everyday_share
        tool = everyday(rng, side, rng.choice(entries())) if known else invented(rng, side, level)
        names = {t.spec["function"]["name"] for t in tools}
        if tool.spec["function"]["name"] not in names and all(tool.subject != t.subject for t in tools):
            tools.append(tool)
    return tools
