"""Grammars are made beside the event loop, once, and a hostile one costs its sender only."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.libs.grammar.walking import MINI, accepts

from penstock.errors import InvalidRequest, Overloaded, Unavailable
from penstock.grammar import compiling
from penstock.grammar.compiling import GrammarCompiler, open_compiler
from penstock.grammar.helper import Trial
from penstock.grammar.recipe import Part, Recipe, answer


def recipe(schema: Any) -> Recipe:
    return answer(Part("schema", json.dumps(schema), "here"))


def hostile(seed: int = 0) -> Recipe:
    """A few lines that a compiler would work on for many minutes."""
    terms = [f"/(?s:.*)a{{{number}}}b(?s:.*)/" for number in range(1, 40)]
    return answer(Part("grammar", f"start: WORD\nWORD: {' & '.join(terms)} // {seed}", "here"))


@asynccontextmanager
async def compiler(**bounds: Any) -> AsyncIterator[GrammarCompiler]:
    failed: list[str] = []
    async with open_compiler(MINI, failed=failed.append, **bounds) as found:
        yield found
    assert not failed
    assert not helpers()


def helpers() -> list[psutil.Process]:
    """Those of the compilers here; gateways of other tests have theirs."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # a zombie, too
            if child.cmdline()[-2:] == ["penstock.grammar.helper", str(MINI)]:
                found.append(child)
    return found


async def test_a_grammar_is_made_once_and_nothing_starts_before_it_is_needed() -> None:
    async with compiler() as found:
        assert not helpers()
        texts = await asyncio.gather(*(found.grammar(recipe({"type": "integer"}), "one") for _ in range(8)))
        assert len(set(texts)) == 1 and accepts(texts[0], "-3")
        [helper] = helpers()
        helper.suspend()
        try:
            async with asyncio.timeout(5):
                assert await found.grammar(recipe({"type": "integer"}), "one") == texts[0]
        finally:
            helper.resume()
        assert found.started == 1 and helper.nice() >= min(19, psutil.Process().nice() + 10)


async def test_one_helper_is_enough_for_one_grammar_after_the_other() -> None:
    async with compiler() as found:
        for number in range(6):
            await found.grammar(recipe({"const": number}), f"tenant {number % 2}")
        assert found.started == len(helpers()) == 1
    assert not helpers()


async def test_a_helper_can_be_at_hand_before_the_first_grammar() -> None:
    failed: list[str] = []
    async with open_compiler(MINI, failed=failed.append, at_hand=True) as found:
        async with asyncio.timeout(30):
            while not (helpers() and helpers()[0].nice() > psutil.Process().nice()):
                await asyncio.sleep(0)
        await found.grammar(recipe({"type": "integer"}), "one")
        assert found.started == 1
    assert not failed and not helpers()


async def test_a_helper_that_a_grammar_made_necessary_starts_behind_others(monkeypatch: pytest.MonkeyPatch) -> None:
    receded: list[bool] = []
    ready: set[object] = set()
    ask, recede = compiling._Helper.ask, compiling._Helper.recede

    async def asked(self: compiling._Helper, message: bytes) -> bytes:
        answer = await ask(self, message)
        ready.add(self)
        return answer

    def noted(self: compiling._Helper) -> None:
        receded.append(self in ready)
        recede(self)

    monkeypatch.setattr(compiling._Helper, "ask", asked)
    monkeypatch.setattr(compiling._Helper, "recede", noted)
    monkeypatch.setattr(compiling, "_PATIENCE", 300)  # whoever recedes gets little of a busy machine
    async with compiler(cpu_s=0.2) as found:
        with pytest.raises(InvalidRequest, match="too complex"):
            await found.grammar(hostile(), "one")
        await found.grammar(recipe({"type": "integer"}), "one")
        assert found.started == 2
    assert receded == [True, False, True], "the first when it is ready, the second from its start on"


async def test_what_is_wrong_is_known_the_second_time() -> None:
    async with compiler() as found:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=r"here\.items\.not: is not supported") as caught:
                await found.grammar(recipe({"items": {"not": {}}}), "one")
            assert caught.value.field == "here.items.not"
            for helper in helpers():
                helper.kill()
        assert found.started == 1


@pytest.mark.parametrize(
    ("schema", "where", "says"),
    [
        (
            {"properties": {"a": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}},
            "here.properties.a.oneOf",
            "use anyOf",
        ),
        ({"items": {"anyOf": [{"type": "null"}, {"pattern": "(?=a)b"}]}}, "here.items.anyOf[1].pattern", "look-around"),
        ({"items": {"pattern": "("}, "type": "array"}, "here.items.pattern", "no regular expression"),
        (
            {"minProperties": 1, "maxProperties": 1, "properties": {"a": {}, "b": {}, "c": {}}},
            "here.minProperties",
            "minProperties",
        ),
        (
            {"type": "integer", "minimum": 5, "maximum": 3},
            "here.minimum",
            "no value can match it: minimum (5) is greater",
        ),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "here", "no value can match it: incompatible types"),
        (
            {"patternProperties": {"a": {"type": "null"}, "b": {}}},
            "here.patternProperties",
            "must not match the same names",
        ),
        (
            {"type": "object", "properties": {f"a{n}": {"type": "string"} for n in range(5000)}},
            "here",
            "is too complex",
        ),
        ({"$defs": {"a": {"pattern": "("}}, "$ref": "#/$defs/a"}, "here", "no regular expression"),
    ],
)
def test_the_compilers_complaints(schema: Any, where: str, says: str) -> None:
    verdict = Trial(MINI.read_text(), ()).verdict(recipe(schema))
    assert (verdict.field, verdict.grammar) == (where, "")
    assert verdict.message.startswith(f"{where}: ") and says in verdict.message


def test_the_part_of_a_frame_with_the_fault_is_named() -> None:
    parts = (("one", Part("schema", '{"type": "integer"}', "a")), ("two", Part("regex", "(", "b")))
    verdict = Trial(MINI.read_text(), ()).verdict(Recipe(parts, "start: @one | @two"))
    assert (verdict.field, verdict.message) == ("b", "b: is no regular expression that is supported")


async def test_a_hostile_schema_is_refused_in_time_while_others_are_served() -> None:
    async with compiler(cpu_s=1.0) as found:
        await found.grammar(recipe({"type": "null"}), "good")
        bad = [asyncio.ensure_future(found.grammar(hostile(seed), "bad")) for seed in range(2)]
        slowest = 0.0
        for number in range(20):
            begin = time.perf_counter()
            await found.grammar(recipe({"const": number}), "good")
            slowest = max(slowest, time.perf_counter() - begin)
        assert not any(job.done() for job in bad) or slowest < 1.0
        for job in bad:
            with pytest.raises(InvalidRequest, match="here: is too complex") as caught:
                await job
            assert (caught.value.field, caught.value.code) == ("here", "schema_too_complex")
        started = found.started
        with pytest.raises(InvalidRequest, match="is too complex"):
            await found.grammar(hostile(1), "bad")
        assert found.started == started
        assert accepts(await found.grammar(recipe({"type": "null"}), "bad"), "null")


async def test_of_many_grammars_the_last_ones_are_remembered() -> None:
    async with compiler() as found:
        for first in range(0, 1_200, 30):
            await asyncio.gather(*(found.grammar(recipe({"const": first + more}), "many") for more in range(30)))
        assert len(found.remembered) == 1_024
        assert found.started == 1


async def test_texts_that_are_too_long_reach_no_helper() -> None:
    async with compiler() as found:
        with pytest.raises(InvalidRequest, match="here: must have at most 1048576"):
            await found.grammar(answer(Part("schema", " " * (1 << 21), "here")), "a")
        assert found.started == 0


async def test_memory_is_bounded() -> None:
    async with compiler(cpu_s=30.0, memory_bytes=64 << 20) as found:
        with pytest.raises(InvalidRequest, match="is too complex"):
            await found.grammar(hostile(), "bad")
        assert accepts(await found.grammar(recipe({"type": "null"}), "bad"), "null")


async def test_more_than_may_wait_are_turned_away() -> None:
    async with compiler() as found:
        jobs = [asyncio.ensure_future(found.grammar(recipe({"const": number}), "many")) for number in range(64)]
        await asyncio.sleep(0)
        assert (await found.grammar(recipe({"const": "other"}), "other")).startswith("{")
        ended = await asyncio.gather(*jobs, return_exceptions=True)
        refused = [error for error in ended if isinstance(error, Overloaded)]
        assert len(refused) == 32 and all(isinstance(text, str) for text in ended if text not in refused)


async def test_a_helper_that_somebody_ends_is_replaced_before_a_client_hears_of_it() -> None:
    async with compiler() as found:
        for number in range(3):
            await found.grammar(recipe({"const": number}), "a")
            for helper in helpers():  # it ends while nothing is asked of it, and its end may not be known yet
                helper.kill()
        assert found.started == 3
        await found.grammar(recipe({"type": "null"}), "a")
        [helper] = helpers()
        helper.suspend()  # so that it ends while it is asked
        asked = asyncio.ensure_future(found.grammar(recipe({"type": "integer"}), "a"))
        await asyncio.sleep(0)
        helper.kill()
        assert accepts(await asked, "-3")
        assert found.started == 5


async def test_a_helper_that_ends_at_its_start_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nmkdir "{tmp_path}/one" && kill -11 $$\nmkdir "{tmp_path}/two" && exit 0\n')
    with python.open("a") as script:
        script.write(f'exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    async with compiler() as found:
        assert accepts(await found.grammar(recipe({"type": "integer"}), "a"), "-3")
        assert found.started == 3


async def test_helpers_that_all_end_at_their_start_are_a_failure_that_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    failed: list[str] = []
    async with open_compiler(MINI, failed=failed.append) as found:
        with pytest.raises(Unavailable, match="can't be compiled now"):
            await found.grammar(recipe({"type": "integer"}), "a")
    assert (failed, found.started) == (["grammars"], 3)


def test_nothing_of_this_process_runs_in_a_helper_before_it_is_one() -> None:
    """gRPC's fork handlers can end a child that was forked while its threads worked."""
    program = """
import asyncio, os, sys, uvloop
from pathlib import Path
from penstock.grammar.compiling import open_compiler
from penstock.grammar.recipe import Part, answer

os.register_at_fork(after_in_child=os.abort)

async def main():
    async with open_compiler(Path(sys.argv[1]), failed=print) as found:
        await found.grammar(answer(Part("schema", "{}", "here")), "a")
        print(found.started)

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program, str(MINI)], capture_output=True, text=True, check=True)
    assert ended.stdout == "1\n"


async def test_whoever_leaves_takes_nothing_with_him() -> None:
    async with compiler() as found:
        one = asyncio.ensure_future(found.grammar(recipe({"type": "null"}), "a"))
        two = asyncio.ensure_future(found.grammar(recipe({"type": "null"}), "a"))
        await asyncio.sleep(0)
        one.cancel()
        assert accepts(await two, "null")
        assert found.started == 1


async def test_ten_thousand_patterns_are_refused_before_they_are_compiled() -> None:
    async with compiler() as found:
        await found.grammar(recipe({"type": "null"}), "a")
        begin = time.perf_counter()
        with pytest.raises(InvalidRequest, match=r"here\.patternProperties: the schema has more than 64"):
            await found.grammar(recipe({"patternProperties": {f"^p{n}_": {} for n in range(10_000)}}), "a")
        assert time.perf_counter() - begin < 2.0
        assert found.started == 1
