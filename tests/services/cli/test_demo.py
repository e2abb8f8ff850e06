"""The demo's parts, with a client that answers from a list."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from penstock.cli.demo import not_cached, summary, table, transcript
from penstock.cli.lines import plain, readable
from penstock.cli.playing import Exchange, play
from penstock.cli.script import Script
from penstock.cli.unseen import account, play_unseen
from penstock.models.turns import documents, turns

SCRIPT = Script(
    system="Be brief.",
    tools=[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
    answer=lambda name, arguments: json.dumps({"city": json.loads(arguments).get("city"), "celsius": 4}),
    turns=["How cold is Oslo?", "Thanks."],
)


def chunk(usage: Any = None, finish: str | None = None, **delta: Any) -> Any:
    found = SimpleNamespace(**({"content": None, "tool_calls": None} | delta))
    return SimpleNamespace(choices=[SimpleNamespace(delta=found, finish_reason=finish)], usage=usage)


def call_part(index: int, id: str | None = None, name: str | None = None, arguments: str = "") -> Any:
    return SimpleNamespace(index=index, id=id, function=SimpleNamespace(name=name, arguments=arguments))


def usage(prompt: int, cached: int, output: int = 11) -> Any:
    more = {
        "cached_tokens": {"gpu": 0, "host": cached, "nvme": 0, "remote": 0},
        "drafted_tokens": 8,
        "accepted_tokens": 6,
        "times": {"decode": 0.1},
    }
    end = SimpleNamespace(prompt_tokens=prompt, completion_tokens=output, model_extra={"penstock": more})
    return SimpleNamespace(choices=[], usage=end)


ANSWERS = [
    [
        chunk(tool_calls=[call_part(0, "c1", "weather", '{"city"')]),
        chunk(tool_calls=[call_part(0, arguments=': "Oslo"}')]),
        chunk(tool_calls=[call_part(1, "c2", "weather", "{}")]),
        chunk(finish="tool_calls"),
        usage(100, 0),
    ],
    [chunk(content="It is "), chunk(content="4 degrees."), chunk(finish="stop"), usage(150, 96)],
    [chunk(content="Gladly."), chunk(finish="stop"), usage(180, 144)],
]


class FakeClient:
    """Looks like AsyncOpenAI as far as `play` looks."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(self, **request: Any) -> Any:
        answer = ANSWERS[len(self.asked)]
        self.asked.append(json.loads(json.dumps(request)))

        async def stream() -> Any:
            for part in answer:
                yield part

        return stream()


async def played() -> tuple[FakeClient, list[Exchange]]:
    client: Any = FakeClient()
    return client, [exchange async for exchange in play(client, "m", SCRIPT, "s-1")]


async def test_a_session_is_played_with_its_tools() -> None:
    client, exchanges = await played()
    assert [exchange.turn for exchange in exchanges] == [1, 1, 2]
    assert [(call.name, call.arguments) for call in exchanges[0].calls] == [
        ("weather", '{"city": "Oslo"}'),
        ("weather", "{}"),
    ]
    assert exchanges[1].text == "It is 4 degrees."
    first, second, third = client.asked
    assert first["extra_headers"] == {"x-session-affinity": "s-1"}
    assert first["stream_options"] == {"include_usage": True}
    assert [message["role"] for message in third["messages"]] == [
        *("system", "user", "assistant", "tool", "tool", "assistant", "user"),
    ]
    results = [message for message in second["messages"] if message["role"] == "tool"]
    assert [result["tool_call_id"] for result in results] == ["c1", "c2"]
    assert json.loads(results[0]["content"]) == {"city": "Oslo", "celsius": 4}


async def test_what_a_request_cost_is_kept() -> None:
    _, exchanges = await played()
    assert [exchange.cached for exchange in exchanges] == [{}, {"host": 96}, {"host": 144}]
    assert exchanges[1].tokens_per_s == 100
    assert all(exchange.ttft_s > 0 for exchange in exchanges)
    assert not_cached(exchanges) == []
    exchanges[2].cached = {}
    assert not_cached(exchanges) == [exchanges[2]]


async def test_the_table_fits_a_narrow_terminal() -> None:
    _, exchanges = await played()
    out = io.StringIO()
    console = Console(file=out, width=80)
    console.print(table(exchanges))
    console.print(summary(exchanges))
    shown = out.getvalue()
    for text in ("96 host", "144 host", "tool", "tokens/s", "accepted", "180"):
        assert text in shown
    assert "240 of 430 prompt tokens (56%)" in shown.replace("\n", " ")


async def test_the_transcript_is_short_and_escaped() -> None:
    exchange = Exchange(1, "[bold]hi[/]", text="long " * 100)
    lines = transcript(exchange)
    assert len(lines) == 2
    assert r"\[bold]hi" in lines[0]
    assert len(lines[1]) < 150


class Knowing:
    """Looks like AsyncOpenAI as far as `play_unseen` looks, and knows the right calls of some kinds of sessions."""

    def __init__(self, seed: int, *kinds: str) -> None:
        self.known = {
            json.dumps([turn.messages, turn.tools]): turn for doc in documents(kinds, 1, seed) for turn in turns(doc)
        }
        self.models: set[str] = set()
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(self, *, model: str, messages: Any, tools: Any, **options: Any) -> Any:
        assert options["temperature"] == 0 and "tool_choice" not in options, "as frameworks ask"
        self.models.add(model)
        turn = self.known.get(json.dumps([messages, tools]))
        calls = [
            SimpleNamespace(function=SimpleNamespace(name=name, arguments=arguments))
            for name, arguments in (turn.calls if turn else [("other", "{}")])
        ]
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=None, tool_calls=calls))])


async def test_drawn_sessions_are_asked_for_after_the_right_history_and_their_right_calls_counted() -> None:
    client: Any = Knowing(5, "L2", "everyday")
    sessions = await play_unseen(client, "m", 5)
    assert client.models == {"m"}
    by_kind = {session.kind: session for session in sessions}
    assert [*by_kind] == ["L2", "L3", "everyday"]
    assert all(session.calls > 0 and session.tools > 1 for session in sessions)
    assert by_kind["L2"].right == by_kind["L2"].calls and by_kind["everyday"].right == by_kind["everyday"].calls
    assert by_kind["L3"].right == 0
    *_, last = account(sessions, 5)
    calls = sum(session.calls for session in sessions)
    assert f"held-out sessions (seed 5): [bold]{calls - by_kind['L3'].calls} of {calls}[/] calls right" in last


async def test_another_seed_draws_other_sessions() -> None:
    client: Any = Knowing(6, "L2", "L3", "everyday")
    assert sum(session.right for session in await play_unseen(client, "m", 5)) == 0


def test_the_demo_has_no_torch_of_its_own() -> None:
    """It draws the sessions without."""
    program = (
        "import sys, penstock.cli.demo; from penstock.models.turns import documents, turns\n"
        "import penstock.models.served; [list(turns(doc)) for doc in documents(('L2', 'everyday'), 1, 1)]\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_log_lines_for_people() -> None:
    line = '{"event": "lost the router", "reason": "gone", "request_id": "", "level": "warning", "timestamp": "t"}'
    assert readable(line, "warning") == plain(line) == "warning: lost the router: reason=gone"
    assert readable(line, "error") is None
    assert readable("Traceback", "warning") is None
    assert readable("Traceback", "debug") == plain("Traceback") == "Traceback"
    assert readable('{"event": "x"}', "warning") is None
    assert readable("{not json", "warning") is None
