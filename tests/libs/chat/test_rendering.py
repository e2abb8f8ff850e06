"""Templates in processes of their own: the same text, and an end to those that have none."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.chat.rendering.processes import RenderProcesses, open_processes
from penstock.chat.resuming.waypoint import Rest, Waypoint
from penstock.chat.template import ChatTemplate
from penstock.errors import InvalidRequest, Unavailable

TEMPLATE = (Path(__file__).parents[3] / "libs/penstock/models/chat_template.jinja").read_text()
SECONDS = 0.3
USER = [{"role": "user", "content": "héllo 中 😀"}]
CALLS = [
    *USER,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
            for arguments in ('{ "a" :1e3 }', '{"a": 1, "a": 2}', '{"cut": "he', "[1]")
        ],
    },
    {"role": "tool", "content": "x" * 300_000, "tool_call_id": "1"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"most": 10**30, "é": [None, 1.5, True]}}}]
ENDLESS = {
    "loops that print nothing": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "filters": "{% for a in range(99999) %}{{ range(99999) | map('string') | list | length }}{% endfor %}",
    "one step": "{% set a = [1] * 9999999 %}{% set b = [1] * 9999999 %}{{ [a] * 9999 == [b] * 9999 }}",
}


@asynccontextmanager
async def rendering(source: str) -> AsyncIterator[RenderProcesses]:
    async with open_processes(ChatTemplate(source), seconds=SECONDS) as processes:
        yield processes


async def said(processes: RenderProcesses, messages: Any = USER, tools: Any = None) -> str:
    return await asyncio.to_thread(processes.render, messages, tools)


@pytest.mark.parametrize("messages", [USER, CALLS], ids=["user", "calls"])
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "plain"])
async def test_the_same_text_as_here(messages: Any, tools: Any) -> None:
    async with rendering(TEMPLATE) as processes:
        assert await said(processes, messages, tools) == ChatTemplate(TEMPLATE).render(messages, tools)


async def test_a_rendering_goes_on_in_another_process() -> None:
    async with rendering(TEMPLATE) as one, rendering(TEMPLATE) as other:
        first = await asyncio.to_thread(one.resume, CALLS, TOOLS, None)
        assert first is not None and first.waypoint is not None
        shown = [*USER, "assistant", CALLS[-1], *USER]
        rest = await asyncio.to_thread(other.resume, shown, TOOLS, first.waypoint)
        assert rest is not None and len(rest.text) < 100
        whole = ChatTemplate(TEMPLATE).render([*CALLS, *USER], TOOLS)
        assert first.text[: first.waypoint.chars] + rest.text == whole
        assert await asyncio.to_thread(other.resume, shown, None, first.waypoint) is None, "other tools, another text"


async def test_variables_come_through_and_a_rendering_with_others_does_not_go_on() -> None:
    source = "{% for m in messages %}{{ m.content }}{{ style }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    async with rendering(source) as processes:

        def resumed(waypoint: Waypoint | None, generate: bool, style: Any) -> Rest | None:
            return processes.resume(CALLS, None, waypoint, generate=generate, variables={"style": style})

        for generate, style, others in ((True, "é", (False, "é")), (False, 1, (False, True))):
            first = await asyncio.to_thread(resumed, None, generate, style)
            whole = ChatTemplate(source).render(CALLS, None, generate=generate, variables={"style": style})
            assert first is not None and first.text == whole and first.waypoint is not None
            rest = await asyncio.to_thread(resumed, first.waypoint, generate, style)
            assert rest is not None and first.text[: first.waypoint.chars] + rest.text == whole
            assert await asyncio.to_thread(resumed, first.waypoint, *others) is None


async def test_special_tokens_and_refusals_come_through() -> None:
    source = "{{ bos_token }}{% if tools %}{{ raise_exception('no tools here') }}{% endif %}"
    async with open_processes(ChatTemplate(source, {"bos_token": "<s>"})) as processes:
        assert await said(processes) == "<s>"
        with pytest.raises(InvalidRequest, match="refuses these messages: no tools here"):
            await said(processes, USER, TOOLS)


@pytest.mark.parametrize("name", ENDLESS)
async def test_a_template_without_an_end_is_stopped_and_others_render_meanwhile(name: str) -> None:
    source = f"{{% if messages[0].content == 'slow' %}}{ENDLESS[name]}{{% endif %}}done"
    async with rendering(source) as processes:
        with ThreadPoolExecutor(1) as thread:
            slow = thread.submit(processes.render, [{"role": "user", "content": "slow"}], None)
            rendered = 0
            while not slow.done():
                assert await said(processes) == "done"
                rendered += 1
            with pytest.raises(InvalidRequest, match="takes too long"):
                slow.result()
        assert rendered > 10
        assert await said(processes) == "done"


async def test_memory_has_an_end_too() -> None:
    source = "{% set ns = namespace(x='x' * 9999) %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
    async with open_processes(ChatTemplate(source), seconds=60) as processes:
        with pytest.raises(InvalidRequest, match="cannot render these"):
            await said(processes)


async def test_a_process_that_is_killed_is_replaced() -> None:
    async with rendering("x") as processes:
        assert await said(processes) == "x"
        [pid] = processes.pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="try again"):
            await said(processes)
        assert await said(processes) == "x"
        assert processes.pids != [pid]


async def test_closing_ends_every_process_and_whoever_waits() -> None:
    with ThreadPoolExecutor(1) as thread:
        async with open_processes(ChatTemplate(ENDLESS["loops that print nothing"]), seconds=60) as processes:
            waiting = thread.submit(processes.render, USER, None)
            [pid] = processes.pids
        with pytest.raises(Unavailable, match="stopping"):
            waiting.result()
        with pytest.raises(Unavailable, match="stopping"):
            processes.render(USER, None)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_processes_end_with_the_one_that_asks() -> None:
    """Even when that one is killed."""
    code = (
        "from penstock.chat.template import ChatTemplate;"
        "from penstock.chat.rendering.processes import RenderProcesses;"
        "processes = RenderProcesses(ChatTemplate('x')); processes.start();"
        "processes.render([], None); print(processes.pids[0], flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as asking:
        assert asking.stdout is not None
        pid = int(asking.stdout.readline())
        ending = os.pidfd_open(pid)
        asking.kill()
    try:
        ended, _, _ = select.select([ending], [], [], 30)
    finally:
        os.close(ending)
    assert ended
