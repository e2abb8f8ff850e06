"""Agent sessions: a list of tools, and exchanges that use them well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from . import talk
from .render import PLAIN, Document, render
from .session import Dialogue
from .toolbox import toolbox
from .tools import ToolRequest, TrainingTool
from .words import Side


@dataclass(frozen=True)
class Habits:
    """How often the exchanges of a session are of each unusual sort; the others are plain requests."""

    failing: float = 0.06
    asking: float = 0.08
    parallel: float = 0.08
    chained: float = 0.07
    chat: float = 0.07
    open: float = 0.05  # a question that needs no tool
    foreign: float = 0.03  # asks for something that no tool does
    following: float = 0.15  # of the exchanges after a plain request: one that leaves out what was said before


_RETOLD = 0.12
"""How often a client writes the calls of a session its own way when it sends them back."""

USUAL = Habits()
BUSY = Habits(
    failing=0.05, asking=0.12, parallel=0.14, chained=0.06, chat=0.02, open=0.03, foreign=0.07, following=0.08
)
_NONE = Habits(failing=0, asking=0, parallel=0, chained=0, chat=0, open=0, foreign=0, following=0)
LACKING = replace(BUSY, asking=0.4, foreign=0.12)
ASKING = replace(_NONE, asking=0.8)
FOREIGN = replace(_NONE, foreign=0.8)


def agent(
    rng: Random,
    side: Side,
    level: int,
    tools: int,
    turns: int,
    *,
    sentences: int = 0,
    everyday: float = 0.35,
    habits: Habits | None = USUAL,
) -> Document:
    """A session of `turns` exchanges over `tools` tools; without `habits` all are plain requests."""
    session = Dialogue(rng, side)
    box = toolbox(rng, side, tools, level, everyday=everyday)
    session.system(talk.system_prompt(rng, side, sentences))
    _converse(session, box, habits, short=rng.random() < 0.3, choose=lambda _: rng.choice(box), turns=turns)
    if rng.random() < _RETOLD:
        session.retell()
    return render(session.messages, [t.spec for t in box], f"agent{level}")


def dense(
    rng: Random,
    side: Side,
    level: int,
    tools: int,
    *,
    everyday: float,
    alike: float = 0.0,
    told: float = 0.0,
    habits: Habits = BUSY,
) -> Document:
    """A session for training: hardly a system prompt, each tool asked for in turn, often nothing but the calls.

    One list of tools carries as many choices as it has tools, and few of them can be copied from a turn before. A share
    `alike` of the lists consists of tools that share their words; a share `told` of the made-up tools says
    in other words what it does.
    """
    session = Dialogue(rng, side, calls_only=rng.random() < 0.35)
    box = toolbox(rng, side, tools, level, everyday=everyday, alike=alike, told=told)
    if rng.random() < 0.3:
        session.system(talk.system_prompt(rng, side, rng.randint(0, 1)))
    order = rng.sample(box, len(box)) + rng.choices(box, k=3)
    turns = min(len(order), rng.randint(tools, tools + 3))
    _converse(session, box, habits, short=rng.random() < 0.3, choose=lambda turn: order[turn], turns=turns)
    return render(session.messages, [t.spec for t in box], f"dense{level}")


def names_only(rng: Random, side: Side, tools: int, alike: float = 0.0) -> Document:
    """Requests, each answered with no more than the name of the right tool: the hardest choice, most often."""
    box = toolbox(rng, side, tools, rng.choice((1, 2, 3)), everyday=0.25, alike=alike)
    doc = render((), [t.spec for t in box], "names")
    for tool in [*rng.sample(box, len(box)), *rng.sample(box, len(box))]:
        ask = tool.ask(rng)
        doc.add(f'<|im_start|>user\n{ask.text}<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{{"name": "')
        doc.call_name(ask.name)
        doc.add('", "', PLAIN)
        doc.add("<|im_end|>\n")
    return doc


def _converse(
    session: Dialogue,
    box: Sequence[TrainingTool],
    habits: Habits | None,
    *,
    short: bool,
    choose: Callable[[int], TrainingTool],
    turns: int,
) -> None:
    """`turns` exchanges, each about the tool that `choose` gives; without `habits` all are plain requests."""
    rng = session.rng
    last: tuple[TrainingTool, ToolRequest] | None = None
    for turn in range(turns):
        draw = 1.0 if habits is None else rng.random()
        tool = choose(turn)
        ask = tool.ask(rng)
        following = (habits or USUAL).following
        if last and rng.random() < following and (next_ask := last[0].follow(rng, last[1])):
            session.user(next_ask.text)
            session.perform(next_ask, short)
            last = (last[0], next_ask)
        elif habits is None or not _unusual(session, box, habits, draw, (tool, ask)):
            session.user(ask.text)
            session.perform(ask, short)
            last = (tool, ask)


def _unusual(
    session: Dialogue, box: Sequence[TrainingTool], habits: Habits, draw: float, usual: tuple[TrainingTool, ToolRequest]
) -> bool:
    """The exchange that `draw` falls on, if that is an unusual one; whether it was."""
    rng, side = session.rng, session.side
    tool, ask = usual
    if (draw := draw - habits.failing) < 0:
        session.failing(ask)
    elif (draw := draw - habits.asking) < 0:
        session.asking_back(ask)
    elif (draw := draw - habits.parallel) < 0:
        session.parallel(ask, rng.choice(box).ask(rng) if rng.random() < 0.6 else tool.ask(rng))
    elif (draw := draw - habits.chained) < 0 and (chain := _chain(rng, box)):
        session.chained(*chain)
    elif (draw := draw - habits.chat) < 0:
        said, reply = talk.small_talk(rng)
        session.messages.append({"role": "user", "content": said})
        session.say(reply, "chat")
    elif (draw := draw - habits.open) < 0:
        session.open_question()
    elif draw < habits.foreign:
        other = toolbox(rng, side, 1, 2, everyday=0.5)[0]
        if all(other.subject != t.subject for t in box):
            session.user(other.ask(rng).text)
            session.say("Sorry, I have no tool for that.")
    else:
        return False
    return True


def _chain(rng: Random, tools: Sequence[TrainingTool]) -> tuple[ToolRequest, ToolRequest] | None:
    for first in rng.sample(list(tools), len(tools)):
        if first.produces is None:
            continue
        ask = first.ask(rng)
        words = first.produces[0]
        for second in rng.sample(list(tools), len(tools)):
            if second is not first and (then := second.accepts(rng, words, ask.result.get(words))) is not None:
                return ask, then
    return None
