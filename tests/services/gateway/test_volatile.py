"""Lines that change with every request don't take the prefix with them, where the operator wants that."""

from __future__ import annotations

import pytest

from penstock.chat.messages import Message
from penstock.gateway.completing.volatile import HEAD_LINES, VolatileLines
from penstock.gateway.request.ask import Conversation, Keep
from penstock.runtime.config import ConfigError

RULES = "You are an agent.\n\nBe brief."
VOLATILE = [
    "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=5f3a1;",
    "Today's date is 2026-11-22.",
    "today is Sunday, 22 November 2026",
    "Current time: 14:03:22 UTC",
    "The current date and time is 2026-11-22T14:03",
    "  - Date: 2026-11-22",
    "[request id: 9f8e-12]",
    "session_id=01J9Z",
    "**Conversation ID:** 77a0",
]
STEADY = [
    "Time: what the user says it is",
    "Date formats follow ISO 8601.",
    "Always say today's date when asked.",
    "Session identifiers are secret.",
    "x-ray images are not supported",
    "Current date: " + "x" * 500,
]


def text(mode: str, system: str, pattern: str = "") -> str:
    prompt = Conversation([Message("system", system), Message("user", "hi")])
    found = VolatileLines(mode, pattern).steady(prompt)
    assert found.messages[1:] == prompt.messages[1:]
    return found.messages[0].content


@pytest.mark.parametrize("line", VOLATILE)
def test_a_volatile_line_goes_behind_the_rest_or_goes(line):
    assert text("keep", f"{line}\n{RULES}") == f"{line}\n{RULES}"
    assert text("move", f"{line}\n{RULES}") == f"{RULES}\n{line}"
    assert text("drop", f"{line}\n{RULES}") == RULES
    assert text("drop", f"You are an agent.\n{line}\n\nBe brief.") == RULES


@pytest.mark.parametrize("line", STEADY)
def test_rules_stay_where_they_are(line):
    for mode in ("move", "drop"):
        assert text(mode, f"{line}\n{RULES}") == f"{line}\n{RULES}"


def test_only_the_head_of_a_system_prompt_is_looked_at():
    deep = "\n".join(["rule"] * HEAD_LINES + ["Today's date is 2026-11-22."])
    assert text("drop", deep) == deep
    user = Conversation([Message("user", VOLATILE[0])])
    assert VolatileLines("drop").steady(user) is user


def test_an_operators_own_pattern():
    assert text("drop", f"build 1234\n{RULES}", r"build \d+") == RULES


def test_what_is_to_be_kept_is_the_same_text():
    messages = [Message("system", f"{VOLATILE[0]}\n{RULES}"), Message("user", "hi")]
    found = VolatileLines("move").steady(Conversation(messages, keeps=[Keep(60, messages[:1])]))
    assert found.keeps[0].upto == found.messages[:1]


async def test_the_next_request_finds_the_prefix(opened):
    async with opened(volatile_lines="drop") as setup:
        prompts = []
        for number in range(2):
            system = f"x-billing: cch={number}\n{RULES * 20}"
            await setup.client.chat.completions.create(
                model="tiny", messages=[{"role": "system", "content": system}, {"role": "user", "content": "hi"}]
            )
            prompts.append(list(setup.mesh.decodes[0].requests[-1].prompt_ids))
        assert prompts[0] == prompts[1]


async def test_bad_settings_are_named(opened):
    for wrong in ({"volatile_lines": "hide"}, {"volatile_pattern": "("}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            async with opened(**wrong):
                pass
