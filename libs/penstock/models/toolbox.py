"""The tools of a session."""

from __future__ import annotations

from random import Random

from .everyday import entries, everyday_tool
from .invented import alike_tools, invented
from .tools import TrainingTool
from .words import Side


def toolbox(
    rng: Random, side: Side, count: int, level: int, *, everyday: float, alike: float = 0.0, told: float = 0.0
) -> list[TrainingTool]:
    """`count` tools with different names and subjects, a share `everyday` of them from the catalog; in a share `alike`
    of the lists all are made up and share their words. A share `told` of the other made-up ones is described in other
    words than its name has."""
    if alike and rng.random() < alike:
        return alike_tools(rng, side, level, count)
    tools: list[TrainingTool] = []
    while len(tools) < count:
        known = rng.random() < everyday
        tool = everyday_tool(rng, side, rng.choice(entries())) if known else invented(rng, side, level, told)
        names = {t.spec["function"]["name"] for t in tools}
        if tool.spec["function"]["name"] not in names and all(tool.subject != t.subject for t in tools):
            tools.append(tool)
    return tools
